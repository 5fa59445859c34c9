//! Rank 0 compares what the ranks say before anything is published.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use super::messages::{Details, Failure, Part, Run};
use super::union::unite;
use crate::checkpoint::flat::prove;
use crate::checkpoint::layout::Chunk;
use crate::checkpoint::rects::Rect;

/// Why the parts cannot be published as they are.
#[derive(Debug)]
pub enum Doubt {
    /// Known already.
    Certain(Failure),
    /// These ranks differ; their details will say where.
    Ask(Vec<u32>),
}

/// Checks that all ranks saved the same step, hold the same replicas and state, and that their
/// chunks cover every tensor exactly once. Parts are in rank order.
pub fn judge(parts: &[Part]) -> Result<(), Doubt> {
    same_call(parts).and_then(|()| sound_stages(parts)).map_err(Doubt::Certain)?;
    let mut ask: Vec<u32> = differing_groups(parts).into_iter().flatten().collect();
    if ask.is_empty() {
        let other = differing_states(parts).first().copied();
        ask.extend(other.map(|rank| [first_of_stage(parts, rank), rank]).into_iter().flatten());
    }
    if !ask.is_empty() {
        ask.sort_unstable();
        ask.dedup();
        return Err(Doubt::Ask(ask));
    }
    covered(parts).map_err(Doubt::Certain)
}

fn same_call(parts: &[Part]) -> Result<(), Failure> {
    let Some(first) = parts.first() else { return Ok(()) };
    for (rank, part) in parts.iter().enumerate() {
        let (a, b) = (&first.head, &part.head);
        if (a.step, a.overwrite) != (b.step, b.overwrite) {
            return Err(Failure::Invalid {
                what: "save on all ranks".into(),
                expected: format!("step {} overwrite {} as on rank 0", a.step, a.overwrite),
                found: format!("step {} overwrite {} on rank {rank}", b.step, b.overwrite),
            });
        }
    }
    Ok(())
}

/// For each list of replicated tensors that is not equal on all its ranks: two that differ.
fn differing_groups(parts: &[Part]) -> Vec<[u32; 2]> {
    let mut lists: BTreeMap<&[Run], BTreeMap<u32, u64>> = BTreeMap::new();
    for (rank, part) in parts.iter().enumerate() {
        for (ranks, hash) in &part.head.groups {
            lists.entry(ranks).or_default().insert(rank as u32, *hash);
        }
    }
    let mut differing = Vec::new();
    for (runs, hashes) in lists {
        // A list may say anything; only these ranks are here.
        let mut ranks = runs.iter().flat_map(|run| run.ranks());
        let mut ranks = ranks.by_ref().take_while(|&r| (r as usize) < parts.len());
        let Some(first) = ranks.next() else { continue };
        let odd = ranks.find(|r| hashes.get(r) != hashes.get(&first));
        differing.extend(odd.map(|odd| [first, odd]));
    }
    differing
}

/// Ranks whose state is not that of the first rank of their stage.
fn differing_states(parts: &[Part]) -> Vec<u32> {
    let hash = |rank: u32| parts.get(rank as usize).map(|p| p.head.state_hash);
    let ranks = 0..parts.len() as u32;
    ranks.filter(|&rank| hash(rank) != hash(first_of_stage(parts, rank))).collect()
}

/// Without stages all ranks are one.
fn first_of_stage(parts: &[Part], rank: u32) -> u32 {
    parts.get(rank as usize).and_then(|p| p.head.stage).unwrap_or(0)
}

/// Every rank names a stage or none does, and the first rank of a stage names itself.
fn sound_stages(parts: &[Part]) -> Result<(), Failure> {
    let stage = |rank: u32| parts.get(rank as usize).and_then(|p| p.head.stage);
    for (rank, part) in parts.iter().enumerate() {
        let named = part.head.stage;
        let sound = named.map_or(stage(0).is_none(), |first| stage(first) == Some(first));
        if !sound {
            return Err(Failure::Invalid {
                what: "stage_ranks".into(),
                expected: "on every rank, and the same ranks on all ranks of a stage".into(),
                found: match named {
                    None => format!("none on rank {rank}"),
                    Some(first) => format!(
                        "rank {rank} in a stage that begins with rank {first}, which is not in it"
                    ),
                },
            });
        }
    }
    Ok(())
}

/// The state of all stages together, if there are any.
pub fn united(parts: &[Part]) -> Result<Option<String>, Failure> {
    let stages: Vec<(u32, &str)> = (0_u32..)
        .zip(parts)
        .filter_map(|(rank, part)| Some((rank, part.head.stage_state.as_deref()?)))
        .collect();
    if stages.is_empty() { Ok(None) } else { unite(&stages).map(Some) }
}

fn covered(parts: &[Part]) -> Result<(), Failure> {
    // In the order of first sight, so that the same tensor is named each time.
    let mut places: HashMap<&str, usize> = HashMap::new();
    let mut tensors: Vec<(&str, Vec<(usize, &Chunk)>)> = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        for chunk in &part.chunks {
            let place = *places.entry(&chunk.path).or_insert_with(|| {
                tensors.push((&chunk.path, Vec::new()));
                tensors.len() - 1
            });
            tensors[place].1.push((rank, chunk));
        }
    }
    for (path, chunks) in tensors {
        let (first_rank, first) = chunks[0];
        let odd = chunks.iter().find(|(_, c)| (&c.shape, &c.dtype) != (&first.shape, &first.dtype));
        if let Some((rank, chunk)) = odd {
            return Err(Failure::Invalid {
                what: format!("tensor {path}"),
                expected: format!("{} {:?} as on rank {first_rank}", first.dtype, first.shape),
                found: format!("{} {:?} on rank {rank}", chunk.dtype, chunk.shape),
            });
        }
        let rects: Vec<Rect> = chunks.iter().map(|(_, c)| c.rect()).collect();
        if let Err(fault) = prove(&first.shape, &Rect::whole(&first.shape), &rects) {
            let list =
                |rects: &[Rect]| rects.iter().map(Rect::describe).collect::<Vec<_>>().join(" ");
            let found = if fault.twice.is_empty() {
                format!("nobody wrote {}", list(&fault.missing))
            } else {
                format!("more than one rank wrote {}", list(&fault.twice))
            };
            let expected = "each element written by exactly one rank".into();
            return Err(Failure::Invalid { what: format!("tensor {path}"), expected, found });
        }
    }
    Ok(())
}

/// Names the first difference between ranks that [`judge`] asked about.
pub fn difference(parts: &[Part], details: &BTreeMap<u32, Details>) -> Failure {
    for [a, b] in differing_groups(parts) {
        if let (Some(left), Some(right)) = (details.get(&a), details.get(&b)) {
            return group_difference(a, left, b, right);
        }
    }
    let differing = differing_states(parts);
    let odd = differing.first().and_then(|r| details.get(r));
    let first = differing.first().map_or(0, |&rank| first_of_stage(parts, rank));
    let place = match (details.get(&first), odd) {
        (Some(a), Some(b)) => state_difference(&a.state_json, &b.state_json),
        _ => None,
    };
    let key = place.unwrap_or_else(|| "(only the spelling of a value differs)".into());
    Failure::Invalid {
        what: format!("state at key {key}"),
        expected: "equal values on all ranks; wrap values that differ on purpose in PerRank".into(),
        found: format!("rank {first} differs from ranks {differing:?}"),
    }
}

fn group_difference(a: u32, left: &Details, b: u32, right: &Details) -> Failure {
    let lines =
        |d: &Details| -> BTreeMap<Vec<u32>, Vec<String>> { d.groups.iter().cloned().collect() };
    let (left, right) = (lines(left), lines(right));
    let only = |these: &BTreeMap<Vec<u32>, Vec<String>>,
                those: &BTreeMap<Vec<u32>, Vec<String>>| {
        these.iter().find_map(|(ranks, lines)| {
            if !(ranks.contains(&a) && ranks.contains(&b)) {
                return None;
            }
            let other = those.get(ranks).map_or(&[][..], Vec::as_slice);
            lines.iter().find(|line| !other.contains(line)).cloned()
        })
    };
    let none = || "nothing more".to_string();
    Failure::Invalid {
        what: "replicated tensors".into(),
        expected: format!("the same list on ranks {a} and {b}"),
        found: format!(
            "only on rank {a}: {}; only on rank {b}: {}",
            only(&left, &right).unwrap_or_else(none),
            only(&right, &left).unwrap_or_else(none)
        ),
    }
}

/// Path of the first value that two JSON texts do not share.
fn state_difference(a: &str, b: &str) -> Option<String> {
    let a: Value = serde_json::from_str(a).ok()?;
    let b: Value = serde_json::from_str(b).ok()?;
    let keys = value_difference(&a, &b)?;
    let shown: Vec<_> = keys.iter().rev().filter_map(|key| user_key(key)).collect();
    Some(shown.join("."))
}

/// A key as the user wrote it: in typed JSON a tag is `~` and a letter, an int key `~` and its
/// digits, and a string key that starts with `~` has one more.
pub fn user_key(key: &str) -> Option<&str> {
    match key.strip_prefix('~') {
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_alphabetic()) => None,
        Some(rest) => Some(rest),
        None => Some(key),
    }
}

/// Keys from the innermost to the outermost; recursion ends where serde_json's parser did (128).
fn value_difference(a: &Value, b: &Value) -> Option<Vec<String>> {
    let (key, mut inner) = match (a, b) {
        (Value::Object(x), Value::Object(y)) => x
            .iter()
            .map(|(k, v)| (k, Some(v), y.get(k)))
            .chain(y.iter().filter(|(k, _)| !x.contains_key(*k)).map(|(k, v)| (k, None, Some(v))))
            .find_map(|(k, v, w)| Some((k.clone(), maybe_difference(v, w)?)))?,
        (Value::Array(x), Value::Array(y)) => (0..x.len().max(y.len()))
            .find_map(|i| Some((i.to_string(), maybe_difference(x.get(i), y.get(i))?)))?,
        _ => return (a != b).then(Vec::new),
    };
    inner.push(key);
    Some(inner)
}

fn maybe_difference(a: Option<&Value>, b: Option<&Value>) -> Option<Vec<String>> {
    match (a, b) {
        (Some(a), Some(b)) => value_difference(a, b),
        (None, None) => None,
        _ => Some(Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_different_key_is_named() {
        let differ = |a, b| state_difference(a, b);
        assert_eq!(differ(r#"{"a":{"b":[1,2]}}"#, r#"{"a":{"b":[1,3]}}"#).unwrap(), "a.b.1");
        assert_eq!(differ(r#"{"a":1}"#, r#"{"a":1,"z":0}"#).unwrap(), "z");
        assert_eq!(differ(r#"{"a":[1]}"#, r#"{"a":[1,2]}"#).unwrap(), "a.1");
        assert_eq!(differ(r#"{"~5":{"~tuple":[1]}}"#, r#"{"~5":{"~tuple":[2]}}"#).unwrap(), "5.0");
        assert_eq!(differ(r#"{"a":1}"#, r#"{"a":1}"#), None);
    }
}
