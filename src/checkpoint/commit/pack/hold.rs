//! Referred steps stay until the manifest says so.
//!
//! A step may be removed by retention of this run, which goes by committed manifests, and by
//! another process, which does not know of a save under way. So rank 0 first marks every step it
//! refers to, then sees that each is still there, and takes the marks away when the manifest is.
//! Whoever removes a step that may be referred to deletes its manifest first, then looks for marks
//! and, after those, at the manifests; where it finds the step, its data stays. In whichever order
//! the two meet, one of them sees the other.

use std::collections::BTreeSet;

use bytes::Bytes;

use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{MANIFEST, Manifest, Referred, join, step_dir};
use crate::checkpoint::read::check_sizes;
use crate::checkpoint::retain::referring_mark;
use crate::error::{Error, Result};
use crate::storage::Store;

/// The steps of these files, ascending.
pub fn held_steps(referred: &[Referred]) -> Vec<i64> {
    let steps: BTreeSet<i64> = referred.iter().map(|r| r.step).collect();
    steps.into_iter().collect()
}

/// Marks `step` as referred to by a save in `attempt`.
pub async fn hold(store: &dyn Store, step: i64, attempt: &str) -> Result<()> {
    match store.put_new(&referring_mark(step, attempt)?, Bytes::new()).await {
        Ok(_) | Err(Error::AlreadyExists { .. }) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Takes the mark away.
pub async fn let_go(store: &dyn Store, step: i64, attempt: &str) -> Result<()> {
    store.delete(&referring_mark(step, attempt)?).await
}

/// Whether the steps that hold these files are committed, and whole, as they were when they were
/// referred to.
pub async fn check_held(store: &dyn Store, referred: &[Referred]) -> Result<()> {
    for step in held_steps(referred) {
        let folder = step_dir(step)?;
        let path = join(&folder, MANIFEST);
        let manifest = match read_all(store, &path).await {
            Ok(bytes) => Manifest::decode(&bytes, &path)?,
            Err(Error::NotFound { .. }) => return Err(gone(step, "its manifest is not there")),
            Err(e) => return Err(e),
        };
        let mut of_step = referred.iter().filter(|r| r.step == step).map(|r| &r.file);
        if !of_step.all(|file| manifest.file(&file.path) == Some(file)) {
            return Err(gone(step, "another save has replaced it"));
        }
        match check_sizes(store, &folder, &manifest).await {
            Err(e @ Error::Corrupt { .. }) => return Err(gone(step, &e.to_string())),
            other => other?,
        }
    }
    Ok(())
}

fn gone(step: i64, why: &str) -> Error {
    Error::NotFound {
        what: format!("committed step {step} as it was when this save referred to it ({why})"),
        advice: "save again: all is written anew then".into(),
    }
}
