//! From a pickle to the typed JSON of a checkpoint (docs/checkpoint-state.md). Tensors are given to
//! the caller, who says what stands for them; what has no form is an error.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::numpy::{self, ArrayRef};
use super::tensor::{TensorRef, tensor_of};
use crate::error::{Error, Result};
use crate::pickle::{Object, Pairs, Sequence, Value, View};

/// Containers inside containers, as in the other writer of typed JSON.
const DEPTH_MAX: usize = 36;
/// Values of one document. A pickle may refer to one value many times, and each counts.
const VALUES_MAX: usize = 1 << 24;
/// Length of one document.
const TEXT_BYTES_MAX: usize = 1 << 30;

/// One step on the way to a value.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// Key of a dict.
    Text(String),
    /// Whole-number key of a dict, or position in a list.
    Number(i64),
}

/// What becomes of tensors.
pub trait Leaves {
    /// The node for a tensor at `path`.
    fn tensor(&mut self, path: &[Key], tensor: &TensorRef) -> Result<String>;
    /// The node for a numpy array at `path`.
    fn array(&mut self, path: &[Key], array: ArrayRef) -> Result<String>;
    /// Whether attributes on an ordered dict may be left out (torch's modules put versions there).
    fn drops_attributes(&self) -> bool {
        true
    }
    /// Whether objects of classes without a form are written as `{"class": …, "arguments": […],
    /// "state": …}`, and enum members as their value; else they are refused.
    fn shows_objects(&self) -> bool {
        false
    }
}

/// For documents without tensors.
#[derive(Debug)]
pub struct NoTensors;

impl Leaves for NoTensors {
    fn tensor(&mut self, _: &[Key], _: &TensorRef) -> Result<String> {
        Err(Error::Unsupported { what: "a tensor among plain values".into() })
    }
    fn array(&mut self, _: &[Key], _: ArrayRef) -> Result<String> {
        Err(Error::Unsupported { what: "an array among plain values".into() })
    }
    fn drops_attributes(&self) -> bool {
        false
    }
}

/// The value as typed JSON; its keys are counted from `prefix`.
pub fn typed_json(value: Value<'_>, prefix: &[Key], leaves: &mut dyn Leaves) -> Result<String> {
    let mut writer = Writer { path: prefix.to_vec(), base: prefix.len(), leaves, values: 0 };
    let mut out = String::new();
    writer.value(value, &mut out)?;
    Ok(out)
}

/// A string as JSON.
pub fn text_json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A key as the key of a JSON object.
pub fn key_json(key: &Key) -> String {
    match key {
        Key::Number(n) => format!("\"~{n}\""),
        Key::Text(text) if text.starts_with('~') => text_json(&format!("~{text}")),
        Key::Text(text) => text_json(text),
    }
}

/// The compact JSON array that names a tensor.
pub fn path_json(path: &[Key]) -> String {
    let key = |key: &Key| match key {
        Key::Number(n) => n.to_string(),
        Key::Text(text) => text_json(text),
    };
    format!("[{}]", path.iter().map(key).collect::<Vec<_>>().join(","))
}

pub(super) fn float_json(value: f64) -> String {
    if value.is_finite() {
        return serde_json::Value::from(value).to_string();
    }
    let name = match value {
        nan if nan.is_nan() => "nan",
        positive if positive > 0.0 => "inf",
        _ => "-inf",
    };
    format!("{{\"~float\":\"{name}\"}}")
}

pub(super) fn unsigned_json(value: u64) -> String {
    match i64::try_from(value) {
        Ok(value) => value.to_string(),
        Err(_) => format!("{{\"~int\":\"{value:#x}\"}}"),
    }
}

pub(super) fn bytes_json(bytes: &[u8]) -> String {
    format!("{{\"~bytes\":\"{}\"}}", base64(bytes))
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let word =
            three.iter().fold(0_u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - three.len()));
        for i in 0..4 {
            let letter = LETTERS[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= three.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

/// A long whole number as hexadecimal digits with a sign.
fn long_json(bytes: &[u8]) -> String {
    let negative = bytes.last().is_some_and(|b| b & 0x80 != 0);
    let mut magnitude = bytes.to_vec();
    if negative {
        let mut carry = true;
        for byte in &mut magnitude {
            let (value, more) = (!*byte).overflowing_add(u8::from(carry));
            (*byte, carry) = (value, more);
        }
    }
    let mut digits: String = magnitude.iter().rev().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    digits = digits.trim_start_matches('0').to_string();
    format!("{{\"~int\":\"{}0x{digits}\"}}", if negative { "-" } else { "" })
}

struct Writer<'l> {
    path: Vec<Key>,
    base: usize,
    leaves: &'l mut dyn Leaves,
    values: usize,
}

impl Writer<'_> {
    fn refuse(&self, what: impl std::fmt::Display) -> Error {
        let inside = path_json(&self.path[self.base..]);
        Error::Unsupported { what: format!("{what} at {inside}") }
    }

    fn value(&mut self, value: Value<'_>, out: &mut String) -> Result<()> {
        self.values += 1;
        if self.values > VALUES_MAX || out.len() > TEXT_BYTES_MAX {
            let limit = VALUES_MAX as u64;
            return Err(Error::TooLarge { what: "values", offset: 0, found: limit + 1, limit });
        }
        if self.path.len() > self.base + DEPTH_MAX {
            return Err(self.refuse(format!("a container more than {DEPTH_MAX} deep")));
        }
        match value.view() {
            View::None => out.push_str("null"),
            View::Bool(value) => out.push_str(if value { "true" } else { "false" }),
            View::Int(value) => out.push_str(&value.to_string()),
            View::Long(bytes) => out.push_str(&long_json(bytes)),
            View::Float(value) => out.push_str(&float_json(value)),
            View::Text(text) => out.push_str(&text_json(text)),
            View::Bytes(bytes) => out.push_str(&bytes_json(bytes)),
            View::List(items) => self.list(items, out)?,
            View::Tuple(items) => self.tagged("tuple", out, |w, out| w.list(items, out))?,
            View::Dict(pairs) => self.dict(pairs, out)?,
            View::Name("torch", name) if super::stored(name).is_some() => {
                let _ = write!(out, "{{\"~dtype\":\"{name}\"}}");
            }
            View::Name(module, name) => {
                return Err(self.refuse(format!("the name {module}.{name} as a value")));
            }
            View::Object(object) => self.object(&object, out)?,
            View::Persistent(_) | View::Other => return Err(self.refuse("a bare reference")),
        }
        Ok(())
    }

    fn tagged(
        &mut self,
        tag: &str,
        out: &mut String,
        inner: impl FnOnce(&mut Self, &mut String) -> Result<()>,
    ) -> Result<()> {
        let _ = write!(out, "{{\"~{tag}\":");
        inner(self, out)?;
        out.push('}');
        Ok(())
    }

    fn list(&mut self, items: Sequence<'_>, out: &mut String) -> Result<()> {
        out.push('[');
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            self.path.push(Key::Number(i as i64));
            self.value(item, out)?;
            self.path.pop();
        }
        out.push(']');
        Ok(())
    }

    fn dict(&mut self, pairs: Pairs<'_>, out: &mut String) -> Result<()> {
        // As in Python, the last of equal keys wins and keeps the first one's place.
        let mut order: Vec<(Key, Value<'_>)> = Vec::with_capacity(pairs.len());
        let mut known: HashMap<Key, usize> = HashMap::new();
        for (key, value) in pairs.iter() {
            let key = match key.view() {
                View::Text(text) => Key::Text(text.into()),
                View::Int(number) => Key::Number(number),
                _ => return Err(self.refuse(format!("a dict key of type {}", key.kind()))),
            };
            if let Some(&at) = known.get(&key) {
                order[at].1 = value;
            } else {
                known.insert(key.clone(), order.len());
                order.push((key, value));
            }
        }
        out.push('{');
        for (i, (key, value)) in order.into_iter().enumerate() {
            if i > 0 {
                out.push(',');
            }
            out.push_str(&key_json(&key));
            out.push(':');
            self.path.push(key);
            self.value(value, out)?;
            self.path.pop();
        }
        out.push('}');
        Ok(())
    }

    fn object(&mut self, object: &Object<'_>, out: &mut String) -> Result<()> {
        if let Some(tensor) = tensor_of(object)? {
            let node = self.leaves.tensor(&self.path, &tensor)?;
            out.push_str(&node);
            return Ok(());
        }
        if let Some(array) = numpy::array_of(object) {
            let node = self.leaves.array(&self.path, array)?;
            out.push_str(&node);
            return Ok(());
        }
        if object.state.is_some()
            && object.name.0 == "collections"
            && !self.leaves.drops_attributes()
        {
            return Err(self.refuse("a dict with attributes"));
        }
        let first = object.arguments.get(0);
        match (object.name, first.map(Value::view)) {
            (("collections", "OrderedDict"), None) => {
                self.tagged("odict", out, |w, out| w.dict(object.pairs, out))
            }
            (("collections", "Counter"), Some(View::Dict(counts))) => {
                self.tagged("counter", out, |w, out| w.dict(counts, out))
            }
            (("collections", "defaultdict"), factory) => {
                let name = match factory {
                    None | Some(View::None) => "null".to_string(),
                    Some(View::Name("builtins" | "__builtin__" | "collections", name)) => {
                        format!("\"{name}\"")
                    }
                    Some(_) => return Err(self.refuse("a defaultdict of another factory")),
                };
                let _ = write!(out, "{{\"~ddict\":[{name},");
                self.dict(object.pairs, out)?;
                out.push_str("]}");
                Ok(())
            }
            (("torch", "Size"), Some(View::Tuple(sizes))) => {
                self.tagged("size", out, |w, out| w.list(sizes, out))
            }
            (("torch", "device"), Some(View::Text(kind))) => {
                let index = object.arguments.get(1).and_then(Value::as_i64);
                let device = index.map_or(kind.to_string(), |i| format!("{kind}:{i}"));
                let _ = write!(out, "{{\"~device\":{}}}", text_json(&device));
                Ok(())
            }
            ((_, "encode" | "bytes"), _) => {
                let Some(value) = bytes_of_object(object) else {
                    return Err(self.refuse("bytes in an unknown spelling"));
                };
                out.push_str(&bytes_json(&value));
                Ok(())
            }
            _ => match numpy::scalar_json(object) {
                Some(text) => {
                    out.push_str(&text);
                    Ok(())
                }
                None if self.leaves.shows_objects() => self.shown(object, out),
                None => {
                    Err(self.refuse(format!("an object of {}.{}", object.name.0, object.name.1)))
                }
            },
        }
    }

    /// An object as what was recorded of it.
    fn shown(&mut self, object: &Object<'_>, out: &mut String) -> Result<()> {
        let (module, name) = object.name;
        if let Some(value) = object.arguments.get(0)
            && name.ends_with("Enum")
        {
            return self.value(value, out);
        }
        let _ = write!(out, "{{\"class\":{}", text_json(&format!("{module}.{name}")));
        let mut field = |key: &str, inner: &mut dyn FnMut(&mut Self, &mut String) -> Result<()>| {
            let _ = write!(out, ",\"{key}\":");
            self.path.push(Key::Text(key.into()));
            inner(self, out)?;
            self.path.pop();
            Ok(())
        };
        if !object.arguments.is_empty() {
            field("arguments", &mut |w, out| w.list(object.arguments, out))?;
        }
        if let Some(state) = object.state {
            field("state", &mut |w, out| w.value(state, out))?;
        }
        if !object.pairs.is_empty() {
            field("items", &mut |w, out| w.dict(object.pairs, out))?;
        }
        out.push('}');
        Ok(())
    }
}

fn bytes_of_object(object: &Object<'_>) -> Option<Vec<u8>> {
    if object.name.1 == "bytes" {
        return object.arguments.is_empty().then(Vec::new);
    }
    let text = object.arguments.get(0)?.as_str()?;
    text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
}
