//! Sans-IO parsers of driving-data formats: given bytes, they say what is in them or what to read
//! next. No parser touches a file, allocates from an unchecked count, or panics on any input.

pub mod error;
pub mod fuzz;
pub mod mmdet3d;
pub mod nuscenes;
pub mod pickle;
pub mod torch;
pub mod webdataset;

pub use error::{Error, Result};
