//! The counter-based random stream: any value is computed from its key and index alone, so ranks
//! and threads draw the same numbers whatever order they work in.
//!
//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
//! SC 2011). The 128-bit counter and 64-bit key cannot hold seed, epoch, sample, operation and
//! index at once, so one Philox call folds (seed, epoch, operation) into the key of the stream.

/// First operation number that belongs to Drivetrain itself (the orders); user operations are
/// below.
pub const OPERATION_RESERVED: u32 = 0xFFFF_0000;

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// One Philox4x32-10 block: four 32-bit words from a counter and a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..ROUNDS {
        let (high0, low0) = multiply(MULTIPLIER[0], c[0]);
        let (high1, low1) = multiply(MULTIPLIER[1], c[2]);
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

fn multiply(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

fn words(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Random numbers of one (seed, epoch, sample, operation), in a fixed sequence.
///
/// Two streams with different keys are independent for every practical purpose; the same key gives
/// the same numbers on every machine (`normal` up to the last bits of the platform's logarithm).
#[derive(Debug, Clone)]
pub struct Stream {
    key: [u32; 2],
    sample: [u32; 2],
    block: u64,
    words: [u32; 4],
    used: usize,
    spare_normal: Option<f64>,
}

impl Stream {
    /// The stream of `operation` (below [`OPERATION_RESERVED`] for users) on `sample` in `epoch`.
    pub fn new(seed: u64, epoch: u64, sample: u64, operation: u32) -> Self {
        let [epoch_low, epoch_high] = words(epoch);
        let folded = philox4x32([epoch_low, epoch_high, operation, 0], words(seed));
        Self {
            key: [folded[0], folded[1]],
            sample: words(sample),
            block: 0,
            words: [0; 4],
            used: 4,
            spare_normal: None,
        }
    }

    /// Next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == self.words.len() {
            let [low, high] = words(self.block);
            self.words = philox4x32([low, high, self.sample[0], self.sample[1]], self.key);
            self.block = self.block.wrapping_add(1);
            self.used = 0;
        }
        let word = self.words[self.used];
        self.used += 1;
        word
    }

    /// Next 64 random bits: two 32-bit words, the low one first.
    pub fn next_u64(&mut self) -> u64 {
        let low = u64::from(self.next_u32());
        low | (u64::from(self.next_u32()) << 32)
    }

    /// Uniform in `[0, 1)`, a multiple of 2^-24. Uses one word.
    pub fn next_f32(&mut self) -> f32 {
        (self.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// Uniform in `[0, 1)`, a multiple of 2^-53. Uses two words.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// `low + (high - low) * next_f64()`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.next_f64()
    }

    /// Uniform in `0..n` by multiply-high, 0 for `n == 0`. Always two words, so what follows in
    /// the stream does not depend on luck; the bias is below n / 2^64.
    pub fn below(&mut self, n: u64) -> u64 {
        multiply_high(self.next_u64(), n)
    }

    /// Standard normal by Box-Muller on two `next_f64`; every second call uses the other half.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare_normal.take() {
            return spare;
        }
        // 1 - u is in (0, 1], so the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.next_f64()).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * self.next_f64()).sin_cos();
        self.spare_normal = Some(radius * sin);
        radius * cos
    }
}

/// High 64 bits of the product: maps a uniform 64-bit word to `0..n`.
pub(super) fn multiply_high(word: u64, n: u64) -> u64 {
    ((u128::from(word) * u128::from(n)) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known-answer vectors of the Random123 library (`kat_vectors`, philox4x32, 10 rounds).
    #[test]
    fn philox_matches_the_published_vectors() {
        let zero = philox4x32([0; 4], [0; 2]);
        assert_eq!(zero, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox4x32([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox4x32(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
        );
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn every_part_of_the_key_changes_the_stream() {
        let first = |s, e, n, o| Stream::new(s, e, n, o).next_u64();
        let base = first(1, 2, 3, 4);
        let far = 1 << 40;
        let others = [
            first(2, 2, 3, 4),
            first(1, 3, 3, 4),
            first(1, 2, 4, 4),
            first(1, 2, 3, 5),
            first(1 + far, 2, 3, 4),
            first(1, 2 + far, 3, 4),
            first(1, 2, 3 + far, 4),
        ];
        assert!(others.iter().all(|&o| o != base), "{others:x?} against {base:x}");
        assert_eq!(base, first(1, 2, 3, 4));
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let mut stream = Stream::new(7, 0, 0, 0);
        let n = 200_000;
        let (mut mean, mut var, mut normal_mean, mut normal_var) = (0.0, 0.0, 0.0, 0.0);
        for _ in 0..n {
            let u = stream.next_f64();
            assert!((0.0..1.0).contains(&u));
            mean += u / f64::from(n);
            var += (u - 0.5).powi(2) / f64::from(n);
            let z = stream.normal();
            normal_mean += z / f64::from(n);
            normal_var += z * z / f64::from(n);
        }
        // Five standard errors: sd(u)/sqrt(n) = 6.5e-4, sd(z)/sqrt(n) = 2.2e-3.
        assert!((mean - 0.5).abs() < 3.3e-3 && (var - 1.0 / 12.0).abs() < 1e-3, "{mean} {var}");
        assert!(normal_mean.abs() < 1.2e-2 && (normal_var - 1.0).abs() < 2e-2);
    }

    #[test]
    fn below_is_even_and_bounded() {
        let mut stream = Stream::new(0, 0, 1, 2);
        let mut counts = [0_u32; 7];
        for _ in 0..70_000 {
            counts[stream.below(7) as usize] += 1;
        }
        let chi: f64 = counts.iter().map(|&c| (f64::from(c) - 1e4).powi(2) / 1e4).sum();
        assert!(chi < 27.9, "chi-square {chi} of 6 degrees is beyond p = 1e-4: {counts:?}");
        assert_eq!(stream.below(0), 0);
        assert_eq!(stream.below(1), 0);
    }

    #[test]
    fn floats_follow_from_the_words() {
        let mut words = Stream::new(3, 1, 4, 1);
        let mut floats = words.clone();
        let (a, b, c) = (words.next_u32(), words.next_u32(), words.next_u32());
        assert_eq!(floats.next_f32(), (a >> 8) as f32 / 16_777_216.0);
        let wide = u64::from(b) | (u64::from(c) << 32);
        assert_eq!(floats.next_f64(), (wide >> 11) as f64 / 9_007_199_254_740_992.0);
    }
}
