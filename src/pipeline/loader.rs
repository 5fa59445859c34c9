//! The loader: a table, a position, and a pipeline that is made when it is first needed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::batch::Batch;
use super::config::{LoaderConfig, OnHeld};
use super::driver::drive;
use super::engine::Engine;
use super::field::{Field, resolve};
use super::pass::{PassState, Share, Taken};
use super::pool::Pool;
use super::quarantine::{BadSample, Quarantine};
use crate::error::{Error, Result};
use crate::index::SampleTable;
use crate::memory::ArenaStats;
use crate::order::{Cursor, LoaderState, Order, Partition};
use crate::storage::IoCounters;
use crate::telemetry::{LoaderReport, Stage, Stages};

/// Longest sleep inside `next` without asking the caller whether to go on (Ctrl-C in Python).
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// Loads batches of a table in the order of its cursor.
#[derive(Debug)]
pub struct Loader {
    table: SampleTable,
    config: LoaderConfig,
    fields: Arc<[Field]>,
    order: Order,
    partition: Partition,
    stages: Arc<Stages>,
    cursor: Mutex<Cursor>,
    quarantine: Mutex<Quarantine>,
    running: Mutex<Running>,
    closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Running {
    process: Option<Process>,
    pass: Option<Arc<PassState>>,
    /// When the last batch was handed out, to measure the caller's own time.
    returned: Option<Instant>,
}

/// What belongs to one process and does not survive a fork.
#[derive(Debug)]
struct Process {
    pid: u32,
    engine: Arc<Engine>,
    pool: Pool,
}

/// A pass that hands out batches through [`Loader::next`].
#[derive(Debug, Clone)]
pub struct RunningPass(Arc<PassState>);

impl RunningPass {
    /// Stops reading ahead and drops what was read; for iterators nobody will ask again.
    pub fn cancel(&self) {
        self.0.cancel();
    }
}

/// Everything a loader counts.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderStats {
    /// Stages and the bottleneck.
    pub report: LoaderReport,
    /// Reads by engine.
    pub io: IoCounters,
    /// The arena.
    pub arena: ArenaStats,
    /// The memory limit.
    pub memory_limit_bytes: u64,
    /// Bytes of it in use.
    pub memory_used_bytes: u64,
    /// Batches in the caller's hands.
    pub held_batches: usize,
    /// Their bytes.
    pub held_bytes: u64,
}

impl Loader {
    /// A loader at the start of epoch 0. Starts no thread and maps no memory.
    pub fn new(table: SampleTable, config: LoaderConfig) -> Result<Self> {
        config.validate()?;
        let fields: Arc<[Field]> = resolve(&table, config.fields.as_deref())?.into();
        let order = Order::new(table.len() as u64, config.seed, config.shuffle)?;
        let partition =
            Partition::new(config.batch_size, config.world_size, config.rank, config.drop_last)?;
        let cursor = Cursor::new(order, partition, table.fingerprint());
        Ok(Self {
            quarantine: Mutex::new(Quarantine::new(config.quarantine_file.clone())),
            table,
            config,
            fields,
            order,
            partition,
            stages: Arc::default(),
            cursor: Mutex::new(cursor),
            running: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Its table.
    pub fn table(&self) -> &SampleTable {
        &self.table
    }

    /// Its configuration.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// Steps of the running pass, or of the next one if none runs.
    #[expect(clippy::len_without_is_empty, reason = "the name of Python's len(loader)")]
    pub fn len(&self) -> u64 {
        self.cursor.lock().len()
    }

    /// The state after the last batch handed out.
    pub fn state(&self) -> LoaderState {
        self.cursor.lock().state()
    }

    /// Continues from a stored state; a running pass becomes stale.
    pub fn load_state(&self, state: &LoaderState) -> Result<()> {
        self.cursor.lock().load(state)?;
        self.drop_stale_pass();
        Ok(())
    }

    /// Moves to `epoch`; the current one keeps its position.
    pub fn set_epoch(&self, epoch: u64) {
        self.cursor.lock().set_epoch(epoch);
        self.drop_stale_pass();
    }

    fn drop_stale_pass(&self) {
        let mut running = self.running.lock();
        if let Some(pass) = &running.pass
            && !self.cursor.lock().is_current(pass.pass())
        {
            pass.cancel();
            running.pass = None;
        }
    }

    /// Starts a pass from the cursor's position; older passes become stale. Reading begins at once.
    pub fn begin_pass(&self, share: Share) -> Result<RunningPass> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::Closed { what: "this loader".into() });
        }
        let mut running = self.running.lock();
        if let Some(old) = running.pass.take() {
            old.cancel();
        }
        let engine = self.engine(&mut running)?;
        let local = engine.sources.store().capabilities().local_root.is_some();
        let pass = PassState::new(self.cursor.lock().begin_pass(), share, local);
        engine.handle.spawn(drive(Arc::clone(&engine), Arc::clone(&pass), self.partition));
        running.pass = Some(Arc::clone(&pass));
        running.returned = None;
        Ok(RunningPass(pass))
    }

    /// This process's engine; a forked child leaves its parent's alone and makes its own.
    fn engine(&self, running: &mut Running) -> Result<Arc<Engine>> {
        let pid = std::process::id();
        if let Some(process) = &running.process
            && process.pid == pid
        {
            return Ok(Arc::clone(&process.engine));
        }
        abandon(running);
        let pool = Pool::start(self.config.thread_count())?;
        let engine = Engine::new(
            &self.table,
            &self.config,
            Arc::clone(&self.fields),
            self.order,
            Arc::clone(&self.stages),
            pool.sender(),
        )?;
        let engine = Arc::new(engine);
        running.process = Some(Process { pid, engine: Arc::clone(&engine), pool });
        Ok(engine)
    }

    /// The next batch of `pass`, or `None` at its end. `go_on` is asked about twenty times a second
    /// while waiting; false ends the wait with [`Error::Closed`]. After that, a timeout or
    /// [`Error::MemoryHeld`] the call can be repeated; any other error ends the pass.
    pub fn next(
        &self,
        pass: &RunningPass,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Batch>> {
        let state = &pass.0;
        if !state.is_ours() {
            return Err(Error::Unsupported {
                what: "an iterator of a parent process".into(),
                advice: "call iter(loader) in the process that uses it".into(),
            });
        }
        let _caller = state.caller()?;
        self.cursor.lock().check_current(state.pass())?;
        let engine = self.current_engine(state)?;
        let _timer = engine.stages.time(Stage::Wait);
        let _start = state.is_fresh().then(|| engine.stages.time(Stage::StartWait));
        let started = Instant::now();
        let batch = self.wait(state, &engine, started, go_on)?;
        self.hand_out(state, &engine, batch)
    }

    fn current_engine(&self, state: &PassState) -> Result<Arc<Engine>> {
        let mut running = self.running.lock();
        if let Some(returned) = running.returned.take() {
            self.stages.add(Stage::Consume, returned.elapsed());
        }
        match &running.process {
            Some(process) if !state.is_cancelled() => Ok(Arc::clone(&process.engine)),
            _ => Err(Error::Closed { what: "this iterator".into() }),
        }
    }

    fn wait(
        &self,
        state: &PassState,
        engine: &Engine,
        started: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Batch>> {
        loop {
            let left = self.config.timeout.map(|t| t.saturating_sub(started.elapsed()));
            let slice = left.map_or(WAIT_SLICE, |left| left.min(WAIT_SLICE));
            match state.take(slice)? {
                Taken::Batch(batch) => return Ok(Some(*batch)),
                Taken::End => return Ok(None),
                Taken::Failed(error) => {
                    state.cancel();
                    return Err(error);
                }
                Taken::Pending { blocked: None } => {}
                Taken::Pending { blocked: Some(own_bytes) } => {
                    self.answer_held(state, engine, own_bytes)?;
                    state.pause(slice);
                }
            }
            if !go_on() {
                return Err(Error::Closed { what: "the wait for a batch".into() });
            }
            if left.is_some_and(|left| left.is_zero()) {
                return Err(Error::Timeout {
                    what: state.waiting_for(),
                    waited: started.elapsed(),
                    advice: "raise timeout or check the storage".into(),
                });
            }
        }
    }

    /// The next step waits for memory. If the caller holds all of it, waiting would never end.
    fn answer_held(&self, state: &PassState, engine: &Engine, own_bytes: u64) -> Result<()> {
        if !engine.budget.only_held(own_bytes) {
            return Ok(());
        }
        match self.config.on_held {
            OnHeld::Copy => state.allow_private(),
            OnHeld::Raise => {
                let (batches, bytes) = engine.budget.held();
                return Err(Error::MemoryHeld { batches, bytes });
            }
        }
        Ok(())
    }

    fn hand_out(
        &self,
        state: &PassState,
        engine: &Engine,
        batch: Option<Batch>,
    ) -> Result<Option<Batch>> {
        let mut cursor = self.cursor.lock();
        let Some(mut batch) = batch else {
            cursor.end_pass(state.pass());
            return Ok(None);
        };
        self.note_bad(state, &batch)?;
        cursor.handed_out(state.pass(), batch.step)?;
        drop(cursor);
        let bytes = batch.memory.bytes_len();
        if let Some(memory) = Arc::get_mut(&mut batch.memory) {
            memory.hand_out(&engine.budget);
        }
        let (samples, bad) = (batch.keys.len() as u64, batch.bad.len() as u64);
        self.stages.delivered(samples, bytes, bad, batch.copied);
        self.running.lock().returned = Some(Instant::now());
        Ok(Some(batch))
    }

    fn note_bad(&self, state: &PassState, batch: &Batch) -> Result<()> {
        if batch.bad.is_empty() {
            return Ok(());
        }
        let delivered = self.stages.samples() + batch.keys.len() as u64;
        let result = self.quarantine.lock().add(&batch.bad, delivered, self.config.error_limit);
        if result.is_err() {
            state.cancel();
        }
        result
    }

    /// Bad samples so far, the first of them if there are very many.
    pub fn quarantine(&self) -> Vec<BadSample> {
        self.quarantine.lock().entries().to_vec()
    }

    /// What it did so far.
    pub fn stats(&self) -> LoaderStats {
        let running = self.running.lock();
        let pid = std::process::id();
        let process = running.process.as_ref().filter(|p| p.pid == pid);
        let engine = process.map(|p| &p.engine);
        let threads = self.config.thread_count();
        let (held_batches, held_bytes) = engine.map(|e| e.budget.held()).unwrap_or_default();
        LoaderStats {
            report: self.stages.report(threads),
            io: engine.map(|e| e.sources.store().counters()).unwrap_or_default(),
            arena: engine.map(|e| e.arena_stats()).unwrap_or_default(),
            memory_limit_bytes: self.config.memory_limit_bytes,
            memory_used_bytes: engine.map(|e| e.budget.used_bytes()).unwrap_or_default(),
            held_batches,
            held_bytes,
        }
    }

    /// Stops reading and joins the threads. Batches already delivered stay valid.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let (process, pass) = {
            let mut running = self.running.lock();
            if running.process.as_ref().is_some_and(|p| p.pid != std::process::id()) {
                abandon(&mut running);
            }
            (running.process.take(), running.pass.take())
        };
        if let Some(pass) = pass {
            pass.cancel();
        }
        // Joined without the lock, so that another thread inside `next` can leave.
        drop(process);
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.close();
    }
}

/// Leaks what a parent process made: its threads do not exist here, and its locks may be taken.
fn abandon(running: &mut Running) {
    if let Some(mut process) = running.process.take() {
        process.pool.forget();
        std::mem::forget(process);
    }
    if let Some(pass) = running.pass.take() {
        std::mem::forget(pass);
    }
}
