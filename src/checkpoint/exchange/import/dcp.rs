//! Folders of torch.distributed.checkpoint: the metadata says which range of which file is the
//! archive of a chunk, and each archive holds one tensor.

use std::collections::BTreeMap;
use std::sync::Arc;

use drivetrain_formats::pickle::View;
use drivetrain_formats::torch::{
    DcpChunk, DcpItem, DcpMetadata, Key, METADATA_BYTES_MAX, Place, Stored, TensorRef,
    dcp_metadata, path_json, tensor_of,
};
use serde_json::{Map, Value, json};

use super::archive::Archive;
use super::bytes::Part;
use super::feed::Span;
use super::{Found, state};
use crate::checkpoint::exchange::plain::plain_torch_value;
use crate::checkpoint::layout::check_relative;
use crate::checkpoint::rects::{Rect, prove_cover};
use crate::error::{Error, Result};
use crate::storage::{OpenOptions, StorageOptions, Store, open_store};

/// File with the metadata.
pub const METADATA: &str = ".metadata";
/// Largest archive that is tried as a plain value.
const PLAIN_BYTES_MAX: u64 = 16 << 20;
const AGAIN: &str = "copy the checkpoint again, or use an older one";

/// Reads what a folder holds.
pub async fn find(uri: &str, options: &StorageOptions, under: Option<&str>) -> Result<Found> {
    let store = open_store(uri, options)?;
    let file = store.open(METADATA, OpenOptions::default()).await?;
    let part = Part::whole(file.as_ref());
    let bytes = part.read(0, part.bytes.min(METADATA_BYTES_MAX)).await?;
    let metadata = dcp_metadata(&bytes).map_err(|e| part.format(e))?;
    let mut folder = Reading { store, files: BTreeMap::new(), found: Found::default() };
    let mut tree = Map::new();
    let mut items = Map::new();
    let flat = !all_have_paths(&metadata);
    for (name, item) in &metadata.items {
        let own = metadata.paths.get(name).filter(|_| !flat);
        let path = own.cloned().unwrap_or_else(|| vec![Key::Text(name.clone())]);
        let path = state::below(under, &path);
        let node = folder.add(name, &path_json(&path), item).await?;
        state::set(&mut tree, &path, node)?;
        let learns = matches!(item, DcpItem::Tensor { requires_grad: true, .. });
        let properties = if learns { json!({"requires_grad": true}) } else { json!({}) };
        let bytes = matches!(item, DcpItem::Bytes(_));
        let key = state::object_key(&Key::Text(name.clone()));
        items.insert(key, if bytes { Value::Null } else { properties });
    }
    if under.is_none() {
        // What only DCP knows, so that its own reader finds the same names again.
        let planner: Value = serde_json::from_str(&metadata.planner_json).unwrap_or_default();
        let own = json!({"version": metadata.version, "planner_data": planner, "items": items});
        tree.insert("~dcp".into(), own);
    }
    folder.found.state_json = Value::Object(tree).to_string();
    Ok(folder.found)
}

fn all_have_paths(metadata: &DcpMetadata) -> bool {
    let has = |name: &String| {
        metadata.paths.get(name).is_some_and(|p| matches!(p.first(), Some(Key::Text(_))))
    };
    metadata.items.iter().all(|(name, _)| has(name))
}

struct Reading {
    store: Arc<dyn Store>,
    /// Number of each file.
    files: BTreeMap<String, usize>,
    found: Found,
}

impl Reading {
    async fn file(&mut self, place: &Place) -> Result<usize> {
        if let Some(&number) = self.files.get(&place.file) {
            return Ok(number);
        }
        check_relative(&place.file, METADATA)?;
        let opened = self.store.open(&place.file, OpenOptions::default()).await?;
        let number = self.found.files.len();
        self.found.files.push(opened);
        self.files.insert(place.file.clone(), number);
        Ok(number)
    }

    fn part(&self, number: usize, place: &Place) -> Result<Part<'_>> {
        let file = self.found.files[number].as_ref();
        let size = file.meta().size_bytes;
        let end = place.offset.checked_add(place.bytes).filter(|&end| end <= size);
        if end.is_none() {
            let expected = format!("{} bytes from {}", place.bytes, place.offset);
            let found = format!("a file of {size} bytes");
            return Err(Error::corrupt(&place.file, place.offset, expected, found, AGAIN));
        }
        Ok(Part { file, start: place.offset, bytes: place.bytes })
    }

    async fn add(&mut self, name: &str, path: &str, item: &DcpItem) -> Result<Value> {
        match item {
            DcpItem::Bytes(place) => self.add_bytes(path, place).await,
            DcpItem::Tensor { dtype, shape, chunks, .. } => {
                prove(name, shape, chunks)?;
                for chunk in chunks {
                    self.add_chunk(name, path, *dtype, shape, chunk).await?;
                }
                self.found.tensors += 1;
                Ok(state::tensor_node(*dtype, shape))
            }
        }
    }

    async fn add_bytes(&mut self, path: &str, place: &Place) -> Result<Value> {
        let number = self.file(place).await?;
        let part = self.part(number, place)?;
        if place.bytes <= PLAIN_BYTES_MAX {
            let archive = part.read(0, place.bytes).await?;
            if let Ok(text) = plain_torch_value(&archive) {
                return serde_json::from_str(&text)
                    .map_err(|e| Error::invalid("typed JSON", "JSON", e));
            }
        }
        let shape = [place.bytes as i64];
        let span = Span::Range { file: number, start: place.offset };
        let dtype = crate::checkpoint::layout::Dtype::named("U8")?;
        self.found.add(path, dtype, &shape, Rect::whole(&shape), span)?;
        self.found.foreign += 1;
        Ok(state::foreign_node(place.bytes))
    }

    async fn add_chunk(
        &mut self,
        name: &str,
        path: &str,
        dtype: Stored,
        shape: &[i64],
        chunk: &DcpChunk,
    ) -> Result<()> {
        let number = self.file(&chunk.place).await?;
        let part = self.part(number, &chunk.place)?;
        let (tensor, start) = one_tensor(part).await?;
        if (tensor.dtype, &tensor.shape) != (dtype, &chunk.sizes) || !tensor.is_contiguous() {
            let expected = format!("{} {:?} in order", dtype.torch, chunk.sizes);
            let found = format!(
                "{} {:?} with strides {:?}",
                tensor.dtype.torch, tensor.shape, tensor.strides
            );
            let file = format!("{}, tensor {name}", chunk.place.file);
            return Err(Error::corrupt(file, chunk.place.offset, expected, found, AGAIN));
        }
        let (stored, more) = state::stored_dtype(dtype)?;
        let with = |all: &[i64], last: Option<i64>| -> Vec<i64> {
            all.iter().copied().chain(last).collect()
        };
        let rect = Rect {
            offsets: with(&chunk.offsets, more.map(|_| 0)),
            extent: with(&chunk.sizes, more),
        };
        let span = Span::Range { file: number, start };
        self.found.add(path, stored, &with(shape, more), rect, span)
    }
}

/// The tensor in an archive, and the byte of the file where its elements start.
async fn one_tensor(part: Part<'_>) -> Result<(TensorRef, u64)> {
    let archive = Archive::open(part).await?;
    let pickle = archive.pickle().await?;
    let tensor = match pickle.root().view() {
        View::Object(object) => tensor_of(&object).map_err(|e| part.format(e))?,
        _ => None,
    };
    let Some(tensor) = tensor else {
        let found = pickle.root().kind();
        return Err(Error::corrupt(
            part.name(),
            part.start,
            "the archive of a tensor",
            found,
            AGAIN,
        ));
    };
    let storages = archive.storages().await?;
    let place = storages.get(&tensor.storage.key).filter(|(_, n)| *n >= tensor.storage.bytes);
    let Some(&(start, _)) = place else {
        let expected = format!("a storage of {} bytes", tensor.storage.bytes);
        return Err(Error::corrupt(part.name(), part.start, expected, "none", AGAIN));
    };
    let start = start + tensor.offset * tensor.dtype.bytes;
    Ok((tensor, start))
}

/// Every element is in exactly one chunk; DCP itself does not look.
fn prove(name: &str, shape: &[i64], chunks: &[DcpChunk]) -> Result<()> {
    let rects: Vec<Rect> = chunks
        .iter()
        .map(|c| Rect { offsets: c.offsets.clone(), extent: c.sizes.clone() })
        .collect();
    let inside = rects.iter().all(|r| r.is_inside(shape));
    let covered = inside && prove_cover(&Rect::whole(shape), &rects).is_ok();
    if covered {
        return Ok(());
    }
    let found: Vec<_> = rects.iter().take(4).map(Rect::describe).collect();
    let expected = format!("chunks that cover {shape:?} exactly once");
    let file = format!("{METADATA}, tensor {name}");
    Err(Error::corrupt(file, 0, expected, found.join(" "), AGAIN))
}
