//! Tables to Python by the Arrow C stream interface: no copy, and pyarrow or polars only if the
//! caller has them.

use std::ffi::CStr;

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{RecordBatch, RecordBatchIterator};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// Name that the protocol gives the capsule.
const STREAM: &CStr = c"arrow_array_stream";

/// One batch as a stream capsule; consuming or dropping it releases the reference to the columns.
pub fn stream_capsule(py: Python<'_>, batch: RecordBatch) -> PyResult<Bound<'_, PyCapsule>> {
    let schema = batch.schema();
    let reader = RecordBatchIterator::new([Ok(batch)], schema);
    let stream = FFI_ArrowArrayStream::new(Box::new(reader));
    PyCapsule::new_with_value(py, stream, STREAM)
}
