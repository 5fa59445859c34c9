//! What a move does to the world.

use super::disk::{Manifest, TABLE};
use super::world::{Config, How, Message, Move, Prune, World, file_of, own_files, synced};
use crate::checkpoint::commit::machine::{Action, Event, Folder, Machine, Word};

impl World {
    /// The world after a move.
    pub fn after(&self, step: Move, config: &Config) -> Self {
        let mut next = self.clone();
        match step {
            Move::Run(i, action, how) => next.run(i, action, how, config),
            Move::Crash(i, landing) => {
                if landing {
                    next.landing = Some(next.put_of(i));
                }
                next.ranks[i].alive = false;
                next.faults_left -= 1;
            }
            Move::Prune => next.prune_step(),
            Move::Deliver => next.deliver(),
            Move::Land => {
                if let Some((manifest, expected)) = next.landing.take() {
                    next.put(manifest, expected);
                }
            }
        }
        next
    }

    fn run(&mut self, i: usize, action: Action, how: How, config: &Config) {
        let free = how == How::Well || (how == How::Deadline && self.never(i, action));
        if !free {
            self.faults_left -= 1;
        }
        let event = match action {
            Action::PutManifest => self.run_put(i, how),
            Action::SendPart | Action::SendDetails | Action::Tell(_) => {
                self.run_send(i, action, how)
            }
            _ if how == How::Deadline => match action {
                Action::Gather | Action::GatherDetails => Event::Failed,
                _ => Event::Silence,
            },
            _ => self.run_other(i, action, how, config),
        };
        let mutation = config.mutation_of(self.ranks[i].id);
        self.ranks[i].answer(event, mutation);
    }

    /// Whether the deadline is the only way that a wait can end.
    fn never(&self, i: usize, action: Action) -> bool {
        let mut moves = Vec::new();
        self.unforced(&mut moves);
        moves.contains(&Move::Run(i, action, How::Deadline))
    }

    fn run_other(&mut self, i: usize, action: Action, how: How, config: &Config) -> Event {
        let rank = self.ranks[i].clone();
        let (attempt, file) = (rank.attempt, file_of(action, rank.id));
        let well = how == How::Well;
        let done = if well { Event::Done } else { Event::Failed };
        if let Some(folder) = synced(action) {
            if well {
                self.sync(attempt, folder);
            }
            return done;
        }
        match action {
            Action::Prepare if !config.overwrite && self.committed_for(rank.id) => Event::Failed,
            Action::Write(_) | Action::WriteTable => {
                self.disk.write(attempt, file);
                if !well {
                    self.disk.remove(attempt, file);
                }
                done
            }
            Action::Sync(_) | Action::SyncTable => {
                if well {
                    self.disk.files[attempt as usize][file].bytes_durable = true;
                } else {
                    self.disk.remove(attempt, file);
                }
                done
            }
            Action::RemoveOwn | Action::Retire => {
                if how != How::Error {
                    self.remove(i, action);
                }
                done
            }
            Action::Hold => {
                self.disk.mark |= how != How::Error;
                done
            }
            Action::CheckHeld if !self.disk.referred[0] => Event::Failed,
            Action::LookOld => {
                self.ranks[i].seen = self.disk.manifest.now();
                done
            }
            Action::ReadBack if well => {
                Event::Found(self.disk.manifest.now().is_some_and(|m| m.attempt == attempt))
            }
            Action::Gather if self.others().any(|r| self.part(r.id) == Some(false)) => {
                Event::Failed
            }
            Action::Gather if well => {
                self.ranks[i].gathered = true;
                done
            }
            Action::GatherDetails => Event::Failed,
            // What is missing was written by nobody.
            Action::Judge if !rank.gathered => Event::Failed,
            Action::Judge if config.differ && attempt == 1 => Event::Differ,
            Action::WaitVisible if !self.visible() => Event::Failed,
            Action::LookEarly | Action::WaitVerdict => self.verdict.there().into(),
            Action::WaitFinal => self.last.there().into(),
            _ => done,
        }
    }

    fn part(&self, rank: u8) -> Option<bool> {
        self.parts[rank as usize].there()
    }

    fn committed_for(&self, rank: u8) -> bool {
        rank == 0 && self.disk.manifest.now().is_some()
    }

    fn visible(&self) -> bool {
        let there = |f: usize| self.disk.files[1][f].entry.now();
        self.others().all(|r| own_files(r.id).all(there))
    }

    fn sync(&mut self, attempt: u8, folder: Folder) {
        match folder {
            Folder::Attempt => self.disk.sync_attempt(attempt),
            Folder::Step => self.disk.sync_step(),
            Folder::Root => self.disk.step.sync(),
        }
    }

    /// The other process goes on.
    fn prune_step(&mut self) {
        let committed = self.disk.manifest.now().is_some();
        self.prune = match self.prune {
            Prune::Look | Prune::LookAgain if committed => Prune::Ended,
            Prune::LookMarks if self.disk.mark => Prune::Ended,
            Prune::Look => Prune::Retract,
            Prune::Retract => {
                self.disk.referred[0] = false;
                Prune::LookMarks
            }
            Prune::LookMarks => Prune::LookAgain,
            Prune::LookAgain => Prune::Remove,
            Prune::Remove | Prune::Ended => {
                self.disk.referred[1] = false;
                Prune::Ended
            }
        };
    }

    fn remove(&mut self, i: usize, action: Action) {
        let rank = &self.ranks[i];
        let (attempt, id) = (rank.attempt, rank.id);
        if id == 0 {
            self.disk.mark = false;
        }
        if action == Action::Retire {
            self.disk.older = false;
            let Some(old) = rank.seen else { return };
            old.names().for_each(|f| self.disk.remove(old.attempt, f));
            return;
        }
        own_files(id).for_each(|f| self.disk.remove(attempt, f));
        if id == 0 {
            self.disk.remove(attempt, TABLE);
        }
    }

    /// The manifest that a rank puts, and what it expects to replace.
    fn put_of(&self, i: usize) -> (Manifest, Option<Manifest>) {
        let rank = &self.ranks[i];
        let ranks = if rank.attempt == 1 { 1 + self.others().count() } else { 1 };
        let files = ((1 << own_files(ranks as u8).start) - 1) | 1 << TABLE;
        (Manifest { attempt: rank.attempt, files }, rank.seen)
    }

    /// An atomic put on a condition; whether it took place.
    fn put(&mut self, manifest: Manifest, expected: Option<Manifest>) -> bool {
        let fits = self.disk.manifest.now() == expected;
        if fits {
            self.disk.manifest.set(Some(manifest));
        }
        fits
    }

    fn run_put(&mut self, i: usize, how: How) -> Event {
        let (manifest, expected) = self.put_of(i);
        match how {
            How::Error => return Event::Failed,
            How::NoAnswer => return Event::Unknown,
            How::NoAnswerYet => {
                self.landing.get_or_insert((manifest, expected));
                return Event::Unknown;
            }
            _ => {}
        }
        let put = self.put(manifest, expected);
        match how {
            How::NoAnswerAfter => Event::Unknown,
            How::Well if put => Event::Done,
            _ => Event::Failed,
        }
    }

    fn run_send(&mut self, i: usize, action: Action, how: How) -> Event {
        let rank = &self.ranks[i];
        let (id, good) = (rank.id as usize, !rank.trouble);
        match action {
            Action::SendPart => self.parts[id] = sent(good, how),
            Action::SendDetails => self.details[id] = sent(true, how),
            // What comes after an explanation has its own place.
            Action::Tell(word) => match rank.machine {
                Machine::Lead(lead) if lead.explained() => self.last = sent(word, how),
                _ => self.verdict = sent(word, how),
            },
            _ => {}
        }
        if matches!(how, How::Error | How::ErrorAfter) { Event::Failed } else { Event::Done }
    }

    fn deliver(&mut self) {
        for message in self.parts.iter_mut().chain(&mut self.details) {
            arrive(message);
        }
        arrive(&mut self.verdict);
        arrive(&mut self.last);
    }
}

fn sent<T>(value: T, how: How) -> Message<T> {
    match how {
        How::Error | How::Lost => Message::Lost,
        How::Late => Message::OnItsWay(value),
        _ => Message::There(value),
    }
}

fn arrive<T: Copy>(message: &mut Message<T>) {
    if let Message::OnItsWay(value) = *message {
        *message = Message::There(value);
    }
}

impl From<Option<Word>> for Event {
    fn from(word: Option<Word>) -> Self {
        word.map_or(Self::Silence, Self::Heard)
    }
}
