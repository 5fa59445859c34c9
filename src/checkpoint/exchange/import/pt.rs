//! Files of `torch.save`: the pickle is read as recorded calls, and each tensor is a range of the
//! record with its storage. Legacy files have the storages behind one another.

use std::collections::HashMap;
use std::sync::Arc;

use drivetrain_formats as formats;
use formats::pickle::Pickle;
use formats::torch::{
    ArrayRef, HEAD_BYTES_MAX, Key, Leaves, NAMES, TensorRef, is_legacy, legacy, path_json,
    typed_json, zip,
};
use serde_json::{Value, json};

use super::bytes::Part;
use super::feed::{Span, TURNED_BYTES_MAX};
use super::{Found, file_in_store, state};
use crate::checkpoint::layout::Dtype;
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};
use crate::storage::{OpenOptions, ReadAt, StorageOptions};

/// Largest pickle inside an archive.
const PICKLE_BYTES_MAX: u64 = 1 << 30;
/// First read of a legacy file's head; doubled while it is too short.
const HEAD_BYTES: u64 = 1 << 20;
/// Name that a saved object without names gets.
const NAMELESS: &str = "value";
const AGAIN: &str = "copy the file again, or save it again";

/// Where the storages of a file are, by key: first byte and length.
pub type Storages = HashMap<String, (u64, u64)>;

/// Reads what a file holds.
pub async fn find(uri: &str, options: &StorageOptions, under: Option<&str>) -> Result<Found> {
    let (store, name) = file_in_store(uri, options)?;
    let file = store.open(&name, OpenOptions::default()).await?;
    let part = Part::whole(file.as_ref());
    let head = part.read(0, part.bytes.min(64)).await?;
    let (pickle, storages) = if head.starts_with(zip::MAGIC) {
        let archive = Archive::open(part).await?;
        (archive.pickle().await?, archive.storages().await?)
    } else if is_legacy(&head) {
        legacy_file(part).await?
    } else {
        let advice = "name the kind of checkpoint with --from";
        return Err(Error::corrupt(uri, 0, "a file of torch.save", "other bytes", advice));
    };
    found(&pickle, Arc::clone(&file), storages, under).map_err(|e| match e {
        Failed::Engine(error) => error,
        Failed::Format(source) => part.format(source),
    })
}

enum Failed {
    Engine(Error),
    Format(formats::Error),
}

fn found(
    pickle: &Pickle,
    file: Arc<dyn ReadAt>,
    storages: Storages,
    under: Option<&str>,
) -> Result<Found, Failed> {
    let named = is_named(pickle);
    let under = under.or(if named { None } else { Some(NAMELESS) });
    let prefix: Vec<Key> = under.map(|key| Key::Text(key.into())).into_iter().collect();
    let name = file.meta().path.clone();
    let found = Found { files: vec![file], ..Found::default() };
    let mut leaves = Tensors { found, storages, known: HashMap::new(), name, error: None };
    let text = typed_json(pickle.root(), &prefix, &mut leaves);
    if let Some(error) = leaves.error {
        return Err(Failed::Engine(error));
    }
    let text = text.map_err(Failed::Format)?;
    let mut found = leaves.found;
    found.state_json = match under {
        Some(key) => format!("{{{}:{text}}}", formats::torch::key_json(&Key::Text(key.into()))),
        // The names of a state are a plain dict.
        None => match text.strip_prefix("{\"~odict\":").and_then(|t| t.strip_suffix('}')) {
            Some(inner) => inner.to_string(),
            None => text,
        },
    };
    Ok(found)
}

/// Whether the saved object is a dict whose keys are names.
fn is_named(pickle: &Pickle) -> bool {
    use formats::pickle::View;
    let pairs = match pickle.root().view() {
        View::Dict(pairs) => pairs,
        View::Object(object) if object.name == ("collections", "OrderedDict") => object.pairs,
        _ => return false,
    };
    pairs.iter().all(|(key, _)| key.as_str().is_some_and(|key| !key.starts_with('~')))
}

/// Storage, offset, shape, strides and dtype.
type ViewOf = (String, u64, Vec<i64>, Vec<i64>, &'static str);

/// Collects tensors while the tree of values is written.
struct Tensors {
    found: Found,
    storages: Storages,
    /// The first path of each view of a storage.
    known: HashMap<ViewOf, Vec<Key>>,
    name: String,
    error: Option<Error>,
}

/// Stops the walk; the error itself is kept aside, since the walk knows only a format's errors.
fn stop() -> formats::Error {
    formats::Error::Unsupported { what: "a tensor".into() }
}

impl Leaves for Tensors {
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
}

impl Tensors {
    fn add(&mut self, path: &[Key], tensor: &TensorRef) -> Result<Value> {
        let mut node = state::tensor_node(tensor.dtype, &tensor.shape);
        let view = (
            tensor.storage.key.clone(),
            tensor.offset,
            tensor.shape.clone(),
            tensor.strides.clone(),
            tensor.dtype.torch,
        );
        if let Some(first) = self.known.get(&view) {
            let at: Value = serde_json::from_str(&path_json(first)).unwrap_or_default();
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

    fn span(&self, path: &str, tensor: &TensorRef) -> Result<Span> {
        let place = self.storages.get(&tensor.storage.key);
        let Some(&(start, bytes)) = place.filter(|&&(_, bytes)| bytes >= tensor.storage.bytes)
        else {
            let expected = format!("a storage of {} bytes", tensor.storage.bytes);
            let found = place.map_or("none".into(), |(_, bytes)| format!("{bytes} bytes"));
            let file = format!("{}, tensor {path}", self.name);
            return Err(Error::corrupt(file, 0, expected, found, AGAIN));
        };
        let element = tensor.dtype.bytes;
        let start = start + tensor.offset * element;
        if tensor.is_contiguous() {
            return Ok(Span::Range { file: 0, start });
        }
        let spanned = Span::turned_bytes(element, &tensor.shape, &tensor.strides);
        if spanned.max(tensor.elements() * element) > TURNED_BYTES_MAX.min(bytes.max(1) * 64) {
            return Err(Error::Unsupported {
                what: format!("the view {path} of {spanned} bytes that are not in order"),
                advice: "save it again after .contiguous()".into(),
            });
        }
        let (shape, strides) = (tensor.shape.clone(), tensor.strides.clone());
        Ok(Span::Turned { file: 0, start, element, shape, strides })
    }

    fn add_array(&mut self, path: &[Key], array: ArrayRef) -> Result<Value> {
        let dtype = Dtype::named(array.stored)?;
        let shown = path_json(path);
        let (whole, span) = (Rect::whole(&array.shape), Span::Inline(array.bytes));
        self.found.add(&shown, dtype, &array.shape, whole, span)?;
        self.found.tensors += 1;
        Ok(json!({"~tensor": {"dtype": array.stored, "shape": array.shape, "lib": "numpy"}}))
    }
}

/// A zip archive of `torch.save`.
pub struct Archive<'a> {
    part: Part<'a>,
    records: Vec<zip::Record>,
    /// Folder that all records are in.
    folder: String,
}

impl<'a> Archive<'a> {
    /// Reads the directory.
    pub async fn open(part: Part<'a>) -> Result<Self> {
        let tail_bytes = zip::TAIL_BYTES_MAX.min(part.bytes);
        let tail = part.read(part.bytes - tail_bytes, tail_bytes).await?;
        let directory = zip::directory(&tail, part.bytes).map_err(|e| part.format(e))?;
        let from = part.bytes - tail_bytes;
        let listed = if directory.offset >= from {
            let at = (directory.offset - from) as usize;
            tail.slice(at..at + directory.bytes as usize)
        } else {
            part.read(directory.offset, directory.bytes).await?
        };
        let records = zip::records(&listed, directory).map_err(|e| part.format(e))?;
        let pickle = records.iter().find(|r| r.name.ends_with("/data.pkl"));
        let folder = pickle.and_then(|r| r.name.strip_suffix("data.pkl")).map(String::from);
        let Some(folder) = folder else {
            let script = records.iter().any(|r| r.name.ends_with("constants.pkl"));
            let found = if script { "a TorchScript archive" } else { "none" };
            let expected = "a record data.pkl of torch.save";
            return Err(Error::corrupt(part.name(), part.start, expected, found, AGAIN));
        };
        let archive = Self { part, records, folder };
        archive.check_byte_order().await?;
        Ok(archive)
    }

    fn record(&self, name: &str) -> Option<&zip::Record> {
        self.records.iter().find(|r| r.name.strip_prefix(&self.folder) == Some(name))
    }

    async fn check_byte_order(&self) -> Result<()> {
        let Some(record) = self.record("byteorder") else { return Ok(()) };
        let (start, bytes) = self.place(record).await?;
        let order = self.part.read(start, bytes.min(16)).await?;
        if &order[..] == b"little" {
            return Ok(());
        }
        let what = format!("{} with byte order {:?}", self.part.name(), order);
        Err(Error::Unsupported { what, advice: "load and save it on this machine".into() })
    }

    /// Where a record's data is, relative to the archive.
    async fn place(&self, record: &zip::Record) -> Result<(u64, u64)> {
        let local = self.part.read(record.header, zip::LOCAL_BYTES).await?;
        let start = zip::data_start(&local, record).map_err(|e| self.part.format(e))?;
        let end = start.checked_add(record.bytes).filter(|&end| end <= self.part.bytes);
        if end.is_none() {
            let found = format!("{} bytes from {start}", record.bytes);
            let expected = "a record inside the archive";
            return Err(Error::corrupt(self.part.name(), start, expected, found, AGAIN));
        }
        Ok((start, record.bytes))
    }

    /// The pickle.
    pub async fn pickle(&self) -> Result<Pickle> {
        let record = self.record("data.pkl").filter(|r| r.bytes <= PICKLE_BYTES_MAX);
        let Some(record) = record else {
            let expected = format!("a pickle of at most {PICKLE_BYTES_MAX} bytes");
            return Err(Error::corrupt(self.part.name(), 0, expected, "a larger one", AGAIN));
        };
        let (start, bytes) = self.place(record).await?;
        let bytes = self.part.read(start, bytes).await?;
        let parsed = Pickle::parse_symbolic(&bytes, NAMES);
        parsed.map(|(pickle, _)| pickle).map_err(|e| self.part.format(e))
    }

    /// Where all storages are in the file.
    pub async fn storages(&self) -> Result<Storages> {
        let mut storages = Storages::new();
        for record in &self.records {
            let inside = record.name.strip_prefix(&self.folder);
            let Some(key) = inside.and_then(|name| name.strip_prefix("data/")) else { continue };
            let (start, bytes) = self.place(record).await?;
            storages.insert(key.to_string(), (self.part.start + start, bytes));
        }
        Ok(storages)
    }
}

async fn legacy_file(part: Part<'_>) -> Result<(Pickle, Storages)> {
    let mut want = HEAD_BYTES.min(part.bytes);
    let head = loop {
        let bytes = part.read(0, want).await?;
        match legacy(&bytes) {
            Err(formats::Error::Truncated { .. }) if want < part.bytes && want < HEAD_BYTES_MAX => {
                want = (want * 2).min(part.bytes);
            }
            other => break other.map_err(|e| part.format(e))?,
        }
    };
    let sizes = storage_sizes(&head.object);
    let mut storages = Storages::new();
    let mut at = head.storages;
    for key in head.keys {
        let count = part.read(at, 8).await?;
        let count = count.iter().rev().fold(0_u64, |n, &b| n << 8 | u64::from(b));
        let Some(&element) = sizes.get(&key) else {
            let expected = "a tensor for each storage";
            return Err(Error::corrupt(part.name(), at, expected, "one without", AGAIN));
        };
        let bytes = count.checked_mul(element);
        let end = bytes.and_then(|n| n.checked_add(at + 8)).filter(|&end| end <= part.bytes);
        let (Some(bytes), Some(end)) = (bytes, end) else {
            let found = format!("{count} elements of {element} bytes");
            return Err(Error::corrupt(part.name(), at, "a storage in the file", found, AGAIN));
        };
        storages.insert(key, (at + 8, bytes));
        at = end;
    }
    Ok((head.object, storages))
}

/// Bytes of an element of each storage that the object refers to.
fn storage_sizes(object: &Pickle) -> HashMap<String, u64> {
    let references = object.persistent().filter_map(formats::torch::storage_element);
    references.collect()
}
