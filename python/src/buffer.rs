//! Native memory for numpy and torch: a Python object with the buffer protocol that owns its bytes.
//!
//! `numpy.frombuffer` and `torch.frombuffer` wrap it without a copy and keep it alive; the memory
//! goes back to where it came from (an arena, the heap) when the last view is gone.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use drivetrain::memory::Buffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// What keeps the memory alive; never read through here.
pub type Owner = Arc<dyn Send + Sync>;

/// Native memory with the buffer protocol (1-D, uint8).
#[pyclass(frozen, module = "drivetrain._native")]
pub struct NativeBuffer {
    start: NonNull<u8>,
    length: usize,
    writable: bool,
    _owner: Owner,
}

// SAFETY: the memory belongs to the owner, which is Send and Sync, and does not move. Rust never
// reads or writes it again; Python code that shares a writable view between threads races with
// itself only, as with any array.
unsafe impl Send for NativeBuffer {}
// SAFETY: as above.
unsafe impl Sync for NativeBuffer {}

#[allow(dead_code, reason = "each constructor serves another binding")]
impl NativeBuffer {
    /// All of `buffer`, writable: nothing else can hold it.
    pub fn from_buffer(mut buffer: Buffer) -> Self {
        let (start, length) = (start_of(&mut buffer), buffer.len());
        Self { start, length, writable: true, _owner: Arc::new(Shared(buffer)) }
    }

    /// Writable views of parts of one buffer, which lives until the last of them is gone. `None` if
    /// ranges overlap or leave the buffer.
    pub fn views(mut buffer: Buffer, ranges: &[Range<usize>]) -> Option<Vec<Self>> {
        let mut sorted: Vec<&Range<usize>> = ranges.iter().filter(|r| !r.is_empty()).collect();
        sorted.sort_by_key(|r| r.start);
        let apart = sorted.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let inside = ranges.iter().all(|r| r.start <= r.end && r.end <= buffer.len());
        if !(apart && inside) {
            return None;
        }
        let start = start_of(&mut buffer);
        let owner: Owner = Arc::new(Shared(buffer));
        let view = |range: &Range<usize>| Self {
            // SAFETY: the range lies inside the buffer.
            start: unsafe { start.add(range.start) },
            length: range.len(),
            writable: true,
            _owner: Arc::clone(&owner),
        };
        Some(ranges.iter().map(view).collect())
    }

    /// A view of memory that `owner` keeps alive.
    ///
    /// # Safety
    /// `start..start + length` lives as long as `owner` and is not touched from Rust any more.
    pub unsafe fn kept_by(
        (start, length): (NonNull<u8>, usize),
        writable: bool,
        owner: Owner,
    ) -> Self {
        Self { start, length, writable, _owner: owner }
    }

    /// Bytes: writable if they came from a `Vec` that nobody else holds, else read-only.
    pub fn from_bytes(bytes: Bytes) -> Self {
        match bytes.try_into_mut() {
            Ok(mut unique) => {
                let start = NonNull::new(unique.as_mut_ptr()).unwrap_or(NonNull::dangling());
                let length = unique.len();
                Self { start, length, writable: true, _owner: Arc::new(unique) }
            }
            Err(shared) => {
                let start = NonNull::new(shared.as_ptr().cast_mut()).unwrap_or(NonNull::dangling());
                Self { start, length: shared.len(), writable: false, _owner: Arc::new(shared) }
            }
        }
    }
}

/// Keeps a buffer without touching it.
struct Shared(#[allow(dead_code, reason = "kept for its drop")] Buffer);

fn start_of(buffer: &mut Buffer) -> NonNull<u8> {
    NonNull::new(buffer.as_mut_ptr()).unwrap_or(NonNull::dangling())
}

#[pymethods]
impl NativeBuffer {
    fn __len__(&self) -> usize {
        self.length
    }

    /// True if views may write.
    #[getter]
    fn writable(&self) -> bool {
        self.writable
    }

    /// Fills a buffer view as the protocol asks.
    ///
    /// # Safety
    /// Python passes a valid view.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let this = slf.get();
        let start = this.start.as_ptr().cast::<c_void>();
        let (length, readonly) = (this.length as ffi::Py_ssize_t, c_int::from(!this.writable));
        // SAFETY: the view is Python's; the memory lives as long as this object, to which the view
        // gets a reference.
        let status =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start, length, readonly, flags) };
        if status == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Adds this file's class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeBuffer>()
}
