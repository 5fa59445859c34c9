//! Where bytes lie: ranged reads into arena buffers, streamed writes, and the few atomic operations
//! that a commit hangs on.
//!
//! `local/` is an engine (io_uring or threads) times a mode (direct or buffered); `object` adapts
//! object stores; `fault` wraps any store with scripted faults. Every implementation passes
//! the contract suite in `tests/store_contract.rs`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;

use crate::error::Result;
use crate::memory::Buffer;

pub mod fault;
pub mod local;
pub mod object;
mod open;

pub use open::{StorageOptions, open_store};

/// What a store knows about an object without reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Path below the store's root, `/`-separated.
    pub path: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Opaque version (etag of an object store; size, mtime and inode of a local file).
    pub version: Version,
    /// Modification time, nanoseconds since the Unix epoch; 0 where unknown.
    pub mtime_ns: i64,
}

/// Opaque version of an object: equal versions mean equal bytes as far as the store can tell.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Version(pub String);

/// What a store can promise. A commit refuses stores that lack what it needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// `put_new` is atomic: of several racing writers one wins and the others are told.
    pub create_if_absent: bool,
    /// `replace` is atomic against a version.
    pub replace_if_match: bool,
    /// Directories exist and `sync_dir` makes entries durable.
    pub directories: bool,
    /// `OpenOptions::direct` and `WriteOptions::direct` bypass the page cache.
    pub direct_io: bool,
    /// Root on the local file system, for stores that have one.
    pub local_root: Option<PathBuf>,
}

/// How to open for reading.
#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    /// Bypass the page cache where the store can; reads at any offset and length still work.
    pub direct: bool,
}

/// How to create for writing.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteOptions {
    /// Bypass the page cache where the store can. Slices that are page-aligned in memory and in
    /// the file go straight; others take a bounce buffer.
    pub direct: bool,
    /// Final size if known: reserves space (and fails early with [`crate::Error::NoSpace`]) and
    /// chooses multipart sizes.
    pub size_bytes: Option<u64>,
}

/// Reads and writes a store has done, by the path they took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IoCounters {
    /// Reads through io_uring.
    pub uring_reads: u64,
    /// Writes through io_uring.
    pub uring_writes: u64,
    /// Of all reads, those with O_DIRECT.
    pub direct_reads: u64,
    /// Of all writes, those with O_DIRECT.
    pub direct_writes: u64,
    /// Of the reads through io_uring, those into registered memory.
    pub fixed_reads: u64,
    /// Of the writes through io_uring, those from registered memory.
    pub fixed_writes: u64,
    /// Reads on the thread-pool engine.
    pub thread_reads: u64,
    /// Writes on the thread-pool engine.
    pub thread_writes: u64,
    /// Requests to an object store.
    pub object_requests: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that were repeated.
    pub retries: u64,
}

/// Whether a write of this path that began then (nanoseconds since the Unix epoch, 0 if unknown)
/// has nobody any more who would end it.
pub type Abandoned<'a> = &'a (dyn Fn(&str, i64) -> bool + Send + Sync);

/// A place with named objects. Paths are relative, `/`-separated, and may not contain `..`.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Root URI without credentials, as it appears in errors.
    fn uri(&self) -> &str;

    /// What this store can promise.
    fn capabilities(&self) -> Capabilities;

    /// Size and version of one object.
    fn head<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<ObjectMeta>>;

    /// Opens one object for ranged reads.
    fn open<'a>(
        &'a self,
        path: &'a str,
        options: OpenOptions,
    ) -> BoxFuture<'a, Result<Arc<dyn ReadAt>>>;

    /// Starts a streamed write of a new object; its folders are created.
    /// An object of that name is an error ([`crate::Error::AlreadyExists`]).
    fn create<'a>(
        &'a self,
        path: &'a str,
        options: WriteOptions,
    ) -> BoxFuture<'a, Result<Box<dyn Writer>>>;

    /// Creates a small object atomically and durably, or fails with
    /// [`crate::Error::AlreadyExists`] and leaves the existing one alone.
    fn put_new<'a>(&'a self, path: &'a str, data: Bytes) -> BoxFuture<'a, Result<Version>>;

    /// Replaces a small object atomically and durably if it still has `expected`.
    fn replace<'a>(
        &'a self,
        path: &'a str,
        data: Bytes,
        expected: &'a Version,
    ) -> BoxFuture<'a, Result<Version>>;

    /// All objects below `prefix` (a folder path, `""` for all), sorted by path.
    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectMeta>>>;

    /// Names directly below `prefix`: folders end with `/`. Sorted.
    fn list_names<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>>;

    /// Deletes one object; a missing one is not an error.
    fn delete<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Removes the folder `path` if it is empty; stores without folders do nothing.
    fn remove_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Gives up streamed writes of new objects below the root that never ended and that `abandoned`
    /// says so of; returns how many. Stores that keep nothing of such writes do nothing.
    fn abort_unfinished<'a>(&'a self, _abandoned: Abandoned<'a>) -> BoxFuture<'a, Result<usize>> {
        Box::pin(std::future::ready(Ok(0)))
    }

    /// Makes the entries of folder `path` durable; stores without folders do nothing.
    fn sync_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>>;

    /// Reads and writes so far.
    fn counters(&self) -> IoCounters;
}

/// One object open for reading.
pub trait ReadAt: fmt::Debug + Send + Sync + 'static {
    /// Size and version at opening.
    fn meta(&self) -> &ObjectMeta;

    /// Fills all of `buf` from `offset` and gives it back. A range past the end is
    /// [`crate::Error::Corrupt`]: the caller asked for bytes that should be there.
    ///
    /// The buffer belongs to the operation until it is done: dropping the future does not free it
    /// while the kernel may still write to it.
    fn read_at(&self, offset: u64, buf: Buffer) -> BoxFuture<'static, Result<Buffer>>;

    /// Fills `out` from `offset` if all of it is in memory already, on the calling thread and
    /// without waiting for a device. `false` leaves `out` undefined: use [`ReadAt::read_at`].
    fn read_cached(&self, _offset: u64, _out: &mut [u8]) -> bool {
        false
    }
}

/// A streamed write. Dropping it without `finish` leaves a partial object, which `abort` removes.
pub trait Writer: Send {
    /// Appends; may return before the bytes are stored, with a bounded number in flight.
    fn write(&mut self, data: Bytes) -> BoxFuture<'_, Result<()>>;

    /// Waits for all writes, makes the bytes durable and returns the size.
    fn finish(self: Box<Self>) -> BoxFuture<'static, Result<u64>>;

    /// Gives up: removes what was written.
    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<()>>;
}

/// Key-value options of a store, from code, a Python dict or the environment.
pub type OptionMap = BTreeMap<String, String>;
