//! Dataset: the sample table and natural forms.

use pyo3::prelude::*;

/// Adds this file's classes to the module.
#[allow(clippy::unnecessary_wraps, reason = "same signature as its siblings")]
pub fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}
