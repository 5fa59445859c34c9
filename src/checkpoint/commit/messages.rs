//! What ranks tell each other when they meet for a save.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Job;
use super::publish::unknown_outcome;
use super::write::Written;
use crate::checkpoint::layout::{Chunk, FileRecord, Referred, decode_table, encode_table};
use crate::checkpoint::meet::missing_error;
use crate::error::{Error, Result};

/// A failure in a form that travels, so that every rank raises the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// A rank failed.
    Peer { rank: u32, what: String },
    /// Ranks disagree, or the request cannot work.
    Invalid { what: String, expected: String, found: String },
    /// Ranks did not come.
    Missing { doing: String, ranks: Vec<u32>, waited_ms: u64, words: String },
    /// Something else took too long.
    Late { what: String, waited_ms: u64 },
    /// A rank was busy and leaves this save out.
    Skipped { rank: u32, step: i64 },
    /// The step is committed already.
    Exists { what: String, advice: String },
    /// The manifest at `path` may be there.
    Unsure { path: String, what: String },
}

impl Failure {
    /// What the other ranks should hear of an error on `rank`.
    pub fn of(rank: u32, error: &Error) -> Self {
        match error {
            Error::AlreadyExists { what, advice } => {
                Self::Exists { what: what.clone(), advice: advice.clone() }
            }
            Error::Skipped { rank, step } => Self::Skipped { rank: *rank, step: *step },
            Error::Peer { rank, what } => Self::Peer { rank: *rank, what: what.clone() },
            other => Self::Peer { rank, what: other.to_string() },
        }
    }

    /// The error that every rank raises.
    pub fn into_error(self) -> Error {
        match self {
            Self::Skipped { rank, step } => Error::Skipped { rank, step },
            Self::Peer { rank, what } => Error::Peer { rank, what },
            Self::Invalid { what, expected, found } => Error::Invalid { what, expected, found },
            Self::Missing { doing, ranks, waited_ms, words } => {
                missing_error(&doing, &ranks, Duration::from_millis(waited_ms), &words)
            }
            Self::Late { what, waited_ms } => Error::Timeout {
                what,
                waited: Duration::from_millis(waited_ms),
                advice: "look at the log of that process; nothing was committed".into(),
            },
            Self::Exists { what, advice } => Error::AlreadyExists { what, advice },
            Self::Unsure { path, what } => unknown_outcome(&path, &what),
        }
    }
}

/// Ranks `first`, `first + step`, …, `count` of them: a mesh's groups are a few of these, where
/// lists of them would be as many numbers as there are ranks, from every rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Run {
    pub first: u32,
    pub step: u32,
    pub count: u32,
}

impl Run {
    /// The ranks.
    pub fn ranks(self) -> impl Iterator<Item = u32> {
        (0..self.count).map_while(move |i| self.first.checked_add(self.step.checked_mul(i)?))
    }
}

/// Ascending ranks as runs, each as long as can be.
pub fn runs(ranks: &[u32]) -> Vec<Run> {
    let mut found: Vec<Run> = Vec::new();
    for &rank in ranks {
        match found.last_mut() {
            Some(run) if run.count == 1 => (run.step, run.count) = (rank - run.first, 2),
            Some(run) if rank == run.first + run.step * run.count => run.count += 1,
            _ => found.push(Run { first: rank, step: 1, count: 1 }),
        }
    }
    found
}

/// What a rank wrote, in short.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PartHead {
    pub step: i64,
    pub overwrite: bool,
    pub files: Vec<FileRecord>,
    /// Files of other steps that hold chunks of its part.
    #[serde(default)]
    pub referred: Vec<Referred>,
    /// Ranks and hash of each list of replicated tensors.
    pub groups: Vec<(Vec<Run>, u64)>,
    pub state_hash: u64,
    /// The first rank of this one's stage, if ranks of other stages hold other names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<u32>,
    /// The state, from the first rank of a stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage_state: Option<String>,
    pub per_rank_json: String,
}

/// What a rank wrote.
#[derive(Debug)]
pub struct Part {
    pub head: PartHead,
    pub chunks: Vec<Chunk>,
}

impl Part {
    /// The part of this rank.
    pub fn of(rank: u32, job: &Job, files: Vec<FileRecord>, written: &mut Written) -> Self {
        let groups = job.groups.iter().map(|(ranks, g)| (runs(ranks), g.hash())).collect();
        let head = PartHead {
            step: job.step,
            overwrite: job.overwrite,
            files,
            referred: std::mem::take(&mut written.referred),
            groups,
            state_hash: xxhash_rust::xxh3::xxh3_64(job.state_json.as_bytes()),
            stage: job.stage,
            stage_state: (job.stage == Some(rank)).then(|| job.state_json.clone()),
            per_rank_json: job.per_rank_json.clone(),
        };
        Self { head, chunks: std::mem::take(&mut written.chunks) }
    }
}

/// A line of JSON, then the rows as Arrow IPC.
pub fn encode_part(part: &Result<Part, Failure>) -> Result<Vec<u8>> {
    let (head, chunks) = match part {
        Ok(part) => (Ok(part.head.clone()), encode_table(&part.chunks)?),
        Err(failure) => (Err(failure.clone()), Vec::new()),
    };
    let mut message = encode(&head)?;
    message.push(b'\n');
    message.extend_from_slice(&chunks);
    Ok(message)
}

/// Reads what [`encode_part`] made.
pub fn decode_part(rank: u32, message: &[u8]) -> Result<Result<Part, Failure>> {
    // JSON text has no raw line feed.
    let cut = message.iter().position(|&b| b == b'\n').unwrap_or(message.len());
    let head: Result<PartHead, Failure> = decode(rank, &message[..cut])?;
    Ok(match head {
        Err(failure) => Err(failure),
        Ok(head) => {
            let rows = message.get(cut + 1..).unwrap_or_default();
            Ok(Part { head, chunks: decode_table(rows, &format!("message of rank {rank}"))? })
        }
    })
}

/// Rank 0's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The step is committed.
    Committed,
    /// Nothing was committed.
    Failed(Failure),
    /// The save failed, but its manifest may be there: what was written must stay.
    Unsure(Failure),
    /// Rank 0 wants details from these ranks before it can say who differs where.
    Explain(Vec<u32>),
}

/// What a rank sends when asked to explain.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Details {
    /// Lines of its lists of replicated tensors.
    pub groups: Vec<(Vec<u32>, Vec<String>)>,
    /// Its state.
    pub state_json: String,
}

impl Details {
    /// The details of this rank.
    pub fn of(job: &Job) -> Self {
        let groups = job.groups.iter().map(|(r, g)| (r.clone(), g.lines.clone())).collect();
        Self { groups, state_json: job.state_json.clone() }
    }
}

/// A message as JSON.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    serde_json::to_vec(message)
        .map_err(|e| Error::invalid("message between ranks", "encodable values", e))
}

/// Reads a message of `rank`.
pub fn decode<T: DeserializeOwned>(rank: u32, message: &[u8]) -> Result<T> {
    serde_json::from_slice(message).map_err(|e| Error::Peer {
        rank,
        what: format!("sent a message that does not parse ({e}); do all ranks run one version?"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_the_very_ranks() {
        let lists: [&[u32]; 6] =
            [&[], &[7], &[0, 1, 2, 3], &[1, 9, 17, 25], &[0, 1, 8, 9, 16, 17], &[0, 5, 6, 7]];
        for ranks in lists {
            let found: Vec<u32> = runs(ranks).into_iter().flat_map(Run::ranks).collect();
            assert_eq!(found, ranks);
        }
        assert_eq!(runs(&(0..16_384).collect::<Vec<_>>()).len(), 1);
        let wild = Run { first: u32::MAX - 1, step: 2, count: u32::MAX };
        assert_eq!(wild.ranks().count(), 1, "nothing of another rank may overflow here");
    }
}
