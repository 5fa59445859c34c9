//! Which field, layout, codec and stream a channel has.

use std::collections::BTreeMap;

use drivetrain_formats::nuscenes::{Channel, FileFormat, Linked, Modality};

use crate::error::Result;
use crate::index::schema::Layout;
use crate::index::stream::{Stamp, Stream, StreamItem};
use crate::index::types::{Codec, FieldKind, FieldSpec};

/// Earlier sweeps stored per key frame: what detectors on nuScenes use at most.
pub const SWEEPS_MAX: u32 = 10;
/// Columns of a nuScenes LiDAR record.
const LIDAR_COLUMNS: [&str; 5] = ["x", "y", "z", "intensity", "ring"];

/// Earlier items stored per key frame of a channel.
pub(super) fn sweeps_of(channel: &Channel) -> u32 {
    if layout_of(channel) == Layout::Sequence { SWEEPS_MAX } else { 0 }
}

pub(super) fn layout_of(channel: &Channel) -> Layout {
    match channel.modality {
        Modality::Lidar | Modality::Radar => Layout::Sequence,
        Modality::Camera | Modality::Other => Layout::Blob,
    }
}

pub(super) fn spec(name: &str, kind: FieldKind, frame: Option<&str>) -> FieldSpec {
    FieldSpec {
        name: name.to_string(),
        kind,
        frame: frame.map(String::from),
        columns: Vec::new(),
        extra: BTreeMap::new(),
    }
}

pub(super) fn channel_field(channel: &Channel) -> (FieldSpec, Layout) {
    let kind = kind_of(channel.modality);
    let mut field = spec(&channel.name, kind, Some(&channel.name));
    field.extra.insert("stamp".into(), stamp_of(channel.modality).name().into());
    if channel.modality == Modality::Lidar {
        field.columns = LIDAR_COLUMNS.map(String::from).to_vec();
    }
    (field, layout_of(channel))
}

pub(super) fn calibration_field(channel: &Channel) -> (FieldSpec, Layout) {
    let name = format!("{}.calibration", channel.name);
    let mut field = spec(&name, FieldKind::Calibration, Some("ego"));
    field.extra.insert("channel".into(), channel.name.clone());
    (field, Layout::Calibration)
}

fn kind_of(modality: Modality) -> FieldKind {
    match modality {
        Modality::Camera => FieldKind::Image,
        Modality::Lidar => FieldKind::Points,
        Modality::Radar => FieldKind::Radar,
        Modality::Other => FieldKind::Bytes,
    }
}

/// A LiDAR record is stamped when its rotation is complete, a camera's when it fires.
fn stamp_of(modality: Modality) -> Stamp {
    if modality == Modality::Lidar { Stamp::End } else { Stamp::Trigger }
}

/// `.bin` is five f32 a record for LiDAR only; the other sensors' encodings follow their names.
pub(super) fn codec(format: FileFormat, modality: Modality) -> Codec {
    match (format, modality) {
        (FileFormat::Jpeg, _) => Codec::Jpeg,
        (FileFormat::Png, _) => Codec::Png,
        (FileFormat::Pcd, _) => Codec::Pcd,
        (FileFormat::Bin, Modality::Lidar) => {
            Codec::F32Records { columns: LIDAR_COLUMNS.len() as u32 }
        }
        _ => Codec::Raw,
    }
}

/// The samples as the stream that others join to.
pub(super) fn anchor_stream(linked: &Linked) -> Result<Stream> {
    let samples =
        (0..linked.len()).filter_map(|position| Some((position, linked.sample(position)?)));
    let items = samples.map(|(position, sample)| StreamItem {
        recording: linked.scene_row(sample),
        timestamp_ns: sample.timestamp_ns,
        chain: 0,
        assigned: None,
        payload: position as u32,
    });
    Stream::new("samples", FieldKind::Scalar, Stamp::End, None, items.collect())
}

/// A channel's records as a stream; key frames are assigned to their samples.
pub(super) fn channel_stream(channel: &Channel) -> Result<Stream> {
    let items = channel.records.iter().map(|record| StreamItem {
        recording: record.scene,
        timestamp_ns: record.timestamp_ns,
        chain: record.chain,
        assigned: record.sample,
        payload: record.data,
    });
    let kind = kind_of(channel.modality);
    let frame = Some(channel.name.clone());
    Stream::new(&channel.name, kind, stamp_of(channel.modality), frame, items.collect())
}
