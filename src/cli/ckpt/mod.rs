//! `drivetrain ckpt`: what is in a checkpoint folder, is it whole, what changed, and what stays.

mod convert;
mod diff;
mod prune;
mod tree;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use clap::Subcommand;
use serde::Serialize;

use self::tree::tree_text;
use super::args::StorageArgs;
use super::output::Output;
use super::{EXIT_OK, EXIT_PROBLEMS};
use crate::checkpoint::layout::Chunk;
use crate::checkpoint::{OpenStep, Problem, manifest_folders, open_folder, problem_of};
use crate::error::{Error, Result};
use crate::storage::{StorageOptions, Store, open_store};

/// Arguments of `ckpt`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// List the steps, newest first, with their sizes and what is wrong with them
    Ls(Place),
    /// Show a step's files and tensors
    Inspect(Inspect),
    /// Read every byte and compare checksums
    Verify(Verify),
    /// Convert from and to safetensors, torch.save files and torch.distributed.checkpoint
    Convert(convert::Args),
    /// Say what changed between two steps: tensors, values, state
    Diff(diff::Diff),
    /// Remove all steps but those that a rule keeps
    Prune(prune::Prune),
    /// Verify a step that was copied here and make retention count it
    Adopt(prune::Adopt),
}

/// Where checkpoints are.
#[derive(Debug, clap::Args)]
struct Place {
    /// Checkpoint root, or one checkpoint folder with a manifest.json inside
    uri: String,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Debug, clap::Args)]
struct Inspect {
    #[command(flatten)]
    place: Place,
    /// Step to show [default: the newest]
    #[arg(long)]
    step: Option<i64>,
    /// Show only tensors whose path contains this text
    #[arg(long, value_name = "TEXT")]
    tensor: Option<String>,
    /// Levels of the tree of tensors to show
    #[arg(long, default_value_t = 99, value_name = "N")]
    depth: usize,
}

#[derive(Debug, clap::Args)]
struct Verify {
    #[command(flatten)]
    place: Place,
    /// Step to verify [default: all]
    #[arg(long)]
    step: Option<i64>,
}

/// Runs the verb.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    match args.verb {
        Verb::Ls(place) => ls(&place, out),
        Verb::Inspect(args) => inspect(&args, out),
        Verb::Verify(args) => verify(&args, out),
        Verb::Convert(args) => convert::run(&args, out),
        Verb::Diff(args) => diff::run(&args, out),
        Verb::Prune(args) => prune::prune(&args, out),
        Verb::Adopt(args) => prune::adopt(&args, out),
    }
}

impl Place {
    fn open(&self) -> Result<Arc<dyn Store>> {
        open_place(&self.uri, &self.storage)
    }
}

fn open_place(uri: &str, storage: &StorageArgs) -> Result<Arc<dyn Store>> {
    open_store(uri, &StorageOptions { options: storage.map() })
}

/// A tensor's path as a person writes it: keys joined by dots.
fn keys_text(path: &str) -> String {
    let Ok(keys) = serde_json::from_str::<Vec<serde_json::Value>>(path) else {
        return path.into();
    };
    let key = |v: &serde_json::Value| v.as_str().map_or_else(|| v.to_string(), String::from);
    keys.iter().map(key).collect::<Vec<_>>().join(".")
}

/// Folders to work on, newest first; an error if there are none or not the wanted one.
fn folders(store: &Arc<dyn Store>, step: Option<i64>) -> Result<Vec<(Option<i64>, String)>> {
    let mut found = manifest_folders(store)?;
    if let Some(step) = step {
        found.retain(|(s, _)| s.is_none_or(|s| s == step));
    }
    if found.is_empty() {
        let what = step.map_or("committed step".into(), |s| format!("committed step {s}"));
        return Err(Error::NotFound {
            what: format!("{what} in {}", store.uri()),
            advice: "a step exists when its manifest.json exists".into(),
        });
    }
    Ok(found)
}

#[derive(Serialize)]
struct Listed {
    step: Option<i64>,
    ok: bool,
    world_size: Option<u32>,
    size_bytes: Option<u64>,
    tensors: Option<usize>,
    /// Steps that hold chunks of it.
    refers_to: Vec<i64>,
    problem: Option<String>,
}

fn ls(place: &Place, out: &Output) -> Result<u8> {
    let store = place.open()?;
    let mut rows = Vec::new();
    for (step, folder) in manifest_folders(&store)? {
        rows.push(match open_folder(&store, &folder) {
            Ok(open) => Listed {
                step: Some(open.manifest().step),
                ok: true,
                world_size: Some(open.manifest().world_size),
                size_bytes: Some(open.size_bytes()),
                tensors: Some(open.tensors().count()),
                refers_to: open.manifest().refers_to.clone(),
                problem: None,
            },
            Err(e) => Listed {
                step,
                ok: false,
                world_size: None,
                size_bytes: None,
                tensors: None,
                refers_to: Vec::new(),
                problem: Some(e.to_string()),
            },
        });
    }
    out.answer(&rows, |rows| list_text(store.uri(), rows));
    Ok(if rows.iter().all(|r| r.ok) { EXIT_OK } else { EXIT_PROBLEMS })
}

fn list_text(uri: &str, rows: &[Listed]) -> String {
    if rows.is_empty() {
        return format!("no committed step in {uri}");
    }
    let mut text = format!("{:>12}  {:>5}  {:>10}  {:>7}\n", "step", "ranks", "size", "tensors");
    for row in rows {
        let step = row.step.map_or("?".into(), |s| s.to_string());
        // Writing to a string cannot fail.
        let _ = match &row.problem {
            Some(problem) => writeln!(text, "{step:>12}  damaged: {problem}"),
            None => writeln!(
                text,
                "{step:>12}  {:>5}  {:>10}  {:>7}{}",
                row.world_size.unwrap_or_default(),
                human_bytes(row.size_bytes.unwrap_or_default()),
                row.tensors.unwrap_or_default(),
                refers_text(&row.refers_to)
            ),
        };
    }
    text
}

fn refers_text(steps: &[i64]) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let list: Vec<_> = steps.iter().map(ToString::to_string).collect();
    format!("  refers to {}", list.join(", "))
}

#[derive(Serialize)]
struct TensorRow {
    path: String,
    dtype: String,
    shape: Vec<i64>,
    /// Of its elements.
    bytes: u64,
    /// On disk: fewer where chunks are compressed.
    stored_bytes: u64,
    chunks: usize,
}

#[derive(Serialize)]
struct FileRow {
    /// The other step that holds it, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<i64>,
    path: String,
    size_bytes: u64,
    crc32c: String,
    rank: u32,
}

#[derive(Serialize)]
struct Inspected {
    step: i64,
    world_size: u32,
    attempt: String,
    tool: String,
    committed_ns: Option<i64>,
    metrics: BTreeMap<String, Option<f64>>,
    refers_to: Vec<i64>,
    files: Vec<FileRow>,
    tensors: Vec<TensorRow>,
    state: serde_json::Value,
}

fn inspect(args: &Inspect, out: &Output) -> Result<u8> {
    let store = args.place.open()?;
    let found = folders(&store, args.step)?;
    let open = open_folder(&store, &found[0].1)?;
    let answer = inspected(&open, args.tensor.as_deref().unwrap_or_default());
    out.answer(&answer, |it| inspect_text(it, args.depth));
    Ok(EXIT_OK)
}

fn inspected(open: &OpenStep, filter: &str) -> Inspected {
    let manifest = open.manifest();
    let file = |(step, f): (Option<i64>, &crate::checkpoint::layout::FileRecord)| FileRow {
        step,
        path: f.path.clone(),
        size_bytes: f.size_bytes,
        crc32c: f.crc32c.clone(),
        rank: f.rank,
    };
    let tensors = open.tensors().filter(|(path, _)| path.contains(filter));
    let row = |(path, chunks): (&str, &[Chunk])| {
        let first = chunks.first()?;
        Some(TensorRow {
            path: path.into(),
            dtype: first.dtype.clone(),
            shape: first.shape.clone(),
            bytes: chunks.iter().map(Chunk::raw_bytes).sum(),
            stored_bytes: chunks.iter().map(|c| c.length).sum(),
            chunks: chunks.len(),
        })
    };
    Inspected {
        step: manifest.step,
        world_size: manifest.world_size,
        attempt: manifest.attempt.clone(),
        tool: manifest.tool.clone(),
        committed_ns: manifest.committed_ns,
        metrics: manifest.metrics.clone(),
        refers_to: manifest.refers_to.clone(),
        files: manifest.all_files().map(file).collect(),
        tensors: tensors.filter_map(row).collect(),
        // Numbers beyond f64 lose their tail here; the manifest has them in full.
        state: serde_json::from_str(&manifest.state_json).unwrap_or_default(),
    }
}

fn inspect_text(it: &Inspected, depth: usize) -> String {
    let own = || it.files.iter().filter(|f| f.step.is_none());
    let total: u64 = own().map(|f| f.size_bytes).sum();
    let mut text = format!(
        "step {} by {} on {} ranks, {} in {} files, attempt {}\n",
        it.step,
        it.tool,
        it.world_size,
        human_bytes(total),
        own().count(),
        it.attempt
    );
    if !it.refers_to.is_empty() {
        let elsewhere = it.files.iter().filter(|f| f.step.is_some());
        let bytes = elsewhere.map(|f| f.size_bytes).sum();
        let _ = writeln!(text, "{}, files of {}", refers_text(&it.refers_to), human_bytes(bytes));
    }
    for (name, value) in &it.metrics {
        let value = value.map_or("not finite".into(), |v| v.to_string());
        let _ = writeln!(text, "  metric {name}: {value}");
    }
    for f in &it.files {
        let size = human_bytes(f.size_bytes);
        let step = f.step.map_or(String::new(), |step| format!(" of step {step}"));
        let _ = writeln!(text, "  {:>10}  crc32c {}  {}{step}", size, f.crc32c, f.path);
    }
    let (bytes, stored) =
        it.tensors.iter().fold((0, 0), |(raw, stored), t| (raw + t.bytes, stored + t.stored_bytes));
    if stored < bytes {
        let share = 100.0 * stored as f64 / bytes as f64;
        let (bytes, stored) = (human_bytes(bytes), human_bytes(stored));
        let _ = writeln!(text, "  compressed: {bytes} of tensors in {stored}, {share:.1} %");
    }
    text.push_str(&tree_text(&it.tensors, depth));
    let keys = it.state.as_object().map(|m| m.keys().cloned().collect::<Vec<_>>());
    let _ = writeln!(text, "  state: {}", keys.unwrap_or_default().join(", "));
    text
}

#[derive(Serialize)]
struct Verified {
    step: Option<i64>,
    ok: bool,
    bytes: u64,
    problems: Vec<ProblemRow>,
}

#[derive(Serialize)]
struct ProblemRow {
    file: String,
    tensor: String,
    reason: String,
}

fn verify(args: &Verify, out: &Output) -> Result<u8> {
    let store = args.place.open()?;
    let mut rows = Vec::new();
    for (step, folder) in folders(&store, args.step)? {
        rows.push(verify_one(&store, step, &folder, out)?);
    }
    out.answer(&rows, |rows| verify_text(rows));
    Ok(if rows.iter().all(|r| r.ok) { EXIT_OK } else { EXIT_PROBLEMS })
}

fn verify_one(
    store: &Arc<dyn Store>,
    step: Option<i64>,
    folder: &str,
    out: &Output,
) -> Result<Verified> {
    let (step, bytes, problems) = match open_folder(store, folder) {
        Ok(open) => {
            let total = open.size_bytes() + open.referred_bytes();
            let bar = out.progress(total, "bytes verified");
            bar.message(format!("step {}", open.manifest().step));
            let problems = open.verify_with(&mut |bytes| bar.advance(bytes))?;
            (Some(open.manifest().step), total, problems)
        }
        Err(e) => (step, 0, problem_of(e)?),
    };
    let row = |p: Problem| ProblemRow { file: p.file, tensor: p.tensor, reason: p.reason };
    let problems: Vec<_> = problems.into_iter().map(row).collect();
    Ok(Verified { step, ok: problems.is_empty(), bytes, problems })
}

fn verify_text(rows: &[Verified]) -> String {
    let mut text = String::new();
    for row in rows {
        let step = row.step.map_or("?".into(), |s| s.to_string());
        if row.ok {
            let _ = writeln!(text, "step {step}: ok, {} read", human_bytes(row.bytes));
        }
        for p in &row.problems {
            let tensor =
                if p.tensor.is_empty() { String::new() } else { format!(", tensor {}", p.tensor) };
            let _ = writeln!(text, "step {step}: {}{tensor}: {}", p.file, p.reason);
        }
    }
    text
}

/// Bytes in the largest binary unit that leaves a digit before the point.
fn human_bytes(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] =
        [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = UNITS.iter().find(|(_, unit)| bytes >= *unit);
    unit.map_or(format!("{bytes} B"), |(name, unit)| {
        format!("{:.1} {name}", bytes as f64 / *unit as f64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(3 << 40), "3.0 TiB");
    }
}
