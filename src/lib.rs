//! Drivetrain: data loading and checkpoint I/O for training autonomous-driving models.
//!
//! A folder per noun, in the order the data flows; a folder may use those above it:
//!
//! | module | what lives there |
//! |---|---|
//! | [`memory`] | one arena of re-used, page-aligned buffers; byte permits; shared-memory slots |
//! | [`storage`] | ranged reads, streamed writes, create-if-absent, on disk and object stores |
//! | [`index`] | the sample table: one row per sample, one byte range or inline value per field |
//! | [`order`] | which sample stands at position p of epoch e: arithmetic, no state |
//! | [`transform`] | what a transform means, and its CPU kernels |
//! | [`pipeline`] | plan → fetch → decode into the batch → deliver in order |
//! | [`checkpoint`] | snapshot → write → commit → read back, on any world size |
//! | [`telemetry`] | counters and where the time went |
//! | [`synth`] | a deterministic driving world for demos and tests |
//! | [`view`] | one sample as a page for people |
//! | [`cli`] | one file per verb of the `drivetrain` program |

pub mod checkpoint;
pub mod cli;
pub mod error;
pub mod index;
pub mod memory;
pub mod order;
pub mod pipeline;
pub mod runtime;
pub mod storage;
pub mod synth;
pub mod telemetry;
pub mod transform;
pub mod view;

pub use error::{Error, Result};
