//! Which positions of an epoch a step of a rank covers.
//!
//! With G = batch_size × world_size, step s from start P covers positions [P + s·G, P + (s+1)·G)
//! and rank r the slice [r·batch_size, (r+1)·batch_size) of each. Positions past the end wrap
//! around from the start of the epoch's order and are marked invalid, so that all ranks step
//! equally often.

use crate::error::{Error, Result};

/// Largest global batch: keeps `start + step · global` far from overflow.
const GLOBAL_BATCH_MAX: u64 = 1 << 32;

/// A rank's share of every global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    batch_size: u64,
    world_size: u64,
    rank: u64,
    drop_last: bool,
}

/// One sample of a batch: its position in the epoch, and whether it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Position in the epoch's order, below the number of samples.
    pub position: u64,
    /// False for padding of the tail: the sample was handed out elsewhere in this epoch.
    pub valid: bool,
}

impl Partition {
    /// A share of `batch_size` samples for `rank` of `world_size`. `drop_last` drops the tail that
    /// does not fill a global batch instead of padding it.
    pub fn new(batch_size: u64, world_size: u64, rank: u64, drop_last: bool) -> Result<Self> {
        if batch_size == 0 {
            return Err(Error::invalid("batch_size", "at least 1", batch_size));
        }
        if world_size == 0 {
            return Err(Error::invalid("world_size", "at least 1", world_size));
        }
        if rank >= world_size {
            let expected = format!("0 to {} (world_size - 1)", world_size - 1);
            return Err(Error::invalid("rank", expected, rank));
        }
        match batch_size.checked_mul(world_size) {
            Some(global) if global <= GLOBAL_BATCH_MAX => {
                Ok(Self { batch_size, world_size, rank, drop_last })
            }
            _ => Err(Error::invalid(
                "batch_size × world_size",
                format!("at most {GLOBAL_BATCH_MAX}"),
                format!("{batch_size} × {world_size}"),
            )),
        }
    }

    /// Samples of one batch of one rank.
    pub fn batch_size(&self) -> u64 {
        self.batch_size
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u64 {
        self.world_size
    }

    /// This rank.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// Whether the tail is dropped.
    pub fn drop_last(&self) -> bool {
        self.drop_last
    }

    /// G: samples of one step over all ranks.
    pub fn global_batch(&self) -> u64 {
        self.batch_size * self.world_size
    }

    /// Steps from `start` to the end of an epoch of `samples`; the same on every rank.
    pub fn steps(&self, samples: u64, start: u64) -> u64 {
        let left = samples.saturating_sub(start);
        if self.drop_last { left / self.global_batch() } else { left.div_ceil(self.global_batch()) }
    }

    /// Samples handed out globally when `steps` steps from `start` are done (padding not counted).
    pub fn position_after(&self, samples: u64, start: u64, steps: u64) -> u64 {
        start.saturating_add(steps.saturating_mul(self.global_batch())).min(samples)
    }

    /// This rank's samples of step `step` from `start`: always `batch_size` slots, none if the
    /// epoch is empty.
    pub fn slots(&self, samples: u64, start: u64, step: u64) -> impl Iterator<Item = Slot> + use<> {
        let first = start
            .saturating_add(step.saturating_mul(self.global_batch()))
            .saturating_add(self.rank * self.batch_size);
        let count = if samples == 0 { 0 } else { self.batch_size };
        (0..count).map(move |i| {
            let position = first.saturating_add(i);
            Slot { position: position % samples, valid: position < samples }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(p: &Partition, samples: u64, start: u64, step: u64) -> Vec<(u64, bool)> {
        p.slots(samples, start, step).map(|s| (s.position, s.valid)).collect()
    }

    #[test]
    fn a_rank_takes_its_slice_of_every_global_batch() {
        let rank1 = Partition::new(3, 2, 1, false).unwrap();
        assert_eq!(rank1.steps(20, 0), 4);
        assert_eq!(slots(&rank1, 20, 0, 0), [(3, true), (4, true), (5, true)]);
        assert_eq!(slots(&rank1, 20, 4, 1), [(13, true), (14, true), (15, true)]);
    }

    #[test]
    fn the_tail_wraps_and_is_marked() {
        let rank1 = Partition::new(3, 2, 1, false).unwrap();
        // 20 = 3·6 + 2: the last global batch is 18, 19, then padding 0, 1, 2, 3.
        assert_eq!(slots(&rank1, 20, 0, 3), [(1, false), (2, false), (3, false)]);
        let rank0 = Partition::new(3, 2, 0, false).unwrap();
        assert_eq!(slots(&rank0, 20, 0, 3), [(18, true), (19, true), (0, false)]);
    }

    #[test]
    fn fewer_samples_than_a_batch_wrap_more_than_once() {
        let p = Partition::new(5, 1, 0, false).unwrap();
        assert_eq!(p.steps(2, 0), 1);
        let expected = [(0, true), (1, true), (0, false), (1, false), (0, false)];
        assert_eq!(slots(&p, 2, 0, 0), expected);
    }

    #[test]
    fn drop_last_counts_whole_steps_only() {
        let p = Partition::new(4, 2, 0, true).unwrap();
        assert_eq!(p.steps(20, 0), 2);
        assert_eq!(p.steps(20, 13), 0);
        assert_eq!(p.steps(7, 0), 0);
        assert_eq!(p.position_after(20, 0, 2), 16);
    }

    #[test]
    fn empty_epochs_have_no_steps() {
        let p = Partition::new(4, 2, 0, false).unwrap();
        assert_eq!((p.steps(0, 0), p.slots(0, 0, 0).count()), (0, 0));
        assert_eq!(p.steps(5, 9), 0);
    }

    #[test]
    fn impossible_shares_are_refused_by_name() {
        let text = |b, w, r| Partition::new(b, w, r, false).unwrap_err().to_string();
        assert!(text(0, 1, 0).starts_with("batch_size"));
        assert!(text(1, 0, 0).starts_with("world_size"));
        assert!(text(1, 2, 2).contains("0 to 1"));
        assert!(text(u64::MAX, 2, 0).starts_with("batch_size × world_size"));
    }
}
