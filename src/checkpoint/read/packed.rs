//! Compressed chunks on their way to tensors: their tables, the blocks that a read brought, and a
//! chunk as a stream.
//!
//! A short chunk comes in one part, table and all. Of a longer one the table is read first, and
//! the parts are whole blocks, so that they may arrive in any order at any thread.

use std::ops::Range;
use std::sync::Arc;

use super::OLDER;
use super::windows::{WHOLE_BYTES_MAX, Wanted};
use crate::checkpoint::codec::{BLOCK_BYTES, Decoder, Fault, Index};
use crate::checkpoint::layout::{Chunk, Dtype, crc32c, crc32c_join};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::ReadAt;

/// Stored bytes of one part of a chunk whose table was read first: small enough to be decoded
/// while a core's cache has them, large enough to be one read.
const PART_BYTES: u64 = 1 << 20;

/// The table of a chunk that comes in more than one part.
#[derive(Debug)]
pub struct Table {
    pub index: Index,
    /// CRC-32C and length of the table and the foot, which are not read again.
    pub sum: (u32, u64),
}

/// Whether a chunk fits one part.
pub fn is_short(chunk: &Chunk) -> bool {
    chunk.length <= WHOLE_BYTES_MAX
}

/// Reads the table of a chunk.
pub async fn table(file: &dyn ReadAt, path: &str, chunk: &Chunk) -> Result<Table> {
    let named = || format!("{path}, tensor {}", chunk.path);
    let (dtype, raw_bytes) = (Dtype::named(&chunk.dtype)?, chunk.raw_bytes());
    let end_bytes = Index::end_bytes(dtype, raw_bytes).filter(|&bytes| bytes <= chunk.length);
    let Some(end_bytes) = end_bytes else {
        let found = format!("{} bytes in all", chunk.length);
        return Err(Error::corrupt(named(), chunk.start, "a table of blocks", found, OLDER));
    };
    let buffer = Buffer::heap(end_bytes as usize);
    let end = file.read_at(chunk.start + chunk.length - end_bytes, buffer).await?;
    let index = Index::parse(dtype, raw_bytes, chunk.length, &end)
        .map_err(|fault| fault.in_file(named(), chunk.start))?;
    Ok(Table { index, sum: (crc32c(&end), end_bytes) })
}

/// The reads that bring all blocks of a chunk, as `id`: runs of whole blocks.
pub fn wanted(id: usize, chunk: &Chunk, index: &Index) -> Vec<Wanted> {
    let mut found: Vec<Wanted> = Vec::new();
    for i in 0..index.blocks() {
        let range = index.stored_range(i);
        let (start, end) = (chunk.start + range.start, chunk.start + range.end);
        match found.last_mut() {
            Some(last) if end - last.start <= PART_BYTES => last.end = end,
            _ => found.push(Wanted { id, start, end, whole: true }),
        }
    }
    found
}

/// Decodes parts; one per thread.
#[derive(Debug, Default)]
pub struct Unpacker {
    decoder: Decoder,
    /// A block that does not go to one place.
    raw: Vec<u8>,
}

/// Where the bytes of a block go.
pub trait Place {
    /// Memory for all of raw bytes `range` in one piece, if they go there so.
    fn straight(&mut self, range: Range<u64>) -> Option<&mut [u8]>;
    /// Whether any of them is wanted.
    fn wants(&self, range: Range<u64>) -> bool;
    /// Takes them.
    fn take(&mut self, range: Range<u64>, bytes: &[u8]);
}

impl Unpacker {
    /// Decodes the blocks in `stored`, which starts with a whole one `at` bytes into the chunk and
    /// ends with one, or with all of the chunk.
    pub fn blocks(
        &mut self,
        index: &Index,
        at: u64,
        stored: &[u8],
        place: &mut dyn Place,
    ) -> Result<(), Fault> {
        let (mut reached, end) = (at, at + stored.len() as u64);
        for i in index.block_at(at)..index.blocks() {
            let from = index.stored_range(i);
            if from.start != reached || from.end > end {
                break;
            }
            reached = from.end;
            let range = index.raw_range(i);
            let bytes = &stored[(from.start - at) as usize..(from.end - at) as usize];
            if let Some(memory) = place.straight(range.clone()) {
                self.decoder.block(index, i, bytes, memory)?;
            } else if place.wants(range.clone()) {
                self.raw.resize(BLOCK_BYTES, 0);
                let raw = &mut self.raw[..(range.end - range.start) as usize];
                self.decoder.block(index, i, bytes, raw)?;
                place.take(range, raw);
            }
        }
        if reached == end || reached == index.stored_range(index.blocks()).start {
            return Ok(());
        }
        Err(Fault::new(reached, "whole blocks", format!("bytes {at}..{end}")))
    }
}

/// The raw bytes of a compressed chunk from first to last.
pub struct Stream<'a> {
    file: Arc<dyn ReadAt>,
    /// The file's path, for messages.
    path: String,
    chunk: &'a Chunk,
    table: Table,
    next_block: usize,
    /// The block that was begun, and bytes of it that are done.
    block: Vec<u8>,
    done: usize,
    crc32c: u32,
}

impl<'a> Stream<'a> {
    /// A stream of a chunk of `file`, whose path is for messages.
    pub async fn open(file: Arc<dyn ReadAt>, path: String, chunk: &'a Chunk) -> Result<Self> {
        let table = table(file.as_ref(), &path, chunk).await?;
        let (next_block, block, done, crc32c) = (0, Vec::new(), 0, 0);
        Ok(Self { file, path, chunk, table, next_block, block, done, crc32c })
    }

    /// The next raw bytes.
    pub async fn next(&mut self, decoder: &mut Decoder, out: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < out.len() {
            if self.done == self.block.len() {
                filled += self.whole_blocks(decoder, &mut out[filled..]).await?;
                if filled == out.len() {
                    break;
                }
                self.begin_block(decoder).await?;
            }
            let take = (self.block.len() - self.done).min(out.len() - filled);
            let bytes = &self.block[self.done..self.done + take];
            out[filled..filled + take].copy_from_slice(bytes);
            (filled, self.done) = (filled + take, self.done + take);
        }
        if self.done == self.block.len() {
            // Many chunks may be under way at a time.
            (self.block, self.done) = (Vec::new(), 0);
        }
        Ok(())
    }

    /// Checksum of the stored bytes, once all was read.
    pub fn stored_crc32c(&self) -> u32 {
        crc32c_join(self.crc32c, self.table.sum.0, self.table.sum.1)
    }

    /// Decodes the blocks that `out` begins with; returns their bytes.
    async fn whole_blocks(&mut self, decoder: &mut Decoder, out: &mut [u8]) -> Result<usize> {
        let index = &self.table.index;
        let start = index.raw_range(self.next_block).start;
        let fits = |i: &usize| index.raw_range(*i).end - start <= out.len() as u64;
        let last = (self.next_block..index.blocks()).take_while(fits).last();
        let Some(last) = last else { return Ok(0) };
        self.read(last, decoder, out).await
    }

    async fn begin_block(&mut self, decoder: &mut Decoder) -> Result<()> {
        let range = self.table.index.raw_range(self.next_block);
        let mut block = std::mem::take(&mut self.block);
        block.resize((range.end - range.start) as usize, 0);
        if block.is_empty() {
            let found = format!("only {} bytes", range.end);
            let file = format!("{}, tensor {}", self.path, self.chunk.path);
            return Err(Error::corrupt(file, self.chunk.start, "a longer chunk", found, OLDER));
        }
        self.read(self.next_block, decoder, &mut block).await?;
        (self.block, self.done) = (block, 0);
        Ok(())
    }

    /// Reads and decodes the blocks up to `last` into the start of `out`; returns their bytes.
    async fn read(&mut self, last: usize, decoder: &mut Decoder, out: &mut [u8]) -> Result<usize> {
        let index = &self.table.index;
        let (start, end) =
            (index.stored_range(self.next_block).start, index.stored_range(last).end);
        let buffer = Buffer::heap((end - start) as usize);
        let stored = self.file.read_at(self.chunk.start + start, buffer).await?;
        self.crc32c = crc32c_join(self.crc32c, crc32c(&stored), end - start);
        let mut filled = 0;
        for i in self.next_block..=last {
            let (from, raw) = (index.stored_range(i), index.raw_range(i));
            let bytes = &stored[(from.start - start) as usize..(from.end - start) as usize];
            let to = filled + (raw.end - raw.start) as usize;
            decoder.block(index, i, bytes, &mut out[filled..to]).map_err(|fault| {
                fault
                    .in_file(format!("{}, tensor {}", self.path, self.chunk.path), self.chunk.start)
            })?;
            filled = to;
        }
        self.next_block = last + 1;
        Ok(filled)
    }
}
