//! Two staging slots that are re-used: one may still be written while the next save stages.
//!
//! Fresh memory costs ten times a copy, so a slot is touched once and kept.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::memory::{Slot, shm_dir, shm_slots, slot_prefix, slots_prefix};
use crate::storage::local::ring_hook;

/// Slots of one checkpointer: staging may run one save ahead of writing.
const SLOTS_MAX: usize = 2;
/// After a failed write the kernel may hold a slot a little longer; then it is let go.
const RELEASE_WAIT: Duration = Duration::from_secs(5);
/// Pause between looks.
const RELEASE_POLL: Duration = Duration::from_millis(2);

/// A staged slot, shared by the slices that are being written.
#[derive(Debug, Clone)]
pub struct Staged(Arc<Slot>);

impl Staged {
    /// Freezes a slot.
    pub fn new(slot: Slot) -> Self {
        Self(Arc::new(slot))
    }

    /// The slot's memory without a copy.
    pub fn bytes(&self) -> Bytes {
        self.0.bytes(0..self.0.len())
    }
}

/// Where a checkpointer's slots are made.
#[derive(Debug, Clone)]
pub struct SlotPlace {
    folder: PathBuf,
    /// Start of the names of this root's slots, of any run.
    root_prefix: String,
    /// Start of the names of this run's and rank's slots.
    prefix: String,
}

impl SlotPlace {
    /// Slots named by user, root, run and rank, in `folder` (default `$DRIVETRAIN_SHM_DIR`).
    /// Without a run id the process is the run.
    pub fn new(folder: Option<PathBuf>, root_hash: u64, run_id: Option<&str>, rank: u32) -> Self {
        let root_prefix = slot_prefix(root_hash);
        let run: String = match run_id {
            Some(id) => {
                id.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
            }
            None => format!("pid{}", std::process::id()),
        };
        let run = &run[..run.len().min(RUN_BYTES_MAX)];
        let prefix = format!("{root_prefix}{run}-{rank}-");
        Self { folder: folder.unwrap_or_else(shm_dir), root_prefix, prefix }
    }

    /// Removes the slots of this root whose owners are gone, and old ones of any root of this
    /// user, whose runs will not come back for them.
    fn remove_stale(&self) {
        let Ok(found) = shm_slots(&self.folder, &slots_prefix()) else { return };
        for file in found.iter().filter(|f| f.stale) {
            if file.name.starts_with(&self.root_prefix) || self.is_old(&file.name) {
                let _ = file.remove_if_stale(&self.folder);
            }
        }
    }

    fn is_old(&self, name: &str) -> bool {
        let modified = self.folder.join(name).metadata().and_then(|meta| meta.modified());
        modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > FOREIGN_AGE_MIN))
    }

    /// A shared slot, or private memory and the reason.
    fn make(&self, bytes: usize) -> Result<(Slot, Option<String>)> {
        let mut reason = None;
        for number in 0..NUMBERS_MAX {
            match Slot::create(&self.folder, &format!("{}{number}", self.prefix), bytes) {
                Ok(slot) => return Ok((slot, None)),
                // The sibling slot, or another checkpointer of this process.
                Err(Error::AlreadyExists { .. }) => {}
                Err(e) => {
                    reason = Some(e.to_string());
                    break;
                }
            }
        }
        Ok((Slot::private(bytes)?, reason.or_else(|| Some("too many slots of this run".into()))))
    }
}

/// Longest part of a run id in a file name.
const RUN_BYTES_MAX: usize = 64;
/// Stale slots of other roots stay this long.
const FOREIGN_AGE_MIN: Duration = Duration::from_hours(24);
/// Slot numbers tried: two per checkpointer, and a process has few of those on one root.
const NUMBERS_MAX: usize = 16;

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
    /// No slots yet; removes those that killed runs left.
    pub fn new(place: SlotPlace, local: bool) -> Self {
        place.remove_stale();
        Self { place, local, state: Mutex::default(), freed: Condvar::new() }
    }

    /// Why staging uses private memory, which does not outlive the process; `None` if it does not.
    pub fn private_reason(&self) -> Option<String> {
        self.state.lock().private_reason.clone()
    }

    /// Deletes the slots that nobody uses; called when the checkpointer is closed.
    pub fn remove_free(&self) {
        let free = std::mem::take(&mut self.state.lock().free);
        for slot in free {
            self.forget();
            let _ = slot.remove();
        }
    }

    /// A slot of at least `bytes`; waits while all are being written.
    pub fn acquire(&self, bytes: usize, deadline: Instant) -> Result<Slot> {
        let started = Instant::now();
        let mut state = self.state.lock();
        loop {
            if let Some(i) = state.free.iter().position(|s| s.capacity() >= bytes) {
                let mut slot = state.free.swap_remove(i);
                slot.set_len(bytes);
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
                return self.make(bytes).inspect_err(|_| self.forget());
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
        let (mut slot, reason) = self.place.make(bytes)?;
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

    /// Takes a slot back once nothing writes from it any more.
    pub fn release(&self, staged: Staged) {
        let mut slot = staged.0;
        let deadline = Instant::now() + RELEASE_WAIT;
        loop {
            match Arc::try_unwrap(slot) {
                Ok(slot) => {
                    self.state.lock().free.push(slot);
                    self.freed.notify_one();
                    return;
                }
                Err(_) if Instant::now() >= deadline => return self.forget(),
                Err(shared) => {
                    slot = shared;
                    thread::sleep(RELEASE_POLL);
                }
            }
        }
    }

    /// Takes an unused slot back.
    pub fn give_back(&self, slot: Slot) {
        self.release(Staged::new(slot));
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
        SlotPlace::new(Some(folder.path().into()), 7, Some("job/1"), 3)
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
        let b = slots.acquire(100, soon()).unwrap();
        assert!(slots.acquire(100, soon()).unwrap_err().to_string().contains("staging slot"));
        let place = a.as_mut_ptr();
        slots.give_back(a);
        let mut again = slots.acquire(4096, soon()).unwrap();
        assert_eq!(again.as_mut_ptr(), place);
        slots.give_back(again);
        let large = slots.acquire(10_000, soon()).unwrap();
        assert_eq!(large.capacity(), 12_288);
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
        let left = Slot::create(folder.path(), &format!("{}dead-0-0", slot_prefix(7)), 9).unwrap();
        drop(left);
        let other = Slot::create(folder.path(), &format!("{}dead-0-0", slot_prefix(8)), 9).unwrap();
        drop(other);
        let again = Slots::new(place(&folder), true);
        assert_eq!(files(&folder).len(), 2, "the live one and the other root's: {folder:?}");
        assert_eq!(again.private_reason(), None);
        let nowhere = SlotPlace::new(Some(folder.path().join("none")), 7, None, 0);
        let slots = Slots::new(nowhere, true);
        assert!(!slots.acquire(100, soon()).unwrap().is_shared());
        assert!(slots.private_reason().is_some());
    }

    #[test]
    fn a_slot_still_being_written_is_not_handed_out() {
        let folder = tempfile::tempdir().unwrap();
        let slots = Slots::new(place(&folder), true);
        let staged = Staged::new(slots.acquire(100, soon()).unwrap());
        let reader = staged.bytes();
        let waiter = thread::scope(|s| {
            let handle = s.spawn(|| slots.release(staged));
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
