//! A semaphore over bytes: queues are bounded by what they hold, not by how many things they hold.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Byte permits, handed out first come, first served.
#[derive(Debug, Clone)]
pub struct Permits {
    slots: Arc<Semaphore>,
    limit_bytes: u64,
    /// Bytes per semaphore unit: a request counts units in a u32.
    unit_bytes: u64,
}

/// Bytes taken from [`Permits`], returned on drop.
#[derive(Debug)]
pub struct Permit {
    slot: OwnedSemaphorePermit,
    unit_bytes: u64,
}

impl Permit {
    /// Bytes this permit stands for (as counted, that is after clamping and rounding).
    pub fn bytes(&self) -> u64 {
        self.slot.num_permits() as u64 * self.unit_bytes
    }
}

impl Permits {
    /// Permits for `limit_bytes` in all, at least one byte.
    pub fn new(limit_bytes: u64) -> Self {
        let limit_bytes = limit_bytes.max(1);
        let unit_bytes = limit_bytes.div_ceil(u64::from(u32::MAX)).next_power_of_two();
        let units = (limit_bytes / unit_bytes) as usize;
        Self { slots: Arc::new(Semaphore::new(units)), limit_bytes, unit_bytes }
    }

    /// The limit.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Bytes not taken.
    pub fn available_bytes(&self) -> u64 {
        self.slots.available_permits() as u64 * self.unit_bytes
    }

    /// Waits for `bytes` in turn. More than the limit counts as the limit: such a request goes
    /// alone, but it goes.
    pub async fn acquire(&self, bytes: u64) -> Permit {
        loop {
            let slots = Arc::clone(&self.slots);
            // The semaphore is never closed, so this returns with the permit at the first turn.
            if let Ok(slot) = slots.acquire_many_owned(self.units(bytes)).await {
                return Permit { slot, unit_bytes: self.unit_bytes };
            }
        }
    }

    /// Takes `bytes` now, or nothing.
    pub fn try_acquire(&self, bytes: u64) -> Option<Permit> {
        let slots = Arc::clone(&self.slots);
        let slot = slots.try_acquire_many_owned(self.units(bytes)).ok()?;
        Some(Permit { slot, unit_bytes: self.unit_bytes })
    }

    fn units(&self, bytes: u64) -> u32 {
        let bytes = bytes.min(self.limit_bytes);
        // The limit itself may not be a multiple of the unit; it must still be reachable.
        let units = bytes.div_ceil(self.unit_bytes).min(self.limit_bytes / self.unit_bytes);
        u32::try_from(units).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn bytes_come_back_and_a_giant_goes_alone() {
        let permits = Permits::new(100);
        let first = permits.try_acquire(60).unwrap();
        assert_eq!((first.bytes(), permits.available_bytes()), (60, 40));
        assert!(permits.try_acquire(41).is_none());
        assert!(permits.acquire(1000).now_or_never().is_none());
        drop(first);
        assert_eq!(permits.acquire(1000).now_or_never().unwrap().bytes(), 100);
        assert_eq!(permits.available_bytes(), 100);
    }

    #[test]
    fn order_is_first_come_first_served() {
        let permits = Permits::new(10);
        let held = permits.try_acquire(8).unwrap();
        let mut large = Box::pin(permits.acquire(9));
        assert!((&mut large).now_or_never().is_none());
        // A small request that would fit must not overtake the large one for ever.
        assert!(permits.acquire(1).now_or_never().is_none());
        drop(held);
        assert_eq!(large.now_or_never().unwrap().bytes(), 9);
    }

    #[test]
    fn limits_beyond_u32_are_reachable() {
        let limit = (u64::from(u32::MAX) << 4) + 12345;
        let permits = Permits::new(limit);
        let all = permits.try_acquire(u64::MAX).unwrap();
        assert!(permits.try_acquire(1).is_none());
        assert!(limit - all.bytes() < 64);
    }
}
