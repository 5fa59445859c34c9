//! Reading a table's blobs one by one, for tools; the loader has its own way.

use std::sync::Arc;

use bytes::Bytes;

use super::inputs::source_matches;
use super::table::SampleTable;
use super::types::{BlobRef, Source};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::runtime::block_on;
use crate::storage::{OpenOptions, ReadAt, StorageOptions, Store, open_store};

/// Largest blob read in one piece.
const BLOB_BYTES_MAX: u64 = 4 << 30;

/// Reads blobs and compares each source with what was indexed when it opens it. Keeps the last
/// source open. Blocks; not for the runtime's own threads.
#[derive(Debug)]
pub struct BlobReader {
    table: SampleTable,
    store: Arc<dyn Store>,
    open: Option<(u32, Source, Arc<dyn ReadAt>)>,
}

impl BlobReader {
    /// A reader over the table's root.
    pub fn new(table: &SampleTable, options: &StorageOptions) -> Result<Self> {
        let store = open_store(table.root(), options)?;
        Ok(Self { table: table.clone(), store, open: None })
    }

    /// The blob's bytes.
    pub fn read(&mut self, blob: &BlobRef) -> Result<Bytes> {
        let (source, object) = self.source(blob.source)?;
        let end = blob.offset.checked_add(blob.length);
        if blob.length > BLOB_BYTES_MAX || end.is_none_or(|end| end > source.size_bytes) {
            return Err(Error::corrupt(
                &source.uri,
                blob.offset,
                format!("a range of at most {BLOB_BYTES_MAX} bytes inside the file"),
                format!("{} bytes of {}", blob.length, source.size_bytes),
                "index the data set again",
            ));
        }
        if blob.length == 0 {
            return Ok(Bytes::new());
        }
        let buffer = Buffer::heap(blob.length as usize);
        Ok(block_on(object.read_at(blob.offset, buffer))??.into_bytes())
    }

    /// The source, opened and unchanged.
    fn source(&mut self, id: u32) -> Result<(Source, Arc<dyn ReadAt>)> {
        if let Some((open, source, object)) = &self.open
            && *open == id
        {
            return Ok((source.clone(), Arc::clone(object)));
        }
        let source = self.table.source(id)?;
        let object = block_on(self.store.open(&source.uri, OpenOptions::default()))??;
        let meta = object.meta();
        if !source_matches(&source, meta) {
            let found = if source.size_bytes == meta.size_bytes {
                format!("etag {}", meta.version.0)
            } else {
                format!("{} bytes", meta.size_bytes)
            };
            return Err(Error::Changed {
                file: source.uri,
                expected: format!("{} bytes {}", source.size_bytes, source.etag).trim_end().into(),
                found,
            });
        }
        self.open = Some((id, source.clone(), Arc::clone(&object)));
        Ok((source, object))
    }

    /// Name of a blob's file, for errors.
    pub fn name(&self, blob: &BlobRef) -> String {
        self.table.source(blob.source).map(|s| s.uri).unwrap_or_default()
    }
}
