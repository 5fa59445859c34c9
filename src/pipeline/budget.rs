//! Who may have how many bytes: the memory limit, and what the caller still holds of it.
//!
//! Steps are funded in their order, each completely before it starts, so a funded step never waits
//! for memory. Nothing can block for good but a caller that holds batches, and
//! [`Budget::only_held`] recognises exactly that. Counters are atomics, not a lock: a batch that a
//! forked child inherited must be droppable whatever the parent's threads were doing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// The memory limit of a loader.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    limit_bytes: u64,
    owner_pid: u32,
    used_bytes: AtomicU64,
    held_bytes: AtomicU64,
    held_private_bytes: AtomicU64,
    held_batches: AtomicUsize,
    freed: Notify,
}

/// Bytes taken from a budget; they return when it is dropped.
#[derive(Debug)]
pub struct Charge {
    bytes: u64,
    budget: Budget,
}

/// A delivered batch's claim: counts as held by the caller until dropped.
#[derive(Debug)]
pub struct Lease {
    bytes: u64,
    budget: Budget,
    // Dropped after `held_bytes` fell, so that `only_held` is never true too early.
    charge: Option<Charge>,
}

impl Budget {
    /// A budget of `limit_bytes`.
    pub fn new(limit_bytes: u64) -> Self {
        Self(Arc::new(Inner {
            limit_bytes,
            owner_pid: std::process::id(),
            used_bytes: AtomicU64::new(0),
            held_bytes: AtomicU64::new(0),
            held_private_bytes: AtomicU64::new(0),
            held_batches: AtomicUsize::new(0),
            freed: Notify::new(),
        }))
    }

    /// The limit.
    pub fn limit_bytes(&self) -> u64 {
        self.0.limit_bytes
    }

    /// Takes `bytes` if they are free now.
    pub fn try_charge(&self, bytes: u64) -> Option<Charge> {
        let fits = |used: u64| {
            let sum = used.checked_add(bytes)?;
            (sum <= self.0.limit_bytes).then_some(sum)
        };
        let taken =
            self.0.used_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).is_ok();
        taken.then(|| Charge { bytes, budget: self.clone() })
    }

    /// Waits for `bytes`, which must not be more than the limit.
    pub async fn charge(&self, bytes: u64) -> Charge {
        loop {
            let freed = self.0.freed.notified();
            tokio::pin!(freed);
            // Listens before looking, so that bytes freed in between are not missed.
            freed.as_mut().enable();
            if let Some(charge) = self.try_charge(bytes) {
                return charge;
            }
            freed.await;
        }
    }

    /// Marks a batch as held by the caller. `charge` is `None` for private memory.
    pub fn lease(&self, charge: Option<Charge>, private_bytes: u64) -> Lease {
        let bytes = charge.as_ref().map_or(private_bytes, |c| c.bytes);
        let lease = Lease { bytes, budget: self.clone(), charge };
        lease.counter().fetch_add(bytes, Ordering::AcqRel);
        self.0.held_batches.fetch_add(usize::from(bytes > 0), Ordering::AcqRel);
        lease
    }

    /// Whether everything in use, but for `own_bytes` of the asking step, is held by the caller.
    pub fn only_held(&self, own_bytes: u64) -> bool {
        let held = self.0.held_bytes.load(Ordering::Acquire);
        held > 0 && self.used_bytes() <= held + own_bytes
    }

    /// Waits until bytes came back, at most `wait`.
    pub async fn freed(&self, wait: Duration) {
        let _ = tokio::time::timeout(wait, self.0.freed.notified()).await;
    }

    /// Batches and bytes the caller holds, private ones included.
    pub fn held(&self) -> (usize, u64) {
        let bytes = self.0.held_bytes.load(Ordering::Acquire)
            + self.0.held_private_bytes.load(Ordering::Acquire);
        (self.0.held_batches.load(Ordering::Acquire), bytes)
    }

    /// Bytes in use, held ones included.
    pub fn used_bytes(&self) -> u64 {
        self.0.used_bytes.load(Ordering::Acquire)
    }
}

impl Charge {
    /// Bytes it stands for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Joins another charge of the same budget to this one.
    pub fn join(&mut self, mut other: Self) {
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Splits off the last `bytes` (or all there are).
    pub fn split(&mut self, bytes: u64) -> Self {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        Self { bytes, budget: self.budget.clone() }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let inner = &self.budget.0;
        inner.used_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        // In a forked child nobody waits, and the waiters' lock may have been held at the fork.
        if self.bytes > 0 && inner.owner_pid == std::process::id() {
            inner.freed.notify_waiters();
        }
    }
}

impl Lease {
    fn counter(&self) -> &AtomicU64 {
        let inner = &self.budget.0;
        if self.charge.is_some() { &inner.held_bytes } else { &inner.held_private_bytes }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.counter().fetch_sub(self.bytes, Ordering::AcqRel);
        let batches = &self.budget.0.held_batches;
        batches.fetch_sub(usize::from(self.bytes > 0), Ordering::AcqRel);
        drop(self.charge.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_means_delivered_and_not_dropped() {
        let budget = Budget::new(1000);
        let making = budget.try_charge(400).unwrap();
        assert!(!budget.only_held(0));
        let lease = budget.lease(Some(making), 0);
        assert!(budget.only_held(0));
        let next = budget.try_charge(100).unwrap();
        assert!(!budget.only_held(0) && budget.only_held(100));
        assert!(budget.try_charge(501).is_none());
        drop(next);
        let private = budget.lease(None, 77);
        assert_eq!((budget.held(), budget.used_bytes()), ((2, 477), 400));
        drop((lease, private));
        assert_eq!((budget.held(), budget.used_bytes()), ((0, 0), 0));
        assert!(!budget.only_held(0));
    }

    #[test]
    fn a_split_returns_its_own_bytes() {
        let budget = Budget::new(100);
        let mut whole = budget.try_charge(100).unwrap();
        drop(whole.split(30));
        assert_eq!((budget.used_bytes(), whole.bytes), (70, 70));
        drop(whole.split(1000));
        assert_eq!(budget.used_bytes(), 0);
        assert!(budget.try_charge(u64::MAX).is_none());
    }

    #[tokio::test]
    async fn freed_bytes_wake_the_waiting() {
        let budget = Budget::new(100);
        let first = budget.try_charge(60).unwrap();
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.charge(50).await.bytes }
        });
        tokio::task::yield_now().await;
        drop(first);
        assert_eq!(waiting.await.unwrap(), 50);
        assert_eq!(budget.used_bytes(), 0);
    }
}
