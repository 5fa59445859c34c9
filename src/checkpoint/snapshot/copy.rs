//! Many copies into one slot, by a few threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::{Error, Result};
use crate::memory::{Slot, copy_past_cache};

/// Threads copying at most: two saturate the memory of the machines we measured on, four those
/// with more channels; more would take cores from the trainer's own threads.
const COPY_THREADS_MAX: usize = 4;
/// Bytes a thread takes at a time: long enough that taking is free, short enough to end together.
const BATCH_BYTES: usize = 8 << 20;
/// Below this a second thread costs more than it saves.
const PARALLEL_BYTES_MIN: usize = 16 << 20;

enum Source<'a> {
    Bytes(&'a [u8]),
    Zeros(usize),
}

impl Source<'_> {
    fn len(&self) -> usize {
        match self {
            Source::Bytes(bytes) => bytes.len(),
            Source::Zeros(n) => *n,
        }
    }
}

/// Copies to be made, in rising order of their place in the slot.
#[derive(Default)]
pub struct CopyList<'a> {
    items: Vec<(usize, Source<'a>)>,
    bytes: usize,
}

impl<'a> CopyList<'a> {
    /// Adds a copy to offset `at`; long ones are cut so that threads can share them.
    pub fn push(&mut self, at: usize, from: &'a [u8]) {
        for (i, part) in from.chunks(BATCH_BYTES).enumerate() {
            self.items.push((at + i * BATCH_BYTES, Source::Bytes(part)));
        }
        self.bytes += from.len();
    }

    /// Adds zeros: a re-used slot holds an older state's bytes.
    pub fn push_zeros(&mut self, at: usize, len: usize) {
        self.items.push((at, Source::Zeros(len)));
        self.bytes += len;
    }

    /// Index ranges of about [`BATCH_BYTES`] each.
    fn batches(&self) -> Vec<(usize, usize)> {
        let mut batches = Vec::new();
        let (mut from, mut bytes) = (0, 0);
        for (i, (_, source)) in self.items.iter().enumerate() {
            bytes += source.len();
            if bytes >= BATCH_BYTES || i + 1 == self.items.len() {
                batches.push((from, i + 1));
                (from, bytes) = (i + 1, 0);
            }
        }
        batches
    }

    /// Whether no two items touch the same bytes and all lie within `capacity`.
    fn is_disjoint_within(&self, capacity: usize) -> bool {
        let mut end = 0;
        self.items.iter().all(|(at, source)| {
            let fits = *at >= end;
            end = at.saturating_add(source.len());
            fits && end <= capacity
        })
    }
}

/// The slot's memory as the copying threads see it.
#[derive(Clone, Copy)]
struct Target(*mut u8);

// SAFETY: threads write disjoint ranges of it, checked by `is_disjoint_within` beforehand.
unsafe impl Send for Target {}
// SAFETY: as above; nobody reads while the copies run.
unsafe impl Sync for Target {}

impl Target {
    fn fill(&self, at: usize, source: &Source<'_>) {
        match source {
            // SAFETY: the range lies in the slot and belongs to this item alone (checked before).
            Source::Bytes(from) => unsafe {
                copy_past_cache(from.as_ptr(), self.0.add(at), from.len());
            },
            // SAFETY: as above.
            Source::Zeros(n) => unsafe { std::ptr::write_bytes(self.0.add(at), 0, *n) },
        }
    }
}

/// Makes all copies; returns when the last is done.
pub fn copy_all(list: CopyList<'_>, slot: &mut Slot) -> Result<()> {
    if !list.is_disjoint_within(slot.capacity()) {
        let found = format!("{} bytes for a slot of {}", list.bytes, slot.capacity());
        return Err(Error::invalid("staging plan", "disjoint ranges inside the slot", found));
    }
    let target = Target(slot.as_mut_ptr());
    let batches = list.batches();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&(from, to)) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            for (at, source) in &list.items[from..to] {
                target.fill(*at, source);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads(list.bytes) {
            // A thread that cannot be had is no error: the caller's own does the work.
            let _ = thread::Builder::new().name("drivetrain-copy".into()).spawn_scoped(scope, work);
        }
        work();
    });
    Ok(())
}

fn threads(bytes: usize) -> usize {
    if bytes < PARALLEL_BYTES_MIN {
        return 1;
    }
    thread::available_parallelism().map_or(1, usize::from).min(COPY_THREADS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_and_stale_bytes_go() {
        let source: Vec<u8> = (0..40 << 20).map(|i: u32| (i % 251) as u8).collect();
        let mut slot = Slot::private(source.len() + (2 << 20)).unwrap();
        let stale = vec![0xEE; slot.capacity()];
        let mut list = CopyList::default();
        list.push(0, &stale);
        copy_all(list, &mut slot).unwrap();
        let mut list = CopyList::default();
        list.push(0, &source[..10]);
        list.push_zeros(10, 4086);
        list.push(4096, &source);
        copy_all(list, &mut slot).unwrap();
        let got = &slot;
        assert_eq!(&got[..10], &source[..10]);
        assert!(got[10..4096].iter().all(|&b| b == 0));
        assert!(got[4096..4096 + source.len()] == source[..]);
        assert!(got[4096 + source.len()..].iter().all(|&b| b == 0xEE));
    }

    #[test]
    fn plans_that_overlap_or_overflow_are_refused() {
        let mut slot = Slot::private(8192).unwrap();
        let mut list = CopyList::default();
        list.push(0, &[1; 100]);
        list.push(50, &[1; 100]);
        assert!(copy_all(list, &mut slot).is_err());
        let mut list = CopyList::default();
        list.push(8190, &[1; 100]);
        assert!(copy_all(list, &mut slot).is_err());
    }
}
