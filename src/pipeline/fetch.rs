//! Fetch: one merged read into a buffer, handed out to the jobs that wait for parts of it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::coalesce::Read;
use super::pass::Watch;
use super::work::{Job, StepWork};
use crate::error::{Error, Result};
use crate::memory::Buffer;

/// Reads of one loader at a time: enough to keep an NVMe drive or an object store busy, few enough
/// that an older step's reads do not wait long behind a younger one's.
pub const READS_IN_FLIGHT_MAX: usize = 128;

/// Longest time one read may take, whatever the loader's own timeout: no wait without a deadline.
pub const READ_DEADLINE: Duration = Duration::from_mins(5);

/// A job that waits for a part of a read.
#[derive(Debug)]
pub struct User {
    /// The job.
    pub job: Arc<Job>,
    /// Which of its pieces.
    pub piece: usize,
    /// Where the piece starts inside the read.
    pub start: usize,
}

/// Reads and hands out. Ends early, without handing out, if the pass was cancelled.
pub async fn fetch(work: Arc<StepWork>, read: Read, buffer: Buffer, users: Vec<User>) {
    let engine = &work.engine;
    let _watch = Watch::new(&work.pass, work.step);
    let Ok(_turn) = engine.read_turns.acquire().await else { return };
    if work.pass.is_cancelled() {
        return;
    }
    work.read_started(read.source, read.offset, read.length);
    let timer = engine.stages.time_read();
    let result = match tokio::time::timeout(READ_DEADLINE, read_range(&work, &read, buffer)).await {
        Ok(result) => result,
        Err(_) => Err(stalled(&work, &read)),
    };
    drop(timer);
    work.read_ended(read.source, read.offset);
    if result.is_ok() {
        engine.stages.read(read.length, users.iter().map(|u| piece_bytes(u) as u64).sum());
    }
    hand_out(result, users);
}

async fn read_range(work: &StepWork, read: &Read, mut buffer: Buffer) -> Result<Bytes> {
    if read.length == 0 {
        return Ok(Bytes::new());
    }
    let source = work.engine.sources.get(read.source).await?;
    buffer.set_len(read.length as usize);
    Ok(source.read_at(read.offset, buffer).await?.into_bytes())
}

fn stalled(work: &StepWork, read: &Read) -> Error {
    let source = work.engine.sources.name(read.source);
    Error::Timeout {
        what: format!("read of {} bytes at {} of {source}", read.length, read.offset),
        waited: READ_DEADLINE,
        advice: "check the storage it lies on".into(),
    }
}

fn piece_bytes(user: &User) -> usize {
    user.job.pieces.get(user.piece).map_or(0, |p| p.blob.length as usize)
}

fn hand_out(result: Result<Bytes>, users: Vec<User>) {
    match result {
        Ok(bytes) => {
            for user in users {
                let end = user.start + piece_bytes(&user);
                let part = bytes.slice(user.start.min(bytes.len())..end.min(bytes.len()));
                user.job.provide(user.piece, Ok(part));
            }
        }
        Err(error) => {
            for user in users {
                user.job.provide(user.piece, Err(repeat(&error)));
            }
        }
    }
}

/// The same error for another sample that wanted the same bytes.
fn repeat(error: &Error) -> Error {
    match error {
        Error::NotFound { what, advice } => {
            Error::NotFound { what: what.clone(), advice: advice.clone() }
        }
        Error::Corrupt { file, offset, expected, found, advice } => {
            Error::corrupt(file, *offset, expected, found, advice)
        }
        Error::Changed { file, expected, found } => {
            Error::Changed { file: file.clone(), expected: expected.clone(), found: found.clone() }
        }
        Error::Timeout { what, waited, advice } => {
            Error::Timeout { what: what.clone(), waited: *waited, advice: advice.clone() }
        }
        Error::Io { op, path, source, advice } => Error::Io {
            op,
            path: path.clone(),
            source: source.raw_os_error().map_or_else(
                || std::io::Error::new(source.kind(), source.to_string()),
                std::io::Error::from_raw_os_error,
            ),
            advice: advice.clone(),
        },
        Error::Unsupported { what, advice } => {
            Error::Unsupported { what: what.clone(), advice: advice.clone() }
        }
        Error::Injected { operation, what } => {
            Error::Injected { operation: *operation, what: what.clone() }
        }
        other => Error::io("read", "source", std::io::Error::other(other.to_string())),
    }
}
