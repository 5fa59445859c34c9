//! Large copies past the cache.
//!
//! A snapshot is far larger than any cache, and nobody reads it soon. Ordinary stores first load
//! each destination line to own it; non-temporal ones do not, which on the machines we measured
//! moves 17 GB/s on one thread where `memcpy` moves 11.

use std::mem::MaybeUninit;

/// Shorter copies stay in the cache, where ordinary stores win.
const STREAM_BYTES_MIN: usize = 64 << 10;

/// Bytes that [`copy_seen`] shows at a time: they stay in the first two levels of cache.
const SEEN_BYTES: usize = 16 << 10;

/// Copies like [`copy_past_cache`], and shows `seen` what was copied, piece by piece: a checksum
/// then costs no second trip to memory. Each byte of the source is read once, so that what is seen
/// is what was copied even if another thread writes to the source meanwhile.
///
/// # Safety
/// As for [`copy_past_cache`].
pub unsafe fn copy_seen(from: *const u8, to: *mut u8, len: usize, mut seen: impl FnMut(&[u8])) {
    let mut between = [MaybeUninit::<u8>::uninit(); SEEN_BYTES];
    let between: *mut u8 = between.as_mut_ptr().cast();
    let mut at = 0;
    while at < len {
        let piece = SEEN_BYTES.min(len - at);
        // SAFETY: `at + piece` is at most `len`, for which the caller's promise holds, and `piece`
        // fits `between`. What is shown was written just before.
        unsafe {
            let (source, target) = (from.add(at), to.add(at));
            let whole = len < STREAM_BYTES_MIN;
            let copied = if whole { target } else { between };
            std::ptr::copy_nonoverlapping(source, copied, piece);
            seen(std::slice::from_raw_parts(copied, piece));
            if !whole {
                stream(between, target, piece);
            }
        }
        at += piece;
    }
}

/// Copies `len` bytes, past the cache where that pays.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, and the two do not overlap.
pub unsafe fn copy_past_cache(from: *const u8, to: *mut u8, len: usize) {
    if len >= STREAM_BYTES_MIN {
        // SAFETY: the caller's promise.
        return unsafe { stream(from, to, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// # Safety
/// As for [`copy_past_cache`].
unsafe fn stream(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise, and AVX was just found.
        unsafe { x86::copy(from, to, len) };
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};

    const VECTOR: usize = 32;
    /// Four vectors: two cache lines per turn.
    const STEP: usize = 4 * VECTOR;

    /// # Safety
    /// As [`super::copy_past_cache`], on a processor with AVX.
    #[allow(clippy::cast_ptr_alignment, reason = "loads are unaligned ones; `head` aligns stores")]
    #[target_feature(enable = "avx")]
    pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        let head = to.align_offset(VECTOR).min(len);
        let steps = (len - head) / STEP;
        // SAFETY: head + steps * STEP + tail is len, so every access is inside both ranges; the
        // streamed addresses are aligned because `head` makes them so.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            for i in 0..steps {
                let at = head + i * STEP;
                for lane in [0, VECTOR, 2 * VECTOR, 3 * VECTOR] {
                    let value = _mm256_loadu_si256(from.add(at + lane).cast::<__m256i>());
                    _mm256_stream_si256(to.add(at + lane).cast::<__m256i>(), value);
                }
            }
            let done = head + steps * STEP;
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
        }
        // Streamed stores are weakly ordered: whoever is told that the copy is done must see it.
        _mm_sfence();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_to_memcpy_at_every_alignment_and_length() {
        let source: Vec<u8> = (0..300_000_u32).map(|i| (i * 31 % 251) as u8).collect();
        for (skip, lead, len) in [
            (0, 0, 0),
            (1, 3, 100),
            (0, 0, STREAM_BYTES_MIN),
            (7, 13, STREAM_BYTES_MIN + 1),
            (31, 1, STREAM_BYTES_MIN + 127),
            (5, 32, 200_003),
        ] {
            let mut out = vec![0xEE_u8; lead + len + 64];
            // SAFETY: both ranges lie in their vectors, which are two.
            unsafe { copy_past_cache(source.as_ptr().add(skip), out.as_mut_ptr().add(lead), len) };
            assert!(out[lead..lead + len] == source[skip..skip + len], "{skip} {lead} {len}");
            let mut again = vec![0xEE_u8; lead + len + 64];
            let (to, mut seen) = (again.as_mut_ptr(), Vec::new());
            let keep = |piece: &[u8]| seen.extend_from_slice(piece);
            // SAFETY: as above.
            unsafe { copy_seen(source.as_ptr().add(skip), to.add(lead), len, keep) };
            assert!(again == out && seen == source[skip..skip + len], "{skip} {lead} {len}");
            let untouched = out[..lead].iter().chain(&out[lead + len..]);
            assert!(untouched.copied().all(|b| b == 0xEE), "{skip} {lead} {len}");
        }
    }
}
