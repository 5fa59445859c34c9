//! Streamed writes: one put where everything fits in a part, else a multipart upload with a bounded
//! number of parts in flight. Slices are handed on without a copy.
//!
//! Multipart uploads cannot be conditional, so `create` looks for an existing object first and the
//! caller's names must be its own. An upload that fails, is aborted or dropped is aborted at the
//! server, since unfinished parts are stored and billed for ever.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt, PutPayload, UploadPart};
use tokio::task::JoinSet;

use super::adapter::Shared;
use crate::error::{Error, Result};
use crate::storage::Writer;

/// Smallest part: S3 wants 5 MiB, and 8 MiB keep the request overhead under a percent.
const PART_BYTES_MIN: u64 = 8 << 20;
/// Part size when the final size is not known: 10,000 of them are 160 GB.
const PART_BYTES_DEFAULT: u64 = 16 << 20;
/// Largest part that S3 takes.
const PART_BYTES_MAX: u64 = 5 << 30;
/// Parts of one object, as S3 limits them.
const PARTS_MAX: u64 = 10_000;
/// Parts on their way at a time; with `PART_BYTES_DEFAULT` 64 MiB wait for the network.
const PARTS_IN_FLIGHT_MAX: usize = 4;

/// All parts but the last have one size, which some S3 servers insist on.
fn part_bytes(size_bytes: Option<u64>) -> Result<u64> {
    let Some(size) = size_bytes else { return Ok(PART_BYTES_DEFAULT) };
    let part = size.div_ceil(PARTS_MAX).next_multiple_of(1 << 20).max(PART_BYTES_MIN);
    if part > PART_BYTES_MAX {
        let expected = format!("at most {} bytes", PART_BYTES_MAX * PARTS_MAX);
        return Err(Error::invalid("size_bytes", expected, size));
    }
    Ok(part)
}

/// A write in progress.
pub struct ObjectWriter {
    shared: Arc<Shared>,
    path: String,
    key: Path,
    part_bytes: u64,
    pending: Vec<Bytes>,
    pending_bytes: u64,
    upload: Option<Box<dyn MultipartUpload>>,
    parts: JoinSet<object_store::Result<()>>,
    parts_started: u64,
    written_bytes: u64,
}

impl ObjectWriter {
    pub(super) fn new(
        shared: Arc<Shared>,
        path: &str,
        key: Path,
        size_bytes: Option<u64>,
    ) -> Result<Self> {
        Ok(Self {
            shared,
            path: path.to_string(),
            key,
            part_bytes: part_bytes(size_bytes)?,
            pending: Vec::new(),
            pending_bytes: 0,
            upload: None,
            parts: JoinSet::new(),
            parts_started: 0,
            written_bytes: 0,
        })
    }

    fn name(&self) -> String {
        self.shared.named(&self.path)
    }

    async fn append(&mut self, mut data: Bytes) -> Result<()> {
        while !data.is_empty() {
            let room = (self.part_bytes - self.pending_bytes).min(data.len() as u64);
            let piece = data.split_to(room as usize);
            self.pending_bytes += room;
            self.written_bytes += room;
            self.pending.push(piece);
            // A full part waits until it is known not to be the last one: an object of exactly one
            // part is a single put.
            if self.pending_bytes == self.part_bytes && !data.is_empty() {
                self.start_part().await?;
            }
        }
        Ok(())
    }

    async fn start_part(&mut self) -> Result<()> {
        if self.parts_started == PARTS_MAX {
            let expected = format!("at most {PARTS_MAX} parts of {} bytes", self.part_bytes);
            return Err(Error::invalid(self.name(), expected, "more; give size_bytes"));
        }
        while self.parts.len() >= PARTS_IN_FLIGHT_MAX {
            self.join_part().await?;
        }
        let payload = self.take_pending();
        let part = self.upload().await?.put_part(payload);
        self.shared.count();
        self.spawn(part);
        Ok(())
    }

    fn take_pending(&mut self) -> PutPayload {
        self.pending_bytes = 0;
        PutPayload::from_iter(std::mem::take(&mut self.pending))
    }

    async fn upload(&mut self) -> Result<&mut Box<dyn MultipartUpload>> {
        if self.upload.is_none() {
            let start = self.shared.parts.store.put_multipart(&self.key);
            self.upload = Some(self.shared.run("start upload of", &self.path, start).await?);
        }
        self.upload
            .as_mut()
            .ok_or_else(|| Error::Closed { what: format!("write of {}", self.path) })
    }

    fn spawn(&mut self, part: UploadPart) {
        self.parts_started += 1;
        self.parts.spawn(part);
    }

    async fn join_part(&mut self) -> Result<()> {
        let parts = &mut self.parts;
        let next = async { parts.join_next().await.map_or(Ok(()), |done| done?) };
        self.shared.run("write", &self.path, next).await
    }

    async fn complete(&mut self) -> Result<()> {
        if self.upload.is_none() {
            let data = self.take_pending();
            return self.put_whole(data).await;
        }
        self.start_part().await?;
        while !self.parts.is_empty() {
            self.join_part().await?;
        }
        let (shared, path) = (Arc::clone(&self.shared), self.path.clone());
        let upload = self.upload().await?;
        match shared.limited("finish upload of", &path, upload.complete()).await? {
            Ok(_) => {}
            Err(e) => self.settle(&e).await?,
        }
        self.upload = None;
        Ok(())
    }

    async fn put_whole(&mut self, data: PutPayload) -> Result<()> {
        // Create-if-absent costs nothing here, and closes the race that `create` leaves open.
        let data = Bytes::from(data);
        self.shared.put_new(&self.path, &self.key, data).await.map(|_| ())
    }

    /// A repeated completion of an upload that has succeeded says "no such upload". Our object is
    /// then there with its size; nobody else writes under this name.
    async fn settle(&mut self, error: &object_store::Error) -> Result<()> {
        let head = self.shared.parts.store.head(&self.key);
        match self.shared.run("head", &self.path, head).await {
            Ok(found) if found.size == self.written_bytes => Ok(()),
            _ => Err(self.shared.mapped("write", &self.path, error)),
        }
    }

    async fn give_up(&mut self) -> Result<()> {
        self.pending.clear();
        // Waits for the tasks to end, so that no part arrives after the abort.
        self.parts.shutdown().await;
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        match self.shared.run("abort upload of", &self.path, upload.abort()).await {
            Err(Error::NotFound { .. }) => Ok(()),
            other => other,
        }
    }
}

impl Writer for ObjectWriter {
    fn write(&mut self, data: Bytes) -> BoxFuture<'_, Result<()>> {
        async move {
            let appended = self.append(data).await;
            if appended.is_err() {
                // The first error is the one to report.
                let _ = self.give_up().await;
            }
            appended
        }
        .boxed()
    }

    fn finish(mut self: Box<Self>) -> BoxFuture<'static, Result<u64>> {
        async move {
            if let Err(e) = self.complete().await {
                let _ = self.give_up().await;
                return Err(e);
            }
            let written = self.written_bytes;
            if self.parts_started > 0 {
                self.shared.parts.counts.written_bytes.fetch_add(written, Ordering::Relaxed);
            }
            Ok(written)
        }
        .boxed()
    }

    fn abort(mut self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        async move { self.give_up().await }.boxed()
    }
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        let Some(mut upload) = self.upload.take() else { return };
        let mut parts = std::mem::take(&mut self.parts);
        let abort = async move {
            parts.shutdown().await;
            if let Err(error) = upload.abort().await {
                tracing::warn!(%error, "an unfinished upload could not be aborted");
            }
        };
        // Dropped outside the runtime, or while it ends: then a bucket rule must clean up.
        if let Ok(handle) = tokio::runtime::Handle::try_current() {
            handle.spawn(abort);
        } else if let Ok(runtime) = crate::runtime::runtime() {
            runtime.spawn(abort);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fit_the_limits_of_s3() {
        assert_eq!(part_bytes(None).unwrap(), 16 << 20);
        assert_eq!(part_bytes(Some(0)).unwrap(), 8 << 20);
        let tera = part_bytes(Some(1 << 40)).unwrap();
        assert!(tera.is_multiple_of(1 << 20) && tera * PARTS_MAX >= 1 << 40, "{tera}");
        assert!(part_bytes(Some(u64::MAX / 2)).is_err());
    }
}
