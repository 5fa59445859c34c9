//! What a store has read and written, by engine and mode.

use std::sync::atomic::{AtomicU64, Ordering};

use super::engine::EngineKind;
use crate::storage::IoCounters;

/// Direction of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    /// From the device.
    Read,
    /// To the device.
    Written,
}

/// Counters of one store, shared by its open files.
#[derive(Debug, Default)]
pub struct Counters {
    uring: [AtomicU64; 2],
    threads: [AtomicU64; 2],
    direct: [AtomicU64; 2],
    fixed: [AtomicU64; 2],
    bytes: [AtomicU64; 2],
}

impl Counters {
    /// Counts one operation that has ended.
    pub fn add(&self, moved: Moved, engine: EngineKind, direct: bool, bytes: usize) {
        let way = moved as usize;
        let engine = match engine {
            EngineKind::Uring => &self.uring,
            EngineKind::Threads => &self.threads,
        };
        engine[way].fetch_add(1, Ordering::Relaxed);
        self.direct[way].fetch_add(u64::from(direct), Ordering::Relaxed);
        self.bytes[way].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Notes whether an operation went through registered memory.
    pub fn add_fixed(&self, moved: Moved, fixed: bool) {
        self.fixed[moved as usize].fetch_add(u64::from(fixed), Ordering::Relaxed);
    }

    /// The counts so far.
    pub fn snapshot(&self) -> IoCounters {
        let get =
            |pair: &[AtomicU64; 2], moved: Moved| pair[moved as usize].load(Ordering::Relaxed);
        IoCounters {
            uring_reads: get(&self.uring, Moved::Read),
            uring_writes: get(&self.uring, Moved::Written),
            direct_reads: get(&self.direct, Moved::Read),
            direct_writes: get(&self.direct, Moved::Written),
            fixed_reads: get(&self.fixed, Moved::Read),
            fixed_writes: get(&self.fixed, Moved::Written),
            thread_reads: get(&self.threads, Moved::Read),
            thread_writes: get(&self.threads, Moved::Written),
            read_bytes: get(&self.bytes, Moved::Read),
            written_bytes: get(&self.bytes, Moved::Written),
            ..IoCounters::default()
        }
    }
}
