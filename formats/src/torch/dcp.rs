//! `.metadata` of a torch.distributed.checkpoint folder: which tensors there are, and in which
//! range of which file each of their chunks is stored as a `torch.save` archive of its own.

use std::collections::HashMap;

use super::dtype::{Stored, stored};
use super::names::NAMES;
use super::typed::{Key, NoTensors, typed_json};
use crate::error::{Error, Result};
use crate::pickle::{Object, Pickle, Sequence, Value, View};

/// Largest file of metadata: some hundred bytes per chunk.
pub const METADATA_BYTES_MAX: u64 = 4 << 30;

/// A range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// File name, relative to the folder.
    pub file: String,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A rectangle of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DcpChunk {
    /// First element per dimension.
    pub offsets: Vec<i64>,
    /// Elements per dimension.
    pub sizes: Vec<i64>,
    /// Its archive.
    pub place: Place,
}

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DcpItem {
    /// An archive of any value.
    Bytes(Place),
    /// A tensor in chunks.
    Tensor {
        /// Element type.
        dtype: Stored,
        /// Shape of the whole, in elements.
        shape: Vec<i64>,
        /// Whether it was a parameter that learns.
        requires_grad: bool,
        /// Its chunks.
        chunks: Vec<DcpChunk>,
    },
}

/// What the metadata says.
#[derive(Debug)]
pub struct DcpMetadata {
    /// Names in order.
    pub items: Vec<(String, DcpItem)>,
    /// The planner's data as typed JSON; for the usual planner, where each name lay in the state.
    pub planner_json: String,
    /// The same, if it has that form.
    pub paths: HashMap<String, Vec<Key>>,
    /// Version, if given.
    pub version: Option<String>,
}

fn bad(expected: &str, found: impl std::fmt::Display) -> Error {
    Error::Malformed {
        what: "checkpoint metadata",
        offset: 0,
        expected: expected.into(),
        found: found.to_string(),
    }
}

type Places = HashMap<(String, Option<Vec<i64>>), Place>;

/// Reads the bytes of `.metadata`.
pub fn dcp_metadata(bytes: &[u8]) -> Result<DcpMetadata> {
    let (pickle, _) = Pickle::parse_symbolic(bytes, NAMES)?;
    let root = pickle.root();
    class(root, "Metadata")?;
    let places = places(field(root, "storage_data")?)?;
    let View::Dict(named) = field(root, "state_dict_metadata")?.view() else {
        return Err(bad("a dict of names", "another value"));
    };
    let mut items = Vec::with_capacity(named.len());
    for (name, value) in named.iter() {
        let name = text(name)?;
        let item = item(&name, value, &places)?;
        items.push((name, item));
    }
    let planner = root.field("planner_data");
    let planner_json = match planner {
        Some(value) => typed_json(value, &[], &mut NoTensors)?,
        None => "null".into(),
    };
    let version = root.field("version").and_then(Value::as_str).map(String::from);
    let paths = planner.and_then(paths_of).unwrap_or_default();
    Ok(DcpMetadata { items, planner_json, paths, version })
}

fn class<'a>(value: Value<'a>, name: &str) -> Result<Object<'a>> {
    match value.view() {
        View::Object(object) if object.name.1 == name => Ok(object),
        View::Object(object) => Err(bad(&format!("a {name}"), object.name.1)),
        _ => Err(bad(&format!("a {name}"), value.kind())),
    }
}

fn field<'a>(value: Value<'a>, name: &str) -> Result<Value<'a>> {
    value.field(name).ok_or_else(|| bad(&format!("a field {name}"), "none"))
}

fn text(value: Value<'_>) -> Result<String> {
    value.as_str().map(String::from).ok_or_else(|| bad("text", value.kind()))
}

fn number(value: Value<'_>) -> Result<u64> {
    let number = value.as_i64().and_then(|n| u64::try_from(n).ok());
    number.ok_or_else(|| bad("a number from 0 up", value.kind()))
}

/// Numbers of a `torch.Size`.
fn size(value: Value<'_>) -> Result<Vec<i64>> {
    let object = class(value, "Size")?;
    let Some(View::Tuple(numbers)) = object.arguments.get(0).map(Value::view) else {
        return Err(bad("a tuple of sizes", "another value"));
    };
    let all: Option<Vec<_>> = numbers.iter().map(|n| n.as_i64().filter(|&n| n >= 0)).collect();
    all.ok_or_else(|| bad("sizes from 0 up", "others"))
}

fn places(value: Value<'_>) -> Result<Places> {
    let View::Dict(pairs) = value.view() else {
        return Err(bad("a dict of storage places", value.kind()));
    };
    let mut places = Places::with_capacity(pairs.len());
    for (index, info) in pairs.iter() {
        class(index, "MetadataIndex")?;
        class(info, "_StorageInfo")?;
        let name = text(field(index, "fqn")?)?;
        let offset = match index.field("offset") {
            Some(value) if !value.is_none() => Some(size(value)?),
            _ => None,
        };
        if let Some(steps) = info.field("transform_descriptors")
            && steps.items().is_some_and(|steps| steps.len() > 0)
        {
            return Err(Error::Unsupported { what: format!("the transformed item {name}") });
        }
        let place = Place {
            file: text(field(info, "relative_path")?)?,
            offset: number(field(info, "offset")?)?,
            bytes: number(field(info, "length")?)?,
        };
        places.insert((name, offset), place);
    }
    Ok(places)
}

fn item(name: &str, value: Value<'_>, places: &Places) -> Result<DcpItem> {
    let View::Object(object) = value.view() else {
        return Err(bad("metadata of a value", value.kind()));
    };
    let nowhere = || bad("a storage place", format!("none for {name}"));
    if object.name.1 == "BytesStorageMetadata" {
        let place = places.get(&(name.to_string(), None)).ok_or_else(nowhere)?;
        return Ok(DcpItem::Bytes(place.clone()));
    }
    class(value, "TensorStorageMetadata")?;
    let properties = class(field(value, "properties")?, "TensorProperties")?;
    let (dtype, requires_grad) = properties_of(&properties)?;
    let shape = size(field(value, "size")?)?;
    let list = field(value, "chunks")?;
    let View::List(list) = list.view() else { return Err(bad("a list of chunks", list.kind())) };
    let chunks = list.iter().map(|chunk| {
        class(chunk, "ChunkStorageMetadata")?;
        let (offsets, sizes) = (size(field(chunk, "offsets")?)?, size(field(chunk, "sizes")?)?);
        let place = places.get(&(name.to_string(), Some(offsets.clone())));
        Ok(DcpChunk { offsets, sizes, place: place.ok_or_else(nowhere)?.clone() })
    });
    let chunks = chunks.collect::<Result<_>>()?;
    Ok(DcpItem::Tensor { dtype, shape, requires_grad, chunks })
}

/// A tuple (dtype, layout, requires grad, memory format, …), or a dict in files before torch 2.
fn properties_of(object: &Object<'_>) -> Result<(Stored, bool)> {
    let state = object.state.ok_or_else(|| bad("properties with a state", "none"))?;
    let (dtype, learns) = match state.view() {
        View::Tuple(state) => (state.get(0), state.get(2)),
        _ => (state.get("dtype"), state.get("requires_grad")),
    };
    let Some(View::Name("torch", name)) = dtype.map(Value::view) else {
        return Err(bad("a dtype", "another value"));
    };
    let dtype = stored(name).ok_or_else(|| bad("a known dtype", name))?;
    Ok((dtype, learns.and_then(Value::as_i64) == Some(1)))
}

/// Name to keys, as the usual planner flattens.
fn paths_of(planner: Value<'_>) -> Option<HashMap<String, Vec<Key>>> {
    let View::Dict(pairs) = planner.view() else { return None };
    let keys = |keys: Sequence<'_>| -> Option<Vec<Key>> {
        keys.iter()
            .map(|key| match key.view() {
                View::Text(text) => Some(Key::Text(text.into())),
                View::Int(number) => Some(Key::Number(number)),
                _ => None,
            })
            .collect()
    };
    pairs
        .iter()
        .map(|(name, path)| match path.view() {
            View::Tuple(path) if !path.is_empty() => Some((name.as_str()?.into(), keys(path)?)),
            _ => None,
        })
        .collect()
}
