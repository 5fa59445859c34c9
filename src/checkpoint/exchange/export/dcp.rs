//! A folder of torch.distributed.checkpoint, as its own file-system writer lays it out: archives of
//! `torch.save` one behind another in `__0_0.distcp`, and `.metadata`, which is a pickle because
//! that is what torch reads. It comes last: without it there is no checkpoint.

use drivetrain_formats as formats;
use formats::torch::{PickleWriter, TensorPickles, ZipWriter, decode_key, is_tag, tensor_pickle};
use serde_json::Value;

use super::ordered::{Files, Ordered};
use super::out::Out;
use super::pt::{record, tensor_record};
use super::tensors::{Named, named};
use super::{Converted, Progress, Source};
use crate::error::{Error, Result};
use crate::storage::{StorageOptions, open_store};

const METADATA: &str = ".metadata";
const DATA: &str = "__0_0.distcp";
/// Version of the metadata.
const VERSION: &str = "1.0.0";
const CLASSES: &str = "torch.distributed.checkpoint.metadata";
/// Containers inside containers.
const DEPTH_MAX: usize = 160;

/// A name of the flattened state.
struct Item {
    name: String,
    keys: Vec<Value>,
    /// Torch's dtype and the shape; none for a value that is no tensor.
    tensor: Option<(&'static str, Vec<i64>)>,
    offset: u64,
    bytes: u64,
}

/// Writes the state as a folder that `dcp.load` reads.
pub async fn write(
    source: &Source,
    target: &str,
    storage: &StorageOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    let store = open_store(target, storage)?;
    let tensors = named(source)?;
    let mut leaves = Vec::new();
    flatten(&source.state, &mut Vec::new(), &mut leaves)?;
    let sizes = tensors.iter().map(|t| Ok(t.find(source)?.bytes));
    let bytes = sizes.collect::<Result<Vec<u64>>>()?.iter().sum();
    progress(Progress::Total(bytes));
    let mut out = Out::create(&store, DATA).await?;
    let items = match data(&mut out, source, &tensors, leaves, progress).await {
        Ok(items) => items,
        Err(error) => {
            out.abort().await;
            return Err(error);
        }
    };
    out.finish().await?;
    let mut out = Out::create(&store, METADATA).await?;
    out.bytes(metadata(&items)).await?;
    out.finish().await?;
    store.sync_dir("").await?;
    let count = items.iter().filter(|i| i.tensor.is_some()).count();
    Ok(Converted { tensors: count, bytes, ..Converted::default() })
}

/// Leaves of the state as the usual planner finds them: dicts are taken apart, and lists that hold
/// a dict or a tensor.
fn flatten<'a>(
    node: &'a Value,
    keys: &mut Vec<Value>,
    found: &mut Vec<(Vec<Value>, &'a Value)>,
) -> Result<()> {
    if keys.len() > DEPTH_MAX {
        return Err(Error::invalid("state", "fewer containers inside containers", DEPTH_MAX));
    }
    if let Some(items) = node.as_array().filter(|_| !is_leaf(node, 0)) {
        for (i, item) in items.iter().enumerate() {
            keys.push(i.into());
            flatten(item, keys, found)?;
            keys.pop();
        }
        return Ok(());
    }
    let Some(map) = dict_of(node) else {
        found.push((keys.clone(), node));
        return Ok(());
    };
    for (key, value) in map.iter().filter(|(_, v)| v.get("~rank").is_none()) {
        let inner = |source| Error::Format { file: "state".into(), source: Box::new(source) };
        let key = decode_key(key).map_err(inner)?;
        // The planner makes text of every key of a dict.
        keys.push(key.as_str().map_or_else(|| key.to_string(), String::from).into());
        flatten(value, keys, found)?;
        keys.pop();
    }
    Ok(())
}

/// The dict that a node is, of whatever class.
fn dict_of(node: &Value) -> Option<&serde_json::Map<String, Value>> {
    let map = node.as_object()?;
    match map.iter().next().filter(|(key, _)| map.len() == 1 && is_tag(key)) {
        None => Some(map),
        Some((tag, inner)) if matches!(tag.as_str(), "~odict" | "~counter") => inner.as_object(),
        Some((tag, inner)) if tag == "~ddict" => inner.get(1)?.as_object(),
        Some(_) => None,
    }
}

fn is_leaf(node: &Value, depth: usize) -> bool {
    match node.as_array() {
        Some(items) if depth < DEPTH_MAX => items.iter().all(|item| is_leaf(item, depth + 1)),
        Some(_) => true,
        None => dict_of(node).is_none() && node.get("~tensor").is_none(),
    }
}

async fn data(
    out: &mut Out,
    source: &Source,
    tensors: &[Named],
    leaves: Vec<(Vec<Value>, &Value)>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Vec<Item>> {
    let mut files = Files::new(source);
    let mut order = tensors.iter();
    let mut items = Vec::with_capacity(leaves.len());
    for (keys, node) in leaves {
        let offset = out.at;
        let text = |key: &Value| key.as_str().map_or_else(|| key.to_string(), String::from);
        let name = keys.iter().map(text).collect::<Vec<_>>().join(".");
        let mut tensor = None;
        if node.get("~tensor").is_some() {
            let Some(next) = order.by_ref().find(|t| t.node == node["~tensor"] && t.name() == name)
            else {
                return Err(Error::invalid("state", "tensors in one order", name));
            };
            tensor = append_tensor(out, &mut files, source, next, progress).await?;
        } else {
            append_value(out, &name, node).await?;
        }
        items.push(Item { name, keys, tensor, offset, bytes: out.at - offset });
    }
    Ok(items)
}

async fn append_tensor<'a>(
    out: &mut Out,
    files: &mut Files<'a>,
    source: &'a Source,
    tensor: &Named,
    progress: &mut dyn FnMut(Progress),
) -> Result<Option<(&'static str, Vec<i64>)>> {
    let found = tensor.find(source)?;
    let mut ordered = Ordered::new(files, found.path, found.chunks).await?;
    if tensor.node.get("foreign_pickle").is_some() {
        // The bytes are an archive already.
        out.tensor(&mut ordered, found.bytes, progress).await?;
        return Ok(None);
    }
    let (dtype, shape) = (tensor.torch_dtype()?, tensor.shape());
    let mut pickle = PickleWriter::default();
    let inner = |source| Error::Format { file: tensor.name(), source: Box::new(source) };
    tensor_pickle(&mut pickle, dtype, &shape, "0", false).map_err(inner)?;
    let mut zip = ZipWriter::default();
    record(out, &mut zip, "archive/data.pkl", pickle.finish()).await?;
    record(out, &mut zip, "archive/byteorder", b"little".to_vec()).await?;
    let elements = (&mut ordered, found.bytes);
    tensor_record(out, &mut zip, "archive/data/0", elements, progress).await?;
    record(out, &mut zip, "archive/version", b"3\n".to_vec()).await?;
    out.bytes(zip.finish()).await?;
    Ok(Some((dtype, shape)))
}

/// For values that hold no tensors.
struct NoTensors;

impl TensorPickles for NoTensors {
    fn tensor(&mut self, _: &mut PickleWriter, _: &[Value], _: &Value) -> formats::Result<()> {
        Err(formats::Error::Unsupported { what: "a tensor inside a tuple".into() })
    }
}

async fn append_value(out: &mut Out, name: &str, node: &Value) -> Result<()> {
    let mut pickle = PickleWriter::default();
    let written = pickle.value(node, &mut Vec::new(), &mut NoTensors);
    written.map_err(|e| Error::Format { file: name.into(), source: Box::new(e) })?;
    let mut zip = ZipWriter::default();
    record(out, &mut zip, "archive/data.pkl", pickle.finish()).await?;
    record(out, &mut zip, "archive/byteorder", b"little".to_vec()).await?;
    record(out, &mut zip, "archive/version", b"3\n".to_vec()).await?;
    out.bytes(zip.finish()).await
}

/// An object of a class, before its state.
fn object(out: &mut PickleWriter, module: &str, class: &str) {
    out.name(module, class);
    out.op(b")\x81");
}

fn metadata(items: &[Item]) -> Vec<u8> {
    let mut out = PickleWriter::default();
    object(&mut out, CLASSES, "Metadata");
    out.op(b"}(");
    out.text("state_dict_metadata");
    out.op(b"}(");
    for item in items {
        out.text(&item.name);
        if let Some((dtype, shape)) = &item.tensor {
            tensor_metadata(&mut out, dtype, shape);
        } else {
            object(&mut out, CLASSES, "BytesStorageMetadata");
            out.op(b"}b");
        }
    }
    out.op(b"u");
    out.text("planner_data");
    out.op(b"}(");
    for item in items {
        out.text(&item.name);
        out.op(b"(");
        for key in &item.keys {
            match key.as_str() {
                Some(text) => out.text(text),
                None => out.int(key.as_i64().unwrap_or_default()),
            }
        }
        out.op(b"t");
    }
    out.op(b"u");
    out.text("storage_data");
    out.op(b"}(");
    for item in items {
        place(&mut out, item);
    }
    out.op(b"u");
    out.text("storage_meta");
    out.op(b"N");
    out.text("version");
    out.text(VERSION);
    out.op(b"ub");
    out.finish()
}

fn tensor_metadata(out: &mut PickleWriter, dtype: &str, shape: &[i64]) {
    object(out, CLASSES, "TensorStorageMetadata");
    out.op(b"}(");
    out.text("properties");
    object(out, CLASSES, "TensorProperties");
    out.op(b"(");
    out.name("torch", dtype);
    out.name("torch.serialization", "_get_layout");
    out.text("torch.strided");
    out.op(b"\x85R");
    out.truth(false);
    out.name(CLASSES, "_MEM_FORMAT_ENCODING");
    out.int(0);
    out.op(b"\x85R");
    out.truth(false);
    out.op(b"Ntb");
    out.text("size");
    out.torch_size(shape);
    out.text("chunks");
    out.op(b"](");
    object(out, CLASSES, "ChunkStorageMetadata");
    out.op(b"}(");
    out.text("offsets");
    out.torch_size(&vec![0; shape.len()]);
    out.text("sizes");
    out.torch_size(shape);
    out.op(b"ubeub");
}

fn place(out: &mut PickleWriter, item: &Item) {
    object(out, CLASSES, "MetadataIndex");
    out.op(b"}(");
    out.text("fqn");
    out.text(&item.name);
    out.text("offset");
    match &item.tensor {
        Some((_, shape)) => out.torch_size(&vec![0; shape.len()]),
        None => out.op(b"N"),
    }
    out.text("index");
    match &item.tensor {
        Some(_) => out.int(0),
        None => out.op(b"N"),
    }
    out.op(b"ub");
    object(out, "torch.distributed.checkpoint.filesystem", "_StorageInfo");
    out.op(b"}(");
    out.text("relative_path");
    out.text(DATA);
    out.text("offset");
    out.int(item.offset as i64);
    out.text("length");
    out.int(item.bytes as i64);
    out.text("transform_descriptors");
    out.op(b"Nub");
}
