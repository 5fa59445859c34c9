//! The program behind `python -m drivetrain` and the `drivetrain` script.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line and returns its exit code (0 ok, 1 problems found, 2 usage).
#[pyfunction]
fn cli_main(py: Python<'_>, args: Vec<OsString>) -> u8 {
    py.detach(|| drivetrain::cli::run_code(args))
}

/// Adds this file's functions to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cli_main, module)?)
}
