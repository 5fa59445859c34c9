//! Other programs' checkpoints into this layout, streaming: what a file says is checked first, then
//! its bytes go through a few windows of memory, whatever their number.
//!
//! | file | what it reads |
//! |---|---|
//! | `pt` | `torch.save` files, zip and legacy |
//! | `dcp` | folders of torch.distributed.checkpoint |
//! | `deepspeed/` | folders of DeepSpeed ZeRO |
//! | `safetensors` | one file, or many with a `model.safetensors.index.json` |
//! | `archive` | one file of `torch.save`: its pickle and its storages |
//! | `feed`, `bytes` | the bytes of tensors, read ahead |
//! | `state`, `tensors` | the tree of values, and what stands for tensors in it |

mod archive;
mod bytes;
mod dcp;
mod deepspeed;
mod feed;
mod pt;
mod safetensors;
mod state;
mod tensors;

use std::sync::Arc;

use super::folder::{Folder, Publication, fresh_attempt, step_of_folder};
use crate::checkpoint::flat::fits;
use crate::checkpoint::layout::{Dtype, Piece, parse_step_dir, shape_bytes};
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::{ReadAt, StorageOptions, Store, open_store};

use feed::{SourceFeed, Span};

pub use state::object_key;

/// What a checkpoint to be read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceKind {
    /// A folder of torch.distributed.checkpoint.
    Dcp,
    /// A folder of DeepSpeed ZeRO.
    Deepspeed,
    /// A file of `torch.save`.
    Pt,
    /// One or more safetensors files.
    Safetensors,
}

/// How an import is made.
#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// Key to put everything under, so that a `Checkpointer` finds it as the state of that name.
    pub under: Option<String>,
    /// Step of the new checkpoint; default is what the folder's name says.
    pub step: Option<i64>,
    /// Replace a checkpoint that is there.
    pub overwrite: bool,
}

/// What an import did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Converted {
    /// Tensors.
    pub tensors: usize,
    /// Bytes of their elements.
    pub bytes: u64,
    /// Values whose bytes only torch can read.
    pub foreign: usize,
    /// Values that have no form here and were left out; the state names them.
    pub left_out: usize,
}

/// Everything found in a source: what will be written and where its bytes are.
#[derive(Debug, Default)]
struct Found {
    files: Vec<Arc<dyn ReadAt>>,
    pieces: Vec<Piece>,
    spans: Vec<Span>,
    state_json: String,
    tensors: usize,
    foreign: usize,
    left_out: usize,
    /// The step that the source says it is.
    step: Option<i64>,
}

impl Found {
    /// Adds a rectangle or flat range whose bytes are at `span`; refuses numbers that do not fit.
    fn add(
        &mut self,
        path: &str,
        dtype: Dtype,
        shape: &[i64],
        rect: Rect,
        span: Span,
    ) -> Result<()> {
        let length = shape_bytes(&rect.extent, dtype).filter(|_| fits(&rect, shape));
        let Some(length) = length else {
            let found = format!("{} of {shape:?}", rect.describe());
            return Err(Error::invalid(format!("tensor {path}"), "a rectangle inside", found));
        };
        let (shape, source) = (shape.to_vec(), self.spans.len());
        let piece =
            Piece { path: path.into(), dtype, shape, rect, length, source, source_start: 0 };
        self.pieces.push(piece);
        self.spans.push(span);
        Ok(())
    }

    /// Puts the pieces in the order of the files, so that they are read from front to back.
    fn sort_by_place(&mut self) {
        let spans = std::mem::take(&mut self.spans);
        let mut both: Vec<_> = std::mem::take(&mut self.pieces).into_iter().zip(spans).collect();
        both.sort_by_key(|(_, span)| match span {
            Span::Range { file, start } | Span::Turned { file, start, .. } => (*file, *start),
            Span::Inline(_) => (0, 0),
        });
        for (at, (mut piece, span)) in both.into_iter().enumerate() {
            piece.source = at;
            self.pieces.push(piece);
            self.spans.push(span);
        }
    }
}

/// Guesses what `uri` is by its name and its files.
pub fn detect(uri: &str, options: &StorageOptions) -> Result<SourceKind> {
    let name = uri.trim_end_matches('/');
    if name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json") {
        return Ok(SourceKind::Safetensors);
    }
    if [".pt", ".pth", ".bin", ".ckpt"].iter().any(|end| name.ends_with(end)) {
        return Ok(SourceKind::Pt);
    }
    let store = open_store(uri, options)?;
    let names = block_on(store.list_names(""))??;
    if names.iter().any(|n| deepspeed::is_mark(n)) {
        return Ok(SourceKind::Deepspeed);
    }
    if names.iter().any(|n| n == dcp::METADATA) {
        return Ok(SourceKind::Dcp);
    }
    if names.iter().any(|n| n.ends_with(".safetensors") || n.ends_with(safetensors::INDEX_END)) {
        return Ok(SourceKind::Safetensors);
    }
    let advice = if names.iter().any(|n| parse_step_dir(n).is_some()) {
        "this is a root of ours: name what to write with --to safetensors, dcp or pt"
    } else {
        "name its kind with --from, or the file itself"
    };
    Err(Error::NotFound {
        what: format!("a checkpoint of another program in {uri}"),
        advice: advice.into(),
    })
}

/// Reads `source` and commits it as the checkpoint folder `target`. `progress` hears the bytes of
/// tensors that are done, and first of all their number.
pub fn import(
    source: &str,
    kind: SourceKind,
    target: &str,
    storage: &StorageOptions,
    options: &ImportOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Converted> {
    let folder = Folder::new(target, storage, &fresh_attempt())?;
    if !options.overwrite {
        folder.refuse_committed()?;
    }
    let under = options.under.as_deref();
    let found = block_on(async {
        match kind {
            SourceKind::Pt => pt::find(source, storage, under).await,
            SourceKind::Dcp => dcp::find(source, storage, under).await,
            SourceKind::Deepspeed => deepspeed::find(source, storage, under).await,
            SourceKind::Safetensors => safetensors::find(source, storage, under).await,
        }
    })??;
    let bytes = found.pieces.iter().map(|p| p.length).sum();
    progress(Progress::Total(bytes));
    let mut feed = SourceFeed::new(&found.files, &found.pieces, &found.spans, progress);
    let written = folder.write_rank(0, &found.pieces, &mut feed)?;
    folder.publish(Publication {
        step: options.step.unwrap_or_else(|| match step_of_folder(target) {
            0 => found.step.unwrap_or(0),
            named => named,
        }),
        world_size: 1,
        written,
        state_json: found.state_json,
        per_rank_json: vec!["{}".into()],
        overwrite: options.overwrite,
    })?;
    Ok(Converted {
        tensors: found.tensors,
        bytes,
        foreign: found.foreign,
        left_out: found.left_out,
    })
}

/// How far a conversion is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Bytes there are in all.
    Total(u64),
    /// Bytes more that are done.
    Done(u64),
}

/// Splits the URI of a file into a store over its folder and its name.
pub fn file_in_store(uri: &str, options: &StorageOptions) -> Result<(Arc<dyn Store>, String)> {
    let (folder, name) = match uri.rsplit_once('/') {
        Some((folder, name)) if !folder.is_empty() => (folder.to_string(), name),
        Some((_, name)) => ("/".to_string(), name),
        None => (".".to_string(), uri),
    };
    if name.is_empty() {
        return Err(Error::invalid("source", "the path of a file", uri));
    }
    Ok((open_store(&folder, options)?, name.to_string()))
}
