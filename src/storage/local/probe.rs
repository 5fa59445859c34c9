//! What this machine offers for local I/O, and what to change: the source of `drivetrain doctor`.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::{Resource, getrlimit};
use serde::Serialize;

use super::engine::{self, EngineChoice, EngineKind};
use super::op::Work;
use super::uring::UringEngine;
use super::{registry, sys};
use crate::error::{Error, Result};
use crate::memory::{Arena, ArenaOptions, Buffer, PAGE_BYTES, shm_dir};
use crate::runtime::block_on;

/// Memory that is tried: the largest slab that an arena makes for small buffers.
const TRY_BYTES: usize = 64 << 20;

/// What local I/O can use here.
#[derive(Debug, Clone, Serialize)]
pub struct IoReport {
    /// Kernel release.
    pub kernel: String,
    /// The engine in use: `uring` or `threads`; empty if none could be started.
    pub engine: String,
    /// Whether io_uring can be used.
    pub io_uring: bool,
    /// Why io_uring cannot be used; empty if it can.
    pub io_uring_reason: String,
    /// What to change so that it can; empty if it can.
    pub io_uring_advice: String,
    /// Value of sysctl `kernel.io_uring_disabled`, where there is one.
    pub io_uring_disabled: Option<i64>,
    /// Memory can be registered with a ring, by a try with as much as a slab.
    pub registers: bool,
    /// Why the kernel refused to register memory; empty if it never did.
    pub registered_reason: String,
    /// Soft limit of locked memory; none means unlimited. Registered and pinned memory counts.
    pub memlock_bytes: Option<u64>,
    /// Hard limit of locked memory.
    pub memlock_hard_bytes: Option<u64>,
    /// Folder of shared snapshot slots.
    pub shm_dir: PathBuf,
    /// Size of its file system.
    pub shm_total_bytes: u64,
    /// Free bytes in it.
    pub shm_free_bytes: u64,
}

/// Whether a folder's file system takes O_DIRECT, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DirectReport {
    /// Direct reads and writes work at page alignment.
    pub supported: bool,
    /// Alignment of memory that the kernel states; none if it does not tell.
    pub memory_align_bytes: Option<u32>,
    /// Alignment of offsets and lengths that the kernel states; none if it does not tell.
    pub offset_align_bytes: Option<u32>,
    /// Why not; empty if supported.
    pub reason: String,
}

/// Looks at kernel, limits and shared memory; starts an engine if none runs yet.
pub fn probe() -> IoReport {
    let uring = engine::uring();
    let reason = uring.as_ref().err().cloned().unwrap_or_default();
    let advice = uring.as_ref().err().map(|r| engine::advice(r)).unwrap_or_default();
    let engine = match engine::engine(EngineChoice::Auto).map(|e| e.kind()) {
        Ok(EngineKind::Uring) => "uring",
        Ok(EngineKind::Threads) => "threads",
        Err(_) => "",
    };
    let registers = uring.is_ok_and(|uring| try_registration(&uring).unwrap_or(false));
    let limit = getrlimit(Resource::Memlock);
    let shm = shm_dir();
    IoReport {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        engine: engine.into(),
        io_uring: reason.is_empty(),
        io_uring_reason: reason,
        io_uring_advice: advice,
        io_uring_disabled: engine::io_uring_disabled(),
        registers,
        registered_reason: registry::registered().1.unwrap_or_default(),
        memlock_bytes: limit.current,
        memlock_hard_bytes: limit.maximum,
        shm_total_bytes: rustix::fs::statvfs(&shm)
            .map_or(0, |s| s.f_blocks.saturating_mul(s.f_frsize)),
        shm_free_bytes: sys::free_bytes(&shm),
        shm_dir: shm,
    }
}

/// Whether a read into a slab of [`TRY_BYTES`] goes through registered memory.
fn try_registration(uring: &Arc<UringEngine>) -> Result<bool> {
    let hooks = registry::ring_hook().into_iter().collect();
    let options = ArenaOptions { limit_bytes: TRY_BYTES, huge_pages: true, warm: false, hooks };
    let arena = Arena::with_options(options);
    let Some(mut buf) = arena.try_alloc(TRY_BYTES) else { return Ok(false) };
    buf.set_len(PAGE_BYTES);
    let program = "/proc/self/exe";
    let file = File::open(program).map_err(|e| Error::io("open", program, e))?;
    let work = Work::Read { buf, need_bytes: 1 };
    let done = block_on(engine::run(&**uring, &Arc::new(file), 0, work, false))?;
    Ok(done.is_ok_and(|done| done.fixed))
}

/// Tries a direct write and read in `folder` with a file that is removed at once.
pub fn probe_direct(folder: &Path) -> DirectReport {
    let path = folder.join(format!(".drivetrain-tmp-direct-{}", std::process::id()));
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path);
    let _ = opened.as_ref().map(|_| fs::remove_file(&path));
    match opened {
        Ok(file) => try_direct(&file),
        Err(e) => {
            let _ = fs::remove_file(&path);
            refused(format!("opening a file in {} with O_DIRECT: {e}", folder.display()))
        }
    }
}

fn try_direct(file: &File) -> DirectReport {
    let alignment = sys::direct_alignment(file);
    let mut page = Buffer::heap(PAGE_BYTES);
    let moved = file
        .write_all_at(&page, 0)
        .and_then(|()| file.read_exact_at(&mut page, 0))
        .map_err(|e| format!("direct I/O of one page: {e}"));
    DirectReport {
        supported: moved.is_ok() && alignment != Some((0, 0)),
        memory_align_bytes: alignment.map(|a| a.0),
        offset_align_bytes: alignment.map(|a| a.1),
        reason: moved.err().unwrap_or_default(),
    }
}

fn refused(reason: String) -> DirectReport {
    DirectReport { supported: false, memory_align_bytes: None, offset_align_bytes: None, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_complete_and_names_what_is_missing() {
        let report = probe();
        assert!(report.kernel.starts_with(|c: char| c.is_ascii_digit()));
        assert_eq!(report.io_uring, report.io_uring_reason.is_empty());
        assert_eq!(report.io_uring, report.io_uring_advice.is_empty());
        assert!(["uring", "threads"].contains(&report.engine.as_str()));
    }

    #[test]
    fn direct_io_is_tried_for_real_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let report = probe_direct(folder.path());
        assert_eq!(report.supported, report.reason.is_empty(), "{report:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(!probe_direct(&folder.path().join("none")).supported);
    }
}
