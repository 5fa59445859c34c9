//! What a loader is asked to do.

use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::order::Shuffle;
use crate::storage::StorageOptions;
use crate::transform::{ImageSpec, PointsSpec};

/// Memory of a loader unless it is told otherwise.
pub const MEMORY_LIMIT_BYTES_DEFAULT: u64 = 2 << 30;

/// Smallest useful memory limit: one page per thread and then some.
pub const MEMORY_LIMIT_BYTES_MIN: u64 = 1 << 20;

/// Bad samples before a loader gives up, unless it is told otherwise.
pub const ERROR_COUNT_DEFAULT: u64 = 1000;

/// Samples of one batch of one rank: their bookkeeping must stay small beside their bytes.
pub const BATCH_SIZE_MAX: u64 = 1 << 20;

/// Decoder threads: far beyond any machine, against typing errors.
pub const THREADS_MAX: usize = 1024;

/// What happens to a sample that cannot be read or decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnError {
    /// `next` fails with the sample's error.
    #[default]
    Raise,
    /// The sample at the next position of the epoch's order takes its place (the position after
    /// the last is 0), the first that can be read.
    Replace,
    /// Its fields are zeros (or empty) and it is marked invalid.
    Mask,
}

/// What happens when all memory is in batches that the caller holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnHeld {
    /// Further batches lie in private memory outside the limit.
    #[default]
    Copy,
    /// `next` fails with [`Error::MemoryHeld`]; it can be called again.
    Raise,
}

/// When bad samples are too many.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ErrorLimit {
    /// More than this many.
    Count(u64),
    /// More than this share of the samples delivered, judged from 100 samples on.
    Rate(f64),
}

impl Default for ErrorLimit {
    fn default() -> Self {
        Self::Count(ERROR_COUNT_DEFAULT)
    }
}

/// Form of a batch of point clouds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ragged {
    /// (ΣN, C) and offsets int64 (B+1).
    #[default]
    Offsets,
    /// (B, M, C), zeros after each cloud's points, and counts int64 (B). Clouds with more than M
    /// points keep their first M.
    Pad {
        /// M.
        max_points: usize,
    },
}

/// How one field is delivered.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum FieldForm {
    /// As stored: pictures (H, W, 3) uint8, clouds with their own columns, bytes as bytes.
    #[default]
    Natural,
    /// Decoded, resized, normalised.
    Image(ImageSpec),
    /// Keyframe and earlier sweeps, transformed and filtered.
    Points {
        /// What to gather.
        spec: PointsSpec,
        /// How to batch.
        ragged: Ragged,
    },
}

/// One field of the batch.
#[derive(Debug, Clone, PartialEq)]
pub struct FieldRequest {
    /// Name of the table's field.
    pub name: String,
    /// How it is delivered.
    pub form: FieldForm,
}

/// Everything a loader is made from besides its table.
#[derive(Debug, Clone)]
pub struct LoaderConfig {
    /// Samples per batch of this rank.
    pub batch_size: u64,
    /// Fields of the batch; `None` is every field in its natural form, empty is only keys.
    pub fields: Option<Vec<FieldRequest>>,
    /// Order of samples.
    pub shuffle: Shuffle,
    /// Seed of the order.
    pub seed: u64,
    /// Drop the tail that does not fill a global batch instead of padding it.
    pub drop_last: bool,
    /// This rank.
    pub rank: u64,
    /// Number of ranks.
    pub world_size: u64,
    /// Bytes of buffers: encoded bytes in flight, batches being made, waiting and held.
    pub memory_limit_bytes: u64,
    /// Decoder threads; `None` is one per available core.
    pub threads: Option<usize>,
    /// Bad samples.
    pub on_error: OnError,
    /// How many of them are too many.
    pub error_limit: ErrorLimit,
    /// JSON-lines file that each bad sample is appended to.
    pub quarantine_file: Option<PathBuf>,
    /// Memory held by the caller.
    pub on_held: OnHeld,
    /// Longest wait of one `next`; reads have a deadline of their own in any case.
    pub timeout: Option<Duration>,
    /// How to open the data's store.
    pub storage: StorageOptions,
}

impl LoaderConfig {
    /// Defaults with a batch size: natural fields, index order, one rank.
    pub fn new(batch_size: u64) -> Self {
        Self {
            batch_size,
            fields: None,
            shuffle: Shuffle::Sequential,
            seed: 0,
            drop_last: false,
            rank: 0,
            world_size: 1,
            memory_limit_bytes: MEMORY_LIMIT_BYTES_DEFAULT,
            threads: None,
            on_error: OnError::default(),
            error_limit: ErrorLimit::default(),
            quarantine_file: None,
            on_held: OnHeld::default(),
            timeout: None,
            storage: StorageOptions::default(),
        }
    }

    /// Refuses what cannot work, by the argument's name.
    pub fn validate(&self) -> Result<()> {
        if self.batch_size == 0 || self.batch_size > BATCH_SIZE_MAX {
            let expected = format!("1 to {BATCH_SIZE_MAX}");
            return Err(Error::invalid("batch_size", expected, self.batch_size));
        }
        if self.memory_limit_bytes < MEMORY_LIMIT_BYTES_MIN {
            let expected = format!("at least {MEMORY_LIMIT_BYTES_MIN} bytes");
            return Err(Error::invalid("memory_limit", expected, self.memory_limit_bytes));
        }
        if let Some(threads) = self.threads
            && !(1..=THREADS_MAX).contains(&threads)
        {
            return Err(Error::invalid("threads", format!("1 to {THREADS_MAX}"), threads));
        }
        if let ErrorLimit::Rate(rate) = self.error_limit
            && !(0.0..=1.0).contains(&rate)
        {
            return Err(Error::invalid(
                "on_error_limit",
                "a count, or a rate from 0.0 to 1.0",
                rate,
            ));
        }
        Ok(())
    }

    /// Decoder threads to start.
    pub fn thread_count(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.unwrap_or_else(cores).clamp(1, THREADS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_configurations_are_refused_by_name() {
        let refuse = |change: fn(&mut LoaderConfig), word: &str| {
            let mut config = LoaderConfig::new(4);
            change(&mut config);
            assert!(config.validate().unwrap_err().to_string().starts_with(word), "{word}");
        };
        assert!(LoaderConfig::new(4).validate().is_ok());
        refuse(|c| c.batch_size = 0, "batch_size");
        refuse(|c| c.memory_limit_bytes = 10, "memory_limit");
        refuse(|c| c.threads = Some(0), "threads");
        refuse(|c| c.error_limit = ErrorLimit::Rate(1.5), "on_error_limit");
    }
}
