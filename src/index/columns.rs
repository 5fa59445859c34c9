//! Column builders: values of one field, appended row by row, straight into Arrow's buffers.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, DictionaryArray, FixedSizeListArray, Float32Array, Float64Array, Int32Array,
    Int64Array, ListArray, StringArray, StructArray, UInt32Array, UInt64Array,
};
use arrow_buffer::{BooleanBuffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, Fields};

use super::schema::{blob_fields, box_fields, item_field, sweep_fields};
use super::types::{BlobRef, Boxes, Calibration, Pose, SequenceItem};

type ArrowResult<T> = Result<T, ArrowError>;

/// Text with one dictionary.
#[derive(Debug, Default)]
pub(super) struct DictionaryColumn {
    keys: Vec<i32>,
    values: Vec<String>,
    by_value: HashMap<String, i32>,
}

impl DictionaryColumn {
    pub(super) fn push(&mut self, value: &str) {
        let known = self.by_value.get(value).copied();
        let key = known.unwrap_or_else(|| {
            let key = self.values.len() as i32;
            self.values.push(value.to_string());
            self.by_value.insert(value.to_string(), key);
            key
        });
        self.keys.push(key);
    }

    pub(super) fn finish(self) -> ArrowResult<ArrayRef> {
        let mut values = self.values;
        if values.is_empty() {
            // Readers differ on dictionaries without values; one unused value suits them all.
            values.push(String::new());
        }
        let array = DictionaryArray::try_new(
            Int32Array::from(self.keys),
            Arc::new(StringArray::from(values)),
        )?;
        Ok(Arc::new(array))
    }
}

/// Byte ranges.
#[derive(Debug, Default)]
struct RangeColumn {
    source: Vec<u32>,
    offset: Vec<u64>,
    length: Vec<u64>,
    present: Vec<bool>,
    codec: DictionaryColumn,
    timestamp_ns: Vec<i64>,
}

impl RangeColumn {
    fn push(&mut self, blob: &BlobRef, missing: bool, timestamp_ns: i64) {
        self.source.push(blob.source);
        self.offset.push(blob.offset);
        self.length.push(if missing { 0 } else { blob.length });
        self.present.push(!missing);
        self.codec.push(&blob.codec.name());
        self.timestamp_ns.push(timestamp_ns);
    }

    fn push_null(&mut self) {
        self.source.push(0);
        self.offset.push(0);
        self.length.push(0);
        self.present.push(true);
        self.codec.push("raw");
        self.timestamp_ns.push(0);
    }

    fn arrays(self) -> ArrowResult<Vec<ArrayRef>> {
        Ok(vec![
            Arc::new(UInt32Array::from(self.source)),
            Arc::new(UInt64Array::from(self.offset)),
            Arc::new(UInt64Array::try_new(ScalarBuffer::from(self.length), nulls(self.present))?),
            self.codec.finish()?,
            Arc::new(Int64Array::from(self.timestamp_ns)),
        ])
    }
}

/// Byte ranges, with earlier sweeps if `sweeps` is there.
#[derive(Debug, Default)]
pub(super) struct BlobColumn {
    valid: Vec<bool>,
    range: RangeColumn,
    sweeps: Option<SweepColumn>,
}

#[derive(Debug, Default)]
struct SweepColumn {
    ends: Vec<usize>,
    range: RangeColumn,
    transform: Vec<f64>,
}

impl BlobColumn {
    pub(super) fn new(with_sweeps: bool) -> Self {
        Self { sweeps: with_sweeps.then(SweepColumn::default), ..Self::default() }
    }

    /// `missing` says, for the blob and then for each sweep, that the file was not there.
    pub(super) fn push(
        &mut self,
        blob: &BlobRef,
        timestamp_ns: i64,
        sweeps: &[SequenceItem],
        missing: impl Fn(u32) -> bool,
    ) {
        self.valid.push(true);
        self.range.push(blob, missing(blob.source), timestamp_ns);
        if let Some(column) = &mut self.sweeps {
            for item in sweeps {
                column.range.push(&item.blob, missing(item.blob.source), item.timestamp_ns);
                column.transform.extend(item.transform);
            }
            column.ends.push(column.range.source.len());
        }
    }

    pub(super) fn push_null(&mut self) {
        self.valid.push(false);
        self.range.push_null();
        if let Some(column) = &mut self.sweeps {
            column.ends.push(column.range.source.len());
        }
    }

    pub(super) fn finish(self) -> ArrowResult<ArrayRef> {
        let fields = blob_fields(self.sweeps.is_some());
        let mut arrays = self.range.arrays()?;
        if let Some(column) = self.sweeps {
            let mut items = column.range.arrays()?;
            items.push(matrices(column.transform, 16)?);
            arrays.push(list(&column.ends, sweep_fields(), items)?);
        }
        Ok(Arc::new(StructArray::try_new(fields, arrays, nulls(self.valid))?))
    }
}

/// Poses.
#[derive(Debug, Default)]
pub(super) struct PoseColumn {
    valid: Vec<bool>,
    matrix: Vec<f64>,
    timestamp_ns: Vec<i64>,
}

impl PoseColumn {
    pub(super) fn push(&mut self, pose: Option<&Pose>) {
        self.valid.push(pose.is_some());
        self.matrix.extend(pose.map_or([0.0; 16], |p| p.matrix));
        self.timestamp_ns.push(pose.map_or(0, |p| p.timestamp_ns));
    }

    pub(super) fn finish(self, fields: &Fields) -> ArrowResult<ArrayRef> {
        let arrays: Vec<ArrayRef> =
            vec![matrices(self.matrix, 16)?, Arc::new(Int64Array::from(self.timestamp_ns))];
        Ok(Arc::new(StructArray::try_new(fields.clone(), arrays, nulls(self.valid))?))
    }
}

/// Calibrations.
#[derive(Debug, Default)]
pub(super) struct CalibrationColumn {
    valid: Vec<bool>,
    sensor_to_ego: Vec<f64>,
    ego_to_global: Vec<f64>,
    intrinsic: Vec<f64>,
    is_camera: Vec<bool>,
    timestamp_ns: Vec<i64>,
}

impl CalibrationColumn {
    pub(super) fn push(&mut self, value: Option<&Calibration>) {
        let intrinsic = value.and_then(|c| c.intrinsic);
        self.valid.push(value.is_some());
        self.sensor_to_ego.extend(value.map_or([0.0; 16], |c| c.sensor_to_ego));
        self.ego_to_global.extend(value.map_or([0.0; 16], |c| c.ego_to_global));
        self.intrinsic.extend(intrinsic.unwrap_or_default());
        self.is_camera.push(intrinsic.is_some());
        self.timestamp_ns.push(value.map_or(0, |c| c.timestamp_ns));
    }

    pub(super) fn finish(self, fields: &Fields) -> ArrowResult<ArrayRef> {
        let intrinsic = FixedSizeListArray::try_new(
            item_field(arrow_schema::DataType::Float64),
            9,
            Arc::new(Float64Array::from(self.intrinsic)),
            nulls(self.is_camera),
        )?;
        let arrays: Vec<ArrayRef> = vec![
            matrices(self.sensor_to_ego, 16)?,
            matrices(self.ego_to_global, 16)?,
            Arc::new(intrinsic),
            Arc::new(Int64Array::from(self.timestamp_ns)),
        ];
        Ok(Arc::new(StructArray::try_new(fields.clone(), arrays, nulls(self.valid))?))
    }
}

/// Boxes.
#[derive(Debug, Default)]
pub(super) struct BoxColumn {
    valid: Vec<bool>,
    ends: Vec<usize>,
    geometry: Vec<f32>,
    velocity: Vec<f32>,
    name: DictionaryColumn,
    token: Vec<String>,
    lidar_points: Vec<i32>,
}

impl BoxColumn {
    /// All vectors of `boxes` must have the same length, which the index builder checks.
    pub(super) fn push(&mut self, boxes: Option<&Boxes>) {
        self.valid.push(boxes.is_some());
        if let Some(boxes) = boxes {
            self.geometry.extend(boxes.geometry.iter().flatten());
            self.velocity.extend(boxes.velocity.iter().flatten());
            boxes.names.iter().for_each(|name| self.name.push(name));
            self.token.extend(boxes.tokens.iter().cloned());
            self.lidar_points.extend(&boxes.lidar_points);
        }
        self.ends.push(self.token.len());
    }

    pub(super) fn finish(self) -> ArrowResult<ArrayRef> {
        let items = vec![
            floats(self.geometry, 7)?,
            floats(self.velocity, 3)?,
            self.name.finish()?,
            Arc::new(StringArray::from(self.token)) as ArrayRef,
            Arc::new(Int32Array::from(self.lidar_points)),
        ];
        let items = StructArray::try_new(box_fields(), items, None)?;
        let field = item_field(items.data_type().clone());
        let array =
            ListArray::try_new(field, offsets(&self.ends)?, Arc::new(items), nulls(self.valid))?;
        Ok(Arc::new(array))
    }
}

fn list(ends: &[usize], fields: Fields, items: Vec<ArrayRef>) -> ArrowResult<ArrayRef> {
    let items = StructArray::try_new(fields, items, None)?;
    let field = item_field(items.data_type().clone());
    Ok(Arc::new(ListArray::try_new(field, offsets(ends)?, Arc::new(items), None)?))
}

/// List offsets from the end of each row.
fn offsets(ends: &[usize]) -> ArrowResult<OffsetBuffer<i32>> {
    let last = ends.last().copied().unwrap_or(0);
    if i32::try_from(last).is_err() {
        return Err(ArrowError::OffsetOverflowError(last));
    }
    let all: Vec<i32> = std::iter::once(0).chain(ends.iter().map(|end| *end as i32)).collect();
    Ok(OffsetBuffer::new(ScalarBuffer::from(all)))
}

/// No buffer where nothing is null: the file is smaller and readers are faster.
pub(super) fn nulls(valid: Vec<bool>) -> Option<NullBuffer> {
    let all = valid.iter().all(|v| *v);
    (!all).then(|| NullBuffer::new(BooleanBuffer::from(valid)))
}

fn matrices(values: Vec<f64>, len: i32) -> ArrowResult<ArrayRef> {
    let field = item_field(arrow_schema::DataType::Float64);
    let array =
        FixedSizeListArray::try_new(field, len, Arc::new(Float64Array::from(values)), None)?;
    Ok(Arc::new(array))
}

fn floats(values: Vec<f32>, len: i32) -> ArrowResult<ArrayRef> {
    let field = item_field(arrow_schema::DataType::Float32);
    let array =
        FixedSizeListArray::try_new(field, len, Arc::new(Float32Array::from(values)), None)?;
    Ok(Arc::new(array))
}
