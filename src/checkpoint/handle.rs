//! What a caller holds while a save runs in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::commit::Tally;
use crate::error::{Error, Result};

/// Outcome of a save; shared, since the handle and the next call may both report it.
pub type Outcome = Result<(), Arc<Error>>;

#[derive(Debug, Default)]
struct State {
    outcome: Mutex<Option<Outcome>>,
    /// The ranks have met, so that the staged bytes can be adopted.
    joined: AtomicBool,
    tally: Mutex<Option<Tally>>,
    changed: Condvar,
}

/// A running or finished save.
#[derive(Debug, Clone)]
pub struct SaveHandle {
    state: Arc<State>,
    /// The step being saved.
    pub step: i64,
    /// How long the caller of `save` was stopped for staging.
    pub staged: Duration,
}

impl SaveHandle {
    /// A save that has just been staged.
    pub fn new(step: i64, staged: Duration) -> Self {
        Self { state: Arc::default(), step, staged }
    }

    /// Says that the staged bytes can be adopted by another process from now on.
    pub fn set_joined(&self) {
        let _changing = self.state.outcome.lock();
        self.state.joined.store(true, Ordering::Release);
        self.state.changed.notify_all();
    }

    /// Waits until the staged bytes can be adopted or the save is over; false at the deadline.
    pub fn wait_joined(&self, deadline: Instant) -> bool {
        let mut outcome = self.state.outcome.lock();
        while outcome.is_none() && !self.state.joined.load(Ordering::Acquire) {
            if self.state.changed.wait_until(&mut outcome, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    /// Puts down what this rank's part of the save came to.
    pub fn set_tally(&self, tally: Tally) {
        *self.state.tally.lock() = Some(tally);
    }

    /// What this rank's part of the save came to; `None` until it is over, and where nothing is
    /// packed.
    pub fn tally(&self) -> Option<Tally> {
        *self.state.tally.lock()
    }

    /// Tells everybody who waits. Only the first call counts.
    pub fn finish(&self, outcome: Result<()>) {
        self.state.outcome.lock().get_or_insert(outcome.map_err(Arc::new));
        self.state.changed.notify_all();
    }

    /// Whether the outcome is known.
    pub fn done(&self) -> bool {
        self.state.outcome.lock().is_some()
    }

    /// Waits for the outcome; `None` at the deadline.
    pub fn poll(&self, deadline: Instant) -> Option<Outcome> {
        let mut outcome = self.state.outcome.lock();
        while outcome.is_none() {
            if self.state.changed.wait_until(&mut outcome, deadline).timed_out() {
                break;
            }
        }
        outcome.clone()
    }

    /// Waits at most `timeout`; returns the committed step.
    pub fn wait(&self, timeout: Duration) -> Result<i64, Arc<Error>> {
        match self.poll(Instant::now() + timeout) {
            Some(outcome) => outcome.map(|()| self.step),
            None => Err(Arc::new(Error::Timeout {
                what: format!("the commit of step {}", self.step),
                waited: timeout,
                advice: "the save goes on; wait again".into(),
            })),
        }
    }
}
