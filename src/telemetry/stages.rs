//! Atomic counters of a loader's stages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::report::{LoaderReport, StageSeconds};

/// Where a loader spends time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Computing which bytes a step needs.
    Plan,
    /// Waiting for memory before a step could start.
    Memory,
    /// Reading, summed over reads (many overlap).
    Fetch,
    /// Decoding, summed over decoder threads.
    Decode,
    /// Putting finished samples together.
    Assemble,
    /// The caller waiting for a batch.
    Wait,
    /// Of these waits, those for the first batch of a pass.
    StartWait,
    /// The caller between two batches.
    Consume,
}

const STAGES: usize = 8;

/// Counters of one loader since it was made.
#[derive(Debug)]
pub struct Stages {
    started: Instant,
    spent_ns: [AtomicU64; STAGES],
    batches: AtomicU64,
    samples: AtomicU64,
    reads: AtomicU64,
    read_bytes: AtomicU64,
    wanted_bytes: AtomicU64,
    batch_bytes: AtomicU64,
    bad_samples: AtomicU64,
    copied_batches: AtomicU64,
    private_bytes: AtomicU64,
    reading: Mutex<Reading>,
}

/// Time in which at least one read is under way.
#[derive(Debug, Default)]
struct Reading {
    reads: u64,
    /// When the first of them started.
    since: Option<Instant>,
    spent: Duration,
}

impl Reading {
    fn so_far(&self) -> Duration {
        self.spent + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Default for Stages {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            spent_ns: Default::default(),
            batches: AtomicU64::new(0),
            samples: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            wanted_bytes: AtomicU64::new(0),
            batch_bytes: AtomicU64::new(0),
            bad_samples: AtomicU64::new(0),
            copied_batches: AtomicU64::new(0),
            private_bytes: AtomicU64::new(0),
            reading: Mutex::default(),
        }
    }
}

impl Stages {
    /// Adds time to a stage.
    pub fn add(&self, stage: Stage, spent: Duration) {
        self.spent_ns[stage as usize].fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Adds the time from now until the timer is dropped.
    pub fn time(&self, stage: Stage) -> StageTimer<'_> {
        StageTimer { stages: self, stage, started: Instant::now() }
    }

    /// A read is under way until the timer is dropped.
    pub fn time_read(&self) -> ReadTimer<'_> {
        self.reading(|reading| {
            reading.reads += 1;
            reading.since.get_or_insert_with(Instant::now);
        });
        ReadTimer { stages: self, started: Instant::now() }
    }

    /// The lock is held for some instructions, twice per read, and never across an await.
    fn reading<T>(&self, look: impl FnOnce(&mut Reading) -> T) -> T {
        look(&mut self.reading.lock())
    }

    /// A batch of `samples` samples and `bytes` bytes reached the caller.
    pub fn delivered(&self, samples: u64, bytes: u64, bad: u64, copied: bool) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.samples.fetch_add(samples, Ordering::Relaxed);
        self.batch_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.bad_samples.fetch_add(bad, Ordering::Relaxed);
        self.copied_batches.fetch_add(u64::from(copied), Ordering::Relaxed);
    }

    /// Samples that reached the caller.
    pub fn samples(&self) -> u64 {
        self.samples.load(Ordering::Relaxed)
    }

    /// A read of `bytes` is done, of which `wanted` belong to samples (the rest is gaps).
    pub fn read(&self, bytes: u64, wanted: u64) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.wanted_bytes.fetch_add(wanted, Ordering::Relaxed);
    }

    /// Bytes that had to come from outside the arena.
    pub fn private(&self, bytes: u64) {
        self.private_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn seconds(&self, stage: Stage) -> f64 {
        self.spent_ns[stage as usize].load(Ordering::Relaxed) as f64 / 1e9
    }

    /// What was done so far. `threads` is the number of decoder threads.
    pub fn report(&self, threads: usize) -> LoaderReport {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let seconds = StageSeconds {
            plan: self.seconds(Stage::Plan),
            memory_wait: self.seconds(Stage::Memory),
            fetch: self.seconds(Stage::Fetch),
            reading: self.reading(|reading| reading.so_far()).as_secs_f64(),
            decode: self.seconds(Stage::Decode),
            assemble: self.seconds(Stage::Assemble),
            deliver_wait: self.seconds(Stage::Wait),
            start_wait: self.seconds(Stage::StartWait),
            consumer: self.seconds(Stage::Consume),
            elapsed: self.started.elapsed().as_secs_f64(),
        };
        LoaderReport {
            batches: get(&self.batches),
            samples: get(&self.samples),
            reads: get(&self.reads),
            read_bytes: get(&self.read_bytes),
            wanted_bytes: get(&self.wanted_bytes),
            batch_bytes: get(&self.batch_bytes),
            bad_samples: get(&self.bad_samples),
            copied_batches: get(&self.copied_batches),
            private_bytes: get(&self.private_bytes),
            threads,
            bottleneck: seconds.bottleneck(threads),
            seconds,
        }
    }
}

/// Adds the time since it was made to a stage when dropped.
#[derive(Debug)]
pub struct StageTimer<'a> {
    stages: &'a Stages,
    stage: Stage,
    started: Instant,
}

impl Drop for StageTimer<'_> {
    fn drop(&mut self) {
        self.stages.add(self.stage, self.started.elapsed());
    }
}

/// A read under way; its time goes to [`Stage::Fetch`] when dropped, done or not.
#[derive(Debug)]
pub struct ReadTimer<'a> {
    stages: &'a Stages,
    started: Instant,
}

impl Drop for ReadTimer<'_> {
    fn drop(&mut self) {
        self.stages.add(Stage::Fetch, self.started.elapsed());
        self.stages.reading(|reading| {
            reading.reads = reading.reads.saturating_sub(1);
            if reading.reads == 0 {
                reading.spent = reading.so_far();
                reading.since = None;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out() {
        let stages = Stages::default();
        stages.add(Stage::Decode, Duration::from_millis(1500));
        stages.add(Stage::Decode, Duration::from_millis(500));
        drop(stages.time(Stage::Plan));
        stages.read(100, 80);
        stages.delivered(4, 1000, 1, true);
        stages.private(7);
        let report = stages.report(2);
        assert_eq!(report.seconds.decode, 2.0);
        assert!(report.seconds.plan >= 0.0 && report.seconds.fetch == 0.0);
        assert_eq!((report.reads, report.read_bytes, report.wanted_bytes), (1, 100, 80));
        assert_eq!((report.batches, report.samples, report.batch_bytes), (1, 4, 1000));
        assert_eq!((report.bad_samples, report.copied_batches, report.private_bytes), (1, 1, 7));
    }

    #[test]
    fn reads_that_overlap_count_once() {
        let stages = Stages::default();
        let reads = [stages.time_read(), stages.time_read(), stages.time_read()];
        std::thread::sleep(Duration::from_millis(20));
        drop(reads);
        let idle = stages.report(1).seconds;
        // Three reads of 20 ms at once: 60 ms of reads in 20 ms of time.
        assert!(idle.fetch >= 0.06 && idle.reading >= 0.02);
        assert!(idle.fetch > 2.0 * idle.reading, "{idle:?}");
        assert_eq!(stages.report(1).seconds.reading, idle.reading, "no read, no time");
    }
}
