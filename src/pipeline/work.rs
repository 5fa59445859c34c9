//! One step being made: its samples, the outcome of each cell, and what is still missing.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;

use super::budget::Charge;
use super::coalesce::Read;
use super::decode;
use super::engine::Engine;
use super::fetch;
use super::finish;
use super::pass::PassState;
use super::plan::{Cell, Layout, Piece, Value};
use super::pool::Scratch;
use super::quarantine::BadSample;
use super::slots::SlotBuffer;
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::telemetry::Stage;
use crate::transform::Natural;

/// A sample's place in a batch.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Row of the table.
    pub row: u64,
    /// Position in the epoch's order that it was planned for.
    pub position: u64,
    /// Whether it counts.
    pub valid: bool,
    /// Substitutes tried so far.
    pub tries: u64,
    /// It is delivered as zeros.
    pub masked: bool,
}

/// What became of one cell.
#[derive(Debug)]
pub enum Outcome {
    /// A value of the table.
    Value(Value),
    /// A picture, in its slot or (if that was too small) in memory of its own.
    Image {
        /// Its shape.
        shape: [usize; 3],
        /// Memory of its own.
        own: Option<Buffer>,
    },
    /// Rows of points, in the slot or in memory of their own.
    Points {
        /// Number of points.
        rows: usize,
        /// Memory of their own.
        own: Option<Buffer>,
    },
    /// Any other natural form.
    Natural(Natural),
    /// Nothing: the sample is masked.
    Empty,
}

/// Why a cell could not be had.
#[derive(Debug)]
pub struct Failure {
    /// The error.
    pub error: Error,
    /// Source it was read from, if it came to that.
    pub source: String,
    /// Offset of the bytes in it.
    pub offset: u64,
}

/// Where the outcome of a cell is put by its job and taken by the step's last one.
type OutcomeCell = Mutex<Option<Result<Outcome, Box<Failure>>>>;

/// Memory that a step may use.
#[derive(Debug, Default)]
pub struct Funding {
    /// Of the batch; goes with it.
    pub output: Option<Charge>,
    /// Of encoded bytes; returned when everything is decoded.
    pub transient: Option<Charge>,
}

/// One step being made.
#[derive(Debug)]
pub struct StepWork {
    /// The loader's shared parts.
    pub engine: Arc<Engine>,
    /// The pass it belongs to.
    pub pass: Arc<PassState>,
    /// Its step.
    pub step: u64,
    /// Lies in memory outside the limit.
    pub private: bool,
    /// Where outputs go.
    pub layout: Layout,
    /// The batch's buffer; `None` if no field needs one.
    pub slots: Option<SlotBuffer>,
    /// Memory.
    pub funding: Mutex<Funding>,
    /// Samples, by slot.
    pub samples: Mutex<Vec<Sample>>,
    /// Bad samples so far.
    pub bad: Mutex<Vec<BadSample>>,
    outcomes: Vec<OutcomeCell>,
    remaining: AtomicUsize,
    reading: Mutex<BTreeMap<(u32, u64), u64>>,
}

/// Everything that is known about a step before it starts.
#[derive(Debug)]
pub struct Start {
    /// Its step.
    pub step: u64,
    /// Samples, by slot.
    pub samples: Vec<Sample>,
    /// Where outputs go.
    pub layout: Layout,
    /// The batch's buffer.
    pub slots: Option<SlotBuffer>,
    /// Memory.
    pub funding: Funding,
    /// Lies in memory outside the limit.
    pub private: bool,
}

impl StepWork {
    /// A step that has its memory.
    pub fn new(engine: Arc<Engine>, pass: Arc<PassState>, start: Start) -> Arc<Self> {
        let cells = start.samples.len() * engine.fields.len();
        Arc::new(Self {
            engine,
            pass,
            step: start.step,
            private: start.private,
            layout: start.layout,
            slots: start.slots,
            funding: Mutex::new(start.funding),
            samples: Mutex::new(start.samples),
            bad: Mutex::default(),
            outcomes: (0..cells).map(|_| Mutex::new(None)).collect(),
            remaining: AtomicUsize::new(0),
            reading: Mutex::default(),
        })
    }

    fn cell(&self, slot: usize, field: usize) -> Option<&OutcomeCell> {
        self.outcomes.get(slot * self.engine.fields.len() + field)
    }

    /// Stores what became of a cell.
    pub fn put(&self, slot: usize, field: usize, outcome: Result<Outcome, Box<Failure>>) {
        if let Some(cell) = self.cell(slot, field) {
            *cell.lock() = Some(outcome);
        }
    }

    /// Takes what became of a cell.
    pub fn take(&self, slot: usize, field: usize) -> Option<Result<Outcome, Box<Failure>>> {
        self.cell(slot, field)?.lock().take()
    }

    /// Starts reading and decoding `cells` (slot and its cells by field). Called once for all slots
    /// and again for slots that get a substitute. `reads` are those of [`plan_reads`] over the
    /// cells' pieces in their order, each with its buffer.
    pub fn launch(self: &Arc<Self>, cells: Vec<(usize, Vec<Cell>)>, reads: Vec<(Read, Buffer)>) {
        let mut jobs = Vec::new();
        for (slot, cells) in cells {
            for (field, cell) in cells.into_iter().enumerate() {
                match cell {
                    Cell::Ready(value) => self.put(slot, field, Ok(Outcome::Value(value))),
                    Cell::Failed(error) => {
                        let failure = Failure { error, source: String::new(), offset: 0 };
                        self.put(slot, field, Err(Box::new(failure)));
                    }
                    Cell::Encoded(pieces) => jobs.push(Job::new(self, slot, field, pieces)),
                }
            }
        }
        // One more than there are jobs: the round cannot end before all of it has started.
        self.remaining.store(jobs.len() + 1, Ordering::Release);
        self.fetch(&jobs, reads);
        self.one_done();
    }

    fn fetch(self: &Arc<Self>, jobs: &[Arc<Job>], reads: Vec<(Read, Buffer)>) {
        let users: Vec<(&Arc<Job>, usize)> =
            jobs.iter().flat_map(|j| (0..j.pieces.len()).map(move |p| (j, p))).collect();
        for (read, buffer) in reads {
            let served = read.users.iter().filter_map(|(tag, start)| {
                let (job, piece) = users.get(*tag)?;
                Some(fetch::User { job: Arc::clone(job), piece: *piece, start: *start as usize })
            });
            let served = served.collect();
            self.engine.handle.spawn(fetch::fetch(Arc::clone(self), read, buffer, served));
        }
    }

    fn one_done(self: &Arc<Self>) {
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            finish::round_done(self);
        }
    }

    /// Notes that a read has started, so that a stalled one can be named.
    pub fn read_started(&self, source: u32, offset: u64, length: u64) {
        self.reading.lock().insert((source, offset), length);
    }

    /// Notes that a read is over.
    pub fn read_ended(&self, source: u32, offset: u64) {
        self.reading.lock().remove(&(source, offset));
    }

    /// What it is waiting for, for messages.
    pub fn waiting_for(&self) -> String {
        let reading = self.reading.lock();
        match reading.iter().next() {
            Some(((source, offset), length)) => format!(
                "{} bytes at {offset} of {} (and {} other reads)",
                length,
                self.engine.sources.name(*source),
                reading.len() - 1
            ),
            None => match self.remaining.load(Ordering::Relaxed) {
                0 => "a thread to start it or to hand it over".into(),
                jobs => format!("{jobs} decoder jobs"),
            },
        }
    }
}

/// One cell to decode, waiting for its bytes.
#[derive(Debug)]
pub struct Job {
    /// Its step.
    pub work: Arc<StepWork>,
    /// Slot of its sample.
    pub slot: usize,
    /// Its field.
    pub field: usize,
    /// Its byte ranges.
    pub pieces: Vec<Piece>,
    state: Mutex<JobState>,
}

#[derive(Debug)]
struct JobState {
    bytes: Vec<Option<Bytes>>,
    missing: usize,
    failed: Option<(usize, Error)>,
}

impl Job {
    fn new(work: &Arc<StepWork>, slot: usize, field: usize, pieces: Vec<Piece>) -> Arc<Self> {
        let count = pieces.len();
        let state = JobState { bytes: vec![None; count], missing: count, failed: None };
        Arc::new(Self { work: Arc::clone(work), slot, field, pieces, state: Mutex::new(state) })
    }

    /// Bytes of a piece have arrived, or could not be read. The last one queues the job.
    pub fn provide(self: &Arc<Self>, piece: usize, bytes: Result<Bytes>) {
        let mut state = self.state.lock();
        match bytes {
            Ok(bytes) => {
                if let Some(slot) = state.bytes.get_mut(piece) {
                    *slot = Some(bytes);
                }
            }
            // The first piece's error, not the first error: the same one every time.
            Err(error) => {
                if state.failed.as_ref().is_none_or(|(first, _)| piece < *first) {
                    state.failed = Some((piece, error));
                }
            }
        }
        state.missing = state.missing.saturating_sub(1);
        let complete = state.missing == 0;
        drop(state);
        if complete {
            self.work.engine.jobs.send(Arc::clone(self));
        }
    }

    /// Decodes, stores the outcome and, as the last job of its step, finishes the step.
    pub fn run(self: Arc<Self>, scratch: &mut Scratch) {
        let work = Arc::clone(&self.work);
        if !work.pass.is_cancelled() {
            let outcome = self.outcome(scratch);
            work.put(self.slot, self.field, outcome);
        }
        drop(self);
        work.one_done();
    }

    fn outcome(&self, scratch: &mut Scratch) -> Result<Outcome, Box<Failure>> {
        let (bytes, failed) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.bytes), state.failed.take())
        };
        if let Some((piece, error)) = failed {
            return Err(self.failure(piece, error));
        }
        let bytes: Vec<Bytes> = bytes.into_iter().flatten().collect();
        let _timer = self.work.engine.stages.time(Stage::Decode);
        // Decoders are tested not to panic; if one does, the sample is bad, not the process.
        let run = AssertUnwindSafe(|| decode::decode(self, &bytes, scratch));
        let result = catch_unwind(run).unwrap_or_else(|_| {
            *scratch = Scratch::default();
            Err((0, decode::panicked(&self.file(0))))
        });
        result.map_err(|(piece, error)| {
            let start = self.pieces.get(piece).map_or(0, |p| p.blob.offset);
            self.failure(piece, error.in_part(start))
        })
    }

    fn failure(&self, piece: usize, error: Error) -> Box<Failure> {
        let offset = self.pieces.get(piece).map_or(0, |p| p.blob.offset);
        Box::new(Failure { error, source: self.file(piece), offset })
    }

    /// Source of a piece, for messages.
    pub fn file(&self, piece: usize) -> String {
        let source = self.pieces.get(piece).map(|p| p.blob.source);
        source.map_or_else(String::new, |id| self.work.engine.sources.name(id))
    }
}
