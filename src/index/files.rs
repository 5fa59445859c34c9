//! Turning file names into sources: each folder is listed once, then names are looked up.

use std::collections::HashMap;
use std::sync::Arc;

use super::builder::IndexBuilder;
use super::input::list_folder;
use super::types::Source;
use crate::error::Result;
use crate::runtime::block_on;
use crate::storage::{ObjectMeta, Store};

/// Files of a store, known folder by folder.
#[derive(Debug)]
pub(super) struct Files<'a> {
    store: &'a Arc<dyn Store>,
    /// Whether versions are etags worth keeping (object stores) or just size and time again.
    keep_etag: bool,
    folders: HashMap<String, HashMap<String, ObjectMeta>>,
    missing: u64,
    first_missing: Option<String>,
    found: u64,
}

impl<'a> Files<'a> {
    pub(super) fn new(store: &'a Arc<dyn Store>) -> Self {
        Self {
            store,
            keep_etag: store.capabilities().local_root.is_none(),
            folders: HashMap::new(),
            missing: 0,
            first_missing: None,
            found: 0,
        }
    }

    /// Source of a path below the root, with what the store says about it now. A file that is not
    /// there becomes a missing source and is counted.
    fn source(&mut self, path: &str) -> Result<Source> {
        let keep_etag = self.keep_etag;
        let known = self.meta(path)?.map(|meta| source_of(path, meta, keep_etag));
        let Some(source) = known else {
            self.missing += 1;
            self.first_missing.get_or_insert_with(|| path.to_string());
            let size_bytes = Source::MISSING_BYTES;
            return Ok(Source { uri: path.into(), size_bytes, etag: String::new(), mtime_ns: 0 });
        };
        self.found += 1;
        Ok(source)
    }

    /// Whether the file is there.
    pub(super) fn exists(&mut self, path: &str) -> Result<bool> {
        Ok(self.meta(path)?.is_some())
    }

    fn meta(&mut self, path: &str) -> Result<Option<&ObjectMeta>> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if !self.folders.contains_key(folder) {
            let listed = self.list(folder)?;
            self.folders.insert(folder.to_string(), listed);
        }
        Ok(self.folders.get(folder).and_then(|files| files.get(name)))
    }

    fn list(&self, folder: &str) -> Result<HashMap<String, ObjectMeta>> {
        if folder.is_empty() {
            return self.list_root();
        }
        let prefix = format!("{folder}/");
        let all = list_folder(self.store, folder)?;
        let direct = all.into_iter().filter_map(|meta| {
            let name = meta.path.strip_prefix(&prefix)?.to_string();
            (!name.contains('/')).then_some((name, meta))
        });
        Ok(direct.collect())
    }

    /// The root's own files; listing it whole would walk the data set.
    fn list_root(&self) -> Result<HashMap<String, ObjectMeta>> {
        let names = block_on(self.store.list_names(""))??;
        let files = names.into_iter().filter(|name| !name.ends_with('/'));
        files
            .map(|name| {
                let meta = block_on(self.store.head(&name))??;
                Ok((name, meta))
            })
            .collect()
    }

    /// Id and length of a file as a source, added to the builder the first time.
    pub(super) fn add(&mut self, builder: &mut IndexBuilder, path: &str) -> Result<(u32, u64)> {
        if let Some(known) = builder.find_source(path) {
            return Ok(known);
        }
        let source = self.source(path)?;
        let length = if source.is_missing() { 0 } else { source.size_bytes };
        Ok((builder.add_source(source), length))
    }

    /// A line about missing files, if there are any.
    pub(super) fn note(&self) -> Option<String> {
        let first = self.first_missing.as_ref()?;
        let all = self.missing + self.found;
        Some(format!("{} of {all} files are missing, the first is {first}", self.missing))
    }
}

/// A source as the store describes it now.
pub(super) fn source_of(path: &str, meta: &ObjectMeta, keep_etag: bool) -> Source {
    Source {
        uri: path.to_string(),
        size_bytes: meta.size_bytes,
        etag: if keep_etag { meta.version.0.clone() } else { String::new() },
        mtime_ns: meta.mtime_ns,
    }
}
