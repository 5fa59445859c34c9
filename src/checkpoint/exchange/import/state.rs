//! The tree of values of an import, as typed JSON.

use drivetrain_formats::torch::{Key, Stored, key_json};
use serde_json::{Map, Value, json};

use crate::checkpoint::layout::Dtype;
use crate::error::{Error, Result};

/// Longest list that a path may make.
const LIST_MAX: usize = 1 << 24;

/// The node that stands for a tensor of `shape` (without the dimension that bytes add).
pub fn tensor_node(dtype: Stored, shape: &[i64]) -> Value {
    let mut content = json!({"dtype": dtype.name, "shape": shape});
    if dtype.as_bytes {
        content["own"] = dtype.torch.into();
    }
    json!({"~tensor": content})
}

/// The node for bytes that only torch reads.
pub fn foreign_node(bytes: u64) -> Value {
    json!({"~tensor": {"dtype": "U8", "shape": [bytes], "foreign_pickle": true}})
}

/// Stored dtype, and the dimension it adds to shapes.
pub fn stored_dtype(dtype: Stored) -> Result<(Dtype, Option<i64>)> {
    let more = (dtype.as_bytes && dtype.bytes > 1).then_some(dtype.bytes as i64);
    Ok((Dtype::named(dtype.name)?, more))
}

/// `key` as the key of a node's object.
pub fn object_key(key: &Key) -> String {
    // What is made by quoting a string is one JSON string.
    serde_json::from_str(&key_json(key)).unwrap_or_default()
}

/// Puts `node` at `path` of a tree of dicts (text keys) and lists (numbers).
pub fn set(tree: &mut Map<String, Value>, path: &[Key], node: Value) -> Result<()> {
    let bad = || {
        let shown = drivetrain_formats::torch::path_json(path);
        Error::invalid("name in a checkpoint", "a place of its own in the state", shown)
    };
    let Some((Key::Text(_), rest)) = path.split_first() else { return Err(bad()) };
    let mut place = tree.entry(object_key(&path[0])).or_insert(Value::Null);
    for key in rest {
        place = match key {
            Key::Text(_) => {
                if place.is_null() {
                    *place = Value::Object(Map::new());
                }
                let object = place.as_object_mut().ok_or_else(bad)?;
                object.entry(object_key(key)).or_insert(Value::Null)
            }
            Key::Number(at) => {
                if place.is_null() {
                    *place = Value::Array(Vec::new());
                }
                let at = usize::try_from(*at).ok().filter(|&at| at < LIST_MAX).ok_or_else(bad)?;
                let list = place.as_array_mut().ok_or_else(bad)?;
                if list.len() <= at {
                    list.resize(at + 1, Value::Null);
                }
                &mut list[at]
            }
        };
    }
    if !place.is_null() {
        return Err(bad());
    }
    *place = node;
    Ok(())
}

/// `path` below an optional first key.
pub fn below(under: Option<&str>, path: &[Key]) -> Vec<Key> {
    let first = under.map(|key| Key::Text(key.into()));
    first.into_iter().chain(path.iter().cloned()).collect()
}
