//! Chunks stored as `planes-zstd`: the bytes of equal weight of all numbers lie together, and the
//! planes that have a pattern are entropy-coded.
//!
//! The exponents of trained weights take few values; their mantissas are noise. Once the sign bit
//! is rotated out of the way, the exponent of a bf16 or fp32 number is one byte: that plane shrinks
//! to about a third, the others stay as they are. Searching noise for repetitions finds nothing, so
//! zstd is told to code literals only (`encode`), which is several times faster than its level 1.
//!
//! The stored form is blocks of [`BLOCK_BYTES`] that are decoded by themselves, then a table of
//! their sizes and checksums, then a foot; `docs/checkpoint-layout.md` has every byte of it.
//!
//! | file | what it does |
//! |---|---|
//! | `form` | how wide a number is, and whether its sign is rotated |
//! | `planes` | numbers to planes and back |
//! | `probe` | whether a tensor is worth it, from samples |
//! | `encode` | raw bytes to the stored form |
//! | `index` | the table and the foot: written, and checked when read |
//! | `decode` | blocks back to raw bytes |

mod decode;
mod encode;
mod form;
mod index;
mod planes;
mod probe;
#[cfg(test)]
mod tests;

pub use decode::{Decoder, decode};
pub use encode::{Encoder, finish};
pub use form::Form;
pub use index::Index;
pub use probe::probe;

use crate::checkpoint::layout::Dtype;
use crate::error::Error;

/// Raw bytes of a block, the last one of a chunk may be shorter. Its planes stay in a core's cache
/// between splitting and coding, and those of 16-bit numbers fill one block of zstd.
pub const BLOCK_BYTES: usize = 256 << 10;

/// Bytes of the widest number, and so the planes of a block at most.
const PLANES_MAX: usize = 8;

/// Shorter chunks are stored raw: there is little to win, and readers of safetensors see them.
pub const RAW_BYTES_MIN: usize = 16 << 10;

/// What is wrong with stored bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Where, from the start of the stored bytes.
    pub at: u64,
    /// What should be there.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl Fault {
    /// A fault.
    pub fn new(at: u64, expected: impl ToString, found: impl ToString) -> Self {
        Self { at, expected: expected.to_string(), found: found.to_string() }
    }

    /// The error of a chunk that starts at byte `start` of `file`.
    pub fn in_file(self, file: impl Into<String>, start: u64) -> Error {
        let offset = start.saturating_add(self.at);
        Error::corrupt(file, offset, self.expected, self.found, "use an older step")
    }
}

/// What a fuzzer feeds: a byte that chooses the dtype, three of the raw length, and stored bytes,
/// which are decoded as they are and with a foot that fits.
pub fn fuzz(bytes: &[u8]) {
    let Some((&[name, a, b, c], stored)) = bytes.split_first_chunk() else { return };
    let name = ["BF16", "F32", "F64", "U8"][usize::from(name % 4)];
    let Ok(dtype) = Dtype::named(name) else { return };
    let raw_bytes = u32::from_le_bytes([a, b, c, 0]) % FUZZ_BYTES_MAX;
    let mut raw = vec![0; raw_bytes as usize];
    let _ = decode(dtype, stored, &mut raw);
    let mut whole = stored.to_vec();
    whole.extend(index::foot(Form::of(dtype), raw_bytes.into()));
    let _ = decode(dtype, &whole, &mut raw);
}

/// Raw bytes that a fuzzer may ask for: a few blocks.
const FUZZ_BYTES_MAX: u32 = 3 * BLOCK_BYTES as u32;
