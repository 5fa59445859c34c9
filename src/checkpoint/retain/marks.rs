//! Marks of saves under way: an empty file per step that one refers to, so that nobody removes the
//! step before the manifest says that it is referred to (see `commit/pack/hold`).

use std::collections::BTreeSet;

use crate::checkpoint::layout::{is_attempt_dir, join, parse_step_dir, step_dir};
use crate::error::Result;
use crate::storage::{ObjectMeta, Store};

/// Folder of the marks, `step-00001000.a-0123456789abcdef` by referred step and the attempt of the
/// save that refers to it.
const REFERRING_FOLDER: &str = ".drivetrain/referring";

/// Path of the mark of a save in `attempt` that refers to `step`.
pub fn referring_mark(step: i64, attempt: &str) -> Result<String> {
    Ok(join(REFERRING_FOLDER, &format!("{}.{attempt}", step_dir(step)?)))
}

/// Steps that are marked, by marks that are not `old`.
pub async fn marked(
    store: &dyn Store,
    old: impl Fn(&&ObjectMeta) -> bool,
) -> Result<BTreeSet<i64>> {
    let files = store.list(REFERRING_FOLDER).await?;
    let parse = |file: &ObjectMeta| {
        let (step, attempt) = file.path.rsplit('/').next()?.split_once('.')?;
        parse_step_dir(step).filter(|_| is_attempt_dir(attempt))
    };
    Ok(files.iter().filter(|file| !old(file)).filter_map(parse).collect())
}

/// Removes marks that killed saves left.
pub async fn sweep_marks(store: &dyn Store, old: impl Fn(&&ObjectMeta) -> bool) -> Result<()> {
    for file in store.list(REFERRING_FOLDER).await?.iter().filter(old) {
        store.delete(&file.path).await?;
    }
    Ok(())
}
