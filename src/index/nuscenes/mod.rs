//! nuScenes-layout trees: official tables to rows.
//!
//! A row is a sample. Key frames and sweeps come through the same join as any other format's: the
//! samples are the anchor stream, each channel is a stream, its key frame is the assigned item and
//! its sweeps are the items before it. Geometry is composed in f64 from each record's own pose.

use std::sync::Arc;

use drivetrain_formats::nuscenes::{
    Annotation, CalibratedSensor, Channel, EgoPose, Linked, Modality, SampleData, TABLES, Tables,
    TokenId, is_table_folder,
};

use self::fields::{
    anchor_stream, calibration_field, channel_field, channel_stream, codec, spec, sweeps_of,
};
use crate::error::{Error, Result};
use crate::index::builder::{IndexBuilder, IndexMeta};
use crate::index::files::Files;
use crate::index::geometry::{
    IDENTITY, Matrix4, from_quaternion, inverse_rigid, multiply, rotate, yaw,
};
use crate::index::input::Input;
use crate::index::inputs::Inputs;
use crate::index::join::{JoinField, JoinRule, Joined, Miss, join};
use crate::index::progress::Progress;
use crate::index::schema::Layout;
use crate::index::stream::Stream;
use crate::index::table::SampleTable;
use crate::index::types::{BlobRef, Boxes, Calibration, FieldKind, Pose, SequenceItem};
use crate::runtime::block_on;
use crate::storage::Store;

mod fields;

pub use fields::SWEEPS_MAX;

/// The sensor whose frame boxes are in and whose pose is the sample's, where it exists.
const REFERENCE_CHANNEL: &str = "LIDAR_TOP";
/// Frame that ego poses lead to.
const GLOBAL: &str = "global";

/// Finds the table folder below the root: its name, or `""` if the root itself holds the tables.
pub(super) fn find_tables(store: &Arc<dyn Store>, version: Option<&str>) -> Result<Option<String>> {
    let names = block_on(store.list_names(""))??;
    if names.iter().any(|name| name == "sample_data.json") {
        return Ok(Some(String::new()));
    }
    let mut folders: Vec<_> =
        names.iter().filter_map(|n| n.strip_suffix('/')).filter(|n| is_table_folder(n)).collect();
    if let Some(version) = version {
        folders.retain(|name| *name == version);
    }
    match folders.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some((*one).to_string())),
        many => Err(Error::invalid(
            "format",
            "\"nuscenes:<version>\", because the root has several table folders",
            many.join(", "),
        )),
    }
}

/// Reads the tables of `folder` and builds the index.
pub(super) fn build(
    store: &Arc<dyn Store>,
    folder: &str,
    root: &str,
    progress: &dyn Progress,
) -> Result<SampleTable> {
    let (tables, inputs) = read_tables(store, folder, progress)?;
    let path = if folder.is_empty() { store.uri().to_string() } else { folder.to_string() };
    let linked = tables.link().map_err(|e| format_error(&path, e))?;
    let mut build = Build::new(store, &linked)?;
    let notes = build.rows(progress)?;
    let format = if folder.is_empty() { "nuscenes".into() } else { format!("nuscenes:{folder}") };
    let meta = IndexMeta { root: root.to_string(), format, inputs: inputs.to_json(), notes };
    build.builder.finish(&meta)
}

fn read_tables(
    store: &Arc<dyn Store>,
    folder: &str,
    progress: &dyn Progress,
) -> Result<(Tables, Inputs)> {
    progress.stage("reading tables", Some(TABLES.len() as u64));
    let names = block_on(store.list_names(folder))??;
    let mut tables = Tables::default();
    let mut inputs = Inputs::default();
    for table in TABLES {
        let file = format!("{table}.json");
        if names.contains(&file) {
            let path = if folder.is_empty() { file } else { format!("{folder}/{file}") };
            let mut input = Input::open(store, &path)?;
            inputs.add(input.meta());
            let buffered = std::io::BufReader::with_capacity(READ_BYTES, &mut input);
            let result = tables.read(table, buffered);
            // The store's own error says more than what the parser could keep of it.
            if let Some(failure) = input.take_failure() {
                return Err(failure);
            }
            result.map_err(|e| format_error(&path, e))?;
        }
        progress.advance(1);
    }
    Ok((tables, inputs))
}

/// The JSON parser pulls single bytes; this much is copied out of the chunk at a time.
const READ_BYTES: usize = 64 << 10;

fn format_error(file: &str, source: drivetrain_formats::Error) -> Error {
    Error::Format { file: file.to_string(), source: Box::new(source) }
}

/// A channel that has key frames, with the fields it fills.
struct Used<'a> {
    channel: &'a Channel,
    stream: Stream,
    blob_field: usize,
    calibration_field: usize,
}

struct Build<'a> {
    linked: &'a Linked,
    files: Files<'a>,
    builder: IndexBuilder,
    anchors: Stream,
    used: Vec<Used<'a>>,
    boxes_field: usize,
    pose_field: usize,
    boxes_frame: String,
}

impl<'a> Build<'a> {
    fn new(store: &'a Arc<dyn Store>, linked: &'a Linked) -> Result<Self> {
        let channels =
            linked.channels().iter().filter(|c| c.records.iter().any(|r| r.sample.is_some()));
        let channels: Vec<_> = channels.collect();
        let reference = channels
            .iter()
            .find(|c| c.name == REFERENCE_CHANNEL)
            .or_else(|| channels.iter().find(|c| c.modality == Modality::Lidar));
        let boxes_frame = reference.map_or(GLOBAL.to_string(), |c| c.name.clone());
        let mut fields: Vec<_> = channels.iter().map(|c| channel_field(c)).collect();
        let boxes_field = fields.len();
        fields.push((spec("boxes", FieldKind::Boxes, Some(&boxes_frame)), Layout::Boxes));
        let mut pose = spec("ego_pose", FieldKind::Pose, Some(GLOBAL));
        pose.extra.insert("source".into(), "ego".into());
        fields.push((pose, Layout::Pose));
        let calibrations = fields.len();
        fields.extend(channels.iter().map(|c| calibration_field(c)));
        let mut used = Vec::new();
        for (at, channel) in channels.into_iter().enumerate() {
            let stream = channel_stream(channel)?;
            let calibration_field = calibrations + at;
            used.push(Used { channel, stream, blob_field: at, calibration_field });
        }
        Ok(Self {
            linked,
            files: Files::new(store),
            builder: IndexBuilder::new(fields)?,
            anchors: anchor_stream(linked)?,
            used,
            boxes_field,
            pose_field: boxes_field + 1,
            boxes_frame,
        })
    }

    fn rows(&mut self, progress: &dyn Progress) -> Result<Vec<String>> {
        let used = std::mem::take(&mut self.used);
        let fields: Vec<_> = used
            .iter()
            .flat_map(|u| [(u, JoinRule::Assigned), (u, JoinRule::Previous(sweeps_of(u.channel)))])
            .map(|(u, rule)| JoinField { stream: &u.stream, rule, miss: Miss::Mask })
            .collect();
        let joined = join(&self.anchors, &fields)?;
        progress.stage("indexing samples", Some(joined.anchors.len() as u64));
        for row in 0..joined.anchors.len() {
            self.row(&used, &joined, row)?;
            progress.advance(1);
        }
        Ok(self.files.note().into_iter().collect())
    }

    fn row(&mut self, used: &[Used<'_>], joined: &Joined, row: usize) -> Result<()> {
        let position = joined.anchors[row] as usize;
        let Some(sample) = self.linked.sample(position) else { return Ok(()) };
        let scene = self.linked.scene(sample).map_or("", |scene| scene.name.as_str());
        self.builder.begin(&self.linked.token(sample.token), scene, sample.timestamp_ns)?;
        let mut reference = None;
        for (at, used) in used.iter().enumerate() {
            let (key, sweeps) = (&joined.matches[2 * at][row], &joined.matches[2 * at + 1][row]);
            let items = used.stream.items();
            let Some(key) = items.get(key.start as usize).filter(|_| !key.is_empty()) else {
                continue;
            };
            let Some(record) = self.record(key.payload)? else { continue };
            // Nearest first, as a sensor's past is usually asked for.
            let sweeps = items[sweeps.start as usize..sweeps.end as usize].iter().rev();
            let sweeps: Result<Vec<_>> =
                sweeps.map(|item| self.sweep(&record, used.channel, item.payload)).collect();
            let blob = self.blob(record.data, used.channel.modality)?;
            let time_ns = record.data.timestamp_ns;
            self.builder.blob(used.blob_field, &blob, time_ns, &sweeps?)?;
            self.calibration(used, &record)?;
            if used.channel.name == self.boxes_frame {
                reference = Some(record);
            }
        }
        self.geometry(position, reference.as_ref())
    }

    /// Boxes and pose, in and of the reference sensor.
    fn geometry(&mut self, position: usize, reference: Option<&PosedRecord<'_>>) -> Result<()> {
        if let Some(record) = reference {
            let pose = Pose {
                target: GLOBAL.into(),
                source: "ego".into(),
                matrix: record.ego_to_global,
                timestamp_ns: record.pose.timestamp_ns,
            };
            self.builder.pose(self.pose_field, &pose)?;
        }
        let to_frame = match reference {
            Some(record) => inverse_rigid(&record.sensor_to_global()),
            None if self.boxes_frame == GLOBAL => IDENTITY,
            // Without the reference sensor there is no frame to give the boxes in.
            None => return Ok(()),
        };
        if self.linked.has_annotations() {
            let boxes = self.boxes(position, &to_frame)?;
            self.builder.boxes(self.boxes_field, &boxes)?;
        }
        Ok(())
    }

    fn record(&self, row: u32) -> Result<Option<PosedRecord<'a>>> {
        let linked = self.linked;
        let Some(data) = linked.data(row) else { return Ok(None) };
        let found = linked.calibrated_sensor(data).zip(linked.ego_pose(data));
        let Some((sensor, pose)) = found else { return Ok(None) };
        let sensor_to_ego = self.matrix(
            ("calibrated_sensor", sensor.token),
            sensor.rotation_wxyz,
            sensor.translation_m,
        )?;
        let ego_to_global =
            self.matrix(("ego_pose", pose.token), pose.rotation_wxyz, pose.translation_m)?;
        Ok(Some(PosedRecord { data, sensor, pose, sensor_to_ego, ego_to_global }))
    }

    fn matrix(
        &self,
        (table, token): (&'static str, TokenId),
        rotation: [f64; 4],
        translation_m: [f64; 3],
    ) -> Result<Matrix4> {
        from_quaternion(rotation, translation_m).ok_or_else(|| {
            let bad = drivetrain_formats::Error::BadRecord {
                table,
                column: "rotation",
                record: self.linked.token(token),
                expected: "a quaternion of length one",
                found: format!("{rotation:?}"),
            };
            format_error(&format!("{table}.json"), bad)
        })
    }

    fn blob(&mut self, data: &SampleData, modality: Modality) -> Result<BlobRef> {
        let path = self.linked.filename(data);
        let (source, length) = self.files.add(&mut self.builder, path)?;
        Ok(BlobRef { source, offset: 0, length, codec: codec(data.format, modality) })
    }

    /// A sweep brought into its key frame's sensor frame: sensor(then) → ego(then) → global →
    /// ego(key) → sensor(key).
    fn sweep(
        &mut self,
        key: &PosedRecord<'_>,
        channel: &Channel,
        row: u32,
    ) -> Result<SequenceItem> {
        let record = self.record(row)?;
        let Some(record) = record else {
            return Err(Error::invalid("sweep", "a row of sample_data", row));
        };
        let to_key = inverse_rigid(&key.sensor_to_global());
        Ok(SequenceItem {
            blob: self.blob(record.data, channel.modality)?,
            timestamp_ns: record.data.timestamp_ns,
            transform: multiply(&to_key, &record.sensor_to_global()),
        })
    }

    fn calibration(&mut self, used: &Used<'_>, record: &PosedRecord<'_>) -> Result<()> {
        let value = Calibration {
            channel: used.channel.name.clone(),
            sensor_to_ego: record.sensor_to_ego,
            ego_to_global: record.ego_to_global,
            intrinsic: record.sensor.intrinsic,
            timestamp_ns: record.data.timestamp_ns,
        };
        self.builder.calibration(used.calibration_field, &value)
    }

    fn boxes(&self, position: usize, to_frame: &Matrix4) -> Result<Boxes> {
        let mut boxes = Boxes { frame: self.boxes_frame.clone(), ..Boxes::default() };
        for row in self.linked.annotations(position) {
            if let Some(annotation) = self.linked.annotation(row) {
                self.push_box(&mut boxes, annotation, to_frame)?;
            }
        }
        Ok(boxes)
    }

    fn push_box(&self, boxes: &mut Boxes, a: &Annotation, to_frame: &Matrix4) -> Result<()> {
        let in_global =
            self.matrix(("sample_annotation", a.token), a.rotation_wxyz, a.translation_m)?;
        let m = multiply(to_frame, &in_global);
        let [width, length, height] = a.size_wlh_m;
        let geometry = [m[3], m[7], m[11], length, width, height, yaw(&m)];
        let velocity = self.linked.velocity_mps(a).map(|v| rotate(to_frame, v));
        boxes.geometry.push(geometry.map(|v| v as f32));
        boxes.velocity.push(velocity.unwrap_or([f64::NAN; 3]).map(|v| v as f32));
        boxes.names.push(self.linked.category(a).to_string());
        boxes.tokens.push(self.linked.token(a.token));
        boxes.lidar_points.push(a.lidar_points);
        Ok(())
    }
}

/// A sensor record with its matrices.
struct PosedRecord<'a> {
    data: &'a SampleData,
    sensor: &'a CalibratedSensor,
    pose: &'a EgoPose,
    sensor_to_ego: Matrix4,
    ego_to_global: Matrix4,
}

impl PosedRecord<'_> {
    fn sensor_to_global(&self) -> Matrix4 {
        multiply(&self.ego_to_global, &self.sensor_to_ego)
    }
}
