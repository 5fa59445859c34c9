//! `drivetrain ckpt convert`: other programs' checkpoints in, ours out, streaming.

use std::path::Path;

use serde::Serialize;

use crate::checkpoint::exchange::{
    Converted, ExportOptions, ImportOptions, Progress, SourceKind, TargetKind, detect, export,
    import,
};
use crate::cli::EXIT_OK;
use crate::cli::args::{StorageArgs, parse_bytes};
use crate::cli::output::{Bar, Output};
use crate::error::{Error, Result};
use crate::storage::StorageOptions;

/// Kinds of checkpoints to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum From {
    Auto,
    Drivetrain,
    Dcp,
    Deepspeed,
    Pt,
    Safetensors,
}

/// Kinds of checkpoints to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum To {
    Drivetrain,
    Safetensors,
    Dcp,
    Pt,
}

/// Arguments of `ckpt convert`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Checkpoint to read: a file, a folder, or a checkpoint root
    source: String,
    /// Folder (or file, with --to pt or a name ending in .safetensors) to write
    target: String,
    /// What the source is
    #[arg(long, value_enum, default_value_t = From::Auto)]
    from: From,
    /// What to write
    #[arg(long, value_enum, default_value_t = To::Drivetrain)]
    to: To,
    /// Key of the state: an import puts everything under it, an export takes only what is under it
    #[arg(long, value_name = "NAME")]
    under: Option<String>,
    /// Step to export [default: the newest], or to give an import [default: by the folder's name]
    #[arg(long)]
    step: Option<i64>,
    /// Replace a drivetrain checkpoint that is there
    #[arg(long)]
    overwrite: bool,
    /// Bytes of tensors per safetensors file
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    shard_size: Option<u64>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Serialize)]
struct Answer {
    source: String,
    target: String,
    tensors: usize,
    bytes: u64,
    /// Values whose bytes only torch can read.
    foreign: usize,
    /// Values that have no form here; the state names them.
    left_out: usize,
}

/// Runs the verb.
pub fn run(args: &Args, out: &Output) -> Result<u8> {
    let storage = StorageOptions { options: args.storage.map() };
    let bar = out.progress(0, "bytes converted");
    bar.message(args.source.clone());
    let done = convert(args, &storage, &bar)?;
    drop(bar);
    let answer = Answer {
        source: args.source.clone(),
        target: args.target.clone(),
        tensors: done.tensors,
        bytes: done.bytes,
        foreign: done.foreign,
        left_out: done.left_out,
    };
    out.answer(&answer, |a| {
        let foreign = match a.foreign {
            0 => String::new(),
            n => format!(", {n} values that only torch reads"),
        };
        let left_out = match a.left_out {
            0 => String::new(),
            n => format!(", {n} values left out (named in the state)"),
        };
        format!("{} tensors, {} bytes{foreign}{left_out} to {}", a.tensors, a.bytes, a.target)
    });
    Ok(EXIT_OK)
}

fn convert(args: &Args, storage: &StorageOptions, bar: &Bar) -> Result<Converted> {
    let mut progress = |progress| match progress {
        Progress::Total(bytes) => bar.total(bytes),
        Progress::Done(bytes) => bar.advance(bytes),
    };
    let target = match args.to {
        To::Drivetrain => {
            let kind = source_kind(args, storage)?;
            let options = ImportOptions {
                under: args.under.clone(),
                step: args.step,
                overwrite: args.overwrite,
            };
            let (source, target) = (&args.source, &args.target);
            return import(source, kind, target, storage, &options, &mut progress);
        }
        To::Safetensors => TargetKind::Safetensors,
        To::Dcp => TargetKind::Dcp,
        To::Pt => TargetKind::Pt,
    };
    // Ours is a folder, so a file is another program's, whatever its name.
    let foreign = !matches!(args.from, From::Auto | From::Drivetrain);
    if foreign || Path::new(&args.source).is_file() {
        let found = "two other programs";
        let expected = "a drivetrain checkpoint on one side; convert in two steps";
        return Err(Error::invalid("--from and --to", expected, found));
    }
    let options =
        ExportOptions { under: args.under.clone(), step: args.step, shard_bytes: args.shard_size };
    export(&args.source, target, &args.target, storage, &options, &mut progress)
}

fn source_kind(args: &Args, storage: &StorageOptions) -> Result<SourceKind> {
    match args.from {
        From::Auto => detect(&args.source, storage),
        From::Dcp => Ok(SourceKind::Dcp),
        From::Deepspeed => Ok(SourceKind::Deepspeed),
        From::Pt => Ok(SourceKind::Pt),
        From::Safetensors => Ok(SourceKind::Safetensors),
        From::Drivetrain => {
            let name = Path::new(&args.source).display();
            let expected = "another kind on one side; copy the folder instead";
            Err(Error::invalid("--from and --to", expected, format!("drivetrain twice for {name}")))
        }
    }
}
