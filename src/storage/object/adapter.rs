//! The `Store` trait over any `object_store::ObjectStore`, below a prefix of it.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use super::error::{Scrubber, exists, map, timed_out};
use super::read::ObjectReader;
use super::s3::RetryPolicy;
use super::uploads::Uploads;
use super::write::ObjectWriter;
use crate::error::{Error, Result};
use crate::storage::{
    Abandoned, Capabilities, IoCounters, ObjectMeta, OpenOptions, ReadAt, Store, Version,
    WriteOptions, Writer,
};

/// Longest wait for one operation, repetitions included: a part of 64 MiB at 200 KB/s.
const OPERATION_TIMEOUT: Duration = Duration::from_mins(6);
/// Most objects one listing returns; more is a mistake in the prefix.
const LIST_OBJECTS_MAX: usize = 50_000_000;
/// Tries of a deletion that meets silence.
const DELETE_TRIES_MAX: usize = 3;
/// Longest key that S3 stores.
const PATH_BYTES_MAX: usize = 1024;

/// What a store has done.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub requests: AtomicU64,
    pub retries: AtomicU64,
    pub read_bytes: AtomicU64,
    pub written_bytes: AtomicU64,
}

/// What an adapter is made of.
#[derive(Debug)]
pub(super) struct Parts {
    /// For everything that may be repeated blindly.
    pub store: Arc<dyn ObjectStore>,
    /// For conditional puts: never repeats by itself.
    pub conditional: Arc<dyn ObjectStore>,
    pub counts: Arc<Counts>,
    /// Requests are counted by the HTTP client and not per operation.
    pub counted_below: bool,
    pub scrubber: Scrubber,
    pub retry: RetryPolicy,
    /// For uploads that nobody finished, where there are such.
    pub uploads: Option<Uploads>,
}

/// What readers and writers share with the store.
#[derive(Debug)]
pub(super) struct Shared {
    pub parts: Parts,
    uri: String,
}

/// An object store, below a prefix.
#[derive(Debug)]
pub struct ObjectStoreAdapter {
    shared: Arc<Shared>,
    prefix: String,
}

impl ObjectStoreAdapter {
    /// Adapts a store that repeats nothing by itself (in memory, or a test's).
    pub fn over(uri: &str, prefix: &str, store: Arc<dyn ObjectStore>) -> Self {
        let parts = Parts {
            conditional: Arc::clone(&store),
            store,
            counts: Arc::default(),
            counted_below: false,
            scrubber: Scrubber::default(),
            retry: RetryPolicy::default(),
            uploads: None,
        };
        Self::new(uri, prefix, parts)
    }

    pub(super) fn new(uri: &str, prefix: &str, parts: Parts) -> Self {
        let uri = uri.trim_end_matches('/').to_string();
        let prefix = prefix.trim_matches('/').to_string();
        Self { shared: Arc::new(Shared { parts, uri }), prefix }
    }

    /// The object's key below our prefix.
    fn key(&self, path: &str) -> Result<Path> {
        if path.is_empty() {
            return Err(refused(path));
        }
        self.folder(path)?.ok_or_else(|| refused(path))
    }

    /// The prefix of a folder; none for the root of the bucket.
    fn folder(&self, path: &str) -> Result<Option<Path>> {
        let trimmed = path.strip_suffix('/').unwrap_or(path);
        let bad = |part: &str| part.is_empty() || part == "." || part == "..";
        if !path.is_empty() && (trimmed.split('/').any(bad) || path.ends_with("//")) {
            return Err(refused(path));
        }
        let full = match (self.prefix.as_str(), trimmed) {
            ("", "") => return Ok(None),
            ("", path) => path.to_string(),
            (prefix, "") => prefix.to_string(),
            (prefix, path) => format!("{prefix}/{path}"),
        };
        if full.len() > PATH_BYTES_MAX {
            let expected = format!("at most {PATH_BYTES_MAX} bytes with the store's prefix");
            return Err(Error::invalid("object path", expected, format!("{path:?}")));
        }
        Path::parse(full).map(Some).map_err(|_| refused(path))
    }

    /// A key of the bucket as a path below our prefix.
    fn relative(&self, key: &Path) -> String {
        let key = key.as_ref();
        let below = key.strip_prefix(self.prefix.as_str()).unwrap_or(key);
        below.trim_start_matches('/').to_string()
    }

    fn meta(&self, theirs: &object_store::ObjectMeta) -> ObjectMeta {
        ObjectMeta {
            path: self.relative(&theirs.location),
            size_bytes: theirs.size,
            version: version_of(theirs),
            mtime_ns: theirs.last_modified.timestamp_nanos_opt().unwrap_or(0),
        }
    }

    async fn head_object(&self, path: &str) -> Result<ObjectMeta> {
        let key = self.key(path)?;
        let found = self.shared.run("head", path, self.shared.parts.store.head(&key)).await?;
        Ok(self.meta(&found))
    }

    async fn create_object(&self, path: &str, options: WriteOptions) -> Result<Box<dyn Writer>> {
        let key = self.key(path)?;
        match self.head_object(path).await {
            Ok(_) => return Err(exists(&self.shared.named(path))),
            Err(Error::NotFound { .. }) => {}
            Err(e) => return Err(e),
        }
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(ObjectWriter::new(shared, path, key, options.size_bytes)?))
    }

    async fn list_objects(&self, prefix: &str) -> Result<Vec<ObjectMeta>> {
        let folder = self.folder(prefix)?;
        let mut stream = self.shared.parts.store.list(folder.as_ref());
        let mut found = Vec::new();
        self.shared.count();
        // The deadline is for each page: a large bucket takes as many as it needs.
        while let Some(object) = self.shared.within("list", prefix, stream.next()).await? {
            let object = object.map_err(|e| self.shared.mapped("list", prefix, &e))?;
            if found.len() == LIST_OBJECTS_MAX {
                let expected = format!("at most {LIST_OBJECTS_MAX} objects below a prefix");
                return Err(Error::invalid("list", expected, "more"));
            }
            found.push(self.meta(&object));
        }
        found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    async fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let folder = self.folder(prefix)?;
        let listing = self.shared.parts.store.list_with_delimiter(folder.as_ref());
        let found = self.shared.run("list", prefix, listing).await?;
        let last = |key: &Path| key.filename().unwrap_or_default().to_string();
        let folders = found.common_prefixes.iter().map(|key| format!("{}/", last(key)));
        let objects = found.objects.iter().map(|object| last(&object.location));
        let mut names: Vec<String> = folders.chain(objects).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Failures of single uploads are told once, after all had their turn.
    async fn abort_uploads(&self, abandoned: Abandoned<'_>) -> Result<usize> {
        let Some(uploads) = &self.shared.parts.uploads else { return Ok(0) };
        let prefix = match self.prefix.as_str() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        let found = self.shared.within("list uploads", "", uploads.list(&prefix)).await?;
        let found = found.map_err(|e| self.shared.refused_listing(&*e))?;
        let (mut count, mut outcome) = (0, Ok(()));
        for upload in &found {
            let below = upload.key.strip_prefix(&prefix).unwrap_or_default();
            if below.is_empty() || !abandoned(below, upload.begun_ns) {
                continue;
            }
            match self.shared.run("abort upload", below, uploads.abort(upload)).await {
                Ok(()) => count += 1,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map(|()| count)
    }

    async fn delete_object(&self, path: &str) -> Result<()> {
        let key = self.key(path)?;
        for tries in 1..=DELETE_TRIES_MAX {
            let delete = self.shared.parts.store.delete(&key);
            match self.shared.limited("delete", path, delete).await? {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => return Ok(()),
                // A POST, of which the client does not know that it may be repeated.
                Err(e) if timed_out(&e) && tries < DELETE_TRIES_MAX => {}
                Err(e) => return Err(self.shared.mapped("delete", path, &e)),
            }
        }
        Ok(())
    }
}

fn refused(path: &str) -> Error {
    let expected = "a relative path below the root without '..', '.' or empty parts";
    Error::invalid("object path", expected, format!("{path:?}"))
}

/// Marks a version that is not an etag, and so cannot be a condition of a request.
const WEAK_VERSION: &str = "weak:";

/// The etag, or what else tells versions apart where a store has none.
pub(super) fn version_of(meta: &object_store::ObjectMeta) -> Version {
    let weak = || format!("{WEAK_VERSION}{}-{}", meta.size, meta.last_modified.timestamp_micros());
    Version(meta.e_tag.clone().unwrap_or_else(weak))
}

/// The version as a condition, where it is an etag.
pub(super) fn etag_of(version: &Version) -> Option<&str> {
    Some(version.0.as_str()).filter(|version| !version.starts_with(WEAK_VERSION))
}

impl Shared {
    /// URI of one object, as errors show it.
    pub fn named(&self, path: &str) -> String {
        format!("{}/{path}", self.uri)
    }

    /// Counts one operation where the HTTP client does not count requests.
    pub fn count(&self) {
        if !self.parts.counted_below {
            self.parts.counts.requests.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Their error as ours.
    pub fn mapped(&self, op: &'static str, path: &str, error: &object_store::Error) -> Error {
        map(op, &self.named(path), error, &self.parts.scrubber)
    }

    fn refused_listing(&self, error: &(dyn std::error::Error + Send + Sync)) -> Error {
        let text = self.parts.scrubber.clean(&error.to_string());
        Error::Io {
            op: "list uploads",
            path: self.uri.clone(),
            source: std::io::Error::other(text),
            advice: "see whether this key may list them (s3:ListBucketMultipartUploads)".into(),
        }
    }

    /// Runs one operation with a deadline and our errors.
    pub async fn run<T>(
        &self,
        op: &'static str,
        path: &str,
        future: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        let done = self.limited(op, path, future).await?;
        done.map_err(|e| self.mapped(op, path, &e))
    }

    /// As [`Self::run`], keeping their error for callers that decide by it.
    pub async fn limited<T>(
        &self,
        op: &'static str,
        path: &str,
        future: impl Future<Output = object_store::Result<T>>,
    ) -> Result<object_store::Result<T>> {
        self.count();
        self.within(op, path, future).await
    }

    async fn within<T>(
        &self,
        op: &'static str,
        path: &str,
        future: impl Future<Output = T>,
    ) -> Result<T> {
        tokio::time::timeout(OPERATION_TIMEOUT, future).await.map_err(|_| Error::Timeout {
            what: format!("{op} of {}", self.named(path)),
            waited: OPERATION_TIMEOUT,
            advice: "check the store and the network".into(),
        })
    }
}

impl Store for ObjectStoreAdapter {
    fn uri(&self) -> &str {
        &self.shared.uri
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { create_if_absent: true, replace_if_match: true, ..Capabilities::default() }
    }

    fn head<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<ObjectMeta>> {
        self.head_object(path).boxed()
    }

    fn open<'a>(
        &'a self,
        path: &'a str,
        _options: OpenOptions,
    ) -> BoxFuture<'a, Result<Arc<dyn ReadAt>>> {
        async move {
            let key = self.key(path)?;
            let meta = self.head_object(path).await?;
            let reader = ObjectReader::new(Arc::clone(&self.shared), key, meta);
            Ok(Arc::new(reader) as Arc<dyn ReadAt>)
        }
        .boxed()
    }

    fn create<'a>(
        &'a self,
        path: &'a str,
        options: WriteOptions,
    ) -> BoxFuture<'a, Result<Box<dyn Writer>>> {
        self.create_object(path, options).boxed()
    }

    fn put_new<'a>(&'a self, path: &'a str, data: Bytes) -> BoxFuture<'a, Result<Version>> {
        async move {
            let key = self.key(path)?;
            self.shared.put_new(path, &key, data).await
        }
        .boxed()
    }

    fn replace<'a>(
        &'a self,
        path: &'a str,
        data: Bytes,
        expected: &'a Version,
    ) -> BoxFuture<'a, Result<Version>> {
        async move {
            let key = self.key(path)?;
            self.shared.replace(path, &key, data, expected).await
        }
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectMeta>>> {
        self.list_objects(prefix).boxed()
    }

    fn list_names<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        self.names(prefix).boxed()
    }

    fn delete<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        self.delete_object(path).boxed()
    }

    fn abort_unfinished<'a>(&'a self, abandoned: Abandoned<'a>) -> BoxFuture<'a, Result<usize>> {
        self.abort_uploads(abandoned).boxed()
    }

    fn remove_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        futures::future::ready(self.folder(path).map(|_| ())).boxed()
    }

    fn sync_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        futures::future::ready(self.folder(path).map(|_| ())).boxed()
    }

    fn counters(&self) -> IoCounters {
        let counts = &self.shared.parts.counts;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        IoCounters {
            object_requests: get(&counts.requests),
            read_bytes: get(&counts.read_bytes),
            written_bytes: get(&counts.written_bytes),
            retries: get(&counts.retries),
            ..IoCounters::default()
        }
    }
}
