//! Engine errors as Python exceptions. Each also derives from the built-in a Python programmer
//! would catch (`FileNotFoundError`, `ValueError`, `TimeoutError`, `OSError`).

use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ffi::CString;
use std::io::ErrorKind;

use drivetrain::Error;

const CLASSES: &str = r#"
class DrivetrainError(Exception):
    """Base of every error Drivetrain raises on purpose."""

class NotFound(DrivetrainError, FileNotFoundError):
    """A file, key, field or step that was asked for does not exist."""

class AlreadyExists(DrivetrainError, FileExistsError):
    """Something exists that must not be replaced silently."""

class Corrupt(DrivetrainError, ValueError):
    """Stored bytes are not what they must be: truncated, flipped or of another format."""

class SourceChanged(DrivetrainError, ValueError):
    """A source is no longer the one that was indexed."""

class InvalidArgument(DrivetrainError, ValueError):
    """An argument or a combination of arguments cannot work."""

class StorageError(DrivetrainError, OSError):
    """The operating system or the network refused an operation."""

class NoSpace(StorageError):
    """The device is full; the message has the bytes needed and available."""

class DeadlineExceeded(DrivetrainError, TimeoutError):
    """A wait reached its deadline; the message names what was waited for."""

class PeerFailed(DrivetrainError, RuntimeError):
    """Another rank failed or disagreed; every rank raises the same message."""

class SaveSkipped(DrivetrainError, RuntimeError):
    """A save was left out on all ranks, as on_busy="skip" asks for."""

class Unsupported(DrivetrainError, NotImplementedError):
    """This build, kernel, store or format cannot do it."""

class MemoryHeld(DrivetrainError, MemoryError):
    """All of memory_limit is in batches the caller still holds."""

class CheckpointDamaged(DrivetrainError, RuntimeError):
    """Steps exist, but none can be restored; the message has each reason."""

class Closed(DrivetrainError, RuntimeError):
    """The operation was stopped because its owner was closed."""
"#;

/// Adds the exception classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    let names = PyDict::new(py);
    names.set_item("__name__", "drivetrain")?;
    let source = CString::new(CLASSES)?;
    py.run(&source, Some(&names), Some(&names))?;
    for (name, value) in names.iter() {
        let name: String = name.extract()?;
        if !name.starts_with("__") {
            module.add(name.as_str(), value)?;
        }
    }
    Ok(())
}

/// The Python class name for an error.
#[allow(dead_code, reason = "used by each binding")]
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::NotFound { .. } => "NotFound",
        Error::AlreadyExists { .. } => "AlreadyExists",
        Error::Corrupt { .. } | Error::Format { .. } => "Corrupt",
        Error::Changed { .. } => "SourceChanged",
        Error::Invalid { .. } => "InvalidArgument",
        Error::Io { source, .. } if source.kind() == ErrorKind::NotFound => "NotFound",
        Error::Io { .. } | Error::Injected { .. } => "StorageError",
        Error::NoSpace { .. } => "NoSpace",
        Error::Timeout { .. } => "DeadlineExceeded",
        Error::Peer { .. } => "PeerFailed",
        Error::Skipped { .. } => "SaveSkipped",
        Error::Unsupported { .. } => "Unsupported",
        Error::MemoryHeld { .. } => "MemoryHeld",
        Error::CheckpointDamaged { .. } => "CheckpointDamaged",
        Error::Closed { .. } => "Closed",
        _ => "DrivetrainError",
    }
}

/// Turns an engine error into the exception to raise.
#[allow(dead_code, reason = "used by each binding")]
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let raise = || -> PyResult<PyErr> {
        let module = py.import("drivetrain._native")?;
        let class = module.getattr(class_of(error))?;
        Ok(PyErr::from_value(class.call1((error.to_string(),))?))
    };
    raise().unwrap_or_else(|e| e)
}
