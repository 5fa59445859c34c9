//! The engine's error: variants by what the caller can do, fields by what a person needs to act.

use std::io;
use std::time::Duration;

/// Result of the engine's fallible functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong, sorted by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file, key, field or step that was asked for does not exist. Check the name.
    #[error("{what} not found: {advice}")]
    NotFound {
        /// What was looked for, with its full name.
        what: String,
        /// What the caller can do.
        advice: String,
    },
    /// Something exists that must not be replaced silently.
    #[error("{what} already exists: {advice}")]
    AlreadyExists {
        /// What exists.
        what: String,
        /// What the caller can do.
        advice: String,
    },
    /// Stored bytes are not what they must be: truncated, flipped, or of another format.
    #[error("{file} at byte {offset}: expected {expected}, found {found}; {advice}")]
    Corrupt {
        /// The file (and member or tensor) that is damaged.
        file: String,
        /// Offset in the file where the damage shows.
        offset: u64,
        /// What should have been there.
        expected: String,
        /// What was there.
        found: String,
        /// What the caller can do.
        advice: String,
    },
    /// A source is no longer the one that was indexed.
    #[error(
        "{file} changed since it was indexed: expected {expected}, found {found}; index it again"
    )]
    Changed {
        /// The changed source.
        file: String,
        /// Size or etag at indexing time.
        expected: String,
        /// Size or etag now.
        found: String,
    },
    /// An argument or a combination of arguments cannot work.
    #[error("{what}: expected {expected}, found {found}")]
    Invalid {
        /// The argument, by the name the caller used.
        what: String,
        /// What is accepted.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The operating system or the network refused an operation.
    #[error("{op} {path}: {source}; {advice}")]
    Io {
        /// The operation, in a word or two.
        op: &'static str,
        /// The file or URI, without credentials.
        path: String,
        /// The cause.
        source: io::Error,
        /// What the caller can do.
        advice: String,
    },
    /// The device is full, also when the kernel says so in disguise (a short write).
    #[error(
        "no space to write {path}: need {need_bytes} bytes, have {have_bytes} bytes; \
         free space or prune old steps"
    )]
    NoSpace {
        /// The file being written.
        path: String,
        /// Bytes that must still be written.
        need_bytes: u64,
        /// Bytes the file system offers.
        have_bytes: u64,
    },
    /// A wait reached its deadline.
    #[error("{what} did not happen within {waited:?}; {advice}")]
    Timeout {
        /// What was waited for, naming the peer or file.
        what: String,
        /// How long.
        waited: Duration,
        /// What the caller can do.
        advice: String,
    },
    /// Another rank failed or disagreed; every rank gets the same message.
    #[error("rank {rank}: {what}")]
    Peer {
        /// The rank at fault.
        rank: u32,
        /// What it said or did.
        what: String,
    },
    /// A save was left out on all ranks, because both staging slots of one were being written and
    /// the policy says not to wait.
    #[error("the save of step {step} was skipped: rank {rank} was still writing earlier ones")]
    Skipped {
        /// The rank that was busy.
        rank: u32,
        /// The step that was not saved.
        step: i64,
    },
    /// This build, kernel, store or format cannot do it.
    #[error("{what} is not supported: {advice}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// What the caller can do.
        advice: String,
    },
    /// All of the memory limit is in batches the caller still holds.
    #[error(
        "{batches} batches with {bytes} bytes are still held by the caller and fill memory_limit; \
         drop them or raise memory_limit"
    )]
    MemoryHeld {
        /// Batches alive in the caller's hands.
        batches: usize,
        /// Their bytes.
        bytes: u64,
    },
    /// Steps exist, but none can be restored.
    #[error("no committed step of {root} can be restored: {}", reasons(.skipped))]
    CheckpointDamaged {
        /// The checkpoint folder.
        root: String,
        /// Each step with the reason it was refused.
        skipped: Vec<(i64, String)>,
    },
    /// A format's own error: the parser says what the bytes violate.
    #[error("{file}: {source}")]
    Format {
        /// The file that was parsed.
        file: String,
        /// What it violates.
        source: Box<drivetrain_formats::Error>,
    },
    /// The operation was stopped by its owner (loader closed, process ending).
    #[error("{what} was stopped because its owner was closed")]
    Closed {
        /// What was stopped.
        what: String,
    },
    /// A fault that the fault store was told to inject; only tests see it.
    #[error("injected fault at operation {operation}: {what}")]
    Injected {
        /// Number of the operation.
        operation: u64,
        /// Kind of fault.
        what: String,
    },
}

fn reasons(skipped: &[(i64, String)]) -> String {
    skipped.iter().map(|(step, why)| format!("step {step}: {why}")).collect::<Vec<_>>().join("; ")
}

impl Error {
    /// Wraps an OS error; ENOSPC callers should build [`Error::NoSpace`] instead.
    pub fn io(op: &'static str, path: impl Into<String>, source: io::Error) -> Self {
        let advice = match source.kind() {
            io::ErrorKind::NotFound => "check that the path exists",
            io::ErrorKind::PermissionDenied => "check owner and mode of the path and its folders",
            io::ErrorKind::ReadOnlyFilesystem => "choose a writable file system",
            _ => "see the cause",
        };
        Self::Io { op, path: path.into(), source, advice: advice.into() }
    }

    /// An argument that cannot work.
    pub fn invalid(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Invalid { what: what.into(), expected: expected.into(), found: found.to_string() }
    }

    /// An error about a part of a file that starts at `start`, with its offset in the whole file.
    #[must_use]
    pub fn in_part(mut self, start: u64) -> Self {
        if let Self::Corrupt { offset, .. } = &mut self {
            *offset = offset.saturating_add(start);
        }
        self
    }

    /// Damaged bytes.
    pub fn corrupt(
        file: impl Into<String>,
        offset: u64,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
        advice: impl Into<String>,
    ) -> Self {
        Self::Corrupt {
            file: file.into(),
            offset,
            expected: expected.to_string(),
            found: found.to_string(),
            advice: advice.into(),
        }
    }
}
