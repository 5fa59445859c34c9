//! Who may have how many bytes: the memory limit as permits, and what the caller still holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::memory::{Permit, Permits};

/// The memory limit of a loader. Steps are funded in their order, each completely before it
/// starts, so a funded step never waits for memory and nothing can deadlock but the caller holding
/// batches, which [`Budget::only_held`] recognises.
#[derive(Debug)]
pub struct Budget {
    permits: Permits,
    limit_bytes: u64,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    used_bytes: AtomicU64,
    held_bytes: AtomicU64,
    held_batches: AtomicUsize,
    held_private_bytes: AtomicU64,
}

/// Bytes taken from a budget; they return when it is dropped.
#[derive(Debug)]
pub struct Charge {
    bytes: u64,
    counts: Arc<Counts>,
    // Declared last: the counter falls before a waiting step is woken.
    permit: Option<Permit>,
}

/// A delivered batch's claim: counts as held by the caller until dropped.
#[derive(Debug)]
pub struct Lease {
    bytes: u64,
    private: bool,
    counts: Arc<Counts>,
    _charge: Option<Charge>,
}

impl Budget {
    /// A budget of `limit_bytes`.
    pub fn new(limit_bytes: u64) -> Self {
        Self { permits: Permits::new(limit_bytes), limit_bytes, counts: Arc::default() }
    }

    /// The limit.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Waits for `bytes`.
    pub async fn charge(&self, bytes: u64) -> Charge {
        let permit = if bytes == 0 { None } else { Some(self.permits.acquire(bytes).await) };
        self.counts.used_bytes.fetch_add(bytes, Ordering::AcqRel);
        Charge { bytes, counts: Arc::clone(&self.counts), permit }
    }

    /// Marks a batch as held by the caller. `charge` is `None` for private memory.
    pub fn lease(&self, charge: Option<Charge>, memory_bytes: u64) -> Lease {
        let counts = Arc::clone(&self.counts);
        let bytes = charge.as_ref().map_or(memory_bytes, |c| c.bytes);
        let private = charge.is_none();
        if private {
            counts.held_private_bytes.fetch_add(bytes, Ordering::AcqRel);
        } else {
            counts.held_bytes.fetch_add(bytes, Ordering::AcqRel);
        }
        counts.held_batches.fetch_add(usize::from(bytes > 0), Ordering::AcqRel);
        Lease { bytes, private, counts, _charge: charge }
    }

    /// Whether everything in use is held by the caller.
    pub fn only_held(&self) -> bool {
        let held = self.counts.held_bytes.load(Ordering::Acquire);
        held > 0 && self.counts.used_bytes.load(Ordering::Acquire) <= held
    }

    /// Batches and bytes the caller holds, private ones included.
    pub fn held(&self) -> (usize, u64) {
        let bytes = self.counts.held_bytes.load(Ordering::Acquire)
            + self.counts.held_private_bytes.load(Ordering::Acquire);
        (self.counts.held_batches.load(Ordering::Acquire), bytes)
    }

    /// Bytes in use, held ones included.
    pub fn used_bytes(&self) -> u64 {
        self.counts.used_bytes.load(Ordering::Acquire)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.counts.used_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        drop(self.permit.take());
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let bytes =
            if self.private { &self.counts.held_private_bytes } else { &self.counts.held_bytes };
        bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        self.counts.held_batches.fetch_sub(usize::from(self.bytes > 0), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn held_means_delivered_and_not_dropped() {
        let budget = Budget::new(1000);
        let making = budget.charge(400).await;
        assert!(!budget.only_held());
        let lease = budget.lease(Some(making), 400);
        assert!(budget.only_held());
        let next = budget.charge(100).await;
        assert!(!budget.only_held());
        drop(next);
        let private = budget.lease(None, 77);
        assert_eq!((budget.held(), budget.used_bytes()), ((2, 477), 400));
        drop((lease, private));
        assert_eq!((budget.held(), budget.used_bytes()), ((0, 0), 0));
        assert!(!budget.only_held());
        budget.charge(1000).await;
    }
}
