//! Loader: batches as buffers that torch and numpy wrap without a copy.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drivetrain::order::{LoaderState, Shuffle};
use drivetrain::pipeline::{
    BadSample, ErrorLimit, Loader, LoaderConfig, LoaderStats, OnError, OnHeld, RunningPass, Share,
};
use drivetrain::storage::IoCounters;
use drivetrain::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::batch::batch_tuple;
use crate::dataset::NativeDataset;
use crate::errors::to_python;
use crate::requests::requests;

/// Native half of `drivetrain.DataLoader`.
#[pyclass(frozen, module = "drivetrain._native", name = "Loader")]
struct NativeLoader {
    loader: Arc<Loader>,
}

/// A pass over an epoch.
#[pyclass(frozen, module = "drivetrain._native", name = "Pass")]
struct NativePass {
    pass: RunningPass,
}

impl Drop for NativePass {
    fn drop(&mut self) {
        self.pass.cancel();
    }
}

/// A wish the loader cannot know the words of: the choices by name.
fn choose<T: Copy>(what: &str, name: &str, choices: &[(&str, T)]) -> Result<T> {
    choices.iter().find(|(n, _)| *n == name).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(n, _)| *n).collect();
        Error::invalid(what, format!("one of {}", names.join(", ")), name)
    })
}

fn get<'py, T>(options: &Bound<'py, PyDict>, name: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error: Into<PyErr>>,
{
    let value = options.get_item(name)?;
    let value = value.ok_or_else(|| pyo3::exceptions::PyKeyError::new_err(name.to_string()))?;
    value.extract().map_err(Into::into)
}

fn shuffle(options: &Bound<'_, PyDict>) -> PyResult<Result<Shuffle>> {
    let name: String = get(options, "shuffle")?;
    let numbers: Option<(u64, u64)> = get(options, "shuffle_block")?;
    let chosen = choose(
        "shuffle",
        &name,
        &[
            ("full", Shuffle::Full),
            ("block", Shuffle::BLOCK_DEFAULT),
            ("sequential", Shuffle::Sequential),
        ],
    );
    Ok(chosen.map(|shuffle| match (shuffle, numbers) {
        (Shuffle::Block { .. }, Some((block, window))) => Shuffle::Block { block, window },
        (other, _) => other,
    }))
}

fn error_limit(options: &Bound<'_, PyDict>) -> PyResult<ErrorLimit> {
    let count: Option<u64> = get(options, "error_count")?;
    let rate: Option<f64> = get(options, "error_rate")?;
    Ok(match (count, rate) {
        (Some(count), _) => ErrorLimit::Count(count),
        (None, Some(rate)) => ErrorLimit::Rate(rate),
        (None, None) => ErrorLimit::default(),
    })
}

fn seconds(options: &Bound<'_, PyDict>, name: &str) -> PyResult<Option<Duration>> {
    let value: Option<f64> = get(options, name)?;
    value
        .map(|s| {
            Duration::try_from_secs_f64(s)
                .map_err(|e| pyo3::exceptions::PyValueError::new_err(format!("{name}: {e}")))
        })
        .transpose()
}

fn config(dataset: &NativeDataset, options: &Bound<'_, PyDict>) -> PyResult<LoaderConfig> {
    let py = options.py();
    let raise = |e: Error| to_python(py, &e);
    let on_error: String = get(options, "on_error")?;
    let on_held: String = get(options, "on_held")?;
    let policies =
        [("raise", OnError::Raise), ("replace", OnError::Replace), ("mask", OnError::Mask)];
    let held = [("copy", OnHeld::Copy), ("raise", OnHeld::Raise)];
    let fields: Option<Vec<(String, Option<Bound<'_, PyDict>>)>> = get(options, "fields")?;
    Ok(LoaderConfig {
        batch_size: get(options, "batch_size")?,
        fields: fields.map(|fields| requests(py, fields)).transpose()?,
        shuffle: shuffle(options)?.map_err(raise)?,
        seed: get(options, "seed")?,
        drop_last: get(options, "drop_last")?,
        rank: get(options, "rank")?,
        world_size: get(options, "world_size")?,
        memory_limit_bytes: get(options, "memory_limit_bytes")?,
        threads: get(options, "threads")?,
        on_error: choose("on_error", &on_error, &policies).map_err(raise)?,
        error_limit: error_limit(options)?,
        quarantine_file: get::<Option<PathBuf>>(options, "quarantine_file")?,
        on_held: choose("on_held", &on_held, &held).map_err(raise)?,
        timeout: seconds(options, "timeout_s")?,
        storage: dataset.options().clone(),
    })
}

#[pymethods]
impl NativeLoader {
    #[new]
    fn new(
        py: Python<'_>,
        dataset: &Bound<'_, NativeDataset>,
        options: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        let config = config(dataset.get(), options)?;
        let table = dataset.get().table().clone();
        let loader = py.detach(|| Loader::new(table, config));
        Ok(Self { loader: Arc::new(loader.map_err(|e| to_python(py, &e))?) })
    }

    fn __len__(&self) -> usize {
        usize::try_from(self.loader.len()).unwrap_or(usize::MAX)
    }

    /// Starts a pass that delivers steps `first`, `first + stride`, ...
    fn begin(&self, py: Python<'_>, first: u64, stride: u64) -> PyResult<NativePass> {
        let pass = py.detach(|| self.loader.begin_pass(Share { first, stride }));
        Ok(NativePass { pass: pass.map_err(|e| to_python(py, &e))? })
    }

    /// The next batch of a pass as a tuple (see `_batch.py`), or None at its end.
    fn next(&self, py: Python<'_>, pass: &NativePass) -> PyResult<Option<Py<PyAny>>> {
        let mut interrupt = None;
        let batch = py.detach(|| {
            self.loader.next(&pass.pass, &mut || {
                interrupt = check_signals().err();
                interrupt.is_none()
            })
        });
        if let Some(interrupt) = interrupt {
            return Err(interrupt);
        }
        let batch = batch.map_err(|e| to_python(py, &e))?;
        batch.map(|batch| batch_tuple(py, batch)).transpose()
    }

    /// The state as JSON.
    fn state(&self, py: Python<'_>) -> PyResult<String> {
        self.loader.state().to_json().map_err(|e| to_python(py, &e))
    }

    /// Continues from a state as JSON.
    fn load_state(&self, py: Python<'_>, json: &str) -> PyResult<()> {
        let load = || self.loader.load_state(&LoaderState::from_json(json)?);
        py.detach(load).map_err(|e| to_python(py, &e))
    }

    fn set_epoch(&self, py: Python<'_>, epoch: u64) {
        py.detach(|| self.loader.set_epoch(epoch));
    }

    /// Counters and times.
    fn stats(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        stats_dict(py, &py.detach(|| self.loader.stats()))
    }

    /// Bad samples so far.
    fn quarantine(&self, py: Python<'_>) -> PyResult<Vec<Py<PyDict>>> {
        self.loader.quarantine().iter().map(|bad| bad_dict(py, bad)).collect()
    }

    /// Stops and joins the threads.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.loader.close());
    }
}

/// Ctrl-C, and whatever else Python has noted for its main thread.
#[allow(clippy::redundant_closure_for_method_calls, reason = "the method is not general enough")]
fn check_signals() -> PyResult<()> {
    Python::attach(|py| py.check_signals())
}

fn bad_dict(py: Python<'_>, bad: &BadSample) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("key", &bad.key)?;
    dict.set_item("field", &bad.field)?;
    dict.set_item("source", &bad.source)?;
    dict.set_item("offset", bad.offset)?;
    dict.set_item("reason", &bad.reason)?;
    dict.set_item("epoch", bad.epoch)?;
    dict.set_item("position", bad.position)?;
    dict.set_item("action", &bad.action)?;
    dict.set_item("substitute", &bad.substitute)?;
    Ok(dict.unbind())
}

fn stats_dict(py: Python<'_>, stats: &LoaderStats) -> PyResult<Py<PyDict>> {
    let dict = PyDict::new(py);
    let report = &stats.report;
    for (name, count) in [
        ("batches", report.batches),
        ("samples", report.samples),
        ("reads", report.reads),
        ("read_bytes", report.read_bytes),
        ("wanted_bytes", report.wanted_bytes),
        ("batch_bytes", report.batch_bytes),
        ("bad_samples", report.bad_samples),
        ("copied_batches", report.copied_batches),
        ("private_bytes", report.private_bytes),
        ("threads", report.threads as u64),
    ] {
        dict.set_item(name, count)?;
    }
    dict.set_item("bottleneck", report.bottleneck.name())?;
    dict.set_item("seconds", seconds_dict(py, stats)?)?;
    dict.set_item("io", io_dict(py, &stats.io)?)?;
    dict.set_item("memory", memory_dict(py, stats)?)?;
    Ok(dict.unbind())
}

fn seconds_dict<'py>(py: Python<'py>, stats: &LoaderStats) -> PyResult<Bound<'py, PyDict>> {
    let (dict, seconds) = (PyDict::new(py), &stats.report.seconds);
    for (name, value) in [
        ("plan", seconds.plan),
        ("memory_wait", seconds.memory_wait),
        ("fetch", seconds.fetch),
        ("reading", seconds.reading),
        ("decode", seconds.decode),
        ("assemble", seconds.assemble),
        ("deliver_wait", seconds.deliver_wait),
        ("start_wait", seconds.start_wait),
        ("consumer", seconds.consumer),
        ("elapsed", seconds.elapsed),
    ] {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Counters of a store as a dict, for `stats()` of loaders and checkpointers.
pub fn io_dict<'py>(py: Python<'py>, io: &IoCounters) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, count) in [
        ("uring_reads", io.uring_reads),
        ("uring_writes", io.uring_writes),
        ("thread_reads", io.thread_reads),
        ("thread_writes", io.thread_writes),
        ("direct_reads", io.direct_reads),
        ("direct_writes", io.direct_writes),
        ("fixed_reads", io.fixed_reads),
        ("fixed_writes", io.fixed_writes),
        ("object_requests", io.object_requests),
        ("read_bytes", io.read_bytes),
        ("written_bytes", io.written_bytes),
        ("retries", io.retries),
    ] {
        dict.set_item(name, count)?;
    }
    let (registered_bytes, reason) = drivetrain::storage::local::registered();
    dict.set_item("registered_bytes", registered_bytes)?;
    dict.set_item("unregistered_reason", reason)?;
    Ok(dict)
}

fn memory_dict<'py>(py: Python<'py>, stats: &LoaderStats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, count) in [
        ("limit_bytes", stats.memory_limit_bytes),
        ("used_bytes", stats.memory_used_bytes),
        ("held_batches", stats.held_batches as u64),
        ("held_bytes", stats.held_bytes),
        ("arena_in_use_bytes", stats.arena.in_use_bytes as u64),
        ("arena_peak_bytes", stats.arena.peak_bytes as u64),
        ("arena_slabs_bytes", stats.arena.slabs_bytes as u64),
        ("arena_slabs", stats.arena.slabs as u64),
    ] {
        dict.set_item(name, count)?;
    }
    Ok(dict)
}

/// Adds this file's classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<NativeLoader>()?;
    module.add_class::<NativePass>()
}
