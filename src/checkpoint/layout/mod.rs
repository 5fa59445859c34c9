//! What lies on disk: names, element types, rank files, the table of chunks, the manifest.
//!
//! Everything here is bytes in, bytes out; no store and no clock. `docs/checkpoint-layout.md` has
//! the same facts for readers in other languages.

mod chunk;
mod crc;
mod dtype;
mod manifest;
mod names;
mod rank_file;
mod table;

pub use chunk::{Chunk, PLANES_CODEC, RAW_CODEC};
pub use crc::{crc32c, crc32c_join};
pub use dtype::{Dtype, elements, shape_bytes};
pub use manifest::{FileRecord, Manifest, Referred};
pub use names::{
    MANIFEST, PROBE_PREFIX, TENSORS, attempt_dir, check_relative, file_path, is_attempt_dir,
    is_attempt_file, join, parse_step_dir, rank_file, step_dir,
};
pub use rank_file::{
    FileImage, Piece, Placed, RollLimits, Stored, WINDOW_DATA_BYTES_MAX, plan_files, plan_packed,
};
pub use table::{decode_table, encode_table};
