//! Snapshots that killed processes of this run left, committed by those that are there now.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use super::{Checkpointer, may_come_back, panicked};
use crate::checkpoint::commit::{self, Job, Place, Tidy};
use crate::checkpoint::handle::SaveHandle;
use crate::checkpoint::meet::MemoryMeet;
use crate::checkpoint::snapshot::{Adopted, Claims, Left};
use crate::error::Result;
use crate::runtime::block_on;

impl Checkpointer {
    /// Snapshots that a killed process of this run and rank left, each checked byte by byte.
    pub fn left(&self) -> Vec<Left> {
        self.claims.look(self.slots.place())
    }

    /// Whether more is left on this machine by ranks other than this one.
    pub fn more_left(&self) -> bool {
        Claims::more(self.slots.place())
    }

    /// [`Checkpointer::left`], and what ranks left that nobody is now. All ranks must have called
    /// `left` before: this takes whatever no process holds.
    pub fn left_elsewhere(&self) -> Vec<Left> {
        self.claims.look_elsewhere(self.slots.place())
    }

    /// Commits one of [`Checkpointer::left`]. All ranks call it for the same one.
    pub fn adopt(&self, step: i64, op: u64) -> Result<SaveHandle> {
        self.check_process()?;
        let number = self.next_op();
        let taken = self.claims.take(&self.slots, step, op).and_then(|found| {
            match self.proof.look(self.place.store.as_ref(), found.staged.len() as u64) {
                Ok(()) => Ok(found),
                Err(error) => {
                    self.slots.release(found.staged, may_come_back(&error));
                    Err(error)
                }
            }
        });
        let found = match taken {
            Ok(found) => found,
            Err(error) => {
                let _ = self.refuse_op(step, number, &error.to_string());
                return Err(error);
            }
        };
        self.enqueue(adopted_job(found, step, number), Duration::ZERO)
    }

    /// Commits the parts of a save that this process holds, each as the rank that staged it; the
    /// parts of the other ranks of that world are committed by the processes that hold them.
    /// Returns when the outcome is known here; a process without any part of it has none.
    pub fn adopt_parts(&self, step: i64, op: u64, session: u64) -> Result<()> {
        self.check_process()?;
        let parts = self.claims.take_parts((step, op, session))?;
        let Some(world_size) = parts.first().map(|part| part.identity.world_size) else {
            return Ok(());
        };
        let bytes = parts.iter().map(|part| part.staged.len() as u64).sum();
        if let Err(error) = self.proof.look(self.place.store.as_ref(), bytes) {
            for part in parts {
                self.claims.put_back(part.staged, may_come_back(&error));
            }
            return Err(error);
        }
        // Nobody else to meet if all of them are here.
        let here =
            (parts.len() as u64 == u64::from(world_size)).then(|| Arc::new(MemoryMeet::default()));
        let name = format!("adopt-{step}-{op}-{session:016x}");
        let mut outcome = Ok(());
        let run = |part: Adopted| {
            let rank = part.identity.rank;
            let meet = here.clone().map(|meet| meet as _);
            let room = self.place.room.sibling(&name, rank, world_size, meet);
            let (store, keep) = (Arc::clone(&self.place.store), Arc::clone(&self.place.keep));
            // Staged by another process, of whose earlier steps this one knows nothing.
            let place = Place { store, room, keep, pack: None };
            self.commit_part(&place, adopted_job(part, step, op))
        };
        thread::scope(|scope| {
            let running: Vec<_> =
                parts.into_iter().map(|part| scope.spawn(move || run(part))).collect();
            for thread in running {
                let done = thread.join().unwrap_or_else(|_| Err(panicked(step)));
                if outcome.is_ok() {
                    outcome = done;
                }
            }
        });
        if outcome.is_ok()
            && let Err(error) | Ok(Err(error)) =
                block_on(self.place.keep.run(self.place.store.as_ref()))
        {
            tracing::warn!(%error, "old steps could not be pruned");
        }
        outcome
    }

    fn commit_part(&self, place: &Place, mut job: Job) -> Result<()> {
        let mut tick = || {
            if self.stopping.load(Ordering::Acquire) {
                return Err(self.closed());
            }
            Ok(())
        };
        let outcome = commit::run(place, &job, &mut tick);
        if let Some(staged) = job.staged.take() {
            let keep = outcome.as_ref().is_err_and(may_come_back);
            self.claims.put_back(staged, keep);
        }
        if let Err(error) = commit::tidy(place, Tidy::of(&job)) {
            tracing::warn!(%error, "meeting keys of an adopted save could not be deleted");
        }
        outcome
    }

    /// Removes what was not adopted.
    pub fn drop_left(&self) {
        self.claims.drop_all(self.slots.place());
    }

    /// Removes every slot of this run that no process holds; for when all ranks have adopted or
    /// dropped theirs.
    pub fn sweep_left(&self) {
        Claims::sweep(self.slots.place());
    }
}

fn adopted_job(found: Adopted, step: i64, op: u64) -> Job {
    Job {
        step,
        op,
        images: Arc::new(found.images),
        pieces: Arc::new(found.pieces),
        groups: Arc::new(found.groups),
        staged: Some(found.staged),
        state_json: found.state_json,
        per_rank_json: found.per_rank_json,
        overwrite: found.identity.overwrite,
        metrics: found.identity.metrics,
        stage: found.identity.stage,
        adopted: true,
        ..Job::default()
    }
}
