//! Values of the sample table, as plain Rust.

use std::collections::BTreeMap;

/// What a field means to a training job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FieldKind {
    /// Encoded picture; natural form (H, W, 3) uint8 RGB, or (H, W) uint16 for depth.
    Image,
    /// Encoded video.
    Video,
    /// Point cloud in a sensor frame, with its earlier sweeps.
    Points,
    /// Radar returns.
    Radar,
    /// Rigid transform, f64 4x4 (target ← source).
    Pose,
    /// Inertial readings.
    Imu,
    /// CAN signals.
    Can,
    /// 3-D boxes: (N, 7) f32 centre x y z, length width height, yaw, in a named frame.
    Boxes,
    /// Sensor calibration.
    Calibration,
    /// Map excerpt.
    Map,
    /// Numeric array.
    Tensor,
    /// UTF-8 text.
    Text,
    /// Bytes without a decoder.
    Bytes,
    /// One number.
    Scalar,
}

impl FieldKind {
    /// Every kind with its name in the index file.
    const NAMES: [(Self, &'static str); 14] = [
        (Self::Image, "image"),
        (Self::Video, "video"),
        (Self::Points, "points"),
        (Self::Radar, "radar"),
        (Self::Pose, "pose"),
        (Self::Imu, "imu"),
        (Self::Can, "can"),
        (Self::Boxes, "boxes"),
        (Self::Calibration, "calibration"),
        (Self::Map, "map"),
        (Self::Tensor, "tensor"),
        (Self::Text, "text"),
        (Self::Bytes, "bytes"),
        (Self::Scalar, "scalar"),
    ];

    /// Name in the index file and in `ds.fields`.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(kind, _)| *kind == self).map_or("bytes", |(_, name)| name)
    }

    /// Kind of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, n)| *n == name).map(|(kind, _)| *kind)
    }
}

/// How the bytes of a blob are encoded.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// JPEG picture.
    Jpeg,
    /// PNG picture.
    Png,
    /// Little-endian f32 records of this many columns (nuScenes and KITTI `.bin`).
    F32Records {
        /// Columns of one record.
        columns: u32,
    },
    /// PCD point cloud.
    Pcd,
    /// NumPy `.npy`.
    Npy,
    /// UTF-8 JSON.
    Json,
    /// UTF-8 text.
    Text,
    /// Anything else.
    Raw,
}

impl Codec {
    /// Name in the index file: `f32x5` is records of five little-endian f32.
    pub fn name(&self) -> String {
        match self {
            Self::Jpeg => "jpeg".into(),
            Self::Png => "png".into(),
            Self::F32Records { columns } => format!("f32x{columns}"),
            Self::Pcd => "pcd".into(),
            Self::Npy => "npy".into(),
            Self::Json => "json".into(),
            Self::Text => "text".into(),
            Self::Raw => "raw".into(),
        }
    }

    /// Codec of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "jpeg" => Self::Jpeg,
            "png" => Self::Png,
            "pcd" => Self::Pcd,
            "npy" => Self::Npy,
            "json" => Self::Json,
            "text" => Self::Text,
            "raw" => Self::Raw,
            other => {
                let columns = other.strip_prefix("f32x")?.parse().ok()?;
                (1..=RECORD_COLUMNS_MAX)
                    .contains(&columns)
                    .then_some(Self::F32Records { columns })?
            }
        })
    }

    /// Codec and kind that a file extension (lower case, no dot) promises.
    pub fn from_extension(extension: &str) -> (Self, FieldKind) {
        let last = extension.rsplit('.').next().unwrap_or_default();
        match last {
            "jpg" | "jpeg" => (Self::Jpeg, FieldKind::Image),
            "png" => (Self::Png, FieldKind::Image),
            "json" => (Self::Json, FieldKind::Text),
            "txt" | "text" | "cls" => (Self::Text, FieldKind::Text),
            "npy" => (Self::Npy, FieldKind::Tensor),
            "pcd" => (Self::Pcd, FieldKind::Points),
            _ => (Self::Raw, FieldKind::Bytes),
        }
    }
}

/// Columns of the widest point record that is believed.
const RECORD_COLUMNS_MAX: u32 = 256;

/// A byte range of a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlobRef {
    /// Row of the sources table.
    pub source: u32,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
    /// Encoding.
    pub codec: Codec,
}

/// One item of a sequence field: an earlier sweep of the keyframe's sensor.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceItem {
    /// Its bytes.
    pub blob: BlobRef,
    /// When it was taken, by the meaning of the stream's `stamp`.
    pub timestamp_ns: i64,
    /// Row-major 4x4: keyframe sensor frame ← this item's sensor frame.
    pub transform: [f64; 16],
}

/// A rigid transform with the names of its frames.
#[derive(Debug, Clone, PartialEq)]
pub struct Pose {
    /// Frame of the result.
    pub target: String,
    /// Frame of the input.
    pub source: String,
    /// Row-major 4x4, target ← source, metres.
    pub matrix: [f64; 16],
    /// When it holds.
    pub timestamp_ns: i64,
}

/// Calibration of one sensor at one sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// The sensor's channel name.
    pub channel: String,
    /// Row-major 4x4: ego ← sensor, metres.
    pub sensor_to_ego: [f64; 16],
    /// Row-major 4x4: global ← ego at the sensor's own time, metres.
    pub ego_to_global: [f64; 16],
    /// Row-major 3x3 pinhole matrix in pixels; `None` for sensors that are not cameras.
    pub intrinsic: Option<[f64; 9]>,
    /// The sensor's own time at this sample.
    pub timestamp_ns: i64,
}

/// Boxes of one sample. All vectors have one entry per box.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Boxes {
    /// Frame of centres and yaw.
    pub frame: String,
    /// Centre x y z, length width height in metres, yaw in radians about +z from +x.
    pub geometry: Vec<[f32; 7]>,
    /// Velocity x y z in m/s in the same frame; NaN where unknown.
    pub velocity: Vec<[f32; 3]>,
    /// Class names as in the data set.
    pub names: Vec<String>,
    /// Annotation tokens ("" where there are none).
    pub tokens: Vec<String>,
    /// LiDAR points inside, -1 where unknown.
    pub lidar_points: Vec<i32>,
}

/// One file or object that samples lie in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// URI relative to the data set's root.
    pub uri: String,
    /// Size when indexed.
    pub size_bytes: u64,
    /// Etag when indexed; empty for local files.
    pub etag: String,
    /// Modification time when indexed; a difference alone is a warning, since copies change it.
    pub mtime_ns: i64,
}

impl Source {
    /// Size of a source that was not there when it was indexed.
    pub const MISSING_BYTES: u64 = u64::MAX;

    /// Whether the file was there when it was indexed.
    pub fn is_missing(&self) -> bool {
        self.size_bytes == Self::MISSING_BYTES
    }
}

/// One field of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldSpec {
    /// Name, also the column's.
    pub name: String,
    /// What it means.
    pub kind: FieldKind,
    /// Frame its geometry is in, where it has one.
    pub frame: Option<String>,
    /// Names of the columns of a point record, for points and radar.
    pub columns: Vec<String>,
    /// Anything else the builder wants to say (for example `stamp` = `end`).
    pub extra: BTreeMap<String, String>,
}
