//! Which steps stay: a pure function of what is known of the steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::error::{Error, Result};

/// Which committed steps to keep. A step stays if any rule wants it; without `last` all stay.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Keep {
    /// The newest this many; `None` keeps all.
    pub last: Option<u32>,
    /// Besides, every step that this divides.
    pub every: Option<i64>,
    /// Besides, the best by a metric.
    pub best: Option<Best>,
    /// Besides, every step committed at most this long ago.
    pub within: Option<Duration>,
    /// Besides, steps at least this far apart in time: from the oldest on, a step stays if it was
    /// committed at least this long after the one before it that stays by this rule.
    pub interval: Option<Duration>,
}

/// The best steps by a metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Best {
    /// How many.
    pub count: u32,
    /// Name of the metric, as given to the saves.
    pub metric: String,
    /// Whether higher is better.
    pub highest: bool,
}

/// What retention knows of a committed step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Known {
    /// The step.
    pub step: i64,
    /// Folder of the save call.
    pub attempt: String,
    /// Whether its manifest is in order; the other fields are empty if not.
    pub sealed: bool,
    /// Whether its files have the sizes that the manifest names.
    pub whole: bool,
    /// Whether it was committed in this root or adopted, as opposed to copied here by someone.
    pub own: bool,
    /// When it was committed, nanoseconds since the Unix epoch.
    pub committed_ns: Option<i64>,
    /// Finite values of its metrics.
    pub metrics: BTreeMap<String, f64>,
    /// Steps that hold chunks of it.
    pub refers_to: Vec<i64>,
    /// Whether later steps may refer to it, one that is being saved just now included.
    pub delta: bool,
}

impl Known {
    /// Whether it can be restored as far as can be told without reading its data.
    pub fn good(&self) -> bool {
        self.sealed && self.whole
    }
}

impl Keep {
    /// Refuses rules that keep nothing or name no metric.
    pub fn check(&self) -> Result<()> {
        if self.last == Some(0) {
            return Err(Error::invalid("keep.last", "at least 1", 0));
        }
        if let Some(every) = self.every.filter(|&k| k <= 0) {
            return Err(Error::invalid("keep.every", "at least 1", every));
        }
        match &self.best {
            Some(best) if best.count == 0 => Err(Error::invalid("keep.best", "at least 1", 0)),
            Some(best) if best.metric.is_empty() => {
                Err(Error::invalid("keep.metric", "the name of a metric", "an empty text"))
            }
            _ => Ok(()),
        }
    }

    /// Of ascending `steps`, those to remove at the time `now_ns`, in an order in which any prefix
    /// may be removed: a step before those it refers to. `fresh`, committed just now, stays, and
    /// so do the newest good one, what a step that stays refers to, and what is not our own.
    pub fn victims(&self, steps: &[Known], fresh: Option<i64>, now_ns: i64) -> Vec<i64> {
        let Some(last) = self.last else { return Vec::new() };
        let counted: Vec<&Known> = steps.iter().filter(|k| k.own && k.good()).collect();
        let newest = &counted[counted.len().saturating_sub(last as usize)..];
        let Some(oldest) = newest.first().map(|k| k.step) else { return Vec::new() };
        let mut kept: BTreeSet<i64> = newest.iter().map(|k| k.step).chain(fresh).collect();
        kept.extend(self.wanted(&counted, now_ns));
        // Of the damaged ones, only those that their manifest proves to be ours, and no new ones:
        // somebody may want to look at them.
        let removable = |k: &&Known| k.own && k.sealed && (k.good() || k.step < oldest);
        let mut victims: BTreeSet<i64> = steps
            .iter()
            .filter(removable)
            .map(|k| k.step)
            .filter(|step| !kept.contains(step))
            .collect();
        spare_referred(steps, &mut victims);
        referrers_first(steps, victims)
    }

    /// Steps that rules other than `last` want.
    fn wanted(&self, counted: &[&Known], now_ns: i64) -> BTreeSet<i64> {
        let mut wanted = BTreeSet::new();
        if let Some(every) = self.every {
            wanted.extend(counted.iter().map(|k| k.step).filter(|step| step % every == 0));
        }
        if let Some(best) = &self.best {
            wanted.extend(best.of(counted));
        }
        if let Some(within) = self.within {
            let from_ns = now_ns.saturating_sub(nanoseconds(within));
            let recent = |k: &&&Known| k.committed_ns.is_some_and(|at| at >= from_ns);
            wanted.extend(counted.iter().filter(recent).map(|k| k.step));
        }
        if let Some(interval) = self.interval {
            wanted.extend(apart(counted, nanoseconds(interval)));
        }
        wanted
    }
}

impl Best {
    /// The best of these, the newer of equals first.
    fn of(&self, steps: &[&Known]) -> Vec<i64> {
        let value = |k: &&Known| k.metrics.get(&self.metric).map(|&v| (v, k.step));
        let mut found: Vec<(f64, i64)> = steps.iter().filter_map(value).collect();
        found.sort_by(|a, b| {
            let order = a.0.total_cmp(&b.0);
            let order = if self.highest { order.reverse() } else { order };
            order.then(b.1.cmp(&a.1))
        });
        found.into_iter().take(self.count as usize).map(|(_, step)| step).collect()
    }
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// Steps at least `interval_ns` apart in time, from the oldest on.
fn apart(steps: &[&Known], interval_ns: i64) -> Vec<i64> {
    let mut times: Vec<(i64, i64)> =
        steps.iter().filter_map(|k| k.committed_ns.map(|at| (at, k.step))).collect();
    times.sort_unstable();
    let mut found = Vec::new();
    let mut before: Option<i64> = None;
    for (at, step) in times {
        if before.is_none_or(|b| at.saturating_sub(b) >= interval_ns) {
            before = Some(at);
            found.push(step);
        }
    }
    found
}

/// Takes out of `victims` what steps that stay refer to, and what those refer to.
fn spare_referred(steps: &[Known], victims: &mut BTreeSet<i64>) {
    let refers: BTreeMap<i64, &Vec<i64>> = steps.iter().map(|k| (k.step, &k.refers_to)).collect();
    let mut stay: Vec<i64> =
        steps.iter().map(|k| k.step).filter(|step| !victims.contains(step)).collect();
    // Each step is taken out at most once, so this ends.
    while let Some(step) = stay.pop() {
        for needed in refers.get(&step).into_iter().copied().flatten() {
            if victims.remove(needed) {
                stay.push(*needed);
            }
        }
    }
}

/// Victims, each before those it refers to. Those in a circle, which no save makes, come last,
/// newest first.
fn referrers_first(steps: &[Known], mut victims: BTreeSet<i64>) -> Vec<i64> {
    let refers: BTreeMap<i64, &Vec<i64>> = steps.iter().map(|k| (k.step, &k.refers_to)).collect();
    let mut order = Vec::with_capacity(victims.len());
    while !victims.is_empty() {
        let needed: BTreeSet<i64> = victims
            .iter()
            .flat_map(|v| refers.get(v).copied().into_iter().flatten().filter(move |n| *n != v))
            .copied()
            .collect();
        let free: Vec<i64> = victims.iter().copied().filter(|v| !needed.contains(v)).collect();
        if free.is_empty() {
            order.extend(victims.iter().rev());
            break;
        }
        victims.retain(|v| needed.contains(v));
        order.extend(free);
    }
    order
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
