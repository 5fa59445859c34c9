//! Hooks that are told about every slab: pinning for CUDA, registration with io_uring.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

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

/// Memory that a hook has taken, given back on drop.
#[derive(Debug)]
pub struct Pinned {
    hook: Arc<dyn PinHook>,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: the pointer is only a name for the range that the hook, which is Send and Sync, knows.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Shows `len` bytes from `ptr` to `hook`.
    ///
    /// # Safety
    /// The range is mapped read-write until this is dropped, and no operation uses it after that.
    pub unsafe fn new(hook: Arc<dyn PinHook>, ptr: NonNull<u8>, len: usize) -> Result<Self> {
        // SAFETY: as promised by the caller.
        unsafe { hook.pin(ptr.as_ptr(), len) }?;
        Ok(Self { hook, ptr, len })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: `new` pinned this very range, which is still mapped and not used any more.
        unsafe { self.hook.unpin(self.ptr.as_ptr(), self.len) };
    }
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
