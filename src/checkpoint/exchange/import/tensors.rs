//! What stands for the tensors of a pickle: each becomes a piece to be written, whose bytes are a
//! range of the file; the same view of the same storage is written once.

use std::collections::HashMap;

use drivetrain_formats as formats;
use formats::pickle::Value;
use formats::torch::{ArrayRef, Key, Leaves, TensorRef, path_json, typed_json};
use serde_json::{Value as Json, json};

use super::archive::Storages;
use super::feed::{Span, TURNED_BYTES_MAX};
use super::{Found, state};
use crate::checkpoint::layout::Dtype;
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};

const AGAIN: &str = "copy the file again, or save it again";

/// Storage, offset, shape, strides and dtype.
type ViewOf = (String, u64, Vec<i64>, Vec<i64>, &'static str);

/// Collects the tensors of one file while trees of values are written.
pub struct Tensors<'f> {
    /// What was found so far.
    pub found: &'f mut Found,
    /// Where the storages are.
    storages: Storages,
    /// Number and name of the file.
    file: (usize, String),
    /// The first path of each view of a storage.
    known: HashMap<ViewOf, Vec<Key>>,
    /// Whether objects of other classes are written as their names, arguments and state.
    shows_objects: bool,
    error: Option<Error>,
}

/// Stops the walk; the error itself is kept aside, since the walk knows only a format's errors.
fn stop() -> formats::Error {
    formats::Error::Unsupported { what: "a tensor".into() }
}

impl Leaves for Tensors<'_> {
    fn tensor(&mut self, path: &[Key], tensor: &TensorRef) -> formats::Result<String> {
        self.add(path, tensor).map(|node| node.to_string()).map_err(|error| {
            self.error = Some(error);
            stop()
        })
    }

    fn array(&mut self, path: &[Key], array: ArrayRef) -> formats::Result<String> {
        self.add_array(path, array).map(|node| node.to_string()).map_err(|error| {
            self.error = Some(error);
            stop()
        })
    }

    fn shows_objects(&self) -> bool {
        self.shows_objects
    }
}

impl<'f> Tensors<'f> {
    /// For the last of the files in `found`.
    pub fn of_last_file(found: &'f mut Found, storages: Storages) -> Self {
        let number = found.files.len().saturating_sub(1);
        let name = found.files.last().map(|f| f.meta().path.clone()).unwrap_or_default();
        let known = HashMap::new();
        Self { found, storages, file: (number, name), known, shows_objects: false, error: None }
    }

    /// Also writes objects that have no form of their own.
    pub fn showing_objects(self) -> Self {
        Self { shows_objects: true, ..self }
    }

    /// The value as typed JSON, whose tensors have paths from `prefix` on. After an error nothing
    /// of the value is left.
    pub fn json(&mut self, value: Value<'_>, prefix: &[Key]) -> Result<String> {
        let before = (self.found.pieces.len(), self.found.tensors);
        let text = typed_json(value, prefix, self);
        let failed = match (self.error.take(), text) {
            (None, Ok(text)) => return Ok(text),
            (Some(error), _) => error,
            (None, Err(source)) => {
                Error::Format { file: self.file.1.clone(), source: Box::new(source) }
            }
        };
        self.found.pieces.truncate(before.0);
        self.found.spans.truncate(before.0);
        self.found.tensors = before.1;
        self.known.retain(|_, path| !path.starts_with(prefix));
        Err(failed)
    }

    fn add(&mut self, path: &[Key], tensor: &TensorRef) -> Result<Json> {
        let mut node = state::tensor_node(tensor.dtype, &tensor.shape);
        let view = (
            tensor.storage.key.clone(),
            tensor.offset,
            tensor.shape.clone(),
            tensor.strides.clone(),
            tensor.dtype.torch,
        );
        if let Some(first) = self.known.get(&view) {
            let at: Json = serde_json::from_str(&path_json(first)).unwrap_or_default();
            node["~tensor"]["at"] = at;
            return Ok(node);
        }
        self.known.insert(view, path.to_vec());
        let shown = path_json(path);
        let span = self.span(&shown, tensor)?;
        let (dtype, more) = state::stored_dtype(tensor.dtype)?;
        let shape: Vec<i64> = tensor.shape.iter().copied().chain(more).collect();
        self.found.add(&shown, dtype, &shape, Rect::whole(&shape), span)?;
        self.found.tensors += 1;
        Ok(node)
    }

    /// The byte of the file where a tensor's first element is, and the bytes of its storage.
    pub fn place(&self, path: &str, tensor: &TensorRef) -> Result<(u64, u64)> {
        let place = self.storages.get(&tensor.storage.key);
        let Some(&(start, bytes)) = place.filter(|&&(_, bytes)| bytes >= tensor.storage.bytes)
        else {
            let expected = format!("a storage of {} bytes", tensor.storage.bytes);
            let found = place.map_or("none".into(), |(_, bytes)| format!("{bytes} bytes"));
            let file = format!("{}, tensor {path}", self.file.1);
            return Err(Error::corrupt(file, 0, expected, found, AGAIN));
        };
        Ok((start + tensor.offset * tensor.dtype.bytes, bytes))
    }

    fn span(&self, path: &str, tensor: &TensorRef) -> Result<Span> {
        let (start, bytes) = self.place(path, tensor)?;
        let (file, element) = (self.file.0, tensor.dtype.bytes);
        if tensor.is_contiguous() {
            return Ok(Span::Range { file, start });
        }
        let spanned = Span::turned_bytes(element, &tensor.shape, &tensor.strides);
        if spanned.max(tensor.elements() * element) > TURNED_BYTES_MAX.min(bytes.max(1) * 64) {
            return Err(Error::Unsupported {
                what: format!("the view {path} of {spanned} bytes that are not in order"),
                advice: "save it again after .contiguous()".into(),
            });
        }
        let (shape, strides) = (tensor.shape.clone(), tensor.strides.clone());
        Ok(Span::Turned { file, start, element, shape, strides })
    }

    fn add_array(&mut self, path: &[Key], array: ArrayRef) -> Result<Json> {
        let dtype = Dtype::named(array.stored)?;
        let shown = path_json(path);
        let (whole, span) = (Rect::whole(&array.shape), Span::Inline(array.bytes));
        self.found.add(&shown, dtype, &array.shape, whole, span)?;
        self.found.tensors += 1;
        Ok(json!({"~tensor": {"dtype": array.stored, "shape": array.shape, "lib": "numpy"}}))
    }
}
