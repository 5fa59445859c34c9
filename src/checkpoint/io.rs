//! Small reads that several parts of the checkpoint need.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::{OpenOptions, Store};

/// Largest file that is read in one piece: manifests, tables, meeting files.
const SMALL_FILE_BYTES_MAX: u64 = 8 << 30;

/// All bytes of a small file.
pub async fn read_all(store: &dyn Store, path: &str) -> Result<Bytes> {
    let file = store.open(path, OpenOptions::default()).await?;
    let size = file.meta().size_bytes;
    if size > SMALL_FILE_BYTES_MAX {
        let found = format!("{size} bytes");
        let most = format!("at most {SMALL_FILE_BYTES_MAX} bytes");
        return Err(Error::corrupt(path, 0, most, found, "use an older step"));
    }
    if size == 0 {
        return Ok(Bytes::new());
    }
    Ok(file.read_at(0, Buffer::heap(size as usize)).await?.into_bytes())
}
