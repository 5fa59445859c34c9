//! One I/O operation: what it moves, how far it got, and what a result means.
//!
//! Both engines drive operations through the same three calls (`chunk_len`, `advance`, `answer`),
//! so that short transfers, end of file and a full disk have one meaning. An operation owns its
//! buffer and its file: whoever holds the operation keeps the memory alive, never the future.

use std::fs::File;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::memory::{Buffer, PAGE_BYTES};

/// Most bytes in one kernel operation: results are i32, and 1 GiB is far past any gain.
pub const OP_BYTES_MAX: usize = 1 << 30;
/// Results without progress (EINTR, EAGAIN) after which an operation fails.
const STALLS_MAX: u32 = 64;

/// What an operation does.
#[derive(Debug)]
pub enum Work {
    /// Fills the buffer up to its length; fewer bytes are fine from `need_bytes` on, which is how
    /// an O_DIRECT read of whole blocks meets the end of the file.
    Read {
        /// The target.
        buf: Buffer,
        /// Bytes that must arrive.
        need_bytes: usize,
    },
    /// Writes all bytes.
    Write {
        /// The source.
        data: Bytes,
    },
    /// Makes the file's bytes and size durable.
    Sync,
}

/// An operation that has ended well.
#[derive(Debug)]
pub struct Done {
    /// Its work, with the buffer.
    pub work: Work,
    /// Bytes moved.
    pub moved: usize,
    /// It went through registered memory.
    pub fixed: bool,
}

/// Result of an operation.
pub type Outcome = io::Result<Done>;

/// An operation on its way.
#[derive(Debug)]
pub struct Op {
    /// The file, kept open while the kernel may use it.
    pub file: Arc<File>,
    /// Where in the file the first byte of the work lies.
    offset: u64,
    /// What to do.
    pub work: Work,
    /// The file was opened with O_DIRECT: resume at block boundaries only.
    pub direct: bool,
    /// A transfer of it went through registered memory.
    pub fixed: bool,
    moved: usize,
    stalls: u32,
    done: oneshot::Sender<Outcome>,
    _permit: OwnedSemaphorePermit,
}

/// What to do after a result.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Issue the rest.
    Again,
    /// Everything that can be moved was moved.
    Complete,
}

impl Op {
    /// A new operation and the receiver of its outcome.
    pub fn new(
        file: Arc<File>,
        offset: u64,
        work: Work,
        direct: bool,
        permit: OwnedSemaphorePermit,
    ) -> (Self, oneshot::Receiver<Outcome>) {
        let (done, outcome) = oneshot::channel();
        let (fixed, moved, stalls) = (false, 0, 0);
        let op = Self { file, offset, work, direct, fixed, moved, stalls, done, _permit: permit };
        (op, outcome)
    }

    /// File offset of the next transfer.
    pub fn file_offset(&self) -> u64 {
        self.offset + self.moved as u64
    }

    /// Bytes moved so far, which is where in the memory the next transfer starts.
    pub fn moved(&self) -> usize {
        self.moved
    }

    /// Length of the next transfer; 0 when there is nothing to move.
    pub fn chunk_len(&self) -> usize {
        let all = match &self.work {
            Work::Read { buf, .. } => buf.len(),
            Work::Write { data } => data.len(),
            Work::Sync => 0,
        };
        (all - self.moved).min(OP_BYTES_MAX)
    }

    /// Takes the result of one transfer and says whether to go on.
    pub fn advance(&mut self, result: io::Result<usize>) -> io::Result<Next> {
        let count = match result {
            Ok(count) => count.min(self.chunk_len()),
            Err(e) if is_transient(&e) && self.stalls < STALLS_MAX => {
                self.stalls += 1;
                return Ok(Next::Again);
            }
            Err(e) => return Err(e),
        };
        match &self.work {
            Work::Sync => Ok(Next::Complete),
            Work::Read { buf, need_bytes } => {
                let (len, need) = (buf.len(), *need_bytes);
                self.moved += count;
                // A direct read that stops inside a block has met the end of the file, and going
                // on at an odd offset would be refused.
                let ended = count == 0 || (self.direct && !self.moved.is_multiple_of(512));
                let complete = ended || self.moved >= need || self.moved == len;
                Ok(if complete { Next::Complete } else { Next::Again })
            }
            Work::Write { data } => {
                let len = data.len();
                self.advance_write(count, len)
            }
        }
    }

    fn advance_write(&mut self, count: usize, len: usize) -> io::Result<Next> {
        self.moved += count;
        if self.moved == len {
            return Ok(Next::Complete);
        }
        let before = self.moved - count;
        if self.direct {
            // Resume at a block boundary and write the torn block again.
            self.moved -= self.moved % PAGE_BYTES;
        }
        if self.moved > before {
            return Ok(Next::Again);
        }
        self.stalls += 1;
        if self.stalls < STALLS_MAX && count > 0 {
            return Ok(Next::Again);
        }
        // A write that moves nothing without an error is a full disk in disguise.
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }

    /// Tells the waiter how it went. A waiter that is gone is fine: the memory is freed here, now
    /// that the kernel is done with it.
    pub fn answer(self, result: io::Result<()>) {
        let (work, moved, fixed) = (self.work, self.moved, self.fixed);
        let outcome = result.map(|()| Done { work, moved, fixed });
        let _ = self.done.send(outcome);
    }
}

impl Op {
    /// Fails an operation that the kernel may still be working on: its memory and file are leaked,
    /// since nobody can tell when they may be freed.
    pub fn fail_and_leak(self) {
        std::mem::forget((self.work, self.file));
        let _ = self.done.send(Err(super::engine::stopped()));
    }
}

fn is_transient(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::Semaphore;

    fn op(work: Work, direct: bool) -> (Op, oneshot::Receiver<Outcome>) {
        let permit = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        Op::new(Arc::new(File::open("/dev/null").unwrap()), 4096, work, direct, permit)
    }

    #[test]
    fn short_reads_go_on_and_end_of_file_completes() {
        let (mut op, _rx) = op(Work::Read { buf: Buffer::heap(1000), need_bytes: 1000 }, false);
        assert_eq!(op.advance(Ok(300)).unwrap(), Next::Again);
        assert_eq!((op.file_offset(), op.chunk_len()), (4396, 700));
        assert_eq!(op.advance(Ok(0)).unwrap(), Next::Complete);
        assert_eq!(op.moved(), 300);
    }

    #[test]
    fn a_direct_read_may_end_inside_the_last_block() {
        let (mut op, _rx) = op(Work::Read { buf: Buffer::heap(8192), need_bytes: 5000 }, true);
        assert_eq!(op.advance(Ok(4096)).unwrap(), Next::Again);
        assert_eq!(op.advance(Ok(904)).unwrap(), Next::Complete);
        assert_eq!(op.moved(), 5000);
    }

    #[test]
    fn a_torn_direct_write_resumes_at_its_block() {
        let data = Bytes::from(vec![1; 3 * 4096]);
        let (mut op, _rx) = op(Work::Write { data }, true);
        assert_eq!(op.advance(Ok(5000)).unwrap(), Next::Again);
        assert_eq!((op.file_offset(), op.chunk_len()), (8192, 8192));
        assert_eq!(op.advance(Ok(8192)).unwrap(), Next::Complete);
    }

    #[test]
    fn a_write_of_nothing_is_a_full_disk() {
        let (mut op, _rx) = op(Work::Write { data: Bytes::from_static(b"abc") }, false);
        let error = op.advance(Ok(0)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn interruptions_are_bounded() {
        let (mut op, _rx) = op(Work::Write { data: Bytes::from_static(b"abc") }, false);
        let eintr = || Err(io::Error::from_raw_os_error(libc::EINTR));
        for _ in 0..STALLS_MAX {
            assert_eq!(op.advance(eintr()).unwrap(), Next::Again);
        }
        assert!(op.advance(eintr()).is_err());
    }
}
