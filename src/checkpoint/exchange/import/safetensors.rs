//! safetensors files: a header of JSON, then the tensors without gaps. Many of them have an index
//! that says which file holds which name.

use std::collections::BTreeSet;
use std::sync::Arc;

use drivetrain_formats::torch::{Key, path_json};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::bytes::Part;
use super::feed::Span;
use super::{Found, file_in_store, state};
use crate::checkpoint::layout::{Dtype, check_relative, shape_bytes};
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};
use crate::storage::{OpenOptions, StorageOptions, Store, open_store};

/// How index files end.
pub const INDEX_END: &str = ".safetensors.index.json";
/// The format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Largest index.
const INDEX_BYTES_MAX: u64 = 1 << 30;
const AGAIN: &str = "copy the file again";

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: Value,
    weight_map: Map<String, Value>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<i64>,
    data_offsets: [u64; 2],
}

/// Reads what the files hold.
pub async fn find(uri: &str, options: &StorageOptions, under: Option<&str>) -> Result<Found> {
    let (store, files, index) = files(uri, options).await?;
    let mut found = Found::default();
    let mut tree = Map::new();
    let mut notes = Map::new();
    for name in &files {
        let file = store.open(name, OpenOptions::default()).await?;
        let part = Part::whole(file.as_ref());
        let (header, data) = header(&part).await?;
        let number = found.files.len();
        let mut end = 0;
        for (entry, body) in entries(&part, header, &mut notes)? {
            if index.as_ref().is_some_and(|i| i.weight_map.get(&entry) != Some(&json!(name))) {
                let expected = format!("tensor {entry} in the file the index names");
                return Err(Error::corrupt(part.name(), 8, expected, "it here", AGAIN));
            }
            end = check(&part, &entry, &body, end, part.bytes - data)?;
            add(&mut found, &mut tree, under, &entry, &body, (number, data))?;
        }
        if end != part.bytes - data {
            let found = format!("{} bytes after the last", part.bytes - data - end);
            return Err(Error::corrupt(part.name(), data + end, "the end", found, AGAIN));
        }
        found.files.push(Arc::clone(&file));
    }
    if let Some(index) = index {
        check_all_there(&index, found.tensors, uri)?;
        notes.insert("index".into(), index.metadata);
    }
    if !notes.is_empty() {
        // As text, since it is not ours and may hold keys that mean something to us.
        tree.insert("~safetensors".into(), Value::from(Value::Object(notes).to_string()));
    }
    found.state_json = Value::Object(tree).to_string();
    Ok(found)
}

/// The store, the names of the files, and the index if there is one.
async fn files(
    uri: &str,
    options: &StorageOptions,
) -> Result<(Arc<dyn Store>, BTreeSet<String>, Option<Index>)> {
    if uri.ends_with(".safetensors") {
        let (store, name) = file_in_store(uri, options)?;
        return Ok((store, BTreeSet::from([name]), None));
    }
    let (store, name) = if uri.ends_with(INDEX_END) {
        let (store, name) = file_in_store(uri, options)?;
        (store, Some(name))
    } else {
        let store = open_store(uri, options)?;
        let names = store.list_names("").await?;
        let index = names.iter().find(|n| n.ends_with(INDEX_END)).cloned();
        if index.is_none() {
            let files: BTreeSet<_> =
                names.into_iter().filter(|n| n.ends_with(".safetensors")).collect();
            return Ok((store, files, None));
        }
        (store, index)
    };
    let name = name.unwrap_or_default();
    let file = store.open(&name, OpenOptions::default()).await?;
    let part = Part::whole(file.as_ref());
    let text = part.read(0, part.bytes.min(INDEX_BYTES_MAX)).await?;
    let index: Index = serde_json::from_slice(&text)
        .map_err(|e| Error::corrupt(part.name(), 0, "an index of safetensors files", e, AGAIN))?;
    let mut files = BTreeSet::new();
    for file in index.weight_map.values() {
        let file = file.as_str().unwrap_or_default();
        check_relative(file, part.name())?;
        files.insert(file.to_string());
    }
    Ok((store, files, Some(index)))
}

async fn header(part: &Part<'_>) -> Result<(Map<String, Value>, u64)> {
    let length = part.read(0, 8).await?;
    let length = length.iter().rev().fold(0_u64, |n, &b| n << 8 | u64::from(b));
    if length > HEADER_BYTES_MAX || length > part.bytes - 8 {
        let expected = "a header inside the file, of at most 100 MB";
        return Err(Error::corrupt(part.name(), 0, expected, format!("{length} bytes"), AGAIN));
    }
    let text = part.read(8, length).await?;
    let header = serde_json::from_slice(&text)
        .map_err(|e| Error::corrupt(part.name(), 8, "a header of JSON", e, AGAIN))?;
    Ok((header, 8 + length))
}

/// The entries by offset; the file's own notes go aside.
fn entries(
    part: &Part<'_>,
    header: Map<String, Value>,
    notes: &mut Map<String, Value>,
) -> Result<Vec<(String, Entry)>> {
    let mut entries = Vec::new();
    for (name, body) in header {
        if name == "__metadata__" {
            notes.insert(part.name().into(), body);
            continue;
        }
        let entry: Entry = serde_json::from_value(body).map_err(|e| {
            Error::corrupt(part.name(), 8, format!("an entry for {name}"), e, AGAIN)
        })?;
        entries.push((name, entry));
    }
    entries.sort_by_key(|(_, e)| (e.data_offsets[0], e.data_offsets[1]));
    Ok(entries)
}

/// An entry starts where the one before ends, and has the bytes of its shape.
fn check(part: &Part<'_>, name: &str, entry: &Entry, end: u64, data_bytes: u64) -> Result<u64> {
    let bad = |expected: &str, found: String| {
        Err(Error::corrupt(format!("{}, tensor {name}", part.name()), end, expected, found, AGAIN))
    };
    let [from, to] = entry.data_offsets;
    if from != end || to < from || to > data_bytes {
        return bad("entries one after the other inside the file", format!("{from}..{to}"));
    }
    let Ok(dtype) = Dtype::named(&entry.dtype) else {
        return bad("a known dtype", entry.dtype.clone());
    };
    if shape_bytes(&entry.shape, dtype) != Some(to - from) {
        let found = format!("{} bytes for {:?} of {}", to - from, entry.shape, entry.dtype);
        return bad("the bytes of the shape", found);
    }
    Ok(to)
}

fn add(
    found: &mut Found,
    tree: &mut Map<String, Value>,
    under: Option<&str>,
    name: &str,
    entry: &Entry,
    place: (usize, u64),
) -> Result<()> {
    if name.starts_with("__pad.") && entry.dtype == "U8" {
        return Ok(());
    }
    let path = state::below(under, &[Key::Text(name.into())]);
    let node = json!({"~tensor": {"dtype": entry.dtype, "shape": entry.shape}});
    state::set(tree, &path, node)?;
    let (file, data) = place;
    let span = Span::Range { file, start: data + entry.data_offsets[0] };
    let (dtype, whole) = (Dtype::named(&entry.dtype)?, Rect::whole(&entry.shape));
    found.tensors += 1;
    found.add(&path_json(&path), dtype, &entry.shape, whole, span)
}

fn check_all_there(index: &Index, tensors: usize, uri: &str) -> Result<()> {
    if index.weight_map.len() == tensors {
        return Ok(());
    }
    let expected = format!("{} tensors as the index says", index.weight_map.len());
    Err(Error::corrupt(uri, 0, expected, format!("{tensors}"), AGAIN))
}
