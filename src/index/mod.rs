//! The sample table: index any dataset once, then see only byte ranges.
//!
//! Builders (`nuscenes`, `webdataset`, `mmdet3d`) read a format's own tables and end in an
//! [`IndexBuilder`]; [`SampleTable`] is what everything after the index sees. `docs/index.md`
//! describes the files.

mod builder;
mod columns;
pub mod geometry;
mod ipc;
mod reader;
mod schema;
mod sources;
mod table;
mod types;

pub use builder::{IndexBuilder, IndexMeta};
pub use schema::Layout;
pub use table::SampleTable;
pub use types::{
    BlobRef, Boxes, Calibration, Codec, FieldKind, FieldSpec, Pose, SequenceItem, Source,
};

/// Ending of an index file's name.
pub const INDEX_SUFFIX: &str = ".index.arrow";
/// Ending of a sources file's name.
pub const SOURCES_SUFFIX: &str = ".sources.arrow";
