//! Restores that began and never ended, so that a crash loop on one step does not go on for ever.
//!
//! Before rank 0 loads a step it leaves a small file in `.restoring/`, and removes it when the load
//! ended, well or with an error. What a killed process left counts against the step. A process that
//! still lives is no crash: several jobs may read one checkpoint. One on another machine cannot be
//! looked at, so its file counts only when it is too old to be a load in work.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::checkpoint::io::read_all;
use crate::checkpoint::layout::join;
use crate::checkpoint::meet::draw;
use crate::error::{Error, Result};
use crate::storage::Store;

/// Where the marks lie, below the checkpoint root.
const FOLDER: &str = ".restoring";
/// Marks that are looked at; whoever left more has a problem that more marks do not explain.
const MARKS_MAX: usize = 256;
/// From this age on a mark of another machine counts as a crash.
const FOREIGN_AGE_MIN: Duration = Duration::from_mins(10);

/// Who loads what since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Mark {
    step: i64,
    /// Boot and process namespace: process ids of another one say nothing here.
    host: String,
    pid: u32,
    /// Start of the process in clock ticks since boot, since ids are used again.
    started_ticks: u64,
    unix_s: u64,
}

impl Mark {
    fn of(step: i64) -> Self {
        let pid = std::process::id();
        let started_ticks = started_ticks(pid).unwrap_or_default();
        Self { step, host: host(), pid, started_ticks, unix_s: now_s() }
    }

    fn is_crash(&self) -> bool {
        if self.host == host() {
            return started_ticks(self.pid) != Some(self.started_ticks);
        }
        now_s().saturating_sub(self.unix_s) >= FOREIGN_AGE_MIN.as_secs()
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn host() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), space.display())
}

/// Start of a running process; `None` if there is none of that id.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    let stat = stat.ok()?;
    // The second field is a name in parentheses that may hold anything; the start is field 22.
    let rest = stat.rsplit_once(')')?.1;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Leaves a mark and returns its name, to be given to [`end`]. `None` where nothing may be written.
pub async fn begin(store: &dyn Store, step: i64) -> Option<String> {
    let name = format!("{step}-{:016x}", draw());
    let text = serde_json::to_vec(&Mark::of(step)).ok()?;
    match store.put_new(&join(FOLDER, &name), Bytes::from(text)).await {
        Ok(_) => Some(name),
        Err(error) => {
            tracing::debug!(%error, "a crash of this restore will not be counted");
            None
        }
    }
}

/// Takes the mark away. After a restore that worked, `forget` takes those of earlier crashes, too.
pub async fn end(store: &dyn Store, mark: &str, forget: Option<i64>) -> Result<()> {
    store.delete(&join(FOLDER, mark)).await?;
    if let Some(step) = forget {
        for (name, mark) in marks(store).await? {
            if mark.step == step && mark.is_crash() {
                store.delete(&join(FOLDER, &name)).await?;
            }
        }
    }
    store.remove_dir(FOLDER).await
}

/// How many restores of each step were killed: (step, crashes).
pub async fn crashes(store: &dyn Store) -> Result<Vec<(i64, u32)>> {
    let mut counts = std::collections::BTreeMap::new();
    for (_, mark) in marks(store).await? {
        if mark.is_crash() {
            *counts.entry(mark.step).or_insert(0) += 1;
        }
    }
    Ok(counts.into_iter().collect())
}

/// Marks by name. One that vanishes meanwhile or does not parse is none.
async fn marks(store: &dyn Store) -> Result<Vec<(String, Mark)>> {
    let names = match store.list_names(FOLDER).await {
        Err(Error::NotFound { .. }) => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = Vec::new();
    for name in names.into_iter().take(MARKS_MAX) {
        let Ok(text) = read_all(store, &join(FOLDER, &name)).await else { continue };
        if let Ok(mark) = serde_json::from_slice(&text) {
            found.push((name, mark));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::block_on;
    use crate::storage::{StorageOptions, open_store};

    #[test]
    fn only_what_died_counts() {
        let store = open_store("memory://attempts/root", &StorageOptions::default()).unwrap();
        let store = store.as_ref();
        block_on(async {
            assert!(crashes(store).await.unwrap().is_empty());
            let own = begin(store, 5).await.unwrap();
            assert!(crashes(store).await.unwrap().is_empty(), "this process lives");
            let old = now_s() - FOREIGN_AGE_MIN.as_secs();
            let cases = [
                (Mark { started_ticks: 1, ..Mark::of(5) }, true),
                (Mark { host: "elsewhere".into(), unix_s: old, ..Mark::of(5) }, true),
                (Mark { host: "elsewhere".into(), ..Mark::of(5) }, false),
                (Mark { pid: u32::MAX, ..Mark::of(7) }, true),
            ];
            for (i, (mark, crash)) in cases.iter().enumerate() {
                assert_eq!(mark.is_crash(), *crash, "{mark:?}");
                let text = Bytes::from(serde_json::to_vec(mark).unwrap());
                store.put_new(&join(FOLDER, &format!("m{i}")), text).await.unwrap();
            }
            store.put_new(&join(FOLDER, "noise"), Bytes::from_static(b"{")).await.unwrap();
            assert_eq!(crashes(store).await.unwrap(), [(5, 2), (7, 1)]);
            end(store, &own, Some(5)).await.unwrap();
            assert_eq!(crashes(store).await.unwrap(), [(7, 1)]);
        })
        .unwrap();
    }
}
