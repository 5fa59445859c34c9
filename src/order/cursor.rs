//! How a loader's position moves: the one place that knows passes, epochs, break, load and
//! `set_epoch`. Pure, so that every rule has a test without a dataset.
//!
//! Rules:
//! - A pass starts at the position and runs to the epoch's end. Each batch handed out moves the
//!   position; prefetched ones do not.
//! - With the last batch of an epoch the state is (e+1, 0). An epoch without a single step (smaller
//!   than a global batch under `drop_last`) ends when its pass is exhausted.
//! - A new pass after a `break` restarts the epoch from 0, unless a state was loaded since: a
//!   loaded position counts until the first batch after it, however often a pass is started before.
//! - `set_epoch` with the current epoch changes nothing; another epoch starts at 0.
//! - Starting a pass, loading a state or moving to another epoch makes older passes stale.

use super::partition::Partition;
use super::shuffle::Order;
use super::state::LoaderState;
use crate::error::{Error, Result};

/// Where one loader stands.
#[derive(Debug, Clone)]
pub struct Cursor {
    order: Order,
    partition: Partition,
    fingerprint: String,
    epoch: u64,
    position: u64,
    /// The position came from `load` and no batch was handed out since.
    loaded: bool,
    /// Names the pass that may move the position.
    generation: u64,
    /// Start of the running pass, which `len` speaks of until the pass is over.
    running: Option<Pass>,
}

/// One pass over (the rest of) an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The epoch.
    pub epoch: u64,
    /// Position of its first sample.
    pub start: u64,
    /// Number of steps, the same on every rank.
    pub steps: u64,
    generation: u64,
}

impl Cursor {
    /// A cursor at the start of epoch 0.
    pub fn new(order: Order, partition: Partition, fingerprint: impl Into<String>) -> Self {
        Self {
            order,
            partition,
            fingerprint: fingerprint.into(),
            epoch: 0,
            position: 0,
            loaded: false,
            generation: 0,
            running: None,
        }
    }

    /// The order.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// This rank's share.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Steps of the running pass, or of the next one if none runs.
    #[expect(clippy::len_without_is_empty, reason = "the name of Python's len(loader)")]
    pub fn len(&self) -> u64 {
        match self.running {
            Some(pass) => pass.steps,
            None => self.partition.steps(self.order.samples(), self.start()),
        }
    }

    fn start(&self) -> u64 {
        if self.loaded { self.position } else { 0 }
    }

    /// Starts a pass and makes older ones stale.
    pub fn begin_pass(&mut self) -> Pass {
        self.position = self.start();
        self.generation += 1;
        let pass = Pass {
            epoch: self.epoch,
            start: self.position,
            steps: self.partition.steps(self.order.samples(), self.position),
            generation: self.generation,
        };
        self.running = Some(pass);
        pass
    }

    /// Whether `pass` may still hand out batches.
    pub fn is_current(&self, pass: &Pass) -> bool {
        self.generation == pass.generation
    }

    /// Refuses a pass that a newer one, a loaded state or `set_epoch` made stale.
    pub fn check_current(&self, pass: &Pass) -> Result<()> {
        if self.is_current(pass) {
            return Ok(());
        }
        Err(Error::invalid(
            "iterator",
            "the newest iterator of this loader",
            "an older one (iter(), load_state_dict() or set_epoch() was called since)",
        ))
    }

    /// Batch `step` (0-based) of `pass` reaches the caller.
    pub fn handed_out(&mut self, pass: &Pass, step: u64) -> Result<()> {
        self.check_current(pass)?;
        if step >= pass.steps {
            let expected = format!("below {} (steps of this pass)", pass.steps);
            return Err(Error::invalid("step", expected, step));
        }
        if step + 1 == pass.steps {
            self.enter(pass.epoch.saturating_add(1));
        } else {
            let samples = self.order.samples();
            self.position = self.partition.position_after(samples, pass.start, step + 1);
            self.loaded = false;
        }
        Ok(())
    }

    /// The caller has seen the end of `pass`. Needed for passes without steps; otherwise the last
    /// batch has ended the epoch already and this changes only what `len` speaks of.
    pub fn end_pass(&mut self, pass: &Pass) {
        if !self.is_current(pass) {
            return;
        }
        if pass.steps == 0 && self.running.is_some() {
            self.enter(pass.epoch.saturating_add(1));
        }
        self.running = None;
    }

    fn enter(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.position = 0;
        self.loaded = false;
    }

    /// The state to store: counts batches handed out, the same on every rank.
    pub fn state(&self) -> LoaderState {
        LoaderState::new(&self.order, &self.fingerprint, self.epoch, self.position)
    }

    /// Continues from a stored state, or refuses it by the field that differs and stays as it is.
    pub fn load(&mut self, state: &LoaderState) -> Result<()> {
        state.check(&self.order, &self.fingerprint)?;
        self.enter(state.epoch);
        self.position = state.position;
        self.loaded = true;
        self.interrupt();
        Ok(())
    }

    /// Moves to `epoch`; the current one keeps its position.
    pub fn set_epoch(&mut self, epoch: u64) {
        if epoch != self.epoch {
            self.enter(epoch);
            self.interrupt();
        } else if self.running.is_some_and(|pass| pass.epoch != epoch) {
            // Its last batch is out, so `len` may speak of the next pass already.
            self.running = None;
        }
    }

    fn interrupt(&mut self) {
        self.generation += 1;
        self.running = None;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Shuffle;
    use super::*;

    fn cursor(samples: u64, batch: u64, world: u64, drop_last: bool) -> Cursor {
        let order = Order::new(samples, 1, Shuffle::Full).unwrap();
        Cursor::new(order, Partition::new(batch, world, 0, drop_last).unwrap(), "f")
    }

    /// Hands out up to `limit` batches of a new pass and says whether it was exhausted.
    fn run(cursor: &mut Cursor, limit: u64) -> (Pass, bool) {
        let pass = cursor.begin_pass();
        for step in 0..pass.steps.min(limit) {
            cursor.handed_out(&pass, step).unwrap();
        }
        let exhausted = pass.steps <= limit;
        if exhausted {
            cursor.end_pass(&pass);
        }
        (pass, exhausted)
    }

    fn at(cursor: &Cursor) -> (u64, u64) {
        (cursor.state().epoch, cursor.state().position)
    }

    #[test]
    fn epochs_advance_by_themselves() {
        let mut c = cursor(10, 2, 2, false);
        assert_eq!((at(&c), c.len()), ((0, 0), 3));
        for epoch in 0..3 {
            let (pass, done) = run(&mut c, 99);
            assert!(done);
            assert_eq!((pass.epoch, pass.start, pass.steps), (epoch, 0, 3));
            assert_eq!(at(&c), (epoch + 1, 0));
        }
    }

    #[test]
    fn the_last_batch_ends_the_epoch_before_the_iterator_does() {
        let mut c = cursor(10, 2, 2, true);
        let pass = c.begin_pass();
        c.handed_out(&pass, 0).unwrap();
        assert_eq!(at(&c), (0, 4));
        c.handed_out(&pass, 1).unwrap();
        assert_eq!(at(&c), (1, 0), "the dropped tail ends the epoch too");
        assert_eq!(c.len(), 2, "still the running pass");
        assert!(c.handed_out(&pass, 2).unwrap_err().to_string().contains("below 2"));
        c.end_pass(&pass);
        c.end_pass(&pass);
        assert_eq!(at(&c), (1, 0));
    }

    #[test]
    fn break_restarts_unless_a_state_was_loaded_since() {
        let mut c = cursor(10, 1, 1, false);
        run(&mut c, 4);
        let state = c.state();
        assert_eq!(at(&c), (0, 4));
        let (pass, _) = run(&mut c, 2);
        assert_eq!(pass.start, 0);
        c.load(&state).unwrap();
        assert_eq!((at(&c), c.len()), ((0, 4), 6));
        let _abandoned_unused = c.begin_pass();
        let (pass, _) = run(&mut c, 2);
        assert_eq!((pass.start, pass.steps), (4, 6), "no batch was handed out since the load");
        assert_eq!(at(&c), (0, 6));
        assert_eq!(run(&mut c, 99).0.start, 0, "after a break it restarts");
    }

    #[test]
    fn set_epoch_keeps_the_current_one() {
        let mut c = cursor(10, 1, 1, false);
        c.load(&LoaderState { epoch: 3, position: 4, ..c.state() }).unwrap();
        c.set_epoch(3);
        assert_eq!(at(&c), (3, 4));
        run(&mut c, 99);
        c.set_epoch(4);
        assert_eq!((at(&c), c.len()), ((4, 0), 10));
        c.set_epoch(7);
        assert_eq!(at(&c), (7, 0));
        c.load(&LoaderState { epoch: 7, position: 4, ..c.state() }).unwrap();
        c.set_epoch(2);
        assert_eq!((at(&c), run(&mut c, 1).0.start), ((2, 0), 0));
    }

    #[test]
    fn older_passes_are_refused() {
        let mut c = cursor(10, 1, 1, false);
        let first = c.begin_pass();
        c.handed_out(&first, 0).unwrap();
        let second = c.begin_pass();
        assert!(c.handed_out(&first, 1).unwrap_err().to_string().starts_with("iterator"));
        c.end_pass(&first);
        assert!(c.is_current(&second));
        c.load(&c.state()).unwrap();
        assert!(c.check_current(&second).is_err());
        let third = c.begin_pass();
        c.set_epoch(0);
        assert!(c.is_current(&third), "the current epoch changes nothing");
        c.set_epoch(5);
        assert!(!c.is_current(&third));
    }

    #[test]
    fn passes_without_steps_still_move_on() {
        let mut c = cursor(3, 2, 2, true);
        assert_eq!(run(&mut c, 99).0.steps, 0);
        assert_eq!(at(&c), (1, 0));
        let tail = LoaderState { epoch: 1, position: 2, ..c.state() };
        c.load(&tail).unwrap();
        assert_eq!(c.state(), tail, "loading is a fixed point");
        run(&mut c, 99);
        assert_eq!(at(&c), (2, 0));
        let mut empty = cursor(0, 1, 1, false);
        assert_eq!((run(&mut empty, 9).0.steps, at(&empty)), (0, (1, 0)));
    }

    #[test]
    fn a_refused_state_changes_nothing() {
        let mut c = cursor(10, 1, 1, false);
        let (pass, _) = run(&mut c, 3);
        let before = c.state();
        assert!(c.load(&LoaderState { seed: 9, ..before.clone() }).is_err());
        assert!(c.state() == before && c.is_current(&pass));
    }

    #[test]
    fn the_largest_epoch_does_not_overflow() {
        let mut c = cursor(2, 1, 1, false);
        c.load(&LoaderState { epoch: u64::MAX, position: 2, ..c.state() }).unwrap();
        run(&mut c, 9);
        run(&mut c, 9);
        assert_eq!(c.state().epoch, u64::MAX);
    }
}
