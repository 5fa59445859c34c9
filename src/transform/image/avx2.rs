//! AVX2 kernels of [`super::resample`]; the same integer sums as its scalar ones, 8 to 16 at once.

#[allow(clippy::wildcard_imports, reason = "intrinsics carry their own prefix")]
use std::arch::x86_64::*;

use super::resample::{PIXEL_BYTES, gather_scalar, round_blend, sum_unit};
use super::taps::{TAP_GROUP, Taps};

/// Bytes of a row that one step of [`blend`] handles.
const BLEND_STEP: usize = 32;

/// Outputs that one step of [`gather`] handles.
const GATHER_STEP: usize = 4;

/// True if this processor has AVX2 (asked once, then a load).
#[inline]
pub fn available() -> bool {
    is_x86_feature_detected!("avx2")
}

/// See [`super::resample`]; the caller has checked [`available`].
pub fn blend(source: &[u8], weights: &[i16], out: &mut [i16]) {
    assert!(available() && source.len() >= weights.len() * out.len());
    // SAFETY: AVX2 is there, and the length that the kernel relies on was checked.
    unsafe { blend_avx2(source, weights, out) }
}

/// See [`super::resample`]; the caller has checked [`available`].
pub fn gather(blended: &[i16], columns: &Taps, planes: &mut [Vec<f32>; 3]) {
    let outputs = columns.firsts().len();
    let last = columns.firsts().iter().max().map_or(0, |f| *f as usize);
    assert!(available() && blended.len() >= (last + columns.stride()) * PIXEL_BYTES);
    assert!(planes.iter().all(|p| p.len() >= outputs));
    // SAFETY: AVX2 is there, and the lengths that the kernel relies on were checked.
    unsafe { gather_avx2(blended, columns, planes) }
}

/// The caller has checked that `source` holds `weights.len()` rows of `out.len()` bytes.
#[target_feature(enable = "avx2")]
unsafe fn blend_avx2(source: &[u8], weights: &[i16], out: &mut [i16]) {
    let pitch = out.len();
    let whole = pitch / BLEND_STEP * BLEND_STEP;
    let pairs = weights.len() / 2;
    let both = |pair: usize| {
        i32::from(weights[2 * pair + 1]) << 16 | i32::from(weights[2 * pair]) & 0xFFFF
    };
    let single = weights.len() % 2 == 1;
    for at in (0..whole).step_by(BLEND_STEP) {
        let mut sums = [_mm256_setzero_si256(); 4];
        prefetch(source, at + pitch * weights.len(), pitch);
        for pair in 0..pairs {
            let first = 2 * pair * pitch + at;
            // SAFETY: both rows are there and at + 32 <= pitch.
            let (top, below) = unsafe { (load(source, first), load(source, first + pitch)) };
            add_rows(&mut sums, top, below, _mm256_set1_epi32(both(pair)));
        }
        if single {
            let last = weights.len() - 1;
            // SAFETY: row `last` is there and at + 32 <= pitch.
            let top = unsafe { load(source, last * pitch + at) };
            add_rows(&mut sums, top, top, _mm256_set1_epi32(i32::from(weights[last])));
        }
        store_blend(&sums, &mut out[at..at + BLEND_STEP]);
    }
    for i in whole..pitch {
        let terms = weights.iter().enumerate();
        out[i] =
            round_blend(terms.map(|(k, w)| i32::from(*w) * i32::from(source[k * pitch + i])).sum());
    }
}

/// Asks for the two rows that the next output is likely to need: a row is most of a page, so the
/// hardware's prefetcher starts anew with each, and the picture does not fit the nearer caches.
#[inline]
#[target_feature(enable = "avx2")]
fn prefetch(source: &[u8], at: usize, pitch: usize) {
    let next = source.as_ptr().wrapping_add(at);
    // A prefetch touches no memory and may name any address.
    _mm_prefetch::<_MM_HINT_T0>(next.cast());
    _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(pitch).cast());
}

/// The caller keeps `at + 32` inside `source`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(source: &[u8], at: usize) -> __m256i {
    debug_assert!(at + BLEND_STEP <= source.len());
    // SAFETY: the caller's promise; the load asks for no alignment.
    unsafe { _mm256_loadu_si256(source.as_ptr().add(at).cast()) }
}

/// Adds `top * w0 + below * w1` in the lane order of unpacking: 0-3|16-19, 4-7|20-23, ...
#[inline]
#[target_feature(enable = "avx2")]
fn add_rows(sums: &mut [__m256i; 4], top: __m256i, below: __m256i, weights: __m256i) {
    let zero = _mm256_setzero_si256();
    let low = _mm256_unpacklo_epi8(top, below);
    let high = _mm256_unpackhi_epi8(top, below);
    let words = [
        _mm256_unpacklo_epi8(low, zero),
        _mm256_unpackhi_epi8(low, zero),
        _mm256_unpacklo_epi8(high, zero),
        _mm256_unpackhi_epi8(high, zero),
    ];
    for (sum, word) in sums.iter_mut().zip(words) {
        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(word, weights));
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store_blend(sums: &[__m256i; 4], out: &mut [i16]) {
    let half = _mm256_set1_epi32(64);
    let [a, b, c, d] = sums.map(|s| _mm256_srai_epi32::<7>(_mm256_add_epi32(s, half)));
    let first = _mm256_packs_epi32(a, b);
    let second = _mm256_packs_epi32(c, d);
    let low = _mm256_permute2x128_si256::<0x20>(first, second);
    let high = _mm256_permute2x128_si256::<0x31>(first, second);
    let out = &mut out[..BLEND_STEP];
    // SAFETY: the slice has 32 words of 2 bytes; the stores ask for no alignment.
    unsafe {
        _mm256_storeu_si256(out.as_mut_ptr().cast(), low);
        _mm256_storeu_si256(out.as_mut_ptr().add(BLEND_STEP / 2).cast(), high);
    }
}

/// Lengths were checked by [`gather`]: every output's taps lie inside `blended`.
#[target_feature(enable = "avx2")]
unsafe fn gather_avx2(blended: &[i16], columns: &Taps, planes: &mut [Vec<f32>; 3]) {
    let (firsts, weights, stride) = (columns.firsts(), columns.weights(), columns.stride());
    let whole = firsts.len() / GATHER_STEP * GATHER_STEP;
    for x in (0..whole).step_by(GATHER_STEP) {
        let mut sums = [_mm_setzero_si128(); GATHER_STEP];
        for (lane, sum) in sums.iter_mut().enumerate() {
            let pixels = &blended[firsts[x + lane] as usize * PIXEL_BYTES..];
            let taps = &weights[(x + lane) * stride..][..stride];
            // SAFETY: `pixels` has at least `stride` pixels, `taps` has `stride` weights.
            *sum = unsafe { sum_pixel(pixels, taps) };
        }
        let colours = transpose(sums);
        for (plane, sums) in planes.iter_mut().zip(colours) {
            let levels = _mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_set1_ps(sum_unit()));
            let out = &mut plane[x..x + GATHER_STEP];
            // SAFETY: the slice has 4 floats; the store asks for no alignment.
            unsafe { _mm_storeu_ps(out.as_mut_ptr(), levels) }
        }
    }
    gather_scalar(blended, columns, planes, whole);
}

/// Red, green, blue and unused sums of one output.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn sum_pixel(pixels: &[i16], taps: &[i16]) -> __m128i {
    // Two pixels to a lane: r0 g0 b0 x0 r1 g1 b1 x1 becomes r0 r1 g0 g1 b0 b1 x0 x1.
    let pairs = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,
    ));
    // Weights w0 w1 over the lower lane, w2 w3 over the upper one.
    let spread = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    let mut sums = _mm256_setzero_si256();
    for group in 0..taps.len() / TAP_GROUP {
        // SAFETY: group * 4 + 4 <= taps.len(), and there are as many pixels of 4 words.
        let (four, weights) = unsafe {
            let four = pixels.as_ptr().add(group * TAP_GROUP * PIXEL_BYTES);
            (_mm256_loadu_si256(four.cast()), taps.as_ptr().add(group * TAP_GROUP))
        };
        // SAFETY: 4 weights of 2 bytes are 8 bytes, as in the line above.
        let weights = unsafe { _mm_loadl_epi64(weights.cast()) };
        let weights = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(weights), spread);
        let products = _mm256_madd_epi16(_mm256_shuffle_epi8(four, pairs), weights);
        sums = _mm256_add_epi32(sums, products);
    }
    _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums))
}

/// Four pixels of r g b x become r, g and b of four pixels.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(pixels: [__m128i; 4]) -> [__m128i; 3] {
    let [a, b, c, d] = pixels;
    let (ab_low, cd_low) = (_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(c, d));
    let (ab_high, cd_high) = (_mm_unpackhi_epi32(a, b), _mm_unpackhi_epi32(c, d));
    [
        _mm_unpacklo_epi64(ab_low, cd_low),
        _mm_unpackhi_epi64(ab_low, cd_low),
        _mm_unpacklo_epi64(ab_high, cd_high),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::resample::blend_scalar;
    use super::super::taps::Axis;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blend_equals_scalar(
            width in 1_usize..50, count in 1_usize..9, bytes in prop::collection::vec(0_u8.., 1800),
        ) {
            prop_assume!(available());
            let mut taps = Taps::default();
            taps.prepare(Axis { src_len: count, start: 0.0, length: count as f64, out_len: 1 });
            let weights = &taps.of(0).1[..count];
            let mut want = vec![0; width * PIXEL_BYTES];
            let mut got = want.clone();
            blend_scalar(&bytes, weights, &mut want);
            blend(&bytes, weights, &mut got);
            prop_assert_eq!(got, want);
        }

        #[test]
        fn gather_equals_scalar(
            src in 1_usize..80, out in 1_usize..80, seed in 0_u64..1000,
        ) {
            prop_assume!(available());
            let mut taps = Taps::default();
            taps.prepare(Axis { src_len: src, start: 0.0, length: src as f64, out_len: out });
            let blended: Vec<i16> = (0..(src + taps.stride()) * PIXEL_BYTES)
                .map(|i| ((i as u64 * 48271 + seed * 7919) % 32641) as i16)
                .collect();
            let mut want = [vec![0.0; out], vec![0.0; out], vec![0.0; out]];
            let mut got = want.clone();
            gather_scalar(&blended, &taps, &mut want, 0);
            gather(&blended, &taps, &mut got);
            prop_assert_eq!(got, want);
        }
    }
}
