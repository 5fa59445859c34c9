//! mmdet3d's info files: a pickled dict with one entry per sample. Two generations are read: the
//! older says its classes as `CLASSES` and names the key → sweep matrix `lidar2cam`, the newer has
//! `categories` and calls it `lidar2sensor`.
//!
//! Geometry is as the file has it (f32 precision); nothing is composed here.

use crate::error::{Error, Result};
use crate::pickle::{Pickle, Value};

/// Row-major 4x4.
pub type Matrix4 = [f64; 16];

/// A whole info file.
#[derive(Debug, Default)]
pub struct Infos {
    /// Data set, lower case; empty where unknown.
    pub dataset: String,
    /// Version of the info format, where it says one.
    pub info_version: Option<String>,
    /// The samples.
    pub samples: Vec<Info>,
}

/// One sample.
#[derive(Debug)]
pub struct Info {
    /// Sample token, or the sample's number where there is none.
    pub token: String,
    /// Time of the LiDAR record, seconds.
    pub timestamp_s: f64,
    /// global ← ego at that time.
    pub ego2global: Matrix4,
    /// The cameras, in the file's order.
    pub images: Vec<ImageInfo>,
    /// The LiDAR.
    pub lidar: LidarInfo,
    /// Earlier sweeps, nearest first.
    pub sweeps: Vec<SweepInfo>,
    /// Boxes in the LiDAR frame, where the file has annotations.
    pub boxes: Option<Vec<BoxInfo>>,
}

/// One camera.
#[derive(Debug)]
pub struct ImageInfo {
    /// Channel, e.g. `CAM_FRONT`.
    pub channel: String,
    /// File as the info names it.
    pub path: String,
    /// Pixels ← camera, row-major 3x3.
    pub cam2img: [f64; 9],
    /// ego ← camera.
    pub cam2ego: Matrix4,
    /// camera ← LiDAR, each at its own time.
    pub lidar2cam: Option<Matrix4>,
    /// Time of the picture, seconds.
    pub timestamp_s: Option<f64>,
}

/// The LiDAR record.
#[derive(Debug)]
pub struct LidarInfo {
    /// File as the info names it.
    pub path: String,
    /// Columns of a record as the info says; wrong in older nuScenes infos.
    pub columns: Option<u32>,
    /// ego ← LiDAR.
    pub lidar2ego: Matrix4,
}

/// An earlier LiDAR record.
#[derive(Debug)]
pub struct SweepInfo {
    /// File as the info names it.
    pub path: String,
    /// Its time, seconds.
    pub timestamp_s: f64,
    /// sweep sensor ← key sensor, in whichever name the file has it.
    pub key2sweep: Matrix4,
}

/// One box.
#[derive(Debug)]
pub struct BoxInfo {
    /// Centre x y z, length width height, yaw, in the LiDAR frame.
    pub geometry: [f64; 7],
    /// Velocity x y in m/s; NaN where unknown.
    pub velocity_mps: [f64; 2],
    /// Class name; empty for labels that the file does not name.
    pub name: String,
    /// LiDAR points inside, -1 where unknown.
    pub lidar_points: i32,
}

/// Reads the info file in `bytes`.
pub fn parse(bytes: &[u8]) -> Result<Infos> {
    let pickle = Pickle::parse(bytes)?;
    let root = pickle.root();
    let meta = root.get("metainfo");
    let list = root.get("data_list").and_then(Value::items);
    let (Some(meta), Some(list)) = (meta, list) else {
        return Err(Error::Unsupported {
            what: "a pickle that is no mmdet3d info file (dict with metainfo and data_list)".into(),
        });
    };
    let text = |key: &str| meta.get(key).and_then(Value::as_str);
    let dataset = text("dataset").or(text("DATASET")).unwrap_or_default().to_lowercase();
    let names = class_names(meta);
    let samples = list.enumerate().map(|(at, value)| sample(Reader { at, value }, &names));
    Ok(Infos {
        info_version: text("info_version").map(String::from),
        samples: samples.collect::<Result<_>>()?,
        dataset,
    })
}

/// Class names by label.
fn class_names(meta: Value<'_>) -> Vec<(i64, String)> {
    let mut names = Vec::new();
    if let Some(pairs) = meta.get("categories").and_then(Value::pairs) {
        for (name, label) in pairs {
            if let (Some(name), Some(label)) = (name.as_str(), label.as_i64()) {
                names.push((label, name.to_string()));
            }
        }
    } else if let Some(list) = meta.get("CLASSES").and_then(Value::items) {
        let text = |(at, name): (usize, Value<'_>)| Some((at as i64, name.as_str()?.to_string()));
        names.extend(list.enumerate().filter_map(text));
    }
    names
}

/// A value that knows which sample it belongs to, for errors.
#[derive(Clone, Copy)]
struct Reader<'a> {
    at: usize,
    value: Value<'a>,
}

impl<'a> Reader<'a> {
    fn get(self, key: &str) -> Option<Reader<'a>> {
        let value = self.value.get(key).filter(|value| !value.is_none())?;
        Some(Self { value, ..self })
    }

    fn bad(self, column: &'static str, expected: &'static str) -> Error {
        let found = self.value.get(column).map_or("nothing", Value::kind).to_string();
        let record = format!("sample {}", self.at);
        Error::BadRecord { table: "data_list", column, record, expected, found }
    }

    fn text(self, column: &'static str) -> Result<String> {
        let text = self.value.get(column).and_then(Value::as_str);
        text.map(String::from).ok_or_else(|| self.bad(column, "text"))
    }

    fn number(self, column: &'static str) -> Result<f64> {
        let number = self.value.get(column).and_then(Value::as_f64).filter(|v| v.is_finite());
        number.ok_or_else(|| self.bad(column, "a finite number"))
    }

    fn numbers<const N: usize>(self, column: &'static str) -> Result<[f64; N]> {
        let all = self.value.get(column).and_then(Value::numbers::<N>);
        all.filter(|all| all.iter().all(|v| v.is_finite()))
            .ok_or_else(|| self.bad(column, "finite numbers of the right count"))
    }
}

fn sample(r: Reader<'_>, names: &[(i64, String)]) -> Result<Info> {
    let lidar = r.get("lidar_points").ok_or_else(|| r.bad("lidar_points", "a dict"))?;
    let images = match r.get("images").and_then(|images| images.value.pairs()) {
        None => Vec::new(),
        Some(pairs) => pairs
            .filter_map(|(channel, value)| Some((channel.as_str()?, Reader { value, ..r })))
            .map(|(channel, value)| image(channel, value))
            .collect::<Result<_>>()?,
    };
    let each = |key: &str| r.get(key).and_then(|list| list.value.items());
    let sweeps =
        each("lidar_sweeps").into_iter().flatten().map(|value| sweep(Reader { value, ..r }));
    let boxes = each("instances").map(|list| {
        list.map(|value| object(Reader { value, ..r }, names)).collect::<Result<Vec<_>>>()
    });
    let token = r.get("token").and_then(|token| token.value.as_str()).map(String::from);
    let number = r.get("sample_idx").and_then(|i| i.value.as_i64()).unwrap_or(r.at as i64);
    Ok(Info {
        token: token.unwrap_or_else(|| number.to_string()),
        timestamp_s: r.number("timestamp")?,
        ego2global: r.numbers("ego2global")?,
        images,
        lidar: LidarInfo {
            path: lidar.text("lidar_path")?,
            columns: lidar
                .get("num_pts_feats")
                .and_then(|n| n.value.as_i64())
                .and_then(|n| u32::try_from(n).ok()),
            lidar2ego: lidar.numbers("lidar2ego")?,
        },
        sweeps: sweeps.collect::<Result<_>>()?,
        boxes: boxes.transpose()?,
    })
}

fn image(channel: &str, r: Reader<'_>) -> Result<ImageInfo> {
    Ok(ImageInfo {
        channel: channel.to_string(),
        path: r.text("img_path")?,
        cam2img: r.numbers("cam2img")?,
        cam2ego: r.numbers("cam2ego")?,
        lidar2cam: r.get("lidar2cam").map(|_| r.numbers("lidar2cam")).transpose()?,
        timestamp_s: r.get("timestamp").map(|_| r.number("timestamp")).transpose()?,
    })
}

fn sweep(r: Reader<'_>) -> Result<SweepInfo> {
    let lidar = r.get("lidar_points").ok_or_else(|| r.bad("lidar_points", "a dict"))?;
    let name = if lidar.get("lidar2sensor").is_some() { "lidar2sensor" } else { "lidar2cam" };
    Ok(SweepInfo {
        path: lidar.text("lidar_path")?,
        timestamp_s: r.number("timestamp")?,
        key2sweep: lidar.numbers(name)?,
    })
}

fn object(r: Reader<'_>, names: &[(i64, String)]) -> Result<BoxInfo> {
    let label = r.get("bbox_label_3d").or(r.get("bbox_label")).and_then(|l| l.value.as_i64());
    let name = names.iter().find(|(known, _)| Some(*known) == label);
    let points = r.get("num_lidar_pts").and_then(|n| n.value.as_i64());
    Ok(BoxInfo {
        geometry: r.numbers("bbox_3d")?,
        velocity_mps: r.get("velocity").and_then(|v| v.value.numbers()).unwrap_or([f64::NAN; 2]),
        name: name.map(|(_, name)| name.clone()).unwrap_or_default(),
        lidar_points: points.and_then(|n| i32::try_from(n).ok()).unwrap_or(-1),
    })
}
