//! Records as they stand in the JSON, and as they are kept.

use serde::de::{Deserializer, Visitor};
use serde::{Deserialize, de};

use super::token::TokenId;

/// What a sensor measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Modality {
    /// Pictures.
    Camera,
    /// Points.
    Lidar,
    /// Radar returns.
    Radar,
    /// Anything else, kept as bytes.
    Other,
}

/// Encoding of a sensor record, from the end of its file's name (`fileformat` calls LiDAR records
/// `pcd`, which they are not).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// `.jpg`, `.jpeg`
    Jpeg,
    /// `.png`
    Png,
    /// `.bin`: little-endian f32 records
    Bin,
    /// `.pcd`
    Pcd,
    /// Anything else.
    Other,
}

impl FileFormat {
    pub(super) fn of(filename: &str) -> Self {
        let ending = filename.rsplit_once('.').map_or("", |(_, ending)| ending);
        match ending.to_ascii_lowercase().as_str() {
            "jpg" | "jpeg" => Self::Jpeg,
            "png" => Self::Png,
            "bin" => Self::Bin,
            "pcd" => Self::Pcd,
            _ => Self::Other,
        }
    }
}

/// A continuous piece of driving.
#[derive(Debug, Clone)]
pub struct Scene {
    /// Its token.
    pub token: TokenId,
    /// Its name, e.g. `scene-0061`.
    pub name: String,
    /// Samples it should have.
    pub samples: u64,
    pub(super) log: Option<TokenId>,
    pub(super) first: Option<TokenId>,
    pub(super) last: Option<TokenId>,
}

/// An annotated instant.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Its token.
    pub token: TokenId,
    /// Its time, nanoseconds since the Unix epoch.
    pub timestamp_ns: i64,
    pub(super) scene: Option<TokenId>,
    pub(super) prev: Option<TokenId>,
    pub(super) next: Option<TokenId>,
}

/// How a sensor is mounted, and a camera's intrinsics.
#[derive(Debug, Clone, Copy)]
pub struct CalibratedSensor {
    /// Its token.
    pub token: TokenId,
    /// Quaternion w, x, y, z: ego ← sensor.
    pub rotation_wxyz: [f64; 4],
    /// ego ← sensor, metres.
    pub translation_m: [f64; 3],
    /// Row-major 3x3 in pixels, for cameras.
    pub intrinsic: Option<[f64; 9]>,
    pub(super) sensor: Option<TokenId>,
}

/// Where the car was.
#[derive(Debug, Clone, Copy)]
pub struct EgoPose {
    /// Its token.
    pub token: TokenId,
    /// When, nanoseconds since the Unix epoch.
    pub timestamp_ns: i64,
    /// Quaternion w, x, y, z: global ← ego.
    pub rotation_wxyz: [f64; 4],
    /// global ← ego, metres.
    pub translation_m: [f64; 3],
}

/// One record of one sensor.
#[derive(Debug, Clone, Copy)]
pub struct SampleData {
    /// Its token.
    pub token: TokenId,
    /// Its time, nanoseconds since the Unix epoch.
    pub timestamp_ns: i64,
    /// Whether it belongs to a sample, rather than lying between two.
    pub is_key_frame: bool,
    /// Encoding of its file.
    pub format: FileFormat,
    /// Picture width in pixels; 0 for others.
    pub width: u32,
    /// Picture height in pixels; 0 for others.
    pub height: u32,
    pub(super) filename: (u64, u32),
    pub(super) sample: Option<TokenId>,
    pub(super) ego_pose: Option<TokenId>,
    pub(super) calibrated_sensor: Option<TokenId>,
    pub(super) prev: Option<TokenId>,
    pub(super) next: Option<TokenId>,
}

/// One box at one sample, in the global frame.
#[derive(Debug, Clone)]
pub struct Annotation {
    /// Its token.
    pub token: TokenId,
    /// Centre, metres.
    pub translation_m: [f64; 3],
    /// Width, length, height, metres: the tables' order.
    pub size_wlh_m: [f64; 3],
    /// Quaternion w, x, y, z: global ← box.
    pub rotation_wxyz: [f64; 4],
    /// LiDAR points inside, -1 where unknown.
    pub lidar_points: i32,
    pub(super) sample: Option<TokenId>,
    pub(super) instance: Option<TokenId>,
    pub(super) visibility: Option<TokenId>,
    pub(super) attributes: Vec<TokenId>,
    pub(super) prev: Option<TokenId>,
    pub(super) next: Option<TokenId>,
}

/// A record of which only the token and the name matter.
#[derive(Debug, Deserialize)]
pub(super) struct NamedJson {
    pub token: String,
    #[serde(default)]
    pub name: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct InstanceJson {
    pub token: String,
    pub category_token: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct SensorJson {
    pub token: String,
    pub channel: String,
    pub modality: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct CalibratedSensorJson {
    pub token: String,
    pub sensor_token: String,
    pub rotation: [f64; 4],
    pub translation: [f64; 3],
    #[serde(default)]
    pub camera_intrinsic: Vec<[f64; 3]>,
}

#[derive(Debug, Deserialize)]
pub(super) struct EgoPoseJson {
    pub token: String,
    pub timestamp: MicrosJson,
    pub rotation: [f64; 4],
    pub translation: [f64; 3],
}

#[derive(Debug, Deserialize)]
pub(super) struct SceneJson {
    pub token: String,
    pub name: String,
    #[serde(default)]
    pub log_token: String,
    #[serde(default)]
    pub nbr_samples: u64,
    #[serde(default)]
    pub first_sample_token: String,
    #[serde(default)]
    pub last_sample_token: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct SampleJson {
    pub token: String,
    pub timestamp: MicrosJson,
    pub scene_token: String,
    #[serde(default)]
    pub prev: String,
    #[serde(default)]
    pub next: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct SampleDataJson {
    pub token: String,
    pub sample_token: String,
    pub ego_pose_token: String,
    pub calibrated_sensor_token: String,
    pub timestamp: MicrosJson,
    pub is_key_frame: bool,
    pub filename: String,
    #[serde(default)]
    pub width: Option<u32>,
    #[serde(default)]
    pub height: Option<u32>,
    #[serde(default)]
    pub prev: String,
    #[serde(default)]
    pub next: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct AnnotationJson {
    pub token: String,
    pub sample_token: String,
    pub instance_token: String,
    pub translation: [f64; 3],
    pub size: [f64; 3],
    pub rotation: [f64; 4],
    #[serde(default = "unknown_points")]
    pub num_lidar_pts: i32,
    #[serde(default)]
    pub visibility_token: String,
    #[serde(default)]
    pub attribute_tokens: Vec<String>,
    #[serde(default)]
    pub prev: String,
    #[serde(default)]
    pub next: String,
}

fn unknown_points() -> i32 {
    -1
}

/// Microseconds, as an integer (nuScenes) or a float (Lyft), kept as nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct MicrosJson(pub i64);

/// Microseconds past this (the year 2262) do not fit nanoseconds in an i64.
const MICROS_MAX: i64 = i64::MAX / 1000;

impl<'de> Deserialize<'de> for MicrosJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MicrosVisitor)
    }
}

struct MicrosVisitor;

impl Visitor<'_> for MicrosVisitor {
    type Value = MicrosJson;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a time of at most {MICROS_MAX} microseconds")
    }

    fn visit_i64<E: de::Error>(self, micros: i64) -> Result<MicrosJson, E> {
        let nanos = micros.checked_mul(1000).map(MicrosJson);
        nanos.ok_or_else(|| E::invalid_value(de::Unexpected::Signed(micros), &self))
    }

    fn visit_u64<E: de::Error>(self, micros: u64) -> Result<MicrosJson, E> {
        let signed = i64::try_from(micros);
        signed
            .map_err(|_| E::invalid_value(de::Unexpected::Unsigned(micros), &self))
            .and_then(|micros| self.visit_i64(micros))
    }

    fn visit_f64<E: de::Error>(self, micros: f64) -> Result<MicrosJson, E> {
        if micros.is_nan() || micros.abs() >= MICROS_MAX as f64 {
            return Err(E::invalid_value(de::Unexpected::Float(micros), &self));
        }
        // Whole and part separately: the product would not fit the 53 bits of an f64.
        let whole = micros.trunc();
        let part_ns = ((micros - whole) * 1000.0).round() as i64;
        Ok(MicrosJson(whole as i64 * 1000 + part_ns))
    }
}
