//! The PyO3 module `drivetrain._native`. One file per Python-visible noun, each with a `register`.

use pyo3::prelude::*;

mod arrow;
mod batch;
mod buffer;
mod checkpoint;
mod cli;
mod dataset;
mod errors;
mod exchange;
mod loader;

mod meet;
mod requests;
mod sample;
mod tensor_rows;
mod transforms;
mod values;

/// Native half of the `drivetrain` package; its public face is the Python package itself.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::register(module)?;
    buffer::register(module)?;
    dataset::register(module)?;
    transforms::register(module)?;
    loader::register(module)?;
    checkpoint::register(module)?;
    tensor_rows::register(module)?;
    exchange::register(module)?;
    cli::register(module)
}
