//! `drivetrain synth OUT`: a deterministic nuScenes-layout driving dataset.

use std::path::PathBuf;

use crate::cli::output::Output;
use crate::error::{Error, Result};

/// Arguments of `synth`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to create the dataset in
    out: PathBuf,
    /// Number of scenes
    #[arg(long, default_value_t = 2)]
    scenes: u32,
    /// Keyframes per scene, at 2 Hz
    #[arg(long, default_value_t = 10)]
    keyframes: u32,
    /// The same seed gives the same bytes on every machine
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Makes the dataset.
pub fn run(args: Args, _out: &Output) -> Result<u8> {
    Err(Error::Unsupported {
        what: format!("synth {} ({} scenes)", args.out.display(), args.scenes),
        advice: "not built yet".into(),
    })
}
