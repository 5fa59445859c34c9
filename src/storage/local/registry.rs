//! Memory registered with the rings: the kernel looks its pages up once and not per operation.
//!
//! Slabs are announced through [`ring_hook`] and kept, cut into regions, in one table per process;
//! each ring copies the table when its generation moves, and registers a region when the first
//! operation touches it. So announcing costs nothing, memory that no operation uses is never
//! pinned, and no operation waits for more than one region. Registered memory counts against the
//! locked-memory limit, so a refusal is ordinary: the operation is done with plain buffers, and the
//! reason is kept for `stats()` and `doctor`.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use io_uring::{IoUring, Submitter};
use parking_lot::Mutex;

use super::engine::{self, EngineChoice, EngineKind};
use crate::error::{Error, Result};
use crate::memory::PinHook;

/// Regions announced at once; more memory serves unregistered. The kernel takes 16384.
const REGIONS_MAX: usize = 512;
/// Regions that one slab is cut into, unless they would be larger or smaller than below.
const REGIONS_PER_SLAB: usize = 32;
/// Smallest region of a slab that has more: its 16384 pages are pinned in a few milliseconds. A
/// multiple of the largest single write, so that few operations lie across two regions.
const REGION_BYTES_MIN: usize = 64 << 20;
/// Largest region that kernels take.
const REGION_BYTES_MAX: usize = 1 << 30;

/// One range of memory.
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
/// Bytes that rings hold registered, once per ring.
static REGISTERED_BYTES: AtomicU64 = AtomicU64::new(0);

/// Environment variable that turns registration off (`0` or `off`).
pub const REGISTER_ENV: &str = "DRIVETRAIN_IO_REGISTER";

/// A hook for [`crate::memory::ArenaOptions::hooks`] that registers an arena's slabs with the
/// rings; none where local files do not go through io_uring, or [`REGISTER_ENV`] forbids it.
pub fn ring_hook() -> Option<Arc<dyn PinHook>> {
    if std::env::var(REGISTER_ENV).is_ok_and(|v| v == "0" || v == "off") {
        return None;
    }
    let engine = engine::engine(EngineChoice::Auto).ok()?;
    (engine.kind() == EngineKind::Uring).then(|| Arc::new(RingHook) as Arc<dyn PinHook>)
}

/// Memory registered with this process's rings now, once per ring as the locked-memory limit
/// counts it, and why the kernel refused to register some, if it ever did.
pub fn registered() -> (u64, Option<String>) {
    (REGISTERED_BYTES.load(Ordering::Relaxed), TABLE.lock().refusal.clone())
}

#[derive(Debug)]
struct RingHook;

impl PinHook for RingHook {
    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<()> {
        let each = len.div_ceil(REGIONS_PER_SLAB).next_multiple_of(REGION_BYTES_MIN);
        let each = each.min(REGION_BYTES_MAX);
        let mut table = TABLE.lock();
        // The table's lock orders generations.
        let born = GENERATION.load(Ordering::Relaxed) + 1;
        let free = table.regions.iter_mut().filter(|region| region.is_none());
        let (base, mut at) = (ptr.expose_provenance(), 0);
        for slot in free {
            if at >= len {
                break;
            }
            *slot = Some(Region { start: base + at, len: each.min(len - at), born });
            at += each;
        }
        GENERATION.store(born, Ordering::Release);
        if at == 0 && len > 0 {
            let what = format!("registering {len} more bytes with io_uring");
            return Err(Error::Unsupported { what, advice: "it serves unregistered".into() });
        }
        Ok(())
    }

    unsafe fn unpin(&self, ptr: *mut u8, len: usize) {
        let slab = ptr.addr()..ptr.addr() + len;
        let mut table = TABLE.lock();
        for region in &mut table.regions {
            if region.is_some_and(|r| slab.contains(&r.start)) {
                *region = None;
            }
        }
        GENERATION.fetch_add(1, Ordering::Release);
        drop(table);
        // The kernel holds the pages until the rings have seen the change.
        engine::wake_rings();
    }
}

/// How a ring stands to a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    /// No operation has touched it yet.
    Announced,
    /// The kernel has it.
    Registered,
    /// The kernel would not have it.
    Refused,
}

/// One ring's copy of the table.
#[derive(Debug)]
pub struct Registered {
    generation: u64,
    regions: Vec<Option<(Region, Stand)>>,
    /// Numbers of regions, by rising address.
    by_start: Vec<u16>,
    /// The sparse table exists in the kernel.
    ready: bool,
    /// The limit is reached: nothing more is tried until something is given back.
    full: bool,
}

impl Registered {
    /// Nothing registered.
    pub fn new() -> Self {
        let (regions, by_start) = (vec![None; REGIONS_MAX], Vec::new());
        Self { generation: 0, regions, by_start, ready: false, full: false }
    }

    /// Brings the copy up to date, and gives regions that are gone back to the kernel.
    pub fn refresh(&mut self, ring: &IoUring) {
        let now = GENERATION.load(Ordering::Acquire);
        if now == self.generation {
            return;
        }
        self.generation = now;
        let wanted = TABLE.lock().regions;
        for (index, region) in wanted.into_iter().enumerate() {
            let own = self.regions[index];
            if own.map(|(r, _)| r) == region {
                continue;
            }
            if let Some((gone, Stand::Registered)) = own {
                forget(&ring.submitter(), index as u32, gone);
                self.full = false;
            }
            self.regions[index] = region.map(|r| (r, Stand::Announced));
        }
        let start = |index: &u16| self.regions[usize::from(*index)].map_or(0, |(r, _)| r.start);
        let known = (0..REGIONS_MAX as u16).filter(|i| self.regions[usize::from(*i)].is_some());
        self.by_start = known.collect();
        self.by_start.sort_unstable_by_key(start);
    }

    /// Number of the registered region that holds `len` bytes from `ptr`, which is registered now
    /// if it was only announced.
    pub fn find(&mut self, ring: &IoUring, ptr: *const u8, len: usize) -> Option<u16> {
        let start = ptr.addr();
        let regions = &self.regions;
        let begins = |index: &u16| regions[usize::from(*index)].is_some_and(|r| r.0.start <= start);
        let at = self.by_start.partition_point(begins).checked_sub(1)?;
        let index = self.by_start[at];
        let (region, stand) = self.regions[usize::from(index)]?;
        if start + len > region.start + region.len {
            return None;
        }
        if stand == Stand::Announced && !self.full {
            let stand = self.register(&ring.submitter(), u32::from(index), region);
            self.regions[usize::from(index)] = Some((region, stand));
            return (stand == Stand::Registered).then_some(index);
        }
        (stand == Stand::Registered).then_some(index)
    }

    fn register(&mut self, submitter: &Submitter<'_>, index: u32, region: Region) -> Stand {
        if !self.ready {
            if let Err(e) = submitter.register_buffers_sparse(REGIONS_MAX as u32) {
                return self.refused(&e);
            }
            self.ready = true;
        }
        match update(submitter, index, region.start, region.len) {
            Ok(()) => {
                REGISTERED_BYTES.fetch_add(region.len as u64, Ordering::Relaxed);
                Stand::Registered
            }
            Err(e) => self.refused(&e),
        }
    }

    fn refused(&mut self, e: &std::io::Error) -> Stand {
        self.full |= e.raw_os_error() == Some(libc::ENOMEM);
        let mut table = TABLE.lock();
        if table.refusal.is_none() {
            tracing::debug!("io_uring uses plain buffers: {e}");
            table.refusal =
                Some(format!("registering buffers: {e}; raise the locked-memory limit"));
        }
        Stand::Refused
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // The ring goes too, and with it what it had registered.
        let held = self.regions.iter().flatten().filter(|(_, s)| *s == Stand::Registered);
        let bytes = held.map(|(region, _)| region.len as u64).sum();
        REGISTERED_BYTES.fetch_sub(bytes, Ordering::Relaxed);
    }
}

fn forget(submitter: &Submitter<'_>, index: u32, region: Region) {
    // A slot that cannot be emptied is overwritten by the next region with its number.
    let _ = update(submitter, index, 0, 0);
    REGISTERED_BYTES.fetch_sub(region.len as u64, Ordering::Relaxed);
}

/// Puts a range (or nothing) into a slot of the kernel's table.
fn update(submitter: &Submitter<'_>, index: u32, start: usize, len: usize) -> std::io::Result<()> {
    let iov_base = std::ptr::with_exposed_provenance_mut(start);
    let iovec = libc::iovec { iov_base, iov_len: len };
    // SAFETY: registering only pins the pages that are mapped there now. An operation has its
    // buffer in this range, so the slab is mapped; it leaves the table before it is unmapped, and
    // an operation on newer memory at this address refreshes first.
    unsafe { submitter.register_buffers_update(index, &[iovec], None) }
}
