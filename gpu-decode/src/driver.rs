//! The CUDA driver: is it there, which devices, and page-locking of host memory.
//!
//! cudarc panics when it is called without the library, so every call is behind
//! [`library_present`]; `catch_unwind` is the belt for symbols that an old driver lacks.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use cudarc::driver::{CudaContext, DriverError, result, sys};

/// What this machine offers for CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    /// At least one device can be used.
    pub available: bool,
    /// Why not, or what was found.
    pub reason: String,
    /// The devices, by ordinal.
    pub devices: Vec<DeviceInfo>,
}

/// One CUDA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number among the visible devices.
    pub ordinal: usize,
    /// Name as the driver gives it.
    pub name: String,
    /// Device memory.
    pub memory_bytes: usize,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
}

/// What can go wrong on the CUDA side.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no driver, or it is too old for this build.
    #[error("CUDA is not available: {0}")]
    Unavailable(String),
    /// The driver refused a call.
    #[error("{call}: {message}")]
    Driver {
        /// The call.
        call: &'static str,
        /// Name and text of the driver's error.
        message: String,
    },
}

/// Whether the driver library can be loaded.
fn library_present() -> bool {
    // SAFETY: only tries to load the driver library by its names; its initialisers are NVIDIA's.
    let present = catch_unwind(|| unsafe { sys::is_culib_present() });
    present.unwrap_or(false)
}

/// Runs driver calls, turning a missing library or symbol into an error.
fn guarded<T>(
    call: &'static str,
    run: impl FnOnce() -> Result<T, DriverError>,
) -> Result<T, Error> {
    if !library_present() {
        let reason = "no CUDA driver library (libcuda.so.1) on this machine";
        return Err(Error::Unavailable(reason.into()));
    }
    let Ok(outcome) = catch_unwind(AssertUnwindSafe(run)) else {
        let reason = format!("the driver lacks a function that {call} needs; update it");
        return Err(Error::Unavailable(reason));
    };
    outcome.map_err(|e| Error::Driver { call, message: message(e) })
}

fn message(e: DriverError) -> String {
    let text = |s: Result<&std::ffi::CStr, DriverError>| {
        s.map_or_else(|_| String::new(), |s| s.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(e.error_name()), text(e.error_string()))
}

/// Looks for CUDA devices. Never panics, and creates no context.
pub fn discover() -> Discovery {
    match guarded("device discovery", devices) {
        Ok(devices) if devices.is_empty() => {
            Discovery { available: false, reason: "the driver sees no device".into(), devices }
        }
        Ok(devices) => {
            let reason = format!("{} device(s)", devices.len());
            Discovery { available: true, reason, devices }
        }
        Err(e) => Discovery { available: false, reason: e.to_string(), devices: Vec::new() },
    }
}

fn devices() -> Result<Vec<DeviceInfo>, DriverError> {
    result::init()?;
    (0..result::device::get_count()?).map(device).collect()
}

fn device(ordinal: i32) -> Result<DeviceInfo, DriverError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let device = result::device::get(ordinal)?;
    // SAFETY: `device` is a handle the driver just gave, and both calls only read properties.
    let (memory_bytes, major, minor) = unsafe {
        (
            result::device::total_mem(device)?,
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        )
    };
    Ok(DeviceInfo {
        ordinal: ordinal as usize,
        name: result::device::get_name(device)?,
        memory_bytes,
        compute_capability: (major, minor),
    })
}

/// # Safety
/// `device` is a handle from the driver.
unsafe fn attribute(
    device: sys::CUdevice,
    attribute: sys::CUdevice_attribute,
) -> Result<i32, DriverError> {
    // SAFETY: as promised by the caller.
    unsafe { result::device::get_attribute(device, attribute) }
}

/// Page-locks host memory for fast and asynchronous copies, visible to all contexts.
///
/// Holds the device's primary context, the one PyTorch uses too.
#[derive(Debug, Clone)]
pub struct CudaPin {
    context: Arc<CudaContext>,
}

impl CudaPin {
    /// Pins through the primary context of a device.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        let context = guarded("context of the device", || CudaContext::new(ordinal))?;
        Ok(Self { context })
    }

    /// Page-locks `len` bytes from `ptr`.
    ///
    /// # Safety
    /// The range is mapped, not yet registered, and stays mapped until [`CudaPin::unregister`].
    pub unsafe fn register(&self, ptr: *mut u8, len: usize) -> Result<(), Error> {
        guarded("cuMemHostRegister", || {
            self.context.bind_to_thread()?;
            // SAFETY: as promised by the caller.
            unsafe {
                sys::cuMemHostRegister_v2(
                    ptr.cast::<c_void>(),
                    len,
                    sys::CU_MEMHOSTREGISTER_PORTABLE,
                )
            }
            .result()
        })
    }

    /// Undoes [`CudaPin::register`]. An error is ignored: the driver is going away.
    ///
    /// # Safety
    /// `ptr` was registered and no copy from or to it is running.
    pub unsafe fn unregister(&self, ptr: *mut u8) {
        let _ = guarded("cuMemHostUnregister", || {
            self.context.bind_to_thread()?;
            // SAFETY: as promised by the caller.
            unsafe { sys::cuMemHostUnregister(ptr.cast::<c_void>()) }.result()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_cuda_gets_a_clean_answer() {
        let found = discover();
        assert_eq!(found.available, !found.devices.is_empty());
        assert!(!found.reason.is_empty());
        if !found.available {
            assert!(CudaPin::new(0).is_err());
        }
        println!("{found:?}");
    }

    #[test]
    fn memory_can_be_pinned_where_there_is_a_device() {
        let Ok(pin) = CudaPin::new(0) else {
            println!("skipped: {}", discover().reason);
            return;
        };
        let mut memory = vec![1_u8; 1 << 20];
        // SAFETY: the vector outlives the registration and is not moved.
        unsafe {
            pin.register(memory.as_mut_ptr(), memory.len()).unwrap();
            assert!(pin.register(memory.as_mut_ptr(), memory.len()).is_err());
            pin.unregister(memory.as_mut_ptr());
            pin.register(memory.as_mut_ptr(), memory.len()).unwrap();
            pin.unregister(memory.as_mut_ptr());
        }
    }
}
