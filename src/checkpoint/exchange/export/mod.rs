//! Checkpoints of this layout into other programs' files, streaming: tensors come out in row-major
//! order whatever their chunks were, every chunk is read once and its checksum verified.
//!
//! | file | what it writes |
//! |---|---|
//! | `safetensors` | one file, or many with a `model.safetensors.index.json` |
//! | `pt` | a file that `torch.load(weights_only=True)` reads |
//! | `dcp` | a folder that torch.distributed.checkpoint reads |
//! | `ordered` | the elements of a tensor in order |
//! | `out` | a file being written, with its checksums |

mod dcp;
mod ordered;
mod out;
mod pt;
mod safetensors;
mod tensors;

use super::{Converted, Progress};
use crate::checkpoint::read::{OpenStep, manifest_folders, open_folder};
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::{StorageOptions, open_store};

/// What an export makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetKind {
    /// safetensors files.
    Safetensors,
    /// A file of `torch.save`.
    Pt,
    /// A folder of torch.distributed.checkpoint.
    Dcp,
}

/// Shards of safetensors files end before this, as those of the Hugging Face hub do.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// How an export is made.
#[derive(Debug, Clone, Default)]
pub struct ExportOptions {
    /// Only what the state holds under this key, without the key.
    pub under: Option<String>,
    /// Step of a checkpoint root; default is the newest.
    pub step: Option<i64>,
    /// Bytes of tensors in one safetensors file; default is [`SHARD_BYTES`].
    pub shard_bytes: Option<u64>,
}

/// A checkpoint that is exported.
struct Source {
    folder: String,
    step: OpenStep,
    /// The state, or the part of it that was asked for.
    state: serde_json::Value,
    /// First keys of the paths of what is exported.
    prefix: Vec<serde_json::Value>,
}

/// Writes the checkpoint at `source`, a root or a folder with a manifest, to `target`.
pub fn export(
    source: &str,
    kind: TargetKind,
    target: &str,
    storage: &StorageOptions,
    options: &ExportOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    let source = open(source, storage, options)?;
    block_on(async {
        match kind {
            TargetKind::Safetensors => {
                let shard_bytes = options.shard_bytes.unwrap_or(SHARD_BYTES);
                safetensors::write(&source, target, storage, shard_bytes, progress).await
            }
            TargetKind::Pt => pt::write(&source, target, storage, progress).await,
            TargetKind::Dcp => dcp::write(&source, target, storage, progress).await,
        }
    })?
}

fn open(uri: &str, storage: &StorageOptions, options: &ExportOptions) -> Result<Source> {
    let store = open_store(uri, storage)?;
    let mut found = manifest_folders(&store)?;
    if let Some(step) = options.step {
        found.retain(|(s, _)| s.is_none_or(|s| s == step));
    }
    let Some((_, folder)) = found.into_iter().next() else {
        return Err(Error::NotFound {
            what: format!("a committed checkpoint in {uri}"),
            advice: "name a checkpoint root, or a folder with a manifest.json".into(),
        });
    };
    let step = open_folder(&store, &folder)?;
    let mut state: serde_json::Value = serde_json::from_str(&step.manifest().state_json)
        .map_err(|e| Error::corrupt(uri, 0, "a state of JSON", e, "use an older step"))?;
    let mut prefix = Vec::new();
    if let Some(under) = &options.under {
        let key = drivetrain_formats::torch::Key::Text(under.clone());
        let part = state.get_mut(super::import::object_key(&key)).map(serde_json::Value::take);
        state = part.ok_or_else(|| Error::NotFound {
            what: format!("{under} in the state of {uri}"),
            advice: "`drivetrain ckpt inspect` lists the names".into(),
        })?;
        prefix.push(under.clone().into());
    } else if let Some(map) = state.as_object_mut() {
        // What belongs to this program or to one rank is no part of the saved object.
        map.retain(|key, _| !drivetrain_formats::torch::is_tag(key));
    }
    let folder = step.folder().to_string();
    Ok(Source { folder, step, state, prefix })
}
