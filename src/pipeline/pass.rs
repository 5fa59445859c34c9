//! One pass over an epoch: finished batches wait here until they are handed out in order.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::Notify;

use super::batch::Batch;
use super::plan::Cost;
use super::work::StepWork;
use crate::error::{Error, Result};
use crate::order::Pass;

/// Steps started before they are handed out, at most: their bookkeeping and reads are bounded.
pub const STEPS_AHEAD_MAX: u64 = 64;

/// Steps that may be ahead whatever their size, more only while they are small: one to hand out,
/// one being decoded, one being read.
pub const STEPS_AHEAD_MIN: u64 = 3;

/// Bytes of steps ahead (batches, and what is read for those that are not done) beyond which only
/// [`STEPS_AHEAD_MIN`] steps are kept ahead. A local disk answers within a millisecond at some
/// GB/s, so a few megabytes would do; this much rides out a pause of tens of milliseconds.
pub const AHEAD_BYTES_SOFT_MAX: u64 = 96 << 20;

/// The same for object stores: 0.2 s until an answer comes, times 1.25 GB/s.
pub const AHEAD_BYTES_SOFT_MAX_REMOTE: u64 = 256 << 20;

/// Which steps of a pass this loader delivers: all, or every `stride`-th from `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// First step.
    pub first: u64,
    /// Distance to the next.
    pub stride: u64,
}

impl Share {
    /// Every step.
    pub const ALL: Self = Self { first: 0, stride: 1 };
}

/// A running pass.
#[derive(Debug)]
pub struct PassState {
    pass: Pass,
    share: Share,
    ahead_bytes_soft_max: u64,
    pid: u32,
    cancelled: AtomicBool,
    inner: Mutex<Inner>,
    ready: Condvar,
    /// The driver waits here for room.
    room: Notify,
    /// The driver waits here for leave to use private memory.
    private: Notify,
    /// Taken by the caller inside `next`: batches and positions would swap between two.
    caller: Mutex<()>,
}

#[derive(Debug)]
struct Inner {
    /// Next step to hand out.
    next: u64,
    done: BTreeMap<u64, Result<Batch>>,
    working: BTreeMap<u64, (Cost, Weak<StepWork>)>,
    ahead_bytes: u64,
    /// The driver waits for memory for this step, which has so many bytes already.
    blocked: Option<(u64, u64)>,
    /// The step that may use private memory.
    private: Option<u64>,
}

/// What a caller of [`PassState::take`] gets.
#[derive(Debug)]
pub enum Taken {
    /// The next batch.
    Batch(Box<Batch>),
    /// The next batch cannot be had.
    Failed(Error),
    /// The pass is over.
    End,
    /// The next batch is not ready.
    Pending {
        /// Its step waits for memory and has so many bytes already.
        blocked: Option<u64>,
    },
}

impl PassState {
    /// A pass of which nothing was handed out yet, over data that is `local` or in an object store.
    pub fn new(pass: Pass, share: Share, local: bool) -> Arc<Self> {
        let soft_max = if local { AHEAD_BYTES_SOFT_MAX } else { AHEAD_BYTES_SOFT_MAX_REMOTE };
        Arc::new(Self {
            pass,
            share,
            ahead_bytes_soft_max: soft_max,
            pid: std::process::id(),
            cancelled: AtomicBool::new(false),
            inner: Mutex::new(Inner {
                next: share.first,
                done: BTreeMap::new(),
                working: BTreeMap::new(),
                ahead_bytes: 0,
                blocked: None,
                private: None,
            }),
            ready: Condvar::new(),
            room: Notify::new(),
            private: Notify::new(),
            caller: Mutex::new(()),
        })
    }

    /// The pass by the cursor's count.
    pub fn pass(&self) -> &Pass {
        &self.pass
    }

    /// Its epoch.
    pub fn epoch(&self) -> u64 {
        self.pass.epoch
    }

    /// Its steps in order.
    pub fn steps(&self) -> impl Iterator<Item = u64> + use<> {
        let stride = usize::try_from(self.share.stride.max(1)).unwrap_or(usize::MAX);
        (self.share.first..self.pass.steps).step_by(stride)
    }

    /// Whether nothing was handed out yet.
    pub fn is_fresh(&self) -> bool {
        self.inner.lock().next == self.share.first
    }

    /// Whether it was made by this process: a forked child has none of its threads.
    pub fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    /// Stops it: finished batches are dropped, running jobs end without result.
    pub fn cancel(&self) {
        if !self.is_ours() {
            return;
        }
        self.cancelled.store(true, Ordering::Release);
        let done = std::mem::take(&mut self.inner.lock().done);
        drop(done);
        self.ready.notify_all();
        self.room.notify_one();
        self.private.notify_one();
    }

    /// Whether it was stopped.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// The one caller that may take batches now.
    pub fn caller(&self) -> Result<MutexGuard<'_, ()>> {
        let caller = self.caller.try_lock();
        caller.ok_or_else(|| Error::invalid("iterator", "one thread at a time", "another inside"))
    }

    /// Waits until another step may start.
    pub async fn room(&self) {
        while !self.is_cancelled() && !self.inner.lock().has_room(self.ahead_bytes_soft_max) {
            self.room.notified().await;
        }
    }

    /// Notes that the driver waits for memory for a step that has so many bytes already, or no
    /// longer waits.
    pub fn set_blocked(&self, step: Option<(u64, u64)>) {
        self.inner.lock().blocked = step;
        if step.is_some() {
            self.ready.notify_all();
        }
    }

    /// Lets the blocked step use private memory.
    pub fn allow_private(&self) {
        let mut inner = self.inner.lock();
        inner.private = inner.blocked.map(|(step, _)| step);
        drop(inner);
        self.private.notify_one();
    }

    /// Waits for that, or for the pass to be cancelled.
    pub async fn private_allowed(&self, step: u64) {
        while !self.is_cancelled() && self.inner.lock().private != Some(step) {
            self.private.notified().await;
        }
    }

    /// Notes a started step and what it takes.
    pub fn started(&self, step: u64, cost: Cost, work: &Arc<StepWork>) {
        let mut inner = self.inner.lock();
        inner.ahead_bytes += cost.output_bytes + cost.transient_bytes;
        inner.working.insert(step, (cost, Arc::downgrade(work)));
    }

    /// A step is done.
    pub fn deliver(&self, step: u64, result: Result<Batch>) {
        let mut inner = self.inner.lock();
        if self.is_cancelled() {
            return;
        }
        inner.done.insert(step, result);
        inner.forget_transient(step);
        drop(inner);
        self.ready.notify_all();
        self.room.notify_one();
    }

    /// The next batch if it is done; else waits up to `wait` for anything to change.
    pub fn take(&self, wait: Duration) -> Result<Taken> {
        let mut inner = self.inner.lock();
        let deadline = Instant::now() + wait;
        loop {
            if self.is_cancelled() {
                return Err(Error::Closed { what: "this iterator".into() });
            }
            let next = inner.next;
            if next >= self.pass.steps {
                return Ok(Taken::End);
            }
            if let Some(result) = inner.done.remove(&next) {
                inner.handed_out(self.share.stride);
                drop(inner);
                self.room.notify_one();
                return Ok(match result {
                    Ok(batch) => Taken::Batch(Box::new(batch)),
                    Err(error) => Taken::Failed(error),
                });
            }
            let blocked = inner.blocked.filter(|(step, _)| *step == next).map(|(_, own)| own);
            if blocked.is_some() || self.ready.wait_until(&mut inner, deadline).timed_out() {
                return Ok(Taken::Pending { blocked });
            }
        }
    }

    /// Sleeps until something changes, at most `wait`; for callers that found their step blocked.
    pub fn pause(&self, wait: Duration) {
        let mut inner = self.inner.lock();
        if !inner.done.contains_key(&inner.next) && !self.is_cancelled() {
            self.ready.wait_for(&mut inner, wait);
        }
    }

    /// What the next step is waiting for, for messages.
    pub fn waiting_for(&self) -> String {
        let inner = self.inner.lock();
        let step = inner.next;
        let work = inner.working.get(&step).and_then(|(_, work)| work.upgrade());
        drop(inner);
        match work {
            Some(work) => format!("batch of step {step}, which waits for {}", work.waiting_for()),
            None => format!("batch of step {step}, which waits for memory"),
        }
    }
}

/// Held by whoever makes a step: if that panics, the step becomes an error, since a caller would
/// wait for good for a batch that nobody makes any more.
#[derive(Debug)]
pub struct Watch {
    pass: Arc<PassState>,
    /// The step being made.
    pub step: u64,
}

impl Watch {
    /// Watches over `step`.
    pub fn new(pass: &Arc<PassState>, step: u64) -> Self {
        Self { pass: Arc::clone(pass), step }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.pass.deliver(self.step, Err(broken(self.step)));
        }
    }
}

fn broken(step: u64) -> Error {
    Error::Io {
        op: "make",
        path: format!("batch of step {step}"),
        source: std::io::Error::other("the loader panicked"),
        advice: "report it with the panic's message; starting a new pass may work".into(),
    }
}

impl Inner {
    fn has_room(&self, ahead_bytes_soft_max: u64) -> bool {
        let ahead = self.working.len() as u64;
        ahead < STEPS_AHEAD_MIN
            || (ahead < STEPS_AHEAD_MAX && self.ahead_bytes < ahead_bytes_soft_max)
    }

    /// What was read for a step is gone when it is done.
    fn forget_transient(&mut self, step: u64) {
        if let Some((cost, _)) = self.working.get_mut(&step) {
            self.ahead_bytes -= std::mem::take(&mut cost.transient_bytes);
        }
    }

    fn handed_out(&mut self, stride: u64) {
        if let Some((cost, _)) = self.working.remove(&self.next) {
            self.ahead_bytes -= cost.output_bytes + cost.transient_bytes;
        }
        self.next += stride.max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{Cursor, Order, Partition, Shuffle};

    #[test]
    fn a_panic_while_making_a_step_ends_the_wait_for_it() {
        let order = Order::new(8, 0, Shuffle::Sequential).unwrap();
        let partition = Partition::new(2, 1, 0, false).unwrap();
        let pass = Cursor::new(order, partition, "f").begin_pass();
        let state = PassState::new(pass, Share::ALL, true);
        let maker = std::thread::spawn({
            let state = Arc::clone(&state);
            move || {
                let mut watch = Watch::new(&state, 7);
                watch.step = 0;
                panic!("on purpose");
            }
        });
        assert!(maker.join().is_err());
        let taken = state.take(Duration::from_mins(1)).unwrap();
        assert!(matches!(taken, Taken::Failed(Error::Io { .. })), "{taken:?}");
        drop(Watch::new(&state, 1));
        assert!(matches!(state.take(Duration::ZERO).unwrap(), Taken::Pending { .. }));
    }
}
