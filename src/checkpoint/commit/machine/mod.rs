//! The commit as a state machine that does no I/O: told how one action ended, it says the next.
//!
//! [`Lead`] is rank 0, [`Follow`] every other rank. A machine knows only what the order of the
//! commit depends on; bytes, records and errors stay with the driver, which carries actions out on
//! a store and a meeting room. So the very code that runs in production can be driven by a test
//! through every interleaving, crash and lost message (`../tests/`).

mod follow;
mod lead;

pub use follow::Follow;
pub use lead::Lead;

/// Looks at the manifest after an unclear answer before its outcome counts as unknown.
const READ_BACK_TRIES_MAX: u8 = 2;

/// What a machine must know of its save.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Data files of this rank.
    pub files: u32,
    /// Whether there are other ranks to meet.
    pub alone: bool,
    /// Whether a committed step may be replaced.
    pub overwrite: bool,
    /// Whether chunks may lie in earlier steps.
    pub delta: bool,
}

/// A folder whose entries are made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Folder {
    /// The attempt's: entries are the data files and the table.
    Attempt,
    /// The step's: entries are the attempt and the manifest.
    Step,
    /// The root: its entry is the step.
    Root,
}

/// What rank 0 says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Word {
    /// The step is committed, and durably so.
    Committed,
    /// It is not and never will be: what was written for it may go.
    Failed,
    /// It may be: what was written for it must stay.
    Unsure,
    /// Ranks differ; some are asked for details, then the last word comes.
    Explain,
}

/// How a save ended on this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The step is committed, and durably so.
    Committed,
    /// This rank failed, or was told so, or heard nothing and found no manifest.
    Failed,
    /// The manifest may be there, or may not be durable.
    Unsure,
}

/// One thing to do. Each is answered by one [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Take up the session of the room.
    Join,
    /// Other ranks: look, without waiting, whether rank 0 has refused already.
    LookEarly,
    /// Refuse a save that cannot be: a committed step on rank 0, a state that was not staged.
    Prepare,
    /// Write data file `i`.
    Write(u32),
    /// Make the bytes of data file `i` durable.
    Sync(u32),
    /// Tell rank 0 what was written, or why nothing was.
    SendPart,
    /// Rank 0: collect the parts of all ranks.
    Gather,
    /// Rank 0: compare the parts and prove that they cover every tensor once.
    Judge,
    /// Rank 0: collect details from the ranks that differ.
    GatherDetails,
    /// Send the details that rank 0 asked for.
    SendDetails,
    /// Rank 0: wait until the files of all ranks are seen in full size.
    WaitVisible,
    /// Rank 0: mark the steps that are referred to, so that whoever is about to remove one sees it.
    Hold,
    /// Rank 0: see that they are all still there, now that they are marked.
    CheckHeld,
    /// Write the table of chunks.
    WriteTable,
    /// Make its bytes durable.
    SyncTable,
    /// Make a folder's entries durable.
    SyncFolder(Folder),
    /// Look which manifest is to be replaced.
    LookOld,
    /// Create the manifest, or replace the one that was seen: the commit.
    PutManifest,
    /// Read the manifest back: is it this attempt's?
    ReadBack,
    /// Make the manifest's entry durable.
    Seal,
    /// Rank 0: say the word to all ranks.
    Tell(Word),
    /// Wait for rank 0's first word.
    WaitVerdict,
    /// Wait for its last word, after [`Word::Explain`].
    WaitFinal,
    /// Remove what this rank wrote for the attempt.
    RemoveOwn,
    /// Rank 0: from now on what was replaced and steps that nobody wants may be removed.
    Retire,
    /// Say that the outcome is known here, so that rank 0 may clear the room.
    Ack,
    /// Nothing more.
    Finish(Outcome),
}

/// How an action ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// It did what it says.
    Done,
    /// It failed and certainly had no effect that another rank or process can see.
    Failed,
    /// It failed, and may have had its effect or may have it yet.
    Unknown,
    /// What was waited for did not come by the deadline.
    Silence,
    /// Rank 0's word.
    Heard(Word),
    /// The parts differ.
    Differ,
    /// A manifest was looked for; whether it is this attempt's.
    Found(bool),
}

/// Either half.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Machine {
    /// Rank 0.
    Lead(Lead),
    /// Another rank.
    Follow(Follow),
}

impl Machine {
    /// The machine of a rank.
    pub fn new(rank: u32, shape: Shape) -> Self {
        if rank == 0 { Self::Lead(Lead::new(shape)) } else { Self::Follow(Follow::new(shape)) }
    }

    /// What to do first.
    pub fn start() -> Action {
        Action::Join
    }

    /// What to do after the last action ended so.
    pub fn next(&mut self, event: Event) -> Action {
        match self {
            Self::Lead(lead) => lead.next(event),
            Self::Follow(follow) => follow.next(event),
        }
    }
}
