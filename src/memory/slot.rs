//! Memory for one staged snapshot: a file in shared memory that outlives a killed process, or
//! private memory where that has no room.
//!
//! A shared slot is a file of mode 0600 in `$DRIVETRAIN_SHM_DIR` (default `/dev/shm`) named
//! `drivetrain-<uid>-<what>`. Its pages are reserved when it is made, so that a full file system is
//! an error here and not a signal later. The owner holds a file lock for as long as the slot is
//! open; the kernel drops it when the owner dies, however it dies, which tells stale slots from
//! live ones also across containers, where process ids mean nothing.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags, fallocate, flock};

use super::PAGE_BYTES;
use super::mapping::Mapping;
use super::pin::{PinHook, Pinned};
use crate::error::{Error, Result};

/// Environment variable that names the folder of shared slots.
pub const SHM_DIR_ENV: &str = "DRIVETRAIN_SHM_DIR";
/// Longest file name the kernel takes.
const NAME_BYTES_MAX: usize = 255;
/// Tries to create a slot whose file is taken for stale meanwhile.
const CREATE_TRIES_MAX: usize = 5;
/// Tries to lock a slot, and the pause between them.
const LOCK_TRIES_MAX: usize = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// The folder of shared slots.
pub fn shm_dir() -> PathBuf {
    std::env::var_os(SHM_DIR_ENV).map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from)
}

/// Start of the names of all slots of this user: `drivetrain-<uid>-`.
pub fn slots_prefix() -> String {
    format!("drivetrain-{}-", rustix::process::geteuid().as_raw())
}

/// Start of the names of one checkpoint folder's slots; append run id, rank and slot number.
pub fn slot_prefix(root_hash: u64) -> String {
    format!("{}{root_hash:016x}-", slots_prefix())
}

/// Page-aligned memory of one snapshot. Dropping it unmaps it and leaves the file of a shared slot
/// for adoption; [`Slot::remove`] deletes the file too.
#[derive(Debug)]
pub struct Slot {
    /// Hooks that know the memory; dropped, and thereby told, before it is unmapped.
    pins: Vec<Pinned>,
    map: Mapping,
    len: usize,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    Shared {
        path: PathBuf,
        /// Open, and thereby locked, for as long as the slot lives.
        _lock: File,
    },
    Private,
}

/// A slot's file found in the folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotFile {
    /// Name, starting with [`slots_prefix`].
    pub name: String,
    /// Size.
    pub bytes: u64,
    /// No process holds it: its owner is gone.
    pub stale: bool,
}

impl Slot {
    /// Creates a shared slot of `bytes` in `folder`; the name must not exist.
    ///
    /// [`Error::NoSpace`] says that the file system has no room: use [`Slot::private`] then.
    pub fn create(folder: &Path, name: &str, bytes: usize) -> Result<Self> {
        let path = slot_path(folder, name)?;
        let mapped = bytes.max(1).next_multiple_of(PAGE_BYTES);
        enough_space(&path, folder, mapped as u64)?;
        let file = create_locked(&path)?;
        let made = reserve_and_map(&file, &path, mapped);
        match made {
            Ok(map) => Ok(Self {
                pins: Vec::new(),
                map,
                len: bytes,
                backing: Backing::Shared { path, _lock: file },
            }),
            Err(e) => {
                let _ = std::fs::remove_file(&path);
                Err(e)
            }
        }
    }

    /// Opens the shared slot of a process that is gone, all of its file.
    pub fn open(folder: &Path, name: &str) -> Result<Self> {
        let path = slot_path(folder, name)?;
        let io = |e| Error::io("open slot", path.display().to_string(), e);
        let file = open_safely(&path, true).map_err(io)?;
        lock(&file, &path)?;
        let len = file.metadata().map_err(io)?.len() as usize;
        if len == 0 {
            let advice = "it was being made when its owner died; remove it";
            return Err(Error::corrupt(path.display().to_string(), 0, "a page", "nothing", advice));
        }
        let map = Mapping::shared(&file, len).map_err(io)?;
        Ok(Self { pins: Vec::new(), map, len, backing: Backing::Shared { path, _lock: file } })
    }

    /// Private memory with the same use, lost when the process ends.
    pub fn private(bytes: usize) -> Result<Self> {
        let map = Mapping::anonymous(bytes, true)
            .map_err(|e| Error::io("map", format!("a slot of {bytes} bytes"), e))?;
        Ok(Self { pins: Vec::new(), map, len: bytes, backing: Backing::Private })
    }

    /// A slot of at least `bytes`: this one if it has them, else a new one under the same name.
    pub fn grown(self, bytes: usize) -> Result<Self> {
        if bytes <= self.map.len() {
            return Ok(Self { len: bytes, ..self });
        }
        let Backing::Shared { path, .. } = &self.backing else {
            drop(self);
            return Self::private(bytes);
        };
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
        self.remove()?;
        Self::create(&folder, &name.unwrap_or_default(), bytes)
    }

    /// Shows the memory to a hook, until the slot is dropped. The hook may hold on to its pages:
    /// nobody may cut or punch the file of a shared slot afterwards.
    pub fn pin(&mut self, hook: Arc<dyn PinHook>) -> Result<()> {
        // SAFETY: the map lives as long as `pins`, and whoever moves bytes of it keeps the slot.
        let pinned = unsafe { Pinned::new(hook, self.map.ptr(), self.map.len()) }?;
        self.pins.push(pinned);
        Ok(())
    }

    /// Bytes that can be used without a new slot.
    pub fn capacity(&self) -> usize {
        self.map.len()
    }

    /// Sets how many bytes count, at most the capacity.
    pub fn set_len(&mut self, bytes: usize) {
        self.len = bytes.min(self.map.len());
    }

    /// Whether it is a file in shared memory.
    pub fn is_shared(&self) -> bool {
        matches!(self.backing, Backing::Shared { .. })
    }

    /// File of a shared slot.
    pub fn path(&self) -> Option<&Path> {
        match &self.backing {
            Backing::Shared { path, .. } => Some(path),
            Backing::Private => None,
        }
    }

    /// Touches all pages, once, so that a copy into it runs at full speed. Two threads share the
    /// work: page faults of one map scale to that.
    pub fn warm(&self) {
        let half = self.map.len() / 2;
        std::thread::scope(|scope| {
            scope.spawn(|| self.map.warm_range(0, half));
            self.map.warm_range(half, self.map.len());
        });
    }

    /// First byte; page-aligned.
    pub fn as_ptr(&self) -> *const u8 {
        self.map.ptr().as_ptr()
    }

    /// First byte, for writers that fill disjoint parts at the same time.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.ptr().as_ptr()
    }

    /// A part as bytes that keep the slot alive, without a copy. `Arc::get_mut` succeeds again when
    /// all of them are gone. The range is cut to the length.
    pub fn bytes(self: &Arc<Self>, range: Range<usize>) -> Bytes {
        let end = range.end.min(self.len);
        let start = range.start.min(end);
        Bytes::from_owner(Part { slot: Arc::clone(self), start, end })
    }

    /// Deletes the file and unmaps the memory.
    pub fn remove(self) -> Result<()> {
        match &self.backing {
            Backing::Private => Ok(()),
            Backing::Shared { path, .. } => match std::fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    Err(Error::io("remove slot", path.display().to_string(), e))
                }
                _ => Ok(()),
            },
        }
    }
}

struct Part {
    slot: Arc<Slot>,
    start: usize,
    end: usize,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.slot[self.start..self.end]
    }
}

impl Deref for Slot {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` is at most the map's length, and the map is initialised. The lock keeps
        // other instances of this program out of a shared file.
        unsafe { std::slice::from_raw_parts(self.map.ptr().as_ptr(), self.len) }
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.map.ptr().as_ptr(), self.len) }
    }
}

/// All slots of this user in `folder` whose name starts with `prefix`, sorted by name.
pub fn shm_slots(folder: &Path, prefix: &str) -> Result<Vec<SlotFile>> {
    let io = |e| Error::io("list slots", folder.display().to_string(), e);
    let own = slots_prefix();
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let entry = entry.map_err(io)?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !name.starts_with(&own) || !name.starts_with(prefix) {
            continue;
        }
        // Removed since it was listed, or nothing that this program made: not a slot.
        let Ok(file) = open_safely(&entry.path(), false) else { continue };
        let bytes = file.metadata().map_err(io)?.len();
        let stale = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
        found.push(SlotFile { name, bytes, stale });
    }
    found.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

impl SlotFile {
    /// Deletes the file if its owner is gone; says whether it did.
    pub fn remove_if_stale(&self, folder: &Path) -> Result<bool> {
        let path = slot_path(folder, &self.name)?;
        let Ok(file) = open_safely(&path, false) else { return Ok(false) };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Ok(false);
        }
        std::fs::remove_file(&path)
            .map(|()| true)
            .map_err(|e| Error::io("remove slot", path.display().to_string(), e))
    }
}

/// Opens a file only if this program can have made it: shared folders are open to all users, who
/// may put links, pipes and files of their own under the names of our slots.
fn open_safely(path: &Path, write: bool) -> io::Result<File> {
    // Non-blocking, since opening a pipe would wait for its other end.
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mut options = OpenOptions::new();
    let file = options.read(true).write(write).custom_flags(flags.bits() as i32).open(path)?;
    let meta = file.metadata()?;
    let own = meta.uid() == rustix::process::geteuid().as_raw();
    if !meta.is_file() || !own || meta.mode() & 0o077 != 0 || meta.nlink() > 1 {
        return Err(io::Error::other("not a plain file of this user alone"));
    }
    Ok(file)
}

fn slot_path(folder: &Path, name: &str) -> Result<PathBuf> {
    let own = slots_prefix();
    let good = name.starts_with(&own) && !name.contains(['/', '\0']);
    if !good || name.len() > NAME_BYTES_MAX {
        let expected = format!("a file name of at most {NAME_BYTES_MAX} bytes from {own:?} on");
        return Err(Error::invalid("slot name", expected, format!("{name:?}")));
    }
    Ok(folder.join(name))
}

fn enough_space(path: &Path, folder: &Path, need_bytes: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(folder)
        .map_err(|e| Error::io("statvfs", folder.display().to_string(), e.into()))?;
    let have_bytes = stat.f_bavail.saturating_mul(stat.f_frsize);
    if have_bytes >= need_bytes {
        return Ok(());
    }
    Err(Error::NoSpace { path: path.display().to_string(), need_bytes, have_bytes })
}

fn reserve_and_map(file: &File, path: &Path, bytes: usize) -> Result<Mapping> {
    use rustix::io::Errno;
    match fallocate(file, FallocateFlags::empty(), 0, bytes as u64) {
        Ok(()) => {}
        Err(Errno::NOSPC) => {
            let path = path.display().to_string();
            return Err(Error::NoSpace { path, need_bytes: bytes as u64, have_bytes: 0 });
        }
        Err(e) => return Err(Error::io("reserve slot", path.display().to_string(), e.into())),
    }
    Mapping::shared(file, bytes).map_err(|e| Error::io("map slot", path.display().to_string(), e))
}

/// Creates and locks the file. A cleaner may take it for stale in the moment between, so it is made
/// again if its name is gone.
fn create_locked(path: &Path) -> Result<File> {
    for _ in 0..CREATE_TRIES_MAX {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|e| creation_error(path, e))?;
        if let Err(e) = lock(&file, path) {
            let _ = std::fs::remove_file(path);
            return Err(e);
        }
        let inode = |meta: std::fs::Metadata| meta.ino();
        let own = file.metadata().map(inode).ok();
        if own.is_some() && own == std::fs::metadata(path).map(inode).ok() {
            return Ok(file);
        }
    }
    let advice = "something removes slots while they are made; look for other runs".into();
    Err(Error::NotFound { what: format!("new slot {}", path.display()), advice })
}

fn creation_error(path: &Path, e: io::Error) -> Error {
    if e.kind() == io::ErrorKind::AlreadyExists {
        return Error::AlreadyExists {
            what: format!("slot {}", path.display()),
            advice: "another process uses it, or it is stale: adopt or remove it".into(),
        };
    }
    Error::io("create slot", path.display().to_string(), e)
}

fn lock(file: &File, path: &Path) -> Result<()> {
    let mut last = None;
    for _ in 0..LOCK_TRIES_MAX {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(e) => last = Some(e),
        }
        // Someone who lists slots holds the lock for an instant.
        std::thread::sleep(LOCK_PAUSE);
    }
    let source = last.map_or_else(|| io::Error::other("locked"), io::Error::from);
    let advice = "another process uses this slot; give this run an id of its own".into();
    Err(Error::Io { op: "lock slot", path: path.display().to_string(), source, advice })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(what: &str) -> String {
        format!("{}test-{what}-{}", slots_prefix(), std::process::id())
    }

    #[test]
    fn names_stay_in_the_folder_and_in_the_users_namespace() {
        let folder = tempfile::tempdir().unwrap();
        for bad in ["x", "drivetrain-", &format!("{}../x", slots_prefix())] {
            assert!(matches!(Slot::create(folder.path(), bad, 1), Err(Error::Invalid { .. })));
        }
    }

    #[test]
    fn a_slot_is_private_to_the_user_and_locked_while_open() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let name = name("locked");
        let mut slot = Slot::create(folder.path(), &name, 10_000).unwrap();
        slot.warm();
        slot[9_999] = 7;
        let mode = std::fs::metadata(slot.path().unwrap()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(Slot::open(folder.path(), &name), Err(Error::Io { .. })));
        let listed = shm_slots(folder.path(), "").unwrap();
        assert_eq!((listed.len(), listed[0].stale, listed[0].bytes), (1, false, 12_288));
        assert!(!listed[0].remove_if_stale(folder.path()).unwrap());
        drop(slot);
        let listed = shm_slots(folder.path(), &slots_prefix()).unwrap();
        assert!(listed[0].stale);
        assert_eq!(Slot::open(folder.path(), &name).unwrap()[9_999], 7);
        assert!(listed[0].remove_if_stale(folder.path()).unwrap());
        assert!(shm_slots(folder.path(), "").unwrap().is_empty());
    }

    #[test]
    fn what_others_put_under_a_slots_name_is_left_alone() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |what: &str| folder.path().join(name(what));
        std::fs::write(folder.path().join("victim"), b"precious").unwrap();
        symlink(folder.path().join("victim"), at("link")).unwrap();
        std::fs::hard_link(folder.path().join("victim"), at("hard")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("pipe"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        std::fs::write(at("open"), [0; 4096]).unwrap();
        std::fs::set_permissions(at("open"), std::fs::Permissions::from_mode(0o644)).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        assert_eq!(shm_slots(folder.path(), "").unwrap(), []);
        for what in ["link", "hard", "pipe", "open", "folder"] {
            assert!(Slot::open(folder.path(), &name(what)).is_err(), "{what}");
            let file = SlotFile { name: name(what), bytes: 0, stale: true };
            assert!(!file.remove_if_stale(folder.path()).unwrap(), "{what}");
            assert!(at(what).symlink_metadata().is_ok(), "{what}");
            assert!(Slot::create(folder.path(), &name(what), 1).is_err(), "{what}");
        }
        assert_eq!(std::fs::read(folder.path().join("victim")).unwrap(), b"precious");
    }

    #[test]
    fn parts_keep_the_slot_and_growth_keeps_the_name() {
        let folder = tempfile::tempdir().unwrap();
        for slot in [Slot::create(folder.path(), &name("grow"), 100), Slot::private(100)] {
            let mut slot = Arc::new(slot.unwrap());
            Arc::get_mut(&mut slot).unwrap().copy_from_slice(&[9; 100]);
            let part = slot.bytes(90..1000);
            assert_eq!(&part[..], &[9; 10]);
            assert!(Arc::get_mut(&mut slot).is_none());
            drop(part);
            let path = slot.path().map(Path::to_path_buf);
            let grown = Arc::into_inner(slot).unwrap().grown(1 << 20).unwrap();
            assert_eq!((grown.len(), grown.path()), (1 << 20, path.as_deref()));
            grown.remove().unwrap();
            assert!(path.is_none_or(|p| !p.exists()));
        }
    }

    #[test]
    fn a_full_file_system_is_told_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let error = Slot::create(folder.path(), &name("huge"), 1 << 60).unwrap_err();
        assert!(matches!(error, Error::NoSpace { need_bytes, .. } if need_bytes == 1 << 60));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
