//! Whether bytes are worth coding, from a few samples of them: the share that an entropy coder
//! would save.

use super::planes::split;
use super::{Form, RAW_BYTES_MIN};
use crate::checkpoint::layout::Dtype;

/// Bytes of a sample.
const SAMPLE_BYTES: usize = 1 << 10;
/// Samples of a tensor at least, and at most.
const SAMPLES: std::ops::Range<usize> = 4..32;
/// Of this many bytes of a tensor one is looked at, so that probing costs less than 1 % of coding.
const SAMPLED_SHARE: usize = 128;
/// Raw bytes per byte that must be saved: what saves less costs more time than it is worth.
const SAVED_SHARE: f64 = 1.0 / 16.0;

/// Bytes of a plane that [`has_pattern`] looks at, in as many pieces.
const PLANE_SAMPLE_BYTES: usize = 2048;
const PLANE_SAMPLES: usize = 4;

/// Whether chunks of these bytes are worth storing as `planes-zstd`.
pub fn probe(dtype: Dtype, raw: &[u8]) -> bool {
    if raw.len() < RAW_BYTES_MIN {
        return false;
    }
    let form = Form::of(dtype);
    let count = (raw.len() / SAMPLED_SHARE / SAMPLE_BYTES).clamp(SAMPLES.start, SAMPLES.end);
    let mut counts = vec![[0_u32; 256]; form.width];
    let mut planes = [0; SAMPLE_BYTES];
    for i in 0..count {
        split(form, sample(raw, i, count, SAMPLE_BYTES, form.width), &mut planes);
        for (counts, plane) in counts.iter_mut().zip(planes.chunks(SAMPLE_BYTES / form.width)) {
            tally(counts, plane);
        }
    }
    let left: f64 = counts.iter().map(|c| entropy_bits(c).min(8.0) / 8.0).sum();
    left / form.width as f64 <= 1.0 - SAVED_SHARE
}

/// Whether `stored` bytes for `raw` ones are worth it.
pub fn pays(stored: usize, raw: usize) -> bool {
    stored as f64 <= raw as f64 * (1.0 - SAVED_SHARE)
}

/// Sample number `i` of `count`, spread over all of `bytes`.
fn sample(bytes: &[u8], i: usize, count: usize, len: usize, width: usize) -> &[u8] {
    let start = (bytes.len() - len) / (count - 1).max(1) * i;
    let start = start - start % width;
    &bytes[start..start + len]
}

fn tally(counts: &mut [u32; 256], bytes: &[u8]) {
    for &byte in bytes {
        counts[byte as usize] += 1;
    }
}

/// Bits per byte of an entropy coder, by Shannon, with Miller's and Madow's term for what few
/// samples hide.
fn entropy_bits(counts: &[u32; 256]) -> f64 {
    let seen = || counts.iter().filter(|&&c| c > 0).map(|&c| f64::from(c));
    let total: f64 = seen().sum();
    let logs: f64 = seen().map(|c| c * c.log2()).sum();
    let hidden = (seen().count() as f64 - 1.0) / (2.0 * total) * std::f64::consts::LOG2_E;
    total.log2() - logs / total + hidden
}

/// Whether coding a plane of a block may save something. For noise, two bytes are equal once in 256
/// times; the chance of 1/248 is five deviations above what samples of noise show, and what lies
/// below it has more than 7.95 bits of entropy.
pub fn has_pattern(plane: &[u8]) -> bool {
    let mut counts = [0_u32; 256];
    let piece = PLANE_SAMPLE_BYTES / PLANE_SAMPLES;
    if plane.len() <= PLANE_SAMPLE_BYTES {
        tally(&mut counts, plane);
    } else {
        for i in 0..PLANE_SAMPLES {
            tally(&mut counts, sample(plane, i, PLANE_SAMPLES, piece, 1));
        }
    }
    let total: u64 = plane.len().min(PLANE_SAMPLE_BYTES) as u64;
    let pairs: u64 = counts.iter().map(|&c| u64::from(c) * u64::from(c)).sum();
    (pairs - total) * 248 > total * total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::codec::tests::{noise, normal_bf16, normal_f32};

    fn says(dtype: &str, raw: &[u8]) -> bool {
        probe(Dtype::named(dtype).unwrap(), raw)
    }

    #[test]
    fn weights_are_worth_it_and_noise_is_not() {
        assert!(says("BF16", &normal_bf16(300_000)));
        assert!(says("F32", &normal_f32(300_000)));
        assert!(says("I64", &(0..9000_i64).flat_map(i64::to_le_bytes).collect::<Vec<_>>()));
        assert!(says("BOOL", &vec![0; 40_000]));
        let noise = noise(400_000);
        for dtype in ["U8", "BF16", "I32", "F64", "C128"] {
            for len in [RAW_BYTES_MIN, 100_000, noise.len()] {
                assert!(!says(dtype, &noise[..len]), "{dtype} {len}");
            }
        }
        // Taken for another type the exponents are spread, and it would not pay.
        assert!(!says("BF16", &normal_bf16(300_000)[..RAW_BYTES_MIN - 2]), "too short");
    }

    #[test]
    fn a_plane_of_noise_has_no_pattern() {
        let noise = noise(1 << 20);
        let hits = noise.chunks(1 << 16).filter(|plane| has_pattern(plane)).count();
        assert_eq!(hits, 0);
        let exponents: Vec<u8> = normal_f32(1 << 16).iter().skip(3).step_by(4).copied().collect();
        assert!(has_pattern(&exponents));
        assert!(has_pattern(&[7; 5]) && !has_pattern(&[1]) && !has_pattern(&[]));
    }

    #[test]
    fn entropy_is_shannons() {
        let mut counts = [0; 256];
        (counts[0], counts[9], counts[77]) = (500_000, 250_000, 250_000);
        assert!((entropy_bits(&counts) - 1.5).abs() < 1e-4);
    }
}
