//! A store that fails on purpose, from a script: for tests of everything that must survive faults,
//! and for the demo that kills ranks in the middle of a save.
//!
//! Every operation of the wrapped store gets a number, 1, 2, 3, …; a script says what happens at
//! which operation. A run without faults tells with [`FaultStore::operations`] how many there are,
//! so that a test can then fail each of them in turn.
//!
//! Script: clauses separated by `;`, the first rule that matches an operation acts.
//!
//! | clause | meaning |
//! |---|---|
//! | `ACTION@N` | at operation number N |
//! | `ACTION@OP` | at every operation of this name, or `any` |
//! | `ACTION@OP:K` | at the K-th of them |
//! | `ACTION@OP:TEXT`, `ACTION@OP:TEXT:K` | at those whose path contains TEXT, the K-th of them |
//! | `ACTION@~P:SEED` | with probability P, at the same operations for the same seed |
//! | `rank=R` | the rules hold only where the variable RANK is R |
//! | `uri=TEXT` | only stores whose URI contains TEXT are wrapped (environment only) |
//!
//! Names of operations: `head open read create write finish abort put_new replace list list_names
//! delete remove_dir sync_dir`.
//!
//! | action | what happens |
//! |---|---|
//! | `kill`, `kill-after` | SIGKILL to this process before or after the operation |
//! | `tear` | half of the data is written, then SIGKILL; an atomic write leaves a temporary file |
//! | `eio`, `enospc`, `timeout`, `fail` | the operation is not done and that error returned |
//! | `halt` | this and all later operations fail: what a dead process leaves, in a live one |
//! | `delay=50ms` | the operation starts later |
//! | `truncate` | half of the data is written and success returned; a read is cut short |
//! | `flip` | one bit of what is written or read is flipped |
//! | `lost` | the operation is done, its answer is a timeout |
//!
//! The environment variable `DRIVETRAIN_FAULT` holds such a script for every store that the process
//! opens; `DRIVETRAIN_FAULT_LOG` names a file that gets a JSON line before and after each operation
//! (`{rank}` and `{pid}` in the name are filled in). Both exist for tests and cost nothing when
//! unset.

mod core;
mod environment;
mod script;

use std::sync::Arc;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;

pub use self::core::Operation;
use self::core::{Core, Step};
pub use environment::{FAULT_ENV, FAULT_LOG_ENV, from_environment};
pub use script::FaultScript;

use super::{
    Abandoned, Capabilities, IoCounters, ObjectMeta, OpenOptions, ReadAt, Store, Version,
    WriteOptions, Writer,
};
use crate::error::Result;
use crate::memory::Buffer;

/// Name of what a torn atomic write leaves; a temporary file of the local store by its name.
const TORN_NAME: &str = ".drivetrain-tmp-torn";

/// Any store, with faults.
#[derive(Debug)]
pub struct FaultStore {
    inner: Arc<dyn Store>,
    core: Arc<Core>,
}

impl FaultStore {
    /// Wraps a store with a script.
    pub fn new(inner: Arc<dyn Store>, script: FaultScript) -> Self {
        Self { inner, core: Arc::new(Core::new(script, None)) }
    }

    fn with_core(inner: Arc<dyn Store>, core: Arc<Core>) -> Self {
        Self { inner, core }
    }

    /// Number of operations so far.
    pub fn operations(&self) -> u64 {
        self.core.operations()
    }

    /// The operations so far, in order of their numbers (the first 65,536 of them).
    pub fn history(&self) -> Vec<Operation> {
        self.core.history()
    }

    /// Runs an operation that moves no data.
    async fn plain<T>(
        &self,
        op: &'static str,
        path: &str,
        work: BoxFuture<'_, Result<T>>,
    ) -> Result<T> {
        let step = self.core.before(op, path, 0).await?;
        let done = work.await;
        self.core.after(&step, done)
    }

    /// Dies in the middle of an atomic write, if the script says so: where folders exist, half of
    /// the temporary file that the write would have renamed stays behind.
    async fn maybe_tear(&self, step: &Step, path: &str, data: &Bytes) {
        let Some(half) = step.torn(data) else { return };
        if self.inner.capabilities().directories {
            let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let temporary = format!("{folder}/{TORN_NAME}");
            let temporary = temporary.trim_start_matches('/');
            if let Ok(mut writer) = self.inner.create(temporary, WriteOptions::default()).await {
                let _ = writer.write(half).await;
                let _ = writer.finish().await;
            }
        }
        self.core.kill(step)
    }
}

impl Store for FaultStore {
    fn uri(&self) -> &str {
        self.inner.uri()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn head<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<ObjectMeta>> {
        self.plain("head", path, self.inner.head(path)).boxed()
    }

    fn open<'a>(
        &'a self,
        path: &'a str,
        options: OpenOptions,
    ) -> BoxFuture<'a, Result<Arc<dyn ReadAt>>> {
        async move {
            let inner = self.plain("open", path, self.inner.open(path, options)).await?;
            let core = Arc::clone(&self.core);
            Ok(Arc::new(FaultReader { core, inner }) as Arc<dyn ReadAt>)
        }
        .boxed()
    }

    fn create<'a>(
        &'a self,
        path: &'a str,
        options: WriteOptions,
    ) -> BoxFuture<'a, Result<Box<dyn Writer>>> {
        async move {
            let inner = self.plain("create", path, self.inner.create(path, options)).await?;
            let (core, path) = (Arc::clone(&self.core), path.to_string());
            Ok(Box::new(FaultWriter { core, inner, path }) as Box<dyn Writer>)
        }
        .boxed()
    }

    fn put_new<'a>(&'a self, path: &'a str, data: Bytes) -> BoxFuture<'a, Result<Version>> {
        async move {
            let step = self.core.before("put_new", path, data.len()).await?;
            self.maybe_tear(&step, path, &data).await;
            let done = self.inner.put_new(path, step.alter(data)).await;
            self.core.after(&step, done)
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
            let step = self.core.before("replace", path, data.len()).await?;
            self.maybe_tear(&step, path, &data).await;
            let done = self.inner.replace(path, step.alter(data), expected).await;
            self.core.after(&step, done)
        }
        .boxed()
    }

    fn list<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<ObjectMeta>>> {
        self.plain("list", prefix, self.inner.list(prefix)).boxed()
    }

    fn list_names<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<String>>> {
        self.plain("list_names", prefix, self.inner.list_names(prefix)).boxed()
    }

    fn delete<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        self.plain("delete", path, self.inner.delete(path)).boxed()
    }

    fn remove_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        self.plain("remove_dir", path, self.inner.remove_dir(path)).boxed()
    }

    /// Not counted: it is no operation of a save, and a store of files has none.
    fn abort_unfinished<'a>(&'a self, abandoned: Abandoned<'a>) -> BoxFuture<'a, Result<usize>> {
        self.inner.abort_unfinished(abandoned)
    }

    fn sync_dir<'a>(&'a self, path: &'a str) -> BoxFuture<'a, Result<()>> {
        self.plain("sync_dir", path, self.inner.sync_dir(path)).boxed()
    }

    fn counters(&self) -> IoCounters {
        self.inner.counters()
    }
}

#[derive(Debug)]
struct FaultReader {
    core: Arc<Core>,
    inner: Arc<dyn ReadAt>,
}

impl ReadAt for FaultReader {
    fn meta(&self) -> &ObjectMeta {
        self.inner.meta()
    }

    fn read_at(&self, offset: u64, buf: Buffer) -> BoxFuture<'static, Result<Buffer>> {
        let (core, inner) = (Arc::clone(&self.core), Arc::clone(&self.inner));
        async move {
            let path = &inner.meta().path;
            let step = core.before("read", path, buf.len()).await?;
            let done = inner.read_at(offset, buf).await;
            let done = done.and_then(|buf| step.alter_read(path, offset, buf));
            core.after(&step, done)
        }
        .boxed()
    }
}

struct FaultWriter {
    core: Arc<Core>,
    inner: Box<dyn Writer>,
    path: String,
}

impl FaultWriter {
    /// Ends the write as `op`; where that fails by injection the inner writer is only dropped,
    /// which leaves a partial object as a failing machine does.
    async fn end<T>(
        self,
        op: &'static str,
        end: impl FnOnce(Box<dyn Writer>) -> BoxFuture<'static, Result<T>>,
    ) -> Result<T> {
        let step = self.core.before(op, &self.path, 0).await?;
        let done = end(self.inner).await;
        self.core.after(&step, done)
    }
}

impl Writer for FaultWriter {
    fn write(&mut self, data: Bytes) -> BoxFuture<'_, Result<()>> {
        async move {
            let step: Step = self.core.before("write", &self.path, data.len()).await?;
            if let Some(half) = step.torn(&data) {
                let _ = self.inner.write(half).await;
                self.core.kill(&step);
            }
            let done = self.inner.write(step.alter(data)).await;
            self.core.after(&step, done)
        }
        .boxed()
    }

    fn finish(self: Box<Self>) -> BoxFuture<'static, Result<u64>> {
        self.end("finish", Writer::finish).boxed()
    }

    fn abort(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        self.end("abort", Writer::abort).boxed()
    }
}
