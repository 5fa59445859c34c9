//! Ranged reads straight into buffers: bodies are copied once, from the connection into place.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{Error as Theirs, GetOptions, ObjectStore};

use super::adapter::{Shared, etag_of};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::{ObjectMeta, ReadAt};

/// Bytes of one request: below this a request's latency dominates, above it a broken connection
/// costs too much to repeat. One S3 connection moves 50-90 MB/s, so a part takes about 0.1 s.
const RANGE_BYTES: usize = 8 << 20;
/// Requests of one read at a time.
const RANGES_IN_FLIGHT_MAX: usize = 8;

/// One object open for reading; every read checks that it is still the version that was opened.
#[derive(Debug)]
pub struct ObjectReader {
    shared: Arc<Shared>,
    key: Path,
    meta: ObjectMeta,
}

impl ObjectReader {
    pub(super) fn new(shared: Arc<Shared>, key: Path, meta: ObjectMeta) -> Self {
        Self { shared, key, meta }
    }
}

impl ReadAt for ObjectReader {
    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn read_at(&self, offset: u64, mut buf: Buffer) -> BoxFuture<'static, Result<Buffer>> {
        let job = Job {
            shared: Arc::clone(&self.shared),
            key: self.key.clone(),
            meta: self.meta.clone(),
        };
        async move {
            job.check_range(offset, buf.len() as u64)?;
            let ranges: Vec<BoxFuture<'_, Result<()>>> = buf
                .chunks_mut(RANGE_BYTES)
                .enumerate()
                .map(|(i, part)| job.fetch(offset + (i * RANGE_BYTES) as u64, part).boxed())
                .collect();
            stream::iter(ranges).buffer_unordered(RANGES_IN_FLIGHT_MAX).try_collect::<()>().await?;
            Ok(buf)
        }
        .boxed()
    }
}

/// What one read needs, so that it may outlive the reader.
struct Job {
    shared: Arc<Shared>,
    key: Path,
    meta: ObjectMeta,
}

impl Job {
    fn name(&self) -> String {
        self.shared.named(&self.meta.path)
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<()> {
        let size = self.meta.size_bytes;
        if offset.checked_add(len).is_some_and(|end| end <= size) {
            return Ok(());
        }
        Err(Error::corrupt(
            self.name(),
            offset,
            format!("{len} bytes"),
            format!("end of the object at {size} bytes"),
            "the object is shorter than its index says; index it again or restore it",
        ))
    }

    /// Fills `part` from one ranged request.
    async fn fetch(&self, offset: u64, part: &mut [u8]) -> Result<()> {
        let filled = self
            .shared
            .limited("read", &self.meta.path, self.stream_into(offset, part))
            .await?
            .map_err(|e| self.read_error(&e))?;
        self.shared.parts.counts.read_bytes.fetch_add(filled as u64, Ordering::Relaxed);
        if filled == part.len() {
            return Ok(());
        }
        Err(Error::corrupt(
            self.name(),
            offset + filled as u64,
            format!("{} more bytes", part.len() - filled),
            "end of the answer",
            "the server cut the object short; try again",
        ))
    }

    /// Copies the body into `part` and returns how much arrived; more than asked for is an error
    /// of the server that must not write past the range.
    async fn stream_into(&self, offset: u64, part: &mut [u8]) -> Result<usize, Theirs> {
        let end = offset + part.len() as u64;
        let options = GetOptions::new()
            .with_range(Some(offset..end))
            .with_if_match(etag_of(&self.meta.version));
        let answer = self.shared.parts.store.get_opts(&self.key, options).await?;
        if answer.range != (offset..end) {
            let text = format!("asked for bytes {offset}..{end}, got {:?}", answer.range);
            return Err(Theirs::Generic { store: "object", source: text.into() });
        }
        let (mut body, mut filled) = (answer.into_stream(), 0);
        while let Some(piece) = body.next().await {
            let piece = piece?;
            let Some(target) = part.get_mut(filled..filled + piece.len()) else {
                let text = "the answer is longer than the range";
                return Err(Theirs::Generic { store: "object", source: text.into() });
            };
            target.copy_from_slice(&piece);
            filled += piece.len();
        }
        Ok(filled)
    }

    fn read_error(&self, error: &Theirs) -> Error {
        match error {
            Theirs::Precondition { .. } | Theirs::NotModified { .. } => Error::Changed {
                file: self.name(),
                expected: self.meta.version.0.clone(),
                found: "another version".into(),
            },
            _ => self.shared.mapped("read", &self.meta.path, error),
        }
    }
}
