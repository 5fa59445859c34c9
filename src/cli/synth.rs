//! `drivetrain synth OUT`: a deterministic nuScenes-layout driving dataset.

use std::path::PathBuf;
use std::time::Instant;

use crate::cli::EXIT_OK;
use crate::cli::args::parse_size;
use crate::cli::output::Output;
use crate::error::Result;
use crate::synth::{Config, Summary, generate};

/// Arguments of `synth`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to create the dataset in
    out: PathBuf,
    /// Number of scenes
    #[arg(long, default_value_t = 2)]
    scenes: u32,
    /// Keyframes per scene, at 2 Hz, with nine LiDAR sweeps between two of them
    #[arg(long, default_value_t = 10)]
    keyframes: u32,
    /// The same seed gives the same bytes on every machine
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Size of the camera pictures
    #[arg(long, value_name = "WxH", default_value = "1600x900", value_parser = parse_size)]
    image_size: (u32, u32),
    /// JPEG quality, 1 to 100
    #[arg(long, default_value_t = 85)]
    quality: u8,
    /// Beams fired per LiDAR turn
    #[arg(long, default_value_t = 34_720)]
    lidar_points: u32,
    /// Threads to use [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
}

/// Makes the dataset.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    let defaults = Config::default();
    let config = Config {
        scenes: args.scenes,
        keyframes: args.keyframes,
        seed: args.seed,
        image_size: args.image_size,
        quality: args.quality,
        lidar_points: args.lidar_points,
        threads: args.threads.unwrap_or(defaults.threads),
    };
    let started = Instant::now();
    let bar = out.progress(if config.keyframes == 0 { 0 } else { config.frames() }, "frames");
    let summary = generate(&args.out, &config, &|frames| bar.advance(frames))?;
    drop(bar);
    let seconds = started.elapsed().as_secs_f64();
    let root = args.out.display().to_string();
    let answer = serde_json::json!({
        "root": root, "config": config, "made": summary, "seconds": seconds,
    });
    out.answer(&answer, |_| sentence(&root, &summary, seconds));
    Ok(EXIT_OK)
}

fn sentence(root: &str, made: &Summary, seconds: f64) -> String {
    let Summary { scenes, samples, pictures, sweeps, annotations, .. } = made;
    format!(
        "{root}: {scenes} scenes, {samples} samples, {pictures} pictures, {sweeps} sweeps of \
         {:.1} k points, {annotations} boxes, {:.1} MB in {seconds:.1} s",
        made.points as f64 / (*sweeps).max(1) as f64 / 1e3,
        made.data_bytes as f64 / 1e6,
    )
}
