//! Two staging slots that are re-used: one may still be written while the next save stages.
//!
//! Fresh memory costs ten times a copy, so a slot is touched once and kept.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use xxhash_rust::xxh3::xxh3_64;

use super::ImageSums;
use super::seal::{DATA_START, is_sealed, set_session, wipe};
use crate::error::{Error, Result};
use crate::memory::{Slot, SlotFile, shm_dir, shm_slots, slot_prefix, slots_prefix};
use crate::storage::local::ring_hook;

/// Slots of one checkpointer: staging may run one save ahead of writing.
const SLOTS_MAX: usize = 2;
/// After a failed write the kernel may hold a slot a little longer; then it is let go.
const RELEASE_WAIT: Duration = Duration::from_secs(5);
/// Pause between looks.
const RELEASE_POLL: Duration = Duration::from_millis(2);

/// A staged slot, shared by the slices that are being written.
#[derive(Debug, Clone)]
pub struct Staged {
    slot: Arc<Slot>,
    sums: Arc<ImageSums>,
}

impl Staged {
    /// Freezes a slot whose images' parts have these checksums.
    pub fn new(slot: Slot, sums: ImageSums) -> Self {
        Self { slot: Arc::new(slot), sums: Arc::new(sums) }
    }

    /// The images without a copy.
    pub fn bytes(&self) -> Bytes {
        self.slot.bytes(DATA_START..self.slot.len())
    }

    /// Bytes of the slot in use.
    pub fn len(&self) -> usize {
        self.slot.len()
    }

    /// Checksums of the parts of image `i`: its header, then its entries.
    pub fn sums(&self, i: usize) -> &[u32] {
        self.sums.get(i).map_or(&[], Vec::as_slice)
    }

    /// The slot, once nothing reads from it any more.
    pub fn into_slot(self) -> Option<Slot> {
        let mut slot = self.slot;
        let deadline = Instant::now() + RELEASE_WAIT;
        loop {
            match Arc::try_unwrap(slot) {
                Ok(slot) => return Some(slot),
                Err(_) if Instant::now() >= deadline => return None,
                Err(shared) => {
                    slot = shared;
                    thread::sleep(RELEASE_POLL);
                }
            }
        }
    }

    /// Notes the number of the session in which the ranks met.
    pub fn set_session(&self, session: u64) {
        set_session(&self.slot, session);
    }
}

/// Where a checkpointer's slots are made, and whose they are.
#[derive(Debug, Clone)]
pub struct SlotPlace {
    /// Folder of the slots.
    pub folder: PathBuf,
    /// Start of the names of this root's slots, of any run.
    root_prefix: String,
    /// The run, as it stands in names.
    pub run: String,
    /// What tells this root from a later one of the same name; none means that slots found in
    /// `folder` cannot be trusted to belong here.
    pub root: Option<String>,
    /// This process.
    pub rank: u32,
    /// Ranks that save together.
    pub world_size: u32,
}

impl SlotPlace {
    /// Slots named by user, root, run and rank, in `folder` (default `$DRIVETRAIN_SHM_DIR`). `root`
    /// is the checkpoint root's name.
    pub fn new(
        folder: Option<PathBuf>,
        root: &str,
        run_id: Option<&str>,
        rank: u32,
        world_size: u32,
    ) -> Self {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
        let mut run: String = run_id.unwrap_or(DEFAULT_RUN).chars().map(plain).collect();
        if run.len() > RUN_BYTES_MAX {
            let whole = xxh3_64(run.as_bytes());
            run = format!("{}{whole:016x}", &run[..RUN_BYTES_MAX - 16]);
        }
        let root_prefix = slot_prefix(xxh3_64(root.as_bytes()));
        let root = run_id.map(|_| "named".into());
        let folder = folder.unwrap_or_else(shm_dir);
        Self { folder, root_prefix, run, root, rank, world_size }
    }

    /// The same, for a root that is this local folder.
    #[must_use]
    pub fn at_root(mut self, folder: Option<&Path>) -> Self {
        self.root = folder.and_then(folder_identity).or(self.root);
        self
    }

    /// Start of the names of a rank's slots.
    pub fn prefix(&self, rank: u32) -> String {
        format!("{}{rank}-", self.run_prefix())
    }

    /// Start of the names of this run's slots, of any rank.
    pub fn run_prefix(&self) -> String {
        format!("{}{}-", self.root_prefix, self.run)
    }

    /// Files of this root's slots, of any run and rank.
    pub fn files(&self) -> Vec<SlotFile> {
        shm_slots(&self.folder, &self.root_prefix).unwrap_or_default()
    }

    /// Removes slots whose owners are gone and will not be followed: those of other runs, when they
    /// are `age_min` old. Those of this run are left for the ranks they belong to.
    fn remove_stale(&self, age_min: Duration) {
        let Ok(found) = shm_slots(&self.folder, &slots_prefix()) else { return };
        let own = self.run_prefix();
        for file in found.iter().filter(|f| f.stale && !f.name.starts_with(&own)) {
            if self.is_old(&file.name, age_min) {
                let _ = file.remove_if_stale(&self.folder);
            }
        }
    }

    fn is_old(&self, name: &str, age_min: Duration) -> bool {
        let modified = self.folder.join(name).symlink_metadata().and_then(|meta| meta.modified());
        modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= age_min))
    }

    /// A shared slot, or private memory and the reason.
    fn make(&self, bytes: usize) -> Result<(Slot, Option<String>)> {
        let mut made = self.make_shared(bytes);
        if matches!(made, Err(Error::NoSpace { .. })) {
            // What killed runs left is worth less than a snapshot that outlives this one.
            self.remove_stale(Duration::ZERO);
            made = self.make_shared(bytes);
        }
        match made {
            Ok(slot) => Ok((slot, None)),
            Err(reason) => Ok((Slot::private(bytes)?, Some(reason.to_string()))),
        }
    }

    fn make_shared(&self, bytes: usize) -> Result<Slot> {
        for number in 0..NUMBERS_MAX {
            let name = format!("{}{number}", self.prefix(self.rank));
            match Slot::create(&self.folder, &name, bytes) {
                // The sibling slot, or another checkpointer of this process.
                Err(Error::AlreadyExists { .. }) => {}
                made => return made,
            }
        }
        Err(Error::AlreadyExists {
            what: format!("{NUMBERS_MAX} slots of this run"),
            advice: "give each run an id of its own".into(),
        })
    }
}

/// What tells a folder from a later one of the same path.
fn folder_identity(folder: &Path) -> Option<String> {
    let meta = std::fs::metadata(folder).ok()?;
    // Inodes are used again soon; the time of birth is not.
    let born = meta.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Some(format!("{}-{}-{}", meta.dev(), meta.ino(), born.unwrap_or_default().as_nanos()))
}

/// The run of a checkpointer without a run id.
const DEFAULT_RUN: &str = "default";
/// Longest part of a run id in a file name.
const RUN_BYTES_MAX: usize = 64;
/// Stale slots of other runs stay this long, unless their room is needed.
const FOREIGN_AGE_MIN: Duration = Duration::from_hours(24);
/// Slot numbers tried: two per checkpointer, and a process has few of those on one root.
const NUMBERS_MAX: usize = 16;
/// Room beyond what a slot needs when it is made, and the part of that by which it grows: records
/// of loaders and counters get longer, and a slot that is too small is made anew.
const SPARE_BYTES_MIN: usize = 64 << 10;
const SPARE_PART: usize = 64;

#[derive(Debug, Default)]
struct State {
    free: Vec<Slot>,
    made: usize,
    private_reason: Option<String>,
}

/// The slots of one checkpointer.
#[derive(Debug)]
pub struct Slots {
    place: SlotPlace,
    /// Slots are written to local files: their memory is registered with the rings.
    local: bool,
    state: Mutex<State>,
    freed: Condvar,
}

impl Slots {
    /// No slots yet; removes those that other killed runs left long ago.
    pub fn new(place: SlotPlace, local: bool) -> Self {
        place.remove_stale(FOREIGN_AGE_MIN);
        Self { place, local, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Why staging uses private memory, which does not outlive the process; `None` if it does not.
    pub fn private_reason(&self) -> Option<String> {
        self.state.lock().private_reason.clone()
    }

    /// Where the slots are made.
    pub fn place(&self) -> &SlotPlace {
        &self.place
    }

    /// Deletes the slots that nobody uses; called when the checkpointer is closed. One with a
    /// snapshot that could not be committed stays for the next process of this run.
    pub fn remove_free(&self) {
        let free = std::mem::take(&mut self.state.lock().free);
        for slot in free {
            self.forget();
            if !is_sealed(&slot) {
                let _ = slot.remove();
            }
        }
    }

    /// A wiped slot of at least `bytes`; waits while all are being written.
    pub fn acquire(&self, bytes: usize, deadline: Instant) -> Result<Slot> {
        let started = Instant::now();
        let mut state = self.state.lock();
        loop {
            if let Some(i) = state.free.iter().position(|s| s.capacity() >= bytes) {
                let mut slot = state.free.swap_remove(i);
                drop(state);
                slot.set_len(bytes);
                wipe(&mut slot);
                return Ok(slot);
            }
            // One that is too small makes room for one that fits.
            if let Some(small) = state.free.pop() {
                state.made -= 1;
                let _ = small.remove();
            }
            if state.made < SLOTS_MAX {
                state.made += 1;
                drop(state);
                let mut slot = self.make(bytes).inspect_err(|_| self.forget())?;
                slot.set_len(bytes);
                wipe(&mut slot);
                return Ok(slot);
            }
            if self.freed.wait_until(&mut state, deadline).timed_out() {
                return Err(Error::Timeout {
                    what: format!("a free staging slot ({SLOTS_MAX} saves are being written)"),
                    waited: started.elapsed(),
                    advice: "save less often, or wait() for an earlier save".into(),
                });
            }
        }
    }

    fn make(&self, bytes: usize) -> Result<Slot> {
        let spare = (bytes / SPARE_PART).max(SPARE_BYTES_MIN);
        let (mut slot, reason) = self.place.make(bytes + spare)?;
        if self.local
            && let Some(hook) = ring_hook()
        {
            // Memory that cannot be registered is written all the same; `stats()` says why.
            let _ = slot.pin(hook);
        }
        if let Some(reason) = reason {
            tracing::warn!(%reason, "staging in private memory, which does not outlive a kill");
            self.state.lock().private_reason = Some(reason);
        }
        Ok(slot)
    }

    /// Takes a slot back once nothing writes from it any more. If `keep`, what it holds can still
    /// be adopted until the next save uses it.
    pub fn release(&self, staged: Staged, keep: bool) {
        let Some(mut slot) = staged.into_slot() else { return self.forget() };
        if !keep {
            wipe(&mut slot);
        }
        self.state.lock().free.push(slot);
        self.freed.notify_one();
    }

    /// Takes an unused slot back.
    pub fn give_back(&self, slot: Slot) {
        self.release(Staged::new(slot, Vec::new()), false);
    }

    /// Counts a slot that was made by another process, and freezes it.
    pub fn take_in(&self, slot: Slot, sums: ImageSums) -> Staged {
        self.state.lock().made += 1;
        Staged::new(slot, sums)
    }

    fn forget(&self) {
        self.state.lock().made -= 1;
        self.freed.notify_one();
    }

    /// Makes and touches slots of `bytes` until there are `count`, without taking those there are.
    pub fn prepare(&self, bytes: usize, count: usize) {
        for _ in 0..count.min(SLOTS_MAX) {
            {
                let mut state = self.state.lock();
                if state.made >= count.min(SLOTS_MAX) {
                    return;
                }
                state.made += 1;
            }
            match self.make(bytes) {
                Ok(slot) => {
                    slot.warm();
                    self.give_back(slot);
                }
                // The save that needs it will say why.
                Err(_) => return self.forget(),
            }
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.remove_free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(folder: &tempfile::TempDir) -> SlotPlace {
        SlotPlace::new(Some(folder.path().into()), "/root", Some("job/1"), 3, 4)
    }

    fn files(folder: &tempfile::TempDir) -> Vec<String> {
        shm_slots(folder.path(), "").unwrap().into_iter().map(|f| f.name).collect()
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[test]
    fn two_slots_and_no_more_are_made_and_used_again() {
        let folder = tempfile::tempdir().unwrap();
        let slots = Slots::new(place(&folder), true);
        let mut a = slots.acquire(100, soon()).unwrap();
        let first = a.capacity();
        assert!(first > 2 * SPARE_BYTES_MIN / 2 && a.len() == 100);
        let b = slots.acquire(100, soon()).unwrap();
        assert!(slots.acquire(100, soon()).unwrap_err().to_string().contains("staging slot"));
        let place = a.as_mut_ptr();
        slots.give_back(a);
        let mut again = slots.acquire(first, soon()).unwrap();
        assert_eq!(again.as_mut_ptr(), place);
        slots.give_back(again);
        let large = slots.acquire(first + 1, soon()).unwrap();
        assert!(large.capacity() > first);
        slots.give_back(large);
        slots.give_back(b);
        assert!(files(&folder).iter().all(|f| f.contains("job_1-3-")), "{:?}", files(&folder));
        drop(slots);
        assert!(files(&folder).is_empty());
    }

    #[test]
    fn stale_slots_go_and_a_full_folder_means_private_memory() {
        let folder = tempfile::tempdir().unwrap();
        let slots = Slots::new(place(&folder), true);
        std::mem::forget(slots.acquire(100, soon()).unwrap());
        assert_eq!(files(&folder).len(), 1);
        let leave = |name: &str| drop(Slot::create(folder.path(), name, 9).unwrap());
        let other_run = format!("{}dead-0-0", slot_prefix(xxh3_64(b"/root")));
        leave(&other_run);
        leave(&format!("{}dead-0-0", slot_prefix(8)));
        leave(&format!("{}0", place(&folder).prefix(2)));
        let again = Slots::new(place(&folder), true);
        assert_eq!(files(&folder).len(), 4, "nothing is old: {folder:?}");
        let old = std::time::SystemTime::now() - 2 * FOREIGN_AGE_MIN;
        for file in std::fs::read_dir(folder.path()).unwrap() {
            let file = std::fs::File::open(file.unwrap().path()).unwrap();
            file.set_modified(old).unwrap();
        }
        drop(Slots::new(place(&folder), true));
        assert_eq!(files(&folder).len(), 2, "the live one and that of this run's other rank");
        leave(&other_run);
        again.place.remove_stale(Duration::ZERO);
        assert_eq!(files(&folder).len(), 2);
        assert_eq!(again.private_reason(), None);
        let nowhere = SlotPlace::new(Some(folder.path().join("none")), "/root", None, 0, 1);
        let slots = Slots::new(nowhere, true);
        assert!(!slots.acquire(100, soon()).unwrap().is_shared());
        assert!(slots.private_reason().is_some());
    }

    #[test]
    fn a_slot_still_being_written_is_not_handed_out() {
        let folder = tempfile::tempdir().unwrap();
        let slots = Slots::new(place(&folder), true);
        let slot = slots.acquire(2 * DATA_START, soon()).unwrap();
        let staged = Staged::new(slot, Vec::new());
        let reader = staged.bytes();
        let waiter = thread::scope(|s| {
            let handle = s.spawn(|| slots.release(staged, false));
            thread::sleep(Duration::from_millis(10));
            assert!(slots.state.lock().free.is_empty());
            drop(reader);
            handle.join()
        });
        waiter.unwrap();
        assert_eq!(slots.state.lock().free.len(), 1);
    }

    #[test]
    fn prepared_slots_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let slots = Slots::new(place(&folder), true);
        slots.prepare(10_000, 2);
        assert_eq!(slots.state.lock().free.len(), 2);
        slots.prepare(10_000, 2);
        assert_eq!(slots.state.lock().made, 2);
    }
}
