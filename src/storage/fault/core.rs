//! Counts operations, decides by the script, and does to data what the script says.

use std::fs::File;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use super::script::{Action, FaultScript};
use crate::error::{Error, Result};
use crate::memory::Buffer;

/// Operations that [`Core::history`] remembers.
const HISTORY_MAX: usize = 1 << 16;

/// One operation of a store, as it was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Its number, from 1.
    pub number: u64,
    /// Its name, as scripts spell it.
    pub op: &'static str,
    /// The object or folder.
    pub path: String,
    /// Bytes it moves.
    pub bytes: usize,
}

/// Where operations are written down as they happen.
#[derive(Debug)]
pub struct Log {
    /// Opened for appending: lines of several processes do not mix.
    pub file: File,
    /// Rank of this process, if known.
    pub rank: Option<u64>,
}

/// Shared by a store, its readers and its writers.
#[derive(Debug)]
pub struct Core {
    script: FaultScript,
    counter: AtomicU64,
    halted: AtomicBool,
    history: Mutex<Vec<Operation>>,
    log: Option<Log>,
}

/// One operation under way.
#[derive(Debug)]
pub struct Step {
    operation: Operation,
    action: Option<Action>,
}

impl Core {
    pub fn new(script: FaultScript, log: Option<Log>) -> Self {
        Self {
            script,
            counter: AtomicU64::new(0),
            halted: AtomicBool::new(false),
            history: Mutex::new(Vec::new()),
            log,
        }
    }

    pub fn operations(&self) -> u64 {
        self.counter.load(Ordering::SeqCst)
    }

    pub fn history(&self) -> Vec<Operation> {
        let mut history = self.history.lock().clone();
        history.sort_unstable_by_key(|operation| operation.number);
        history
    }

    pub fn wraps(&self, uri: &str) -> bool {
        self.script.wraps(uri)
    }

    /// Counts an operation and does what comes before it, or fails in its place.
    pub async fn before(&self, op: &'static str, path: &str, bytes: usize) -> Result<Step> {
        let number = self.counter.fetch_add(1, Ordering::SeqCst) + 1;
        let action = self.script.decide(number, op, path);
        let operation = Operation { number, op, path: path.to_string(), bytes };
        self.note("before", &operation)?;
        self.remember(&operation);
        let step = Step { operation, action };
        if let Some(error) = self.instead(&step) {
            self.note("injected", &step.operation)?;
            return Err(error);
        }
        if let Some(Action::Delay(delay)) = action {
            tokio::time::sleep(delay).await;
        }
        Ok(step)
    }

    fn remember(&self, operation: &Operation) {
        let mut history = self.history.lock();
        if history.len() < HISTORY_MAX {
            history.push(operation.clone());
        }
    }

    /// The error in place of the operation, if the script says so.
    fn instead(&self, step: &Step) -> Option<Error> {
        if self.halted.load(Ordering::SeqCst) {
            return Some(step.injected("store is halted"));
        }
        match step.action? {
            Action::Kill => self.kill(step),
            // What moves no data is not there in half.
            Action::Tear if step.operation.bytes == 0 || step.operation.op == "read" => {
                self.kill(step)
            }
            Action::Eio => Some(Error::Io {
                op: step.operation.op,
                path: step.operation.path.clone(),
                source: io::Error::from_raw_os_error(libc::EIO),
                advice: "this error was injected".into(),
            }),
            Action::NoSpace => Some(Error::NoSpace {
                path: step.operation.path.clone(),
                need_bytes: step.operation.bytes as u64,
                have_bytes: 0,
            }),
            Action::Timeout => Some(step.timeout("answer")),
            Action::Fail => Some(step.injected("failure")),
            Action::Halt => {
                self.halted.store(true, Ordering::SeqCst);
                Some(step.injected("halt"))
            }
            _ => None,
        }
    }

    /// Does what comes after an operation and passes its result on.
    pub fn after<T>(&self, step: &Step, result: Result<T>) -> Result<T> {
        self.note(if result.is_ok() { "after" } else { "failed" }, &step.operation)?;
        match step.action {
            Some(Action::KillAfter) => self.kill(step),
            Some(Action::Lost) => result.and(Err(step.timeout("answer"))),
            _ => result,
        }
    }

    /// A real kill: nothing is flushed, no destructor runs.
    pub fn kill(&self, step: &Step) -> ! {
        let _ = self.note("kill", &step.operation);
        let pid = rustix::process::getpid();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        std::process::abort()
    }

    /// One line in one write call, so that it is complete even if the next thing is a kill.
    fn note(&self, stage: &str, operation: &Operation) -> Result<()> {
        let Some(log) = &self.log else { return Ok(()) };
        let line = serde_json::json!({
            "n": operation.number,
            "stage": stage,
            "op": operation.op,
            "path": operation.path,
            "bytes": operation.bytes,
            "rank": log.rank,
            "pid": std::process::id(),
        });
        let line = format!("{line}\n");
        (&log.file).write_all(line.as_bytes()).map_err(|e| Error::io("write", "the fault log", e))
    }
}

impl Step {
    fn injected(&self, what: &str) -> Error {
        let Operation { number, op, path, .. } = &self.operation;
        Error::Injected { operation: *number, what: format!("{what} at {op} {path}") }
    }

    fn timeout(&self, what: &str) -> Error {
        let Operation { number, op, path, .. } = &self.operation;
        Error::Timeout {
            what: format!("{what} to {op} {path} (operation {number})"),
            waited: Duration::ZERO,
            advice: "this timeout was injected".into(),
        }
    }

    /// Which bit `flip` flips: spread over the data by the operation's number.
    fn bit(&self, len: usize) -> (usize, u8) {
        let spread = self.operation.number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
        (spread as usize % len.max(1), 1 << (spread % 8))
    }

    /// The half of `data` that a torn write leaves; none if this one is not torn. A read has
    /// nothing to leave.
    pub fn torn(&self, data: &Bytes) -> Option<Bytes> {
        matches!(self.action, Some(Action::Tear)).then(|| data.slice(..data.len() / 2))
    }

    /// What is written instead of `data`.
    pub fn alter(&self, data: Bytes) -> Bytes {
        match self.action {
            Some(Action::Truncate) => data.slice(..data.len() / 2),
            Some(Action::Flip) if !data.is_empty() => {
                let (at, bit) = self.bit(data.len());
                let mut flipped = BytesMut::from(&data[..]);
                flipped[at] ^= bit;
                flipped.freeze()
            }
            _ => data,
        }
    }

    /// What is read instead of `buf`.
    pub fn alter_read(&self, path: &str, offset: u64, mut buf: Buffer) -> Result<Buffer> {
        match self.action {
            Some(Action::Truncate) => Err(Error::corrupt(
                path,
                offset + buf.len() as u64 / 2,
                format!("{} bytes from {offset}", buf.len()),
                "end of file",
                "this truncation was injected",
            )),
            Some(Action::Flip) if !buf.is_empty() => {
                let (at, bit) = self.bit(buf.len());
                buf[at] ^= bit;
                Ok(buf)
            }
            _ => Ok(buf),
        }
    }
}
