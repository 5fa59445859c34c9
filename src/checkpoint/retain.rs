//! Which steps stay. Runs on rank 0 after a commit, and deletes only what a save wrote.
//!
//! A step goes manifest first: from then on nobody takes it for a checkpoint, whatever a kill
//! leaves of the rest. Files with foreign names stay, and so does their folder.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use super::io::read_all;
use super::layout::{
    MANIFEST, Manifest, is_attempt_dir, is_attempt_file, join, parse_step_dir, step_dir,
};
use super::meet::FILES_FOLDER;
use crate::error::{Error, Result};
use crate::storage::local::is_temporary;
use crate::storage::{ObjectMeta, Store};

/// Left-overs of killed saves are swept when they are older than this: a save that is still
/// running somewhere writes more often.
const LEFTOVER_AGE_MIN: Duration = Duration::from_mins(30);

/// How many committed steps to keep.
#[derive(Debug, Default)]
pub struct Keep {
    /// The newest this many; `None` keeps all.
    pub last: Option<u32>,
    /// Besides, every step that this divides.
    pub every: Option<i64>,
    /// Steps that a kept step refers to, which are read once.
    refers: Mutex<BTreeMap<i64, Vec<i64>>>,
    swept: AtomicBool,
}

impl Keep {
    /// Keeps the newest `last` steps and every step that `every` divides.
    pub fn new(last: Option<u32>, every: Option<i64>) -> Result<Self> {
        if last == Some(0) {
            return Err(Error::invalid("keep.last", "at least 1", 0));
        }
        if every.is_some_and(|k| k <= 0) {
            return Err(Error::invalid("keep.every", "at least 1", every.unwrap_or_default()));
        }
        Ok(Self { last, every, ..Self::default() })
    }

    /// Of ascending committed `steps`, those that retention alone would drop. `newest` was
    /// committed just now and always stays.
    fn victims(&self, steps: &[i64], newest: i64) -> BTreeSet<i64> {
        let Some(last) = self.last else { return BTreeSet::new() };
        let old = steps.len().saturating_sub(last as usize);
        let divided = |step: i64| self.every.is_some_and(|k| step % k == 0);
        steps[..old].iter().copied().filter(|&s| s != newest && !divided(s)).collect()
    }
}

/// Committed steps, ascending: those with a manifest, good or not.
pub async fn committed(store: &dyn Store) -> Result<Vec<i64>> {
    let mut steps = Vec::new();
    for name in store.list_names("").await? {
        let Some(step) = parse_step_dir(&name) else { continue };
        match store.head(&join(&step_dir(step)?, MANIFEST)).await {
            Ok(_) => steps.push(step),
            Err(Error::NotFound { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Removes what `keep` does not want after `newest` was committed.
pub async fn prune(store: &dyn Store, keep: &Keep, newest: i64) -> Result<()> {
    keep.refers.lock().remove(&newest);
    if keep.last.is_some() {
        let steps = committed(store).await?;
        let mut victims = keep.victims(&steps, newest);
        if !victims.is_empty() {
            for step in steps.iter().filter(|s| !victims.contains(s)).copied().collect::<Vec<_>>() {
                for needed in refers_to(store, keep, step).await? {
                    victims.remove(&needed);
                }
            }
        }
        for step in victims {
            remove_step(store, step).await?;
        }
    }
    if !keep.swept.swap(true, Ordering::Relaxed) {
        sweep(store, newest).await?;
    }
    Ok(())
}

/// Steps that `step` needs. A damaged manifest can be restored by nobody and needs none; one that
/// could not be read just now may need any, so nothing is removed this time.
async fn refers_to(store: &dyn Store, keep: &Keep, step: i64) -> Result<Vec<i64>> {
    if let Some(known) = keep.refers.lock().get(&step) {
        return Ok(known.clone());
    }
    let needed = match read_manifest(store, step).await {
        Ok(manifest) => manifest.refers_to,
        Err(Error::Corrupt { .. } | Error::NotFound { .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    keep.refers.lock().insert(step, needed.clone());
    Ok(needed)
}

async fn read_manifest(store: &dyn Store, step: i64) -> Result<Manifest> {
    let path = join(&step_dir(step)?, MANIFEST);
    Manifest::decode(&read_all(store, &path).await?, &path)
}

/// Removes a step, manifest first.
pub async fn remove_step(store: &dyn Store, step: i64) -> Result<()> {
    let folder = step_dir(step)?;
    store.delete(&join(&folder, MANIFEST)).await?;
    store.sync_dir(&folder).await?;
    let files = store.list(&folder).await?;
    remove_own(store, &folder, files.iter()).await
}

/// Removes the attempt of a manifest that was replaced.
pub async fn remove_replaced(store: &dyn Store, old: &Manifest) {
    let Ok(folder) = step_dir(old.step) else { return };
    for file in &old.files {
        let _ = store.delete(&join(&folder, &file.path)).await;
    }
    let _ = store.remove_dir(&join(&folder, &old.attempt)).await;
}

/// Deletes those of `files` that a save wrote below the step folder, and folders left empty.
async fn remove_own(
    store: &dyn Store,
    folder: &str,
    files: impl Iterator<Item = &ObjectMeta>,
) -> Result<()> {
    let mut attempts = BTreeSet::new();
    for file in files {
        let Some(name) = file.path.strip_prefix(&format!("{folder}/")) else { continue };
        match name.split_once('/') {
            Some((attempt, inner))
                if is_attempt_dir(attempt) && (is_attempt_file(inner) || is_temporary(inner)) =>
            {
                store.delete(&file.path).await?;
                attempts.insert(attempt.to_string());
            }
            None if is_temporary(name) => store.delete(&file.path).await?,
            _ => {}
        }
    }
    for attempt in attempts {
        let _ = store.remove_dir(&join(folder, &attempt)).await;
    }
    let _ = store.remove_dir(folder).await;
    Ok(())
}

/// Removes old left-overs of killed saves: attempts that no manifest names in steps up to the
/// newest, and meeting files.
async fn sweep(store: &dyn Store, newest: i64) -> Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let before_ns = now.saturating_sub(LEFTOVER_AGE_MIN).as_nanos() as i64;
    let old = |file: &&ObjectMeta| file.mtime_ns != 0 && file.mtime_ns < before_ns;
    for name in store.list_names("").await? {
        let Some(step) = parse_step_dir(&name).filter(|&s| s <= newest) else { continue };
        let folder = step_dir(step)?;
        let attempt = match read_manifest(store, step).await {
            Ok(manifest) => Some(manifest.attempt),
            Err(Error::NotFound { .. }) => None,
            // A damaged manifest does not say which attempt is its own, so all stay.
            Err(_) => continue,
        };
        let named = attempt.map(|a| format!("{folder}/{a}/"));
        let files = store.list(&folder).await?;
        let loose = |f: &&ObjectMeta| !named.as_ref().is_some_and(|n| f.path.starts_with(n));
        remove_own(store, &folder, files.iter().filter(old).filter(loose)).await?;
    }
    for file in store.list(FILES_FOLDER).await?.iter().filter(old) {
        store.delete(&file.path).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_and_divided_steps_stay() {
        let keep = Keep::new(Some(2), Some(100)).unwrap();
        let steps = [50, 100, 150, 200, 250];
        assert_eq!(keep.victims(&steps, 250), BTreeSet::from([50, 150]));
        // A job that went back to an older step keeps what it just committed.
        assert_eq!(keep.victims(&steps, 50), BTreeSet::from([150]));
        assert!(Keep::new(None, None).unwrap().victims(&steps, 250).is_empty());
        assert!(Keep::new(Some(9), None).unwrap().victims(&steps, 250).is_empty());
        assert!(Keep::new(Some(0), None).is_err() && Keep::new(None, Some(0)).is_err());
    }
}
