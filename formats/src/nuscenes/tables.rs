//! Reading the tables into rows.

use std::collections::HashMap;
use std::io::Read;

use serde::de::DeserializeOwned;

use super::TABLES;
use super::read::records;
use super::rows::{
    Annotation, AnnotationJson, CalibratedSensor, CalibratedSensorJson, EgoPose, EgoPoseJson,
    FileFormat, InstanceJson, Modality, NamedJson, Sample, SampleData, SampleDataJson, SampleJson,
    Scene, SceneJson, SensorJson,
};
use super::token::{TokenId, Tokens};
use crate::error::{Error, Result};

/// Rows of one table with their tokens.
#[derive(Debug)]
pub(super) struct Table<T> {
    pub(super) name: &'static str,
    pub(super) rows: Vec<T>,
    pub(super) by_token: HashMap<TokenId, u32>,
    pub(super) present: bool,
}

impl<T> Table<T> {
    fn new(name: &'static str) -> Self {
        Self { name, rows: Vec::new(), by_token: HashMap::new(), present: false }
    }

    fn push(&mut self, tokens: &Tokens, token: TokenId, row: T) -> Result<()> {
        if self.by_token.insert(token, self.rows.len() as u32).is_some() {
            return Err(Error::BadRecord {
                table: self.name,
                column: "token",
                record: tokens.text(token),
                expected: "unique",
                found: "it twice".into(),
            });
        }
        self.rows.push(row);
        Ok(())
    }

    /// Row of a token.
    pub(super) fn row(&self, token: Option<TokenId>) -> Option<usize> {
        token.and_then(|token| self.by_token.get(&token)).map(|row| *row as usize)
    }
}

/// A sensor: its channel's name and what it measures.
#[derive(Debug)]
pub(super) struct Sensor {
    pub(super) channel: String,
    pub(super) modality: Modality,
}

/// The tables as far as they have been read.
#[derive(Debug)]
pub struct Tables {
    pub(super) tokens: Tokens,
    /// File names, end to end: millions of separate strings would cost twice the memory.
    pub(super) filenames: String,
    pub(super) category: Table<String>,
    pub(super) attribute: Table<String>,
    pub(super) visibility: Table<String>,
    pub(super) log: Table<String>,
    pub(super) map: Table<String>,
    pub(super) instance: Table<Option<TokenId>>,
    pub(super) sensor: Table<Sensor>,
    pub(super) calibrated_sensor: Table<CalibratedSensor>,
    pub(super) ego_pose: Table<EgoPose>,
    pub(super) scene: Table<Scene>,
    pub(super) sample: Table<Sample>,
    pub(super) sample_data: Table<SampleData>,
    pub(super) sample_annotation: Table<Annotation>,
}

impl Default for Tables {
    fn default() -> Self {
        Self {
            tokens: Tokens::default(),
            filenames: String::new(),
            category: Table::new("category"),
            attribute: Table::new("attribute"),
            visibility: Table::new("visibility"),
            log: Table::new("log"),
            map: Table::new("map"),
            instance: Table::new("instance"),
            sensor: Table::new("sensor"),
            calibrated_sensor: Table::new("calibrated_sensor"),
            ego_pose: Table::new("ego_pose"),
            scene: Table::new("scene"),
            sample: Table::new("sample"),
            sample_data: Table::new("sample_data"),
            sample_annotation: Table::new("sample_annotation"),
        }
    }
}

impl Tables {
    /// Reads one of [`TABLES`] from its JSON.
    pub fn read(&mut self, table: &str, reader: impl Read) -> Result<()> {
        match table {
            "category" => named(&mut self.tokens, &mut self.category, reader),
            "attribute" => named(&mut self.tokens, &mut self.attribute, reader),
            "visibility" => named(&mut self.tokens, &mut self.visibility, reader),
            "log" => named(&mut self.tokens, &mut self.log, reader),
            "map" => named(&mut self.tokens, &mut self.map, reader),
            "instance" => fill(&mut self.tokens, &mut self.instance, reader, |t, r| {
                let InstanceJson { token, category_token } = r;
                let id = required(t, "instance", &token)?;
                Ok((id, t.intern(&category_token)))
            }),
            "sensor" => fill(&mut self.tokens, &mut self.sensor, reader, sensor),
            "calibrated_sensor" => {
                fill(&mut self.tokens, &mut self.calibrated_sensor, reader, calibrated_sensor)
            }
            "ego_pose" => fill(&mut self.tokens, &mut self.ego_pose, reader, ego_pose),
            "scene" => fill(&mut self.tokens, &mut self.scene, reader, scene),
            "sample" => fill(&mut self.tokens, &mut self.sample, reader, sample),
            "sample_data" => {
                let names = &mut self.filenames;
                fill(&mut self.tokens, &mut self.sample_data, reader, |t, r| {
                    sample_data(t, names, r)
                })
            }
            "sample_annotation" => {
                fill(&mut self.tokens, &mut self.sample_annotation, reader, annotation)
            }
            other => Err(Error::Unsupported {
                what: format!("table {other} (known: {})", TABLES.join(", ")),
            }),
        }
    }
}

fn named(tokens: &mut Tokens, table: &mut Table<String>, reader: impl Read) -> Result<()> {
    let name = table.name;
    fill(tokens, table, reader, |t, record: NamedJson| {
        Ok((required(t, name, &record.token)?, record.name))
    })
}

/// Reads all records of a table through `convert`.
fn fill<J: DeserializeOwned, T>(
    tokens: &mut Tokens,
    table: &mut Table<T>,
    reader: impl Read,
    mut convert: impl FnMut(&mut Tokens, J) -> Result<(TokenId, T)>,
) -> Result<()> {
    table.present = true;
    records(table.name, reader, |record: J| {
        let (token, row) = convert(tokens, record)?;
        table.push(tokens, token, row)
    })
}

fn required(tokens: &mut Tokens, table: &'static str, token: &str) -> Result<TokenId> {
    tokens.intern(token).ok_or_else(|| Error::BadRecord {
        table,
        column: "token",
        record: token.to_string(),
        expected: "a token",
        found: "an empty one".into(),
    })
}

/// JSON has no NaN, but an overlong exponent reads as infinity.
fn finite(table: &'static str, column: &'static str, record: &str, values: &[f64]) -> Result<()> {
    if values.iter().all(|v| v.is_finite()) {
        return Ok(());
    }
    Err(Error::BadRecord {
        table,
        column,
        record: record.to_string(),
        expected: "finite",
        found: format!("{values:?}"),
    })
}

fn sensor(tokens: &mut Tokens, r: SensorJson) -> Result<(TokenId, Sensor)> {
    let modality = match r.modality.as_str() {
        "camera" => Modality::Camera,
        "lidar" => Modality::Lidar,
        "radar" => Modality::Radar,
        _ => Modality::Other,
    };
    Ok((required(tokens, "sensor", &r.token)?, Sensor { channel: r.channel, modality }))
}

fn calibrated_sensor(
    tokens: &mut Tokens,
    r: CalibratedSensorJson,
) -> Result<(TokenId, CalibratedSensor)> {
    let table = "calibrated_sensor";
    finite(table, "rotation", &r.token, &r.rotation)?;
    finite(table, "translation", &r.token, &r.translation)?;
    let intrinsic = match r.camera_intrinsic.as_slice() {
        [] => None,
        [a, b, c] => Some([a[0], a[1], a[2], b[0], b[1], b[2], c[0], c[1], c[2]]),
        rows => {
            return Err(Error::BadRecord {
                table,
                column: "camera_intrinsic",
                record: r.token,
                expected: "empty or 3x3",
                found: format!("{} rows", rows.len()),
            });
        }
    };
    finite(table, "camera_intrinsic", &r.token, intrinsic.as_ref().map_or(&[], |k| &k[..]))?;
    let token = required(tokens, table, &r.token)?;
    let row = CalibratedSensor {
        token,
        rotation_wxyz: r.rotation,
        translation_m: r.translation,
        intrinsic,
        sensor: tokens.intern(&r.sensor_token),
    };
    Ok((token, row))
}

fn ego_pose(tokens: &mut Tokens, r: EgoPoseJson) -> Result<(TokenId, EgoPose)> {
    finite("ego_pose", "rotation", &r.token, &r.rotation)?;
    finite("ego_pose", "translation", &r.token, &r.translation)?;
    let token = required(tokens, "ego_pose", &r.token)?;
    let row = EgoPose {
        token,
        timestamp_ns: r.timestamp.0,
        rotation_wxyz: r.rotation,
        translation_m: r.translation,
    };
    Ok((token, row))
}

fn scene(tokens: &mut Tokens, r: SceneJson) -> Result<(TokenId, Scene)> {
    let token = required(tokens, "scene", &r.token)?;
    let row = Scene {
        token,
        name: r.name,
        samples: r.nbr_samples,
        log: tokens.intern(&r.log_token),
        first: tokens.intern(&r.first_sample_token),
        last: tokens.intern(&r.last_sample_token),
    };
    Ok((token, row))
}

fn sample(tokens: &mut Tokens, r: SampleJson) -> Result<(TokenId, Sample)> {
    let token = required(tokens, "sample", &r.token)?;
    let row = Sample {
        token,
        timestamp_ns: r.timestamp.0,
        scene: tokens.intern(&r.scene_token),
        prev: tokens.intern(&r.prev),
        next: tokens.intern(&r.next),
    };
    Ok((token, row))
}

fn sample_data(
    tokens: &mut Tokens,
    filenames: &mut String,
    r: SampleDataJson,
) -> Result<(TokenId, SampleData)> {
    let name = safe_filename(&r.filename, &r.token)?;
    let start = filenames.len() as u64;
    filenames.push_str(name);
    let token = required(tokens, "sample_data", &r.token)?;
    let row = SampleData {
        token,
        timestamp_ns: r.timestamp.0,
        is_key_frame: r.is_key_frame,
        format: FileFormat::of(name),
        width: r.width.unwrap_or(0),
        height: r.height.unwrap_or(0),
        filename: (start, name.len() as u32),
        sample: tokens.intern(&r.sample_token),
        ego_pose: tokens.intern(&r.ego_pose_token),
        calibrated_sensor: tokens.intern(&r.calibrated_sensor_token),
        prev: tokens.intern(&r.prev),
        next: tokens.intern(&r.next),
    };
    Ok((token, row))
}

/// A relative path that stays below the root.
fn safe_filename<'a>(name: &'a str, record: &str) -> Result<&'a str> {
    let part_ok = |part: &str| !matches!(part, "" | "." | "..");
    let ok = name.split('/').all(part_ok) && !name.contains(['\\', '\0']) && name.len() < 4096;
    if ok {
        return Ok(name);
    }
    Err(Error::BadRecord {
        table: "sample_data",
        column: "filename",
        record: record.to_string(),
        expected: "a relative path below the data root",
        found: name.escape_debug().take(200).collect(),
    })
}

fn annotation(tokens: &mut Tokens, r: AnnotationJson) -> Result<(TokenId, Annotation)> {
    let table = "sample_annotation";
    finite(table, "rotation", &r.token, &r.rotation)?;
    finite(table, "translation", &r.token, &r.translation)?;
    finite(table, "size", &r.token, &r.size)?;
    let token = required(tokens, table, &r.token)?;
    let row = Annotation {
        token,
        translation_m: r.translation,
        size_wlh_m: r.size,
        rotation_wxyz: r.rotation,
        lidar_points: r.num_lidar_pts,
        sample: tokens.intern(&r.sample_token),
        instance: tokens.intern(&r.instance_token),
        visibility: tokens.intern(&r.visibility_token),
        attributes: r.attribute_tokens.iter().filter_map(|t| tokens.intern(t)).collect(),
        prev: tokens.intern(&r.prev),
        next: tokens.intern(&r.next),
    };
    Ok((token, row))
}
