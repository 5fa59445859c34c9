//! Raw bytes to the stored form.

use std::io;

use zstd::bulk::Compressor;
use zstd::zstd_safe::{CParameter, ParamSwitch, Strategy};

use super::index::{Method, Stored, foot, push_row};
use super::planes::split;
use super::probe::{has_pattern, pays, probe};
use super::{BLOCK_BYTES, Form};
use crate::checkpoint::layout::{Dtype, crc32c, crc32c_join};
use crate::error::{Error, Result};

/// Longest step of zstd's search: a block of its own, so that the search ends where it begins and
/// all bytes are literals.
const SEARCH_STEP: u32 = 128 << 10;
/// The search's table is not used: the smallest there is, cleared for every frame.
const SEARCH_TABLE_LOG: u32 = 6;
/// Of this many bytes of a plane one must be saved, or it stays raw and is read without decoding.
const PLANE_SAVED_SHARE: usize = 32;

/// Encodes chunks; one per thread, re-used.
pub struct Encoder {
    zstd: Compressor<'static>,
    /// The planes of a block.
    planes: Vec<u8>,
    /// A coded plane.
    packed: Vec<u8>,
    /// Rows of the chunk.
    table: Vec<u8>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder").finish_non_exhaustive()
    }
}

impl Encoder {
    /// An encoder. The error is zstd's, for lack of memory.
    pub fn new() -> Result<Self> {
        let (planes, packed, table) = (Vec::new(), Vec::new(), Vec::new());
        let zstd = literals_only().map_err(|source| Error::Io {
            op: "prepare",
            path: "zstd".into(),
            source,
            advice: "save without compress".into(),
        })?;
        Ok(Self { zstd, planes, packed, table })
    }

    /// Appends the stored form of `raw` to `out`, and returns the CRC-32C of `raw`. `None`, and
    /// `out` as it was, if it is not worth it: then the chunk is stored as it is.
    pub fn encode(&mut self, dtype: Dtype, raw: &[u8], out: &mut Vec<u8>) -> Option<u32> {
        if !probe(dtype, raw) {
            return None;
        }
        let start = out.len();
        let sum = self.encode_always(dtype, raw, out);
        if pays(out.len() - start, raw.len()) {
            return Some(sum);
        }
        out.truncate(start);
        None
    }

    /// As [`Encoder::encode`], worth it or not.
    pub fn encode_always(&mut self, dtype: Dtype, raw: &[u8], out: &mut Vec<u8>) -> u32 {
        let form = Form::of(dtype);
        let mut table = std::mem::take(&mut self.table);
        table.clear();
        let mut sum = 0;
        for block in raw.chunks(BLOCK_BYTES) {
            sum = crc32c_join(sum, self.block(form, block, out, &mut table), block.len() as u64);
        }
        finish(form, raw.len() as u64, &table, out);
        self.table = table;
        sum
    }

    /// Appends one block to `out` and its row to `table`; returns the CRC-32C of `raw`. Blocks of a
    /// chunk may be encoded by many threads: the stored form is the blocks in order, then the rows
    /// in order, then the foot that [`finish`] appends. All but the last are [`BLOCK_BYTES`].
    pub fn block(&mut self, form: Form, raw: &[u8], out: &mut Vec<u8>, table: &mut Vec<u8>) -> u32 {
        debug_assert!(raw.len() <= BLOCK_BYTES);
        let sum = crc32c(raw);
        let numbers = raw.len() / form.width;
        let (whole, rest) = raw.split_at(numbers * form.width);
        let mut planes = std::mem::take(&mut self.planes);
        planes.resize(BLOCK_BYTES, 0);
        let mut stored: [Stored; super::PLANES_MAX] = [(Method::Raw, 0); super::PLANES_MAX];
        if numbers > 0 {
            split(form, whole, &mut planes[..whole.len()]);
            for (plane, stored) in planes[..whole.len()].chunks(numbers).zip(&mut stored) {
                *stored = self.plane(plane, out);
            }
        }
        out.extend_from_slice(rest);
        self.planes = planes;
        push_row(table, sum, &stored[..form.width]);
        sum
    }

    fn plane(&mut self, plane: &[u8], out: &mut Vec<u8>) -> Stored {
        if plane.len() > 1 && plane[1..] == plane[..plane.len() - 1] {
            out.push(plane[0]);
            return (Method::Constant, 1);
        }
        let limit = plane.len() - plane.len().div_ceil(PLANE_SAVED_SHARE);
        if has_pattern(plane) {
            self.packed.clear();
            self.packed.reserve(zstd::zstd_safe::compress_bound(plane.len()));
            // What cannot be coded for whatever reason is stored as it is.
            let coded = self.zstd.compress_to_buffer(plane, &mut self.packed);
            if let Ok(bytes) = coded
                && bytes <= limit
            {
                out.extend_from_slice(&self.packed);
                return (Method::Zstd, bytes);
            }
        }
        out.extend_from_slice(plane);
        (Method::Raw, plane.len())
    }
}

/// Appends what follows the blocks: their rows, and the foot.
pub fn finish(form: Form, raw_bytes: u64, table: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(table);
    out.extend_from_slice(&foot(form, raw_bytes));
}

/// A compressor that only counts and codes bytes.
fn literals_only() -> io::Result<Compressor<'static>> {
    let mut zstd = Compressor::new(1)?;
    for parameter in [
        CParameter::Strategy(Strategy::ZSTD_fast),
        CParameter::TargetLength(SEARCH_STEP),
        CParameter::HashLog(SEARCH_TABLE_LOG),
        // A search this hasty turns literals' coding off unless it is asked for.
        CParameter::LiteralCompressionMode(ParamSwitch::Enable),
    ] {
        zstd.set_parameter(parameter)?;
    }
    Ok(zstd)
}
