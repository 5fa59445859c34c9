//! The end of the stored form: one row per block, then the foot.
//!
//! A row is the CRC-32C of the block's raw bytes and one word per plane: the method in its highest
//! byte, the stored bytes in the other three. The foot says what all of it is a form of.

use std::ops::Range;

use super::{BLOCK_BYTES, Fault, Form, PLANES_MAX};
use crate::checkpoint::layout::Dtype;

/// Bytes of the foot.
const FOOT_BYTES: usize = 16;
const MAGIC: &[u8; 4] = b"dtpz";
const VERSION: u8 = 1;
/// Bits of a plane's word that count bytes.
const SIZE_BITS: u32 = 24;

/// How a plane is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Method {
    /// As it is.
    Raw = 0,
    /// One frame of zstd.
    Zstd = 1,
    /// One byte that all of it equals.
    Constant = 2,
}

/// A plane of a block: how, and stored bytes.
pub type Stored = (Method, usize);

/// Appends the row of a block.
pub fn push_row(table: &mut Vec<u8>, raw_crc32c: u32, planes: &[Stored]) {
    table.extend_from_slice(&raw_crc32c.to_le_bytes());
    for &(method, bytes) in planes {
        let word = (method as u32) << SIZE_BITS | bytes as u32;
        table.extend_from_slice(&word.to_le_bytes());
    }
}

/// The foot of a chunk of `raw_bytes`.
pub fn foot(form: Form, raw_bytes: u64) -> [u8; FOOT_BYTES] {
    let mut foot = [0; FOOT_BYTES];
    foot[..8].copy_from_slice(&raw_bytes.to_le_bytes());
    (foot[8], foot[9], foot[10]) = (VERSION, form.width as u8, form.rotated.into());
    foot[12..].copy_from_slice(MAGIC);
    foot
}

#[derive(Debug, Clone)]
struct Row {
    /// Where the block starts in the stored bytes.
    start: u64,
    raw_crc32c: u32,
    planes: [(Method, u32); PLANES_MAX],
}

/// Where the blocks of a chunk lie. Every number in it was checked against the others.
#[derive(Debug, Clone)]
pub struct Index {
    form: Form,
    raw_bytes: u64,
    rows: Vec<Row>,
    /// Where the last block ends.
    end: u64,
}

impl Index {
    /// Bytes at the end of the stored form that [`Index::parse`] wants, of a chunk that is
    /// `raw_bytes` of `dtype`; `None` if no file could hold it.
    pub fn end_bytes(dtype: Dtype, raw_bytes: u64) -> Option<u64> {
        let row_bytes = 4 + 4 * Form::of(dtype).width as u64;
        let rows = raw_bytes.div_ceil(BLOCK_BYTES as u64).checked_mul(row_bytes)?;
        rows.checked_add(FOOT_BYTES as u64)
    }

    /// The index of a chunk that is `raw_bytes` of `dtype`, from all of its stored bytes.
    pub fn of(dtype: Dtype, raw_bytes: u64, stored: &[u8]) -> Result<Self, Fault> {
        let end_bytes = Self::end_bytes(dtype, raw_bytes).unwrap_or(u64::MAX);
        let table = (stored.len() as u64).saturating_sub(end_bytes) as usize;
        Self::parse(dtype, raw_bytes, stored.len() as u64, &stored[table..])
    }

    /// Reads the last [`Index::end_bytes`] of `stored_bytes`.
    pub fn parse(
        dtype: Dtype,
        raw_bytes: u64,
        stored_bytes: u64,
        end: &[u8],
    ) -> Result<Self, Fault> {
        let form = Form::of(dtype);
        let end_bytes = Self::end_bytes(dtype, raw_bytes).unwrap_or(u64::MAX);
        if end.len() as u64 != end_bytes || end_bytes > stored_bytes {
            let expected = format!("{end_bytes} bytes of table and foot");
            return Err(Fault::new(0, expected, format!("{stored_bytes} in all")));
        }
        let (table, found) = end.split_at(end.len() - FOOT_BYTES);
        let expected = foot(form, raw_bytes);
        if found != expected {
            let at = stored_bytes - FOOT_BYTES as u64;
            return Err(Fault::new(at, format!("foot {expected:02x?}"), format!("{found:02x?}")));
        }
        let mut index = Self { form, raw_bytes, rows: Vec::new(), end: 0 };
        let table_start = stored_bytes - end_bytes;
        index.rows.reserve_exact(raw_bytes.div_ceil(BLOCK_BYTES as u64) as usize);
        for words in table.chunks_exact(4 + 4 * form.width) {
            let row = index.row(words.as_chunks().0).map_err(|(expected, found)| {
                let at = table_start + (index.rows.len() * words.len()) as u64;
                Fault::new(at, expected, found)
            })?;
            index.rows.push(row);
        }
        if index.end != table_start {
            let expected = format!("blocks of {} bytes, as the table says", index.end);
            return Err(Fault::new(0, expected, format!("{table_start} bytes")));
        }
        Ok(index)
    }

    /// Checks the next row and moves `end` behind its block.
    fn row(&mut self, words: &[[u8; 4]]) -> Result<Row, (String, String)> {
        let bytes = self.raw_range(self.rows.len()).count();
        let numbers = (bytes / self.form.width) as u32;
        let word = |i: usize| words.get(i).map_or(0, |word| u32::from_le_bytes(*word));
        let mut row =
            Row { start: self.end, raw_crc32c: word(0), planes: [(Method::Raw, 0); PLANES_MAX] };
        let mut stored = (bytes % self.form.width) as u64;
        for (p, plane) in row.planes.iter_mut().enumerate().take(self.form.width) {
            let word = word(p + 1);
            let size = word & ((1 << SIZE_BITS) - 1);
            let (method, fits) = match word >> SIZE_BITS {
                0 => (Method::Raw, size == numbers),
                1 => (Method::Zstd, 0 < size && size < numbers),
                2 => (Method::Constant, size == 1 && size < numbers),
                _ => (Method::Raw, false),
            };
            if !fits {
                let expected = format!("a plane of {numbers} bytes, or shorter and coded");
                return Err((expected, format!("method {}, {size} bytes", word >> SIZE_BITS)));
            }
            *plane = (method, size);
            stored += u64::from(size);
        }
        self.end += stored;
        Ok(row)
    }

    /// The form of the numbers.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Blocks of the chunk.
    pub fn blocks(&self) -> usize {
        self.rows.len()
    }

    /// Raw bytes of the chunk.
    pub fn raw_bytes(&self) -> u64 {
        self.raw_bytes
    }

    /// Raw bytes that block `i` holds.
    pub fn raw_range(&self, i: usize) -> Range<u64> {
        let at = |i: usize| (i as u64).saturating_mul(BLOCK_BYTES as u64).min(self.raw_bytes);
        at(i)..at(i + 1)
    }

    /// Stored bytes of block `i`; those of neighbours touch.
    pub fn stored_range(&self, i: usize) -> Range<u64> {
        let at = |i: usize| self.rows.get(i).map_or(self.end, |row| row.start);
        at(i)..at(i + 1)
    }

    /// The block that starts `at` bytes into the stored form.
    pub fn block_at(&self, at: u64) -> usize {
        self.rows.partition_point(|row| row.start < at)
    }

    /// The planes of block `i`, and the checksum of its raw bytes.
    pub fn planes(&self, i: usize) -> Option<(u32, impl Iterator<Item = Stored> + '_)> {
        let row = self.rows.get(i)?;
        let planes = row.planes.iter().take(self.form.width);
        Some((row.raw_crc32c, planes.map(|&(method, bytes)| (method, bytes as usize))))
    }
}
