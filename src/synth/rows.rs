//! Rows of the nuScenes tables, fields in the order the schema lists them.

use serde::Serialize;

/// `scene.json`.
#[derive(Debug, Serialize)]
pub struct Scene {
    /// Row token.
    pub token: String,
    /// The log it was cut from.
    pub log_token: String,
    /// Keyframes.
    pub nbr_samples: u32,
    /// First keyframe.
    pub first_sample_token: String,
    /// Last keyframe.
    pub last_sample_token: String,
    /// Short name.
    pub name: String,
    /// A sentence.
    pub description: String,
}

/// `sample.json`.
#[derive(Debug, Serialize)]
pub struct Sample {
    /// Row token.
    pub token: String,
    /// Keyframe time, microseconds.
    pub timestamp: i64,
    /// Keyframe before, or "".
    pub prev: String,
    /// Keyframe after, or "".
    pub next: String,
    /// Its scene.
    pub scene_token: String,
}

/// `sample_data.json`.
#[derive(Debug, Serialize)]
pub struct SampleData {
    /// Row token.
    pub token: String,
    /// The keyframe it belongs to: the nearest that is not earlier.
    pub sample_token: String,
    /// Pose of the car at this stamp.
    pub ego_pose_token: String,
    /// Calibration.
    pub calibrated_sensor_token: String,
    /// Stamp, microseconds.
    pub timestamp: i64,
    /// `jpg` or `pcd`.
    pub fileformat: &'static str,
    /// Whether it is the keyframe's own record.
    pub is_key_frame: bool,
    /// Rows of the picture, 0 for LiDAR.
    pub height: u32,
    /// Columns of the picture, 0 for LiDAR.
    pub width: u32,
    /// Path below the root.
    pub filename: String,
    /// Record of the same sensor before, or "".
    pub prev: String,
    /// Record of the same sensor after, or "".
    pub next: String,
}

/// `ego_pose.json`.
#[derive(Debug, Serialize)]
pub struct EgoPose {
    /// Row token.
    pub token: String,
    /// Time, microseconds.
    pub timestamp: i64,
    /// Quaternion w x y z, global ← ego.
    pub rotation: [f64; 4],
    /// Metres, global.
    pub translation: [f64; 3],
}

/// `calibrated_sensor.json`.
#[derive(Debug, Serialize)]
pub struct CalibratedSensor {
    /// Row token.
    pub token: String,
    /// The sensor.
    pub sensor_token: String,
    /// Metres, ego frame.
    pub translation: [f64; 3],
    /// Quaternion w x y z, ego ← sensor.
    pub rotation: [f64; 4],
    /// 3x3 pinhole matrix in pixels, empty for LiDAR.
    pub camera_intrinsic: Vec<[f64; 3]>,
}

/// `sample_annotation.json`.
#[derive(Debug, Serialize)]
pub struct Annotation {
    /// Row token.
    pub token: String,
    /// The keyframe.
    pub sample_token: String,
    /// The thing.
    pub instance_token: String,
    /// Visibility level.
    pub visibility_token: String,
    /// Attributes, at most one.
    pub attribute_tokens: Vec<String>,
    /// Centre, metres, global.
    pub translation: [f64; 3],
    /// Width, length, height, metres.
    pub size: [f64; 3],
    /// Quaternion w x y z.
    pub rotation: [f64; 4],
    /// The thing's annotation before, or "".
    pub prev: String,
    /// The thing's annotation after, or "".
    pub next: String,
    /// Points of the keyframe's sweep on it.
    pub num_lidar_pts: usize,
    /// Always 0: there is no radar.
    pub num_radar_pts: usize,
}

/// `instance.json`.
#[derive(Debug, Serialize)]
pub struct Instance {
    /// Row token.
    pub token: String,
    /// Its category.
    pub category_token: String,
    /// Annotations it has.
    pub nbr_annotations: usize,
    /// First of them.
    pub first_annotation_token: String,
    /// Last of them.
    pub last_annotation_token: String,
}

/// `log.json`.
#[derive(Debug, Serialize)]
pub struct Log {
    /// Row token.
    pub token: String,
    /// File name of the log.
    pub logfile: String,
    /// Name of the car.
    pub vehicle: &'static str,
    /// ISO date.
    pub date_captured: &'static str,
    /// Where.
    pub location: &'static str,
}

/// `map.json`.
#[derive(Debug, Serialize)]
pub struct Map {
    /// Kind of map.
    pub category: &'static str,
    /// Row token.
    pub token: String,
    /// Path below the root.
    pub filename: &'static str,
    /// Logs on this map.
    pub log_tokens: Vec<String>,
}

/// `sensor.json`.
#[derive(Debug, Serialize)]
pub struct Sensor {
    /// Row token.
    pub token: String,
    /// Channel name.
    pub channel: &'static str,
    /// `camera` or `lidar`.
    pub modality: &'static str,
}

/// `category.json` and `attribute.json`.
#[derive(Debug, Serialize)]
pub struct Named {
    /// Row token.
    pub token: String,
    /// Name.
    pub name: &'static str,
    /// What it means.
    pub description: &'static str,
}

/// `visibility.json`.
#[derive(Debug, Serialize)]
pub struct Visibility {
    /// What it means.
    pub description: &'static str,
    /// `1` to `4`.
    pub token: &'static str,
    /// Name.
    pub level: &'static str,
}
