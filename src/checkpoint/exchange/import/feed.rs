//! The bytes of pieces from a source's files, read ahead in the order they are wanted; neighbours
//! come in one read.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::FutureExt;
use futures::StreamExt;
use futures::future::{BoxFuture, LocalBoxFuture};
use futures::stream::FuturesOrdered;

use super::Progress;
use crate::checkpoint::exchange::stream::Feed;
use crate::checkpoint::layout::Piece;
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::ReadAt;

/// Longest read.
const READ_BYTES: u64 = 8 << 20;
/// Reads in flight.
const DEPTH: usize = 4;
/// A hole between wanted ranges that is read rather than skipped.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Memory for the storage of a tensor whose elements do not lie in order.
pub const TURNED_BYTES_MAX: u64 = 128 << 20;

/// Where the bytes of a piece are.
#[derive(Debug, Clone)]
pub enum Span {
    /// In order, from byte `start` of a file on.
    Range {
        /// Number of the file.
        file: usize,
        /// First byte.
        start: u64,
    },
    /// In another order: elements of `element` bytes at strides (in elements) from `start` on.
    Turned {
        /// Number of the file.
        file: usize,
        /// Byte of the first element.
        start: u64,
        /// Bytes of an element.
        element: u64,
        /// Elements per dimension.
        shape: Vec<i64>,
        /// Distance of neighbours per dimension, in elements.
        strides: Vec<i64>,
    },
    /// In memory.
    Inline(Vec<u8>),
}

impl Span {
    /// Bytes from the first to the last element of a turned tensor.
    pub fn turned_bytes(element: u64, shape: &[i64], strides: &[i64]) -> u64 {
        let last: i64 = shape.iter().zip(strides).map(|(&n, &s)| (n - 1).max(0) * s).sum();
        (last as u64 + 1) * element
    }
}

struct Read {
    file: usize,
    start: u64,
    end: u64,
}

type InFlight = BoxFuture<'static, (usize, u64, Result<Buffer>)>;

/// Feeds a writer from a source.
pub struct SourceFeed<'a> {
    files: &'a [Arc<dyn ReadAt>],
    pieces: &'a [Piece],
    spans: &'a [Span],
    progress: &'a mut dyn FnMut(Progress),
    planned: VecDeque<Read>,
    reads: FuturesOrdered<InFlight>,
    /// What was read last, and where it lies.
    now: Option<(usize, u64, Buffer)>,
    /// A turned tensor, in order.
    turned: Option<(usize, Vec<u8>)>,
}

impl<'a> SourceFeed<'a> {
    /// A feed of `pieces`, whose bytes are at the span of the same number.
    pub fn new(
        files: &'a [Arc<dyn ReadAt>],
        pieces: &'a [Piece],
        spans: &'a [Span],
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        let (planned, reads) = (VecDeque::new(), FuturesOrdered::new());
        Self { files, pieces, spans, progress, planned, reads, now: None, turned: None }
    }

    async fn range(&mut self, file: usize, mut start: u64, mut out: &mut [u8]) -> Result<()> {
        while !out.is_empty() {
            if let Some((held, from, buffer)) = &self.now
                && *held == file
                && *from <= start
                && start < from + buffer.len() as u64
            {
                let at = (start - from) as usize;
                let n = out.len().min(buffer.len() - at);
                let (now, later) = out.split_at_mut(n);
                now.copy_from_slice(&buffer[at..at + n]);
                out = later;
                start += n as u64;
                continue;
            }
            self.next_read().await?;
        }
        Ok(())
    }

    async fn next_read(&mut self) -> Result<()> {
        while self.reads.len() < DEPTH
            && let Some(read) = self.planned.pop_front()
        {
            let opened = Arc::clone(&self.files[read.file]);
            self.reads.push_back(
                async move {
                    let buffer = Buffer::heap((read.end - read.start) as usize);
                    (read.file, read.start, opened.read_at(read.start, buffer).await)
                }
                .boxed(),
            );
        }
        let Some((file, start, buffer)) = self.reads.next().await else {
            let found = "a range that was not planned";
            return Err(Error::invalid("import", "pieces in the order of the file", found));
        };
        self.now = Some((file, start, buffer?));
        Ok(())
    }

    /// Reads a turned tensor's storage and puts its elements in order.
    async fn turn(&mut self, piece: usize) -> Result<()> {
        let Span::Turned { file, start, element, shape, strides } = &self.spans[piece] else {
            return Ok(());
        };
        let bytes = Span::turned_bytes(*element, shape, strides);
        let storage = self.files[*file].read_at(*start, Buffer::heap(bytes as usize)).await?;
        let mut ordered = Vec::with_capacity(self.pieces[piece].length as usize);
        let mut index = vec![0_i64; shape.len()];
        let count: i64 = shape.iter().product();
        for _ in 0..count {
            let at: i64 = index.iter().zip(strides).map(|(i, s)| i * s).sum();
            let from = at as usize * *element as usize;
            ordered.extend_from_slice(&storage[from..from + *element as usize]);
            for d in (0..shape.len()).rev() {
                index[d] += 1;
                if index[d] < shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        self.turned = Some((piece, ordered));
        Ok(())
    }

    async fn piece(&mut self, piece: usize, at: u64, out: &mut [u8]) -> Result<()> {
        match &self.spans[piece] {
            Span::Range { file, start } => self.range(*file, start + at, out).await?,
            Span::Inline(bytes) => {
                let at = at as usize;
                out.copy_from_slice(&bytes[at..at + out.len()]);
            }
            Span::Turned { .. } => {
                if self.turned.as_ref().is_none_or(|(held, _)| *held != piece) {
                    self.turned = None;
                    self.turn(piece).await?;
                }
                if let Some((_, bytes)) = &self.turned {
                    out.copy_from_slice(&bytes[at as usize..at as usize + out.len()]);
                }
            }
        }
        (self.progress)(Progress::Done(out.len() as u64));
        Ok(())
    }
}

impl Feed for SourceFeed<'_> {
    fn begin(&mut self, order: &[usize]) {
        self.planned.clear();
        for &piece in order {
            let Span::Range { file, start } = self.spans[piece] else { continue };
            let end = start + self.pieces[piece].length;
            plan_range(&mut self.planned, file, start, end);
        }
    }

    fn fill<'a>(
        &'a mut self,
        piece: usize,
        at: u64,
        out: &'a mut [u8],
    ) -> LocalBoxFuture<'a, Result<()>> {
        self.piece(piece, at, out).boxed_local()
    }
}

/// Adds a range to the reads, joined to the last one if it follows closely.
fn plan_range(planned: &mut VecDeque<Read>, file: usize, mut start: u64, end: u64) {
    if let Some(last) = planned.back_mut()
        && last.file == file
        && start >= last.end
        && start - last.end <= GAP_BYTES_MAX
        && last.end - last.start < READ_BYTES
    {
        let joined = end.min(last.start + READ_BYTES).max(last.end);
        if joined > start {
            last.end = joined;
            start = joined;
        }
    }
    while start < end {
        let stop = end.min(start + READ_BYTES);
        planned.push_back(Read { file, start, end: stop });
        start = stop;
    }
}
