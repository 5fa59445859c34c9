//! Counters and where the time went.
//!
//! A loader owns one [`Stages`]; every stage adds what it did with relaxed atomics, and
//! [`Stages::report`] turns them into a [`LoaderReport`] that names the bottleneck. Nothing here
//! allocates or waits on the per-sample path.

mod report;
mod stages;

pub use report::{Bottleneck, LoaderReport, StageSeconds};
pub use stages::{ReadTimer, Stage, StageTimer, Stages};
