//! Anonymous and file-backed memory maps, touched once so that later use does not fault.

use std::fs::File;
use std::io;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::PAGE_BYTES;

/// Size of a huge page on x86-64 and the usual arm64 kernels; only alignment depends on it.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A private or shared read-write map of whole pages, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the map is owned memory without thread affinity; access goes through raw pointers whose
// users follow the borrow rules (buffers own disjoint ranges, slots borrow as a whole).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private zeroed memory of `len` bytes, rounded up to pages. Large maps start on a huge-page
    /// boundary if `huge_pages`, and the kernel is asked to use huge pages.
    pub fn anonymous(len: usize, huge_pages: bool) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(PAGE_BYTES);
        if !huge_pages || len < HUGE_PAGE_BYTES {
            return Ok(Self { ptr: map_private(len)?, len });
        }
        let whole = Self { ptr: map_private(len + HUGE_PAGE_BYTES)?, len: len + HUGE_PAGE_BYTES };
        let aligned = whole.trimmed(len);
        // SAFETY: the range is mapped and owned; the advice does not change its contents.
        let _ = unsafe { madvise(aligned.ptr.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(aligned)
    }

    /// The first `len` bytes of an open file, shared with everyone who maps it.
    pub fn shared(file: &File, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new map at an address the kernel chooses aliases no Rust object.
        let ptr =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) }?;
        Ok(Self { ptr: non_null(ptr)?, len })
    }

    /// Keeps `len` bytes from the first huge-page boundary and unmaps what is around them.
    fn trimmed(self, len: usize) -> Self {
        let start = self.ptr.as_ptr().addr();
        let head = start.next_multiple_of(HUGE_PAGE_BYTES) - start;
        let tail = self.len - head - len;
        let (ptr, all) = (self.ptr, self.len);
        std::mem::forget(self);
        // SAFETY: head + len + tail == all, so the pointers stay inside the owned map; the pieces
        // are page multiples that nobody has seen yet.
        unsafe {
            let kept = ptr.add(head);
            if head > 0 {
                let _ = munmap(ptr.as_ptr().cast(), head);
            }
            if tail > 0 {
                let _ = munmap(ptr.add(all - tail).as_ptr().cast(), tail);
            }
            Self { ptr: kept, len }
        }
    }

    /// First byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Touches every page for writing, so that use does not fault later. The contents stay.
    pub fn warm(&self) {
        self.warm_range(0, self.len);
    }

    /// As [`Mapping::warm`], for a part.
    pub fn warm_range(&self, from: usize, to: usize) {
        let (from, to) = (from / PAGE_BYTES * PAGE_BYTES, to.min(self.len));
        if from >= to {
            return;
        }
        // SAFETY: `from..to` lies in the map.
        let start = unsafe { self.ptr.add(from) };
        // SAFETY: the range is mapped; populating keeps contents.
        let populated =
            unsafe { madvise(start.as_ptr().cast(), to - from, Advice::LinuxPopulateWrite) };
        if populated.is_ok() {
            return;
        }
        for offset in (from..to).step_by(PAGE_BYTES) {
            // SAFETY: the byte lies in the map. An atomic add of zero makes the page present
            // without changing it, also if another process writes to a shared map meanwhile.
            unsafe {
                let byte = self.ptr.add(offset).cast::<std::sync::atomic::AtomicU8>();
                byte.as_ref().fetch_add(0, std::sync::atomic::Ordering::Relaxed);
            }
        }
    }
}

fn map_private(len: usize) -> io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new map at an address the kernel chooses aliases no Rust object.
    let ptr = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) }?;
    non_null(ptr)
}

fn non_null(ptr: *mut std::ffi::c_void) -> io::Result<NonNull<u8>> {
    NonNull::new(ptr.cast()).ok_or_else(|| io::Error::other("the kernel mapped page zero"))
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the map is owned, and no user of it outlives its owner.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_maps_are_aligned_and_writable_to_the_last_byte() {
        for len in [1, PAGE_BYTES, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + PAGE_BYTES] {
            let map = Mapping::anonymous(len, true).unwrap();
            map.warm();
            assert_eq!(map.len(), len.next_multiple_of(PAGE_BYTES));
            if len >= HUGE_PAGE_BYTES {
                assert_eq!(map.ptr().as_ptr().addr() % HUGE_PAGE_BYTES, 0);
            }
            // SAFETY: the last byte of the map.
            unsafe { map.ptr().add(map.len() - 1).write(7) };
        }
    }
}
