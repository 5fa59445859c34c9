//! What a fault script means: which operation meets which fault.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};

/// Operations of a store, as scripts and logs spell them.
pub const OPERATIONS: [&str; 14] = [
    "head",
    "open",
    "read",
    "create",
    "write",
    "finish",
    "abort",
    "put_new",
    "replace",
    "list",
    "list_names",
    "delete",
    "remove_dir",
    "sync_dir",
];

/// Longest `delay`: a test that waits longer has hung.
const DELAY_MAX: Duration = Duration::from_mins(10);

/// What happens at an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// SIGKILL to this process before the operation.
    Kill,
    /// SIGKILL to this process after the operation.
    KillAfter,
    /// Half of the data is written, then SIGKILL.
    Tear,
    /// EIO instead of the operation.
    Eio,
    /// No space instead of the operation.
    NoSpace,
    /// A timeout instead of the operation.
    Timeout,
    /// [`Error::Injected`] instead of the operation.
    Fail,
    /// [`Error::Injected`] instead of this and all later operations.
    Halt,
    /// The operation starts later.
    Delay(Duration),
    /// Half of the data is written; a read is cut short.
    Truncate,
    /// One bit of the data is flipped.
    Flip,
    /// The operation is done, its answer is a timeout.
    Lost,
}

/// Which operations a rule is about.
#[derive(Debug, Clone, PartialEq)]
enum Place {
    Number(u64),
    Operation { op: Option<&'static str>, text: String, nth: Option<u64> },
    Chance { probability: f64, seed: u64 },
}

#[derive(Debug)]
struct Rule {
    action: Action,
    place: Place,
    matches: AtomicU64,
}

/// A parsed script.
#[derive(Debug, Default)]
pub struct FaultScript {
    rules: Vec<Rule>,
    rank: Option<String>,
    uri: Option<String>,
}

impl FaultScript {
    /// No faults: operations are counted only.
    pub fn none() -> Self {
        Self::default()
    }

    /// Reads a script; the grammar is in the module's documentation.
    pub fn parse(text: &str) -> Result<Self> {
        let mut script = Self::none();
        for clause in text.split(';').map(str::trim).filter(|clause| !clause.is_empty()) {
            if let Some(rank) = clause.strip_prefix("rank=") {
                script.rank = Some(rank.to_string());
            } else if let Some(uri) = clause.strip_prefix("uri=") {
                script.uri = Some(uri.to_string());
            } else {
                script.rules.push(rule(clause)?);
            }
        }
        Ok(script)
    }

    /// The script as the process of `rank` should follow it: without rules if they name another.
    pub fn for_rank(mut self, rank: Option<&str>) -> Self {
        if self.rank.as_deref().is_some_and(|wanted| Some(wanted) != rank) {
            self.rules.clear();
        }
        self
    }

    /// Whether stores of this URI are meant.
    pub fn wraps(&self, uri: &str) -> bool {
        self.uri.as_deref().is_none_or(|text| uri.contains(text))
    }

    /// What happens at operation `number`. Counts the operation for every rule.
    pub fn decide(&self, number: u64, op: &str, path: &str) -> Option<Action> {
        let mut chosen = None;
        for rule in &self.rules {
            if rule.hit(number, op, path) && chosen.is_none() {
                chosen = Some(rule.action);
            }
        }
        chosen
    }
}

impl Rule {
    fn hit(&self, number: u64, op: &str, path: &str) -> bool {
        match &self.place {
            Place::Number(n) => *n == number,
            Place::Chance { probability, seed } => unit(*seed, number) < *probability,
            Place::Operation { op: wanted, text, nth } => {
                if wanted.is_some_and(|wanted| wanted != op) || !path.contains(text.as_str()) {
                    return false;
                }
                let count = self.matches.fetch_add(1, Ordering::Relaxed) + 1;
                nth.is_none_or(|nth| nth == count)
            }
        }
    }
}

/// A number in [0, 1) from seed and operation, by SplitMix64: the same faults for the same seed.
fn unit(seed: u64, number: u64) -> f64 {
    let mut z = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
}

fn rule(clause: &str) -> Result<Rule> {
    let refused = || {
        let expected =
            "clauses like kill@17, eio@write:3, enospc@put_new:manifest.json, flip@~0.01:7";
        Error::invalid("fault script", expected, clause)
    };
    let (action, place) = clause.split_once('@').ok_or_else(refused)?;
    let action = self::action(action).ok_or_else(refused)?;
    let place = self::place(place).ok_or_else(refused)?;
    Ok(Rule { action, place, matches: AtomicU64::new(0) })
}

fn action(text: &str) -> Option<Action> {
    Some(match text {
        "kill" => Action::Kill,
        "kill-after" => Action::KillAfter,
        "tear" => Action::Tear,
        "eio" => Action::Eio,
        "enospc" => Action::NoSpace,
        "timeout" => Action::Timeout,
        "fail" => Action::Fail,
        "halt" => Action::Halt,
        "truncate" => Action::Truncate,
        "flip" => Action::Flip,
        "lost" => Action::Lost,
        _ => {
            let millis = text.strip_prefix("delay=")?.strip_suffix("ms")?.parse().ok()?;
            Action::Delay(Duration::from_millis(millis).min(DELAY_MAX))
        }
    })
}

fn place(text: &str) -> Option<Place> {
    if let Some(chance) = text.strip_prefix('~') {
        let (probability, seed) = chance.split_once(':').unwrap_or((chance, "0"));
        let probability = probability.parse().ok().filter(|p| (0.0..=1.0).contains(p))?;
        return Some(Place::Chance { probability, seed: seed.parse().ok()? });
    }
    if let Ok(number) = text.parse() {
        return Some(Place::Number(number));
    }
    let (op, rest) = text.split_once(':').unwrap_or((text, ""));
    let op = match op {
        "any" => None,
        _ => Some(*OPERATIONS.iter().find(|known| **known == op)?),
    };
    // A number alone is a count; a path that is only digits needs the count behind it.
    let (text, nth) = match rest.rsplit_once(':') {
        Some((text, nth)) => (text, Some(nth.parse().ok()?)),
        None if rest.is_empty() => ("", None),
        None => rest.parse().map_or((rest, None), |nth| ("", Some(nth))),
    };
    Some(Place::Operation { op, text: text.to_string(), nth })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decided(script: &str, operations: &[(&str, &str)]) -> Vec<Option<Action>> {
        let script = FaultScript::parse(script).unwrap();
        let numbered = operations.iter().zip(1..);
        numbered.map(|((op, path), number)| script.decide(number, op, path)).collect()
    }

    #[test]
    fn places_select_operations() {
        let run = [("write", "a"), ("write", "b"), ("put_new", "s/manifest.json"), ("write", "b")];
        let some = |at: &[usize], action| -> Vec<Option<Action>> {
            (0..4).map(|i| at.contains(&i).then_some(action)).collect()
        };
        assert_eq!(decided("kill@2", &run), some(&[1], Action::Kill));
        assert_eq!(decided("eio@write", &run), some(&[0, 1, 3], Action::Eio));
        assert_eq!(decided("enospc@write:3", &run), some(&[3], Action::NoSpace));
        assert_eq!(decided("lost@put_new:manifest", &run), some(&[2], Action::Lost));
        assert_eq!(decided("flip@write:b:2", &run), some(&[3], Action::Flip));
        assert_eq!(decided("fail@any", &run), some(&[0, 1, 2, 3], Action::Fail));
        assert_eq!(decided("fail@~0", &run), some(&[], Action::Fail));
        assert_eq!(decided("fail@~1:5", &run), some(&[0, 1, 2, 3], Action::Fail));
        let delay = Action::Delay(Duration::from_millis(50));
        assert_eq!(decided("delay=50ms@4", &run), some(&[3], delay));
    }

    #[test]
    fn the_first_rule_wins_and_all_count() {
        let run = [("write", "a"), ("write", "a"), ("write", "a")];
        let expected = [Some(Action::Eio), Some(Action::Flip), None];
        assert_eq!(decided("eio@1; flip@write:2", &run), expected);
    }

    #[test]
    fn ranks_and_stores_are_selected() {
        let parse = |text| FaultScript::parse(text).unwrap();
        assert!(parse("rank=1;kill@1").for_rank(Some("0")).decide(1, "head", "").is_none());
        assert!(parse("rank=1;kill@1").for_rank(Some("1")).decide(1, "head", "").is_some());
        assert!(parse("kill@1").for_rank(None).decide(1, "head", "").is_some());
        assert!(parse("uri=ckpt;kill@1").wraps("/x/ckpt") && !parse("uri=ckpt").wraps("/x/data"));
    }

    #[test]
    fn chance_follows_its_seed() {
        let hits = |seed| (0..10_000).filter(|&n| unit(seed, n) < 0.1).collect::<Vec<u64>>();
        assert_eq!(hits(7), hits(7));
        assert_ne!(hits(7), hits(8));
        assert!((800..1200).contains(&hits(7).len()));
    }

    #[test]
    fn nonsense_is_refused_with_an_example() {
        for bad in
            ["kill", "kill@", "boom@1", "kill@nowhere", "delay=5@1", "fail@~2", "eio@write:a:b"]
        {
            let text = FaultScript::parse(bad).unwrap_err().to_string();
            assert!(text.contains("kill@17") && text.contains(bad), "{text}");
        }
    }
}
