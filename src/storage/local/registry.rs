//! Memory registered with the rings: the kernel looks its pages up once and not per operation.
//!
//! Slabs are announced through [`ring_hook`] and kept in one table per process; each ring copies
//! the table when its generation moves. Registered memory counts against the locked-memory limit,
//! so a refusal is ordinary: the operation is done with plain buffers, and the reason is kept for
//! `doctor`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use io_uring::{IoUring, Submitter};
use parking_lot::Mutex;

use super::engine;
use crate::error::{Error, Result};
use crate::memory::PinHook;

/// Slabs registered at once.
const REGIONS_MAX: usize = 128;
/// Largest region the kernel takes.
const REGION_BYTES_MAX: usize = 1 << 30;

/// One registered range of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    start: usize,
    len: usize,
    /// Generation it came with: a later slab at the same address is another region.
    born: u64,
}

#[derive(Debug)]
struct Table {
    regions: [Option<Region>; REGIONS_MAX],
    refusal: Option<String>,
}

static TABLE: Mutex<Table> = Mutex::new(Table { regions: [None; REGIONS_MAX], refusal: None });
/// Moves with every change of the table.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// A hook for [`crate::memory::ArenaOptions::hooks`] that registers an arena's slabs with the
/// rings; none where io_uring cannot be used.
pub fn ring_hook() -> Option<Arc<dyn PinHook>> {
    engine::uring().ok().map(|_| Arc::new(RingHook) as Arc<dyn PinHook>)
}

#[derive(Debug)]
struct RingHook;

impl PinHook for RingHook {
    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<()> {
        let mut table = TABLE.lock();
        let free = table.regions.iter_mut().find(|region| region.is_none());
        let Some(free) = free.filter(|_| len <= REGION_BYTES_MAX) else {
            let what = format!("registering {len} more bytes with io_uring");
            return Err(Error::Unsupported { what, advice: "it serves unregistered".into() });
        };
        // The table's lock orders generations.
        let born = GENERATION.load(Ordering::Relaxed) + 1;
        *free = Some(Region { start: ptr.addr(), len, born });
        GENERATION.store(born, Ordering::Release);
        Ok(())
    }

    unsafe fn unpin(&self, ptr: *mut u8, _len: usize) {
        let mut table = TABLE.lock();
        for region in &mut table.regions {
            if region.is_some_and(|r| r.start == ptr.addr()) {
                *region = None;
            }
        }
        GENERATION.fetch_add(1, Ordering::Release);
        drop(table);
        // The kernel holds the pages until the rings have seen the change.
        engine::wake_rings();
    }
}

/// Bytes announced for registration, and why a ring refused some.
pub fn registered() -> (u64, Option<String>) {
    let table = TABLE.lock();
    let bytes = table.regions.iter().flatten().map(|r| r.len as u64).sum();
    (bytes, table.refusal.clone())
}

/// One ring's copy of the table. Only regions that this ring's kernel side knows are in it.
#[derive(Debug)]
pub struct Registered {
    generation: u64,
    regions: [Option<Region>; REGIONS_MAX],
    /// The sparse table exists in the kernel.
    ready: bool,
}

impl Registered {
    /// Nothing registered.
    pub fn new() -> Self {
        Self { generation: 0, regions: [None; REGIONS_MAX], ready: false }
    }

    /// Brings the kernel's table up to date.
    pub fn refresh(&mut self, ring: &IoUring) {
        let now = GENERATION.load(Ordering::Acquire);
        if now == self.generation {
            return;
        }
        self.generation = now;
        let wanted = TABLE.lock().regions;
        let submitter = ring.submitter();
        if !self.ready {
            if let Err(e) = submitter.register_buffers_sparse(REGIONS_MAX as u32) {
                return refused(&e);
            }
            self.ready = true;
        }
        for (index, region) in wanted.into_iter().enumerate() {
            if self.regions[index] != region {
                self.regions[index] = update(&submitter, index as u32, region);
            }
        }
    }

    /// Number of the registered buffer that covers `len` bytes from `ptr`.
    pub fn find(&self, ptr: *const u8, len: usize) -> Option<u16> {
        let start = ptr.addr();
        let covers = |r: &Region| r.start <= start && start + len <= r.start + r.len;
        self.regions.iter().position(|r| r.as_ref().is_some_and(covers)).map(|i| i as u16)
    }
}

/// Puts a region (or nothing) into a slot of the kernel's table; returns what is there then.
fn update(submitter: &Submitter<'_>, index: u32, region: Option<Region>) -> Option<Region> {
    let (start, len) = region.map_or((0, 0), |r| (r.start, r.len));
    let iovec =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(start), iov_len: len };
    // SAFETY: the slab is mapped now, since it leaves the table before it is unmapped. Should it be
    // unmapped meanwhile, the kernel refuses the range or holds its old pages, and nobody uses
    // them: an operation on a newer slab at this address refreshes first.
    match unsafe { submitter.register_buffers_update(index, &[iovec], None) } {
        Ok(()) => region,
        Err(e) => {
            refused(&e);
            None
        }
    }
}

fn refused(e: &std::io::Error) {
    let mut table = TABLE.lock();
    if table.refusal.is_none() {
        tracing::warn!(
            "io_uring uses plain buffers: {e}; raise the locked-memory limit (ulimit -l)"
        );
        table.refusal = Some(format!("registering buffers: {e}; raise the locked-memory limit"));
    }
}
