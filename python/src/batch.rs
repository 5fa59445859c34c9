//! A batch on its way to Python: a tuple of plain values, native buffers, and for each array where
//! it lies in them. `drivetrain/_batch.py` makes tensors from it, without copying.

use std::sync::Arc;

use bytes::Bytes;
use drivetrain::index::{Boxes, Calibration, Pose};
use drivetrain::pipeline::{Array, Batch, BatchMemory, FieldData};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::buffer::{NativeBuffer, Owner};
use crate::values::{Object, Value, to_object};

/// (part, offset in bytes, shape, stride of the first axis in bytes or None, dtype).
type ArrayTuple = (usize, usize, Vec<usize>, Option<usize>, &'static str);

fn array_tuple(array: &Array) -> ArrayTuple {
    let shape = array.shape.clone();
    (array.part, array.offset_bytes, shape, array.first_stride_bytes, array.dtype.name())
}

/// (epoch, step, keys, valid, copied, parts, [(name, tag, payload)]).
pub fn batch_tuple(py: Python<'_>, batch: Batch) -> PyResult<Object> {
    let parts = parts(batch.memory)
        .into_iter()
        .map(|part| Py::new(py, part))
        .collect::<PyResult<Vec<_>>>()?;
    let fields = batch
        .fields
        .into_iter()
        .map(|(name, data)| {
            let (tag, payload) = payload(py, data)?;
            (name, tag, payload).into_py_any(py)
        })
        .collect::<PyResult<Vec<_>>>()?;
    let valid: Vec<u8> = batch.valid.iter().map(|v| u8::from(*v)).collect();
    let valid = NativeBuffer::from_bytes(Bytes::from(valid));
    (batch.epoch, batch.step, batch.keys, valid, batch.copied, parts, fields).into_py_any(py)
}

/// Views of all parts; the memory returns when the last view is gone.
fn parts(mut memory: Arc<BatchMemory>) -> Vec<NativeBuffer> {
    let count = memory.part_count();
    let Some(unique) = Arc::get_mut(&mut memory) else { return Vec::new() };
    let pointers: Vec<_> = (0..count).filter_map(|i| unique.pointer(i)).collect();
    let owner: Owner = memory;
    let view = |(start, length, writable)| {
        // SAFETY: the part lies in the memory that `owner` keeps; this was the only reference to
        // it, so Rust does not touch it again.
        unsafe { NativeBuffer::kept_by((start, length), writable, Arc::clone(&owner)) }
    };
    pointers.into_iter().map(view).collect()
}

fn integers(values: &[i64]) -> NativeBuffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    NativeBuffer::from_bytes(Bytes::from(bytes))
}

fn doubles(values: &[f64]) -> NativeBuffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    NativeBuffer::from_bytes(Bytes::from(bytes))
}

fn payload(py: Python<'_>, data: FieldData) -> PyResult<(&'static str, Object)> {
    Ok(match data {
        FieldData::Dense(array) => ("dense", array_tuple(&array).into_py_any(py)?),
        FieldData::List(arrays) => ("list", tuples(py, &arrays)?),
        FieldData::Blobs(arrays) => ("blobs", tuples(py, &arrays)?),
        FieldData::Ragged { values, offsets } => {
            ("ragged", (array_tuple(&values), integers(&offsets)).into_py_any(py)?)
        }
        FieldData::Padded { values, count } => {
            ("padded", (array_tuple(&values), integers(&count)).into_py_any(py)?)
        }
        FieldData::Text(texts) => ("text", texts.into_py_any(py)?),
        FieldData::Scalars(values) => ("scalars", doubles(&values).into_py_any(py)?),
        FieldData::Poses(poses) => ("poses", doubles(&matrices(&poses)).into_py_any(py)?),
        FieldData::Calibrations(values) => ("objects", calibrations(py, values)?),
        FieldData::Boxes(boxes) => ("boxes", boxes_payload(py, boxes)?),
        _ => ("unknown", py.None()),
    })
}

fn tuples(py: Python<'_>, arrays: &[Array]) -> PyResult<Object> {
    arrays.iter().map(array_tuple).collect::<Vec<_>>().into_py_any(py)
}

fn matrices(poses: &[Option<Pose>]) -> Vec<f64> {
    poses.iter().flat_map(|p| p.as_ref().map_or([0.0; 16], |p| p.matrix)).collect()
}

fn calibrations(py: Python<'_>, values: Vec<Option<Calibration>>) -> PyResult<Object> {
    let objects = values
        .into_iter()
        .map(|v| to_object(py, v.map_or(Value::Absent, Value::Calibration)))
        .collect::<PyResult<Vec<_>>>()?;
    objects.into_py_any(py)
}

/// (geometry, velocity, lidar_points, offsets, names, tokens): arrays of all samples one after the
/// other, lists per sample.
fn boxes_payload(py: Python<'_>, boxes: Vec<Boxes>) -> PyResult<Object> {
    let mut offsets = vec![0_i64];
    let (mut geometry, mut velocity, mut points) = (Vec::new(), Vec::new(), Vec::new());
    let (mut names, mut tokens) = (Vec::new(), Vec::new());
    for sample in boxes {
        let before = offsets.last().copied().unwrap_or(0);
        offsets.push(before + sample.geometry.len() as i64);
        geometry.extend(sample.geometry.iter().flatten().flat_map(|v| v.to_le_bytes()));
        velocity.extend(sample.velocity.iter().flatten().flat_map(|v| v.to_le_bytes()));
        points.extend(sample.lidar_points.iter().flat_map(|v| v.to_le_bytes()));
        names.push(sample.names);
        tokens.push(sample.tokens);
    }
    let buffer = |bytes: Vec<u8>| NativeBuffer::from_bytes(Bytes::from(bytes));
    let (geometry, velocity, points) = (buffer(geometry), buffer(velocity), buffer(points));
    (geometry, velocity, points, integers(&offsets), names, tokens).into_py_any(py)
}
