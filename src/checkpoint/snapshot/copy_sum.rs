//! A copy that computes the CRC-32C of what it copies, in one pass where the processor can.
//!
//! Both are linear: 256 bytes are kept as four vectors that have the same remainder as all bytes so
//! far, moved on by carry-less multiplication with powers of x (Gopal et al., "Fast CRC Computation
//! for Generic Polynomials Using PCLMULQDQ", Intel 2009). The multiplications are meant to hide
//! behind the memory: each line is touched once, where a checksum over a copied piece reads it
//! from the cache again.

use std::mem::MaybeUninit;

use crc_fast::{CrcAlgorithm, Digest};

use crate::checkpoint::layout::crc32c;
use crate::memory::copy_seen;

/// Copies `from` to `to` and returns the checksum of the bytes that were copied. Each byte is read
/// once, so the two agree even if another thread writes to `from` meanwhile.
///
/// # Safety
/// `to` is writable for the length of `from` and does not overlap it.
pub unsafe fn copy_summed(from: &[u8], to: *mut u8) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if from.len() >= x86::BYTES_MIN
        && to.addr().is_multiple_of(x86::ALIGNMENT)
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("vpclmulqdq")
    {
        // SAFETY: the caller's promise; the features were just found and `to` is aligned.
        return unsafe { x86::copy_summed(from, to) };
    }
    // SAFETY: the caller's promise.
    unsafe { copy_then_sum(from, to) }
}

/// The same in pieces that stay in the cache between copy and checksum.
unsafe fn copy_then_sum(from: &[u8], to: *mut u8) -> u32 {
    let mut first = None;
    let mut digest = None;
    let sum = |piece: &[u8]| {
        if piece.len() == from.len() {
            // The usual small tensor: one call without a digest's set-up.
            first = Some(crc32c(piece));
        } else {
            digest.get_or_insert_with(|| Digest::new(CrcAlgorithm::Crc32Iscsi)).update(piece);
        }
    };
    // SAFETY: the caller's promise.
    unsafe { copy_seen(from.as_ptr(), to, from.len(), sum) };
    first.or(digest.map(|d| d.finalize() as u32)).unwrap_or_default()
}

#[cfg(target_arch = "x86_64")]
#[allow(clippy::cast_ptr_alignment, reason = "loads may be unaligned; the caller aligns stores")]
mod x86 {
    use std::arch::x86_64::{
        __m512i, _mm_set_epi64x, _mm_sfence, _mm512_broadcast_i32x4, _mm512_clmulepi64_epi128,
        _mm512_loadu_si512, _mm512_maskz_set1_epi32, _mm512_storeu_si512, _mm512_stream_si512,
        _mm512_ternarylogic_epi64, _mm512_xor_si512,
    };

    use super::MaybeUninit;
    use crate::checkpoint::layout::{crc32c, crc32c_join};

    /// Streamed stores are of whole vectors.
    pub const ALIGNMENT: usize = 64;
    /// Four vectors are folded in turn, so that their multiplications overlap.
    const STEP: usize = 4 * ALIGNMENT;
    /// Shorter ones stay in the cache, where ordinary stores win.
    pub const BYTES_MIN: usize = 64 << 10;
    /// x^(2048+32) and x^(2048-32) modulo the polynomial, bits reversed and shifted by one: they
    /// move the low and the high half of a lane on by one step.
    const FOLD_LOW: i64 = 0xdcb1_7aa4;
    const FOLD_HIGH: i64 = 0xb9e0_2b86;
    /// Three-way exclusive or, as the truth table that the instruction takes.
    const XOR3: i32 = 0x96;

    /// # Safety
    /// As [`super::copy_summed`], with at least [`BYTES_MIN`] bytes, on a processor with these
    /// features, and `to` aligned.
    #[target_feature(enable = "avx512f,vpclmulqdq")]
    pub unsafe fn copy_summed(from: &[u8], to: *mut u8) -> u32 {
        let folds = _mm512_broadcast_i32x4(_mm_set_epi64x(FOLD_HIGH, FOLD_LOW));
        let steps = from.len() / STEP;
        let mut folded = [MaybeUninit::<u8>::uninit(); STEP];
        let folded = folded.as_mut_ptr().cast::<u8>();
        // SAFETY: all accesses are within `steps * STEP` bytes of both ranges, and `to` is aligned.
        // `folded` is written as a whole before it is read.
        let sum = unsafe {
            let mut state = copy_step(from.as_ptr(), to);
            // A checksum starts from all ones, which is the same as other first bytes.
            state[0] = _mm512_xor_si512(state[0], _mm512_maskz_set1_epi32(1, -1));
            for i in 1..steps {
                let next = copy_step(from.as_ptr().add(i * STEP), to.add(i * STEP));
                for (vector, next) in state.iter_mut().zip(next) {
                    let low = _mm512_clmulepi64_epi128::<0x00>(*vector, folds);
                    let high = _mm512_clmulepi64_epi128::<0x11>(*vector, folds);
                    *vector = _mm512_ternarylogic_epi64::<XOR3>(low, high, next);
                }
            }
            // Streamed stores are weakly ordered: who is told that the copy is done must see it.
            _mm_sfence();
            for (i, vector) in state.into_iter().enumerate() {
                _mm512_storeu_si512(folded.add(i * ALIGNMENT).cast::<__m512i>(), vector);
            }
            // The ones at start and end of the library's checksum cancel out.
            crc32c(std::slice::from_raw_parts(folded, STEP)) ^ crc32c(&[0; STEP]) ^ u32::MAX
        };
        let tail = &from[steps * STEP..];
        // SAFETY: the rest of both ranges. It is summed where it was put.
        let tail = unsafe {
            let to = to.add(steps * STEP);
            std::ptr::copy_nonoverlapping(tail.as_ptr(), to, tail.len());
            std::slice::from_raw_parts(to, tail.len())
        };
        crc32c_join(sum, crc32c(tail), tail.len() as u64)
    }

    /// Copies one step and returns it.
    #[target_feature(enable = "avx512f")]
    unsafe fn copy_step(from: *const u8, to: *mut u8) -> [__m512i; 4] {
        let one = |i: usize| {
            // SAFETY: the caller's, for `STEP` bytes.
            unsafe {
                let vector = _mm512_loadu_si512(from.add(i * ALIGNMENT).cast::<__m512i>());
                _mm512_stream_si512(to.add(i * ALIGNMENT).cast::<__m512i>(), vector);
                vector
            }
        };
        [one(0), one(1), one(2), one(3)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_sums_are_right_at_every_length_and_alignment() {
        let source: Vec<u8> = (0..400_000_u32).map(|i| (i.wrapping_mul(31) >> 3) as u8).collect();
        for len in [0, 1, 255, 4096, 65_535, 65_536, 65_537, 65_791, 65_792, 66_000, 300_001] {
            for (skip, lead) in [(0, 0), (3, 0), (0, 1), (7, 64)] {
                let mut out = vec![0xEE_u8; lead + len + 192];
                let start = out.as_ptr().align_offset(64) + lead;
                let from = &source[skip..skip + len];
                let expected = crc32c(from);
                for copy in [copy_summed as unsafe fn(&[u8], *mut u8) -> u32, copy_then_sum] {
                    out.fill(0xEE);
                    // SAFETY: `start + len` lies inside `out`, which is another vector.
                    let sum = unsafe { copy(from, out.as_mut_ptr().add(start)) };
                    assert_eq!(sum, expected, "{len} bytes, {skip}, {lead}");
                    assert!(out[start..start + len] == *from, "{len} bytes, {skip}, {lead}");
                    let rest = out[..start].iter().chain(&out[start + len..]);
                    assert!(rest.copied().all(|b| b == 0xEE), "{len} bytes, {skip}, {lead}");
                }
            }
        }
    }
}
