//! Which steps stay. Runs on rank 0 after a commit whose caller knows already, and deletes only
//! what a save wrote here or was adopted.
//!
//! | file | what it does |
//! |---|---|
//! | `policy` | the rules, as a pure function of what is known of the steps |
//! | `known` | finds that out, reading each manifest once |
//! | `adopt` | whose a step is, and making a copied one ours |
//! | `remove` | deletes a step, manifest first, and sweeps what killed saves left |
//! | `marks` | steps that saves under way refer to |

mod adopt;
mod known;
mod marks;
mod policy;
mod remove;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use super::layout::{MANIFEST, Manifest, join, parse_step_dir, step_dir};
use crate::error::{Error, Result};
use crate::storage::Store;

pub use adopt::{Adopted, adopt, root_id};
pub use known::{Book, known_steps};
pub use marks::referring_mark;
pub use policy::{Best, Keep, Known};
pub use remove::remove_steps;

/// A commit that retention has not looked at yet.
#[derive(Debug)]
struct Due {
    step: i64,
    replaced: Option<Manifest>,
}

/// Retention of one checkpoint root.
#[derive(Debug)]
pub struct Retention {
    keep: Keep,
    root: String,
    book: Book,
    swept: AtomicBool,
    state: Mutex<State>,
    settled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    due: Vec<Due>,
    running: bool,
}

impl Retention {
    /// Keeps the steps of `store` that `keep` wants.
    pub fn new(store: &dyn Store, keep: Keep) -> Result<Self> {
        keep.check()?;
        Ok(Self {
            keep,
            root: root_id(store),
            book: Book::default(),
            swept: AtomicBool::new(false),
            state: Mutex::default(),
            settled: Condvar::new(),
        })
    }

    /// What manifests of this root say in `root`.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Tells of a commit, and of the manifest it replaced. Nothing is deleted yet.
    pub fn note(&self, step: i64, replaced: Option<Manifest>) {
        self.state.lock().due.push(Due { step, replaced });
    }

    /// Waits until what was told of has been looked at, so that a list of steps is the one that the
    /// rules say; `false` at the deadline.
    pub fn wait_settled(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while state.running || !state.due.is_empty() {
            if self.settled.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Removes what the commits told of since have made superfluous.
    pub async fn run(&self, store: &dyn Store) -> Result<()> {
        let due = {
            let mut state = self.state.lock();
            state.running = true;
            std::mem::take(&mut state.due)
        };
        let result = self.prune(store, due).await;
        self.state.lock().running = false;
        self.settled.notify_all();
        result
    }

    async fn prune(&self, store: &dyn Store, due: Vec<Due>) -> Result<()> {
        let Some(fresh) = due.last().map(|d| d.step) else { return Ok(()) };
        let first = !self.swept.swap(true, Ordering::Relaxed);
        let replaced: Vec<&Manifest> = due.iter().filter_map(|d| d.replaced.as_ref()).collect();
        if self.keep.last.is_none() && !first && replaced.is_empty() {
            return Ok(());
        }
        let steps = known_steps(store, &self.book, &self.root).await?;
        let victims = self.keep.victims(&steps, Some(fresh), now_ns());
        remove_steps(store, &named(&steps, &victims), &mut |_| {}).await?;
        warn_of_foreign(store, &steps);
        let stays = steps.iter().filter(|k| !victims.contains(&k.step));
        let mut referred: BTreeSet<i64> = stays.flat_map(|k| &k.refers_to).copied().collect();
        let delta = steps.iter().any(|k| k.delta);
        if replaced.iter().any(|old| old.delta) || (first && delta) {
            referred.extend(remove::referred_now(store).await?);
        }
        for old in replaced.into_iter().filter(|old| !referred.contains(&old.step)) {
            remove::remove_replaced(store, old).await;
        }
        if first {
            remove::sweep(store, fresh, &referred, delta).await?;
        }
        Ok(())
    }
}

fn warn_of_foreign(store: &dyn Store, steps: &[Known]) {
    let foreign = steps.iter().filter(|k| k.sealed && !k.own).count();
    if foreign > 0 {
        tracing::info!(
            foreign,
            root = store.uri(),
            "steps written under another root are never pruned; `drivetrain ckpt adopt` makes \
             retention count them"
        );
    }
}

/// Nanoseconds since the Unix epoch.
pub fn now_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// What `keep` would remove from a root where nothing was committed just now, in the order of
/// removal.
pub async fn superfluous(store: &dyn Store, keep: &Keep) -> Result<Vec<Known>> {
    keep.check()?;
    let steps = known_steps(store, &Book::default(), &root_id(store)).await?;
    Ok(named(&steps, &keep.victims(&steps, None, now_ns())))
}

/// Those of `steps` that have these numbers, in the order of the numbers.
fn named(steps: &[Known], numbers: &[i64]) -> Vec<Known> {
    let find = |number: &i64| steps.iter().find(|k| k.step == *number).cloned();
    numbers.iter().filter_map(find).collect()
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
