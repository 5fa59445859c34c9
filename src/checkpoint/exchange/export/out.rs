//! A file being written: headers as bytes, tensors as streams.

use std::sync::Arc;

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};

use super::ordered::Ordered;
use crate::checkpoint::exchange::Progress;
use crate::error::Result;
use crate::memory::Buffer;
use crate::storage::{Store, WriteOptions, Writer};

/// Bytes of one write.
const WINDOW_BYTES: u64 = 8 << 20;

/// A file that does not exist until it is finished.
pub struct Out {
    store: Arc<dyn Store>,
    name: String,
    writer: Box<dyn Writer>,
    /// Bytes so far.
    pub at: u64,
}

impl Out {
    /// Creates a file; one that exists is refused.
    pub async fn create(store: &Arc<dyn Store>, name: &str) -> Result<Self> {
        let writer = store.create(name, WriteOptions::default()).await?;
        Ok(Self { store: Arc::clone(store), name: name.into(), writer, at: 0 })
    }

    /// Appends bytes.
    pub async fn bytes(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.at += bytes.len() as u64;
        self.writer.write(Bytes::from(bytes)).await
    }

    /// Appends a tensor of `bytes`; returns the CRC-32 (IEEE) that zip archives want.
    pub async fn tensor(
        &mut self,
        tensor: &mut Ordered<'_>,
        bytes: u64,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<u32> {
        let mut digest = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        let mut left = bytes;
        while left > 0 {
            let n = left.min(WINDOW_BYTES);
            let mut window = Buffer::heap(n as usize);
            tensor.next(&mut window).await?;
            digest.update(&window);
            self.writer.write(window.into_bytes()).await?;
            left -= n;
            progress(Progress::Done(n));
        }
        self.at += bytes;
        Ok(digest.finalize() as u32)
    }

    /// Makes the file durable.
    pub async fn finish(self) -> Result<()> {
        let finished = self.writer.finish().await;
        if finished.is_err() {
            let _ = self.store.delete(&self.name).await;
        }
        finished.map(drop)
    }

    /// Gives up and removes it.
    pub async fn abort(self) {
        let _ = self.writer.abort().await;
        let _ = self.store.delete(&self.name).await;
    }
}

/// CRC-32 (IEEE) of bytes.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}
