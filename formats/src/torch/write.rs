//! Writes what torch reads: pickles of protocol 2, of plain values and tensors.

use serde_json::Value;

use super::dtype::stored;
use crate::error::{Error, Result};

/// Containers inside containers; the readers of typed JSON stop before.
const DEPTH_MAX: usize = 160;

/// Builds one pickle.
#[derive(Debug)]
pub struct PickleWriter {
    out: Vec<u8>,
}

impl Default for PickleWriter {
    fn default() -> Self {
        Self { out: vec![0x80, 2] }
    }
}

/// What stands for a tensor in a pickle.
pub trait TensorPickles {
    /// Writes the value for the content of a `~tensor` node at `path`.
    fn tensor(&mut self, out: &mut PickleWriter, path: &[Value], node: &Value) -> Result<()>;
}

fn bad(expected: &str, found: impl std::fmt::Display) -> Error {
    let found = found.to_string();
    Error::Malformed { what: "typed JSON", offset: 0, expected: expected.into(), found }
}

impl PickleWriter {
    /// Ends the pickle.
    pub fn finish(mut self) -> Vec<u8> {
        self.out.push(b'.');
        self.out
    }

    /// Raw operations.
    pub fn op(&mut self, ops: &[u8]) {
        self.out.extend_from_slice(ops);
    }

    /// A name.
    pub fn name(&mut self, module: &str, name: &str) {
        self.out.push(b'c');
        self.op(module.as_bytes());
        self.out.push(b'\n');
        self.op(name.as_bytes());
        self.out.push(b'\n');
    }

    /// Text.
    pub fn text(&mut self, text: &str) {
        self.out.push(b'X');
        self.op(&(text.len() as u32).to_le_bytes());
        self.op(text.as_bytes());
    }

    /// A truth value.
    pub fn truth(&mut self, value: bool) {
        self.out.push(if value { 0x88 } else { 0x89 });
    }

    /// A whole number.
    pub fn int(&mut self, value: i64) {
        if let Ok(small) = i32::try_from(value) {
            self.out.push(b'J');
            self.op(&small.to_le_bytes());
            return;
        }
        self.long(&value.to_le_bytes());
    }

    /// A whole number as little-endian two's complement.
    fn long(&mut self, bytes: &[u8]) {
        self.out.push(0x8a);
        self.out.push(bytes.len() as u8);
        self.op(bytes);
    }

    /// A tuple of whole numbers.
    pub fn sizes(&mut self, sizes: &[i64]) {
        self.out.push(b'(');
        for &n in sizes {
            self.int(n);
        }
        self.out.push(b't');
    }

    /// `torch.Size`.
    pub fn torch_size(&mut self, sizes: &[i64]) {
        self.name("torch", "Size");
        self.sizes(sizes);
        self.op(b"\x85R");
    }

    /// Bytes, in the spelling of protocol 2.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.name("_codecs", "encode");
        let text: String = bytes.iter().map(|&b| char::from(b)).collect();
        self.text(&text);
        self.text("latin1");
        self.op(b"\x86R");
    }

    /// A node of typed JSON.
    pub fn value(
        &mut self,
        node: &Value,
        path: &mut Vec<Value>,
        tensors: &mut dyn TensorPickles,
    ) -> Result<()> {
        if path.len() > DEPTH_MAX {
            return Err(bad("fewer containers inside containers", DEPTH_MAX));
        }
        match node {
            Value::Null => self.op(b"N"),
            Value::Bool(value) => self.truth(*value),
            Value::Number(number) => match number.as_i64() {
                Some(whole) if !number.is_f64() => self.int(whole),
                _ => self.float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                self.op(b"](");
                self.items(items, path, tensors)?;
                self.op(b"e");
            }
            Value::Object(map) => match map.iter().next() {
                Some((key, inner)) if map.len() == 1 && is_tag(key) => {
                    self.tagged(&key[1..], inner, path, tensors)?;
                }
                _ => self.dict(node, path, tensors)?,
            },
        }
        Ok(())
    }

    fn float(&mut self, value: f64) {
        self.out.push(b'G');
        self.op(&value.to_be_bytes());
    }

    fn items(
        &mut self,
        items: &[Value],
        path: &mut Vec<Value>,
        tensors: &mut dyn TensorPickles,
    ) -> Result<()> {
        for (i, item) in items.iter().enumerate() {
            path.push(i.into());
            self.value(item, path, tensors)?;
            path.pop();
        }
        Ok(())
    }

    fn dict(
        &mut self,
        node: &Value,
        path: &mut Vec<Value>,
        tensors: &mut dyn TensorPickles,
    ) -> Result<()> {
        self.op(b"}");
        self.set_items(node, path, tensors)
    }

    fn set_items(
        &mut self,
        node: &Value,
        path: &mut Vec<Value>,
        tensors: &mut dyn TensorPickles,
    ) -> Result<()> {
        let map = node.as_object().ok_or_else(|| bad("an object", node))?;
        self.op(b"(");
        for (key, value) in map {
            // A value of each rank has no place in a file of one process.
            if value.get("~rank").is_some() {
                continue;
            }
            let key = decode_key(key)?;
            match &key {
                Value::String(text) => self.text(text),
                number => self.int(number.as_i64().unwrap_or_default()),
            }
            path.push(key);
            self.value(value, path, tensors)?;
            path.pop();
        }
        self.op(b"u");
        Ok(())
    }

    fn tagged(
        &mut self,
        tag: &str,
        inner: &Value,
        path: &mut Vec<Value>,
        tensors: &mut dyn TensorPickles,
    ) -> Result<()> {
        let list = || inner.as_array().ok_or_else(|| bad("a list", inner));
        let text = || inner.as_str().ok_or_else(|| bad("text", inner));
        match tag {
            "tensor" => tensors.tensor(self, path, inner)?,
            "tuple" => {
                self.op(b"(");
                self.items(list()?, path, tensors)?;
                self.op(b"t");
            }
            "size" => {
                let sizes: Option<Vec<i64>> = list()?.iter().map(Value::as_i64).collect();
                self.torch_size(&sizes.ok_or_else(|| bad("sizes", inner))?);
            }
            "float" => self.float(text()?.parse().map_err(|e| bad("a float", e))?),
            "int" => self.hexadecimal(text()?)?,
            "bytes" => {
                let bytes = from_base64(text()?).ok_or_else(|| bad("base64", inner))?;
                self.bytes(&bytes);
            }
            "odict" => {
                self.name("collections", "OrderedDict");
                self.op(b")R");
                self.set_items(inner, path, tensors)?;
            }
            "counter" => {
                self.name("collections", "Counter");
                self.dict(inner, path, tensors)?;
                self.op(b"\x85R");
            }
            "ddict" => {
                let parts = list()?;
                let empty = Value::Null;
                self.name("collections", "defaultdict");
                match parts.first().and_then(Value::as_str) {
                    Some(name @ ("OrderedDict" | "Counter")) => self.name("collections", name),
                    Some(name) => self.name("__builtin__", name),
                    None => self.op(b"N"),
                }
                self.op(b"\x85R");
                self.set_items(parts.get(1).unwrap_or(&empty), path, tensors)?;
            }
            "dtype" => {
                let known = stored(text()?).ok_or_else(|| bad("a dtype of torch", inner))?;
                self.name("torch", known.torch);
            }
            "device" => {
                self.name("torch", "device");
                self.text(text()?);
                self.op(b"\x85R");
            }
            // Readers that allow plain values only do not allow numpy's: a number is one.
            "numpy" => self.value(list()?.get(1).unwrap_or(&Value::Null), path, tensors)?,
            other => return Err(Error::Unsupported { what: format!("a value tagged ~{other}") }),
        }
        Ok(())
    }

    fn hexadecimal(&mut self, text: &str) -> Result<()> {
        let (negative, digits) = match text.strip_prefix('-') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let digits = digits.strip_prefix("0x").unwrap_or(digits);
        let padded = format!("00{}{digits}", if digits.len() % 2 == 1 { "0" } else { "" });
        let mut bytes = Vec::with_capacity(padded.len() / 2);
        for at in (0..padded.len()).step_by(2).rev() {
            let pair = padded.get(at..at + 2).ok_or_else(|| bad("hexadecimal digits", text))?;
            bytes.push(u8::from_str_radix(pair, 16).map_err(|e| bad("hexadecimal digits", e))?);
        }
        if bytes.len() > 255 {
            return Err(bad("a number of at most 255 bytes", bytes.len()));
        }
        if negative {
            let mut carry = true;
            for byte in &mut bytes {
                (*byte, carry) = (!*byte).overflowing_add(u8::from(carry));
            }
        }
        self.long(&bytes);
        Ok(())
    }
}

/// Whether a key of an object says what kind of value it holds.
pub fn is_tag(key: &str) -> bool {
    let mut letters = key.chars();
    letters.next() == Some('~') && letters.next().is_some_and(|c| c.is_ascii_alphabetic())
}

/// The key of a dict, text or number, from the key of an object.
pub fn decode_key(key: &str) -> Result<Value> {
    match key.strip_prefix('~') {
        None => Ok(key.into()),
        Some(rest) if rest.starts_with('~') => Ok(rest.into()),
        Some(digits) => digits.parse::<i64>().map(Value::from).map_err(|e| bad("a key", e)),
    }
}

fn from_base64(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut word, mut bits) = (0_u32, 0);
    for letter in text.bytes().filter(|&b| b != b'=') {
        let value = match letter {
            b'A'..=b'Z' => letter - b'A',
            b'a'..=b'z' => letter - b'a' + 26,
            b'0'..=b'9' => letter - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        word = word << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            out.push((word >> bits) as u8);
        }
    }
    Some(out)
}

/// A pickle of a tensor of `shape` whose elements lie in order in the record `data/<key>`.
pub fn tensor_pickle(
    out: &mut PickleWriter,
    torch: &str,
    shape: &[i64],
    key: &str,
    requires_grad: bool,
) -> Result<()> {
    let dtype = stored(torch).ok_or_else(|| bad("a dtype of torch", torch))?;
    let elements: i64 = shape.iter().product();
    let mut strides = vec![1_i64; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d].max(1);
    }
    let class = storage_class(dtype.torch);
    out.name(
        "torch._utils",
        if class.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" },
    );
    out.op(b"((");
    out.text("storage");
    match class {
        Some(class) => out.name("torch", class),
        None => out.name("torch.storage", "UntypedStorage"),
    }
    out.text(key);
    out.text("cpu");
    out.int(if class.is_some() { elements } else { elements * dtype.bytes as i64 });
    out.op(b"tQ");
    out.int(0);
    out.sizes(shape);
    out.sizes(&strides);
    out.truth(requires_grad);
    out.name("collections", "OrderedDict");
    out.op(b")R");
    if class.is_none() {
        out.name("torch", dtype.torch);
    }
    out.op(b"tR");
    Ok(())
}

/// The storage class of a dtype that has one.
fn storage_class(torch: &str) -> Option<&'static str> {
    Some(match torch {
        "float32" => "FloatStorage",
        "float64" => "DoubleStorage",
        "float16" => "HalfStorage",
        "bfloat16" => "BFloat16Storage",
        "int64" => "LongStorage",
        "int32" => "IntStorage",
        "int16" => "ShortStorage",
        "int8" => "CharStorage",
        "uint8" => "ByteStorage",
        "bool" => "BoolStorage",
        "complex64" => "ComplexFloatStorage",
        "complex128" => "ComplexDoubleStorage",
        _ => return None,
    })
}
