//! The sources table: which files and objects the byte ranges lie in, and what they looked like
//! when they were indexed.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, Int64Array, RecordBatch, StringArray, UInt32Array, UInt64Array,
};
use arrow_schema::Schema;

use super::ipc;
use super::schema::{META_FINGERPRINT, sources_schema};
use super::types::Source;
use crate::error::{Error, Result};

/// Rows of the sources table.
#[derive(Debug, Clone)]
pub(super) struct Sources {
    batch: RecordBatch,
    uri: StringArray,
    size: UInt64Array,
    etag: StringArray,
    mtime_ns: Int64Array,
}

impl Sources {
    /// Builds the table; a size of [`Source::MISSING_BYTES`] becomes null.
    pub(super) fn from_rows(rows: &[Source]) -> Result<Self> {
        let text_bytes: usize = rows.iter().map(|s| s.uri.len().max(s.etag.len())).sum();
        if i32::try_from(text_bytes).is_err() || u32::try_from(rows.len()).is_err() {
            return Err(Error::invalid(
                "sources of one index",
                "at most 2 GiB of names",
                text_bytes,
            ));
        }
        let size = |s: &Source| (s.size_bytes != Source::MISSING_BYTES).then_some(s.size_bytes);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from_iter_values(0..rows.len() as u32)),
            Arc::new(StringArray::from_iter_values(rows.iter().map(|s| &s.uri))),
            Arc::new(rows.iter().map(size).collect::<UInt64Array>()),
            Arc::new(StringArray::from_iter_values(rows.iter().map(|s| &s.etag))),
            Arc::new(Int64Array::from_iter_values(rows.iter().map(|s| s.mtime_ns))),
        ];
        let batch = RecordBatch::try_new(Arc::new(sources_schema()), columns)
            .map_err(|e| Error::invalid("sources", "equal columns", e))?;
        Self::from_batch("sources", batch)
    }

    /// Maps a sources file.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let batch = ipc::open(path, check_schema)?;
        Self::from_batch(&path.display().to_string(), batch)
    }

    fn from_batch(file: &str, batch: RecordBatch) -> Result<Self> {
        Ok(Self {
            uri: column(file, &batch, 1)?,
            size: column(file, &batch, 2)?,
            etag: column(file, &batch, 3)?,
            mtime_ns: column(file, &batch, 4)?,
            batch,
        })
    }

    /// The table with the fingerprint of the index it belongs to, so that an index is never read
    /// with another's sources.
    pub(super) fn batch_of(&self, fingerprint: &str) -> Result<RecordBatch> {
        let schema = self.batch.schema_ref();
        let mut metadata = schema.metadata().clone();
        metadata.insert(META_FINGERPRINT, fingerprint);
        let schema = schema.as_ref().clone().with_metadata(metadata);
        RecordBatch::try_new(Arc::new(schema), self.batch.columns().to_vec())
            .map_err(|e| Error::invalid("sources", "equal columns", e))
    }

    /// Fails if the table was written for another index.
    pub(super) fn check_fingerprint(&self, file: &Path, fingerprint: &str) -> Result<()> {
        let found = self.batch.schema_ref().metadata().get(META_FINGERPRINT);
        let found = found.map_or("none", String::as_str);
        if found == fingerprint {
            return Ok(());
        }
        let expected = format!("the sources of index {fingerprint}");
        let found = format!("those of {found}");
        let advice = "delete both files and index again";
        Err(Error::corrupt(file.display().to_string(), 0, expected, found, advice))
    }

    pub(super) fn len(&self) -> usize {
        self.batch.num_rows()
    }

    /// URI of one source, relative to the root.
    pub(super) fn uri(&self, id: u32) -> Option<&str> {
        ((id as usize) < self.len()).then(|| self.uri.value(id as usize))
    }

    /// Bytes of one source, [`Source::MISSING_BYTES`] where it was not there.
    pub(super) fn size_bytes(&self, id: u32) -> Option<u64> {
        let row = id as usize;
        let known = |row| {
            if self.size.is_valid(row) { self.size.value(row) } else { Source::MISSING_BYTES }
        };
        (row < self.len()).then(|| known(row))
    }

    /// One source.
    pub(super) fn get(&self, id: u32) -> Option<Source> {
        let row = id as usize;
        (row < self.len()).then(|| Source {
            uri: self.uri.value(row).to_string(),
            size_bytes: if self.size.is_valid(row) {
                self.size.value(row)
            } else {
                Source::MISSING_BYTES
            },
            etag: self.etag.value(row).to_string(),
            mtime_ns: self.mtime_ns.value(row),
        })
    }
}

fn column<A: Array + Clone + 'static>(file: &str, batch: &RecordBatch, index: usize) -> Result<A> {
    let array = batch.columns().get(index).and_then(|a| a.as_any().downcast_ref::<A>());
    array.cloned().ok_or_else(|| {
        Error::corrupt(file, 0, "the columns of a sources table", "others", "index again")
    })
}

fn check_schema(file: &str, schema: &Schema) -> Result<()> {
    let expected = sources_schema();
    let types = |s: &Schema| -> Vec<_> {
        s.fields().iter().map(|f| (f.name().clone(), f.data_type().clone())).collect()
    };
    if types(schema) == types(&expected) {
        return Ok(());
    }
    Err(Error::corrupt(
        file,
        0,
        "the columns of a sources table",
        format!("{:?}", schema.fields().iter().map(|f| f.name()).collect::<Vec<_>>()),
        "delete the index and build it again",
    ))
}

/// `<name>.sources.arrow` beside `<name>.index.arrow`.
pub(super) fn sources_path(index: &Path) -> Result<PathBuf> {
    let name = index.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let Some(stem) = name.strip_suffix(super::INDEX_SUFFIX) else {
        return Err(Error::invalid(
            "index file",
            format!("a name ending in {}", super::INDEX_SUFFIX),
            index.display(),
        ));
    };
    Ok(index.with_file_name(format!("{stem}{}", super::SOURCES_SUFFIX)))
}

/// Sources while they are collected: each URI once.
#[derive(Debug, Default)]
pub(super) struct SourceSet {
    rows: Vec<Source>,
    by_uri: HashMap<String, u32>,
}

impl SourceSet {
    /// Id of a source, adding it if it is new.
    pub(super) fn add(&mut self, source: Source) -> u32 {
        if let Some(id) = self.by_uri.get(&source.uri) {
            return *id;
        }
        let id = self.rows.len() as u32;
        self.by_uri.insert(source.uri.clone(), id);
        self.rows.push(source);
        id
    }

    pub(super) fn find(&self, uri: &str) -> Option<(u32, &Source)> {
        let id = *self.by_uri.get(uri)?;
        Some((id, self.rows.get(id as usize)?))
    }

    pub(super) fn get(&self, id: u32) -> Option<&Source> {
        self.rows.get(id as usize)
    }

    pub(super) fn into_rows(self) -> Vec<Source> {
        self.rows
    }
}
