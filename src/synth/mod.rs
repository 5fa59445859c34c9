//! A deterministic driving world in nuScenes layout.
//!
//! A pure function of (seed, scene, time) says where everything is (`world`, `road`); one ray
//! caster (`cast`) sees it, for pictures (`camera`, `paint`) and LiDAR sweeps (`lidar`) alike, so
//! projected points hit the right pixels; `clock` says when each sensor fires; `scene` makes the
//! frames of a scene on all cores and writes its rows to the `tables`.
//!
//! The same [`Config`] gives the same bytes on every machine, whatever the number of threads.

use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::error::{Error, Result};

mod annotate;
pub mod camera;
pub mod cast;
pub mod clock;
pub mod lidar;
mod map;
pub mod math;
pub mod noise;
mod paint;
mod paint_things;
pub mod rig;
pub mod road;
mod rows;
mod scene;
pub mod snapshot;
mod tables;
pub mod world;

pub use tables::FOLDER as TABLE_FOLDER;

/// Most scenes of one dataset.
const SCENES_MAX: u32 = 100_000;
/// Most keyframes of one scene.
const KEYFRAMES_MAX: u32 = 10_000;
/// Sides of a picture, pixels.
const SIDE_PX: (u32, u32) = (32, 8192);
/// Beams per turn.
const LIDAR_POINTS: (u32, u32) = (lidar::BEAMS, 1_000_000);
/// Most threads.
const THREADS_MAX: usize = 256;

/// What to make.
#[derive(Debug, Clone, Serialize)]
pub struct Config {
    /// Scenes; each has a world of its own.
    pub scenes: u32,
    /// Keyframes per scene, at 2 Hz; between two of them lie nine LiDAR sweeps.
    pub keyframes: u32,
    /// Everything follows from this.
    pub seed: u64,
    /// Width and height of the pictures in pixels.
    pub image_size: (u32, u32),
    /// JPEG quality 1..100.
    pub quality: u8,
    /// Beams fired per turn; a sweep has somewhat fewer returns.
    pub lidar_points: u32,
    /// Threads to work on.
    pub threads: usize,
}

impl Default for Config {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            scenes: 2,
            keyframes: 10,
            seed: 0,
            image_size: (1600, 900),
            quality: 85,
            lidar_points: 34_720,
            threads: threads.min(THREADS_MAX),
        }
    }
}

/// What was made.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Summary {
    /// Scenes.
    pub scenes: u32,
    /// Keyframes of all scenes.
    pub samples: u64,
    /// Pictures.
    pub pictures: u64,
    /// Sweeps.
    pub sweeps: u64,
    /// LiDAR points.
    pub points: u64,
    /// Annotations.
    pub annotations: u64,
    /// Bytes of pictures and sweeps.
    pub data_bytes: u64,
}

impl Config {
    fn check(&self) -> Result<()> {
        let within = |what: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::invalid(what, format!("{low} to {high}"), value))
        };
        within("scenes", self.scenes.into(), 1, SCENES_MAX.into())?;
        within("keyframes", self.keyframes.into(), 1, KEYFRAMES_MAX.into())?;
        within("image width", self.image_size.0.into(), SIDE_PX.0.into(), SIDE_PX.1.into())?;
        within("image height", self.image_size.1.into(), SIDE_PX.0.into(), SIDE_PX.1.into())?;
        within("quality", self.quality.into(), 1, 100)?;
        let (fewest, most) = LIDAR_POINTS;
        within("lidar points", self.lidar_points.into(), fewest.into(), most.into())?;
        within("threads", self.threads as u64, 1, THREADS_MAX as u64)
    }

    /// Frames (pictures and sweeps) the dataset will have.
    pub fn frames(&self) -> u64 {
        u64::from(self.scenes) * scene::frames(self.keyframes)
    }
}

/// Makes the dataset below `root`. `progress` is called with the frames finished since last time,
/// from several threads.
pub fn generate(root: &Path, config: &Config, progress: &(dyn Fn(u64) + Sync)) -> Result<Summary> {
    config.check()?;
    let mut tables = tables::Tables::create(root, config.seed)?;
    make_folders(root)?;
    let mut summary = Summary { scenes: config.scenes, ..Summary::default() };
    let mut log_tokens = Vec::new();
    for number in 0..config.scenes {
        let scene = scene::Scene::new(config, number);
        let frames = scene.make_frames(root, progress)?;
        log_tokens.push(scene.push_rows(&mut tables, &frames)?);
        summary.samples += u64::from(config.keyframes);
        summary.pictures += u64::from(config.keyframes) * rig::CAMERAS.len() as u64;
        summary.sweeps += frames.sweeps;
        summary.points += frames.points;
        summary.annotations += frames.annotations;
        summary.data_bytes += frames.data_bytes;
    }
    map::write(root)?;
    tables.finish(log_tokens)?;
    Ok(summary)
}

fn make_folders(root: &Path) -> Result<()> {
    let cameras = rig::CAMERAS.iter().map(|camera| format!("samples/{}", camera.channel));
    let fixed = ["samples/LIDAR_TOP", "sweeps/LIDAR_TOP", "maps"].map(String::from);
    for folder in cameras.chain(fixed) {
        let path = root.join(folder);
        fs::create_dir_all(&path).map_err(|e| tables::io("create folder", &path, e))?;
    }
    Ok(())
}
