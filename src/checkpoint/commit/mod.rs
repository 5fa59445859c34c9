//! From a staged slot to a committed step.
//!
//! ```text
//! every rank                      rank 0
//! data files, fsync
//! "part": rows, files, state  →   gathers; names who is missing or differs
//!                                 proves that the rows cover every tensor exactly once
//!                                 tensors.arrow; fsync <attempt>/, step-…/, root
//!                                 manifest, create-if-absent        ← the commit
//! result                      ←   "verdict"
//! ```
//!
//! A failure anywhere before the manifest removes what this save wrote; older steps are not touched
//! by a save at all. A rank that hears no verdict removes nothing: rank 0 may have committed.

mod drive;
mod follow;
mod judge;
mod lead;
mod machine;
mod messages;
mod pack;
mod publish;
mod reserve;
pub mod scale;
#[cfg(test)]
mod tests;
mod union;
mod write;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::handle::SaveHandle;
use super::layout::{FileImage, Piece, attempt_dir, join, step_dir};
use super::meet::{Progress, Room};
use super::retain::Retention;
use super::snapshot::{Groups, Staged};
use crate::error::{Error, Result};
use crate::storage::Store;

pub use drive::run;
pub use lead::{Tidy, tidy};
pub use pack::{PackOptions, Packer, Tally};

/// What the ranks of a checkpointer share for all their saves.
#[derive(Debug)]
pub struct Place {
    /// The checkpoint root.
    pub store: Arc<dyn Store>,
    /// Where the ranks meet.
    pub room: Room,
    /// What to keep after a commit.
    pub keep: Arc<Retention>,
    /// What is done to chunks before they are written, if anything.
    pub pack: Option<Packer>,
}

/// A staged save that waits for its turn.
#[derive(Debug, Default)]
pub struct Job {
    /// The step.
    pub step: i64,
    /// Number of this save call, the same on all ranks.
    pub op: u64,
    /// What this rank writes.
    pub images: Arc<Vec<FileImage>>,
    /// The pieces that the images place.
    pub pieces: Arc<Vec<Piece>>,
    /// Replicated tensors, for the comparison of the ranks' lists.
    pub groups: Arc<Groups>,
    /// The images' bytes; none in a refusal.
    pub staged: Option<Staged>,
    /// Why this rank cannot save: then it takes part only to tell the others.
    pub refusal: Option<String>,
    /// The refusal is the user's policy for a busy checkpointer, and no failure.
    pub skipped: bool,
    /// The first rank of this one's stage, if ranks of other stages hold other names.
    pub stage: Option<u32>,
    /// State that must be equal on all ranks, or on all of the stage: JSON.
    pub state_json: String,
    /// State of this rank: JSON.
    pub per_rank_json: String,
    /// What was measured of the state; rank 0's are kept.
    pub metrics: BTreeMap<String, Option<f64>>,
    /// Whether a committed step may be replaced.
    pub overwrite: bool,
    /// Whether the caller waits for the commit.
    pub blocking: bool,
    /// The staged bytes are those of processes that are gone.
    pub adopted: bool,
    /// What the caller of the save holds.
    pub handle: Option<SaveHandle>,
    /// Bytes of the file that is being written.
    pub progress: Arc<Progress>,
}

/// Where one save call writes.
#[derive(Debug, Clone)]
pub struct Folders {
    /// `step-00001000`.
    pub step: String,
    /// `a-0123456789abcdef`.
    pub attempt: String,
    /// Both, joined.
    pub path: String,
}

impl Folders {
    /// The folders of save call `op` of `session`; the same on all ranks, and of no other call.
    pub fn new(step: i64, session: u64, op: u64) -> Result<Self> {
        let id = xxhash_rust::xxh3::xxh3_64(format!("{session:016x} {op}").as_bytes());
        let (step, attempt) = (step_dir(step)?, attempt_dir(id));
        let path = join(&step, &attempt);
        Ok(Self { step, attempt, path })
    }
}

impl Job {
    /// Why this rank takes part without anything to write, if it does.
    fn refused(&self, rank: u32) -> Option<Error> {
        let why = self.refusal.clone()?;
        Some(if self.skipped {
            Error::Skipped { rank, step: self.step }
        } else {
            Error::Peer { rank, what: why }
        })
    }

    /// The ranks have met: from now on the staged bytes can be adopted, since those of all ranks
    /// can be told from those of an earlier run.
    fn joined(&self, session: u64) {
        // What is adopted keeps its number: if this process is killed, too, the parts of all ranks
        // must still be told to belong together.
        if let Some(staged) = self.staged.as_ref().filter(|_| !self.adopted) {
            staged.set_session(session);
        }
        if let Some(handle) = &self.handle {
            handle.set_joined();
        }
    }

    /// Checksums of the parts of image `i`, computed when it was staged.
    fn sums(&self, i: usize) -> &[u32] {
        self.staged.as_ref().map_or(&[], |staged| staged.sums(i))
    }

    /// Name of the meeting for this save.
    fn meeting(&self) -> String {
        meeting(self.op)
    }
}

fn meeting(op: u64) -> String {
    format!("save-{op}")
}

/// How long rank 0 waits until it can see the other ranks' files: close-to-open file systems show
/// them late.
const VISIBLE_WAIT: Duration = Duration::from_secs(10);
