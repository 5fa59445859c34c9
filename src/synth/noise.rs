//! Hashes and noise that give the same numbers on every machine.
//!
//! Only integer arithmetic and IEEE operations that are exactly specified (add, multiply, divide)
//! are used: no table, no state, so any pixel of any frame can be made on its own.

/// Full-avalanche mix of 32 bits (two multiply-xorshift rounds).
#[inline]
pub fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x7feb_352d);
    x ^= x >> 15;
    x = x.wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Hash of two lattice coordinates under a salt.
#[inline]
pub fn mix2(x: i32, y: i32, salt: u32) -> u32 {
    mix((x as u32).wrapping_mul(0x9e37_79b1) ^ mix((y as u32).wrapping_add(salt)))
}

/// A 64-bit hash of a list of numbers, for seeds and tokens.
pub fn hash64(words: &[u64]) -> u64 {
    let mut state = 0x243f_6a88_85a3_08d3_u64;
    for &word in words {
        state = (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state ^= state >> 29;
        state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state ^= state >> 32;
    }
    state
}

/// Maps 32 bits to [0, 1).
#[inline]
pub fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// Smooth value noise in [0, 1) with features of size 1.
#[inline]
pub fn value(x: f64, y: f64, salt: u32) -> f32 {
    let (fx, fy) = (x.floor(), y.floor());
    let (ix, iy) = (fx as i64 as i32, fy as i64 as i32);
    let (tx, ty) = (smooth((x - fx) as f32), smooth((y - fy) as f32));
    let corner = |dx: i32, dy: i32| unit(mix2(ix.wrapping_add(dx), iy.wrapping_add(dy), salt));
    let low = corner(0, 0) + (corner(1, 0) - corner(0, 0)) * tx;
    let high = corner(0, 1) + (corner(1, 1) - corner(0, 1)) * tx;
    low + (high - low) * ty
}

/// Smooth value noise in [0, 1) in space, with features of size 1.
#[inline]
pub fn value3(at: [f64; 3], salt: u32) -> f32 {
    let floor = at[2].floor();
    let layer = salt.wrapping_add((floor as i64 as u32).wrapping_mul(0x85eb_ca6b));
    let low = value(at[0], at[1], layer);
    let high = value(at[0], at[1], layer.wrapping_add(0x85eb_ca6b));
    low + (high - low) * smooth((at[2] - floor) as f32)
}

#[inline]
fn smooth(t: f32) -> f32 {
    t * t * (3.0 - 2.0 * t)
}

/// Sum of octaves of [`value`] noise around 0, about ±1. Features run from `size_m` downwards by
/// halves; octaves finer than the pixel's `footprint_m` are left out, which is what keeps distant
/// surfaces from flickering and pictures from being incompressible.
#[inline]
pub fn fractal(x: f64, y: f64, size_m: f64, octaves: u32, footprint_m: f64, salt: u32) -> f32 {
    let (mut sum, mut gain, mut size) = (0.0_f32, 0.5_f32, size_m);
    for octave in 0..octaves {
        if size < footprint_m {
            break;
        }
        let frequency = 1.0 / size;
        sum += gain * (2.0 * value(x * frequency, y * frequency, salt.wrapping_add(octave)) - 1.0);
        gain *= 0.6;
        size *= 0.45;
    }
    sum
}

/// A small counter-based generator for the choices made once per world.
#[derive(Debug, Clone)]
pub struct Dice {
    key: u64,
    count: u64,
}

impl Dice {
    /// A stream of its own for each list of numbers.
    pub fn new(words: &[u64]) -> Self {
        Self { key: hash64(words), count: 0 }
    }

    /// Next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.count += 1;
        hash64(&[self.key, self.count])
    }

    /// Uniform in [low, high).
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.bits() >> 11) as f64 / (1_u64 << 53) as f64)
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.between(0.0, 1.0) < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_bounded_and_continuous() {
        let mut last = value(0.0, 0.3, 7);
        for i in 1..2000 {
            let now = value(f64::from(i) * 0.01, 0.3, 7);
            assert!((0.0..1.0).contains(&now) && (now - last).abs() < 0.05);
            last = now;
        }
        assert!(fractal(3.0, 4.0, 1.0, 3, 10.0, 1) == 0.0, "all octaves below the footprint");
    }

    #[test]
    fn hashes_do_not_change_by_accident() {
        assert_eq!((mix(1), mix2(-3, 5, 9)), (MIX_1, MIX2));
        assert_eq!(hash64(&[1, 2, 3]), HASH);
    }

    // The bytes of every synthetic dataset follow from these.
    const MIX_1: u32 = 1753845952;
    const MIX2: u32 = 4293535220;
    const HASH: u64 = 0xe6534ac8e0fcc739;

    #[test]
    fn dice_are_fair_enough() {
        let mut dice = Dice::new(&[5]);
        let mean = (0..10_000).map(|_| dice.between(0.0, 1.0)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
