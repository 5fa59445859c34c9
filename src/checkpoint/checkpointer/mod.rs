//! The checkpointer: stages in the caller's thread, writes and commits in one thread of its own.

use std::collections::BTreeMap;
mod adoption;
mod probe;
mod staging;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, SendTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::commit::{self, Job, PackOptions, Packer, Place};
use super::handle::SaveHandle;
use super::layout::step_dir;
use super::meet::{Doing, FileMeet, Meet, Room, Tick, no_tick};
use super::plan::TensorIn;
use super::read::{self, OpenStep, Problem};
use super::retain::{self, Best, Keep, Retention, root_id};
use super::snapshot::{Claims, Planned, SlotPlace, Slots, Staged};
use crate::error::{Error, Result};
use crate::runtime::block_on;
use crate::storage::{IoCounters, Store};
use probe::Proof;

/// Saves that may wait for the writer. Slots allow two; the rest are refusals and skipped saves,
/// which hold no memory.
const QUEUE_MAX: usize = 64;

/// Settings of a [`Checkpointer`].
#[derive(Debug, Clone)]
pub struct Options {
    /// Keep the newest this many steps; `None` keeps all.
    pub keep_last: Option<u32>,
    /// Besides, keep every step that this divides.
    pub keep_every: Option<i64>,
    /// Besides, keep the best by a metric.
    pub keep_best: Option<Best>,
    /// Besides, keep every step committed at most this long ago.
    pub keep_within: Option<Duration>,
    /// Besides, keep steps at least this far apart in time.
    pub keep_interval: Option<Duration>,
    /// Longest wait for another rank or a free staging slot.
    pub timeout: Duration,
    /// Names this run's staging slots: a process adopts what a killed one of the same run and root
    /// left. Needed for object stores, and for jobs that share a root and must not adopt from each
    /// other.
    pub run_id: Option<String>,
    /// Folder of staging slots; default is `$DRIVETRAIN_SHM_DIR`, then `/dev/shm`.
    pub shm_dir: Option<PathBuf>,
    /// Trust that no one else writes here, on a store without create-if-absent.
    pub single_writer: bool,
    /// What is done to chunks before they are written.
    pub pack: PackOptions,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            keep_last: None,
            keep_every: None,
            keep_best: None,
            keep_within: None,
            keep_interval: None,
            timeout: Duration::from_mins(10),
            run_id: None,
            shm_dir: None,
            single_writer: false,
            pack: PackOptions::default(),
        }
    }
}

/// How one save is made.
#[derive(Debug, Clone, Default)]
pub struct SaveOptions {
    /// Replace a committed step.
    pub overwrite: bool,
    /// The caller waits for the commit, so a second staging slot would never be used.
    pub blocking: bool,
    /// When both staging slots are being written: leave this save out on all ranks after waiting
    /// so long; `None` waits as long as the timeout and then fails.
    pub skip_after: Option<Duration>,
    /// What was measured of the state, such as a validation loss, for retention and people. Rank
    /// 0's are kept; `None` stands for a number that is not finite.
    pub metrics: BTreeMap<String, Option<f64>>,
    /// The first of the ranks that hold the same names as this one, where others hold other names
    /// (pipeline stages, experts): then the state is equal on these, and the manifest has the union
    /// of all. `None`: all ranks hold the same.
    pub stage: Option<u32>,
    /// An error of the check between staging and writing is the caller's alone, who will make the
    /// call anew: it does not count, and the other ranks hear nothing of it.
    pub may_repeat: bool,
}

impl Options {
    fn keep(&self) -> Keep {
        Keep {
            last: self.keep_last,
            every: self.keep_every,
            best: self.keep_best.clone(),
            within: self.keep_within,
            interval: self.keep_interval,
        }
    }
}

type Work = (Job, SaveHandle);

struct Writer {
    queue: Sender<Work>,
    thread: JoinHandle<()>,
}

/// Saves and restores the steps of one checkpoint root, on one rank.
pub struct Checkpointer {
    place: Arc<Place>,
    slots: Arc<Slots>,
    /// Whether the root can be written, as far as that is known.
    proof: Proof,
    /// What killed processes left.
    claims: Claims,
    planned: Mutex<Option<Arc<Planned>>>,
    writer: Mutex<Option<Writer>>,
    stopping: Arc<AtomicBool>,
    saves: AtomicU64,
    agreements: AtomicU64,
    /// What the caller says it is doing.
    doing: Mutex<Option<Doing>>,
    pid: u32,
}

impl Checkpointer {
    /// A checkpointer for `rank` of `world_size` ranks that meet in `meet`, or through files in
    /// the root. Refuses a root that lacks create-if-absent, or that cannot be written and holds no
    /// step to restore; if it holds one, the first save says why it cannot be written.
    pub fn new(
        store: Arc<dyn Store>,
        rank: u32,
        world_size: u32,
        options: Options,
        meet: Option<Arc<dyn Meet>>,
    ) -> Result<Self> {
        if rank >= world_size {
            return Err(Error::invalid("rank", format!("below world_size {world_size}"), rank));
        }
        options.keep().check()?;
        options.pack.check()?;
        let pack = Packer::new(options.pack);
        let proof = Proof::new(store.as_ref(), options.single_writer)?;
        let keep = Retention::new(store.as_ref(), options.keep())?;
        let root_hash = xxh3_64(store.uri().as_bytes());
        let prefix = format!("drivetrain-{root_hash:016x}");
        let run_id = options.run_id.as_deref();
        let root = root_id(store.as_ref());
        let folder = store.capabilities().local_root;
        let slots = SlotPlace::new(options.shm_dir, &root, run_id, rank, world_size);
        let (slots, local) = (slots.at_root(folder.as_deref()), folder.is_some());
        let meet = meet.unwrap_or_else(|| Arc::new(FileMeet::new(Arc::clone(&store))));
        let room = Room::new(meet, prefix, rank, world_size, options.timeout);
        Ok(Self {
            place: Arc::new(Place { store, room, keep: Arc::new(keep), pack }),
            slots: Arc::new(Slots::new(slots, local)),
            proof,
            claims: Claims::default(),
            planned: Mutex::default(),
            writer: Mutex::new(None),
            stopping: Arc::default(),
            saves: AtomicU64::new(0),
            agreements: AtomicU64::new(0),
            doing: Mutex::new(None),
            pid: std::process::id(),
        })
    }

    /// Stages the tensors and returns; writing and committing go on in the background.
    ///
    /// All ranks call it with the same step, in the same order. `state_json` must be equal on all
    /// ranks, `per_rank_json` is this rank's own.
    pub fn save(
        &self,
        step: i64,
        tensors: &[TensorIn<'_>],
        state_json: &str,
        per_rank_json: &str,
        options: SaveOptions,
    ) -> Result<SaveHandle> {
        self.save_checked(step, tensors, state_json, per_rank_json, options, &mut no_tick)
    }

    /// The same, with a last word of the caller between staging and writing: an error of `check`
    /// (a tensor changed during the copy) fails the save.
    ///
    /// Whatever fails here fails the save on all ranks, at once.
    pub fn save_checked(
        &self,
        step: i64,
        tensors: &[TensorIn<'_>],
        state_json: &str,
        per_rank_json: &str,
        options: SaveOptions,
        check: Tick<'_>,
    ) -> Result<SaveHandle> {
        self.check_process()?;
        let op = self.next_op();
        let state = staging::Texts { state_json, per_rank_json };
        let mut changed = false;
        let mut check = || check().inspect_err(|_| changed = true);
        let (job, took) = match self.staged_job(step, op, tensors, &state, &options, &mut check) {
            Ok(made) => made,
            Err(error) if changed && options.may_repeat => {
                self.saves.fetch_sub(1, Ordering::Relaxed);
                return Err(error);
            }
            Err(Error::Skipped { .. }) => return self.skip(step, op),
            Err(error) => {
                // The caller hears of the first error, which says more than a failed meeting.
                let _ = self.refuse_op(step, op, &error.to_string());
                return Err(error);
            }
        };
        self.enqueue(job, took)
    }

    /// Takes part in a save of all ranks that this one cannot make: every rank raises `why` and
    /// nothing is committed. Without it the others would wait for their deadline.
    pub fn refuse(&self, step: i64, why: &str) -> Result<()> {
        self.check_process()?;
        step_dir(step)?;
        self.refuse_op(step, self.next_op(), why)
    }

    /// Number of this call of `save`; the ranks make the same calls in the same order.
    fn next_op(&self) -> u64 {
        self.saves.fetch_add(1, Ordering::Relaxed)
    }

    fn refuse_op(&self, step: i64, op: u64, why: &str) -> Result<()> {
        if self.place.room.world_size == 1 {
            return Ok(());
        }
        step_dir(step)?;
        let job = Job { step, op, refusal: Some(why.into()), ..Job::default() };
        self.enqueue(job, Duration::ZERO).map(drop)
    }

    /// Leaves a save out on all ranks.
    fn skip(&self, step: i64, op: u64) -> Result<SaveHandle> {
        let rank = self.place.room.rank;
        if self.place.room.world_size == 1 {
            let handle = SaveHandle::new(step, Duration::ZERO);
            handle.finish(Err(Error::Skipped { rank, step }));
            return Ok(handle);
        }
        let refusal = Some("busy".into());
        let job = Job { step, op, refusal, skipped: true, ..Job::default() };
        self.enqueue(job, Duration::ZERO)
    }

    fn enqueue(&self, mut job: Job, took: Duration) -> Result<SaveHandle> {
        let handle = SaveHandle::new(job.step, took);
        let mut writer = self.writer.lock();
        if self.place.room.world_size == 1 {
            handle.set_joined();
        }
        job.handle = Some(handle.clone());
        let writer = match writer.as_ref() {
            Some(writer) => writer,
            None => writer.insert(self.start_writer()?),
        };
        let (step, timeout) = (job.step, self.place.room.timeout);
        match writer.queue.send_timeout((job, handle.clone()), timeout) {
            Ok(()) => Ok(handle),
            Err(SendTimeoutError::Disconnected(_)) => Err(self.closed()),
            Err(SendTimeoutError::Timeout(_)) => Err(Error::Timeout {
                what: format!("a place in the queue of saves for step {step}"),
                waited: timeout,
                advice: "earlier saves do not end: check the storage of the checkpoint root".into(),
            }),
        }
    }

    fn start_writer(&self) -> Result<Writer> {
        if self.stopping.load(Ordering::Acquire) {
            return Err(self.closed());
        }
        let (queue, work) = bounded(QUEUE_MAX);
        let (place, slots) = (Arc::clone(&self.place), Arc::clone(&self.slots));
        let stopping = Arc::clone(&self.stopping);
        let thread = thread::Builder::new()
            .name("drivetrain-save".into())
            .spawn(move || write_jobs(&place, &slots, &work, &stopping))
            .map_err(|e| Error::io("start thread", "drivetrain-save", e))?;
        Ok(Writer { queue, thread })
    }

    fn closed(&self) -> Error {
        Error::Closed { what: format!("the checkpointer of {}", self.place.store.uri()) }
    }

    fn check_process(&self) -> Result<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: "a Checkpointer in a forked child".into(),
            advice: "create it in the process that uses it, or start children with spawn".into(),
        })
    }

    /// Rank of this process.
    pub fn rank(&self) -> u32 {
        self.place.room.rank
    }

    /// Makes and touches staging memory for states of about `bytes`, so that the first save stops
    /// the trainer no longer than later ones.
    pub fn prepare(&self, bytes: usize) {
        self.slots.prepare(bytes, 2);
    }

    /// The same for states like the newest committed one, in the background; false if there is
    /// none to learn from.
    pub fn prepare_like_newest(&self) -> Result<bool> {
        let newest = self.candidates()?.into_iter().find(|(_, problem)| problem.is_none());
        let Some((step, _)) = newest else { return Ok(false) };
        let open = self.open(step)?;
        let rank = self.place.room.rank;
        let bytes = open.rank_bytes(rank) as usize;
        let slots = Arc::clone(&self.slots);
        let work = move || slots.prepare(bytes, 2);
        let thread = thread::Builder::new().name("drivetrain-warm".into()).spawn(work);
        thread.map_err(|e| Error::io("start thread", "drivetrain-warm", e))?;
        Ok(true)
    }

    /// Why states are staged in private memory, which does not outlive a killed process; `None`
    /// while they are staged in shared memory.
    pub fn private_reason(&self) -> Option<String> {
        self.slots.private_reason()
    }

    /// Reads and writes so far, by the engine that did them.
    pub fn counters(&self) -> IoCounters {
        self.place.store.counters()
    }

    /// Committed steps, ascending, after what retention still has to do on this rank.
    pub fn steps(&self) -> Result<Vec<i64>> {
        let deadline = Instant::now() + PRUNE_WAIT.min(self.place.room.timeout);
        self.place.keep.wait_settled(deadline);
        block_on(retain::committed(self.place.store.as_ref()))?
    }

    /// Newest first: each committed step, and why it cannot be restored if it cannot.
    pub fn candidates(&self) -> Result<Vec<(i64, Option<String>)>> {
        read::candidates(&self.place.store)
    }

    /// Opens a committed step for reading.
    pub fn open(&self, step: i64) -> Result<OpenStep> {
        read::open_step(&self.place.store, step)
    }

    /// Reads every byte of a step and reports what is wrong.
    pub fn verify(&self, step: i64) -> Result<Vec<Problem>> {
        read::verify_step(&self.place.store, step)
    }

    /// Marks that a restore of `step` begins; the mark goes to [`Self::restore_ended`]. `None`
    /// where nothing may be written.
    pub fn restore_begins(&self, step: i64) -> Option<String> {
        block_on(read::attempts::begin(self.place.store.as_ref(), step)).ok().flatten()
    }

    /// Takes a mark away; after a restore that worked also those that earlier crashes left.
    pub fn restore_ended(&self, mark: &str, restored: Option<i64>) -> Result<()> {
        block_on(read::attempts::end(self.place.store.as_ref(), mark, restored))?
    }

    /// Restores that were killed before they ended: (step, how many).
    pub fn restore_crashes(&self) -> Result<Vec<(i64, u32)>> {
        block_on(read::attempts::crashes(self.place.store.as_ref()))?
    }

    /// Every rank's `payload`, in rank order. All ranks call it in the same order with the same
    /// `tag`; whoever is missing at the deadline is named on all ranks.
    pub fn agree(&self, tag: &str, payload: &str, tick: Tick<'_>) -> Result<Vec<String>> {
        self.check_process()?;
        let op = self.agreements.fetch_add(1, Ordering::Relaxed);
        super::agree::agree(&self.place.room, op, tag, payload, tick)
    }

    /// Says what the caller does between two meetings, for the error on the other ranks if it does
    /// not come to the second; `None` when it is over.
    pub fn doing(&self, what: Option<&str>) {
        let begun = what.map(|what| self.place.room.words.begin(what));
        *self.doing.lock() = begun;
    }

    /// Leaves a note for the other ranks, replacing an older one of that name. The ranks must have
    /// met before: in a save, or by [`Checkpointer::agree`].
    pub fn put_note(&self, name: &str, text: &str) -> Result<()> {
        self.check_process()?;
        self.place.room.put(NOTES, name, text.as_bytes())
    }

    /// A note, if some rank has left it; does not wait for one.
    pub fn note(&self, name: &str) -> Result<Option<String>> {
        self.check_process()?;
        let found = self.place.room.wait(NOTES, name, Instant::now(), &mut no_tick)?;
        Ok(found.map(|text| String::from_utf8_lossy(&text).into_owned()))
    }

    /// Deletes a note.
    pub fn remove_note(&self, name: &str) -> Result<()> {
        self.check_process()?;
        self.place.room.remove(NOTES, name)
    }

    /// Waits at most the timeout for running saves, then stops the writer.
    pub fn close(&self) -> Result<()> {
        if std::process::id() != self.pid {
            return Ok(());
        }
        let Some(writer) = self.writer.lock().take() else { return Ok(()) };
        drop(writer.queue);
        let timeout = self.place.room.timeout;
        let deadline = Instant::now() + timeout;
        while !writer.thread.is_finished() {
            if Instant::now() >= deadline {
                self.stopping.store(true, Ordering::Release);
                return Err(Error::Timeout {
                    what: "the last saves of the checkpointer".into(),
                    waited: timeout,
                    advice: "they were told to stop; nothing they had not committed will be".into(),
                });
            }
            thread::sleep(CLOSE_POLL);
        }
        let _ = writer.thread.join();
        self.slots.remove_free();
        self.place.room.leave()
    }
}

/// Meeting of the notes that ranks leave each other.
const NOTES: &str = "notes";
/// Longest wait for retention before steps are listed.
const PRUNE_WAIT: Duration = Duration::from_mins(1);
/// Pause between looks while closing.
const CLOSE_POLL: Duration = Duration::from_millis(5);

impl std::fmt::Debug for Checkpointer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpointer({})", self.place.store.uri())
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // The writer ends by itself when the queue is gone and the save in work has stopped.
        drop(self.writer.lock().take());
        // Not left to it: the process may end before the thread does.
        self.slots.remove_free();
    }
}

/// The writer thread: one save after the other, in order.
fn write_jobs(place: &Place, slots: &Slots, work: &Receiver<Work>, stopping: &AtomicBool) {
    for (job, handle) in work {
        let mut tick = || {
            if stopping.load(Ordering::Acquire) {
                let what = format!("the save of step {}", job.step);
                return Err(Error::Closed { what });
            }
            Ok(())
        };
        // Nobody would ever finish the handles of a thread that is gone.
        let run = AssertUnwindSafe(|| commit::run(place, &job, &mut tick));
        let outcome = catch_unwind(run).unwrap_or_else(|_| Err(panicked(job.step)));
        let (staged, tidy) = (job.staged.clone(), commit::Tidy::of(&job));
        let blocking = job.blocking;
        drop(job);
        let bytes = staged.as_ref().map(Staged::len);
        if let Some(staged) = staged {
            slots.release(staged, outcome.as_ref().is_err_and(may_come_back));
        }
        handle.finish(outcome);
        if let (Some(bytes), false) = (bytes, blocking) {
            // While the trainer computes: when it saves faster than the disk writes, it will not
            // have to wait for fresh memory.
            slots.prepare(bytes, 2);
        }
        let swept = block_on(place.keep.run(place.store.as_ref()));
        if let Err(error) | Ok(Err(error)) = swept {
            // It cannot undo the commit, and the next one tries again.
            tracing::warn!(%error, "old steps could not be pruned");
        }
        if let Err(error) = commit::tidy(place, tidy) {
            tracing::warn!(%error, "meeting keys of a finished save could not be deleted");
        }
    }
}

/// Whether a snapshot that was not committed may be by a later process: not if the ranks or the
/// folder say that it must not be.
fn may_come_back(error: &Error) -> bool {
    !matches!(
        error,
        Error::Invalid { .. }
            | Error::AlreadyExists { .. }
            | Error::Unsupported { .. }
            | Error::Skipped { .. }
    )
}

fn panicked(step: i64) -> Error {
    Error::Io {
        op: "save",
        path: format!("step {step}"),
        source: std::io::Error::other("the writer panicked"),
        advice: "report it with the panic's message; `drivetrain ckpt ls` tells whether the step \
                 was committed"
            .into(),
    }
}
