//! From the order of samples to batches: plan → fetch → decode into the batch → deliver in order.
//!
//! | file | what it does |
//! |---|---|
//! | `config` | what a loader is asked to do |
//! | `field` | what each requested field needs, resolved once |
//! | `plan`, `coalesce` | bytes, reads, layout and cost of one step |
//! | `driver` | one task per pass: plans steps in order, waits for their memory, sets them going |
//! | `budget` | the memory limit, and what the caller holds of it |
//! | `sources`, `fetch` | open sources, merged reads into arena buffers |
//! | `pool`, `decode` | decoder threads; encoded bytes into slots of the batch |
//! | `slots` | many writers in one buffer; the pipeline's only `unsafe` |
//! | `work`, `finish`, `assemble` | one step being made; bad samples; its batch |
//! | `pass` | finished batches in order, back-pressure, cancellation |
//! | `quarantine` | the report of bad samples |
//! | `engine`, `loader` | what steps share; the face of it all |
//!
//! A step is funded completely before it starts and steps are funded in order, so the pipeline
//! cannot deadlock on memory: the only thing that can block it is a caller who holds all of it,
//! and that case is recognised and answered (see [`OnHeld`]).

mod assemble;
mod batch;
mod budget;
mod coalesce;
mod config;
mod decode;
mod driver;
mod engine;
mod fetch;
mod field;
mod finish;
mod loader;
mod pass;
mod plan;
mod pool;
mod quarantine;
mod slots;
mod sources;
mod work;

pub use batch::{Array, Batch, BatchMemory, FieldData, Part};
pub use config::{
    ErrorLimit, FieldForm, FieldRequest, LoaderConfig, MEMORY_LIMIT_BYTES_DEFAULT, OnError, OnHeld,
    Ragged,
};
pub use field::in_field;
pub use loader::{Loader, LoaderStats, RunningPass};
pub use pass::Share;
pub use quarantine::BadSample;
