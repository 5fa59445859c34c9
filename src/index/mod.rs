//! The sample table: index any dataset once, then see only byte ranges.

mod types;

pub use types::{
    BlobRef, Boxes, Calibration, Codec, FieldKind, FieldSpec, Pose, SequenceItem, Source,
};
