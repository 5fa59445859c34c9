//! What lies on disk: names, element types, rank files, the table of chunks, the manifest.
//!
//! Everything here is bytes in, bytes out; no store and no clock. `docs/checkpoint-layout.md` has
//! the same facts for readers in other languages.

mod chunk;
mod dtype;
mod manifest;
mod names;
mod rank_file;
mod table;

pub use chunk::{Chunk, RAW_CODEC};
pub use dtype::{Dtype, elements, shape_bytes};
pub use manifest::{FileRecord, Manifest};
pub use names::{
    MANIFEST, PROBE_PREFIX, TENSORS, attempt_dir, check_relative, is_attempt_dir, is_attempt_file,
    join, parse_step_dir, rank_file, step_dir,
};
pub use rank_file::{FileImage, Piece, Placed, RollLimits, plan_files};
pub use table::{decode_table, encode_table};

use crc_fast::{CrcAlgorithm, checksum, checksum_combine};

const CRC32C: CrcAlgorithm = CrcAlgorithm::Crc32Iscsi;

/// CRC-32C (Castagnoli) of some bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CRC32C, bytes) as u32
}

/// CRC-32C of `a` followed by `b`, from their checksums and the length of `b`.
pub fn crc32c_join(a: u32, b: u32, b_bytes: u64) -> u32 {
    checksum_combine(CRC32C, u64::from(a), u64::from(b), b_bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_castagnolis() {
        // The check value of the CRC catalogue, and RFC 3720's 32 zero bytes.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c_join(crc32c(b"1234"), crc32c(b"56789"), 5), 0xE306_9283);
        assert_eq!(crc32c_join(crc32c(b""), crc32c(b"123456789"), 9), 0xE306_9283);
        assert_eq!(crc32c_join(crc32c(b"123456789"), crc32c(b""), 0), 0xE306_9283);
    }
}
