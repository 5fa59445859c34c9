//! Carries a machine's actions out: on the store, in the room, with the staged bytes.

use std::collections::VecDeque;

use super::lead::Leading;
use super::machine::{Action, Event, Folder, Machine, Outcome, Shape};
use super::messages::Failure;
use super::pack::{Packed, Packer};
use super::publish::{is_ours, manifest_path, refuse_committed};
use super::reserve::{Made, give_back, reserve};
use super::write::{
    OpenFile, Written, discard, remove_files, remove_folders, sync_file, write_image,
};
use super::{Folders, Job, Place};
use crate::checkpoint::meet::{Doing, Tick};
use crate::error::{Error, Result};
use crate::runtime::block_on;

/// Why a save does not go on.
pub enum Trouble {
    /// An error of this rank, with its own type.
    Own(Error),
    /// A failure that all ranks raise.
    Shared(Failure),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Own(error)
    }
}

impl Trouble {
    /// What the other ranks should hear of it from `rank`.
    pub fn failure(&self, rank: u32) -> Failure {
        match self {
            // Rank 0 waits for others: its deadlines are theirs.
            Self::Own(Error::Timeout { what, waited, .. }) if rank == 0 => {
                Failure::Late { what: what.clone(), waited_ms: waited.as_millis() as u64 }
            }
            Self::Own(error) => Failure::of(rank, error),
            Self::Shared(failure) => failure.clone(),
        }
    }
}

/// One save under way on one rank.
pub struct Driver<'a> {
    pub place: &'a Place,
    pub job: &'a Job,
    pub folders: Folders,
    pub tick: Tick<'a>,
    /// The first thing that went wrong, which is what the caller hears.
    pub trouble: Option<Trouble>,
    pub written: Written,
    /// What the packer made of it.
    pub packed: Packed,
    /// Files whose space is reserved and that are not written yet.
    pub reserved: VecDeque<Made>,
    /// The file between its write and its fsync.
    pub open: Option<OpenFile>,
    pub leading: Leading,
    /// Another rank: it has rank 0's word.
    pub heard: bool,
    /// Another rank: rank 0 wants its details.
    pub asked: bool,
    /// What the other ranks can read of it.
    pub doing: Option<Doing>,
}

/// Writes and commits; returns when this rank knows the outcome.
pub fn run(place: &Place, job: &Job, tick: Tick<'_>) -> Result<()> {
    let room = &place.room;
    let shape = Shape {
        files: job.images.len() as u32,
        alone: room.world_size == 1,
        overwrite: job.overwrite,
        delta: place.pack.as_ref().is_some_and(Packer::is_delta),
    };
    let mut machine = Machine::new(room.rank, shape);
    let mut driver = Driver {
        place,
        job,
        folders: Folders::new(job.step, 0, job.op)?,
        tick,
        trouble: None,
        written: Written::default(),
        packed: Packed::default(),
        reserved: VecDeque::new(),
        open: None,
        leading: Leading::default(),
        heard: false,
        asked: false,
        doing: Some(room.words.begin(format!("saving step {}", job.step))),
    };
    let mut action = Machine::start();
    // Ends: no machine visits an action more than a few times.
    let outcome = loop {
        if let Action::Finish(outcome) = action {
            break outcome;
        }
        driver.say(action);
        let event = driver.carry_out(action, &machine);
        tracing::trace!(step = job.step, ?action, ?event);
        action = machine.next(event);
    };
    driver.hush();
    let packed = std::mem::take(&mut driver.packed);
    let result = driver.result(outcome);
    if let Some(packer) = &place.pack {
        if let Some(handle) = &job.handle {
            handle.set_tally(packed.tally);
        }
        packer.settle(packed, &result);
    }
    result
}

impl Driver<'_> {
    fn carry_out(&mut self, action: Action, machine: &Machine) -> Event {
        let done = match machine {
            Machine::Lead(lead) => self.lead(action, lead.explained()),
            Machine::Follow(_) => self.follow(action),
        };
        done.unwrap_or_else(|trouble| self.failed(trouble))
    }

    /// Tells what comes now, for a rank that waits in vain.
    fn say(&self, action: Action) {
        let Some(doing) = &self.doing else { return };
        let step = self.job.step;
        match (action, self.image(action)) {
            (Action::Write(_), Some(name)) => {
                doing.counting(format!("saving step {step}: writing {name}"), &self.job.progress);
            }
            (Action::Sync(_), Some(name)) => {
                doing.now(format!("saving step {step}: making {name} durable"));
            }
            _ => doing.now(format!("saving step {step}: {}", in_words(action))),
        }
    }

    /// The data file of an action, and which of how many it is.
    fn image(&self, action: Action) -> Option<String> {
        let (Action::Write(i) | Action::Sync(i)) = action else { return None };
        let (image, count) = (self.job.images.get(i as usize)?, self.job.images.len());
        let place = if count > 1 { format!(", file {} of {count}", i + 1) } else { String::new() };
        Some(format!("{}{place}", image.name))
    }

    /// Ends what was told.
    pub fn hush(&mut self) {
        if let Some(doing) = self.doing.take() {
            doing.end();
        }
    }

    /// Remembers the first trouble.
    pub fn failed(&mut self, trouble: Trouble) -> Event {
        self.trouble.get_or_insert(trouble);
        Event::Failed
    }

    /// Actions that all ranks carry out alike.
    pub fn common(&mut self, action: Action) -> Result<Event, Trouble> {
        let store = self.place.store.as_ref();
        match action {
            Action::Prepare => self.prepare()?,
            Action::Write(i) => {
                let rank = self.place.room.rank;
                // What is packed is smaller than planned, or not written at all.
                if i == 0 && self.job.images.len() > 1 && self.place.pack.is_none() {
                    self.reserved = block_on(reserve(store, &self.folders, self.job))??;
                }
                let made = self.reserved.pop_front().map(|made| made.writer);
                let pack = self.place.pack.as_ref().map(|packer| (packer, &mut self.packed));
                let (folders, i) = (&self.folders, i as usize);
                let file = write_image(store, folders, self.job, rank, i, pack, made);
                self.open = Some(block_on(file)??);
            }
            Action::Sync(_) => {
                let (record, chunks) = block_on(sync_file(store, self.opened()?))??;
                self.written.files.extend(record);
                self.written.chunks.extend(chunks);
            }
            Action::ReadBack => {
                return Ok(Event::Found(block_on(is_ours(store, &self.folders))??));
            }
            Action::Seal => block_on(store.sync_dir(&self.folders.step))??,
            Action::SyncFolder(folder) => block_on(store.sync_dir(self.folder(folder)))??,
            Action::RemoveOwn => self.remove_own()?,
            other => return Err(unforeseen(other)),
        }
        Ok(Event::Done)
    }

    /// Which is nothing for a rank other than 0 whose state was staged.
    fn prepare(&self) -> Result<()> {
        let rank = self.place.room.rank;
        if rank == 0 && !self.job.overwrite {
            let path = manifest_path(&self.folders);
            block_on(refuse_committed(self.place.store.as_ref(), &path))??;
        }
        self.job.refused(rank).map_or(Ok(()), Err)
    }

    pub fn opened(&mut self) -> Result<OpenFile> {
        let gone = || Error::Closed { what: "a file of the save".into() };
        self.open.take().ok_or_else(gone)
    }

    fn folder(&self, folder: Folder) -> &str {
        match folder {
            Folder::Attempt => &self.folders.path,
            Folder::Step => &self.folders.step,
            Folder::Root => "",
        }
    }

    fn remove_own(&mut self) -> Result<()> {
        let store = self.place.store.as_ref();
        if let Some(file) = self.open.take() {
            block_on(discard(store, file))?;
        }
        block_on(give_back(store, std::mem::take(&mut self.reserved)))?;
        let mut files = std::mem::take(&mut self.written.files);
        files.extend(self.leading.table.take());
        self.let_go();
        block_on(remove_files(store, &self.folders, &files))?;
        if self.place.room.rank == 0 || self.heard {
            block_on(remove_folders(store, &self.folders))?;
        }
        Ok(())
    }

    /// The failure of a save whose manifest may be there; another rank has rank 0's.
    pub fn unsure(&self) -> Failure {
        let what = match &self.trouble {
            Some(Trouble::Shared(failure @ Failure::Unsure { .. })) => return failure.clone(),
            Some(trouble) => trouble.failure(self.place.room.rank).into_error().to_string(),
            None => "no answer".into(),
        };
        Failure::Unsure { path: manifest_path(&self.folders), what }
    }

    /// What the caller of the save hears.
    fn result(self, outcome: Outcome) -> Result<()> {
        let unsure = self.unsure();
        let (alone, rank) = (self.place.room.world_size == 1, self.place.room.rank);
        match (outcome, self.trouble) {
            (Outcome::Committed, _) => Ok(()),
            (Outcome::Unsure, _) => Err(unsure.into_error()),
            (Outcome::Failed, Some(Trouble::Own(error))) if alone => Err(error),
            (Outcome::Failed, Some(Trouble::Shared(failure))) => Err(failure.into_error()),
            // As the other ranks raise it.
            (Outcome::Failed, Some(trouble)) if rank == 0 => Err(trouble.failure(0).into_error()),
            (Outcome::Failed, Some(Trouble::Own(error))) => Err(error),
            (Outcome::Failed, None) => Err(Error::Closed { what: "the save".into() }),
        }
    }
}

/// What an action is to a person who reads that a rank does not answer.
fn in_words(action: Action) -> &'static str {
    match action {
        Action::Join => "meeting the other ranks",
        Action::LookEarly | Action::Prepare => "looking whether it can be saved",
        Action::Write(_) | Action::Sync(_) => "writing a data file",
        Action::SendPart | Action::SendDetails => "telling rank 0 what was written",
        Action::Gather | Action::GatherDetails => "gathering what the ranks wrote",
        Action::Judge => "comparing what the ranks wrote",
        Action::WaitVisible => "waiting until the files of all ranks can be seen",
        Action::WriteTable | Action::SyncTable => "writing the table of chunks",
        Action::Hold | Action::CheckHeld => "looking after the steps that it refers to",
        Action::SyncFolder(_) => "making folders durable",
        Action::LookOld | Action::PutManifest => "committing the manifest",
        Action::ReadBack => "reading the manifest back",
        Action::Seal => "making the manifest durable",
        Action::Tell(_) => "telling the other ranks the outcome",
        Action::WaitVerdict | Action::WaitFinal => "waiting for the verdict of rank 0",
        Action::RemoveOwn => "removing what it wrote",
        Action::Retire | Action::Ack | Action::Finish(_) => "ending",
    }
}

/// A machine asked for what its rank cannot do.
fn unforeseen(action: Action) -> Trouble {
    Error::invalid("commit", "an action of this rank", format!("{action:?}")).into()
}
