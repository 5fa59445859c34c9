//! What an index was made from, to see whether it is still fresh without reading the data.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::types::Source;
use crate::error::Result;
use crate::runtime::block_on;
use crate::storage::{ObjectMeta, Store};

/// Files whose change makes an index stale: tables, tars, info files.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Inputs {
    files: Vec<File>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct File {
    path: String,
    size_bytes: u64,
    version: String,
}

impl Inputs {
    pub(super) fn add(&mut self, meta: &ObjectMeta) {
        self.files.push(File {
            path: meta.path.clone(),
            size_bytes: meta.size_bytes,
            version: meta.version.0.clone(),
        });
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Whether every input is still the same object. One that cannot be read counts as changed:
    /// building again will say what is wrong with it.
    pub(super) fn are_fresh(json: &str, store: &Arc<dyn Store>) -> Result<bool> {
        let Ok(inputs) = serde_json::from_str::<Self>(json) else { return Ok(false) };
        for file in &inputs.files {
            let meta = block_on(store.head(&file.path))?;
            let same = meta.is_ok_and(|meta| {
                meta.size_bytes == file.size_bytes && meta.version.0 == file.version
            });
            if !same {
                return Ok(false);
            }
        }
        Ok(!inputs.files.is_empty())
    }
}

/// Whether a source still looks as it did when it was indexed: by size always, by etag where both
/// have one.
pub fn source_matches(source: &Source, meta: &ObjectMeta) -> bool {
    let etag_same = source.etag.is_empty() || source.etag == meta.version.0;
    source.size_bytes == meta.size_bytes && etag_same
}
