//! Many copies into one slot, by a few threads, with a checksum of each.
//!
//! The checksum is computed over what is copied while it is in the cache. That saves the writer a
//! trip through memory, and means that a slot can be sealed the moment it is staged.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;

use super::copy_sum::copy_summed;
use crate::checkpoint::layout::{crc32c, crc32c_join};
use crate::error::{Error, Result};
use crate::memory::Slot;

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
    /// How many items each call of `push` made.
    parts: Vec<usize>,
    bytes: usize,
}

impl<'a> CopyList<'a> {
    /// Adds a copy to offset `at`; long ones are cut so that threads can share them.
    pub fn push(&mut self, at: usize, from: &'a [u8]) {
        for (i, part) in from.chunks(BATCH_BYTES).enumerate() {
            self.items.push((at + i * BATCH_BYTES, Source::Bytes(part)));
        }
        self.parts.push(from.len().div_ceil(BATCH_BYTES));
        self.bytes += from.len();
    }

    /// Adds zeros: a re-used slot holds an older state's bytes.
    pub fn push_zeros(&mut self, at: usize, len: usize) {
        self.items.push((at, Source::Zeros(len)));
        self.parts.push(1);
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

    /// The checksum of each push, from those of the items.
    fn join(&self, sums: &[AtomicU32]) -> Vec<u32> {
        let mut items = self.items.iter().zip(sums);
        let part = |&count: &usize| {
            let join =
                |sum: Option<u32>, ((_, source), part): (&(usize, Source<'_>), &AtomicU32)| {
                    let part = part.load(Ordering::Relaxed);
                    Some(sum.map_or(part, |sum| crc32c_join(sum, part, source.len() as u64)))
                };
            items.by_ref().take(count).fold(None, join).unwrap_or_default()
        };
        self.parts.iter().map(part).collect()
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
    /// Makes one copy; returns the checksum of its bytes.
    fn fill(&self, at: usize, source: &Source<'_>) -> u32 {
        match source {
            // SAFETY: the range lies in the slot and belongs to this item alone (checked before).
            Source::Bytes(from) => unsafe { copy_summed(from, self.0.add(at)) },
            Source::Zeros(n) => {
                // SAFETY: as above, and nobody else uses the range while it is read.
                unsafe {
                    let to = self.0.add(at);
                    std::ptr::write_bytes(to, 0, *n);
                    crc32c(std::slice::from_raw_parts(to, *n))
                }
            }
        }
    }
}

/// Makes all copies; returns when the last is done, with the checksum of each push.
pub fn copy_all(list: &CopyList<'_>, slot: &mut Slot) -> Result<Vec<u32>> {
    if !list.is_disjoint_within(slot.capacity()) {
        let found = format!("{} bytes for a slot of {}", list.bytes, slot.capacity());
        return Err(Error::invalid("staging plan", "disjoint ranges inside the slot", found));
    }
    let target = Target(slot.as_mut_ptr());
    let batches = list.batches();
    let sums: Vec<_> = list.items.iter().map(|_| AtomicU32::new(0)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&(from, to)) = batches.get(next.fetch_add(1, Ordering::Relaxed)) {
            for ((at, source), sum) in list.items[from..to].iter().zip(&sums[from..to]) {
                sum.store(target.fill(*at, source), Ordering::Relaxed);
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
    Ok(list.join(&sums))
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
        copy_all(&list, &mut slot).unwrap();
        let mut list = CopyList::default();
        list.push(0, &source[..10]);
        list.push_zeros(10, 4086);
        list.push(4096, &source);
        list.push(4096 + source.len(), &[]);
        let sums = copy_all(&list, &mut slot).unwrap();
        let expected = [&source[..10], &[0; 4086], &source, &[]].map(crc32c);
        assert_eq!(sums, expected);
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
        assert!(copy_all(&list, &mut slot).is_err());
        let mut list = CopyList::default();
        list.push(8190, &[1; 100]);
        assert!(copy_all(&list, &mut slot).is_err());
    }
}
