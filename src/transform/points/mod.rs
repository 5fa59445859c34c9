//! Point clouds: keyframe and earlier sweeps into one array, in one pass over the bytes.

mod gather;
mod spec;

pub use gather::{SweepInput, count_points, gather_points, records};
pub use spec::{COLUMNS_MAX, Pick, PointLayout, PointsSpec, TIME_COLUMN};
