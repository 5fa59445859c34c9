//! Full, block and sequential order: which sample stands at a position of an epoch.

use serde::{Deserialize, Serialize};

use super::permute::Permutation;
use super::random::{OPERATION_RESERVED, Stream};
use crate::error::{Error, Result};

/// Stream operations of the orders; part of the specification in `docs/order.md`.
const OPERATION_FULL: u32 = OPERATION_RESERVED;
const OPERATION_BLOCKS: u32 = OPERATION_RESERVED + 1;
const OPERATION_WINDOW: u32 = OPERATION_RESERVED + 2;

/// Largest dataset: positions and their sums stay far from overflow.
const SAMPLES_MAX: u64 = 1 << 56;

/// How samples are shuffled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shuffle {
    /// A bijection over all samples.
    Full,
    /// Permutes blocks of `block` samples, then positions inside windows of `window` blocks, for
    /// storage that dislikes random access.
    Block {
        /// Samples per block.
        block: u64,
        /// Blocks per window.
        window: u64,
    },
    /// Index order.
    Sequential,
}

impl Shuffle {
    /// `"block"` without numbers: 128 samples are a few MB to read at once for driving data, and
    /// 32 such blocks mix 4096 samples, several batches of a large job.
    pub const BLOCK_DEFAULT: Self = Self::Block { block: 128, window: 32 };
}

/// The order of every epoch of one dataset: three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    samples: u64,
    seed: u64,
    shuffle: Shuffle,
}

impl Order {
    /// An order over `samples` samples. Block and window must be at least 1.
    pub fn new(samples: u64, seed: u64, shuffle: Shuffle) -> Result<Self> {
        if samples > SAMPLES_MAX {
            return Err(Error::invalid("samples", format!("at most {SAMPLES_MAX}"), samples));
        }
        if let Shuffle::Block { block, window } = shuffle {
            // The product bounds every intermediate of the window arithmetic.
            if block == 0
                || window == 0
                || block.checked_mul(window).is_none_or(|w| w > SAMPLES_MAX)
            {
                return Err(Error::invalid(
                    "shuffle block and window",
                    format!("both at least 1, their product at most {SAMPLES_MAX}"),
                    format!("block {block}, window {window}"),
                ));
            }
        }
        Ok(Self { samples, seed, shuffle })
    }

    /// Number of samples.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The kind of shuffle.
    pub fn shuffle(&self) -> Shuffle {
        self.shuffle
    }

    /// The sample at `position` of `epoch`. For many positions of one epoch use [`Self::epoch`].
    pub fn at(&self, epoch: u64, position: u64) -> u64 {
        self.epoch(epoch).at(position)
    }

    /// One epoch's order, with its keys computed once.
    pub fn epoch(&self, epoch: u64) -> EpochOrder {
        let kind = match self.shuffle {
            Shuffle::Sequential => Kind::Sequential,
            Shuffle::Full => Kind::Full(self.permutation(self.samples, epoch, 0, OPERATION_FULL)),
            Shuffle::Block { block, window } => Kind::Block(self.blocks(epoch, block, window)),
        };
        EpochOrder { order: *self, epoch, kind }
    }

    fn permutation(&self, n: u64, epoch: u64, part: u64, operation: u32) -> Permutation {
        Permutation::new(n, &mut Stream::new(self.seed, epoch, part, operation))
    }

    fn blocks(&self, epoch: u64, block: u64, window: u64) -> Blocks {
        let count = self.samples.div_ceil(block);
        let slots = self.permutation(count, epoch, 0, OPERATION_BLOCKS);
        let short_slot = slots.invert(count.saturating_sub(1));
        Blocks { block, window, count, missing: count * block - self.samples, short_slot, slots }
    }
}

/// The order of one epoch.
#[derive(Debug, Clone)]
pub struct EpochOrder {
    order: Order,
    epoch: u64,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    Sequential,
    Full(Permutation),
    Block(Blocks),
}

impl EpochOrder {
    /// The epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The sample at `position`, which is taken modulo the number of samples (0 of an empty order).
    pub fn at(&self, position: u64) -> u64 {
        if self.order.samples == 0 {
            return 0;
        }
        let position = position % self.order.samples;
        match &self.kind {
            Kind::Sequential => position,
            Kind::Full(permutation) => permutation.apply(position),
            Kind::Block(blocks) => {
                let (window, first, len) = blocks.window_of(position, self.order.samples);
                let inside = self.order.permutation(len, self.epoch, window, OPERATION_WINDOW);
                blocks.sample(first + inside.apply(position - first))
            }
        }
    }
}

/// Blocks in permuted slots. The dataset's last block may be short by `missing` samples; wherever
/// its slot lands, the slots after it start that much earlier.
#[derive(Debug, Clone)]
struct Blocks {
    block: u64,
    window: u64,
    count: u64,
    missing: u64,
    short_slot: u64,
    slots: Permutation,
}

impl Blocks {
    /// Position at which `slot` starts.
    fn start(&self, slot: u64) -> u64 {
        let slot = slot.min(self.count);
        slot * self.block - if slot > self.short_slot { self.missing } else { 0 }
    }

    /// Window that holds `position`, its first position and its length.
    fn window_of(&self, position: u64, samples: u64) -> (u64, u64, u64) {
        let mut window = position / (self.window * self.block);
        // `missing` is less than one block, so the guess is right or one too low.
        if self.start((window + 1) * self.window) <= position {
            window += 1;
        }
        let first = self.start(window * self.window);
        let end = self.start((window + 1) * self.window).min(samples);
        (window, first, end - first)
    }

    /// The sample at a position of the concatenated slots.
    fn sample(&self, position: u64) -> u64 {
        let after_short = position >= self.start(self.short_slot + 1);
        let slot = (position + if after_short { self.missing } else { 0 }) / self.block;
        self.slots.apply(slot) * self.block + (position - self.start(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch_of(order: &Order, epoch: u64) -> Vec<u64> {
        let epoch = order.epoch(epoch);
        (0..order.samples()).map(|p| epoch.at(p)).collect()
    }

    #[test]
    fn block_order_is_a_bijection_for_every_small_shape() {
        for n in 0..=65 {
            for block in 1..=9 {
                for window in 1..=5 {
                    let order = Order::new(n, 11, Shuffle::Block { block, window }).unwrap();
                    for epoch in 0..3 {
                        let mut seen = epoch_of(&order, epoch);
                        seen.sort_unstable();
                        assert!(seen.iter().copied().eq(0..n), "{n} {block} {window}: {seen:?}");
                    }
                }
            }
        }
    }

    /// What block order is for: a window touches only its own blocks, each of them whole.
    #[test]
    fn a_window_reads_few_whole_blocks() {
        let order = Order::new(1000, 5, Shuffle::Block { block: 10, window: 4 }).unwrap();
        for window in epoch_of(&order, 0).chunks(40) {
            let mut blocks: Vec<u64> = window.iter().map(|s| s / 10).collect();
            blocks.sort_unstable();
            blocks.dedup();
            assert_eq!(blocks.len(), 4);
        }
    }

    #[test]
    fn epochs_and_seeds_differ_and_repeat() {
        for shuffle in [Shuffle::Full, Shuffle::BLOCK_DEFAULT] {
            let order = Order::new(10_000, 1, shuffle).unwrap();
            let first = epoch_of(&order, 0);
            assert_eq!(first, epoch_of(&order, 0));
            assert_ne!(first, epoch_of(&order, 1));
            let other = Order::new(10_000, 2, shuffle).unwrap();
            assert_ne!(first, epoch_of(&other, 0));
            assert!((0..10_000).all(|p| order.at(0, p) == first[p as usize]));
        }
    }

    #[test]
    fn sequential_is_index_order() {
        let order = Order::new(5, 1, Shuffle::Sequential).unwrap();
        assert_eq!(epoch_of(&order, 3), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn impossible_shapes_are_refused_by_name() {
        let refused = Order::new(5, 1, Shuffle::Block { block: 0, window: 1 }).unwrap_err();
        assert!(refused.to_string().contains("block 0"), "{refused}");
        assert!(Order::new(5, 1, Shuffle::Block { block: 1 << 40, window: 1 << 40 }).is_err());
        assert!(Order::new(u64::MAX, 1, Shuffle::Full).is_err());
        let huge = Order::new(1 << 56, 1, Shuffle::Block { block: 1 << 40, window: 3 }).unwrap();
        assert!(huge.at(7, (1 << 56) - 1) < 1 << 56);
    }

    #[test]
    fn json_names_are_stable() {
        let text = |s: Shuffle| serde_json::to_string(&s).unwrap();
        assert_eq!(text(Shuffle::Full), r#""full""#);
        assert_eq!(text(Shuffle::Sequential), r#""sequential""#);
        let block = Shuffle::Block { block: 2, window: 3 };
        assert_eq!(text(block), r#"{"block":{"block":2,"window":3}}"#);
    }
}
