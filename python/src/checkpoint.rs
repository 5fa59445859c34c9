//! Checkpointer, SaveHandle and OpenStep.
//!
//! Memory crosses as (address, bytes) of contiguous CPU tensors that the Python layer keeps alive
//! for the call; everything slow runs without the GIL.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drivetrain::Error;
use drivetrain::checkpoint::meet::Meet;
use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{self, Options, PackOptions, SaveOptions, Sharing, Target, TensorIn};
use drivetrain::storage::{OptionMap, StorageOptions, open_store};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::to_python;
use crate::meet::StoreMeet;
use crate::tensor_rows::{Block, with_rows};

/// How often a wait looks for Ctrl-C.
const SIGNAL_POLL: Duration = Duration::from_millis(100);

fn raise(error: &Error) -> PyErr {
    Python::attach(|py| to_python(py, error))
}

fn seconds(name: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| raise(&Error::invalid(name, "seconds from 0 up", seconds)))
}

/// path, dtype, shape, offsets, extent, address, bytes, replicas, pin_rank
type SaveRow = (String, String, Vec<i64>, Vec<i64>, Vec<i64>, usize, usize, Vec<u32>, Option<u32>);
/// step, number of the save call, session, world size, rank, problem
type LeftRow = (i64, u64, u64, u32, u32, Option<String>);

fn left_row(left: checkpoint::Left) -> LeftRow {
    (left.step, left.op, left.session, left.world_size, left.rank, left.problem)
}

/// path, dtype, shape, offsets, extent, address, bytes
type ReadRow = (String, String, Vec<i64>, Vec<i64>, Vec<i64>, usize, usize);

/// One rank's access to a checkpoint root.
#[pyclass(frozen, module = "drivetrain._native")]
struct Checkpointer {
    inner: checkpoint::Checkpointer,
}

#[pymethods]
impl Checkpointer {
    #[new]
    #[pyo3(signature = (uri, rank, world_size, *, keep_last=None, keep_every=None, keep_best=None,
        keep_within_s=None, keep_interval_s=None, timeout_s=600.0, run_id=None, shm_dir=None,
        single_writer=false, delta_saves_max=None, compress=false, storage_options=None,
        store=None))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
    fn new(
        py: Python<'_>,
        uri: String,
        rank: u32,
        world_size: u32,
        keep_last: Option<u32>,
        keep_every: Option<i64>,
        keep_best: Option<(u32, String, bool)>,
        keep_within_s: Option<f64>,
        keep_interval_s: Option<f64>,
        timeout_s: f64,
        run_id: Option<String>,
        shm_dir: Option<String>,
        single_writer: bool,
        delta_saves_max: Option<u32>,
        compress: bool,
        storage_options: Option<OptionMap>,
        store: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let best = |(count, metric, highest)| checkpoint::Best { count, metric, highest };
        let options = Options {
            keep_last,
            keep_every,
            keep_best: keep_best.map(best),
            keep_within: keep_within_s.map(|s| seconds("keep_within_s", s)).transpose()?,
            keep_interval: keep_interval_s.map(|s| seconds("keep_interval_s", s)).transpose()?,
            timeout: seconds("timeout_s", timeout_s)?,
            run_id,
            shm_dir: shm_dir.map(Into::into),
            single_writer,
            pack: PackOptions { delta_saves_max, compress },
        };
        let meet = store.map(|s| Arc::new(StoreMeet::new(py, &s)) as Arc<dyn Meet>);
        let storage = StorageOptions { options: storage_options.unwrap_or_default() };
        let inner = py.detach(|| {
            let store = open_store(&uri, &storage)?;
            checkpoint::Checkpointer::new(store, rank, world_size, options, meet)
        });
        Ok(Self { inner: inner.map_err(|e| raise(&e))? })
    }

    /// Stages the tensors and commits in the background, or waits if `blocking`. `check` is called
    /// between the two; what it raises fails the save on all ranks.
    ///
    /// `skip_after_s`: while both staging slots are being written, wait so long and then leave the
    /// save out on all ranks; None waits as long as the timeout. `may_repeat`: what `check` raises
    /// is raised, and this call does not count: the caller makes it anew.
    ///
    /// `blocks`: further tensors, as rows that were described before and their addresses now.
    #[pyo3(signature = (step, tensors, state_json, per_rank_json, *, blocking, overwrite,
        check=None, skip_after_s=None, metrics=None, stage=None, may_repeat=false,
        blocks=Vec::new()))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of the Python signature")]
    fn save(
        &self,
        py: Python<'_>,
        step: i64,
        tensors: Vec<SaveRow>,
        state_json: String,
        per_rank_json: String,
        blocking: bool,
        overwrite: bool,
        check: Option<Py<PyAny>>,
        skip_after_s: Option<f64>,
        metrics: Option<BTreeMap<String, f64>>,
        stage: Option<u32>,
        may_repeat: bool,
        blocks: Vec<Block>,
    ) -> PyResult<SaveHandle> {
        let skip_after = skip_after_s.map(|s| Duration::try_from_secs_f64(s).unwrap_or_default());
        let extra: Vec<_> = tensors.into_iter().map(input).collect();
        let finite = |(name, value): (String, f64)| (name, value.is_finite().then_some(value));
        let metrics = metrics.into_iter().flatten().map(finite).collect();
        let options = SaveOptions { overwrite, blocking, skip_after, metrics, stage, may_repeat };
        let mut raised = None;
        let mut check = || {
            let Some(check) = &check else { return Ok(()) };
            Python::attach(|py| check.call0(py).map(drop)).map_err(|e| {
                let what = e.to_string();
                raised = Some(e);
                Error::Peer { rank: self.inner.rank(), what }
            })
        };
        let saved = py.detach(|| {
            with_rows(&blocks, extra, |rows| {
                let (state, own) = (&state_json, &per_rank_json);
                self.inner.save_checked(step, rows, state, own, options, &mut check)
            })
        });
        let inner = saved.map_err(|e| raised.unwrap_or_else(|| raise(&e)))?;
        let handle = SaveHandle { inner };
        if blocking {
            handle.wait(py, None)?;
        }
        Ok(handle)
    }

    /// Takes part in a save that this rank cannot make, so that all ranks raise `why` at once.
    fn refuse(&self, py: Python<'_>, step: i64, why: &str) -> PyResult<()> {
        py.detach(|| self.inner.refuse(step, why)).map_err(|e| raise(&e))
    }

    /// Snapshots that a killed process of this run and rank left in shared memory, each checked
    /// byte by byte: (step, number of its save call, session or 0, ranks that saved together, rank,
    /// None or why it is not usable).
    fn left(&self, py: Python<'_>) -> Vec<LeftRow> {
        py.detach(|| self.inner.left()).into_iter().map(left_row).collect()
    }

    /// Whether there are more on this machine, of other ranks.
    fn more_left(&self, py: Python<'_>) -> bool {
        py.detach(|| self.inner.more_left())
    }

    /// `left`, and those of ranks that nobody is now; all ranks must have called `left` before.
    fn left_elsewhere(&self, py: Python<'_>) -> Vec<LeftRow> {
        py.detach(|| self.inner.left_elsewhere()).into_iter().map(left_row).collect()
    }

    /// Commits all parts of a save that this process holds, each as the rank that staged it.
    fn adopt_parts(&self, py: Python<'_>, step: i64, op: u64, session: u64) -> PyResult<()> {
        py.detach(|| self.inner.adopt_parts(step, op, session)).map_err(|e| raise(&e))
    }

    /// Commits one of `left` in the background; all ranks call it for the same one.
    fn adopt(&self, py: Python<'_>, step: i64, op: u64) -> PyResult<SaveHandle> {
        let inner = py.detach(|| self.inner.adopt(step, op)).map_err(|e| raise(&e))?;
        Ok(SaveHandle { inner })
    }

    /// Removes what was not adopted, of this rank.
    fn drop_left(&self, py: Python<'_>) {
        py.detach(|| self.inner.drop_left());
    }

    /// Removes every slot of this run that no process holds.
    fn sweep_left(&self, py: Python<'_>) {
        py.detach(|| self.inner.sweep_left());
    }

    /// Committed steps, ascending.
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        py.detach(|| self.inner.steps()).map_err(|e| raise(&e))
    }

    /// Newest first: (step, None), or (step, reason) if it cannot be restored.
    fn candidates(&self, py: Python<'_>) -> PyResult<Vec<(i64, Option<String>)>> {
        py.detach(|| self.inner.candidates()).map_err(|e| raise(&e))
    }

    /// Opens a committed step; its manifest and the sizes of its files are verified.
    fn open(&self, py: Python<'_>, step: i64) -> PyResult<OpenStep> {
        let inner = py.detach(|| self.inner.open(step)).map_err(|e| raise(&e))?;
        Ok(OpenStep { inner })
    }

    /// Reads every byte; returns (file, tensor path or "", reason) of each problem.
    fn verify(&self, py: Python<'_>, step: i64) -> PyResult<Vec<(String, String, String)>> {
        let problems = py.detach(|| self.inner.verify(step)).map_err(|e| raise(&e))?;
        Ok(problems.into_iter().map(|p| (p.file, p.tensor, p.reason)).collect())
    }

    /// Marks that a restore of `step` begins; None where nothing may be written.
    fn restore_begins(&self, py: Python<'_>, step: i64) -> Option<String> {
        py.detach(|| self.inner.restore_begins(step))
    }

    /// Takes a mark away; with `restored` also those that earlier crashes of that step left.
    #[pyo3(signature = (mark, restored=None))]
    fn restore_ended(&self, py: Python<'_>, mark: &str, restored: Option<i64>) -> PyResult<()> {
        py.detach(|| self.inner.restore_ended(mark, restored)).map_err(|e| raise(&e))
    }

    /// (step, restores of it that were killed).
    fn restore_crashes(&self, py: Python<'_>) -> PyResult<Vec<(i64, u32)>> {
        py.detach(|| self.inner.restore_crashes()).map_err(|e| raise(&e))
    }

    /// Every rank's payload in rank order.
    #[allow(
        clippy::redundant_closure_for_method_calls,
        reason = "the method is not generic enough"
    )]
    fn agree(&self, py: Python<'_>, tag: &str, payload: &str) -> PyResult<Vec<String>> {
        let mut interrupt = None;
        let said = py.detach(|| {
            let mut signals = || match Python::attach(|py| py.check_signals()) {
                Ok(()) => Ok(()),
                Err(raised) => {
                    interrupt = Some(raised);
                    Err(Error::Closed { what: "the wait for other ranks".into() })
                }
            };
            self.inner.agree(tag, payload, &mut signals)
        });
        said.map_err(|e| interrupt.unwrap_or_else(|| raise(&e)))
    }

    /// Says what this rank does until its next meeting, for the error on the others if it does not
    /// come; None when it is over.
    #[pyo3(signature = (what=None))]
    fn doing(&self, what: Option<&str>) {
        self.inner.doing(what);
    }

    /// Leaves a note for the other ranks, which must have met before.
    fn put_note(&self, py: Python<'_>, name: &str, text: &str) -> PyResult<()> {
        py.detach(|| self.inner.put_note(name, text)).map_err(|e| raise(&e))
    }

    /// A note that some rank has left; does not wait for one.
    fn note(&self, py: Python<'_>, name: &str) -> PyResult<Option<String>> {
        py.detach(|| self.inner.note(name)).map_err(|e| raise(&e))
    }

    /// Deletes a note.
    fn remove_note(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.inner.remove_note(name)).map_err(|e| raise(&e))
    }

    /// Reads and writes so far, by the engine that did them.
    fn io_counters(&self, py: Python<'_>) -> PyResult<Py<PyDict>> {
        Ok(crate::loader::io_dict(py, &self.inner.counters())?.unbind())
    }

    /// Makes staging memory for states of about this many bytes ahead of the first save.
    fn prepare(&self, py: Python<'_>, nbytes: usize) {
        py.detach(|| self.inner.prepare(nbytes));
    }

    /// The same in the background, for states like the newest committed one; false if there is
    /// none.
    fn prepare_like_newest(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.inner.prepare_like_newest()).map_err(|e| raise(&e))
    }

    /// Why states are staged in private memory, which a kill loses; None while they are not.
    #[getter]
    fn private_reason(&self) -> Option<String> {
        self.inner.private_reason()
    }

    /// Waits for running saves and stops the background thread.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.close()).map_err(|e| raise(&e))
    }
}

fn input(row: SaveRow) -> TensorIn<'static> {
    let (path, dtype, shape, offsets, extent, address, bytes, replicas, pin_rank) = row;
    let data = if address == 0 || bytes == 0 {
        &[][..]
    } else {
        // SAFETY: the caller keeps this contiguous memory alive and unchanged until save returns,
        // which is as long as the rows live.
        unsafe { std::slice::from_raw_parts(address as *const u8, bytes) }
    };
    let rect = Rect { offsets, extent };
    TensorIn { path, dtype, shape, rect, data, replicas, pin_rank }
}

fn target(row: ReadRow) -> Target<'static> {
    let (path, dtype, shape, offsets, extent, address, bytes) = row;
    let data = if address == 0 || bytes == 0 {
        &mut [][..]
    } else {
        // SAFETY: the caller keeps this contiguous memory alive until read_into returns and lets
        // nobody else use it meanwhile.
        unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) }
    };
    Target { path, dtype, shape, rect: Rect { offsets, extent }, data }
}

/// A save in the background.
#[pyclass(frozen, module = "drivetrain._native")]
struct SaveHandle {
    inner: checkpoint::SaveHandle,
}

#[pymethods]
impl SaveHandle {
    /// Seconds that the caller of `save` was stopped for staging.
    #[getter]
    fn staged_seconds(&self) -> f64 {
        self.inner.staged.as_secs_f64()
    }

    /// Waits until another process could adopt the staged bytes if this one were killed, or the
    /// save is over; false at the end of the time.
    fn wait_joined(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s.max(0.0)).unwrap_or(SIGNAL_POLL);
        py.detach(|| self.inner.wait_joined(Instant::now() + timeout))
    }

    /// Waits for the commit; returns the step or raises.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<i64> {
        let started = Instant::now();
        let timeout = timeout_s.map(|s| Duration::try_from_secs_f64(s.max(0.0)).ok());
        loop {
            let left = match timeout {
                Some(Some(timeout)) => timeout.saturating_sub(started.elapsed()),
                _ => SIGNAL_POLL,
            };
            let pause = left.min(SIGNAL_POLL);
            if let Some(outcome) = py.detach(|| self.inner.poll(Instant::now() + pause)) {
                return outcome.map(|()| self.inner.step).map_err(|e| to_python(py, &e));
            }
            py.check_signals()?;
            if left.is_zero() {
                let late = self.inner.wait(Duration::ZERO);
                return late.map_err(|e| to_python(py, &e));
            }
        }
    }

    /// Whether the outcome is known.
    fn done(&self) -> bool {
        self.inner.done()
    }

    /// This rank's part of a save that is over: bytes of its chunks in memory, of those that were
    /// referred to, and of the files that were written. None where nothing is packed.
    fn tally(&self) -> Option<(u64, u64, u64)> {
        self.inner.tally().map(|t| (t.raw_bytes, t.referred_bytes, t.written_bytes))
    }
}

/// A committed step, open for reading.
#[pyclass(frozen, module = "drivetrain._native")]
pub struct OpenStep {
    /// The engine's.
    pub inner: checkpoint::OpenStep,
}

#[pymethods]
impl OpenStep {
    /// The step.
    #[getter]
    fn step(&self) -> i64 {
        self.inner.manifest().step
    }

    /// Ranks that wrote it.
    #[getter]
    fn world_size(&self) -> u32 {
        self.inner.manifest().world_size
    }

    /// Folder of the save call that wrote it.
    #[getter]
    fn attempt(&self) -> &str {
        &self.inner.manifest().attempt
    }

    /// What was measured of the state; None where the number was not finite.
    #[getter]
    fn metrics(&self) -> BTreeMap<String, Option<f64>> {
        self.inner.manifest().metrics.clone()
    }

    /// The state that is equal on all ranks, as it was given.
    fn state_json(&self) -> &str {
        &self.inner.manifest().state_json
    }

    /// A rank's own state, or None for a rank that did not exist.
    fn per_rank_json(&self, rank: u32) -> Option<&str> {
        self.inner.per_rank_json(rank)
    }

    /// (path, dtype, shape) of all tensors.
    fn tensors(&self) -> Vec<(String, String, Vec<i64>)> {
        let first = |(path, chunks): (&str, &[checkpoint::layout::Chunk])| {
            let chunk = chunks.first()?;
            Some((path.to_string(), chunk.dtype.clone(), chunk.shape.clone()))
        };
        self.inner.tensors().filter_map(first).collect()
    }

    /// Fills memory: (path, dtype, shape, offsets, extent, address, bytes) each. `sharing` is what
    /// other processes of this machine read, too: "alone" (nothing), "partial" or "all".
    /// `blocks` are more of them: rows, which are used up, and their addresses.
    #[pyo3(signature = (targets, sharing="alone", blocks=Vec::new()))]
    fn read_into(
        &self,
        py: Python<'_>,
        targets: Vec<ReadRow>,
        sharing: &str,
        blocks: Vec<Block>,
    ) -> PyResult<()> {
        let sharing = match sharing {
            "all" => Sharing::All,
            "partial" => Sharing::Partial,
            _ => Sharing::Alone,
        };
        let mut targets: Vec<_> = targets.into_iter().map(target).collect();
        let read = py.detach(|| {
            for (block, addresses) in &blocks {
                // SAFETY: the caller keeps this contiguous memory alive until read_into returns
                // and lets nobody else use it meanwhile.
                targets.append(&mut unsafe { block.get().targets(addresses) }?);
            }
            self.inner.read_into_shared(targets, sharing)
        });
        read.map_err(|e| raise(&e))
    }
}

/// Adds this file's classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Checkpointer>()?;
    module.add_class::<SaveHandle>()?;
    module.add_class::<OpenStep>()
}
