//! A page-aligned buffer that knows where to return to.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytes::Bytes;

use super::arena::Home;

/// Alignment of every buffer: a page, which is also what O_DIRECT wants on every device we know.
pub const PAGE_BYTES: usize = 4096;

/// Owned, page-aligned bytes. `len` is what holds data, `capacity` is a multiple of the page.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
    capacity: usize,
    /// The arena it returns to; none for heap memory.
    home: Option<Home>,
}

// SAFETY: a buffer owns its memory exclusively; access follows Rust's borrow rules.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Zeroed private memory outside any arena, for small metadata and tests.
    pub fn heap(len: usize) -> Self {
        let capacity = len.max(1).next_multiple_of(PAGE_BYTES);
        let layout = heap_layout(capacity);
        // SAFETY: the layout has a non-zero size.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Self { ptr, len, capacity, home: None }
    }

    /// A range of an arena's slab.
    ///
    /// # Safety
    /// `ptr..ptr + capacity` is initialised memory that `home` keeps mapped and lends to nobody
    /// else until it gets it back; `capacity` is a multiple of the page and at least `len`.
    pub(super) unsafe fn lent(ptr: NonNull<u8>, len: usize, capacity: usize, home: Home) -> Self {
        Self { ptr, len, capacity, home: Some(home) }
    }

    /// Bytes that can be held without another buffer.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets how many bytes hold data. All memory of a buffer is initialised, so any length up to
    /// the capacity is sound; a larger one is cut to the capacity.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.capacity);
    }

    /// First byte; page-aligned.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// First byte, for writers that fill disjoint parts at the same time.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Read-only, cheaply cloned and sliced view that keeps the buffer until its last clone goes.
    pub fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }
}

fn heap_layout(capacity: usize) -> Layout {
    // SAFETY: the alignment is a power of two and capacity is a page multiple within isize.
    unsafe { Layout::from_size_align_unchecked(capacity, PAGE_BYTES) }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.home.take() {
            Some(home) => home.give_back(self.capacity),
            // SAFETY: allocated in `heap` with this very layout.
            None => unsafe { dealloc(self.ptr.as_ptr(), heap_layout(self.capacity)) },
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= capacity` initialised bytes are owned by self.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} of {} bytes)", self.len, self.capacity)
    }
}
