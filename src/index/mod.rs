//! The sample table: index any dataset once, then see only byte ranges.
//!
//! Builders (`nuscenes`, `webdataset`, `mmdet3d`) read a format's own tables and end in an
//! [`IndexBuilder`]; [`SampleTable`] is what everything after the index sees. `docs/index.md`
//! describes the files.

mod builder;
mod columns;
mod files;
pub mod geometry;
mod input;
mod inputs;
mod ipc;
pub mod join;
mod mmdet3d;
mod nuscenes;
mod open;
mod progress;
mod read;
mod reader;
mod schema;
mod sources;
pub mod stream;
mod table;
mod transport;
mod types;
mod webdataset;

pub use builder::{IndexBuilder, IndexMeta};
pub use inputs::source_matches;
pub use nuscenes::SWEEPS_MAX;
pub use open::{build_index, open_dataset};
pub use progress::Progress;
pub use read::BlobReader;
pub use schema::Layout;
pub use table::SampleTable;
pub use transport::compress;
pub use types::{
    BlobRef, Boxes, Calibration, Codec, FieldKind, FieldSpec, Pose, SequenceItem, Source,
};

/// Ending of an index file's name.
pub const INDEX_SUFFIX: &str = ".index.arrow";
/// Ending of a sources file's name.
pub const SOURCES_SUFFIX: &str = ".sources.arrow";
