//! The atomic operations a commit hangs on: create if absent, and replace if unchanged.
//!
//! Both write a temporary file beside the target, make it durable, move it into place in one step
//! and make the folder durable. A temporary file that a killed process left is recognised by
//! [`is_temporary`].

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};
use rustix::io::Errno;

use super::names::{make_folders, metadata, not_found_or};
use super::sys::{self, sync_folder, write_error};
use crate::error::{Error, Result};
use crate::storage::Version;

/// Longest wait for another process that replaces the same object.
const REPLACE_WAIT_MAX: Duration = Duration::from_secs(30);
/// Pause between two looks at a lock.
const LOCK_POLL: Duration = Duration::from_millis(5);
/// Start of the name of temporary files.
const TEMPORARY_PREFIX: &str = ".drivetrain-tmp-";

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Whether a file name (without folders) is a temporary that a killed writer may have left.
pub fn is_temporary(name: &str) -> bool {
    name.starts_with(TEMPORARY_PREFIX)
}

/// Creates `target` with `data`, or fails because it exists.
pub fn put_new(target: &Path, data: &[u8]) -> Result<Version> {
    // Cheap and common: no need to write a byte if the name is taken.
    if target.symlink_metadata().is_ok() {
        return Err(exists(target));
    }
    let made = make_folders(target)?;
    let temporary = Temporary::write(target, data)?;
    move_new(&temporary.path, target)?;
    temporary.moved();
    sync_made(target, &made)?;
    metadata(target).map(|meta| sys::version(&meta))
}

/// Replaces `target` with `data` if its version is still `expected`.
pub fn replace(target: &Path, data: &[u8], expected: &Version) -> Result<Version> {
    let _lock = lock_unchanged(target, expected)?;
    let temporary = Temporary::write(target, data)?;
    fs::rename(&temporary.path, target).map_err(|e| write_error("rename to", target, 0, e))?;
    temporary.moved();
    sync_made(target, &[])?;
    metadata(target).map(|meta| sys::version(&meta))
}

/// Opens and locks the file that `target` names now, and checks its version under the lock. Two
/// replacers lock the same inode, so the second one finds it replaced.
fn lock_unchanged(target: &Path, expected: &Version) -> Result<File> {
    let started = Instant::now();
    let file = File::open(target).map_err(|e| not_found_or(target, "open", e))?;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if started.elapsed() < REPLACE_WAIT_MAX => {
                std::thread::sleep(LOCK_POLL);
            }
            Err(Errno::WOULDBLOCK) => return Err(replace_timeout(target)),
            // A file system without locks still checks the version, only not against a racer.
            Ok(()) | Err(Errno::NOTSUP | Errno::NOLCK | Errno::NOSYS) => break,
            Err(e) => return Err(Error::io("lock", target.display().to_string(), e.into())),
        }
    }
    let now = sys::version(&metadata(target)?);
    if now == *expected {
        return Ok(file);
    }
    Err(Error::Changed {
        file: target.display().to_string(),
        expected: expected.0.clone(),
        found: now.0,
    })
}

fn replace_timeout(target: &Path) -> Error {
    Error::Timeout {
        what: format!("lock of {}", target.display()),
        waited: REPLACE_WAIT_MAX,
        advice: "another process is replacing it; try again".into(),
    }
}

fn exists(target: &Path) -> Error {
    Error::AlreadyExists {
        what: target.display().to_string(),
        advice: "choose another name or delete it first".into(),
    }
}

/// Renames without replacing; where the file system cannot, links and unlinks.
fn move_new(from: &Path, to: &Path) -> Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => Err(exists(to)),
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => link_new(from, to),
        Err(e) => Err(write_error("rename to", to, 0, e.into())),
    }
}

fn link_new(from: &Path, to: &Path) -> Result<()> {
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from).map_err(|e| write_error("unlink", from, 0, e)),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && same_file(from, to) => {
            // A server that lost its answer did the work: the name is ours.
            fs::remove_file(from).map_err(|e| write_error("unlink", from, 0, e))
        }
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Err(exists(to)),
        Err(e) => Err(Error::Unsupported {
            what: format!("atomic creation of {} ({e})", to.display()),
            advice: "use a file system with rename-without-replace or hard links".into(),
        }),
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    let identity = |path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// Makes the entry of `target` durable, and those of folders that were made for it.
fn sync_made(target: &Path, made: &[PathBuf]) -> Result<()> {
    for folder in made.iter().rev().map(PathBuf::as_path).chain([target]) {
        if let Some(parent) = folder.parent() {
            sync_folder(parent)?;
        }
    }
    Ok(())
}

/// A temporary file beside its target, removed unless it was moved.
struct Temporary {
    path: PathBuf,
    keep: bool,
}

impl Temporary {
    fn write(target: &Path, data: &[u8]) -> Result<Self> {
        let folder = target.parent().unwrap_or(target);
        let temporary = Self { path: folder.join(unique_name()), keep: false };
        let io = |op| move |e| write_error(op, target, data.len() as u64, e);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary.path)
            .map_err(io("create"))?;
        file.write_all(data).map_err(io("write"))?;
        file.sync_all().map_err(io("fsync"))?;
        Ok(temporary)
    }

    fn moved(mut self) {
        self.keep = true;
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A name no other writer uses: pid, a counter, and the clock against pids of other machines.
fn unique_name() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("{TEMPORARY_PREFIX}{}-{count}-{now:x}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_of_moving_refuse_an_existing_target() {
        let root = tempfile::tempdir().unwrap();
        let (from, to) = (root.path().join("from"), root.path().join("to"));
        for mover in [move_new, link_new] {
            fs::write(&from, "new").unwrap();
            mover(&from, &to).unwrap();
            assert!(!from.exists());
            fs::write(&from, "newer").unwrap();
            assert!(matches!(mover(&from, &to), Err(Error::AlreadyExists { .. })));
            assert_eq!(fs::read(&to).unwrap(), b"new");
            fs::remove_file(&to).unwrap();
        }
    }

    #[test]
    fn of_racing_replacers_one_wins() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("a/manifest.json");
        let version = put_new(&target, b"old").unwrap();
        let results: Vec<_> = std::thread::scope(|scope| {
            let start = |i: u8| {
                let (target, version) = (&target, &version);
                scope.spawn(move || replace(target, &[i; 3], version).map(|_| i))
            };
            let racers: Vec<_> = (0..8).map(start).collect();
            racers.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let winners: Vec<u8> = results.into_iter().flatten().collect();
        assert_eq!(winners.len(), 1);
        assert_eq!(fs::read(&target).unwrap(), [winners[0]; 3]);
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
    }
}
