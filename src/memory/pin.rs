//! Hooks that are told about every slab: pinning for CUDA, registration with io_uring.

use std::fmt;

use crate::error::{Error, Result};

/// Told when a slab is mapped and before it is unmapped.
pub trait PinHook: fmt::Debug + Send + Sync {
    /// Prepares `len` bytes from `ptr`. An error leaves the slab usable as plain memory.
    ///
    /// # Safety
    /// The range is mapped read-write and stays so until `unpin`.
    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<()>;
    /// Undoes `pin`.
    ///
    /// # Safety
    /// `pin` succeeded with these arguments, and no buffer of the slab is alive.
    unsafe fn unpin(&self, ptr: *mut u8, len: usize);
}

impl PinHook for drivetrain_gpu_decode::CudaPin {
    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as promised by the caller.
        unsafe { self.register(ptr, len) }.map_err(|e| Error::Unsupported {
            what: format!("pinning {len} bytes for CUDA ({e})"),
            advice: "copies to the device will be slower; check the locked-memory limit".into(),
        })
    }

    unsafe fn unpin(&self, ptr: *mut u8, _len: usize) {
        // SAFETY: as promised by the caller.
        unsafe { self.unregister(ptr) };
    }
}
