//! NumPy's `.npy`: a magic, a header written as a Python literal, then the array.
//!
//! The header is read with a parser for exactly what numpy writes. Object arrays (pickles), big
//! endian and Fortran order are refused by name.

use bytes::Bytes;

use super::{DType, Natural};
use crate::error::{Error, Result};

const MAGIC: &[u8; 6] = b"\x93NUMPY";

/// Longest header; numpy itself stops at 10,000 unless told otherwise.
const HEADER_BYTES_MAX: usize = 10_000;

/// Axes of an array; numpy allows 64.
const AXES_MAX: usize = 32;

/// The array in a `.npy` file, sharing its bytes.
pub fn tensor(bytes: Bytes, file: &str) -> Result<Natural> {
    let bad = |expected: &str, found: &str| {
        let advice = "write it with numpy.save, C order, without objects";
        Error::corrupt(file, 0, expected, found, advice)
    };
    let (header, start) =
        header(&bytes).ok_or_else(|| bad("a .npy header", "something else or less"))?;
    if value(header, "fortran_order") != Some("False") {
        return Err(bad("C order", header.trim()));
    }
    let descr = value(header, "descr").map(|v| v.trim_matches(['\'', '"']));
    let dtype = descr.and_then(dtype_of).ok_or_else(|| bad("a plain dtype", header.trim()))?;
    let shape = shape_of(header).ok_or_else(|| bad("a shape", header.trim()))?;
    let mut need = Some(dtype.size_bytes());
    for side in &shape {
        need = need.and_then(|n| n.checked_mul(*side));
    }
    if need != Some(bytes.len() - start) {
        let need = need.map_or_else(|| "too many".into(), |n| n.to_string());
        let expected = format!("{need} bytes of {dtype} {shape:?}");
        return Err(bad(&expected, &format!("{} bytes", bytes.len() - start)));
    }
    Ok(Natural::Array { dtype, shape, data: bytes.slice(start..) })
}

/// Text of the header and where the array begins.
fn header(bytes: &[u8]) -> Option<(&str, usize)> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (length, at) = match rest.first()? {
        1 => (usize::from(u16::from_le_bytes([*rest.get(2)?, *rest.get(3)?])), 10),
        2 | 3 => (u32::from_le_bytes(rest.get(2..6)?.try_into().ok()?) as usize, 12),
        _ => return None,
    };
    if length > HEADER_BYTES_MAX {
        return None;
    }
    let text = bytes.get(at..at + length)?;
    Some((std::str::from_utf8(text).ok()?, at + length))
}

/// Text of a value of the header's flat dict.
fn value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    let quoted = format!("'{key}':");
    let rest = &header[header.find(&quoted)? + quoted.len()..];
    let end = if rest.trim_start().starts_with('(') {
        rest.find(')')? + 1
    } else {
        rest.find([',', '}'])?
    };
    Some(rest[..end].trim())
}

fn dtype_of(descr: &str) -> Option<DType> {
    Some(match descr {
        "|u1" => DType::U8,
        "|b1" => DType::Bool,
        "<u2" => DType::U16,
        "<i4" => DType::I32,
        "<i8" => DType::I64,
        "<f2" => DType::F16,
        "<f4" => DType::F32,
        "<f8" => DType::F64,
        _ => return None,
    })
}

fn shape_of(header: &str) -> Option<Vec<usize>> {
    let inner = value(header, "shape")?.strip_prefix('(')?.strip_suffix(')')?;
    let sides = inner.split(',').map(str::trim).filter(|s| !s.is_empty());
    let shape = sides.map(|s| s.parse().ok()).collect::<Option<Vec<usize>>>()?;
    (shape.len() <= AXES_MAX).then_some(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn npy(header: &str, data: &[u8]) -> Bytes {
        let mut out = b"\x93NUMPY\x01\x00".to_vec();
        out.extend((header.len() as u16).to_le_bytes());
        out.extend(header.as_bytes());
        out.extend(data);
        out.into()
    }

    #[test]
    fn reads_what_numpy_writes() {
        let file = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1), }  \n", &[7; 8]);
        let want = Natural::Array { dtype: DType::F32, shape: vec![2, 1], data: vec![7; 8].into() };
        assert_eq!(tensor(file, "a.npy").unwrap(), want);
        let scalar = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (), }\n", &[9]);
        assert!(tensor(scalar, "a.npy").is_ok());
    }

    #[test]
    fn refuses_objects_fortran_and_wrong_sizes() {
        let refuse = |header: &str, data: &[u8]| {
            let error = tensor(npy(header, data), "a.npy").unwrap_err().to_string();
            assert!(error.contains("a.npy"), "{error}");
        };
        refuse("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", &[0; 8]);
        refuse("{'descr': '<f4', 'fortran_order': True, 'shape': (1,), }", &[0; 4]);
        refuse("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", &[0; 4]);
        refuse("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999, 99), }", &[]);
    }

    proptest! {
        #[test]
        fn no_header_panics(
            text in "[-{}'(),:a-z0-9 <]{0,60}",
            data in prop::collection::vec(0_u8.., 0..9),
        ) {
            let _ = tensor(npy(&text, &data), "x");
            let _ = tensor(data.into(), "x");
        }
    }
}
