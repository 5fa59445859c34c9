//! Ranks that share no key-value store meet through small files in the checkpoint root.

use std::sync::Arc;

use bytes::Bytes;

use super::Meet;
use crate::checkpoint::io::read_all;
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::Store;

/// Folder in the checkpoint root; empty when nobody meets.
pub const FILES_FOLDER: &str = ".meet";
/// Another rank may replace a file between our look and our write; then we look again.
const SET_TRIES_MAX: usize = 16;

/// Keys as files in [`FILES_FOLDER`].
#[derive(Debug)]
pub struct FileMeet {
    store: Arc<dyn Store>,
}

impl FileMeet {
    /// Meets in the root of `store`.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    async fn put(&self, path: &str, value: Bytes) -> Result<()> {
        for _ in 0..SET_TRIES_MAX {
            match self.store.put_new(path, value.clone()).await {
                Err(Error::AlreadyExists { .. }) => self.store.delete(path).await?,
                // The rank it was for has read and deleted it before we looked at it again.
                Err(Error::NotFound { .. }) => return Ok(()),
                done => return done.map(drop),
            }
        }
        Err(Error::Timeout {
            what: format!("writing {path}"),
            waited: std::time::Duration::ZERO,
            advice: "two jobs may be using one checkpoint folder: give each its own".into(),
        })
    }
}

/// One flat folder: removing folders while other ranks create files in them would be a race.
fn file_of(key: &str) -> String {
    format!("{FILES_FOLDER}/{}", key.replace('/', "_"))
}

impl Meet for FileMeet {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        block_on(self.put(&file_of(key), Bytes::copy_from_slice(value)))?
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match block_on(read_all(self.store.as_ref(), &file_of(key)))? {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn delete(&self, key: &str) -> Result<()> {
        block_on(self.store.delete(&file_of(key)))?
    }

    fn leave(&self) -> Result<()> {
        // Succeeds only when it is empty.
        let _ = block_on(self.store.remove_dir(FILES_FOLDER))?;
        Ok(())
    }
}
