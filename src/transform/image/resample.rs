//! Separable resampling of RGBX pictures in fixed point: rows are blended first, then columns.
//!
//! Blending gives levels with 7 fraction bits (255 << 7 still fits an i16), and gathering columns
//! gives 21, which become f32. Sums are integers, so every kernel gives the same bits. Four bytes
//! a pixel, because one 128-bit load is then four taps of all colours.

use super::taps::{Taps, WEIGHT_BITS};

/// Bytes of a decoded pixel: red, green, blue, unused.
pub const PIXEL_BYTES: usize = 4;

/// Fraction bits of a blended level.
const BLEND_BITS: u32 = 7;

/// One unit of a gathered sum, in levels.
const SUM_UNIT: f32 = 1.0 / (1_u64 << (BLEND_BITS + WEIGHT_BITS)) as f32;

/// A decoded picture in scratch memory.
#[derive(Debug, Clone, Copy)]
pub struct Picture<'a> {
    /// Rows of `width` RGBX pixels without padding.
    pub pixels: &'a [u8],
    /// Pixels of a row.
    pub width: usize,
}

/// Re-used memory of [`resample`].
#[derive(Debug, Default)]
pub struct Rows {
    blended: Vec<i16>,
    planes: [Vec<f32>; 3],
}

/// Resamples `picture` and hands each finished output row (three planes of levels 0..=255) to
/// `sink` together with its number.
pub fn resample(
    picture: Picture<'_>,
    rows: &Taps,
    columns: &Taps,
    buffers: &mut Rows,
    mut sink: impl FnMut(usize, [&[f32]; 3]),
) {
    let out_w = columns.firsts().len();
    // Zero weights may reach past the last pixel, so the row is longer than the picture.
    buffers.blended.clear();
    buffers.blended.resize((picture.width + columns.stride()) * PIXEL_BYTES, 0);
    for plane in &mut buffers.planes {
        plane.resize(out_w, 0.0);
    }
    for y in 0..rows.firsts().len() {
        let (first, weights) = rows.of(y);
        let used = weights.iter().rposition(|w| *w != 0).map_or(1, |last| last + 1);
        let pitch = picture.width * PIXEL_BYTES;
        let source = &picture.pixels[first * pitch..(first + used) * pitch];
        let blended = &mut buffers.blended;
        blend(source, &weights[..used], &mut blended[..pitch]);
        gather(blended, columns, &mut buffers.planes);
        let [r, g, b] = &buffers.planes;
        sink(y, [r, g, b]);
    }
}

/// Weighted sum of rows: `source` holds as many rows of `out.len()` bytes as there are weights.
fn blend(source: &[u8], weights: &[i16], out: &mut [i16]) {
    #[cfg(target_arch = "x86_64")]
    if super::avx2::available() {
        return super::avx2::blend(source, weights, out);
    }
    blend_scalar(source, weights, out);
}

/// Weighted sums of pixels of one blended row, as levels.
fn gather(blended: &[i16], columns: &Taps, planes: &mut [Vec<f32>; 3]) {
    #[cfg(target_arch = "x86_64")]
    if super::avx2::available() {
        return super::avx2::gather(blended, columns, planes);
    }
    gather_scalar(blended, columns, planes, 0);
}

/// The meaning of [`blend`].
pub(super) fn blend_scalar(source: &[u8], weights: &[i16], out: &mut [i16]) {
    let pitch = out.len();
    for (i, slot) in out.iter_mut().enumerate() {
        let terms = weights.iter().enumerate();
        let sum: i32 = terms.map(|(k, w)| i32::from(*w) * i32::from(source[k * pitch + i])).sum();
        *slot = round_blend(sum);
    }
}

/// Rounds a sum of rows to [`BLEND_BITS`].
#[inline(always)]
pub(super) fn round_blend(sum: i32) -> i16 {
    ((sum + (1 << (WEIGHT_BITS - BLEND_BITS - 1))) >> (WEIGHT_BITS - BLEND_BITS)) as i16
}

/// The meaning of [`gather`], for outputs from `start` on.
pub(super) fn gather_scalar(
    blended: &[i16],
    columns: &Taps,
    planes: &mut [Vec<f32>; 3],
    start: usize,
) {
    for x in start..columns.firsts().len() {
        let (first, weights) = columns.of(x);
        let mut sums = [0_i32; 3];
        for (pixel, weight) in blended[first * PIXEL_BYTES..].chunks_exact(4).zip(weights) {
            for (sum, level) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(*weight) * i32::from(*level);
            }
        }
        for (plane, sum) in planes.iter_mut().zip(sums) {
            plane[x] = sum as f32 * SUM_UNIT;
        }
    }
}

/// [`SUM_UNIT`] for the SIMD kernels.
pub(super) const fn sum_unit() -> f32 {
    SUM_UNIT
}

#[cfg(test)]
mod tests {
    use super::super::taps::Axis;
    use super::*;
    use proptest::prelude::*;

    fn axis(src_len: usize, out_len: usize) -> Axis {
        Axis { src_len, start: 0.0, length: src_len as f64, out_len }
    }

    fn resize(pixels: &[u8], w: usize, h: usize, out_w: usize, out_h: usize) -> Vec<[f32; 3]> {
        let (mut rows, mut columns) = (Taps::default(), Taps::default());
        rows.prepare(axis(h, out_h));
        columns.prepare(axis(w, out_w));
        let mut out = Vec::new();
        let picture = Picture { pixels, width: w };
        resample(picture, &rows, &columns, &mut Rows::default(), |_, [r, g, b]| {
            out.extend((0..out_w).map(|x| [r[x], g[x], b[x]]));
        });
        out
    }

    #[test]
    fn identity_returns_the_levels() {
        let pixels: Vec<u8> = (0..5 * 3 * 4).map(|i| (i * 7 % 256) as u8).collect();
        let out = resize(&pixels, 5, 3, 5, 3);
        for (got, want) in out.iter().zip(pixels.chunks(4)) {
            assert_eq!(*got, [want[0], want[1], want[2]].map(f32::from));
        }
    }

    #[test]
    fn halving_two_pixels_is_their_mean() {
        let pixels = [10, 0, 255, 0, 20, 1, 255, 0];
        assert_eq!(resize(&pixels, 2, 1, 1, 1), vec![[15.0, 0.5, 255.0]]);
    }

    proptest! {
        #[test]
        fn constant_pictures_stay_constant(
            level in 0_u8..,
            w in 1_usize..70,
            h in 1_usize..40,
            ow in 1_usize..70,
            oh in 1_usize..40,
        ) {
            let out = resize(&vec![level; w * h * 4], w, h, ow, oh);
            prop_assert!(out.iter().all(|p| *p == [f32::from(level); 3]));
        }

        #[test]
        fn agrees_with_floating_point(
            w in 1_usize..60,
            h in 1_usize..30,
            ow in 1_usize..60,
            oh in 1_usize..30,
            seed in 0_u32..99,
        ) {
            let level = |i: usize| (i as u32).wrapping_mul(2654435761).wrapping_add(seed * 97);
            let pixels: Vec<u8> = (0..w * h * 4).map(|i| (level(i) >> 13) as u8).collect();
            let out = resize(&pixels, w, h, ow, oh);
            let triangle = |src: usize, dst: usize, i: usize, k: usize| {
                let scale = src as f64 / dst as f64;
                let reach = scale.max(1.0);
                (1.0 - ((k as f64 + 0.5 - (i as f64 + 0.5) * scale) / reach).abs()).max(0.0)
            };
            for (i, got) in out.iter().enumerate() {
                let (y, x) = (i / ow, i % ow);
                let (mut sum, mut total) = (0.0, 0.0);
                for sy in 0..h {
                    for sx in 0..w {
                        let weight = triangle(h, oh, y, sy) * triangle(w, ow, x, sx);
                        total += weight;
                        sum += weight * f64::from(pixels[(sy * w + sx) * 4 + 1]);
                    }
                }
                // 14-bit weights: each of at most ~60 + 60 taps is off by 2^-14 of 255 levels.
                prop_assert!((f64::from(got[1]) - sum / total).abs() < 0.3);
            }
        }
    }
}
