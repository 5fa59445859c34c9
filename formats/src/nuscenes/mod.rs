//! The nuScenes schema: thirteen JSON tables that refer to each other by token. Lyft L5 and other
//! data sets use the same schema with longer tokens and fractional timestamps.
//!
//! [`Tables`] reads the files one by one, streaming, into compact rows; [`Tables::link`] then
//! checks every reference and orders the sensor records into chains. Nothing here opens a file.
//!
//! A *whole* scene has as many samples in the table as it says (`nbr_samples`); in it every link
//! must lead somewhere. A *cut* scene (a subset published as an example) may have `prev`, `next`,
//! `first_…` and `last_…` links that leave the tables: there the chain ends.

mod link;
mod read;
mod rows;
mod tables;
mod token;

pub use link::{Annotations, Channel, Linked, Record};
pub use rows::{
    Annotation, CalibratedSensor, EgoPose, FileFormat, Modality, Sample, SampleData, Scene,
};
pub use tables::Tables;
pub use token::{TokenId, Tokens};

/// The tables, in the order they should be read: small ones that others refer to come first.
pub const TABLES: [&str; 13] = [
    "category",
    "attribute",
    "visibility",
    "instance",
    "sensor",
    "calibrated_sensor",
    "ego_pose",
    "log",
    "scene",
    "sample",
    "sample_data",
    "sample_annotation",
    "map",
];

/// Tables without which there are no samples. The others may be absent (a test split has no
/// annotations); what refers to them is then not checked.
pub const REQUIRED_TABLES: [&str; 6] =
    ["sensor", "calibrated_sensor", "ego_pose", "scene", "sample", "sample_data"];

/// Records of one table. nuScenes has 2.6 million sensor records.
pub const TABLE_RECORDS_MAX: usize = 1 << 26;
/// Sensor channels of one data set.
pub const CHANNELS_MAX: usize = 256;

/// Whether a folder name looks like a table folder: `v1.0-mini`, `v1.01-train`, `v1.0-synth`.
pub fn is_table_folder(name: &str) -> bool {
    name.strip_prefix("v1.").is_some_and(|rest| rest.contains('-'))
}

#[cfg(test)]
mod tests;
