//! From a URI to a store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::memory::InMemory;
use parking_lot::Mutex;

use super::local::{LocalOptions, LocalStore};
use super::object::{ObjectStoreAdapter, RetryPolicy, open_s3, refuse_all};
use super::{OptionMap, Store, fault};
use crate::error::{Error, Result};

/// Options for opening a store.
#[derive(Clone, Default)]
pub struct StorageOptions {
    /// Keys as `object_store` spells them (`aws_endpoint`, `aws_access_key_id`, ...); values are
    /// never shown in errors or logs.
    pub options: OptionMap,
}

impl std::fmt::Debug for StorageOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.options.keys()).finish()
    }
}

/// Opens the store that `uri` names:
///
/// | URI | store |
/// |---|---|
/// | a path, `file:///path` | local files |
/// | `memory://name/prefix` | memory of this process, shared by all who open the same name |
/// | `s3://bucket/prefix` | S3 and what speaks its protocol; options and `AWS_*` variables |
///
/// With the variable `DRIVETRAIN_FAULT` or `DRIVETRAIN_FAULT_LOG` the store is wrapped in a
/// [`fault::FaultStore`], a hook for tests and the demo.
pub fn open_store(uri: &str, options: &StorageOptions) -> Result<Arc<dyn Store>> {
    let store: Arc<dyn Store> = match uri.split_once("://") {
        None => local(Path::new(uri), options)?,
        Some(("file", _)) => local(&file_path(uri)?, options)?,
        Some(("memory", rest)) => memory(rest, options)?,
        Some(("s3" | "s3a", rest)) => {
            let (bucket, prefix) = bucket_and_prefix(uri, rest)?;
            Arc::new(open_s3(bucket, prefix, options, RetryPolicy::default())?)
        }
        Some((scheme, _)) => {
            return Err(Error::Unsupported {
                what: format!("the scheme {scheme}://"),
                advice: "use a path, file://, memory:// or s3://".into(),
            });
        }
    };
    fault::from_environment(store)
}

fn local(path: &Path, options: &StorageOptions) -> Result<Arc<dyn Store>> {
    refuse_all("local files", &options.options)?;
    if path.as_os_str().is_empty() {
        return Err(Error::invalid("uri", "a path or URI", "an empty text"));
    }
    Ok(Arc::new(LocalStore::new(path, LocalOptions::default())?))
}

fn file_path(uri: &str) -> Result<PathBuf> {
    let refused = || Error::invalid("uri", "file:///absolute/path", uri);
    let parsed = url::Url::parse(uri).map_err(|_| refused())?;
    parsed.to_file_path().map_err(|()| refused())
}

fn bucket_and_prefix<'a>(uri: &str, rest: &'a str) -> Result<(&'a str, &'a str)> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.is_empty() || bucket.contains(['@', '?', '#']) {
        // Not quoted in full: a URI with a user part may hold a password.
        let scheme = uri.split_once("://").map_or("", |(scheme, _)| scheme);
        let expected = "s3://bucket/prefix; keys go into storage options or the environment";
        return Err(Error::invalid("uri", expected, format!("{scheme}://…")));
    }
    Ok((bucket, prefix.trim_matches('/')))
}

/// Memory stores of this process by name. They live as long as the process, as files would.
static MEMORY: Mutex<BTreeMap<String, Arc<InMemory>>> = Mutex::new(BTreeMap::new());

fn memory(rest: &str, options: &StorageOptions) -> Result<Arc<dyn Store>> {
    refuse_all("memory://", &options.options)?;
    let (name, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let store = Arc::clone(MEMORY.lock().entry(name.to_string()).or_default());
    let uri = format!("memory://{rest}");
    Ok(Arc::new(ObjectStoreAdapter::over(&uri, prefix, store)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn refused(uri: &str, options: &[(&str, &str)]) -> String {
        let pairs = options.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string()));
        let options = StorageOptions { options: pairs.collect() };
        open_store(uri, &options).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn two_opens_of_a_memory_name_see_the_same_objects() {
        crate::runtime::block_on(async {
            let none = StorageOptions::default();
            let first = open_store("memory://open-test/a", &none).unwrap();
            first.put_new("x", Bytes::from_static(b"1")).await.unwrap();
            let second = open_store("memory://open-test", &none).unwrap();
            assert_eq!(second.head("a/x").await.unwrap().size_bytes, 1);
            let other = open_store("memory://open-test-other", &none).unwrap();
            assert!(other.head("a/x").await.is_err());
        })
        .unwrap();
    }

    #[test]
    fn mistakes_are_refused_without_showing_secrets() {
        assert!(refused("gs://b/p", &[]).contains("gs://"));
        assert!(refused("", &[]).contains("empty"));
        assert!(refused("file://host/p", &[]).contains("file:///"));
        assert!(refused("s3://", &[]).contains("bucket"));
        let url = refused("s3://key:hunter2@bucket/p", &[]);
        assert!(!url.contains("hunter2"), "{url}");
        let option = refused("s3://b/p", &[("aws_secret_acces_key", "hunter2")]);
        assert!(
            option.contains("aws_secret_access_key") && !option.contains("hunter2"),
            "{option}"
        );
        let local = refused("some/folder", &[("aws_region", "x")]);
        assert!(local.contains("aws_region") && local.contains("local files"), "{local}");
        let debug = StorageOptions { options: [("k".into(), "hunter2".into())].into() };
        assert_eq!(format!("{debug:?}"), r#"{"k"}"#);
    }
}
