//! Rank 0: write, gather, judge, publish, tell.
//!
//! Until the manifest is put, any failure removes what was written and tells everybody. From then
//! on nothing is ever taken back: another rank or process may have seen the manifest, and a rank
//! that heard nothing may have called the step committed because of it.

use super::{Action, Event, Folder, Outcome, READ_BACK_TRIES_MAX, Shape, Word};

/// Rank 0's half of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lead {
    shape: Shape,
    doing: Action,
    /// Something of this attempt may be stored.
    wrote: bool,
    /// The others were told that ranks differ, so they wait for the last word.
    explained: bool,
    /// The answer to the put was lost: it may take effect even later.
    unclear: bool,
    read_backs: u8,
}

impl Lead {
    pub fn new(shape: Shape) -> Self {
        let doing = Action::Join;
        Self { shape, doing, wrote: false, explained: false, unclear: false, read_backs: 0 }
    }

    /// Whether the last word has its own key, because the first one asked for details.
    pub fn explained(&self) -> bool {
        self.explained
    }

    pub fn next(&mut self, event: Event) -> Action {
        self.doing = self.after(event);
        self.wrote |= matches!(self.doing, Action::Write(_) | Action::WriteTable);
        self.doing
    }

    fn after(&mut self, event: Event) -> Action {
        let failed = event != Event::Done;
        match self.doing {
            Action::PutManifest => self.after_put(event),
            Action::ReadBack => self.after_read_back(event),
            Action::Seal if failed => self.tell(Word::Unsure),
            Action::Seal => self.tell(Word::Committed),
            Action::Judge if event == Event::Differ => Action::Tell(Word::Explain),
            Action::RemoveOwn => self.tell(Word::Failed),
            Action::Tell(Word::Explain) if !failed => {
                self.explained = true;
                Action::GatherDetails
            }
            Action::Tell(Word::Explain) | Action::GatherDetails => self.refuse(),
            Action::Tell(word) => after_word(word),
            Action::Retire => Action::Finish(Outcome::Committed),
            Action::Finish(outcome) => Action::Finish(outcome),
            _ if failed => self.refuse(),
            done => self.proceed(done),
        }
    }

    /// The order of a commit in which nothing fails, up to the manifest.
    fn proceed(&self, done: Action) -> Action {
        match done {
            Action::Join => Action::Prepare,
            Action::Prepare => self.file_or_gather(0),
            Action::Write(i) => Action::Sync(i),
            Action::Sync(i) => self.file_or_gather(i + 1),
            Action::Gather => Action::Judge,
            Action::Judge if !self.shape.alone => Action::WaitVisible,
            Action::Judge | Action::WaitVisible if self.shape.delta => Action::Hold,
            Action::Hold => Action::CheckHeld,
            Action::Judge | Action::WaitVisible | Action::CheckHeld => Action::WriteTable,
            Action::WriteTable => Action::SyncTable,
            Action::SyncTable => Action::SyncFolder(Folder::Attempt),
            Action::SyncFolder(Folder::Attempt) => Action::SyncFolder(Folder::Step),
            Action::SyncFolder(Folder::Step) => Action::SyncFolder(Folder::Root),
            Action::SyncFolder(Folder::Root) if self.shape.overwrite => Action::LookOld,
            Action::SyncFolder(Folder::Root) | Action::LookOld => Action::PutManifest,
            _ => self.refuse(),
        }
    }

    fn file_or_gather(&self, i: u32) -> Action {
        if i < self.shape.files {
            Action::Write(i)
        } else if self.shape.alone {
            Action::Judge
        } else {
            Action::Gather
        }
    }

    fn after_put(&mut self, event: Event) -> Action {
        self.unclear = event == Event::Unknown;
        if event == Event::Done { Action::Seal } else { Action::ReadBack }
    }

    fn after_read_back(&mut self, event: Event) -> Action {
        self.read_backs += 1;
        match event {
            Event::Found(true) => Action::Seal,
            Event::Found(false) if !self.unclear => self.refuse(),
            // It is not there now, but the request may still be on its way.
            Event::Found(false) => self.tell(Word::Unsure),
            _ if self.read_backs < READ_BACK_TRIES_MAX => Action::ReadBack,
            _ => self.tell(Word::Unsure),
        }
    }

    /// The manifest is not there and never will be.
    fn refuse(&self) -> Action {
        if self.wrote { Action::RemoveOwn } else { self.tell(Word::Failed) }
    }

    fn tell(&self, word: Word) -> Action {
        if self.shape.alone { after_word(word) } else { Action::Tell(word) }
    }
}

/// Whether the others heard it does not matter: the outcome is what it is, and they look at the
/// manifest themselves when they hear nothing.
fn after_word(word: Word) -> Action {
    match word {
        Word::Committed => Action::Retire,
        Word::Unsure => Action::Finish(Outcome::Unsure),
        Word::Failed | Word::Explain => Action::Finish(Outcome::Failed),
    }
}
