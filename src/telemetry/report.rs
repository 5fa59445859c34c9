//! What a loader did, and which part of it the job is waiting for.

/// A caller that waits for less than this share of the time, starts aside, is not held up by the
/// loader: that much is jitter of threads that share cores.
const WAIT_SHARE_MAX: f64 = 0.05;

/// Passes too short for their prefetching to get going: more than this share of the time went to
/// waiting for their first batches.
const START_SHARE_MIN: f64 = 0.5;

/// Seconds spent per stage since the loader was made.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageSeconds {
    /// Computing which bytes each step needs.
    pub plan: f64,
    /// Steps waiting for memory before they could start.
    pub memory_wait: f64,
    /// Reads, summed (they overlap, so this may exceed the elapsed time).
    pub fetch: f64,
    /// Time in which at least one read was under way.
    pub reading: f64,
    /// Decoding, summed over threads.
    pub decode: f64,
    /// Putting finished samples together.
    pub assemble: f64,
    /// The caller waiting inside `next`.
    pub deliver_wait: f64,
    /// Of `deliver_wait`, the waits for the first batch of each pass.
    pub start_wait: f64,
    /// The caller between two calls of `next`.
    pub consumer: f64,
    /// Since the loader was made.
    pub elapsed: f64,
}

/// The part that limits throughput.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    /// Nothing was delivered yet.
    Unknown,
    /// The caller: batches wait for it.
    Trainer,
    /// Waiting for the first batch of each pass: the passes are too short to say more.
    StartUp,
    /// Decoder threads are busier than anything else: more threads or less work per sample.
    Decode,
    /// Reads are under way most of the time while the caller waits: they are too slow.
    Storage,
}

impl Bottleneck {
    /// One word, as `stats()` shows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Trainer => "trainer",
            Self::StartUp => "start-up",
            Self::Decode => "decode",
            Self::Storage => "storage",
        }
    }
}

impl StageSeconds {
    /// Names the bottleneck: the part with the largest share of the time in which it had work.
    ///
    /// A caller that hardly waits is the bottleneck however busy the loader is. Otherwise the
    /// trainer's, the decoders' and the reads' shares compete: in a pipeline the part that limits
    /// the others is at work all the time, and the others wait for it.
    pub fn bottleneck(&self, threads: usize) -> Bottleneck {
        let driven = self.deliver_wait + self.consumer;
        if driven <= 0.0 {
            return Bottleneck::Unknown;
        }
        if self.start_wait > START_SHARE_MIN * driven {
            return Bottleneck::StartUp;
        }
        // Beyond the first batches: starts say nothing about which part is slow in the long run.
        let running = driven - self.start_wait;
        if self.deliver_wait - self.start_wait < WAIT_SHARE_MAX * running {
            return Bottleneck::Trainer;
        }
        let decode = (self.decode + self.assemble) / threads.max(1) as f64;
        let parts = [
            (self.consumer, Bottleneck::Trainer),
            (decode, Bottleneck::Decode),
            (self.reading, Bottleneck::Storage),
        ];
        let largest = parts.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
        largest.map_or(Bottleneck::Unknown, |(_, part)| part)
    }
}

/// Counters and times of one loader since it was made.
#[derive(Debug, Clone, PartialEq)]
pub struct LoaderReport {
    /// Batches that reached the caller.
    pub batches: u64,
    /// Samples in them, padding included.
    pub samples: u64,
    /// Reads from storage (after merging neighbours).
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Of these, bytes that belong to samples; the rest are gaps between neighbours.
    pub wanted_bytes: u64,
    /// Bytes of the delivered batches.
    pub batch_bytes: u64,
    /// Samples replaced or masked.
    pub bad_samples: u64,
    /// Batches copied out of the arena because the caller held all of it.
    pub copied_batches: u64,
    /// Bytes that came from outside the arena.
    pub private_bytes: u64,
    /// Decoder threads.
    pub threads: usize,
    /// The part that limits throughput.
    pub bottleneck: Bottleneck,
    /// Where the time went.
    pub seconds: StageSeconds,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_named_before_the_first_batch() {
        let told =
            StageSeconds { decode: 1.0, fetch: 1.0, reading: 1.0, ..StageSeconds::default() };
        assert_eq!(told.bottleneck(2), Bottleneck::Unknown);
    }

    #[test]
    fn a_caller_that_hardly_waits_is_the_bottleneck() {
        let told = StageSeconds {
            deliver_wait: 0.1,
            consumer: 9.9,
            decode: 15.0,
            ..StageSeconds::default()
        };
        assert_eq!(told.bottleneck(2), Bottleneck::Trainer);
        // The first batch of three epochs took long, no other: still the caller.
        let starts = StageSeconds {
            deliver_wait: 2.1,
            start_wait: 2.0,
            consumer: 8.0,
            ..StageSeconds::default()
        };
        let starts = StageSeconds { fetch: 30.0, reading: 3.0, decode: 2.0, ..starts };
        assert_eq!(starts.bottleneck(2), Bottleneck::Trainer);
    }

    #[test]
    fn a_trainer_that_computes_most_of_the_time_beats_a_sum_of_overlapping_reads() {
        // As a short run on two cores had it: 6 % of waits, and 15 s of reads, many at once.
        let told = StageSeconds {
            deliver_wait: 0.4,
            consumer: 6.0,
            decode: 1.0,
            ..StageSeconds::default()
        };
        let told = StageSeconds { fetch: 14.9, reading: 1.2, ..told };
        assert_eq!(told.bottleneck(1), Bottleneck::Trainer);
    }

    #[test]
    fn the_busiest_part_of_a_loader_is_named() {
        let slow = StageSeconds {
            deliver_wait: 9.0,
            start_wait: 0.5,
            consumer: 1.0,
            ..StageSeconds::default()
        };
        let decode =
            StageSeconds { decode: 18.0, assemble: 1.0, fetch: 40.0, reading: 6.0, ..slow };
        assert_eq!(decode.bottleneck(2), Bottleneck::Decode);
        // On four threads they are half idle, and reading goes on for longer.
        assert_eq!(decode.bottleneck(4), Bottleneck::Storage);
        let storage = StageSeconds { decode: 2.0, fetch: 30.0, reading: 9.5, ..slow };
        assert_eq!(storage.bottleneck(2), Bottleneck::Storage);
    }

    #[test]
    fn passes_of_few_batches_say_start_up() {
        let told = StageSeconds {
            deliver_wait: 0.3,
            start_wait: 0.29,
            consumer: 0.1,
            ..StageSeconds::default()
        };
        assert_eq!(told.bottleneck(2), Bottleneck::StartUp);
        let alone = StageSeconds { deliver_wait: 0.3, start_wait: 0.3, ..StageSeconds::default() };
        assert_eq!(alone.bottleneck(2), Bottleneck::StartUp);
    }

    #[test]
    fn names_are_single_words() {
        assert_eq!(Bottleneck::Storage.name(), "storage");
        assert_eq!(Bottleneck::StartUp.name(), "start-up");
    }
}
