//! A keyed bijection of `0..n` that needs no table: a Feistel network over two mixed-radix digits.
//!
//! `0..n` is embedded in the rectangle `rows × columns` with `rows = ceil(sqrt(n))` and
//! `columns = ceil(n / rows)`, which has fewer than `n + rows` cells. Rounds add a keyed hash of
//! one digit to the other, modulo that digit's radix: each round is invertible whatever the hash,
//! so the whole is a bijection of the rectangle. A result outside `0..n` is fed in again ("cycle
//! walking"), which makes it a bijection of `0..n`; at most `rows · columns - n` cells lie outside
//! and a cycle visits each once, so the walk is bounded. Rectangles waste less than the usual
//! power-of-two squares: the walk is one step in all but about one case in `sqrt(n)`.

use super::random::{Stream, multiply_high};

/// Rounds of the network. Four suffice for pseudo-randomness of a balanced network in theory;
/// twice that leaves margin for the tiny domains (`n` < 10) that tests and small datasets have.
const ROUNDS: usize = 8;

/// A bijection of `0..n` keyed by a stream.
#[derive(Debug, Clone)]
pub struct Permutation {
    n: u64,
    rows: u64,
    columns: u64,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The bijection of `0..n` whose round keys are the next [`u64`]s of `stream`.
    pub fn new(n: u64, stream: &mut Stream) -> Self {
        let rows = ceil_sqrt(n).max(1);
        let columns = n.div_ceil(rows).max(1);
        let mut keys = [0; ROUNDS];
        keys.fill_with(|| stream.next_u64());
        Self { n, rows, columns, keys }
    }

    /// Size of the domain.
    pub fn len(&self) -> u64 {
        self.n
    }

    /// Whether the domain is empty.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// Where `x` goes. `x` is taken modulo n, so that no input can leave the domain.
    pub fn apply(&self, x: u64) -> u64 {
        self.walk(x, |cell| self.forward(cell))
    }

    /// Where `y` came from: the inverse of [`Self::apply`].
    pub fn invert(&self, y: u64) -> u64 {
        self.walk(y, |cell| self.backward(cell))
    }

    fn walk(&self, x: u64, step: impl Fn(u64) -> u64) -> u64 {
        if self.n == 0 {
            return 0;
        }
        let mut cell = step(x % self.n);
        let outside = self.rows * self.columns - self.n;
        for _ in 0..outside {
            if cell < self.n {
                break;
            }
            cell = step(cell);
        }
        cell
    }

    fn forward(&self, cell: u64) -> u64 {
        let (mut row, mut column) = (cell / self.columns, cell % self.columns);
        for keys in self.keys.chunks_exact(2) {
            row = add(row, hash(column, keys[0]), self.rows);
            column = add(column, hash(row, keys[1]), self.columns);
        }
        row * self.columns + column
    }

    fn backward(&self, cell: u64) -> u64 {
        let (mut row, mut column) = (cell / self.columns, cell % self.columns);
        for keys in self.keys.chunks_exact(2).rev() {
            column = subtract(column, hash(row, keys[1]), self.columns);
            row = subtract(row, hash(column, keys[0]), self.rows);
        }
        row * self.columns + column
    }
}

/// `digit + r` modulo `radix`, where r is the hash scaled to `0..radix`.
fn add(digit: u64, hash: u64, radix: u64) -> u64 {
    let sum = digit + multiply_high(hash, radix);
    if sum >= radix { sum - radix } else { sum }
}

fn subtract(digit: u64, hash: u64, radix: u64) -> u64 {
    let less = multiply_high(hash, radix);
    if digit >= less { digit - less } else { digit + radix - less }
}

/// The finaliser of SplitMix64 over `digit ^ key`: every input bit flips every output bit with
/// probability near one half.
fn hash(digit: u64, key: u64) -> u64 {
    let mut z = digit ^ key;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Smallest r with r² >= n, in integers: floating point rounds differently near 2^53.
fn ceil_sqrt(n: u64) -> u64 {
    let root = n.isqrt();
    if root * root < n { root + 1 } else { root }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permutation(n: u64, seed: u64) -> Permutation {
        Permutation::new(n, &mut Stream::new(seed, 0, 0, 0))
    }

    #[test]
    fn every_size_up_to_5000_is_a_bijection_with_its_inverse() {
        let mut seen = vec![0_u64; 5001];
        for n in 1..=5000_u64 {
            let p = permutation(n, n);
            for x in 0..n {
                let y = p.apply(x);
                assert!(y < n, "n {n}: {x} -> {y}");
                assert_ne!(seen[y as usize], n, "n {n}: {y} twice");
                seen[y as usize] = n;
                if n % 37 == 0 {
                    assert_eq!(p.invert(y), x);
                }
            }
        }
    }

    #[test]
    fn huge_domains_invert() {
        for n in [1 << 32, (1 << 52) + 1, u64::from(u32::MAX) - 4, 999_999_999_989] {
            let p = permutation(n, 3);
            for x in (0..n).step_by((n / 101) as usize) {
                let y = p.apply(x);
                assert!(y < n);
                assert_eq!(p.invert(y), x);
            }
        }
    }

    #[test]
    fn empty_and_single_domains_do_not_trap() {
        assert_eq!(permutation(0, 1).apply(5), 0);
        assert_eq!(permutation(1, 1).apply(0), 0);
        assert!(permutation(0, 1).is_empty() && permutation(9, 1).len() == 9);
    }

    /// Chi-square of (n-1)² degrees over every (position, value) pair, against its mean plus five
    /// standard deviations.
    #[test]
    fn every_position_meets_every_value_equally_often() {
        for n in [2_u64, 3, 4, 5, 7, 8, 12, 16, 31] {
            let keys = 4000_u64;
            let mut counts = vec![0_u32; (n * n) as usize];
            for seed in 0..keys {
                let p = permutation(n, seed);
                (0..n).for_each(|x| counts[(x * n + p.apply(x)) as usize] += 1);
            }
            let expected = keys as f64 / n as f64;
            let chi: f64 =
                counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum();
            let degrees = ((n - 1) * (n - 1)) as f64;
            let limit = degrees + 5.0 * (2.0 * degrees).sqrt() + 5.0;
            assert!(chi < limit, "n {n}: chi-square {chi} of {degrees} degrees");
        }
    }

    /// All 24 orders of four elements come equally often: pairs of positions are independent too.
    #[test]
    fn all_orders_of_four_are_even() {
        let mut counts = std::collections::BTreeMap::<Vec<u64>, u32>::new();
        for seed in 0..24_000 {
            let p = permutation(4, seed);
            *counts.entry((0..4).map(|x| p.apply(x)).collect()).or_default() += 1;
        }
        assert_eq!(counts.len(), 24);
        let chi: f64 = counts.values().map(|&c| (f64::from(c) - 1e3).powi(2) / 1e3).sum();
        assert!(chi < 23.0 + 5.0 * 46_f64.sqrt(), "chi-square {chi} of 23 degrees");
    }
}
