//! Values of samples on their way to Python: tuples whose first item is a tag, with numbers in
//! native buffers. `drivetrain/_values.py` makes the public classes from them, so that numpy is
//! imported in one place and only when a value is looked at.

use bytes::Bytes;
use drivetrain::index::{Boxes, Calibration, Pose};
use drivetrain::memory::Buffer;
use drivetrain::transform::Natural;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer::NativeBuffer;

/// Any Python object.
pub type Object = Py<PyAny>;

/// A value of one field of one sample.
pub enum Value {
    /// The sample has none.
    Absent,
    /// A decoded blob and the frame of its field.
    Natural(Natural, Option<String>),
    /// Stored records: column names, points, bytes, frame.
    Records(Vec<String>, usize, Buffer, Option<String>),
    /// Boxes.
    Boxes(Boxes),
    /// A pose.
    Pose(Pose),
    /// A calibration.
    Calibration(Calibration),
    /// Inline text.
    Text(String),
    /// A number.
    Scalar(f64),
}

/// The tagged tuple (or `None`) of a value.
pub fn to_object(py: Python<'_>, value: Value) -> PyResult<Object> {
    match value {
        Value::Absent => Ok(py.None()),
        Value::Natural(natural, frame) => natural_object(py, natural, frame),
        Value::Records(columns, points, buffer, frame) => {
            let buffer = NativeBuffer::from_buffer(buffer);
            ("points", buffer, points, columns, frame).into_py_any(py)
        }
        Value::Boxes(boxes) => boxes_object(py, boxes),
        Value::Pose(pose) => pose_object(py, pose),
        Value::Calibration(calibration) => calibration_object(py, calibration),
        Value::Text(text) => text.into_py_any(py),
        Value::Scalar(number) => number.into_py_any(py),
    }
}

fn natural_object(py: Python<'_>, natural: Natural, frame: Option<String>) -> PyResult<Object> {
    match natural {
        Natural::Array { dtype, shape, data } => {
            ("array", NativeBuffer::from_bytes(data), dtype.name(), shape).into_py_any(py)
        }
        Natural::Points { columns, points, data } => {
            ("points", NativeBuffer::from_bytes(data), points, columns, frame).into_py_any(py)
        }
        Natural::Text(text) => text.into_py_any(py),
        Natural::Bytes(bytes) => PyBytes::new(py, &bytes).into_py_any(py),
    }
}

fn floats(values: impl IntoIterator<Item = f32>) -> NativeBuffer {
    let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
    NativeBuffer::from_bytes(Bytes::from(bytes))
}

fn doubles(values: &[f64]) -> NativeBuffer {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    NativeBuffer::from_bytes(Bytes::from(bytes))
}

fn boxes_object(py: Python<'_>, boxes: Boxes) -> PyResult<Object> {
    let count = boxes.geometry.len();
    let points: Vec<u8> = boxes.lidar_points.iter().flat_map(|v| v.to_le_bytes()).collect();
    let tuple = (
        "boxes",
        count,
        floats(boxes.geometry.into_iter().flatten()),
        floats(boxes.velocity.into_iter().flatten()),
        boxes.names,
        boxes.tokens,
        NativeBuffer::from_bytes(Bytes::from(points)),
        boxes.frame,
    );
    tuple.into_py_any(py)
}

fn pose_object(py: Python<'_>, pose: Pose) -> PyResult<Object> {
    ("pose", doubles(&pose.matrix), pose.target, pose.source, pose.timestamp_ns).into_py_any(py)
}

fn calibration_object(py: Python<'_>, value: Calibration) -> PyResult<Object> {
    let intrinsic = value.intrinsic.map(|k| doubles(&k));
    let (sensor, ego) = (doubles(&value.sensor_to_ego), doubles(&value.ego_to_global));
    ("calibration", value.channel, sensor, ego, intrinsic, value.timestamp_ns).into_py_any(py)
}
