//! A tensor of a pickle: a strided view of a storage that lies elsewhere in the file.

use super::dtype::{Stored, storage_dtype, stored};
use crate::error::{Error, Result};
use crate::pickle::{Object, Sequence, Value, View};

/// Dimensions of one tensor; torch has at most 64.
const DIMENSIONS_MAX: usize = 64;

/// The memory of one or more tensors.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StorageRef {
    /// Name of its record in the archive.
    pub key: String,
    /// Its size.
    pub bytes: u64,
}

/// A tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRef {
    /// Element type.
    pub dtype: Stored,
    /// Where its elements are.
    pub storage: StorageRef,
    /// First element, in elements of the storage.
    pub offset: u64,
    /// Shape, in elements.
    pub shape: Vec<i64>,
    /// Distance of neighbours per dimension, in elements.
    pub strides: Vec<i64>,
    /// Whether it is a parameter that learns.
    pub requires_grad: bool,
}

fn bad(expected: &str, found: impl std::fmt::Display) -> Error {
    Error::Malformed {
        what: "tensor in a pickle",
        offset: 0,
        expected: expected.into(),
        found: found.to_string(),
    }
}

/// The tensor a recorded call makes; `None` if it makes something else. Attributes that someone put
/// on a tensor or a parameter are left out.
pub fn tensor_of(object: &Object<'_>) -> Result<Option<TensorRef>> {
    match object.name {
        ("torch._tensor", "_rebuild_from_type_v2") => {
            let (function, arguments) = (object.arguments.get(0), object.arguments.get(2));
            match (function.map(Value::view), arguments.map(Value::view)) {
                (Some(View::Name("torch._utils", name)), Some(View::Tuple(arguments))) => {
                    rebuilt(name, arguments)
                }
                _ => Err(bad("how a tensor is made", "another value")),
            }
        }
        ("torch._utils", name) => rebuilt(name, object.arguments),
        _ => Ok(None),
    }
}

/// What a function of torch makes of its arguments.
fn rebuilt(name: &str, arguments: Sequence<'_>) -> Result<Option<TensorRef>> {
    if name.starts_with("_rebuild_parameter") {
        let Some(View::Object(inner)) = arguments.get(0).map(Value::view) else {
            return Err(bad("the tensor of a parameter", "another value"));
        };
        // A tensor itself, since a parameter of parameters may have no end.
        if inner.name.0 != "torch._utils" || inner.name.1.starts_with("_rebuild_parameter") {
            return Err(bad("the tensor of a parameter", inner.name.1));
        }
        return rebuilt(inner.name.1, inner.arguments);
    }
    let dtype = match name {
        "_rebuild_tensor_v3" => match arguments.get(6).map(Value::view) {
            Some(View::Name("torch", name)) => Some(name),
            _ => return Err(bad("a dtype", "another value")),
        },
        _ => None,
    };
    strided(arguments, dtype).map(Some)
}

fn strided(arguments: Sequence<'_>, dtype: Option<&'static str>) -> Result<TensorRef> {
    let at = |i: usize| arguments.get(i).ok_or_else(|| bad("all arguments of a tensor", "fewer"));
    let (storage, of_storage) = storage(at(0)?)?;
    let torch = dtype.unwrap_or(of_storage);
    let dtype = stored(torch).ok_or_else(|| bad("a known dtype", torch))?;
    let offset = at(1)?.as_i64().and_then(|n| u64::try_from(n).ok());
    let offset = offset.ok_or_else(|| bad("an offset", at(1).map_or("none", Value::kind)))?;
    let tensor = TensorRef {
        dtype,
        storage,
        offset,
        shape: numbers(at(2)?)?,
        strides: numbers(at(3)?)?,
        requires_grad: arguments.get(4).and_then(Value::as_i64) == Some(1),
    };
    tensor.check()?;
    Ok(tensor)
}

fn numbers(value: Value<'_>) -> Result<Vec<i64>> {
    let sequence = match value.view() {
        View::Tuple(all) | View::List(all) => all,
        View::Object(size) if size.name == ("torch", "Size") => {
            match size.arguments.get(0).map(Value::view) {
                Some(View::Tuple(all) | View::List(all)) => all,
                _ => return Err(bad("a tuple of sizes", "another value")),
            }
        }
        _ => return Err(bad("a tuple of sizes", value.kind())),
    };
    if sequence.len() > DIMENSIONS_MAX {
        return Err(bad("at most 64 dimensions", sequence.len()));
    }
    let number = |v: Value<'_>| v.as_i64().filter(|&n| n >= 0);
    let all: Option<Vec<_>> = sequence.iter().map(number).collect();
    all.ok_or_else(|| bad("sizes from 0 up", "something else"))
}

/// `("storage", class, key, location, elements)`.
fn storage(value: Value<'_>) -> Result<(StorageRef, &'static str)> {
    let View::Persistent(id) = value.view() else {
        return Err(bad("the reference of a storage", value.kind()));
    };
    let View::Tuple(parts) = id.view() else {
        return Err(bad("a tuple that names a storage", id.kind()));
    };
    let (tag, class, key) = (parts.get(0), parts.get(1), parts.get(2));
    let class = match class.map(Value::view) {
        Some(View::Name(_, class)) => storage_dtype(class),
        _ => None,
    };
    let elements = parts.get(4).and_then(Value::as_i64).and_then(|n| u64::try_from(n).ok());
    match (tag.and_then(Value::as_str), class, key.and_then(Value::as_str), elements) {
        (Some("storage"), Some(dtype), Some(key), Some(elements)) => {
            let each = stored(dtype).map_or(1, |d| d.bytes);
            let bytes = elements.checked_mul(each);
            let bytes = bytes.ok_or_else(|| bad("a storage that fits", elements))?;
            Ok((StorageRef { key: key.into(), bytes }, dtype))
        }
        _ => Err(bad("a storage with class, key and size", "something else")),
    }
}

/// Key and bytes of an element of the storage that a persistent id names.
pub fn storage_element(id: Value<'_>) -> Option<(String, u64)> {
    let View::Tuple(parts) = id.view() else { return None };
    let View::Name(_, class) = parts.get(1)?.view() else { return None };
    let dtype = stored(storage_dtype(class)?)?;
    Some((parts.get(2)?.as_str()?.into(), dtype.bytes))
}

impl TensorRef {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Whether the elements lie row by row without gaps.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.elements() == 0
            || self.shape.iter().zip(&self.strides).rev().all(|(&n, &stride)| {
                let fits = n == 1 || stride == expected;
                expected *= n;
                fits
            })
    }

    /// Every element lies inside the storage, and all numbers fit.
    fn check(&self) -> Result<()> {
        if self.shape.len() != self.strides.len() {
            return Err(bad("a stride per dimension", format!("{:?}", self.strides)));
        }
        let count = self.shape.iter().try_fold(1_u64, |n, &d| n.checked_mul(d as u64));
        let bytes = count.and_then(|n| n.checked_mul(self.dtype.bytes));
        let last = self.shape.iter().zip(&self.strides).try_fold(self.offset, |at, (&n, &s)| {
            at.checked_add((n as u64).saturating_sub(1).checked_mul(s as u64)?)
        });
        let end = last.and_then(|l| l.checked_add(1)).and_then(|l| l.checked_mul(self.dtype.bytes));
        let (Some(count), Some(_), Some(end)) = (count, bytes, end) else {
            return Err(bad("a tensor that fits", format!("{:?}", self.shape)));
        };
        if count > 0 && end > self.storage.bytes {
            let found = format!("{end} bytes of {}", self.storage.bytes);
            return Err(bad("elements inside the storage", found));
        }
        Ok(())
    }
}
