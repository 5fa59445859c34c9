//! A disk that forgets: bytes until their file is synced, directory entries until their directory
//! is. Before that a power cut may keep any of an entry's values since the last sync.

/// Attempt folders: the checkpoint to be replaced, and those of up to two jobs.
pub const ATTEMPTS: usize = 3;
/// Data files of a rank.
pub const RANK_FILES: usize = 2;
/// Files of an attempt: those of up to three ranks, then the table.
pub const FILES: usize = 3 * RANK_FILES + 1;
/// Place of the table among them.
pub const TABLE: usize = FILES - 1;

/// A directory entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Entry<T> {
    durable: T,
    pending: Vec<T>,
}

impl<T: Copy + PartialEq> Entry<T> {
    pub fn durable(value: T) -> Self {
        Self { durable: value, pending: Vec::new() }
    }

    /// What a process sees.
    pub fn now(&self) -> T {
        self.pending.last().copied().unwrap_or(self.durable)
    }

    pub fn set(&mut self, value: T) {
        if self.now() != value {
            self.pending.push(value);
        }
    }

    pub fn sync(&mut self) {
        self.durable = self.now();
        self.pending.clear();
    }

    /// What may be there after a power cut now.
    pub fn possible(&self) -> impl Iterator<Item = T> + '_ {
        std::iter::once(self.durable).chain(self.pending.iter().copied())
    }

    pub fn surely(&self, value: T) -> bool {
        self.possible().all(|v| v == value)
    }
}

/// A data file or table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct File {
    pub entry: Entry<bool>,
    pub bytes_durable: bool,
}

/// What a manifest says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Manifest {
    pub attempt: u8,
    /// Bit per file of the attempt.
    pub files: u8,
}

impl Manifest {
    pub fn names(self) -> impl Iterator<Item = usize> {
        (0..FILES).filter(move |f| self.files >> f & 1 == 1)
    }
}

/// The step that is saved, the older one that is there, and the root.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Disk {
    pub files: [[File; FILES]; ATTEMPTS],
    /// Attempts in the step's folder.
    pub attempts: [Entry<bool>; ATTEMPTS],
    /// The step's folder in the root.
    pub step: Entry<bool>,
    pub manifest: Entry<Option<Manifest>>,
    /// Whether the older step is whole.
    pub older: bool,
    /// A step that the save refers to: its manifest, and its data.
    pub referred: [bool; 2],
    /// The mark of the save that refers to it.
    pub mark: bool,
}

impl Disk {
    /// With an older step, or with a committed attempt 0 of the very step.
    pub fn new(replace: bool) -> Self {
        let mut disk = Self {
            files: Default::default(),
            attempts: Default::default(),
            step: Entry::durable(replace),
            manifest: Entry::default(),
            older: !replace,
            referred: [true; 2],
            mark: false,
        };
        if replace {
            let whole = File { entry: Entry::durable(true), bytes_durable: true };
            disk.files[0] = std::array::from_fn(|_| whole.clone());
            disk.attempts[0] = Entry::durable(true);
            let files = (1 << FILES) - 1;
            disk.manifest = Entry::durable(Some(Manifest { attempt: 0, files }));
        }
        disk
    }

    pub fn write(&mut self, attempt: u8, file: usize) {
        self.step.set(true);
        self.attempts[attempt as usize].set(true);
        let file = &mut self.files[attempt as usize][file];
        file.entry.set(true);
        file.bytes_durable = false;
    }

    pub fn remove(&mut self, attempt: u8, file: usize) {
        self.files[attempt as usize][file].entry.set(false);
    }

    pub fn sync_attempt(&mut self, attempt: u8) {
        self.files[attempt as usize].iter_mut().for_each(|f| f.entry.sync());
    }

    pub fn sync_step(&mut self) {
        self.attempts.iter_mut().for_each(Entry::sync);
        self.manifest.sync();
    }

    /// Whether what `manifest` names survives a power cut.
    pub fn whole(&self, manifest: Manifest) -> bool {
        let attempt = manifest.attempt as usize;
        self.attempts[attempt].surely(true)
            && manifest.names().all(|f| {
                let file = &self.files[attempt][f];
                file.bytes_durable && file.entry.surely(true)
            })
    }

    /// Whether `attempt`'s commit survives a power cut.
    pub fn committed(&self, attempt: u8) -> bool {
        self.step.surely(true)
            && self.manifest.possible().all(|m| m.is_some_and(|m| m.attempt == attempt))
            && self.manifest.now().is_some_and(|m| self.whole(m))
    }
}
