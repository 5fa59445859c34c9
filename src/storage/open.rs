//! From a URI to a store.

use std::sync::Arc;

use super::{OptionMap, Store};
use crate::error::{Error, Result};

/// Options for opening a store.
#[derive(Debug, Clone, Default)]
pub struct StorageOptions {
    /// Keys as `object_store` spells them (`aws_endpoint`, `aws_access_key_id`, ...); values are
    /// never shown in errors or logs.
    pub options: OptionMap,
}

/// Opens the store that `uri` names: a local path or `file://`, `memory://name`, `s3://bucket/...`.
pub fn open_store(uri: &str, options: &StorageOptions) -> Result<Arc<dyn Store>> {
    let _ = options;
    Err(Error::Unsupported { what: uri.to_string(), advice: "no store is built in".into() })
}
