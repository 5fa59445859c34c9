//! What only ranks other than 0 do: send a part, hear the verdict, explain a difference.

use std::time::Instant;

use super::Folders;
use super::drive::{Driver, Trouble};
use super::machine::{Action, Event, Word};
use super::messages::{Details, Part, Verdict, decode, encode, encode_part};
use crate::checkpoint::meet::no_tick;
use crate::error::{Error, Result};

type Done = Result<Event, Trouble>;

impl Driver<'_> {
    /// Carries out an action of another rank.
    pub fn follow(&mut self, action: Action) -> Done {
        let room = &self.place.room;
        match action {
            Action::Join => {
                let session = room.join(room.verdict_deadline(), self.tick)?;
                self.job.joined(session);
                self.folders = Folders::new(self.job.step, session, self.job.op)?;
            }
            // Rank 0 may have refused already; then writing would be for nothing.
            Action::LookEarly => {
                let now = Instant::now();
                let found = room.wait(&self.job.meeting(), "verdict", now, &mut no_tick)?;
                return self.heard(found);
            }
            Action::SendPart => self.send_part()?,
            Action::WaitVerdict => return self.wait_word("verdict"),
            Action::WaitFinal => return self.wait_word("final"),
            Action::SendDetails => self.send_details()?,
            // The receipt only lets rank 0 clear its keys away.
            Action::Ack => {
                // Before the receipt: after it rank 0 may clear the room away.
                self.hush();
                let name = format!("ack-{}", room.rank);
                if let Err(error) = room.put(&self.job.meeting(), &name, b"") {
                    let step = self.job.step;
                    tracing::debug!(%error, step, "the verdict could not be acknowledged");
                }
            }
            other => return self.common(other),
        }
        Ok(Event::Done)
    }

    fn send_part(&mut self) -> Result<()> {
        let room = &self.place.room;
        let part = if let Some(trouble) = &self.trouble {
            Err(trouble.failure(room.rank))
        } else {
            self.packed.tell(&mut self.written);
            let (rank, files) = (self.place.room.rank, self.written.files.clone());
            Ok(Part::of(rank, self.job, files, &mut self.written))
        };
        room.put(&self.job.meeting(), &format!("part-{}", room.rank), &encode_part(&part)?)
    }

    fn wait_word(&mut self, name: &str) -> Done {
        let room = &self.place.room;
        let found = room.wait(&self.job.meeting(), name, room.verdict_deadline(), self.tick)?;
        if found.is_some() {
            return self.heard(found);
        }
        self.failed(Trouble::Own(Error::Timeout {
            what: format!("the verdict of rank 0 on the commit{}", room.words.last(&[0])),
            waited: room.timeout,
            advice:
                "look at the log of rank 0: it may be dead; its manifest was not there just now"
                    .into(),
        }));
        Ok(Event::Silence)
    }

    fn heard(&mut self, message: Option<Vec<u8>>) -> Done {
        let Some(message) = message else { return Ok(Event::Silence) };
        self.heard = true;
        let word = match decode(0, &message)? {
            Verdict::Committed => Word::Committed,
            // Whatever failed here first: all ranks raise what rank 0 says.
            Verdict::Failed(failure) => {
                self.trouble = Some(Trouble::Shared(failure));
                Word::Failed
            }
            Verdict::Unsure(failure) => {
                self.trouble = Some(Trouble::Shared(failure));
                Word::Unsure
            }
            Verdict::Explain(ranks) => {
                self.asked = ranks.contains(&self.place.room.rank);
                Word::Explain
            }
        };
        Ok(Event::Heard(word))
    }

    fn send_details(&self) -> Result<()> {
        if !self.asked {
            return Ok(());
        }
        let room = &self.place.room;
        let details = encode(&Details::of(self.job))?;
        room.put(&self.job.meeting(), &format!("details-{}", room.rank), &details)
    }
}
