//! Deleting. A step goes manifest first: from then on nobody takes it for a checkpoint, whatever a
//! kill leaves of the rest. Files with foreign names stay, and so does their folder.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::adopt::forget;
use super::marks::{marked, sweep_marks};
use super::policy::Known;
use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::{
    MANIFEST, Manifest, PROBE_PREFIX, is_attempt_dir, is_attempt_file, join, parse_step_dir,
    step_dir,
};
use crate::checkpoint::meet::FILES_FOLDER;
use crate::error::{Error, Result};
use crate::storage::local::is_temporary;
use crate::storage::{ObjectMeta, Store};

/// Left-overs of killed saves are swept when they are older than this: a save that is still
/// running somewhere writes more often.
const LEFTOVER_AGE_MIN: Duration = Duration::from_mins(30);

/// Uploads in parts say when they began and not when they were last added to: a day is longer than
/// any file takes.
const UPLOAD_AGE_MIN: Duration = Duration::from_hours(24);

/// Whether a file is old enough to be a left-over.
fn is_old() -> impl Fn(&&ObjectMeta) -> bool + Copy {
    let before_ns = ago_ns(LEFTOVER_AGE_MIN);
    move |file| file.mtime_ns != 0 && file.mtime_ns < before_ns
}

/// Nanoseconds since the Unix epoch, so long ago.
fn ago_ns(age: Duration) -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(age).as_nanos() as i64
}

async fn read_manifest(store: &dyn Store, step: i64) -> Result<Manifest> {
    let path = join(&step_dir(step)?, MANIFEST);
    Manifest::decode(&read_all(store, &path).await?, &path)
}

/// Removes steps, each manifest first, in this order. `removed` hears of each.
///
/// The data of a step that may be referred to stays if a save refers to it by now: see
/// [`referred_now`].
pub async fn remove_steps(
    store: &dyn Store,
    victims: &[Known],
    removed: &mut dyn FnMut(i64),
) -> Result<()> {
    let mut doubtful = Vec::new();
    for victim in victims {
        retract(store, victim.step).await?;
        if victim.delta {
            doubtful.push(victim.step);
        } else {
            remove_data(store, victim.step).await?;
            removed(victim.step);
        }
    }
    if doubtful.is_empty() {
        return Ok(());
    }
    let needed = referred_now(store).await?;
    for step in doubtful {
        if needed.contains(&step) {
            tracing::info!(step, "a save refers to a step that was removed: its data stays");
        } else {
            remove_data(store, step).await?;
        }
        removed(step);
    }
    Ok(())
}

/// From now on the step is no checkpoint.
async fn retract(store: &dyn Store, step: i64) -> Result<()> {
    let folder = step_dir(step)?;
    store.delete(&join(&folder, MANIFEST)).await?;
    store.sync_dir(&folder).await
}

async fn remove_data(store: &dyn Store, step: i64) -> Result<()> {
    let folder = step_dir(step)?;
    let files = store.list(&folder).await?;
    remove_own(store, &folder, files.iter()).await?;
    forget(store, step).await
}

/// Steps that saves under way or committed steps refer to. A save marks them, checks that they are
/// there, puts its manifest and takes the marks away: so marks are looked at before manifests.
pub async fn referred_now(store: &dyn Store) -> Result<BTreeSet<i64>> {
    let mut needed = marked(store, is_old()).await?;
    for name in store.list_names("").await? {
        let Some(step) = parse_step_dir(&name) else { continue };
        match read_manifest(store, step).await {
            Ok(manifest) => needed.extend(manifest.refers_to),
            // Nobody can restore a damaged one.
            Err(Error::NotFound { .. } | Error::Corrupt { .. }) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(needed)
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

async fn remove_if_old(
    store: &dyn Store,
    path: &str,
    old: impl Fn(&&ObjectMeta) -> bool,
) -> Result<()> {
    match store.head(path).await {
        Ok(meta) if old(&&meta) => store.delete(path).await,
        Ok(_) | Err(Error::NotFound { .. }) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Removes old left-overs of killed saves: attempts that no manifest names in steps up to the
/// newest, probes and temporary files of the root, and meeting files. A step that others refer to
/// keeps all its attempts: the chunks may be in one that was replaced.
/// With `delta`, marks of references, too.
pub async fn sweep(
    store: &dyn Store,
    newest: i64,
    referred: &BTreeSet<i64>,
    delta: bool,
) -> Result<()> {
    let old = is_old();
    for name in store.list_names("").await? {
        if name.starts_with(PROBE_PREFIX) || is_temporary(&name) {
            remove_if_old(store, &name, old).await?;
        }
        let Some(step) = parse_step_dir(&name).filter(|&s| s <= newest) else { continue };
        if referred.contains(&step) {
            continue;
        }
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
    if delta {
        sweep_marks(store, old).await?;
    }
    abort_uploads(store, ago_ns(UPLOAD_AGE_MIN)).await
}

/// Aborts uploads of files of ours that killed saves began and nobody will finish.
async fn abort_uploads(store: &dyn Store, before_ns: i64) -> Result<()> {
    let abandoned =
        |path: &str, begun_ns: i64| begun_ns != 0 && begun_ns < before_ns && is_own(path);
    let count = store.abort_unfinished(&abandoned).await?;
    if count > 0 {
        tracing::info!(count, root = store.uri(), "uploads that nobody finished were aborted");
    }
    Ok(())
}

/// Whether a save writes files of this path.
fn is_own(path: &str) -> bool {
    let mut parts = path.splitn(3, '/');
    let [Some(step), Some(attempt), Some(file)] = [parts.next(), parts.next(), parts.next()] else {
        return false;
    };
    parse_step_dir(step).is_some() && is_attempt_dir(attempt) && is_attempt_file(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_save_are_told_from_others() {
        let own = "step-00000002/a-0123456789abcdef/rank-00000.safetensors";
        assert!(is_own(own) && is_own("step-00000002/a-0123456789abcdef/tensors.arrow"));
        for other in
            ["", "x", "step-00000002/manifest.json", &own[1..], &own[..own.len() - 1], "a/b/c"]
        {
            assert!(!is_own(other), "{other}");
        }
        assert!(!is_own("step-00000002/photos/rank-00000.safetensors"));
    }
}
