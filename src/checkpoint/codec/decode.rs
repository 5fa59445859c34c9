//! The stored form back to raw bytes, block by block.

use std::ops::Range;

use zstd::bulk::Decompressor;

use super::index::Method;
use super::planes::merge;
use super::{BLOCK_BYTES, Fault, Index, PLANES_MAX};
use crate::checkpoint::layout::{Dtype, crc32c};

/// Decodes blocks; one per thread, re-used.
#[derive(Default)]
pub struct Decoder {
    zstd: Decompressor<'static>,
    /// The planes of a block that are not stored raw.
    planes: Vec<u8>,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").finish_non_exhaustive()
    }
}

impl Decoder {
    /// Decodes block `i` of a chunk, given its stored bytes, into `raw`, which is as long as the
    /// block; and compares the checksum. After a fault `raw` holds anything.
    pub fn block(
        &mut self,
        index: &Index,
        i: usize,
        stored: &[u8],
        raw: &mut [u8],
    ) -> Result<(), Fault> {
        let (form, range) = (index.form(), index.stored_range(i));
        let Some((expected, planes)) = index.planes(i) else {
            return Err(Fault::new(range.start, format!("{} blocks", index.blocks()), i));
        };
        let (stored_bytes, raw_bytes) = (length(&range), length(&index.raw_range(i)));
        if (stored.len(), raw.len()) != (stored_bytes, raw_bytes) {
            let expected = format!("{stored_bytes} bytes for {raw_bytes}");
            let found = format!("{} for {}", stored.len(), raw.len());
            return Err(Fault::new(range.start, expected, found));
        }
        self.planes.resize(BLOCK_BYTES, 0);
        let numbers = raw.len() / form.width;
        let (whole, rest) = raw.split_at_mut(numbers * form.width);
        let mut parts: [&[u8]; PLANES_MAX] = [&[]; PLANES_MAX];
        let mut scratch = self.planes.as_mut_slice();
        let mut at = 0;
        for (part, (method, bytes)) in parts.iter_mut().zip(planes) {
            let coded = &stored[at..at + bytes];
            *part = if method == Method::Raw {
                coded
            } else {
                let plane;
                (plane, scratch) = scratch.split_at_mut(numbers);
                expand(&mut self.zstd, method, coded, plane)
                    .map_err(|found| Fault::new(range.start + at as u64, "a coded plane", found))?;
                plane
            };
            at += bytes;
        }
        merge(form, &parts, whole);
        rest.copy_from_slice(&stored[at..]);
        let found = crc32c(raw);
        if found != expected {
            let expected = format!("a block with crc32c {expected:08x}");
            return Err(Fault::new(range.start, expected, format!("{found:08x}")));
        }
        Ok(())
    }
}

fn length(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

fn expand(
    zstd: &mut Decompressor<'_>,
    method: Method,
    coded: &[u8],
    plane: &mut [u8],
) -> Result<(), String> {
    if method == Method::Constant {
        plane.fill(coded.first().copied().unwrap_or_default());
        return Ok(());
    }
    match zstd.decompress_to_buffer(coded, plane) {
        Ok(bytes) if bytes == plane.len() => Ok(()),
        Ok(bytes) => Err(format!("{bytes} bytes for {}", plane.len())),
        Err(error) => Err(error.to_string()),
    }
}

/// Decodes all of a chunk into `raw`, which is as long as the chunk.
pub fn decode(dtype: Dtype, stored: &[u8], raw: &mut [u8]) -> Result<(), Fault> {
    let index = Index::of(dtype, raw.len() as u64, stored)?;
    let mut decoder = Decoder::default();
    for (i, block) in raw.chunks_mut(BLOCK_BYTES).enumerate() {
        let range = index.stored_range(i);
        let bytes = &stored[range.start as usize..range.end as usize];
        decoder.block(&index, i, bytes, block)?;
    }
    Ok(())
}
