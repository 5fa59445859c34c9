//! torch.distributed's Store as a meeting place. The GIL is taken per call only, never for a wait.

use std::fmt;

use drivetrain::checkpoint::meet::Meet;
use drivetrain::{Error, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// No value that is ever set.
const ABSENT: &str = "\u{1}drivetrain: nothing here";

/// A Store object of the caller's own (already cloned), called by its Python methods.
pub struct StoreMeet {
    store: Py<PyAny>,
}

impl StoreMeet {
    /// Wraps a `torch.distributed.Store`.
    pub fn new(store: Py<PyAny>) -> Self {
        Self { store }
    }

    fn call<T>(
        &self,
        method: &'static str,
        work: impl FnOnce(Python<'_>, &Bound<'_, PyAny>) -> PyResult<T>,
    ) -> Result<T> {
        // No interpreter any more: the process is ending.
        Python::try_attach(|py| {
            work(py, self.store.bind(py)).map_err(|e| Error::Io {
                op: method,
                path: "torch.distributed Store".into(),
                source: std::io::Error::other(e.to_string()),
                advice: "the process that hosts the store (usually rank 0) may be gone".into(),
            })
        })
        .unwrap_or_else(|| Err(Error::Closed { what: "the meeting of ranks".into() }))
    }
}

impl fmt::Debug for StoreMeet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreMeet")
    }
}

impl Meet for StoreMeet {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call("set", |py, store| {
            store.call_method1("set", (key, PyBytes::new(py, value))).map(drop)
        })
    }

    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.call("compare_set", |_, store| {
            // `get` waits for a key that is not there, and after a `check` another rank may have
            // deleted it. `compare_set` is the one look that never waits: it answers with the
            // value, or, when there is none, with what was expected.
            let found = store.call_method1("compare_set", (key, ABSENT, ABSENT))?;
            let value = found.extract::<Vec<u8>>()?;
            Ok((value != ABSENT.as_bytes()).then_some(value))
        })
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.call("delete", |_, store| store.call_method1("delete_key", (key,)).map(drop))
    }
}
