//! The loader against small data sets made here: every value has a formula, so that each test
//! computes what must come out instead of comparing with another run.

mod data;
mod faults;
mod memory;
mod order;
mod values;

use drivetrain::pipeline::{Batch, FieldData, Loader, RunningPass, Share};

/// The next batch, or `None` at the end.
fn next(loader: &Loader, pass: &RunningPass) -> drivetrain::Result<Option<Batch>> {
    loader.next(pass, &mut || true)
}

/// All batches of a pass.
fn drain(loader: &Loader) -> Vec<Batch> {
    let pass = loader.begin_pass(Share::ALL).unwrap();
    std::iter::from_fn(|| next(loader, &pass).unwrap()).collect()
}

/// Float32 values of an array.
fn floats(batch: &Batch, array: &drivetrain::pipeline::Array) -> Vec<f32> {
    let bytes = batch.bytes(array);
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Rows and offsets of a ragged field.
fn ragged(batch: &Batch, name: &str) -> (Vec<f32>, Vec<i64>, Vec<usize>) {
    match batch.field(name).unwrap() {
        FieldData::Ragged { values, offsets } => {
            (floats(batch, values), offsets.clone(), values.shape.clone())
        }
        other => panic!("{name} is {other:?}"),
    }
}
