//! The report of samples that could not be read or decoded.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::config::ErrorLimit;
use crate::error::{Error, Result};

/// Entries kept in memory; the file, if there is one, gets all of them.
pub const QUARANTINE_ENTRIES_MAX: usize = 10_000;

/// Samples after which a rate is judged: the first bad one of a small set is no verdict.
pub const RATE_SAMPLES_MIN: u64 = 100;

/// One bad sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadSample {
    /// Its key.
    pub key: String,
    /// The first of its fields that failed, in the order they were asked for.
    pub field: String,
    /// The source its bytes lie in; empty if it never came to reading.
    pub source: String,
    /// First byte of the field's bytes in the source.
    pub offset: u64,
    /// The error.
    pub reason: String,
    /// Epoch of the batch.
    pub epoch: u64,
    /// Position in the epoch's order.
    pub position: u64,
    /// What was done: `mask`, or `replace` with the substitute's key in `substitute`.
    pub action: String,
    /// Key of the sample that took its place.
    pub substitute: Option<String>,
}

/// Collects bad samples in the order of delivery.
#[derive(Debug, Default)]
pub struct Quarantine {
    entries: Vec<BadSample>,
    count: u64,
    file: Option<PathBuf>,
}

impl Quarantine {
    /// A report that is also appended to `file`.
    pub fn new(file: Option<PathBuf>) -> Self {
        Self { file, ..Self::default() }
    }

    /// The first [`QUARANTINE_ENTRIES_MAX`] of them.
    pub fn entries(&self) -> &[BadSample] {
        &self.entries
    }

    /// Adds the bad samples of one batch. `delivered` counts samples before it.
    pub fn add(&mut self, bad: &[BadSample], delivered: u64, limit: ErrorLimit) -> Result<()> {
        let Some(last) = bad.last() else { return Ok(()) };
        self.append_to_file(bad)?;
        self.count += bad.len() as u64;
        let room = QUARANTINE_ENTRIES_MAX - self.entries.len();
        self.entries.extend(bad.iter().take(room).cloned());
        self.check(last, delivered, limit)
    }

    fn check(&self, last: &BadSample, delivered: u64, limit: ErrorLimit) -> Result<()> {
        let (too_many, expected) = match limit {
            ErrorLimit::Count(max) => (self.count > max, format!("at most {max} bad samples")),
            ErrorLimit::Rate(max) => (
                delivered >= RATE_SAMPLES_MIN && self.count as f64 > max * delivered as f64,
                format!("at most {max} of the samples bad"),
            ),
        };
        if !too_many {
            return Ok(());
        }
        let found = format!(
            "{} after {delivered} samples; the last is {} field {}: {}",
            self.count, last.key, last.field, last.reason
        );
        Err(Error::invalid("on_error_limit", expected, found))
    }

    fn append_to_file(&self, bad: &[BadSample]) -> Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let mut lines = String::new();
        for entry in bad {
            let line = serde_json::to_string(entry)
                .map_err(|e| Error::invalid("quarantine entry", "JSON", e))?;
            lines.push_str(&line);
            lines.push('\n');
        }
        // One write per batch with O_APPEND: lines of several ranks do not mix.
        let write =
            || OpenOptions::new().create(true).append(true).open(path)?.write_all(lines.as_bytes());
        write().map_err(|e| Error::io("append to", path.display().to_string(), e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad(key: &str) -> BadSample {
        BadSample {
            key: key.into(),
            field: "jpg".into(),
            source: "a.tar".into(),
            offset: 512,
            reason: "truncated".into(),
            epoch: 0,
            position: 3,
            action: "mask".into(),
            substitute: None,
        }
    }

    #[test]
    fn the_limit_is_the_last_number_allowed() {
        let mut report = Quarantine::default();
        assert!(report.add(&[bad("a"), bad("b")], 10, ErrorLimit::Count(2)).is_ok());
        let error = report.add(&[bad("c")], 20, ErrorLimit::Count(2)).unwrap_err().to_string();
        assert!(error.contains("at most 2") && error.contains('c'), "{error}");
        assert_eq!((report.count, report.entries().len()), (3, 3));
    }

    #[test]
    fn a_rate_is_judged_only_after_enough_samples() {
        let mut report = Quarantine::default();
        assert!(report.add(&[bad("a")], 4, ErrorLimit::Rate(0.01)).is_ok());
        assert!(report.add(&[bad("b")], 200, ErrorLimit::Rate(0.01)).is_ok());
        assert!(report.add(&[bad("c")], 200, ErrorLimit::Rate(0.01)).is_err());
    }

    #[test]
    fn the_file_has_a_line_per_bad_sample() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bad.jsonl");
        let mut report = Quarantine::new(Some(path.clone()));
        report.add(&[bad("a")], 1, ErrorLimit::default()).unwrap();
        report.add(&[bad("b")], 2, ErrorLimit::default()).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let back: Vec<BadSample> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(back, [bad("a"), bad("b")]);
    }
}
