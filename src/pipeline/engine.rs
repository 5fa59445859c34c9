//! What all steps of a loader share: the table, the store, memory, decoder threads, counters.

use std::sync::{Arc, OnceLock};

use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use super::budget::Budget;
use super::config::{LoaderConfig, OnError};
use super::fetch::READS_IN_FLIGHT_MAX;
use super::field::Field;
use super::pool::JobSender;
use super::sources::Sources;
use crate::error::Result;
use crate::index::SampleTable;
use crate::memory::{Arena, ArenaOptions, ArenaStats, Buffer};
use crate::order::Order;
use crate::storage::local::ring_hook;
use crate::storage::open_store;
use crate::telemetry::Stages;

/// Shared parts of a loader in one process.
#[derive(Debug)]
pub struct Engine {
    /// The samples.
    pub table: SampleTable,
    /// What is done with each field.
    pub fields: Arc<[Field]>,
    /// Which sample stands where.
    pub order: Order,
    /// Bad samples.
    pub on_error: OnError,
    /// Open sources.
    pub sources: Sources,
    /// The memory limit.
    pub budget: Budget,
    /// Counters.
    pub stages: Arc<Stages>,
    /// Where decoder jobs go.
    pub jobs: JobSender,
    /// Turns of reads.
    pub read_turns: Semaphore,
    /// Runs reads and drivers.
    pub handle: Handle,
    arena: OnceLock<Arena>,
    limit_bytes: usize,
}

impl Engine {
    /// Opens the store and readies everything; memory is mapped when it is first needed.
    pub fn new(
        table: &SampleTable,
        config: &LoaderConfig,
        fields: Arc<[Field]>,
        order: Order,
        stages: Arc<Stages>,
        jobs: JobSender,
    ) -> Result<Self> {
        let store = open_store(table.root(), &config.storage)?;
        Ok(Self {
            table: table.clone(),
            fields,
            order,
            on_error: config.on_error,
            sources: Sources::new(store, table.clone()),
            budget: Budget::new(config.memory_limit_bytes),
            stages,
            jobs,
            read_turns: Semaphore::new(READS_IN_FLIGHT_MAX),
            handle: crate::runtime::runtime()?.handle().clone(),
            arena: OnceLock::new(),
            limit_bytes: config.memory_limit_bytes as usize,
        })
    }

    /// A buffer of `bytes` from the arena, if it has room now.
    pub fn try_buffer(&self, bytes: usize) -> Option<Buffer> {
        self.arena.get_or_init(|| self.new_arena()).try_alloc(bytes)
    }

    /// The arena, registered with the rings if the data is read through them.
    fn new_arena(&self) -> Arena {
        let local = self.sources.store().capabilities().local_root.is_some();
        let hooks = if local { ring_hook().into_iter().collect() } else { Vec::new() };
        let limit_bytes = self.limit_bytes;
        Arena::with_options(ArenaOptions { limit_bytes, huge_pages: true, warm: true, hooks })
    }

    /// Gives memory that no buffer uses back to the system: before memory outside the limit is
    /// taken, so that the process grows by as little as possible.
    pub fn trim(&self) {
        if let Some(arena) = self.arena.get() {
            arena.trim();
        }
    }

    /// A buffer of at least `bytes`: from the arena if it has room and the step is not `private`,
    /// else memory of its own.
    pub fn buffer(&self, bytes: usize, private: bool) -> Buffer {
        if !private && let Some(buffer) = self.try_buffer(bytes) {
            return buffer;
        }
        self.stages.private(bytes as u64);
        Buffer::heap(bytes)
    }

    /// What the arena holds; zeros before it is needed.
    pub fn arena_stats(&self) -> ArenaStats {
        self.arena.get().map(Arena::stats).unwrap_or_default()
    }
}
