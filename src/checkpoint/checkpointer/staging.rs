//! The part of a save that stops the trainer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Checkpointer, SaveOptions};
use crate::checkpoint::commit::{Job, Packer};
use crate::checkpoint::layout::step_dir;
use crate::checkpoint::meet::Tick;
use crate::checkpoint::plan::TensorIn;
use crate::checkpoint::snapshot::{DATA_START, Identity, Planned, Record, Staged, seal, stage};
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
        let windows = self.place.pack.as_ref().is_some_and(Packer::is_compressing);
        let planned = Arc::new(Planned::new(room.rank, room.world_size, tensors, windows)?);
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
        let doing = self.place.room.words.begin(format!("planning the save of step {step}"));
        // Whoever saves before restoring starts anew.
        self.drop_left();
        self.claims.forget();
        let planned = self.planned(tensors)?;
        self.proof.look(self.place.store.as_ref(), planned.data_bytes as u64)?;
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
        doing.now(format!("waiting for a free staging slot for step {step}"));
        let mut slot = self.free_slot(step, bytes, options)?;
        doing.now(format!("copying step {step} into its staging slot"));
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
}
