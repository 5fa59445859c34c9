//! The 13 tables, streamed: a scene's rows are written as it is finished, so memory does not grow
//! with the dataset. They are written beside their place and moved there at the end: a folder of
//! tables means a complete dataset.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::clock::{Kind, token};
use super::rig::{CAMERAS, LIDAR_CHANNEL};
use super::rows;
use super::world::Class;
use crate::error::{Error, Result};

/// Folder of the tables.
pub const FOLDER: &str = "v1.0-synth";
/// The map's file.
pub const MAP_FILE: &str = "maps/synth.png";
const PARTIAL: &str = "v1.0-synth.partial";

/// The tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// `attribute.json`.
    Attribute,
    /// `calibrated_sensor.json`.
    CalibratedSensor,
    /// `category.json`.
    Category,
    /// `ego_pose.json`.
    EgoPose,
    /// `instance.json`.
    Instance,
    /// `log.json`.
    Log,
    /// `map.json`.
    Map,
    /// `sample.json`.
    Sample,
    /// `sample_annotation.json`.
    SampleAnnotation,
    /// `sample_data.json`.
    SampleData,
    /// `scene.json`.
    Scene,
    /// `sensor.json`.
    Sensor,
    /// `visibility.json`.
    Visibility,
}

const NAMES: [&str; 13] = [
    "attribute",
    "calibrated_sensor",
    "category",
    "ego_pose",
    "instance",
    "log",
    "map",
    "sample",
    "sample_annotation",
    "sample_data",
    "scene",
    "sensor",
    "visibility",
];

/// Attributes in use: index, name, meaning.
const ATTRIBUTES: [(&str, &str); 5] = [
    ("vehicle.moving", "Vehicle is moving."),
    ("vehicle.stopped", "Vehicle is stationary but ready to move."),
    ("vehicle.parked", "Vehicle is stationary for a longer time."),
    ("pedestrian.moving", "The human is moving."),
    ("pedestrian.standing", "The human is standing."),
];

const VISIBILITIES: [(&str, &str, &str); 4] = [
    ("1", "v0-40", "visibility of whole object is between 0 and 40%"),
    ("2", "v40-60", "visibility of whole object is between 40 and 60%"),
    ("3", "v60-80", "visibility of whole object is between 60 and 80%"),
    ("4", "v80-100", "visibility of whole object is between 80 and 100%"),
];

/// Open tables.
#[derive(Debug)]
pub struct Tables {
    root: PathBuf,
    seed: u64,
    files: Vec<(BufWriter<File>, u64)>,
}

impl Tables {
    /// Starts the tables of a dataset; one that is complete is not touched.
    pub fn create(root: &Path, seed: u64) -> Result<Self> {
        if root.join(FOLDER).exists() {
            return Err(Error::AlreadyExists {
                what: root.join(FOLDER).display().to_string(),
                advice: "choose another folder or remove this one".into(),
            });
        }
        let partial = root.join(PARTIAL);
        fs::create_dir_all(&partial).map_err(|e| io("create folder", &partial, e))?;
        let open = |name: &&str| {
            let path = partial.join(format!("{name}.json"));
            let file = File::create(&path).map_err(|e| io("create", &path, e))?;
            Ok((BufWriter::new(file), 0))
        };
        let files = NAMES.iter().map(open).collect::<Result<_>>()?;
        Ok(Self { root: root.into(), seed, files })
    }

    /// Appends a row.
    pub fn push(&mut self, table: Table, row: &impl Serialize) -> Result<()> {
        let path = self.root.join(PARTIAL).join(NAMES[table as usize]);
        let (file, rows) = &mut self.files[table as usize];
        let text = serde_json::to_string(row)
            .map_err(|e| Error::invalid(NAMES[table as usize], "a row JSON can hold", e))?;
        let lead = if *rows == 0 { "[\n" } else { ",\n" };
        *rows += 1;
        file.write_all(lead.as_bytes())
            .and_then(|()| file.write_all(text.as_bytes()))
            .map_err(|e| io("write", &path, e))
    }

    /// Token of a sensor.
    pub fn sensor(&self, channel: usize) -> String {
        self.fixed(0, channel)
    }

    /// Token of a class's category.
    pub fn category(&self, class: Class) -> String {
        let index = Class::ALL.iter().position(|&c| c == class).unwrap_or(0);
        self.fixed(1, index)
    }

    /// Token of an attribute by name; `None` if the name is unknown.
    pub fn attribute(&self, name: &str) -> Option<String> {
        ATTRIBUTES.iter().position(|(known, _)| *known == name).map(|i| self.fixed(2, i))
    }

    fn fixed(&self, table: u64, row: usize) -> String {
        token(self.seed, 0, Kind::Fixed, table, row as u64)
    }

    /// Writes the tables that do not depend on scenes, then moves everything into place.
    pub fn finish(mut self, log_tokens: Vec<String>) -> Result<()> {
        self.push_fixed(log_tokens)?;
        for (table, (file, rows)) in self.files.iter_mut().enumerate() {
            let path = self.root.join(PARTIAL).join(NAMES[table]);
            let end = if *rows == 0 { "[]\n" } else { "\n]\n" };
            file.write_all(end.as_bytes())
                .and_then(|()| file.flush())
                .and_then(|()| file.get_ref().sync_all())
                .map_err(|e| io("write", &path, e))?;
        }
        let (from, to) = (self.root.join(PARTIAL), self.root.join(FOLDER));
        fs::rename(&from, &to).map_err(|e| io("move into place", &to, e))
    }

    fn push_fixed(&mut self, log_tokens: Vec<String>) -> Result<()> {
        let channels = CAMERAS.iter().map(|camera| (camera.channel, "camera"));
        for (i, (channel, modality)) in channels.chain([(LIDAR_CHANNEL, "lidar")]).enumerate() {
            let row = rows::Sensor { token: self.sensor(i), channel, modality };
            self.push(Table::Sensor, &row)?;
        }
        for class in Class::ALL {
            let (token, name) = (self.category(class), class.category());
            self.push(Table::Category, &rows::Named { token, name, description: "" })?;
        }
        for (i, (name, description)) in ATTRIBUTES.into_iter().enumerate() {
            let row = rows::Named { token: self.fixed(2, i), name, description };
            self.push(Table::Attribute, &row)?;
        }
        for (token, level, description) in VISIBILITIES {
            self.push(Table::Visibility, &rows::Visibility { description, token, level })?;
        }
        let token = self.fixed(3, 0);
        let map = rows::Map { category: "semantic_prior", token, filename: MAP_FILE, log_tokens };
        self.push(Table::Map, &map)
    }
}

/// An I/O error with its path; a full disk by its own name.
pub fn io(op: &'static str, path: &Path, error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::StorageFull {
        let path = path.display().to_string();
        return Error::NoSpace { path, need_bytes: 1, have_bytes: 0 };
    }
    Error::io(op, path.display().to_string(), error)
}
