//! numpy's scalars and arrays in pickles, with their exact dtypes.

use crate::pickle::{Object, Value, View};

/// An array whose bytes are in the pickle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayRef {
    /// numpy's code with byte order, `<f4`.
    pub dtype: String,
    /// safetensors' name.
    pub stored: &'static str,
    /// Shape, in elements.
    pub shape: Vec<i64>,
    /// Elements row by row.
    pub bytes: Vec<u8>,
}

/// Longest code of a number's dtype.
const CODE_BYTES_MAX: usize = 8;

/// `<f4` and the like of a recorded `numpy.dtype(...)`.
pub fn dtype_code(value: Value<'_>) -> Option<String> {
    let View::Object(object) = value.view() else { return None };
    if object.name != ("numpy", "dtype") {
        return None;
    }
    let code = object.arguments.get(0)?.as_str()?;
    let order = match object.state.map(Value::view) {
        Some(View::Tuple(state)) => state.get(1)?.as_str()?,
        _ => "<",
    };
    let plain = code.trim_start_matches(['<', '>', '|', '=']);
    let known = plain.len() <= CODE_BYTES_MAX && stored_name(plain).is_some();
    // Byte order has no meaning for single bytes, where numpy writes a bar.
    let order = if plain.ends_with('1') && plain.len() == 2 { "|" } else { order };
    known.then(|| format!("{}{plain}", if order == "=" { "<" } else { order }))
}

/// safetensors' name of a code without byte order.
pub fn stored_name(plain: &str) -> Option<&'static str> {
    Some(match plain {
        "b1" => "BOOL",
        "u1" => "U8",
        "i1" => "I8",
        "u2" => "U16",
        "i2" => "I16",
        "f2" => "F16",
        "u4" => "U32",
        "i4" => "I32",
        "f4" => "F32",
        "u8" => "U64",
        "i8" => "I64",
        "f8" => "F64",
        "c8" => "C64",
        "c16" => "C128",
        _ => return None,
    })
}

/// The bytes of a bytes value, also in the spelling of protocol 2.
pub fn bytes_of(value: Value<'_>) -> Option<Vec<u8>> {
    match value.view() {
        View::Bytes(bytes) => Some(bytes.to_vec()),
        View::Object(o) if o.name == ("_codecs", "encode") => {
            let text = o.arguments.get(0)?.as_str()?;
            text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
        }
        View::Object(o) if o.name.1 == "bytes" && o.arguments.is_empty() => Some(Vec::new()),
        _ => None,
    }
}

/// The array a recorded call makes, if it is one of numbers in this machine's byte order.
pub fn array_of(object: &Object<'_>) -> Option<ArrayRef> {
    if object.name.1 != "_reconstruct" {
        return None;
    }
    let View::Tuple(state) = object.state?.view() else { return None };
    let View::Tuple(shape) = state.get(1)?.view() else { return None };
    let shape: Vec<i64> = shape.iter().map(Value::as_i64).collect::<Option<_>>()?;
    let dtype = dtype_code(state.get(2)?)?;
    let fortran = state.get(3)?.as_i64()? != 0;
    let bytes = bytes_of(state.get(4)?)?;
    let plain = dtype.trim_start_matches(['<', '|']);
    let stored = stored_name(plain)?;
    let each: usize = plain[1..].parse().ok()?;
    let count = shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(usize::try_from(d).ok()?))?;
    let turned = fortran && shape.iter().filter(|&&n| n != 1).count() > 1;
    let fits = count.checked_mul(each) == Some(bytes.len());
    (fits && !turned).then_some(ArrayRef { dtype, stored, shape, bytes })
}

/// The typed JSON of a recorded `numpy.scalar(...)`.
pub fn scalar_json(object: &Object<'_>) -> Option<String> {
    if object.name.1 != "scalar" {
        return None;
    }
    let dtype = dtype_code(object.arguments.get(0)?)?;
    let bytes = bytes_of(object.arguments.get(1)?)?;
    let plain = dtype.trim_start_matches(['<', '|']);
    let each: usize = plain.get(1..)?.parse().ok()?;
    if bytes.len() != each || dtype.starts_with('>') {
        return None;
    }
    let mut word = [0; 8];
    let value = match plain.as_bytes()[0] {
        b'b' => (bytes[0] != 0).to_string(),
        kind @ (b'i' | b'u') => {
            let negative = kind == b'i' && bytes.last().is_some_and(|b| b & 0x80 != 0);
            word.fill(if negative { 0xff } else { 0 });
            word[..each].copy_from_slice(&bytes);
            match kind {
                b'i' => i64::from_le_bytes(word).to_string(),
                _ => super::typed::unsigned_json(u64::from_le_bytes(word)),
            }
        }
        b'f' if each == 8 => {
            word.copy_from_slice(&bytes);
            super::typed::float_json(f64::from_le_bytes(word))
        }
        b'f' if each == 4 => {
            let four = [bytes[0], bytes[1], bytes[2], bytes[3]];
            super::typed::float_json(f64::from(f32::from_le_bytes(four)))
        }
        _ => super::typed::bytes_json(&bytes),
    };
    Some(format!("{{\"~numpy\":[\"{dtype}\",{value}]}}"))
}
