//! What a transform means, and its CPU kernels.
//!
//! A transform is a parameter struct ([`ImageSpec`], [`PointsSpec`]) with a written meaning, and
//! kernels that write straight into the caller's memory, which is normally a slot of a batch. The
//! scalar kernel is the meaning; SIMD kernels use the same integer or IEEE operations in the same
//! order and are tested to give the same bits. `docs/transforms.md` has the formulas and what the
//! values were compared with.

mod dtype;
pub mod image;
pub mod natural;
mod npy;
pub mod points;

pub use dtype::DType;
pub use image::{Crop, DecodeInfo, ImageScratch, ImageSpec, Layout, decode_image, image_size};
pub use natural::{Natural, natural};
pub use points::{PointLayout, PointsSpec, SweepInput, count_points, gather_points};
