//! A rank other than 0: write, tell, wait for the word.
//!
//! A rank that hears nothing removes nothing, since rank 0 may only be slow and commit yet. It
//! looks at the manifest; where that is there, it makes the entry durable itself before it calls
//! the step committed: rank 0 may have died between the two.

use super::{Action, Event, Outcome, READ_BACK_TRIES_MAX, Shape, Word};

/// Another rank's half of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Follow {
    shape: Shape,
    doing: Action,
    /// Something of this attempt may be stored.
    wrote: bool,
    /// What is left to do after a removal: tell rank 0, or end.
    sent: bool,
    outcome: Outcome,
    read_backs: u8,
}

impl Follow {
    pub fn new(shape: Shape) -> Self {
        let (doing, outcome) = (Action::Join, Outcome::Failed);
        Self { shape, doing, wrote: false, sent: false, outcome, read_backs: 0 }
    }

    pub fn next(&mut self, event: Event) -> Action {
        self.doing = self.after(event);
        self.wrote |= matches!(self.doing, Action::Write(_));
        self.sent |= matches!(self.doing, Action::SendPart);
        self.doing
    }

    fn after(&mut self, event: Event) -> Action {
        let failed = event != Event::Done;
        match self.doing {
            Action::Join if failed => Action::Finish(Outcome::Failed),
            Action::Join => Action::LookEarly,
            Action::LookEarly | Action::WaitVerdict | Action::WaitFinal => self.after_wait(event),
            Action::Prepare | Action::Write(_) | Action::Sync(_) if failed => self.give_up(),
            Action::Prepare => self.file_or_part(0),
            Action::Write(i) => Action::Sync(i),
            Action::Sync(i) => self.file_or_part(i + 1),
            // Even if it could not be sent it may have arrived, and rank 0 commits with it.
            Action::SendPart => Action::WaitVerdict,
            Action::SendDetails => Action::WaitFinal,
            Action::ReadBack => self.after_read_back(event),
            Action::Seal => self.end(if failed { Outcome::Unsure } else { Outcome::Committed }),
            Action::RemoveOwn if self.sent => self.end(Outcome::Failed),
            Action::RemoveOwn => Action::SendPart,
            _ => Action::Finish(self.outcome),
        }
    }

    fn file_or_part(&self, i: u32) -> Action {
        if i < self.shape.files { Action::Write(i) } else { Action::SendPart }
    }

    /// This rank cannot write its part: rank 0 must hear why.
    fn give_up(&self) -> Action {
        if self.wrote { Action::RemoveOwn } else { Action::SendPart }
    }

    fn after_wait(&mut self, event: Event) -> Action {
        match (event, self.doing) {
            (Event::Heard(Word::Committed), _) => self.end(Outcome::Committed),
            (Event::Heard(Word::Unsure), _) => self.end(Outcome::Unsure),
            (Event::Heard(Word::Explain), Action::WaitVerdict) => Action::SendDetails,
            (Event::Heard(Word::Failed), _) => {
                // Not at the first look: then nothing was written, and nothing needs to be sent.
                self.sent = true;
                if self.wrote { Action::RemoveOwn } else { self.end(Outcome::Failed) }
            }
            (_, Action::LookEarly) => Action::Prepare,
            _ => Action::ReadBack,
        }
    }

    fn after_read_back(&mut self, event: Event) -> Action {
        self.read_backs += 1;
        match event {
            Event::Found(true) => Action::Seal,
            Event::Found(false) => self.end(Outcome::Failed),
            _ if self.read_backs < READ_BACK_TRIES_MAX => Action::ReadBack,
            _ => self.end(Outcome::Unsure),
        }
    }

    fn end(&mut self, outcome: Outcome) -> Action {
        self.outcome = outcome;
        Action::Ack
    }
}
