//! safetensors files as the Hugging Face hub lays them out: `model.safetensors`, or shards of a few
//! gigabytes and an index that says which shard holds which name. Tied tensors are stored once,
//! under the first name, as transformers does.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::ordered::{Files, Ordered};
use super::out::Out;
use super::tensors::{Found, named};
use super::{Converted, Progress, Source};
use crate::checkpoint::exchange::import::file_in_store;
use crate::checkpoint::layout::Dtype;
use crate::error::{Error, Result};
use crate::storage::{StorageOptions, open_store};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

struct Entry<'a> {
    name: String,
    dtype: Dtype,
    found: Found<'a>,
}

/// Writes all tensors of the state.
pub async fn write(
    source: &Source,
    target: &str,
    storage: &StorageOptions,
    shard_bytes: u64,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    let entries = entries(source)?;
    let bytes = entries.iter().map(|e| e.found.bytes).sum();
    progress(Progress::Total(bytes));
    let tensors = entries.len();
    let single = target.ends_with(".safetensors");
    let shards = cut(entries, if single { u64::MAX } else { shard_bytes.max(1) });
    let (store, only) = if single {
        let (store, name) = file_in_store(target, storage)?;
        (store, Some(name))
    } else {
        (open_store(target, storage)?, None)
    };
    let mut map = Map::new();
    let count = shards.len();
    let mut files = Files::new(source);
    for (i, shard) in shards.into_iter().enumerate() {
        let name = match &only {
            Some(name) => name.clone(),
            None if count == 1 => SINGLE.to_string(),
            None => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
        };
        let mut out = Out::create(&store, &name).await?;
        if let Err(error) = write_shard(&mut out, &shard, &mut files, progress).await {
            out.abort().await;
            return Err(error);
        }
        out.finish().await?;
        map.extend(shard.iter().map(|e| (e.name.clone(), Value::from(name.as_str()))));
    }
    if count > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": map});
        let mut out = Out::create(&store, INDEX).await?;
        out.bytes(format!("{index:#}\n").into_bytes()).await?;
        out.finish().await?;
    }
    store.sync_dir("").await?;
    Ok(Converted { tensors, bytes, ..Converted::default() })
}

fn entries(source: &Source) -> Result<Vec<Entry<'_>>> {
    let mut entries: BTreeMap<String, Entry<'_>> = BTreeMap::new();
    for tensor in named(source)?.iter().filter(|t| !t.is_alias) {
        let found = tensor.find(source)?;
        let dtype = Dtype::named(&found.chunks[0].dtype)?;
        let name = tensor.name();
        if !dtype.in_safetensors || name == "__metadata__" {
            return Err(Error::Unsupported {
                what: format!("tensor {name} of {} in safetensors", dtype.name),
                advice: "export the checkpoint with --to pt or --to dcp".into(),
            });
        }
        let entry = Entry { name: name.clone(), dtype, found };
        if entries.insert(name.clone(), entry).is_some() {
            return Err(Error::invalid("tensor names", "names that stay apart with dots", name));
        }
    }
    Ok(entries.into_values().collect())
}

/// Shards of at most `most` bytes; a larger tensor has one for itself.
fn cut(entries: Vec<Entry<'_>>, most: u64) -> Vec<Vec<Entry<'_>>> {
    let mut shards = vec![Vec::new()];
    let mut bytes = 0_u64;
    for entry in entries {
        let full = bytes.saturating_add(entry.found.bytes) > most;
        if full && shards.last().is_some_and(|s: &Vec<_>| !s.is_empty()) {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += entry.found.bytes;
        if let Some(last) = shards.last_mut() {
            last.push(entry);
        }
    }
    for shard in &mut shards {
        // Wide elements first: then all are aligned without gaps, which the format has none of.
        shard.sort_by_key(|e| std::cmp::Reverse(e.dtype.bytes));
    }
    shards
}

async fn write_shard<'a>(
    out: &mut Out,
    shard: &[Entry<'a>],
    files: &mut Files<'a>,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for entry in shard {
        let (from, to) = (at, at + entry.found.bytes);
        let shape = &entry.found.chunks[0].shape;
        let body = json!({"dtype": entry.dtype.name, "shape": shape, "data_offsets": [from, to]});
        header.insert(entry.name.clone(), body);
        at = to;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut head = (text.len() as u64).to_le_bytes().to_vec();
    head.append(&mut text);
    out.bytes(head).await?;
    for entry in shard {
        let mut ordered = Ordered::new(files, entry.found.path, entry.found.chunks).await?;
        out.tensor(&mut ordered, entry.found.bytes, progress).await?;
    }
    Ok(())
}
