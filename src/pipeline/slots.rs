//! One buffer, many writers: decoder threads fill disjoint regions of a batch at the same time.
//!
//! The only `unsafe` of the pipeline. Regions are checked to be disjoint when the buffer is
//! wrapped, and each can be claimed by one writer at a time, so safe code cannot make two
//! overlapping slices.

use std::ops::{Deref, DerefMut, Range};
use std::slice;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::memory::Buffer;

/// A buffer cut into regions that can be written concurrently.
#[derive(Debug)]
pub struct SlotBuffer {
    regions: Vec<Range<usize>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    buffer: Option<Buffer>,
    claimed: Vec<bool>,
    outstanding: usize,
}

/// Exclusive access to one region until dropped.
#[derive(Debug)]
pub struct SlotGuard<'a> {
    owner: &'a SlotBuffer,
    region: usize,
    ptr: *mut u8,
    len: usize,
}

impl SlotBuffer {
    /// Wraps `buffer`; `regions` must be sorted, disjoint and inside it.
    pub fn new(mut buffer: Buffer, regions: Vec<Range<usize>>) -> Result<Self> {
        let mut end = 0;
        for region in &regions {
            if region.start < end || region.end < region.start {
                return Err(Error::invalid("batch layout", "disjoint regions", "overlap"));
            }
            end = region.end;
        }
        if end > buffer.capacity() {
            return Err(Error::invalid("batch layout", buffer.capacity().to_string(), end));
        }
        buffer.set_len(end);
        let claimed = vec![false; regions.len()];
        Ok(Self {
            regions,
            state: Mutex::new(State { buffer: Some(buffer), claimed, outstanding: 0 }),
        })
    }

    /// The region `index`, or `None` if it does not exist, is being written or the buffer is taken.
    pub fn claim(&self, index: usize) -> Option<SlotGuard<'_>> {
        let range = self.regions.get(index)?.clone();
        let mut state = self.state.lock();
        if state.claimed[index] {
            return None;
        }
        let buffer = state.buffer.as_mut()?;
        // The pointer comes from the buffer's start, never from a slice another writer holds.
        let base = buffer.as_mut_ptr();
        // SAFETY: `range.end` is within the buffer's capacity, checked in `new`.
        let ptr = unsafe { base.add(range.start) };
        state.claimed[index] = true;
        state.outstanding += 1;
        Some(SlotGuard { owner: self, region: index, ptr, len: range.len() })
    }

    /// The buffer, once no region is being written; `None` before that and after the first take.
    pub fn take(&self) -> Option<Buffer> {
        let mut state = self.state.lock();
        if state.outstanding > 0 {
            return None;
        }
        state.buffer.take()
    }
}

// SAFETY: a guard is exclusive access to bytes that are themselves Send.
unsafe impl Send for SlotGuard<'_> {}

impl Deref for SlotGuard<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the region is initialised memory of a buffer that `take` gives out only when no
        // guard is alive; regions are disjoint and each has at most one guard.
        unsafe { slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl DerefMut for SlotGuard<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` and the single guard per region make it exclusive.
        unsafe { slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.owner.state.lock();
        state.claimed[self.region] = false;
        state.outstanding -= 1;
    }
}

/// The same bytes as float32 values. Buffers start on pages and regions on multiples of four bytes,
/// so nothing is cut off; other slices lose their unaligned ends.
pub fn floats_mut(bytes: &mut [u8]) -> &mut [f32] {
    // SAFETY: every bit pattern is a valid f32 and a valid u8.
    let (_, values, _) = unsafe { bytes.align_to_mut::<f32>() };
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_fill_disjoint_regions() {
        let slots = SlotBuffer::new(Buffer::heap(4096), vec![0..1000, 1000..2000, 3000..4096]);
        let slots = slots.unwrap();
        std::thread::scope(|scope| {
            for region in 0..3 {
                let slots = &slots;
                scope.spawn(move || slots.claim(region).unwrap().fill(region as u8 + 1));
            }
        });
        let buffer = slots.take().unwrap();
        assert!(buffer[..1000].iter().all(|b| *b == 1));
        assert!(buffer[1000..2000].iter().all(|b| *b == 2));
        assert!(buffer[3000..4096].iter().all(|b| *b == 3));
        assert!(slots.take().is_none() && slots.claim(0).is_none());
    }

    #[test]
    fn a_region_has_one_writer_and_the_buffer_waits_for_it() {
        let slots = SlotBuffer::new(Buffer::heap(64), vec![0..8, 8..16]).unwrap();
        let guard = slots.claim(0).unwrap();
        assert!(slots.claim(0).is_none() && slots.take().is_none());
        assert!(slots.claim(1).is_some());
        drop(guard);
        assert!(slots.claim(0).is_some() && slots.claim(7).is_none());
        assert!(slots.take().is_some());
    }

    #[test]
    fn overlapping_or_too_long_layouts_are_refused() {
        assert!(SlotBuffer::new(Buffer::heap(64), vec![0..8, 4..16]).is_err());
        assert!(SlotBuffer::new(Buffer::heap(64), vec![0..8, 8..8192]).is_err());
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = vec![0..1, 8..4];
        assert!(SlotBuffer::new(Buffer::heap(64), reversed).is_err());
    }
}
