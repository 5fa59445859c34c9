//! A local file open for ranged reads, through the page cache or around it.
//!
//! O_DIRECT wants offset, length and memory in whole blocks. A read that starts on a page boundary
//! goes straight into its buffer (whose capacity is whole pages); any other is cut into windows of
//! whole pages that pass through bounce buffers.

use std::fs::File;
use std::io::IoSliceMut;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use rustix::io::{ReadWriteFlags, preadv2};

use super::counters::{Counters, Moved};
use super::engine::{Engine, EngineKind, engine, run};
use super::op::Work;
use super::sys::{deadline, write_error};
use super::{LocalOptions, names};
use crate::error::{Error, Result};
use crate::memory::{Buffer, PAGE_BYTES};
use crate::storage::{ObjectMeta, ReadAt};

const PAGE: u64 = PAGE_BYTES as u64;
/// Size of a bounce buffer: one direct read large enough to keep a device busy.
pub const BOUNCE_BYTES: usize = 1 << 20;
/// Bounce buffers kept for re-use; more are made and freed as needed.
const BOUNCES_KEPT_MAX: usize = 16;

static BOUNCES: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());

/// A bounce buffer of [`BOUNCE_BYTES`].
pub fn take_bounce() -> Buffer {
    let mut buf = BOUNCES.lock().pop().unwrap_or_else(|| Buffer::heap(BOUNCE_BYTES));
    buf.set_len(BOUNCE_BYTES);
    buf
}

/// A filled bounce buffer as the source of a write; it is kept for re-use when the write is done.
pub fn bounce_bytes(buf: Buffer) -> Bytes {
    Bytes::from_owner(Bounce(Some(buf)))
}

struct Bounce(Option<Buffer>);

impl AsRef<[u8]> for Bounce {
    fn as_ref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if let Some(buf) = self.0.take() {
            give_bounce(buf);
        }
    }
}

/// Keeps a bounce buffer for the next one who needs it.
pub fn give_bounce(buf: Buffer) {
    let mut kept = BOUNCES.lock();
    if kept.len() < BOUNCES_KEPT_MAX {
        kept.push(buf);
    }
}

/// What the operations of one open file share.
#[derive(Debug, Clone)]
pub struct Target {
    /// The open file.
    pub file: Arc<File>,
    /// Its path, for errors.
    pub path: Arc<PathBuf>,
    /// It was opened with O_DIRECT.
    pub direct: bool,
    /// What moves its bytes.
    pub engine: Arc<dyn Engine>,
    /// Where its operations are counted.
    pub counters: Arc<Counters>,
    /// Deadlines.
    pub options: LocalOptions,
}

impl Target {
    /// Reads into `buf` up to its length, at least `need_bytes`; returns the bytes read.
    async fn read(&self, offset: u64, buf: Buffer, need_bytes: usize) -> Result<(Buffer, usize)> {
        let work = Work::Read { buf, need_bytes };
        match self.run("read", offset, work).await? {
            (Work::Read { buf, .. }, moved) => Ok((buf, moved)),
            _ => Err(self.error("read", super::engine::stopped())),
        }
    }

    /// Runs one operation under the deadline, and counts it.
    pub async fn run(&self, op: &'static str, offset: u64, work: Work) -> Result<(Work, usize)> {
        let what = format!("{op} of {}", self.path.display());
        let wait = match work {
            Work::Sync => self.options.sync_timeout,
            _ => self.options.op_timeout,
        };
        let engine = self.living_engine()?;
        let running = run(&*engine, &self.file, offset, work, self.direct);
        let outcome = deadline(wait, &what, running).await?;
        let done = outcome.map_err(|e| self.error(op, e))?;
        let way = match done.work {
            Work::Read { .. } => Some(Moved::Read),
            Work::Write { .. } => Some(Moved::Written),
            Work::Sync => None,
        };
        if let Some(way) = way {
            self.counters.add(way, engine.kind(), self.direct, done.moved);
            self.counters.add_fixed(way, done.fixed);
        }
        Ok((done.work, done.moved))
    }

    /// The engine, or this process's own if the file was opened before a fork.
    fn living_engine(&self) -> Result<Arc<dyn Engine>> {
        if self.engine.pid() == std::process::id() {
            return Ok(Arc::clone(&self.engine));
        }
        engine(self.options.engine)
    }

    /// As [`Target::run`], with a full disk told as such.
    pub async fn run_write(
        &self,
        op: &'static str,
        offset: u64,
        work: Work,
        need_bytes: u64,
    ) -> Result<(Work, usize)> {
        match self.run(op, offset, work).await {
            Err(Error::Io { source, .. }) => Err(write_error(op, &self.path, need_bytes, source)),
            other => other,
        }
    }

    fn error(&self, op: &'static str, e: std::io::Error) -> Error {
        names::not_found_or(&self.path, op, e)
    }
}

/// A local file open for reading.
#[derive(Debug)]
pub struct LocalFile {
    /// The open file.
    pub target: Target,
    /// Size and version at opening.
    pub meta: ObjectMeta,
}

impl ReadAt for LocalFile {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn read_at(&self, offset: u64, buf: Buffer) -> BoxFuture<'static, Result<Buffer>> {
        let end = offset.checked_add(buf.len() as u64);
        let size = self.meta.size_bytes;
        if end.is_none_or(|end| end > size) {
            let error = too_short(&self.target, offset, buf.len(), size);
            return futures::future::ready(Err(error)).boxed();
        }
        let target = self.target.clone();
        async move {
            if buf.is_empty() {
                Ok(buf)
            } else if !target.direct {
                read_buffered(&target, offset, buf).await
            } else if offset.is_multiple_of(PAGE) {
                read_straight(&target, offset, buf).await
            } else {
                read_bounced(&target, offset, buf).await
            }
        }
        .boxed()
    }

    fn read_cached(&self, offset: u64, out: &mut [u8]) -> bool {
        if self.target.direct {
            return false;
        }
        let mut filled = 0;
        while filled < out.len() {
            let at = offset + filled as u64;
            let mut rest = [IoSliceMut::new(&mut out[filled..])];
            match preadv2(&self.target.file, &mut rest, at, ReadWriteFlags::NOWAIT) {
                Ok(moved) if moved > 0 => filled += moved,
                _ => return false,
            }
        }
        self.target.counters.add(Moved::Read, EngineKind::Threads, false, filled);
        true
    }
}

fn too_short(target: &Target, offset: u64, len: usize, size_bytes: u64) -> Error {
    Error::corrupt(
        target.path.display().to_string(),
        offset,
        format!("{len} bytes"),
        format!("a file of {size_bytes} bytes"),
        "the file is truncated or the index is of another version; index it again",
    )
}

async fn read_buffered(target: &Target, offset: u64, buf: Buffer) -> Result<Buffer> {
    let len = buf.len();
    let (buf, moved) = target.read(offset, buf, len).await?;
    complete(target, offset, buf, len, moved)
}

/// Whole pages into the buffer itself: its capacity covers them.
async fn read_straight(target: &Target, offset: u64, mut buf: Buffer) -> Result<Buffer> {
    let len = buf.len();
    buf.set_len(len.next_multiple_of(PAGE_BYTES));
    let (mut buf, moved) = target.read(offset, buf, len).await?;
    buf.set_len(len);
    complete(target, offset, buf, len, moved)
}

fn complete(target: &Target, offset: u64, buf: Buffer, len: usize, moved: usize) -> Result<Buffer> {
    if moved >= len {
        return Ok(buf);
    }
    Err(too_short(target, offset, len, offset + moved as u64))
}

/// Windows of whole pages through a bounce buffer.
async fn read_bounced(target: &Target, offset: u64, mut buf: Buffer) -> Result<Buffer> {
    let len = buf.len();
    let mut filled = 0;
    let mut bounce = take_bounce();
    while filled < len {
        let at = offset + filled as u64;
        let skip = (at % PAGE) as usize;
        let want = (len - filled).min(BOUNCE_BYTES - skip);
        bounce.set_len((skip + want).next_multiple_of(PAGE_BYTES));
        let (window, moved) = target.read(at - skip as u64, bounce, skip + want).await?;
        bounce = window;
        if moved < skip + want {
            return Err(too_short(target, offset, len, at - skip as u64 + moved as u64));
        }
        buf[filled..filled + want].copy_from_slice(&bounce[skip..skip + want]);
        filled += want;
    }
    give_bounce(bounce);
    Ok(buf)
}
