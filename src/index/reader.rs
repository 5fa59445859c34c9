//! Typed access to the columns of an opened table: arrow arrays are taken apart once at opening,
//! so that reading a row is arithmetic on slices.

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type, Int32Type, Int64Type, UInt32Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, DictionaryArray, Float32Array, Float64Array, Int32Array, Int64Array,
    ListArray, StringArray, StructArray, UInt32Array, UInt64Array,
};

use super::schema::Layout;
use super::types::{BlobRef, Boxes, Calibration, Codec, SequenceItem};
use crate::error::{Error, Result};

/// One field's column.
// One per field, so its size does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub(super) enum Column {
    Blob(StructArray, Ranges, Option<Sweeps>),
    Pose(StructArray, Float64Array, Int64Array),
    Calibration(StructArray, CalibrationParts),
    Boxes(ListArray, BoxParts),
    Text(StringArray),
    Scalar(Float64Array),
}

#[derive(Debug)]
pub(super) struct Ranges {
    source: UInt32Array,
    offset: UInt64Array,
    length: UInt64Array,
    codec: DictionaryArray<Int32Type>,
    codecs: Vec<Codec>,
    timestamp_ns: Int64Array,
}

#[derive(Debug)]
pub(super) struct Sweeps {
    list: ListArray,
    ranges: Ranges,
    transform: Float64Array,
}

#[derive(Debug)]
pub(super) struct CalibrationParts {
    sensor_to_ego: Float64Array,
    ego_to_global: Float64Array,
    intrinsic_list: ArrayRef,
    intrinsic: Float64Array,
    timestamp_ns: Int64Array,
}

#[derive(Debug)]
pub(super) struct BoxParts {
    geometry: Float32Array,
    velocity: Float32Array,
    name: DictionaryArray<Int32Type>,
    token: StringArray,
    lidar_points: Int32Array,
}

/// A byte range whose file may have been missing.
pub(super) enum Range {
    Here(BlobRef),
    Missing { source: u32 },
}

// The outer `Option` says whether the column has this layout, the inner whether the row has one.
#[allow(clippy::option_option)]
impl Column {
    /// Takes a column apart. `layout` was found from the column's type, so the casts hold.
    pub(super) fn new(file: &str, layout: Layout, array: &ArrayRef) -> Result<Self> {
        Ok(match layout {
            Layout::Blob => Self::Blob(array.as_struct().clone(), ranges(file, array)?, None),
            Layout::Sequence => {
                let column = array.as_struct();
                let list = column.column(5).as_list::<i32>().clone();
                let sweeps = Sweeps {
                    ranges: ranges(file, list.values())?,
                    transform: matrix(list.values().as_struct().column(5)),
                    list,
                };
                Self::Blob(column.clone(), ranges(file, array)?, Some(sweeps))
            }
            Layout::Pose => {
                let column = array.as_struct();
                let time = column.column(1).as_primitive::<Int64Type>().clone();
                Self::Pose(column.clone(), matrix(column.column(0)), time)
            }
            Layout::Calibration => {
                let column = array.as_struct();
                let parts = CalibrationParts {
                    sensor_to_ego: matrix(column.column(0)),
                    ego_to_global: matrix(column.column(1)),
                    intrinsic_list: column.column(2).clone(),
                    intrinsic: matrix(column.column(2)),
                    timestamp_ns: column.column(3).as_primitive::<Int64Type>().clone(),
                };
                Self::Calibration(column.clone(), parts)
            }
            Layout::Boxes => {
                let list = array.as_list::<i32>().clone();
                let parts = box_parts(list.values().as_struct());
                Self::Boxes(list, parts)
            }
            Layout::Text => Self::Text(array.as_string::<i32>().clone()),
            Layout::Scalar => Self::Scalar(array.as_primitive::<Float64Type>().clone()),
        })
    }

    pub(super) fn blob(&self, row: usize) -> Option<Option<Range>> {
        let Self::Blob(array, ranges, _) = self else { return None };
        Some(array.is_valid(row).then(|| ranges.get(row)))
    }

    pub(super) fn has_value(&self, row: usize) -> bool {
        match self {
            Self::Blob(array, ranges, _) => array.is_valid(row) && ranges.length.is_valid(row),
            Self::Pose(array, ..) | Self::Calibration(array, _) => array.is_valid(row),
            Self::Boxes(array, _) => array.is_valid(row),
            Self::Text(array) => array.is_valid(row),
            Self::Scalar(array) => array.is_valid(row),
        }
    }

    pub(super) fn blob_timestamp_ns(&self, row: usize) -> Option<i64> {
        let Self::Blob(array, ranges, _) = self else { return None };
        array.is_valid(row).then(|| ranges.timestamp_ns.value(row))
    }

    /// Earlier sweeps, nearest first, at most `max`.
    pub(super) fn sweeps(
        &self,
        row: usize,
        max: usize,
    ) -> Option<Vec<std::result::Result<SequenceItem, u32>>> {
        let Self::Blob(_, _, sweeps) = self else { return None };
        let Some(sweeps) = sweeps else { return Some(Vec::new()) };
        let (start, end) = span(&sweeps.list, row);
        let end = end.min(start.saturating_add(max));
        Some((start..end).map(|item| sweeps.get(item)).collect())
    }

    pub(super) fn pose(&self, row: usize) -> Option<Option<([f64; 16], i64)>> {
        let Self::Pose(array, values, time) = self else { return None };
        Some(array.is_valid(row).then(|| (numbers(values, row), time.value(row))))
    }

    pub(super) fn calibration(&self, row: usize) -> Option<Option<Calibration>> {
        let Self::Calibration(array, parts) = self else { return None };
        Some(array.is_valid(row).then(|| Calibration {
            channel: String::new(),
            sensor_to_ego: numbers(&parts.sensor_to_ego, row),
            ego_to_global: numbers(&parts.ego_to_global, row),
            intrinsic: (parts.intrinsic_list.is_valid(row)).then(|| numbers(&parts.intrinsic, row)),
            timestamp_ns: parts.timestamp_ns.value(row),
        }))
    }

    pub(super) fn boxes(&self, row: usize) -> Option<Option<Boxes>> {
        let Self::Boxes(list, parts) = self else { return None };
        if list.is_null(row) {
            return Some(None);
        }
        let (start, end) = span(list, row);
        let names = parts.name.values().as_string::<i32>();
        let name = |i: usize| match parts.name.key(i) {
            Some(key) => names.value(key).to_string(),
            None => String::new(),
        };
        Some(Some(Boxes {
            frame: String::new(),
            geometry: (start..end).map(|i| floats(&parts.geometry, i)).collect(),
            velocity: (start..end).map(|i| floats(&parts.velocity, i)).collect(),
            names: (start..end).map(name).collect(),
            tokens: (start..end).map(|i| parts.token.value(i).to_string()).collect(),
            lidar_points: (start..end).map(|i| parts.lidar_points.value(i)).collect(),
        }))
    }
}

impl Ranges {
    fn get(&self, row: usize) -> Range {
        let source = self.source.value(row);
        if self.length.is_null(row) {
            return Range::Missing { source };
        }
        let codec = self.codec.key(row).and_then(|key| self.codecs.get(key)).cloned();
        Range::Here(BlobRef {
            source,
            offset: self.offset.value(row),
            length: self.length.value(row),
            codec: codec.unwrap_or(Codec::Raw),
        })
    }
}

impl Sweeps {
    /// The item, or the id of the source that was missing.
    fn get(&self, item: usize) -> std::result::Result<SequenceItem, u32> {
        match self.ranges.get(item) {
            Range::Missing { source } => Err(source),
            Range::Here(blob) => Ok(SequenceItem {
                blob,
                timestamp_ns: self.ranges.timestamp_ns.value(item),
                transform: numbers(&self.transform, item),
            }),
        }
    }
}

fn ranges(file: &str, array: &ArrayRef) -> Result<Ranges> {
    let column = array.as_struct();
    let codec = column.column(3).as_dictionary::<Int32Type>().clone();
    let parse = |name: Option<&str>| {
        let name = name.unwrap_or_default();
        // An index without rows has one empty dictionary value.
        if name.is_empty() { Some(Codec::Raw) } else { Codec::from_name(name) }
    };
    let codecs = codec.values().as_string::<i32>().iter().map(parse).collect::<Option<Vec<_>>>();
    let codecs = codecs.ok_or_else(|| {
        let found = format!("{:?}", codec.values());
        Error::corrupt(file, 0, "known codecs", found, "index again with this version")
    })?;
    Ok(Ranges {
        source: column.column(0).as_primitive::<UInt32Type>().clone(),
        offset: column.column(1).as_primitive::<UInt64Type>().clone(),
        length: column.column(2).as_primitive::<UInt64Type>().clone(),
        timestamp_ns: column.column(4).as_primitive::<Int64Type>().clone(),
        codec,
        codecs,
    })
}

fn box_parts(items: &StructArray) -> BoxParts {
    let values = |i: usize| {
        let list = items.column(i).as_fixed_size_list();
        list.values().as_primitive::<Float32Type>().clone()
    };
    BoxParts {
        geometry: values(0),
        velocity: values(1),
        name: items.column(2).as_dictionary::<Int32Type>().clone(),
        token: items.column(3).as_string::<i32>().clone(),
        lidar_points: items.column(4).as_primitive::<Int32Type>().clone(),
    }
}

fn matrix(array: &ArrayRef) -> Float64Array {
    array.as_fixed_size_list().values().as_primitive::<Float64Type>().clone()
}

/// First and past-the-last item of a row.
fn span(list: &ListArray, row: usize) -> (usize, usize) {
    let offsets = list.value_offsets();
    (offsets[row] as usize, offsets[row + 1] as usize)
}

fn numbers<const N: usize>(array: &Float64Array, item: usize) -> [f64; N] {
    let values = array.values().get(item * N..item * N + N);
    values.and_then(|v| v.try_into().ok()).unwrap_or([f64::NAN; N])
}

fn floats<const N: usize>(array: &Float32Array, item: usize) -> [f32; N] {
    let values = array.values().get(item * N..item * N + N);
    values.and_then(|v| v.try_into().ok()).unwrap_or([f32::NAN; N])
}
