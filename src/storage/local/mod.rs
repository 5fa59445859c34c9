//! Local files: an engine (io_uring or threads) times a mode (direct or buffered).
//!
//! | file | what it does |
//! |---|---|
//! | `engine` | chooses the engine once per process, and runs an operation on it |
//! | `op` | what an operation is, and what short transfers mean |
//! | `uring`, `ring` | the io_uring engine, and the loop of one ring |
//! | `registry` | memory registered with the rings |
//! | `threads` | the thread-pool engine |
//! | `file`, `writer` | ranged reads and streamed writes, direct or buffered |
//! | `names` | object paths and listing |
//! | `commit` | create-if-absent and replace-if-unchanged |
//! | `probe` | what this machine offers |
//! | `sys` | file system calls, off the async threads |

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::{
    Capabilities, IoCounters, ObjectMeta, OpenOptions, ReadAt, Store, Version, WriteOptions, Writer,
};
use crate::error::{Error, Result};
use counters::Counters;
use file::{LocalFile, Target};
use sys::{OpenMode, blocking};

mod commit;
mod counters;
mod engine;
mod file;
mod names;
mod op;
mod probe;
mod registry;
mod ring;
mod sys;
mod threads;
mod uring;
mod writer;

pub use commit::is_temporary;
pub use engine::{ENGINE_ENV, EngineChoice, EngineKind};
pub use probe::{DirectReport, IoReport, probe, probe_direct};
pub use registry::{REGISTER_ENV, registered, ring_hook};

/// Default of [`LocalOptions::op_timeout`]: a disk that needs longer is broken or unmounted.
const OP_TIMEOUT: Duration = Duration::from_mins(2);
/// Default of [`LocalOptions::sync_timeout`]: 90 GB of dirty pages on a slow disk.
const SYNC_TIMEOUT: Duration = Duration::from_mins(15);

/// How a local store works.
#[derive(Debug, Clone, Copy)]
pub struct LocalOptions {
    /// Which engine moves the bytes.
    pub engine: EngineChoice,
    /// Longest wait for one read or write; a hung file server becomes an error.
    pub op_timeout: Duration,
    /// Longest wait for an fsync, which may have gigabytes of cached writes before it.
    pub sync_timeout: Duration,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self { engine: EngineChoice::Auto, op_timeout: OP_TIMEOUT, sync_timeout: SYNC_TIMEOUT }
    }
}

/// A folder as a store. The folder need not exist yet; the first write creates it.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
    uri: String,
    options: LocalOptions,
    counters: Arc<Counters>,
}

impl LocalStore {
    /// A store over the folder `root`, which is made absolute now.
    pub fn new(root: &Path, options: LocalOptions) -> Result<Self> {
        let shown = || root.display().to_string();
        let root = std::path::absolute(root).map_err(|e| Error::io("resolve", shown(), e))?;
        if root.exists() && !root.is_dir() {
            return Err(Error::invalid("store root", "a folder", format!("file {}", shown())));
        }
        let Some(uri) = root.to_str().map(String::from) else {
            return Err(Error::invalid("store root", "a UTF-8 path", shown()));
        };
        Ok(Self { root, uri, options, counters: Arc::default() })
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The engine that this store's operations run on, started if need be.
    pub fn engine_kind(&self) -> Result<EngineKind> {
        engine::engine(self.options.engine).map(|engine| engine.kind())
    }

    fn target(&self, path: PathBuf, file: std::fs::File, direct: bool) -> Result<Target> {
        Ok(Target {
            file: Arc::new(file),
            path: Arc::new(path),
            direct,
            engine: engine::engine(self.options.engine)?,
            counters: Arc::clone(&self.counters),
            options: self.options,
        })
    }

    fn open_file(&self, path: &str, options: OpenOptions) -> Result<LocalFile> {
        let full = names::object_path(&self.root, path)?;
        // Looked at before it is opened, since opening a pipe would wait for a writer.
        let looked = std::fs::metadata(&full).map_err(|e| names::not_found_or(&full, "open", e))?;
        if !looked.is_file() {
            return Err(Error::NotFound {
                what: full.display().to_string(),
                advice: "it is not a regular file".into(),
            });
        }
        let (file, direct) = sys::open_maybe_direct(&full, OpenMode::Read, options.direct)
            .map_err(|e| names::not_found_or(&full, "open", e))?;
        let meta = file.metadata().map_err(|e| names::not_found_or(&full, "stat", e))?;
        let meta = sys::object_meta(path, &meta);
        Ok(LocalFile { target: self.target(full, file, direct)?, meta })
    }

    async fn create_file(&self, path: &str, options: WriteOptions) -> Result<Box<dyn Writer>> {
        let full = names::object_path(&self.root, path)?;
        let (size, direct, made) = (options.size_bytes, options.direct, full.clone());
        let (file, direct) = blocking(move || writer::create(&made, size, direct)).await?;
        let target = self.target(full, file, direct)?;
        Ok(Box::new(writer::LocalWriter::new(target, size)))
    }
}

impl Store for LocalStore {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            create_if_absent: true,
            replace_if_match: true,
            directories: true,
            direct_io: true,
            local_root: Some(self.root.clone()),
        }
    }

    fn head<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<ObjectMeta>> {
        // One stat: cheaper here than on another thread.
        let head = || {
            let meta = names::metadata(&names::object_path(&self.root, path)?)?;
            Ok(sys::object_meta(path, &meta))
        };
        futures::future::ready(head()).boxed()
    }

    fn open<'a>(
        &'a self,
        path: &'a str,
        options: OpenOptions,
    ) -> BoxFuture<'a, Result<Arc<dyn ReadAt>>> {
        // An open and a stat: cheaper here than on another thread, and small files are many.
        let opened = self.open_file(path, options);
        futures::future::ready(opened.map(|file| Arc::new(file) as Arc<dyn ReadAt>)).boxed()
    }

    fn create<'a>(
        &'a self,
        path: &'a str,
        options: WriteOptions,
    ) -> BoxFuture<'a, Result<Box<dyn Writer>>> {
        self.create_file(path, options).boxed()
    }

    fn put_new<'a>(&'a self, path: &'a str, data: Bytes) -> BoxFuture<'a, Result<Version>> {
        let target = names::object_path(&self.root, path);
        async move {
            let target = target?;
            blocking(move || commit::put_new(&target, &data)).await
        }
        .boxed()
    }

    fn replace<'a>(
        &'a self,
        path: &'a str,
        data: Bytes,
        expected: &'a Version,
    ) -> BoxFuture<'a, Result<Version>> {
        let (target, expected) = (names::object_path(&self.root, path), expected.clone());
        async move {
            let target = target?;
            blocking(move || commit::replace(&target, &data, &expected)).await
        }
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectMeta>>> {
        let (root, prefix) = (self.root.clone(), prefix.to_string());
        blocking(move || names::list(&root, &prefix)).boxed()
    }

    fn list_names<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        let (root, prefix) = (self.root.clone(), prefix.to_string());
        blocking(move || names::list_names(&root, &prefix)).boxed()
    }

    fn delete<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        let target = names::object_path(&self.root, path);
        async move {
            let target = target?;
            blocking(move || names::remove_file(&target)).await
        }
        .boxed()
    }

    fn remove_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        let folder = names::object_path(&self.root, path);
        async move {
            let folder = folder?;
            blocking(move || names::remove_folder(&folder)).await
        }
        .boxed()
    }

    fn sync_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        let folder = names::folder_path(&self.root, path);
        async move {
            let folder = folder?;
            blocking(move || sys::sync_folder(&folder)).await
        }
        .boxed()
    }

    fn counters(&self) -> IoCounters {
        self.counters.snapshot()
    }
}
