//! Whether a root can be written, and whether create-if-absent means it there.
//!
//! A full disk, a read-only file system or a key that may only read must not keep a job from
//! restoring. So such a finding is put aside where there is something to restore, and whoever
//! wants to write looks again.

use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use crate::checkpoint::layout::PROBE_PREFIX;
use crate::checkpoint::meet::draw;
use crate::checkpoint::retain;
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::Store;

/// What is known of a root.
#[derive(Debug)]
pub struct Proof {
    found: AtomicBool,
    single_writer: bool,
}

impl Proof {
    /// Looks. An error says that the root cannot be used, not even for reading.
    pub fn new(store: &dyn Store, single_writer: bool) -> Result<Self> {
        let found = match block_on(probe(store, single_writer))? {
            Ok(()) => true,
            Err(error) if only_writes(&error) && holds_steps(store) => {
                tracing::warn!(%error, root = store.uri(), "steps can only be restored from here");
                false
            }
            Err(error) => return Err(error),
        };
        Ok(Self { found: AtomicBool::new(found), single_writer })
    }

    /// Looks again before something of `need_bytes` is written, if it was not found to work yet.
    pub fn look(&self, store: &dyn Store, need_bytes: u64) -> Result<()> {
        if self.found.load(Ordering::Acquire) {
            return Ok(());
        }
        block_on(probe(store, self.single_writer))?.map_err(|error| match error {
            // The probe needs a few bytes; the caller has to make room for more.
            Error::NoSpace { path, need_bytes: probe_bytes, have_bytes } => {
                Error::NoSpace { path, need_bytes: need_bytes.max(probe_bytes), have_bytes }
            }
            other => other,
        })?;
        self.found.store(true, Ordering::Release);
        Ok(())
    }
}

/// Whether an error of the probe says nothing against reading.
fn only_writes(error: &Error) -> bool {
    match error {
        Error::NoSpace { .. } => true,
        Error::Io { source, .. } => {
            matches!(source.kind(), ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied)
        }
        _ => false,
    }
}

fn holds_steps(store: &dyn Store) -> bool {
    matches!(block_on(retain::committed(store)), Ok(Ok(steps)) if !steps.is_empty())
}

/// Shows that the root can be written, and that create-if-absent means it.
async fn probe(store: &dyn Store, single_writer: bool) -> Result<()> {
    let path = format!("{PROBE_PREFIX}{:016x}", draw());
    let first = Bytes::from_static(b"probe");
    store.put_new(&path, first).await.map_err(|e| unwritable(store, e))?;
    // Other bytes: a store that reads back after a lost answer must not take the first for them.
    let second = store.put_new(&path, Bytes::from_static(b"second probe")).await;
    store.delete(&path).await?;
    match second {
        Err(Error::AlreadyExists { .. }) => Ok(()),
        Err(e) => Err(e),
        Ok(_) if single_writer => Ok(()),
        Ok(_) => Err(Error::Unsupported {
            what: format!("committing to {}, which accepts two creations of one name", store.uri()),
            advice: "use a store with conditional puts, or pass single_writer=True if no other \
                     job writes here"
                .into(),
        }),
    }
}

fn unwritable(store: &dyn Store, error: Error) -> Error {
    match error {
        Error::Io { op, path, source, .. } => Error::Io {
            op,
            path,
            source,
            advice: format!("the checkpoint root {} must be a writable folder", store.uri()),
        },
        other => other,
    }
}
