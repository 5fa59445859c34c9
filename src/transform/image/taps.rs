//! Weights of an antialiased bilinear resize along one axis, in fixed point.
//!
//! The filter is the triangle of Pillow's `BILINEAR` and torch's `antialias=True`: half a width of
//! one source pixel when enlarging and of one output pixel when shrinking. Weights have 14 fraction
//! bits and sum to exactly 1, so a constant picture stays that constant.

/// Fraction bits of a weight.
pub const WEIGHT_BITS: u32 = 14;

/// The weight 1.
pub const WEIGHT_ONE: i32 = 1 << WEIGHT_BITS;

/// A kernel handles this many taps at a time; rows of weights are padded with zeros to it.
pub const TAP_GROUP: usize = 4;

/// One axis: `out_len` outputs over the window `[start, start + length)` of `src_len` samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Axis {
    /// Samples there are.
    pub src_len: usize,
    /// Where the window begins, in samples; need not be whole.
    pub start: f64,
    /// Length of the window, in samples.
    pub length: f64,
    /// Outputs.
    pub out_len: usize,
}

/// Which samples, with which weights, make each output.
#[derive(Debug, Default)]
pub struct Taps {
    axis: Option<Axis>,
    first: Vec<u32>,
    weights: Vec<i16>,
    stride: usize,
    floats: Vec<f64>,
}

impl Taps {
    /// Makes the weights for an axis, unless they are those of the last call.
    pub fn prepare(&mut self, axis: Axis) {
        if self.axis == Some(axis) {
            return;
        }
        let reach = (axis.length / axis.out_len as f64).max(1.0);
        let taps_max = (2.0 * reach).ceil() as usize + 1;
        self.stride = taps_max.next_multiple_of(TAP_GROUP);
        self.first.clear();
        self.weights.clear();
        self.weights.resize(axis.out_len * self.stride, 0);
        for index in 0..axis.out_len {
            self.fill(axis, reach, index);
        }
        self.axis = Some(axis);
    }

    fn fill(&mut self, axis: Axis, reach: f64, index: usize) {
        let low = axis.start.floor().max(0.0);
        let high = (axis.start + axis.length).ceil().min(axis.src_len as f64);
        let scale = axis.length / axis.out_len as f64;
        let centre = axis.start + (index as f64 + 0.5) * scale;
        let from = (centre - reach + 0.5).floor().clamp(low, high - 1.0);
        let to = (centre + reach + 0.5).floor().clamp(from + 1.0, high);
        let weight = |k: f64| (1.0 - ((from + k - centre + 0.5) / reach).abs()).max(0.0);
        self.floats.clear();
        self.floats.extend((0..(to - from) as usize).map(|k| weight(k as f64)));
        let row = &mut self.weights[index * self.stride..][..self.stride];
        quantise(&self.floats, row);
        self.first.push(from as u32);
    }

    /// First sample of output `index`, and its weights padded with zeros to the stride.
    pub fn of(&self, index: usize) -> (usize, &[i16]) {
        (self.first[index] as usize, &self.weights[index * self.stride..][..self.stride])
    }

    /// First sample of every output.
    pub fn firsts(&self) -> &[u32] {
        &self.first
    }

    /// All weights, [`Taps::stride`] for each output.
    pub fn weights(&self) -> &[i16] {
        &self.weights
    }

    /// Weights kept for each output, a multiple of [`TAP_GROUP`].
    pub fn stride(&self) -> usize {
        self.stride
    }
}

/// Rounds to fixed point with the sum kept at exactly one: the running sum is rounded, not each
/// weight by itself.
fn quantise(floats: &[f64], row: &mut [i16]) {
    let total: f64 = floats.iter().sum();
    if total <= 0.0 {
        // A window of a single sample at its very edge: that sample is the answer.
        row[0] = WEIGHT_ONE as i16;
        return;
    }
    let (mut sum, mut given) = (0.0, 0_i32);
    for (slot, value) in row.iter_mut().zip(floats) {
        sum += value / total;
        let due = (sum * f64::from(WEIGHT_ONE)).round() as i32;
        *slot = (due - given) as i16;
        given = due;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn weights_of(axis: Axis) -> Vec<(usize, Vec<i16>)> {
        let mut taps = Taps::default();
        taps.prepare(axis);
        (0..axis.out_len).map(|i| (taps.of(i).0, taps.of(i).1.to_vec())).collect()
    }

    #[test]
    fn same_size_is_the_identity() {
        for (i, (first, w)) in
            weights_of(Axis { src_len: 9, start: 0.0, length: 9.0, out_len: 9 }).iter().enumerate()
        {
            let at = w.iter().position(|v| *v == 1 << WEIGHT_BITS).unwrap();
            assert_eq!(first + at, i);
            assert_eq!(w.iter().filter(|v| **v != 0).count(), 1);
        }
    }

    #[test]
    fn halving_has_the_weights_of_the_triangle() {
        // Output 1 of 4 over 8: centre 3, reach 2 -> samples 1..5 at distances 1.5 .5 .5 1.5.
        let axis = Axis { src_len: 8, start: 0.0, length: 8.0, out_len: 4 };
        let (first, w) = weights_of(axis)[1].clone();
        assert_eq!(first, 1);
        assert_eq!(&w[..4], &[2048, 6144, 6144, 2048]);
    }

    proptest! {
        #[test]
        fn weights_sum_to_one_and_stay_inside(
            src in 1_usize..300, out in 1_usize..300, start in 0.0_f64..0.9, part in 0.01_f64..1.0,
        ) {
            let start = start * src as f64;
            let length = ((src as f64 - start) * part).max(1e-3);
            let axis = Axis { src_len: src, start, length, out_len: out };
            for (first, w) in weights_of(axis) {
                prop_assert_eq!(w.iter().map(|v| i32::from(*v)).sum::<i32>(), WEIGHT_ONE);
                let last = w.iter().rposition(|v| *v != 0).unwrap();
                prop_assert!(first + last < src);
                prop_assert!(w.iter().all(|v| *v >= 0));
            }
        }
    }
}
