//! Reading a store's objects in order, for parsers that pull.

use std::io::{self, Read};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::runtime::block_on;
use crate::storage::{ObjectMeta, OpenOptions, ReadAt, Store};

/// Bytes fetched at a time: enough to hide an object store's latency behind parsing.
const CHUNK_BYTES: u64 = 4 << 20;

/// An object read front to back or by ranges, through one re-used buffer. Blocks the calling
/// thread, which must not be one of the runtime's own.
#[derive(Debug)]
pub(super) struct Input {
    name: String,
    object: Arc<dyn ReadAt>,
    chunk: Option<Buffer>,
    chunk_start: u64,
    chunk_bytes: u64,
    position: u64,
    failure: Option<Error>,
}

impl Input {
    pub(super) fn open(store: &Arc<dyn Store>, path: &str) -> Result<Self> {
        Self::with_chunk(store, path, CHUNK_BYTES)
    }

    /// Fetches `chunk_bytes` at a time.
    pub(super) fn with_chunk(store: &Arc<dyn Store>, path: &str, chunk_bytes: u64) -> Result<Self> {
        let object = block_on(store.open(path, OpenOptions::default()))??;
        Ok(Self {
            name: path.to_string(),
            object,
            chunk: None,
            chunk_start: 0,
            chunk_bytes,
            position: 0,
            failure: None,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn meta(&self) -> &ObjectMeta {
        self.object.meta()
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.object.meta().size_bytes
    }

    /// Bytes from `offset`: as many as the current chunk holds, at least one, none at the end.
    pub(super) fn at(&mut self, offset: u64) -> Result<&[u8]> {
        let held = self.chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
        let inside = (self.chunk_start..self.chunk_start + held).contains(&offset);
        if !inside {
            self.fetch(offset, self.chunk_bytes)?;
        }
        let chunk = self.chunk.as_deref().unwrap_or_default();
        Ok(chunk.get((offset - self.chunk_start) as usize..).unwrap_or_default())
    }

    /// Exactly `len` bytes from `offset`, fetched again if the chunk ends before them; fewer only
    /// at the end of the object. The caller bounds `len`, which may pass the size of a chunk.
    pub(super) fn exact(&mut self, offset: u64, len: u64) -> Result<&[u8]> {
        let wanted = len.min(self.size_bytes().saturating_sub(offset));
        if (self.at(offset)?.len() as u64) < wanted {
            self.fetch(offset, wanted.max(self.chunk_bytes))?;
        }
        let have = self.at(offset)?;
        Ok(&have[..have.len().min(len as usize)])
    }

    fn fetch(&mut self, offset: u64, len: u64) -> Result<()> {
        let len = self.size_bytes().saturating_sub(offset).min(len);
        let mut buffer = self.chunk.take().unwrap_or_else(|| Buffer::heap(len as usize));
        if (buffer.capacity() as u64) < len {
            buffer = Buffer::heap(len as usize);
        }
        buffer.set_len(len as usize);
        self.chunk_start = offset;
        self.chunk =
            Some(if len == 0 { buffer } else { block_on(self.object.read_at(offset, buffer))?? });
        Ok(())
    }

    /// The error behind the last `io::Error`, which could only carry its text.
    pub(super) fn take_failure(&mut self) -> Option<Error> {
        self.failure.take()
    }
}

impl Read for Input {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let position = self.position;
        match self.at(position) {
            Ok(bytes) => {
                let n = bytes.len().min(out.len());
                out[..n].copy_from_slice(&bytes[..n]);
                self.position += n as u64;
                Ok(n)
            }
            Err(e) => {
                let text = e.to_string();
                self.failure = Some(e);
                Err(io::Error::other(text))
            }
        }
    }
}

/// Sizes and times of the objects in one folder, by path; a folder that is not there is empty.
pub(super) fn list_folder(store: &Arc<dyn Store>, folder: &str) -> Result<Vec<ObjectMeta>> {
    match block_on(store.list(folder))? {
        Ok(all) => Ok(all),
        Err(Error::NotFound { .. }) => Ok(Vec::new()),
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}
