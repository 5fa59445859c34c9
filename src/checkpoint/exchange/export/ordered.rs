//! The elements of a tensor in row-major order from its chunks. Row-major order of the whole visits
//! the elements of each chunk in that chunk's own order, so every chunk is read from its first byte
//! to its last, once, in one pass over the tensor.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Source;
use crate::checkpoint::codec::Decoder;
use crate::checkpoint::flat::{moves, prove};
use crate::checkpoint::layout::{Chunk, Dtype, crc32c, crc32c_join, file_path};
use crate::checkpoint::read::Stream;
use crate::checkpoint::rects::{Rect, Runs};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::{OpenOptions, ReadAt};

const OLDER: &str = "use an older step";

/// The files of a checkpoint, opened when first used.
pub struct Files<'a> {
    source: &'a Source,
    /// By the step that holds the file, if it is another one, and the file's name there.
    open: BTreeMap<(Option<i64>, &'a str), Arc<dyn ReadAt>>,
}

impl<'a> Files<'a> {
    /// The files of `source`.
    pub fn new(source: &'a Source) -> Self {
        Self { source, open: BTreeMap::new() }
    }

    async fn open(&mut self, chunk: &'a Chunk) -> Result<Arc<dyn ReadAt>> {
        let name = (chunk.step_ref, chunk.file.as_str());
        if let Some(file) = self.open.get(&name) {
            return Ok(Arc::clone(file));
        }
        let path = self.source.step.path_of(chunk);
        let file = self.source.step.store().open(&path, OpenOptions::default()).await?;
        self.open.insert(name, Arc::clone(&file));
        Ok(file)
    }
}

/// How far one chunk has been read.
struct Cursor<'a> {
    chunk: &'a Chunk,
    file: Arc<dyn ReadAt>,
    runs: Vec<Runs>,
    /// The run that comes next: which list, which of it, and bytes of it that are done.
    list: usize,
    run: u64,
    within: u64,
    done: u64,
    crc: u32,
    /// Decodes the chunk if it is compressed.
    stream: Option<Stream<'a>>,
}

/// A tensor as a stream.
pub struct Ordered<'a> {
    folder: &'a str,
    path: &'a str,
    cursors: Vec<Cursor<'a>>,
    decoder: Decoder,
    at: u64,
    bytes: u64,
}

impl<'a> Ordered<'a> {
    /// A stream over all elements of the tensor, after proving that its chunks hold each once.
    pub async fn new(files: &mut Files<'a>, path: &'a str, chunks: &'a [Chunk]) -> Result<Self> {
        let Some(first) = chunks.first() else {
            return Err(Error::invalid("tensor", "at least one chunk", path));
        };
        let dtype = Dtype::named(&first.dtype)?;
        let whole = Rect::whole(&first.shape);
        let rects: Vec<_> = chunks.iter().map(Chunk::rect).collect();
        let folder = files.source.folder.as_str();
        prove(&first.shape, &whole, &rects).map_err(|fault| {
            let found = format!("{} missing, {} twice", fault.missing.len(), fault.twice.len());
            let file = format!("{folder}, tensor {path}");
            Error::corrupt(file, 0, "each element in exactly one chunk", found, OLDER)
        })?;
        let mut cursors = Vec::with_capacity(chunks.len());
        for (chunk, rect) in chunks.iter().zip(&rects) {
            let file = files.open(chunk).await?;
            let runs = moves(&first.shape, rect, &whole, dtype.bytes);
            let (list, run, within, done, crc) = (0, 0, 0, 0, 0);
            let stream = if chunk.is_raw() {
                None
            } else {
                Some(
                    Stream::open(Arc::clone(&file), files.source.step.path_of(chunk), chunk)
                        .await?,
                )
            };
            cursors.push(Cursor { chunk, file, runs, list, run, within, done, crc, stream });
        }
        let bytes = chunks.iter().map(Chunk::raw_bytes).sum();
        Ok(Self { folder, path, cursors, decoder: Decoder::default(), at: 0, bytes })
    }

    /// The next bytes. After the last ones all checksums have been compared.
    pub async fn next(&mut self, out: &mut [u8]) -> Result<()> {
        let end = self.at + out.len() as u64;
        let mut filled = 0;
        for cursor in &mut self.cursors {
            filled += cursor.copy(self.at, end, out, &mut self.decoder).await?;
        }
        if filled != out.len() as u64 {
            let expected = format!("{} bytes", out.len());
            let file = format!("{}, tensor {}", self.folder, self.path);
            return Err(Error::corrupt(file, self.at, expected, filled, OLDER));
        }
        self.at = end;
        if self.at == self.bytes {
            self.cursors.iter().try_for_each(|c| c.check(self.folder, self.path))?;
        }
        Ok(())
    }
}

impl Cursor<'_> {
    /// The next piece of a run before `end`: source, target, bytes.
    fn take(&mut self, end: u64) -> Option<(u64, u64, u64)> {
        loop {
            let runs = self.runs.get(self.list)?;
            if self.run == runs.count {
                (self.list, self.run) = (self.list + 1, 0);
                continue;
            }
            let (source, target) = runs.at(self.run);
            let (source, target) = (source + self.within, target + self.within);
            if target >= end {
                return None;
            }
            let n = (runs.run_bytes - self.within).min(end - target);
            self.within += n;
            if self.within == runs.run_bytes {
                (self.run, self.within) = (self.run + 1, 0);
            }
            return Some((source, target, n));
        }
    }

    /// Copies this chunk's part of bytes `at..end` of the tensor.
    async fn copy(
        &mut self,
        at: u64,
        end: u64,
        out: &mut [u8],
        decoder: &mut Decoder,
    ) -> Result<u64> {
        let mut pieces = Vec::new();
        let mut bytes = 0;
        while let Some(piece) = self.take(end) {
            bytes += piece.2;
            pieces.push(piece);
        }
        if bytes == 0 {
            return Ok(0);
        }
        let read = self.read(bytes, decoder).await?;
        for (source, target, n) in pieces {
            let from = source.checked_sub(self.done).map(|from| from as usize);
            let bytes = from.and_then(|from| read.get(from..from + n as usize));
            let to = target.checked_sub(at).map(|to| to as usize);
            let (Some(bytes), Some(to)) = (bytes, to) else {
                let found = format!("byte {source} of a chunk, byte {target} of its tensor");
                return Err(Error::invalid("export", "chunks in the order of memory", found));
            };
            out[to..to + n as usize].copy_from_slice(bytes);
        }
        self.done += bytes;
        Ok(bytes)
    }

    /// The chunk's next bytes.
    async fn read(&mut self, bytes: u64, decoder: &mut Decoder) -> Result<Buffer> {
        let mut buffer = Buffer::heap(bytes as usize);
        if let Some(stream) = &mut self.stream {
            stream.next(decoder, &mut buffer).await?;
            self.crc = stream.stored_crc32c();
            return Ok(buffer);
        }
        let read = self.file.read_at(self.chunk.start + self.done, buffer).await?;
        self.crc = crc32c_join(self.crc, crc32c(&read), bytes);
        Ok(read)
    }

    fn check(&self, folder: &str, path: &str) -> Result<()> {
        if self.crc == self.chunk.crc32c {
            return Ok(());
        }
        let file =
            format!("{}, tensor {path}", file_path(folder, self.chunk.step_ref, &self.chunk.file));
        let expected = format!("crc32c {:08x}", self.chunk.crc32c);
        Err(Error::corrupt(file, self.chunk.start, expected, format!("{:08x}", self.crc), OLDER))
    }
}
