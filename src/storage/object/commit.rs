//! Conditional puts whose outcome is always known.
//!
//! A put may succeed and its answer be lost. Repeating it blindly would then say "already exists"
//! of our own object; so after an unclear answer the stored bytes are read back, and if they are
//! ours the put has succeeded. Callers whose bytes could equal another writer's must make them
//! unique (a commit does: its manifest carries an attempt id).

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{
    Error as Theirs, GetOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutResult,
    UpdateVersion,
};

use super::adapter::{Shared, etag_of, version_of};
use super::error::{exists, missing, outcome_unknown};
use crate::error::{Error, Result};
use crate::storage::Version;

/// First pause before a repetition; doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// What is stored under a key now.
enum Stored {
    Nothing,
    Ours(Version),
    Other(Version),
}

/// What to do after one try.
enum Next {
    Done(Version),
    Repeat,
}

/// One conditional put under way.
struct Conditional<'a> {
    shared: &'a Shared,
    path: &'a str,
    key: &'a Path,
    data: &'a Bytes,
    /// The version to replace; none to create.
    expected: Option<&'a Version>,
    /// An earlier try may have succeeded.
    unclear: bool,
}

impl Shared {
    /// Creates `key` with `data` if nothing is there.
    pub async fn put_new(&self, path: &str, key: &Path, data: Bytes) -> Result<Version> {
        let data = &data;
        Conditional { shared: self, path, key, data, expected: None, unclear: false }.run().await
    }

    /// Replaces `key` with `data` if it still has the version `expected`.
    pub async fn replace(
        &self,
        path: &str,
        key: &Path,
        data: Bytes,
        expected: &Version,
    ) -> Result<Version> {
        if etag_of(expected).is_none() {
            return Err(Error::Unsupported {
                what: format!("conditional replacement of {}", self.named(path)),
                advice: "use a store that gives objects an etag".into(),
            });
        }
        let (data, expected) = (&data, Some(expected));
        Conditional { shared: self, path, key, data, expected, unclear: false }.run().await
    }
}

impl Conditional<'_> {
    fn op(&self) -> &'static str {
        if self.expected.is_some() { "replace" } else { "put" }
    }

    /// Tries with growing pauses, at most as often and as long as the policy says.
    async fn run(mut self) -> Result<Version> {
        let (started, policy) = (Instant::now(), self.shared.parts.retry);
        let mut pause = PAUSE_MIN;
        for tries in 0..=policy.retries_max {
            let last = tries == policy.retries_max || started.elapsed() >= policy.deadline;
            if let Next::Done(version) = self.step(last).await? {
                return Ok(version);
            }
            if !self.shared.parts.counted_below {
                self.shared.parts.counts.retries.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
        // The last step decides, so only a policy without tries comes here.
        Err(Error::invalid("retries_max", "at least one try", policy.retries_max))
    }

    /// One try; `last` means that it must decide.
    async fn step(&mut self, last: bool) -> Result<Next> {
        let error = match self.put().await? {
            Ok(put) => return self.stored_version(put).await.map(Next::Done),
            Err(error) => error,
        };
        let refused = matches!(error, Theirs::AlreadyExists { .. } | Theirs::Precondition { .. })
            || (self.expected.is_some() && matches!(error, Theirs::NotFound { .. }));
        if !refused && !outcome_unknown(&error) {
            return Err(self.mapped(&error));
        }
        self.unclear |= !refused;
        let stored = self.look().await?;
        match (stored, self.expected) {
            (Stored::Ours(version), _) if self.unclear => Ok(Next::Done(version)),
            (Stored::Ours(_) | Stored::Other(_), None) => Err(exists(&self.name())),
            (Stored::Ours(now) | Stored::Other(now), Some(expected)) if now != *expected => {
                Err(Error::Changed {
                    file: self.name(),
                    expected: expected.0.clone(),
                    found: now.0,
                })
            }
            (Stored::Nothing, Some(_)) => Err(missing(&self.name())),
            // Nothing was stored, or the version still fits: a lost request, or a server that says
            // "conflict" for a race with a delete.
            _ if last => Err(self.mapped(&error)),
            _ => Ok(Next::Repeat),
        }
    }

    fn name(&self) -> String {
        self.shared.named(self.path)
    }

    fn mapped(&self, error: &Theirs) -> Error {
        self.shared.mapped(self.op(), self.path, error)
    }

    fn mode(&self) -> PutMode {
        match self.expected {
            None => PutMode::Create,
            Some(version) => {
                let e_tag = etag_of(version).map(String::from);
                PutMode::Update(UpdateVersion { e_tag, version: None })
            }
        }
    }

    async fn put(&self) -> Result<Result<PutResult, Theirs>> {
        let options = PutOptions { mode: self.mode(), ..PutOptions::default() };
        let parts = &self.shared.parts;
        let put = parts.conditional.put_opts(self.key, self.data.clone().into(), options);
        let done = self.shared.limited(self.op(), self.path, put).await?;
        if done.is_ok() {
            parts.counts.written_bytes.fetch_add(self.data.len() as u64, Ordering::Relaxed);
        }
        Ok(done)
    }

    async fn stored_version(&self, put: PutResult) -> Result<Version> {
        if let Some(etag) = put.e_tag {
            return Ok(Version(etag));
        }
        let head = self.shared.parts.store.head(self.key);
        let head = self.shared.run("head", self.path, head).await?;
        Ok(version_of(&head))
    }

    /// Reads back what is stored and compares it with our data.
    async fn look(&self) -> Result<Stored> {
        let get = async {
            let found = self.shared.parts.store.get_opts(self.key, GetOptions::default()).await?;
            let version = version_of(&found.meta);
            // A foreign object may be huge: its size alone says that it is not ours.
            if found.meta.size != self.data.len() as u64 {
                return Ok(Stored::Other(version));
            }
            let same = found.bytes().await? == *self.data;
            Ok(if same { Stored::Ours(version) } else { Stored::Other(version) })
        };
        match self.shared.run("get", self.path, get).await {
            Err(Error::NotFound { .. }) => Ok(Stored::Nothing),
            other => other,
        }
    }
}
