//! Two staging slots that are re-used: one may still be written while the next save stages.
//!
//! Fresh memory costs ten times a copy, so a slot is touched once and kept.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use memmap2::MmapMut;
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::memory::PAGE_BYTES;

/// Slots of one checkpointer: staging may run one save ahead of writing.
const SLOTS_MAX: usize = 2;
/// After a failed write the kernel may hold a slot a little longer; then it is let go.
const RELEASE_WAIT: Duration = Duration::from_secs(5);
/// Pause between looks.
const RELEASE_POLL: Duration = Duration::from_millis(2);

/// Page-aligned memory that a state is staged in.
#[derive(Debug)]
pub struct Slot {
    map: MmapMut,
}

impl Slot {
    /// Anonymous memory of this process.
    pub fn private(bytes: usize) -> Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let map = MmapMut::map_anon(bytes)
            .map_err(|e| Error::io("map memory for a staging slot", format!("{bytes} bytes"), e))?;
        Ok(Self { map })
    }

    /// Bytes it can hold.
    pub fn capacity(&self) -> usize {
        self.map.len()
    }

    /// Start of the memory.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// All of it.
    pub fn as_slice(&self) -> &[u8] {
        &self.map
    }
}

/// A staged slot, shared by the slices that are being written.
#[derive(Debug, Clone)]
pub struct Staged(Arc<Slot>);

impl AsRef<[u8]> for Staged {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}

impl Staged {
    /// Freezes a slot.
    pub fn new(slot: Slot) -> Self {
        Self(Arc::new(slot))
    }

    /// The slot's memory without a copy.
    pub fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Slot>,
    made: usize,
}

/// The slots of one checkpointer.
#[derive(Debug, Default)]
pub struct Slots {
    state: Mutex<State>,
    freed: Condvar,
}

impl Slots {
    /// A slot of at least `bytes`; waits while all are being written.
    pub fn acquire(&self, bytes: usize, deadline: Instant) -> Result<Slot> {
        let started = Instant::now();
        let mut state = self.state.lock();
        loop {
            if let Some(i) = state.free.iter().position(|s| s.capacity() >= bytes) {
                return Ok(state.free.swap_remove(i));
            }
            // One that is too small makes room for one that fits.
            if state.made == SLOTS_MAX && state.free.pop().is_some() {
                state.made -= 1;
            }
            if state.made < SLOTS_MAX {
                state.made += 1;
                drop(state);
                return Slot::private(bytes).inspect_err(|_| self.forget());
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

    /// Makes and touches slots of `bytes` ahead of the first save, up to `count`.
    pub fn prepare(&self, bytes: usize, count: usize) {
        let deadline = Instant::now();
        let mut held = Vec::new();
        for _ in 0..count.min(SLOTS_MAX) {
            let Ok(mut slot) = self.acquire(bytes, deadline) else { break };
            touch(&mut slot);
            held.push(slot);
        }
        for slot in held {
            self.give_back(slot);
        }
    }
}

/// Writes one byte per page, so that the page exists before the trainer waits for it.
fn touch(slot: &mut Slot) {
    for page in slot.map.chunks_mut(PAGE_BYTES) {
        page[0] = std::hint::black_box(page[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[test]
    fn two_slots_and_no_more_are_made_and_used_again() {
        let slots = Slots::default();
        let mut a = slots.acquire(100, soon()).unwrap();
        let b = slots.acquire(100, soon()).unwrap();
        assert!(slots.acquire(100, soon()).unwrap_err().to_string().contains("staging slot"));
        let place = a.as_mut_ptr();
        slots.give_back(a);
        let mut again = slots.acquire(4096, soon()).unwrap();
        assert_eq!(again.as_mut_ptr(), place);
        slots.give_back(again);
        assert_eq!(slots.acquire(10_000, soon()).unwrap().capacity(), 12_288);
        slots.give_back(b);
    }

    #[test]
    fn a_slot_still_being_written_is_not_handed_out() {
        let slots = Slots::default();
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
        let slots = Slots::default();
        slots.prepare(10_000, 2);
        assert_eq!(slots.state.lock().free.len(), 2);
        slots.prepare(10_000, 2);
        assert_eq!(slots.state.lock().made, 2);
    }
}
