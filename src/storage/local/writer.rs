//! A streamed write of a new local file, with a bounded number of operations in flight.
//!
//! Under O_DIRECT, slices that are page-aligned in memory and in the file go to the device as they
//! are; the rest is gathered in bounce buffers. The last block is written whole, padded with zeros,
//! and the file is then cut to its true size.

use std::collections::VecDeque;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use rustix::fs::{FallocateFlags, fallocate};
use tokio::task::JoinHandle;

use super::file::{BOUNCE_BYTES, Target, bounce_bytes, take_bounce};
use super::names::make_folders;
use super::op::Work;
use super::sys::{self, OpenMode, blocking, write_error};
use crate::error::{Error, Result};
use crate::memory::{Buffer, PAGE_BYTES};
use crate::storage::Writer;

/// Operations of one writer in flight.
const WRITER_OPS_MAX: usize = 8;
/// Bytes of one writer in flight; a single larger operation still goes alone.
const WRITER_BYTES_MAX: usize = 64 << 20;
/// Largest single write: large enough for full bandwidth, small enough to overlap with the next.
const WRITE_BYTES_MAX: usize = 8 << 20;

/// A new local file that grows by `write`.
pub struct LocalWriter {
    target: Target,
    size_hint_bytes: Option<u64>,
    /// Bytes accepted, and where the gathered ones begin in the file.
    accepted_bytes: u64,
    gathered: Option<Buffer>,
    fill: usize,
    in_flight: VecDeque<(usize, JoinHandle<Result<()>>)>,
    in_flight_bytes: usize,
    failed: bool,
}

/// Creates the file and reserves its space.
pub fn create(path: &Path, size_bytes: Option<u64>, direct: bool) -> Result<(File, bool)> {
    make_folders(path)?;
    let opened = sys::open_maybe_direct(path, OpenMode::CreateNew, direct);
    let (file, direct) = opened.map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => Error::AlreadyExists {
            what: path.display().to_string(),
            advice: "choose another name or delete it first".into(),
        },
        _ => write_error("create", path, size_bytes.unwrap_or(0), e),
    })?;
    if let Err(error) = reserve(&file, path, size_bytes.unwrap_or(0)) {
        drop(file);
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok((file, direct))
}

fn reserve(file: &File, path: &Path, size_bytes: u64) -> Result<()> {
    use rustix::io::Errno;
    if size_bytes == 0 {
        return Ok(());
    }
    // Asked first: a reservation that fails may fill the disk for everyone until it gives up.
    let have_bytes = sys::free_bytes(path.parent().unwrap_or(path));
    if have_bytes < size_bytes {
        let path = path.display().to_string();
        return Err(Error::NoSpace { path, need_bytes: size_bytes, have_bytes });
    }
    match fallocate(file, FallocateFlags::empty(), 0, size_bytes) {
        // File systems that cannot reserve will tell when they are full.
        Ok(()) | Err(Errno::NOTSUP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(e) => Err(write_error("reserve space for", path, size_bytes, e.into())),
    }
}

impl LocalWriter {
    /// A writer over a file made by [`create`].
    pub fn new(target: Target, size_hint_bytes: Option<u64>) -> Self {
        Self {
            target,
            size_hint_bytes,
            accepted_bytes: 0,
            gathered: None,
            fill: 0,
            in_flight: VecDeque::new(),
            in_flight_bytes: 0,
            failed: false,
        }
    }

    async fn append(&mut self, mut data: Bytes) -> Result<()> {
        if !self.target.direct {
            return self.send_pieces(data).await;
        }
        while !data.is_empty() {
            let whole = data.len() - data.len() % PAGE_BYTES;
            let aligned = data.as_ptr().addr().is_multiple_of(PAGE_BYTES);
            if self.fill.is_multiple_of(PAGE_BYTES) && aligned && whole > 0 {
                self.flush_gathered().await?;
                self.send_pieces(data.split_to(whole)).await?;
            } else {
                let taken = self.gather(&data, aligned);
                data = data.split_off(taken);
                if self.fill == BOUNCE_BYTES {
                    self.flush_gathered().await?;
                }
            }
        }
        Ok(())
    }

    /// Copies a part of `data` behind what is gathered; returns its length.
    fn gather(&mut self, data: &[u8], aligned: bool) -> usize {
        let buf = self.gathered.get_or_insert_with(take_bounce);
        let room = BOUNCE_BYTES - self.fill;
        let to_boundary = PAGE_BYTES - self.fill % PAGE_BYTES;
        // Stop at the block's end if the memory after it could go straight.
        let straight_after = !aligned
            && data.len() > to_boundary
            && (data.as_ptr().addr() + to_boundary).is_multiple_of(PAGE_BYTES);
        let taken = data.len().min(if straight_after { to_boundary } else { room });
        buf[self.fill..self.fill + taken].copy_from_slice(&data[..taken]);
        self.fill += taken;
        self.accepted_bytes += taken as u64;
        taken
    }

    /// Sends the gathered bytes; a torn last block is padded with zeros.
    async fn flush_gathered(&mut self) -> Result<()> {
        let Some(mut buf) = self.gathered.take() else { return Ok(()) };
        let offset = self.accepted_bytes - self.fill as u64;
        let padded = self.fill.next_multiple_of(PAGE_BYTES);
        buf[self.fill..padded].fill(0);
        buf.set_len(padded);
        self.fill = 0;
        self.send(offset, bounce_bytes(buf)).await
    }

    async fn send_pieces(&mut self, mut data: Bytes) -> Result<()> {
        while !data.is_empty() {
            let piece = data.split_to(data.len().min(WRITE_BYTES_MAX));
            let offset = self.accepted_bytes;
            self.accepted_bytes += piece.len() as u64;
            self.send(offset, piece).await?;
        }
        Ok(())
    }

    /// Starts one write, after waiting for older ones while too much is in flight.
    async fn send(&mut self, offset: u64, data: Bytes) -> Result<()> {
        let len = data.len();
        while self.in_flight.len() >= WRITER_OPS_MAX
            || (self.in_flight_bytes + len > WRITER_BYTES_MAX && !self.in_flight.is_empty())
        {
            self.wait_oldest().await?;
        }
        let target = self.target.clone();
        let need_bytes = self.size_hint_bytes.unwrap_or(0).saturating_sub(offset).max(len as u64);
        let task = write_task(target, offset, data, need_bytes);
        let handle = crate::runtime::runtime()?.spawn(task);
        self.in_flight.push_back((len, handle));
        self.in_flight_bytes += len;
        Ok(())
    }

    async fn wait_oldest(&mut self) -> Result<()> {
        let Some((len, handle)) = self.in_flight.front_mut() else { return Ok(()) };
        let joined = handle.await;
        self.in_flight_bytes -= *len;
        self.in_flight.pop_front();
        joined.map_err(|e| Error::io("write", "task", std::io::Error::other(e)))?
    }

    /// Waits for everything in flight, and returns the first error.
    async fn drain(&mut self) -> Result<()> {
        let mut first = Ok(());
        while !self.in_flight.is_empty() {
            let result = self.wait_oldest().await;
            first = first.and(result);
        }
        first
    }

    async fn complete(&mut self) -> Result<u64> {
        if self.failed {
            let what = format!("write of {} after an error", self.target.path.display());
            return Err(Error::Closed { what });
        }
        let padded = !self.fill.is_multiple_of(PAGE_BYTES);
        self.flush_gathered().await?;
        self.drain().await?;
        let size = self.accepted_bytes;
        if padded || self.size_hint_bytes.is_some_and(|hint| hint != size) {
            let (file, path) = (Arc::clone(&self.target.file), Arc::clone(&self.target.path));
            let cut = move || file.set_len(size).map_err(|e| write_error("cut", &path, 0, e));
            blocking(cut).await?;
        }
        let synced = self.target.run_write("fsync", 0, Work::Sync, 0).await;
        synced.map(|_| size)
    }

    /// Waits until the kernel is done with the file, then unlinks it.
    async fn remove(mut self) -> Result<()> {
        let _ = self.drain().await;
        let path = Arc::clone(&self.target.path);
        blocking(move || match std::fs::remove_file(&*path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", path.display().to_string(), e))
            }
            _ => Ok(()),
        })
        .await
    }
}

async fn write_task(target: Target, offset: u64, data: Bytes, need_bytes: u64) -> Result<()> {
    target.run_write("write", offset, Work::Write { data }, need_bytes).await.map(drop)
}

impl Writer for LocalWriter {
    fn write(&mut self, data: Bytes) -> BoxFuture<'_, Result<()>> {
        async move {
            let result = self.append(data).await;
            self.failed |= result.is_err();
            result
        }
        .boxed()
    }

    /// A failed finish removes the file: what it holds is unknown.
    fn finish(mut self: Box<Self>) -> BoxFuture<'static, Result<u64>> {
        async move {
            let result = self.complete().await;
            if result.is_err() {
                let _ = self.remove().await;
            }
            result
        }
        .boxed()
    }

    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.remove().boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::local::engine::{EngineChoice, engine};
    use crate::storage::local::{LocalOptions, counters::Counters};

    #[test]
    fn a_disk_that_fills_up_during_the_write_is_named() {
        for choice in [EngineChoice::Uring, EngineChoice::Threads] {
            let Ok(engine) = engine(choice) else { continue };
            let file = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
            let target = Target {
                file: Arc::new(file),
                // A name that a failed finish may try to remove.
                path: Arc::new("/nonexistent/full".into()),
                direct: false,
                engine,
                counters: Arc::new(Counters::default()),
                options: LocalOptions::default(),
            };
            let mut writer = Box::new(LocalWriter::new(target, Some(1 << 20)));
            let error = crate::runtime::block_on(async {
                writer.write(Bytes::from(vec![0; 100_000])).await.unwrap();
                writer.finish().await.unwrap_err()
            });
            let Error::NoSpace { need_bytes, path, .. } = error.unwrap() else { panic!("other") };
            assert_eq!((need_bytes, path.as_str()), (1 << 20, "/nonexistent/full"));
        }
    }
}
