//! What a loader did, and which part of it the job is waiting for.

/// A caller that waits for less than this share of the time is not held up by the loader.
const WAIT_SHARE_MAX: f64 = 0.05;

/// Decoder threads busier than this share while the caller waits are what it waits for.
const BUSY_SHARE_MIN: f64 = 0.7;

/// Seconds spent per stage since the loader was made.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StageSeconds {
    /// Computing which bytes each step needs.
    pub plan: f64,
    /// Steps waiting for memory before they could start.
    pub memory_wait: f64,
    /// Reads, summed (they overlap, so this may exceed the elapsed time).
    pub fetch: f64,
    /// Decoding, summed over threads.
    pub decode: f64,
    /// Putting finished samples together.
    pub assemble: f64,
    /// The caller waiting inside `next`.
    pub deliver_wait: f64,
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
    Consumer,
    /// Decoder threads are busy while the caller waits: more threads or less work per sample.
    Decode,
    /// Decoder threads idle while the caller waits: reads are too slow.
    Storage,
}

impl Bottleneck {
    /// One word, as `stats()` shows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Consumer => "consumer",
            Self::Decode => "decode",
            Self::Storage => "storage",
        }
    }
}

impl StageSeconds {
    /// Names the bottleneck from how the caller's and the decoders' time was spent.
    pub fn bottleneck(&self, threads: usize) -> Bottleneck {
        let driven = self.deliver_wait + self.consumer;
        if driven <= 0.0 {
            return Bottleneck::Unknown;
        }
        if self.deliver_wait < WAIT_SHARE_MAX * driven {
            return Bottleneck::Consumer;
        }
        let busy = (self.decode + self.assemble) / (driven * threads.max(1) as f64);
        if busy >= BUSY_SHARE_MIN { Bottleneck::Decode } else { self.idle_decoders() }
    }

    /// Decoders idle although the caller waits: reads, unless decoding outweighs all reading.
    fn idle_decoders(&self) -> Bottleneck {
        if self.fetch > self.decode { Bottleneck::Storage } else { Bottleneck::Decode }
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

    fn spent(deliver_wait: f64, consumer: f64, decode: f64, fetch: f64) -> Bottleneck {
        StageSeconds { fetch, decode, deliver_wait, consumer, ..StageSeconds::default() }
            .bottleneck(2)
    }

    #[test]
    fn the_waiting_side_is_named() {
        assert_eq!(spent(0.0, 0.0, 1.0, 1.0), Bottleneck::Unknown);
        assert_eq!(spent(0.1, 9.9, 5.0, 1.0), Bottleneck::Consumer);
        assert_eq!(spent(9.0, 1.0, 18.0, 1.0), Bottleneck::Decode);
        assert_eq!(spent(9.0, 1.0, 2.0, 30.0), Bottleneck::Storage);
        assert_eq!(spent(5.0, 5.0, 6.0, 1.0), Bottleneck::Decode);
        assert_eq!(Bottleneck::Storage.name(), "storage");
    }
}
