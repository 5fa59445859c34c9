//! mmdet3d info files: rows from a pickle that lies beside its data or at a data set's root.

use std::sync::Arc;

use drivetrain_formats::mmdet3d::{BoxInfo, ImageInfo, Info, Infos, parse};

use super::builder::{IndexBuilder, IndexMeta};
use super::files::Files;
use super::geometry::{Matrix4, inverse_rigid, multiply};
use super::input::Input;
use super::inputs::Inputs;
use super::progress::Progress;
use super::schema::Layout;
use super::table::SampleTable;
use super::types::{BlobRef, Boxes, Calibration, Codec, FieldKind, FieldSpec, Pose, SequenceItem};
use crate::error::{Error, Result};
use crate::storage::Store;

/// Channel that infos do not name.
const LIDAR: &str = "LIDAR_TOP";
/// Largest info file that is read; nuScenes' is 0.7 GB.
const PICKLE_BYTES_MAX: u64 = 8 << 30;
/// Cameras of one data set.
const CHANNELS_MAX: usize = 64;
/// Infos store seconds as f64, which rounds microseconds; a file name with the exact time is
/// believed if it is this close.
const STAMP_TOLERANCE_NS: u64 = 1_000_000;
/// Columns of nuScenes LiDAR records; older infos say 4 of them.
const NUSCENES_COLUMNS: u32 = 5;
/// Names of the columns, of which a record has the first ones.
const COLUMN_NAMES: [&str; 5] = ["x", "y", "z", "intensity", "ring"];

/// Indexes the info file `path` below the store's root.
pub(super) fn build(
    store: &Arc<dyn Store>,
    path: &str,
    root: &str,
    progress: &dyn Progress,
) -> Result<SampleTable> {
    let mut input = Input::open(store, path)?;
    let size = input.size_bytes();
    if size > PICKLE_BYTES_MAX {
        return Err(Error::invalid(path, format!("at most {PICKLE_BYTES_MAX} bytes"), size));
    }
    let mut inputs = Inputs::default();
    inputs.add(input.meta());
    progress.stage("reading infos", None);
    let infos = parse(input.exact(0, size)?)
        .map_err(|e| Error::Format { file: path.to_string(), source: Box::new(e) })?;
    let mut build = Build::new(store, path, &infos)?;
    progress.stage("indexing samples", Some(infos.samples.len() as u64));
    for info in &infos.samples {
        build.row(info)?;
        progress.advance(1);
    }
    let mut notes: Vec<_> = build.files.note().into_iter().collect();
    if infos.info_version.is_none() {
        notes.push("the info file has no info_version: boxes are taken as it has them".into());
    }
    let format = "mmdet3d".to_string();
    let meta = IndexMeta { root: root.to_string(), format, inputs: inputs.to_json(), notes };
    build.builder.finish(&meta)
}

struct Build<'a> {
    files: Files<'a>,
    builder: IndexBuilder,
    channels: Vec<String>,
    columns: u32,
    /// Name for rows whose files do not say their log.
    scene: String,
}

impl<'a> Build<'a> {
    fn new(store: &'a Arc<dyn Store>, path: &str, infos: &Infos) -> Result<Self> {
        let mut channels: Vec<String> = Vec::new();
        for image in infos.samples.iter().flat_map(|info| &info.images) {
            if !channels.contains(&image.channel) {
                channels.push(image.channel.clone());
            }
        }
        if channels.len() > CHANNELS_MAX {
            return Err(Error::invalid(path, format!("{CHANNELS_MAX} cameras"), channels.len()));
        }
        channels.sort();
        let said = infos.samples.iter().find_map(|info| info.lidar.columns);
        let columns = if infos.dataset.contains("nuscenes") {
            NUSCENES_COLUMNS
        } else {
            said.filter(|n| (3..=256).contains(n)).unwrap_or(4)
        };
        let base = path.rsplit('/').next().unwrap_or(path);
        let scene = base.strip_suffix(".pkl").unwrap_or(base).to_string();
        let builder = IndexBuilder::new(fields(&channels, columns))?;
        Ok(Self { files: Files::new(store), builder, channels, columns, scene })
    }

    fn lidar_field(&self) -> usize {
        self.channels.len()
    }

    fn row(&mut self, info: &Info) -> Result<()> {
        let stamp = timestamp_ns(&info.lidar.path, info.timestamp_s);
        let scene = scene_of(&info.lidar.path).unwrap_or(&self.scene).to_string();
        self.builder.begin(&info.token, &scene, stamp)?;
        let lidar = self.lidar_field();
        for image in &info.images {
            self.image(info, image)?;
        }
        let codec = Codec::F32Records { columns: self.columns };
        let blob = self.blob(&info.lidar.path, LIDAR, codec.clone())?;
        let mut sweeps = Vec::new();
        for sweep in &info.sweeps {
            sweeps.push(SequenceItem {
                blob: self.blob(&sweep.path, LIDAR, codec.clone())?,
                timestamp_ns: timestamp_ns(&sweep.path, sweep.timestamp_s),
                transform: inverse_rigid(&sweep.key2sweep),
            });
        }
        self.builder.blob(lidar, &blob, stamp, &sweeps)?;
        if let Some(boxes) = &info.boxes {
            self.builder.boxes(lidar + 1, &boxes_of(boxes))?;
        }
        let pose = Pose {
            target: "global".into(),
            source: "ego".into(),
            matrix: info.ego2global,
            timestamp_ns: stamp,
        };
        self.builder.pose(lidar + 2, &pose)?;
        let value = Calibration {
            channel: LIDAR.into(),
            sensor_to_ego: info.lidar.lidar2ego,
            ego_to_global: info.ego2global,
            intrinsic: None,
            timestamp_ns: stamp,
        };
        self.builder.calibration(lidar + 3 + self.channels.len(), &value)
    }

    fn image(&mut self, info: &Info, image: &ImageInfo) -> Result<()> {
        let Some(at) = self.channels.iter().position(|c| *c == image.channel) else {
            return Ok(());
        };
        let extension = image.path.rsplit('.').next().unwrap_or_default().to_lowercase();
        let (codec, _) = Codec::from_extension(&extension);
        let blob = self.blob(&image.path, &image.channel, codec)?;
        let stamp = timestamp_ns(&image.path, image.timestamp_s.unwrap_or(info.timestamp_s));
        self.builder.blob(at, &blob, stamp, &[])?;
        let value = Calibration {
            channel: image.channel.clone(),
            sensor_to_ego: image.cam2ego,
            ego_to_global: camera_pose(info, image),
            intrinsic: Some(image.cam2img),
            timestamp_ns: stamp,
        };
        self.builder.calibration(self.lidar_field() + 3 + at, &value)
    }

    /// The file where it is: as the info says, beside the info file, or in nuScenes' folders.
    fn blob(&mut self, path: &str, channel: &str, codec: Codec) -> Result<BlobRef> {
        let name = path.rsplit('/').next().unwrap_or(path);
        let in_tree = ["samples/", "sweeps/"].iter().find_map(|f| path.find(f)).map(|i| &path[i..]);
        let sample = format!("samples/{channel}/{name}");
        let sweep = format!("sweeps/{channel}/{name}");
        let relative = path.strip_prefix("./").unwrap_or(path);
        let safe = !relative.starts_with('/') && !relative.split('/').any(|p| p == "..");
        let as_said = safe.then_some(relative);
        let candidates =
            [as_said, in_tree, Some(name), Some(sample.as_str()), Some(sweep.as_str())];
        let safe = |p: &&str| p.split('/').all(|part| !matches!(part, "" | "." | ".."));
        let mut candidates = candidates.into_iter().flatten().filter(safe);
        let fallback = in_tree.filter(safe).or(as_said).unwrap_or(&sample).to_string();
        let mut found = None;
        for candidate in &mut candidates {
            if self.files.exists(candidate)? {
                found = Some(candidate.to_string());
                break;
            }
        }
        let path = found.unwrap_or(fallback);
        let (source, length) = self.files.add(&mut self.builder, &path)?;
        Ok(BlobRef { source, offset: 0, length, codec })
    }
}

/// global ← ego at the camera's time. Infos have it only inside camera ← LiDAR.
fn camera_pose(info: &Info, image: &ImageInfo) -> Matrix4 {
    let Some(lidar2cam) = &image.lidar2cam else { return info.ego2global };
    let lidar_to_global = multiply(&info.ego2global, &info.lidar.lidar2ego);
    let camera_to_global = multiply(&lidar_to_global, &inverse_rigid(lidar2cam));
    multiply(&camera_to_global, &inverse_rigid(&image.cam2ego))
}

fn boxes_of(all: &[BoxInfo]) -> Boxes {
    let velocity = |b: &BoxInfo| {
        let [x, y] = b.velocity_mps;
        [x, y, if x.is_nan() { f64::NAN } else { 0.0 }].map(|v| v as f32)
    };
    Boxes {
        frame: LIDAR.into(),
        geometry: all.iter().map(|b| b.geometry.map(|v| v as f32)).collect(),
        velocity: all.iter().map(velocity).collect(),
        names: all.iter().map(|b| b.name.clone()).collect(),
        tokens: vec![String::new(); all.len()],
        lidar_points: all.iter().map(|b| b.lidar_points).collect(),
    }
}

/// Log of a nuScenes file name: `<log>__<channel>__<microseconds>.<ending>`.
fn scene_of(path: &str) -> Option<&str> {
    let name = path.rsplit('/').next()?;
    name.split_once("__").map(|(log, _)| log)
}

/// Exact time from a nuScenes file name if it is the one the info means, else the info's.
fn timestamp_ns(path: &str, seconds: f64) -> i64 {
    let rounded_ns = (seconds * 1e6).round() as i64 * 1000;
    let stem = path.rsplit("__").next().and_then(|s| s.split('.').next());
    let exact = stem.and_then(|s| s.parse::<i64>().ok()).and_then(|us| us.checked_mul(1000));
    exact.filter(|ns| ns.abs_diff(rounded_ns) < STAMP_TOLERANCE_NS).unwrap_or(rounded_ns)
}

fn fields(channels: &[String], columns: u32) -> Vec<(FieldSpec, Layout)> {
    let spec = |name: &str, kind, frame: &str, extra: &[(&str, &str)]| FieldSpec {
        name: name.to_string(),
        kind,
        frame: Some(frame.to_string()),
        columns: Vec::new(),
        extra: extra.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())).collect(),
    };
    let mut fields: Vec<_> = channels
        .iter()
        .map(|c| (spec(c, FieldKind::Image, c, &[("stamp", "trigger")]), Layout::Blob))
        .collect();
    let mut lidar = spec(LIDAR, FieldKind::Points, LIDAR, &[("stamp", "end")]);
    let named = COLUMN_NAMES.iter().map(|name| (*name).to_string());
    let rest = COLUMN_NAMES.len()..(columns as usize).max(COLUMN_NAMES.len());
    lidar.columns = named.chain(rest.map(|i| format!("c{i}"))).take(columns as usize).collect();
    fields.push((lidar, Layout::Sequence));
    fields.push((spec("boxes", FieldKind::Boxes, LIDAR, &[]), Layout::Boxes));
    fields.push((spec("ego_pose", FieldKind::Pose, "global", &[("source", "ego")]), Layout::Pose));
    let lidar = LIDAR.to_string();
    for channel in channels.iter().chain([&lidar]) {
        let name = format!("{channel}.calibration");
        let extra = [("channel", channel.as_str())];
        fields.push((spec(&name, FieldKind::Calibration, "ego", &extra), Layout::Calibration));
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_from_names_that_mean_the_same() {
        let name = "a/n015__LIDAR_TOP__1532402927647951.pcd.bin";
        assert_eq!(timestamp_ns(name, 1_532_402_927.647_951), 1_532_402_927_647_951_000);
        assert_eq!(timestamp_ns(name, 1.5), 1_500_000_000, "another record's name");
        assert_eq!(timestamp_ns("000008.bin", 2.0), 2_000_000_000);
        assert_eq!(scene_of(name), Some("n015"));
    }
}
