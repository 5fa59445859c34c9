//! One state from the states of several stages.
//!
//! Ranks of a pipeline stage, or of a group of experts, hold a part of the model's names. Their
//! states are united key by key, and what two stages both have must be equal to the letter. Nothing
//! is parsed further than needed, so that each value stays the text it was given as.

use std::collections::{HashMap, HashSet};

use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::judge::user_key;
use super::messages::Failure;

/// Objects inside objects; the typed JSON of a state nests less.
const DEPTH_MAX: usize = 120;

/// Where two stages differ.
type Keys = Vec<String>;

/// The union of the states; each with the first rank of its stage, in that order.
pub fn unite(states: &[(u32, &str)]) -> Result<String, Failure> {
    let Some(((first, state), rest)) = states.split_first() else { return Ok("{}".into()) };
    let mut united = (*state).to_string();
    for (rank, state) in rest {
        united = merge(&united, state, &[], DEPTH_MAX).map_err(|keys| Failure::Invalid {
            what: format!("state at key {}", shown(&keys)),
            expected: "equal values on all stages that have it; give it another name on one of \
                       them, or wrap values that differ on purpose in PerRank"
                .into(),
            found: format!("rank {rank} differs from a stage before it (rank {first} or later)"),
        })?;
    }
    Ok(united)
}

fn shown(keys: &Keys) -> String {
    keys.iter().filter_map(|key| user_key(key)).collect::<Vec<_>>().join(".")
}

fn merge(a: &str, b: &str, path: &[&str], depth: usize) -> Result<String, Keys> {
    if a == b {
        return Ok(a.into());
    }
    let here = || path.iter().map(ToString::to_string).collect::<Keys>();
    if depth == 0 {
        return Err(here());
    }
    if let (Some(a), Some(b)) = (array(a), array(b)) {
        return merge_arrays(&a, &b, path, depth);
    }
    match (object(a), object(b)) {
        (Some(a), Some(b)) => merge_objects(&a, &b, path, depth),
        _ => Err(here()),
    }
}

fn merge_objects(
    a: &Items<'_>,
    b: &Items<'_>,
    path: &[&str],
    depth: usize,
) -> Result<String, Keys> {
    // A tagged value is one thing, except the containers among them.
    for items in [a, b] {
        if let [(tag, _)] = items.as_slice()
            && is_tag(tag)
            && !(tag == "~odict" && a.len() == 1 && b.len() == 1 && a[0].0 == b[0].0)
        {
            return Err(path.iter().map(ToString::to_string).collect());
        }
    }
    let theirs: HashMap<&str, &RawValue> = b.iter().map(|(k, v)| (k.as_str(), *v)).collect();
    let mut parts = Vec::with_capacity(a.len() + b.len());
    for (key, value) in a {
        let merged = match theirs.get(key.as_str()) {
            None => value.get().to_string(),
            Some(other) => {
                let inner = [path, &[key.as_str()]].concat();
                merge(value.get(), other.get(), &inner, depth - 1)?
            }
        };
        parts.push((key, merged));
    }
    let mine: HashSet<&str> = a.iter().map(|(k, _)| k.as_str()).collect();
    let new = b.iter().filter(|(k, _)| !mine.contains(k.as_str()));
    parts.extend(new.map(|(k, v)| (k, v.get().to_string())));
    let text: Vec<_> =
        parts.iter().map(|(key, value)| format!("{}:{value}", quoted(key))).collect();
    Ok(format!("{{{}}}", text.join(",")))
}

/// The parameters of an optimizer's groups are united by name; other lists have equal lengths, and
/// their elements are united.
fn merge_arrays(
    a: &[&RawValue],
    b: &[&RawValue],
    path: &[&str],
    depth: usize,
) -> Result<String, Keys> {
    let parts: Vec<String> = if let [.., "param_groups", _, "params"] = path {
        let known: HashSet<&str> = a.iter().map(|v| v.get()).collect();
        let new = b.iter().filter(|v| !known.contains(v.get()));
        a.iter().chain(new).map(|v| v.get().to_string()).collect()
    } else if a.len() == b.len() {
        let each = a.iter().zip(b).enumerate().map(|(at, (x, y))| {
            let at = at.to_string();
            merge(x.get(), y.get(), &[path, &[at.as_str()]].concat(), depth - 1)
        });
        each.collect::<Result<_, _>>()?
    } else {
        return Err(path.iter().map(ToString::to_string).collect());
    };
    Ok(format!("[{}]", parts.join(",")))
}

type Items<'a> = Vec<(String, &'a RawValue)>;

fn array(text: &str) -> Option<Vec<&RawValue>> {
    text.starts_with('[').then(|| serde_json::from_str(text).ok()).flatten()
}

/// Keys and values in their order.
fn object(text: &str) -> Option<Items<'_>> {
    struct InOrder;
    impl<'de> Visitor<'de> for InOrder {
        type Value = Items<'de>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut items = Vec::new();
            while let Some(item) = map.next_entry()? {
                items.push(item);
            }
            Ok(items)
        }
    }
    serde_json::Deserializer::from_str(text).deserialize_map(InOrder).ok()
}

/// `~` and a letter: the key of a value that JSON cannot say (see `docs/checkpoint-state.md`).
fn is_tag(key: &str) -> bool {
    key.strip_prefix('~').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_alphabetic()))
}

fn quoted(key: &str) -> String {
    serde_json::Value::from(key).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_stages_come_together_and_each_value_stays_as_it_was_written() {
        let a = r#"{"model":{"a":{"~tensor":{"dtype":"F32"}}},"n":1.0e0,"big":{"~int":"0x1"}}"#;
        let b = r#"{"model":{"b.\"x":{"~tensor":{"dtype":"BF16"}}},"n":1.0e0,"c":[1, 2]}"#;
        let expected = concat!(
            r#"{"model":{"a":{"~tensor":{"dtype":"F32"}},"b.\"x":{"~tensor":{"dtype":"BF16"}}},"#,
            r#""n":1.0e0,"big":{"~int":"0x1"},"c":[1, 2]}"#
        );
        assert_eq!(unite(&[(0, a), (2, b)]).unwrap(), expected);
        assert_eq!(unite(&[(0, a)]).unwrap(), a);
    }

    #[test]
    fn parameters_of_groups_are_united_by_name() {
        let a = r#"{"o":{"param_groups":[{"params":["a","t"],"lr":0.1},{"params":[]}]}}"#;
        let b = r#"{"o":{"param_groups":[{"params":["t","b"],"lr":0.1},{"params":["c"]}]}}"#;
        let expected =
            r#"{"o":{"param_groups":[{"params":["a","t","b"],"lr":0.1},{"params":["c"]}]}}"#;
        assert_eq!(unite(&[(0, a), (1, b)]).unwrap(), expected);
    }

    #[test]
    fn what_two_stages_both_have_is_equal_or_named() {
        let named = |a: &str, b: &str| match unite(&[(0, a), (4, b)]).unwrap_err() {
            Failure::Invalid { what, found, .. } => {
                assert!(found.contains("rank 4"), "{found}");
                what
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(named(r#"{"a":{"b":1}}"#, r#"{"a":{"b":1.0}}"#), "state at key a.b");
        assert_eq!(named(r#"{"a":[1,2]}"#, r#"{"a":[1]}"#), "state at key a");
        assert_eq!(named(r#"{"a":[1,2]}"#, r#"{"a":[1,3]}"#), "state at key a.1");
        assert_eq!(named(r#"{"a":{"~int":"1"}}"#, r#"{"a":{"x":1}}"#), "state at key a");
        let tensors = [r#"{"w":{"~tensor":{"shape":[2]}}}"#, r#"{"w":{"~tensor":{"shape":[3]}}}"#];
        assert_eq!(named(tensors[0], tensors[1]), "state at key w");
    }

    #[test]
    fn ordered_dicts_are_united_as_others_are() {
        let (a, b) = (r#"{"m":{"~odict":{"a":1}}}"#, r#"{"m":{"~odict":{"b":2}}}"#);
        assert_eq!(unite(&[(0, a), (1, b)]).unwrap(), r#"{"m":{"~odict":{"a":1,"b":2}}}"#);
    }
}
