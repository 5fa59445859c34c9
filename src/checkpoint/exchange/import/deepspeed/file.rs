//! One of the folder's files, read as recorded calls, and how its values are looked up.

use std::sync::Arc;

use drivetrain_formats::pickle::{Pairs, Pickle, Value, View};
use drivetrain_formats::torch::{Stored, TensorRef, tensor_of};

use super::folder::Files;
use crate::checkpoint::exchange::import::Found;
use crate::checkpoint::exchange::import::archive::read_torch;
use crate::checkpoint::exchange::import::bytes::Part;
use crate::checkpoint::exchange::import::tensors::Tensors;
use crate::error::{Error, Result};
use crate::storage::ReadAt;

const AGAIN: &str = "copy the file again, or use an older checkpoint";

/// Elements that lie together in a file.
#[derive(Debug, Clone, Copy)]
pub struct Vector {
    /// Number of the file.
    pub file: usize,
    /// First byte.
    pub start: u64,
    /// Elements.
    pub len: u64,
    /// Their type.
    pub dtype: Stored,
}

/// An open file. Its pickle lies beside it, since values borrow from it.
pub struct File<'f> {
    source: Arc<dyn ReadAt>,
    /// Number among the found files.
    number: usize,
    /// What becomes of its tensors.
    pub tensors: Tensors<'f>,
}

impl<'f> File<'f> {
    /// Opens and parses a file.
    pub async fn open(files: &Files, name: &str, found: &'f mut Found) -> Result<(Self, Pickle)> {
        let source = files.open(name).await?;
        let (pickle, storages) = read_torch(Part::whole(source.as_ref())).await?;
        found.files.push(Arc::clone(&source));
        let number = found.files.len() - 1;
        let tensors = Tensors::of_last_file(found, storages).showing_objects();
        Ok((Self { source, number, tensors }, pickle))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.source.meta().path
    }

    /// The error that the file is not what it must be.
    pub fn bad(&self, expected: impl ToString, found: impl ToString) -> Error {
        Error::corrupt(self.name(), 0, expected.to_string(), found.to_string(), AGAIN)
    }

    /// The value of a key that must be there.
    pub fn need<'a>(&self, value: Value<'a>, key: &str) -> Result<Value<'a>> {
        get(value, key).ok_or_else(|| self.bad(format!("{key:?} of a ZeRO checkpoint"), "none"))
    }

    /// The values of a list that must be there.
    pub fn items<'a>(&self, value: Value<'a>, what: &str) -> Result<Vec<Value<'a>>> {
        let items =
            value.items().ok_or_else(|| self.bad(format!("a list {what}"), value.kind()))?;
        Ok(items.collect())
    }

    /// The keys and values of a dict that must be there; keys are names.
    pub fn names<'a>(&self, value: Value<'a>, what: &str) -> Result<Vec<(&'a str, Value<'a>)>> {
        let bad = |found: &str| self.bad(format!("a dict of names {what}"), found);
        let pairs = entries(value).ok_or_else(|| bad(value.kind()))?;
        pairs.iter().map(|(k, v)| Ok((k.as_str().ok_or_else(|| bad(k.kind()))?, v))).collect()
    }

    /// The tensor that a value is.
    pub fn tensor(&self, value: Value<'_>) -> Result<Option<TensorRef>> {
        match value.view() {
            View::Object(object) => {
                tensor_of(&object).map_err(|e| Part::whole(self.source.as_ref()).format(e))
            }
            _ => Ok(None),
        }
    }

    /// The elements of a tensor in order.
    pub fn vector(&self, what: &str, tensor: &TensorRef) -> Result<Vector> {
        if !tensor.is_contiguous() {
            return Err(self.bad(format!("{what} in order"), format!("{:?}", tensor.strides)));
        }
        let (start, _) = self.tensors.place(what, tensor)?;
        let (file, len, dtype) = (self.number, tensor.elements(), tensor.dtype);
        Ok(Vector { file, start, len, dtype })
    }

    /// The bytes of a small tensor.
    pub async fn bytes(&self, vector: &Vector) -> Result<Vec<u8>> {
        let part = Part::whole(self.source.as_ref());
        Ok(part.read(vector.start, vector.len * vector.dtype.bytes).await?.to_vec())
    }
}

/// Keys and values of a dict or an ordered dict.
pub fn entries(value: Value<'_>) -> Option<Pairs<'_>> {
    match value.view() {
        View::Dict(pairs) => Some(pairs),
        View::Object(object) if object.name == ("collections", "OrderedDict") => Some(object.pairs),
        _ => None,
    }
}

/// Value of a text key; the last of equal keys wins, as in Python. None counts as no value.
pub fn get<'a>(value: Value<'a>, key: &str) -> Option<Value<'a>> {
    let found = entries(value)?.iter().filter(|(k, _)| k.as_str() == Some(key)).last();
    found.map(|(_, value)| value).filter(|value| !value.is_none())
}

/// A count from 0 up.
pub fn count(value: Value<'_>) -> Option<u64> {
    u64::try_from(value.as_i64()?).ok()
}

/// The sizes of a shape: a `torch.Size`, a tuple or a list.
pub fn shape(value: Value<'_>) -> Option<Vec<i64>> {
    let sizes = match value.view() {
        View::Tuple(all) | View::List(all) => all,
        View::Object(size) if size.name == ("torch", "Size") => {
            match size.arguments.get(0)?.view() {
                View::Tuple(all) | View::List(all) => all,
                _ => return None,
            }
        }
        _ => return None,
    };
    sizes.iter().map(|size| size.as_i64().filter(|&n| n >= 0)).collect()
}
