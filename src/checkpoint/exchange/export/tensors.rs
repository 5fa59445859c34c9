//! Which tensors an export has: those that the state names, each with its name and its chunks.

use drivetrain_formats::torch::{decode_key, is_tag, stored};
use serde_json::Value;

use super::Source;
use crate::checkpoint::layout::{Chunk, Dtype, shape_bytes};
use crate::error::{Error, Result};

/// Containers inside containers.
const DEPTH_MAX: usize = 160;

/// A tensor of the state.
pub struct Named {
    /// Its keys inside what is exported.
    pub keys: Vec<Value>,
    /// Path of its chunks in the table.
    pub path: String,
    /// Whether an earlier tensor is the same memory.
    pub is_alias: bool,
    /// Its node's content.
    pub node: Value,
}

/// A tensor with its chunks.
pub struct Found<'a> {
    /// Path in the table.
    pub path: &'a str,
    /// Its chunks.
    pub chunks: &'a [Chunk],
    /// Bytes of its elements.
    pub bytes: u64,
}

/// All tensors of the state, in order.
pub fn named(source: &Source) -> Result<Vec<Named>> {
    let mut found = Vec::new();
    let mut keys = Vec::new();
    walk(&source.state, source, &mut keys, &mut found)?;
    Ok(found)
}

fn walk(
    node: &Value,
    source: &Source,
    keys: &mut Vec<Value>,
    found: &mut Vec<Named>,
) -> Result<()> {
    if keys.len() > DEPTH_MAX {
        return Err(Error::invalid("state", "fewer containers inside containers", DEPTH_MAX));
    }
    match node {
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                keys.push(i.into());
                walk(item, source, keys, found)?;
                keys.pop();
            }
        }
        Value::Object(map) => {
            let tagged = map.iter().next().filter(|(key, _)| map.len() == 1 && is_tag(key));
            match tagged {
                Some((tag, content)) if tag == "~tensor" => {
                    found.push(one(content, source, keys));
                }
                Some((tag, content)) if tag == "~ddict" => {
                    walk(content.get(1).unwrap_or(&Value::Null), source, keys, found)?;
                }
                Some((tag, content)) if matches!(tag.as_str(), "~odict" | "~tuple") => {
                    walk(content, source, keys, found)?;
                }
                Some(_) => {}
                None => {
                    for (key, value) in map {
                        let inner = |source| Error::Format {
                            file: "state".into(),
                            source: Box::new(source),
                        };
                        keys.push(decode_key(key).map_err(inner)?);
                        walk(value, source, keys, found)?;
                        keys.pop();
                    }
                }
            }
        }
        _ => {}
    }
    Ok(())
}

fn one(content: &Value, source: &Source, keys: &[Value]) -> Named {
    let own: Vec<Value> = source.prefix.iter().chain(keys).cloned().collect();
    let at = content.get("at").cloned();
    let is_alias = at.is_some();
    let path = at.unwrap_or(Value::Array(own)).to_string();
    Named { keys: keys.to_vec(), path, is_alias, node: content.clone() }
}

impl Named {
    /// Its keys joined by dots.
    pub fn name(&self) -> String {
        let key = |key: &Value| key.as_str().map_or_else(|| key.to_string(), String::from);
        self.keys.iter().map(key).collect::<Vec<_>>().join(".")
    }

    /// Its shape, without the dimension that bytes add.
    pub fn shape(&self) -> Vec<i64> {
        let sizes = self.node.get("shape").and_then(Value::as_array);
        sizes.into_iter().flatten().filter_map(Value::as_i64).collect()
    }

    /// torch's name of its dtype.
    pub fn torch_dtype(&self) -> Result<&'static str> {
        let own = self.node.get("own").and_then(Value::as_str);
        let name = self.node.get("dtype").and_then(Value::as_str).unwrap_or_default();
        let known = match own {
            Some(own) => stored(own).map(|s| s.torch),
            None => drivetrain_formats::torch::torch_of(name),
        };
        known.ok_or_else(|| Error::Unsupported {
            what: format!("tensor {} of dtype {} in torch", self.name(), own.unwrap_or(name)),
            advice: "export it to safetensors".into(),
        })
    }

    /// Its chunks.
    pub fn find<'a>(&self, source: &'a Source) -> Result<Found<'a>> {
        let found = source.step.tensor(&self.path);
        let Some((path, chunks)) = found.filter(|(_, chunks)| !chunks.is_empty()) else {
            let file = format!("{}, tensor {}", source.folder, self.path);
            return Err(Error::corrupt(
                file,
                0,
                "chunks in the table",
                "none",
                "use an older step",
            ));
        };
        let bytes = shape_bytes(&chunks[0].shape, Dtype::named(&chunks[0].dtype)?);
        let bytes = bytes.unwrap_or_else(|| chunks.iter().map(Chunk::raw_bytes).sum());
        Ok(Found { path, chunks, bytes })
    }
}
