//! The arithmetic of an arena: slabs, their free ranges, and when to map or unmap one.
//!
//! A buffer is a range of a slab. Lengths are rounded to one of eight classes per power of two, so
//! that similar requests re-use the same ranges and at most an eighth is lost. Free neighbours are
//! merged, so a slab whose buffers are all back is one free range again and can be cut anew, or
//! unmapped to make room for a larger one.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

use super::PAGE_BYTES;
use super::mapping::{HUGE_PAGE_BYTES, Mapping};

/// Smallest slab: one huge page.
const SLAB_BYTES_MIN: usize = HUGE_PAGE_BYTES;
/// Largest slab made for requests smaller than it.
const SLAB_BYTES_MAX: usize = 64 << 20;
/// Size classes per power of two: at most 1/8 of a buffer is unused.
const CLASSES_PER_DOUBLING: usize = 8;

/// Rounds a length to its size class, a multiple of the page.
pub fn class_bytes(len: usize) -> usize {
    let pages = len.max(1).div_ceil(PAGE_BYTES);
    let step = (pages.next_power_of_two() / 2 / CLASSES_PER_DOUBLING).max(1);
    pages.next_multiple_of(step) * PAGE_BYTES
}

/// One mapped slab.
#[derive(Debug)]
pub struct Slab {
    /// Its memory.
    pub map: Mapping,
    /// How many of the arena's hooks accepted it, from the first.
    pub hooks: usize,
    /// Free ranges: offset to length.
    free: BTreeMap<usize, usize>,
    used_bytes: usize,
}

/// Where a buffer lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Number of the slab.
    pub slab: u32,
    /// Offset in it.
    pub offset: usize,
}

/// Slabs and their free ranges.
#[derive(Debug, Default)]
pub struct Pool {
    slabs: BTreeMap<u32, Slab>,
    next_slab: u32,
    /// Free ranges by length, for the best fit.
    by_len: BTreeSet<(usize, u32, usize)>,
    /// Bytes mapped, and reserved for slabs that are being mapped.
    pub mapped_bytes: usize,
    /// Bytes lent.
    pub in_use_bytes: usize,
}

impl Pool {
    /// Takes `len` bytes (a class) from the smallest free range that has them.
    pub fn take(&mut self, len: usize) -> Option<(Place, NonNull<u8>)> {
        let &(free_len, slab, offset) = self.by_len.range((len, 0, 0)..).next()?;
        let owner = self.slabs.get_mut(&slab)?;
        self.by_len.remove(&(free_len, slab, offset));
        owner.free.remove(&offset);
        if free_len > len {
            owner.free.insert(offset + len, free_len - len);
            self.by_len.insert((free_len - len, slab, offset + len));
        }
        owner.used_bytes += len;
        self.in_use_bytes += len;
        // SAFETY: the offset of a free range lies inside its slab.
        let ptr = unsafe { owner.map.ptr().add(offset) };
        Some((Place { slab, offset }, ptr))
    }

    /// Takes a range back and merges it with its free neighbours.
    pub fn give(&mut self, place: Place, len: usize) {
        let Some(owner) = self.slabs.get_mut(&place.slab) else { return };
        owner.used_bytes -= len;
        self.in_use_bytes -= len;
        let (mut start, mut end) = (place.offset, place.offset + len);
        let before = owner.free.range(..start).next_back().map(|(&o, &l)| (o, l));
        if let Some((offset, free_len)) = before
            && offset + free_len == start
        {
            owner.free.remove(&offset);
            self.by_len.remove(&(free_len, place.slab, offset));
            start = offset;
        }
        if let Some(free_len) = owner.free.remove(&end) {
            self.by_len.remove(&(free_len, place.slab, end));
            end += free_len;
        }
        owner.free.insert(start, end - start);
        self.by_len.insert((end - start, place.slab, start));
    }

    /// Size of a slab to map so that `len` fits under `limit_bytes`, which is reserved now, and the
    /// unused slabs that must be unmapped first. None if lent buffers are in the way.
    pub fn grow(&mut self, len: usize, limit_bytes: usize) -> Option<(usize, Vec<Slab>)> {
        let unused: usize =
            self.slabs.values().filter(|s| s.used_bytes == 0).map(|s| s.map.len()).sum();
        if self.mapped_bytes - unused + len > limit_bytes {
            return None;
        }
        let mut evicted = Vec::new();
        while self.mapped_bytes + len > limit_bytes {
            evicted.push(self.evict()?);
        }
        // Grow in proportion, so that small users stay small and large ones map rarely.
        let wanted = (self.mapped_bytes / 2).next_multiple_of(SLAB_BYTES_MIN);
        let wanted = wanted.clamp(SLAB_BYTES_MIN, SLAB_BYTES_MAX).max(len);
        let slab_bytes = wanted.min(limit_bytes - self.mapped_bytes);
        self.mapped_bytes += slab_bytes;
        Some((slab_bytes, evicted))
    }

    /// Removes one unused slab.
    fn evict(&mut self) -> Option<Slab> {
        let number = *self.slabs.iter().find(|(_, s)| s.used_bytes == 0)?.0;
        let slab = self.slabs.remove(&number)?;
        self.by_len.remove(&(slab.map.len(), number, 0));
        self.mapped_bytes -= slab.map.len();
        Some(slab)
    }

    /// Returns the reservation of a slab that could not be mapped.
    pub fn unreserve(&mut self, slab_bytes: usize) {
        self.mapped_bytes -= slab_bytes;
    }

    /// Adds a slab whose size was reserved by [`Pool::grow`].
    pub fn add(&mut self, map: Mapping, hooks: usize) {
        let (number, len) = (self.next_slab, map.len());
        self.next_slab = self.next_slab.wrapping_add(1);
        self.by_len.insert((len, number, 0));
        let free = BTreeMap::from([(0, len)]);
        self.slabs.insert(number, Slab { map, hooks, free, used_bytes: 0 });
    }

    /// Number of slabs.
    pub fn slab_count(&self) -> usize {
        self.slabs.len()
    }

    /// All slabs, leaving none.
    pub fn take_slabs(&mut self) -> Vec<Slab> {
        self.by_len.clear();
        std::mem::take(&mut self.slabs).into_values().collect()
    }

    /// Slabs without a lent buffer, removed from the pool.
    pub fn take_unused(&mut self) -> Vec<Slab> {
        std::iter::from_fn(|| self.evict()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for pages in 1..100_000_usize {
            let class = class_bytes(pages * PAGE_BYTES);
            assert!(class >= pages * PAGE_BYTES && class.is_multiple_of(PAGE_BYTES));
            assert!((class - pages * PAGE_BYTES) * 8 <= pages * PAGE_BYTES, "{pages}");
        }
        assert_eq!(class_bytes(0), PAGE_BYTES);
        assert_eq!(class_bytes(1 << 29), 1 << 29);
    }

    #[test]
    fn a_slab_that_is_all_back_is_one_range_again() {
        let mut pool = Pool::default();
        let (bytes, evicted) = pool.grow(PAGE_BYTES, 8 << 20).unwrap();
        assert!(evicted.is_empty());
        pool.add(Mapping::anonymous(bytes, false).unwrap(), 0);
        let taken: Vec<_> = (1..20).map(|n| (n, pool.take(n * PAGE_BYTES).unwrap().0)).collect();
        for (n, place) in taken.iter().rev().step_by(2).chain(taken.iter().rev().skip(1).step_by(2))
        {
            pool.give(*place, n * PAGE_BYTES);
        }
        assert_eq!((pool.in_use_bytes, pool.by_len.len()), (0, 1));
        assert!(pool.take(bytes).is_some());
    }

    #[test]
    fn unused_slabs_make_room_for_a_larger_one() {
        let mut pool = Pool::default();
        let limit = 4 * SLAB_BYTES_MIN;
        for _ in 0..2 {
            let (bytes, _) = pool.grow(PAGE_BYTES, limit).unwrap();
            pool.add(Mapping::anonymous(bytes, false).unwrap(), 0);
        }
        let held = pool.take(PAGE_BYTES).unwrap().0;
        assert!(pool.grow(limit, limit).is_none());
        pool.give(held, PAGE_BYTES);
        let (bytes, evicted) = pool.grow(limit, limit).unwrap();
        assert_eq!((bytes, evicted.len(), pool.mapped_bytes), (limit, 2, limit));
    }
}
