//! The part of a save that stops the trainer, and the snapshots of killed processes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Checkpointer, SaveOptions};
use crate::checkpoint::commit::Job;
use crate::checkpoint::handle::SaveHandle;
use crate::checkpoint::layout::step_dir;
use crate::checkpoint::meet::Tick;
use crate::checkpoint::plan::TensorIn;
use crate::checkpoint::snapshot::{
    Claims, DATA_START, Identity, Left, Planned, Record, Staged, seal, stage,
};
use crate::error::{Error, Result};
use crate::memory::Slot;

/// The two JSON texts of a save.
pub struct Texts<'a> {
    /// State that is equal on all ranks.
    pub state_json: &'a str,
    /// State of this rank.
    pub per_rank_json: &'a str,
}

impl Checkpointer {
    /// The plan for these tensors: the last one if they are of the same names and shapes.
    fn planned(&self, tensors: &[TensorIn<'_>]) -> Result<Arc<Planned>> {
        let last = self.planned.lock().clone();
        if let Some(planned) = last.filter(|planned| planned.fits(tensors)) {
            return Ok(planned);
        }
        let room = &self.place.room;
        let planned = Arc::new(Planned::new(room.rank, room.world_size, tensors)?);
        *self.planned.lock() = Some(Arc::clone(&planned));
        Ok(planned)
    }

    /// A job with its bytes in a sealed slot, and how long that took.
    pub(super) fn staged_job(
        &self,
        step: i64,
        op: u64,
        tensors: &[TensorIn<'_>],
        texts: &Texts<'_>,
        options: &SaveOptions,
        check: Tick<'_>,
    ) -> Result<(Job, Duration)> {
        let started = Instant::now();
        step_dir(step)?;
        // Whoever saves before restoring starts anew.
        self.drop_left();
        let planned = self.planned(tensors)?;
        let identity = self.identity(step, op, options)?;
        let mut record = Record {
            identity: &identity,
            state: texts.state_json.as_bytes(),
            per_rank: texts.per_rank_json.as_bytes(),
            layout: &planned.layout,
            sums: &[],
        };
        let start = DATA_START + planned.data_bytes;
        let bytes = start + record.bytes() + planned.sums_bytes();
        let mut slot = self.free_slot(step, bytes, options)?;
        let sums = match stage(&mut slot, &planned.images, &planned.pieces, tensors)
            .and_then(|sums| check().map(|()| sums))
        {
            Ok(sums) => sums,
            Err(e) => {
                self.slots.give_back(slot);
                return Err(e);
            }
        };
        let words: Vec<u8> = sums.iter().flatten().flat_map(|sum| sum.to_le_bytes()).collect();
        record.sums = &words;
        if let Err(e) = seal(&mut slot, step, start, &record) {
            self.slots.give_back(slot);
            return Err(e);
        }
        let staged = Staged::new(slot, sums);
        if let Some(session) = self.place.room.session_now() {
            staged.set_session(session);
        }
        let job = Job {
            step,
            op,
            images: Arc::clone(&planned.images),
            pieces: Arc::clone(&planned.pieces),
            groups: Arc::clone(&planned.groups),
            staged: Some(staged),
            state_json: texts.state_json.into(),
            per_rank_json: texts.per_rank_json.into(),
            overwrite: options.overwrite,
            blocking: options.blocking,
            metrics: options.metrics.clone(),
            stage: options.stage,
            ..Job::default()
        };
        Ok((job, started.elapsed()))
    }

    fn identity(&self, step: i64, op: u64, options: &SaveOptions) -> Result<Vec<u8>> {
        let place = self.slots.place();
        let identity = Identity {
            run: place.run.clone(),
            root: place.root.clone().unwrap_or_default(),
            rank: place.rank,
            world_size: place.world_size,
            step,
            op,
            overwrite: options.overwrite,
            metrics: options.metrics.clone(),
            stage: options.stage,
        };
        serde_json::to_vec(&identity).map_err(|e| Error::invalid("run id", "text", e))
    }

    fn free_slot(&self, step: i64, bytes: usize, options: &SaveOptions) -> Result<Slot> {
        let latest = self.place.room.deadline();
        let deadline = options.skip_after.map_or(latest, |wait| latest.min(Instant::now() + wait));
        match self.slots.acquire(bytes, deadline) {
            Err(Error::Timeout { .. }) if options.skip_after.is_some() => {
                Err(Error::Skipped { rank: self.place.room.rank, step })
            }
            other => other,
        }
    }

    /// Snapshots that a killed process of this run and rank left, each checked byte by byte.
    pub fn left(&self) -> Vec<Left> {
        self.claims.look(self.slots.place())
    }

    /// Commits one of [`Checkpointer::left`]. All ranks call it for the same one.
    pub fn adopt(&self, step: i64, op: u64) -> Result<SaveHandle> {
        self.check_process()?;
        let number = self.next_op();
        let found = match self.claims.take(&self.slots, step, op) {
            Ok(found) => found,
            Err(error) => {
                let _ = self.refuse_op(step, number, &error.to_string());
                return Err(error);
            }
        };
        let job = Job {
            step,
            op: number,
            images: Arc::new(found.images),
            pieces: Arc::new(found.pieces),
            groups: Arc::new(found.groups),
            staged: Some(found.staged),
            state_json: found.state_json,
            per_rank_json: found.per_rank_json,
            overwrite: found.identity.overwrite,
            metrics: found.identity.metrics,
            stage: found.identity.stage,
            ..Job::default()
        };
        self.enqueue(job, Duration::ZERO)
    }

    /// Removes what was not adopted, of this rank.
    pub fn drop_left(&self) {
        self.claims.drop_all(self.slots.place());
    }

    /// Removes every slot of this run that no process holds; for when all ranks have adopted or
    /// dropped theirs.
    pub fn sweep_left(&self) {
        Claims::sweep(self.slots.place());
    }
}
