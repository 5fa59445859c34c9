//! The file system calls the store needs: free space, O_DIRECT opening, durable folders, and a way
//! to make blocking calls off the async threads.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::memory::PAGE_BYTES;
use crate::storage::{ObjectMeta, Version};

/// What a full disk may also be called.
const FULL: [i32; 2] = [libc::ENOSPC, libc::EDQUOT];

/// Bytes that an unprivileged writer can still store on the file system of `path`; if it does not
/// say, as many as one likes.
pub fn free_bytes(path: &Path) -> u64 {
    rustix::fs::statvfs(path).map_or(u64::MAX, |s| match s.f_blocks {
        0 => u64::MAX,
        _ => s.f_bavail.saturating_mul(s.f_frsize),
    })
}

/// Whether no further file can be made on the file system of `path`, however many bytes are free.
fn out_of_inodes(path: &Path) -> bool {
    rustix::fs::statvfs(path).is_ok_and(|s| s.f_files > 0 && s.f_favail == 0)
}

/// An OS error of a write, as [`Error::NoSpace`] where it means that.
pub fn write_error(op: &'static str, path: &Path, need_bytes: u64, e: io::Error) -> Error {
    if e.raw_os_error().is_some_and(|code| FULL.contains(&code)) {
        // What could not be made says nothing about its file system; the nearest folder does.
        let folder = path.ancestors().skip(1).find(|folder| folder.exists()).unwrap_or(path);
        let why = if out_of_inodes(folder) { " (no inodes left for new files)" } else { "" };
        let path = format!("{}{why}", path.display());
        return Error::NoSpace { path, need_bytes, have_bytes: free_bytes(folder) };
    }
    Error::io(op, path.display().to_string(), e)
}

/// Opening for reading, or creating a file that must not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Existing file, reading.
    Read,
    /// New file, writing.
    CreateNew,
}

impl OpenMode {
    fn options(self) -> OpenOptions {
        let mut options = OpenOptions::new();
        match self {
            Self::Read => options.read(true),
            Self::CreateNew => options.write(true).create_new(true),
        };
        options
    }
}

/// Opens with O_DIRECT if the file system offers it at page alignment, else through the cache.
/// The flag says which it became.
pub fn open_maybe_direct(path: &Path, mode: OpenMode, direct: bool) -> io::Result<(File, bool)> {
    if !direct {
        return mode.options().open(path).map(|file| (file, false));
    }
    match mode.options().custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) if page_aligned_suffices(&file) => Ok((file, true)),
        Ok(file) => {
            let flags = rustix::fs::fcntl_getfl(&file)?;
            rustix::fs::fcntl_setfl(&file, flags - rustix::fs::OFlags::DIRECT)?;
            Ok((file, false))
        }
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            // Some file systems create the file before they refuse the flag.
            if mode == OpenMode::CreateNew {
                let _ = std::fs::remove_file(path);
            }
            mode.options().open(path).map(|file| (file, false))
        }
        Err(e) => Err(e),
    }
}

/// Alignment that O_DIRECT needs (memory, offset) where the kernel tells; 0 means not offered.
pub fn direct_alignment(file: &File) -> Option<(u32, u32)> {
    use rustix::fs::{AtFlags, StatxFlags, statx};
    let wanted = StatxFlags::DIOALIGN;
    let stat = statx(file, c"", AtFlags::EMPTY_PATH, wanted).ok()?;
    let told = stat.stx_mask & wanted.bits() != 0;
    told.then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

fn page_aligned_suffices(file: &File) -> bool {
    let fits = |align: u32| align > 0 && PAGE_BYTES.is_multiple_of(align as usize);
    // Kernels that do not tell (before 6.1, or a file system without the answer) get the page.
    direct_alignment(file).is_none_or(|(memory, offset)| fits(memory) && fits(offset))
}

/// The version of a local file: size, modification time and inode.
pub fn version(meta: &Metadata) -> Version {
    Version(format!("{}-{}-{}", meta.len(), mtime_ns(meta), meta.ino()))
}

/// What the store says about a file.
pub fn object_meta(path: &str, meta: &Metadata) -> ObjectMeta {
    ObjectMeta {
        path: path.to_string(),
        size_bytes: meta.len(),
        version: version(meta),
        mtime_ns: mtime_ns(meta),
    }
}

fn mtime_ns(meta: &Metadata) -> i64 {
    meta.mtime().saturating_mul(1_000_000_000).saturating_add(meta.mtime_nsec())
}

/// Makes a folder's entries durable.
pub fn sync_folder(path: &Path) -> Result<()> {
    let io = |e| Error::io("fsync folder", path.display().to_string(), e);
    let folder = File::open(path).map_err(io)?;
    match folder.sync_all() {
        // Some network and overlay file systems have nothing to sync in a folder and say so.
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EBADF)) => Ok(()),
        other => other.map_err(io),
    }
}

/// Runs a blocking call off the async threads.
pub async fn blocking<T, F>(call: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let joined = crate::runtime::runtime()?.spawn_blocking(call).await;
    joined.map_err(|e| Error::io("run blocking call", "thread", io::Error::other(e)))?
}

/// Waits with a deadline where a timer exists (always on the process's runtime).
pub async fn deadline<F: Future>(wait: Duration, what: &str, future: F) -> Result<F::Output> {
    if tokio::runtime::Handle::try_current().is_err() {
        return Ok(future.await);
    }
    tokio::time::timeout(wait, future).await.map_err(|_| Error::Timeout {
        what: what.to_string(),
        waited: wait,
        advice: "the device or file server does not answer; check dmesg and mounts".into(),
    })
}
