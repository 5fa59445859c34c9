//! One scene: its frames, made on all cores, and its rows.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::annotate::{self, Seen};
use super::clock::{Clock, Kind, TURNS_PER_KEYFRAME};
use super::math::yaw_quaternion;
use super::rig::{CAMERAS, LIDAR_AT_M, LIDAR_CHANNEL, lidar_rotation};
use super::snapshot::Snapshot;
use super::tables::{Table, Tables, io};
use super::world::World;
use super::{Config, camera, lidar, rows};
use crate::error::Result;

/// One file to make.
#[derive(Debug, Clone, Copy)]
enum Job {
    Picture { keyframe: u32, camera: usize },
    Sweep { turn: u32 },
}

/// What the frames of a scene turned out to be.
#[derive(Debug, Default)]
pub struct Frames {
    /// Sweeps made.
    pub sweeps: u64,
    /// Points of all sweeps.
    pub points: u64,
    /// Annotations of all keyframes.
    pub annotations: u64,
    /// Bytes of pictures and sweeps.
    pub data_bytes: u64,
    /// Things seen at each keyframe.
    seen: BTreeMap<u32, Vec<Seen>>,
}

/// A scene to be made.
#[derive(Debug)]
pub struct Scene<'a> {
    config: &'a Config,
    clock: Clock,
    world: World,
}

/// Frames of a scene with this many keyframes.
pub fn frames(keyframes: u32) -> u64 {
    u64::from(keyframes) * CAMERAS.len() as u64 + u64::from(turns(keyframes))
}

fn turns(keyframes: u32) -> u32 {
    (keyframes - 1) * TURNS_PER_KEYFRAME + 1
}

impl<'a> Scene<'a> {
    /// Scene `number` of a dataset.
    pub fn new(config: &'a Config, number: u32) -> Self {
        let clock = Clock { seed: config.seed, scene: number };
        Self { config, clock, world: World::new(config.seed, number) }
    }

    /// Makes all pictures and sweeps; stops at the first error.
    pub fn make_frames(&self, root: &Path, progress: &(dyn Fn(u64) + Sync)) -> Result<Frames> {
        let jobs = self.jobs();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let result = Mutex::new(Ok(Frames::default()));
        let work = || {
            while !stop.load(Ordering::Relaxed) {
                let Some(&job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                match self.make(root, job) {
                    Ok(made) => add(&result, job, made),
                    Err(error) => {
                        stop.store(true, Ordering::Relaxed);
                        *result.lock() = Err(error);
                    }
                }
                progress(1);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.config.threads {
                scope.spawn(work);
            }
            work();
        });
        result.into_inner()
    }

    fn jobs(&self) -> Vec<Job> {
        let pictures = (0..self.config.keyframes).flat_map(|keyframe| {
            (0..CAMERAS.len()).map(move |camera| Job::Picture { keyframe, camera })
        });
        pictures.chain((0..turns(self.config.keyframes)).map(|turn| Job::Sweep { turn })).collect()
    }

    fn make(&self, root: &Path, job: Job) -> Result<Made> {
        match job {
            Job::Picture { keyframe, camera } => self.make_picture(root, keyframe, camera),
            Job::Sweep { turn } => self.make_sweep(root, turn),
        }
    }

    fn make_picture(&self, root: &Path, keyframe: u32, camera: usize) -> Result<Made> {
        let stamp = self.clock.camera_us(keyframe, camera);
        let snapshot = Snapshot::new(&self.world, self.clock.seconds(stamp));
        let rig = &CAMERAS[camera];
        let picture = camera::render(&snapshot, rig, self.config.image_size, stamp as u32);
        let jpeg = camera::encode(&picture, self.config.quality)?;
        write(root, &self.clock.path("samples", rig.channel, stamp, "jpg"), &jpeg)?;
        Ok(Made { bytes: jpeg.len() as u64, points: 0, seen: None })
    }

    fn make_sweep(&self, root: &Path, turn: u32) -> Result<Made> {
        let stamp = self.clock.turn_us(turn);
        let snapshot = Snapshot::new(&self.world, self.clock.seconds(stamp));
        let steps = self.config.lidar_points / lidar::BEAMS;
        let sweep = lidar::sweep(&snapshot, steps, stamp as u32);
        let bytes = sweep.bytes();
        write(root, &self.sweep_path(turn), &bytes)?;
        let keyframe = turn.is_multiple_of(TURNS_PER_KEYFRAME);
        let seen = keyframe.then(|| annotate::look(&snapshot, &sweep));
        Ok(Made { bytes: bytes.len() as u64, points: sweep.points.len() as u64, seen })
    }

    fn sweep_path(&self, turn: u32) -> String {
        let folder = if turn.is_multiple_of(TURNS_PER_KEYFRAME) { "samples" } else { "sweeps" };
        self.clock.path(folder, LIDAR_CHANNEL, self.clock.turn_us(turn), "pcd.bin")
    }

    /// Writes the scene's rows and returns its log's token.
    pub fn push_rows(&self, tables: &mut Tables, frames: &Frames) -> Result<String> {
        let log = self.clock.token(Kind::Log, 0, 0);
        self.push_scene(tables, &log)?;
        self.push_calibration(tables)?;
        for keyframe in 0..self.config.keyframes {
            self.push_sample(tables, keyframe)?;
        }
        for camera in 0..CAMERAS.len() {
            for keyframe in 0..self.config.keyframes {
                self.push_picture(tables, keyframe, camera)?;
            }
        }
        for turn in 0..turns(self.config.keyframes) {
            self.push_sweep(tables, turn)?;
        }
        annotate::push(tables, &self.clock, &self.world, &frames.seen)?;
        Ok(log)
    }

    fn sample_token(&self, keyframe: u32) -> String {
        self.clock.token(Kind::Sample, keyframe.into(), 0)
    }

    fn push_scene(&self, tables: &mut Tables, log: &str) -> Result<()> {
        let row = rows::Scene {
            token: self.clock.token(Kind::Scene, 0, 0),
            log_token: log.into(),
            nbr_samples: self.config.keyframes,
            first_sample_token: self.sample_token(0),
            last_sample_token: self.sample_token(self.config.keyframes - 1),
            name: format!("scene-{:04}", self.clock.scene + 1),
            description: "Synthetic street with traffic, parked cars and pedestrians".into(),
        };
        tables.push(Table::Scene, &row)?;
        let row = rows::Log {
            token: log.into(),
            logfile: self.clock.log_name(),
            vehicle: "synth",
            date_captured: "2024-06-01",
            location: "synth",
        };
        tables.push(Table::Log, &row)
    }

    fn push_calibration(&self, tables: &mut Tables) -> Result<()> {
        let (width, height) = self.config.image_size;
        for (i, camera) in CAMERAS.iter().enumerate() {
            let [fx, fy, cx, cy] = camera.pinhole(width, height);
            let row = rows::CalibratedSensor {
                token: self.clock.token(Kind::Calibrated, i as u64, 0),
                sensor_token: tables.sensor(i),
                translation: camera.at_m,
                rotation: camera.rotation(),
                camera_intrinsic: vec![[fx, 0.0, cx], [0.0, fy, cy], [0.0, 0.0, 1.0]],
            };
            tables.push(Table::CalibratedSensor, &row)?;
        }
        let row = rows::CalibratedSensor {
            token: self.clock.token(Kind::Calibrated, CAMERAS.len() as u64, 0),
            sensor_token: tables.sensor(CAMERAS.len()),
            translation: LIDAR_AT_M,
            rotation: lidar_rotation(),
            camera_intrinsic: Vec::new(),
        };
        tables.push(Table::CalibratedSensor, &row)
    }

    fn push_sample(&self, tables: &mut Tables, keyframe: u32) -> Result<()> {
        let last = self.config.keyframes - 1;
        let row = rows::Sample {
            token: self.sample_token(keyframe),
            timestamp: self.clock.turn_us(keyframe * TURNS_PER_KEYFRAME),
            prev: if keyframe == 0 { String::new() } else { self.sample_token(keyframe - 1) },
            next: if keyframe == last { String::new() } else { self.sample_token(keyframe + 1) },
            scene_token: self.clock.token(Kind::Scene, 0, 0),
        };
        tables.push(Table::Sample, &row)
    }

    fn push_picture(&self, tables: &mut Tables, keyframe: u32, camera: usize) -> Result<()> {
        let stamp = self.clock.camera_us(keyframe, camera);
        let name = |k: u32| self.clock.token(Kind::CameraData, k.into(), camera as u64);
        let last = self.config.keyframes - 1;
        let (width, height) = self.config.image_size;
        let row = rows::SampleData {
            token: name(keyframe),
            sample_token: self.sample_token(keyframe),
            ego_pose_token: name(keyframe),
            calibrated_sensor_token: self.clock.token(Kind::Calibrated, camera as u64, 0),
            timestamp: stamp,
            fileformat: "jpg",
            is_key_frame: true,
            height,
            width,
            filename: self.clock.path("samples", CAMERAS[camera].channel, stamp, "jpg"),
            prev: if keyframe == 0 { String::new() } else { name(keyframe - 1) },
            next: if keyframe == last { String::new() } else { name(keyframe + 1) },
        };
        tables.push(Table::SampleData, &row)?;
        self.push_pose(tables, row.token, stamp)
    }

    fn push_sweep(&self, tables: &mut Tables, turn: u32) -> Result<()> {
        let stamp = self.clock.turn_us(turn);
        let name = |t: u32| self.clock.token(Kind::LidarData, t.into(), 0);
        let last = turns(self.config.keyframes) - 1;
        let row = rows::SampleData {
            token: name(turn),
            sample_token: self.sample_token(turn.div_ceil(TURNS_PER_KEYFRAME)),
            ego_pose_token: name(turn),
            calibrated_sensor_token: self.clock.token(Kind::Calibrated, CAMERAS.len() as u64, 0),
            timestamp: stamp,
            fileformat: "pcd",
            is_key_frame: turn.is_multiple_of(TURNS_PER_KEYFRAME),
            height: 0,
            width: 0,
            filename: self.sweep_path(turn),
            prev: if turn == 0 { String::new() } else { name(turn - 1) },
            next: if turn == last { String::new() } else { name(turn + 1) },
        };
        tables.push(Table::SampleData, &row)?;
        self.push_pose(tables, row.token, stamp)
    }

    fn push_pose(&self, tables: &mut Tables, token: String, stamp: i64) -> Result<()> {
        let ego = self.world.ego(self.clock.seconds(stamp));
        let row = rows::EgoPose {
            token,
            timestamp: stamp,
            rotation: yaw_quaternion(ego.yaw),
            translation: [ego.position.x, ego.position.y, 0.0],
        };
        tables.push(Table::EgoPose, &row)
    }
}

/// One finished file.
#[derive(Debug)]
struct Made {
    bytes: u64,
    points: u64,
    seen: Option<Vec<Seen>>,
}

fn add(result: &Mutex<Result<Frames>>, job: Job, made: Made) {
    let mut result = result.lock();
    let Ok(frames) = result.as_mut() else { return };
    frames.data_bytes += made.bytes;
    frames.points += made.points;
    if let Job::Sweep { turn } = job {
        frames.sweeps += 1;
        if let Some(seen) = made.seen {
            frames.annotations += seen.len() as u64;
            frames.seen.insert(turn / TURNS_PER_KEYFRAME, seen);
        }
    }
}

fn write(root: &Path, path: &str, bytes: &[u8]) -> Result<()> {
    let path = root.join(path);
    fs::write(&path, bytes).map_err(|e| io("write", &path, e))
}
