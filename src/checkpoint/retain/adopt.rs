//! Whose a step is. A manifest names the root it was committed in; a folder that somebody copied
//! into another root names that other one, and is restored from but never pruned, since it may be
//! the only copy of something precious. Adopting it is a person's word that it may be.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::layout::{is_attempt_dir, join, parse_step_dir, step_dir};
use crate::checkpoint::read::{Problem, open_step};
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::Store;

/// Folder of one empty file per adopted step, `step-00001000.a-0123456789abcdef`: a manifest is
/// never rewritten.
const ADOPTED_FOLDER: &str = ".drivetrain/adopted";

/// Sixteen hex digits that name a root: a hash of its URI, or of its real path, so that two ways to
/// one folder are one root.
pub fn root_id(store: &dyn Store) -> String {
    let real = store.capabilities().local_root.and_then(|root| std::fs::canonicalize(root).ok());
    let name = match &real {
        Some(path) => path.as_os_str().as_encoded_bytes(),
        None => store.uri().as_bytes(),
    };
    format!("{:016x}", xxh3_64(name))
}

/// Steps and attempts that were adopted.
pub async fn adoptions(store: &dyn Store) -> Result<BTreeSet<(i64, String)>> {
    let names = store.list_names(ADOPTED_FOLDER).await?;
    let parse = |name: String| {
        let (step, attempt) = name.split_once('.')?;
        Some((parse_step_dir(step)?, is_attempt_dir(attempt).then(|| attempt.to_string())?))
    };
    Ok(names.into_iter().filter_map(parse).collect())
}

fn mark(step: i64, attempt: &str) -> Result<String> {
    Ok(join(ADOPTED_FOLDER, &format!("{}.{attempt}", step_dir(step)?)))
}

/// Forgets that a step was adopted.
pub async fn forget(store: &dyn Store, step: i64) -> Result<()> {
    for (_, attempt) in adoptions(store).await?.into_iter().filter(|(s, _)| *s == step) {
        store.delete(&mark(step, &attempt)?).await?;
    }
    Ok(())
}

/// What [`adopt`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Adopted {
    /// Retention counts it from now on.
    Now,
    /// It was committed here or adopted before.
    Already,
    /// It was not adopted, because it is damaged.
    Damaged(Vec<Problem>),
}

/// Verifies every byte of a step and makes retention count it. `progress` hears of bytes read.
pub fn adopt(store: &Arc<dyn Store>, step: i64, progress: &mut dyn FnMut(u64)) -> Result<Adopted> {
    let open = open_step(store, step)?;
    let manifest = open.manifest();
    let own = manifest.root.as_deref().is_none_or(|root| root == root_id(store.as_ref()));
    let known = block_on(adoptions(store.as_ref()))??;
    if own || known.contains(&(step, manifest.attempt.clone())) {
        return Ok(Adopted::Already);
    }
    let problems = open.verify_with(progress)?;
    if !problems.is_empty() {
        return Ok(Adopted::Damaged(problems));
    }
    match block_on(store.put_new(&mark(step, &manifest.attempt)?, Bytes::new()))? {
        Ok(_) => Ok(Adopted::Now),
        Err(Error::AlreadyExists { .. }) => Ok(Adopted::Already),
        Err(e) => Err(e),
    }
}
