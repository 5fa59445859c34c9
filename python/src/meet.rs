//! torch.distributed's Store as a meeting place. The GIL is taken per call only, never for a wait.
//!
//! A call to a store whose host stands still (stopped, swapped out, cut off by a network that drops
//! packets) never comes back: torch has no deadline for the answer to a `set`. So one thread of the
//! meeting makes the calls, and whoever asks waits for it no longer than [`CALL_WAIT_MAX`]. After
//! that the store counts as lost: every later call fails at once, and the thread, which cannot be
//! stopped, is left to itself.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use drivetrain::checkpoint::meet::Meet;
use drivetrain::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// No value that is ever set.
const ABSENT: &str = "\u{1}drivetrain: nothing here";
/// Longest wait for the answer of a store: a round trip takes well under a millisecond, and a host
/// that was swapped out or is busy importing has answered long before.
const CALL_WAIT_MAX: Duration = Duration::from_secs(30);
/// The same from the environment, in seconds.
const CALL_WAIT_ENV: &str = "DRIVETRAIN_STORE_TIMEOUT_S";
/// Calls that wait for the thread: one per thread of the checkpointer that meets.
const CALLS_MAX: usize = 16;

type Work = Box<dyn FnOnce(Python<'_>, &Bound<'_, PyAny>) + Send>;

/// A Store object of the caller's own (already cloned), called by its Python methods.
pub struct StoreMeet {
    /// Until the thread has it.
    store: Py<PyAny>,
    calls: OnceLock<Option<SyncSender<Work>>>,
    lost: AtomicBool,
    wait: Duration,
}

impl StoreMeet {
    /// Wraps a `torch.distributed.Store`.
    pub fn new(py: Python<'_>, store: &Py<PyAny>) -> Self {
        let text = std::env::var(CALL_WAIT_ENV).ok();
        let seconds = text.and_then(|t| t.parse().ok());
        let wait = seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
        Self {
            store: store.clone_ref(py),
            calls: OnceLock::new(),
            lost: AtomicBool::new(false),
            wait: wait.unwrap_or(CALL_WAIT_MAX),
        }
    }

    fn calls(&self) -> Option<&SyncSender<Work>> {
        let start = || {
            let store = Python::try_attach(|py| self.store.clone_ref(py))?;
            let (calls, work) = sync_channel(CALLS_MAX);
            let name = "drivetrain-meet".to_string();
            thread::Builder::new().name(name).spawn(move || serve(&store, &work)).ok()?;
            Some(calls)
        };
        self.calls.get_or_init(start).as_ref()
    }

    fn call<T: Send + 'static>(
        &self,
        method: &'static str,
        work: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<T> + Send + 'static,
    ) -> Result<T> {
        if self.lost.load(Ordering::Acquire) {
            return Err(self.late(method));
        }
        let closed = || Error::Closed { what: "the meeting of ranks".into() };
        let (done, answer) = sync_channel(1);
        let work: Work = Box::new(move |py, store| {
            let answer = work(py, store).map_err(|e| Error::Io {
                op: method,
                path: "torch.distributed Store".into(),
                source: std::io::Error::other(e.to_string()),
                advice: "the process that hosts the store (usually rank 0) may be gone".into(),
            });
            // Nobody waits any more for an answer that came too late.
            let _ = done.send(answer);
        });
        self.calls().ok_or_else(closed)?.try_send(work).map_err(|_| closed())?;
        match answer.recv_timeout(self.wait) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Disconnected) => Err(closed()),
            Err(RecvTimeoutError::Timeout) => {
                self.lost.store(true, Ordering::Release);
                Err(self.late(method))
            }
        }
    }

    fn late(&self, method: &str) -> Error {
        Error::Timeout {
            what: format!("an answer of the torch.distributed Store to {method}"),
            waited: self.wait,
            advice:
                "the process that hosts the store (usually rank 0) stands still or is cut off; \
                     restart the job"
                    .into(),
        }
    }
}

/// The thread: one call after the other, until the meeting is dropped or the interpreter ends.
fn serve(store: &Py<PyAny>, work: &Receiver<Work>) {
    for call in work {
        if Python::try_attach(|py| call(py, store.bind(py))).is_none() {
            return;
        }
    }
}

impl fmt::Debug for StoreMeet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreMeet")
    }
}

impl Meet for StoreMeet {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let (key, value) = (key.to_string(), value.to_vec());
        self.call("set", move |py, store| {
            store.call_method1("set", (key, PyBytes::new(py, &value))).map(drop)
        })
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let key = key.to_string();
        self.call("compare_set", move |_, store| {
            // `get` waits for a key that is not there, and after a `check` another rank may have
            // deleted it. `compare_set` is the one look that never waits: it answers with the
            // value, or, when there is none, with what was expected.
            let found = store.call_method1("compare_set", (key, ABSENT, ABSENT))?;
            let value = found.extract::<Vec<u8>>()?;
            Ok((value != ABSENT.as_bytes()).then_some(value))
        })
    }

    fn delete(&self, key: &str) -> Result<()> {
        let key = key.to_string();
        self.call("delete", move |_, store| store.call_method1("delete_key", (key,)).map(drop))
    }
}
