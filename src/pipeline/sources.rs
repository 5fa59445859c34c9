//! Open sources: each is compared with the index when it is first opened, and kept open while it is
//! used often.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::error::{Error, Result};
use crate::index::{SampleTable, Source};
use crate::storage::{ObjectMeta, OpenOptions, ReadAt, Store};

/// Files kept open. Shards of tar are few; folders of pictures are many, but each is read once an
/// epoch and gains nothing from a longer stay. Far below the usual limit of 1024 descriptors.
pub const SOURCES_OPEN_MAX: usize = 128;

type Cell = Arc<OnceCell<Arc<dyn ReadAt>>>;

/// A bounded cache of open sources.
#[derive(Debug)]
pub struct Sources {
    store: Arc<dyn Store>,
    table: SampleTable,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    cells: HashMap<u32, (u64, Cell)>,
    clock: u64,
}

impl Sources {
    /// Sources of `table`, read from `store`.
    pub fn new(store: Arc<dyn Store>, table: SampleTable) -> Self {
        Self { store, table, open: Mutex::default() }
    }

    /// The store.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// URI of a source for messages, relative to the root.
    pub fn name(&self, id: u32) -> String {
        self.table.source(id).map_or_else(|_| format!("source {id}"), |s| s.uri)
    }

    /// The source, opened and compared once.
    pub async fn get(&self, id: u32) -> Result<Arc<dyn ReadAt>> {
        let cell = self.open.lock().cell(id);
        let opened = cell.get_or_try_init(|| self.open(id)).await?;
        Ok(Arc::clone(opened))
    }

    async fn open(&self, id: u32) -> Result<Arc<dyn ReadAt>> {
        let source = self.table.source(id)?;
        let reader = self.store.open(&source.uri, OpenOptions::default()).await?;
        compare(&source, reader.meta())?;
        Ok(reader)
    }
}

impl Open {
    fn cell(&mut self, id: u32) -> Cell {
        self.clock += 1;
        let clock = self.clock;
        if let Some((used, cell)) = self.cells.get_mut(&id) {
            *used = clock;
            return Arc::clone(cell);
        }
        if self.cells.len() >= SOURCES_OPEN_MAX {
            self.evict();
        }
        let cell = Cell::default();
        self.cells.insert(id, (clock, Arc::clone(&cell)));
        cell
    }

    fn evict(&mut self) {
        let oldest = self.cells.iter().min_by_key(|(_, (used, _))| *used).map(|(id, _)| *id);
        if let Some(id) = oldest {
            self.cells.remove(&id);
        }
    }
}

/// Size always; etag where both sides have one. Modification times change with every copy.
fn compare(source: &Source, meta: &ObjectMeta) -> Result<()> {
    let changed = |expected: String, found: String| {
        Err(Error::Changed { file: source.uri.clone(), expected, found })
    };
    if meta.size_bytes != source.size_bytes {
        let bytes = |n: u64| format!("{n} bytes");
        return changed(bytes(source.size_bytes), bytes(meta.size_bytes));
    }
    if !source.etag.is_empty() && !meta.version.0.is_empty() && source.etag != meta.version.0 {
        return changed(format!("etag {}", source.etag), format!("etag {}", meta.version.0));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::Version;

    fn source(size_bytes: u64, etag: &str) -> Source {
        Source { uri: "a.tar".into(), size_bytes, etag: etag.into(), mtime_ns: 0 }
    }

    fn meta(size_bytes: u64, version: &str) -> ObjectMeta {
        let version = Version(version.into());
        ObjectMeta { path: "a.tar".into(), size_bytes, version, mtime_ns: 1 }
    }

    #[test]
    fn a_changed_source_is_named() {
        assert!(compare(&source(5, ""), &meta(5, "x")).is_ok());
        assert!(compare(&source(5, "x"), &meta(5, "x")).is_ok());
        for (source, meta) in [(source(5, ""), meta(6, "")), (source(5, "x"), meta(5, "y"))] {
            let error = compare(&source, &meta).unwrap_err();
            assert!(matches!(&error, Error::Changed { file, .. } if file == "a.tar"), "{error}");
        }
    }

    #[test]
    fn the_least_recently_used_leaves_first() {
        let mut open = Open::default();
        for id in 0..SOURCES_OPEN_MAX as u32 {
            open.cell(id);
        }
        let first = open.cell(0);
        open.cell(9999);
        assert_eq!(open.cells.len(), SOURCES_OPEN_MAX);
        assert!(Arc::ptr_eq(&first, &open.cell(0)) && !open.cells.contains_key(&1));
    }
}
