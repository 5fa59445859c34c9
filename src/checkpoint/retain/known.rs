//! What is known of the committed steps; each manifest is read once.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use super::adopt::adoptions;
use super::policy::Known;
use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{MANIFEST, Manifest, join, parse_step_dir, step_dir};
use crate::checkpoint::read::check_sizes;
use crate::error::{Error, Result};
use crate::storage::{Store, Version};

/// What was read so far: a manifest with the same version is not read again.
#[derive(Debug, Default)]
pub struct Book(Mutex<BTreeMap<i64, (Version, Known)>>);

/// All committed steps of a root, ascending. `root` is its [`super::root_id`].
///
/// An error means that a step could not be looked at, and so may need any other: then nothing may
/// be removed. A damaged manifest is no error, since nobody can restore it.
pub async fn known_steps(store: &dyn Store, book: &Book, root: &str) -> Result<Vec<Known>> {
    let adopted = adoptions(store).await?;
    let mut found = BTreeMap::new();
    for name in store.list_names("").await? {
        let Some(step) = parse_step_dir(&name) else { continue };
        let path = join(&step_dir(step)?, MANIFEST);
        let version = match store.head(&path).await {
            Ok(meta) => meta.version,
            Err(Error::NotFound { .. }) => continue,
            Err(e) => return Err(e),
        };
        let seen = book.0.lock().get(&step).cloned();
        let mut known = match seen {
            Some((at, known)) if at == version => known,
            _ => match look(store, step, &path, root).await {
                Ok(known) => known,
                // Gone since.
                Err(Error::NotFound { .. }) => continue,
                Err(e) => return Err(e),
            },
        };
        known.own |= known.sealed && adopted.contains(&(step, known.attempt.clone()));
        found.insert(step, (version, known));
    }
    let steps = found.values().map(|(_, known)| known.clone()).collect();
    *book.0.lock() = found;
    Ok(steps)
}

async fn look(store: &dyn Store, step: i64, path: &str, root: &str) -> Result<Known> {
    let manifest = match Manifest::decode(&read_all(store, path).await?, path) {
        Ok(manifest) if manifest.step == step => manifest,
        // A copy under another step's name is not what it says.
        Ok(_) | Err(Error::Corrupt { .. }) => return Ok(Known { step, ..Known::default() }),
        Err(e) => return Err(e),
    };
    let whole = match check_sizes(store, &step_dir(step)?, &manifest).await {
        Ok(()) => true,
        Err(Error::Corrupt { .. }) => false,
        Err(e) => return Err(e),
    };
    let finite = |(name, value): (&String, &Option<f64>)| Some((name.clone(), (*value)?));
    Ok(Known {
        step,
        whole,
        sealed: true,
        // Manifests before version 0.2 do not say where they were committed.
        own: manifest.root.as_deref().is_none_or(|r| r == root),
        committed_ns: manifest.committed_ns,
        metrics: manifest.metrics.iter().filter_map(finite).collect(),
        refers_to: manifest.refers_to,
        delta: manifest.delta,
        attempt: manifest.attempt,
    })
}
