//! The CUDA side: device discovery and pinned host memory, loaded at run time. A machine without
//! CUDA gets a clean answer, never a panic.

mod driver;

pub use driver::{CudaPin, DeviceInfo, Discovery, Error, discover};
