//! Joining streams: for each item of an anchor stream, which items of another stream go with it.
//!
//! Rules look items up by binary search, so a join is O(n log n). What happens where nothing goes
//! with an anchor is the caller's choice: an error, no sample, or an empty field.

use std::ops::Range;

use super::stream::{Stream, StreamItem};
use crate::error::{Error, Result};

/// Which items go with an anchor. All of the same recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum JoinRule {
    /// The item that the format itself assigns to the anchor (nuScenes: the channel's key frame).
    Assigned,
    /// The first item with the anchor's time.
    Exact,
    /// The item nearest in time, the earlier one of two; at most so far away.
    Nearest {
        /// Largest distance, inclusive.
        tolerance_ns: i64,
    },
    /// The last item at or before the anchor's time; at most so old.
    AtOrBefore {
        /// Largest age, inclusive.
        age_max_ns: i64,
    },
    /// Up to so many items strictly before the anchor's instant, without a break. The instant is
    /// the assigned item's time where the format assigns one, else the anchor's.
    Previous(
        /// Number of items.
        u32,
    ),
    /// The item with the anchor's position in its recording.
    RowPosition,
}

/// What to do about an anchor with which nothing goes. [`JoinRule::Previous`] never misses: the
/// first item of a recording has nothing before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// Fail and name it.
    Error,
    /// Leave the sample out.
    Skip,
    /// Leave the field empty.
    Mask,
}

/// One stream to join to the anchor.
#[derive(Debug, Clone, Copy)]
pub struct JoinField<'a> {
    /// The stream.
    pub stream: &'a Stream,
    /// Which items go with an anchor.
    pub rule: JoinRule,
    /// What to do about a miss.
    pub miss: Miss,
}

/// Result of a join.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// Positions in the anchor stream that became samples.
    pub anchors: Vec<u32>,
    /// Per field and sample: positions of the items in their stream, ascending; empty on a miss.
    pub matches: Vec<Vec<Range<u32>>>,
}

/// Joins `fields` to `anchor`.
pub fn join(anchor: &Stream, fields: &[JoinField<'_>]) -> Result<Joined> {
    let plans: Vec<_> = fields.iter().map(|field| Plan::new(anchor, field)).collect();
    let mut joined = Joined { anchors: Vec::new(), matches: vec![Vec::new(); fields.len()] };
    let mut row = Vec::with_capacity(fields.len());
    for at in 0..anchor.items().len() {
        row.clear();
        let mut keep = true;
        for plan in &plans {
            let span = plan.find(anchor, at);
            let missed = span.is_empty() && !matches!(plan.field.rule, JoinRule::Previous(_));
            if missed && plan.field.miss == Miss::Error {
                return Err(plan.missed(anchor, at));
            }
            keep &= !(missed && plan.field.miss == Miss::Skip);
            row.push(span.start as u32..span.end as u32);
        }
        if keep {
            joined.anchors.push(at as u32);
            joined.matches.iter_mut().zip(row.drain(..)).for_each(|(all, span)| all.push(span));
        }
    }
    Ok(joined)
}

/// A field with what its rule looks up.
struct Plan<'a> {
    field: &'a JoinField<'a>,
    /// Position of the item assigned to each anchor.
    assigned: Vec<Option<u32>>,
}

impl<'a> Plan<'a> {
    fn new(anchor: &Stream, field: &'a JoinField<'a>) -> Self {
        let mut assigned = Vec::new();
        if matches!(field.rule, JoinRule::Assigned | JoinRule::Previous(_)) {
            assigned.resize(anchor.items().len(), None);
            for (at, item) in field.stream.items().iter().enumerate() {
                let slot = item.assigned.and_then(|to| assigned.get_mut(to as usize));
                if let Some(slot @ None) = slot {
                    *slot = Some(at as u32);
                }
            }
        }
        Self { field, assigned }
    }

    fn find(&self, anchor: &Stream, at: usize) -> Range<usize> {
        let stream = self.field.stream;
        let item = &anchor.items()[at];
        let one = |found: Option<usize>| found.map_or(0..0, |found| found..found + 1);
        match self.field.rule {
            JoinRule::Assigned => one(self.assigned[at].map(|found| found as usize)),
            JoinRule::Exact => {
                let found = stream.at_or_after(item.recording, item.timestamp_ns);
                let hit = stream.get(item.recording, found);
                one(hit.filter(|hit| hit.timestamp_ns == item.timestamp_ns).map(|_| found))
            }
            JoinRule::Nearest { tolerance_ns } => one(nearest(stream, item, tolerance_ns)),
            JoinRule::AtOrBefore { age_max_ns } => {
                let found = stream.after(item.recording, item.timestamp_ns).checked_sub(1);
                one(found.filter(|found| {
                    let hit = stream.get(item.recording, *found);
                    hit.is_some_and(|hit| distance_ns(hit, item) <= limit(age_max_ns))
                }))
            }
            JoinRule::Previous(count) => previous(stream, item, self.assigned[at], count),
            JoinRule::RowPosition => {
                let row = at - anchor.recording_start(item.recording);
                let found = stream.recording_start(item.recording) + row;
                one(stream.get(item.recording, found).map(|_| found))
            }
        }
    }

    fn missed(&self, anchor: &Stream, at: usize) -> Error {
        let item = &anchor.items()[at];
        let Stream { name, .. } = self.field.stream;
        Error::NotFound {
            what: format!(
                "item of stream {name} for {} item {at} of recording {} at {} ns ({:?})",
                anchor.name, item.recording, item.timestamp_ns, self.field.rule
            ),
            advice: "widen the rule, or skip or mask such samples".into(),
        }
    }
}

fn distance_ns(a: &StreamItem, b: &StreamItem) -> u64 {
    a.timestamp_ns.abs_diff(b.timestamp_ns)
}

/// A negative limit lets nothing through but is no reason to wrap around.
fn limit(ns: i64) -> u64 {
    u64::try_from(ns).unwrap_or(0)
}

fn nearest(stream: &Stream, item: &StreamItem, tolerance_ns: i64) -> Option<usize> {
    let later = stream.at_or_after(item.recording, item.timestamp_ns);
    let candidates = [later.checked_sub(1), Some(later)];
    let near = candidates.into_iter().flatten().filter_map(|at| {
        let distance = distance_ns(stream.get(item.recording, at)?, item);
        (distance <= limit(tolerance_ns)).then_some((distance, at))
    });
    // Ties go to the earlier item; of several with its time, to the first.
    let (_, at) = near.min()?;
    let hit = &stream.items()[at];
    Some(stream.at_or_after(hit.recording, hit.timestamp_ns))
}

/// Up to `count` items before the anchor's instant, as long as the chain holds.
fn previous(stream: &Stream, item: &StreamItem, assigned: Option<u32>, count: u32) -> Range<usize> {
    let items = stream.items();
    let assigned = assigned.map(|at| &items[at as usize]);
    let instant_ns = assigned.map_or(item.timestamp_ns, |own| own.timestamp_ns);
    let end = stream.at_or_after(item.recording, instant_ns);
    let last = end.checked_sub(1).and_then(|at| stream.get(item.recording, at));
    let Some(chain) = assigned.or(last).map(|own| own.chain) else { return end..end };
    let earliest = end.saturating_sub(count as usize);
    let unbroken =
        |at: &usize| stream.get(item.recording, *at).is_some_and(|found| found.chain == chain);
    let start = (earliest..end).rev().take_while(unbroken).last();
    start.unwrap_or(end)..end
}

#[cfg(test)]
mod tests;
