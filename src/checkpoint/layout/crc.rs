//! CRC-32C of bytes, and of two stretches from the checksums of each.
//!
//! Joining happens once per chunk and per part of one, so it must not cost more than the checksum
//! of a small chunk: the polynomial x^(8·n) that moves a checksum past n bytes is put together from
//! a table of x^(2^k), about twenty carry-less products of 32 bits for any length.

use crc_fast::{CrcAlgorithm, checksum};

/// The Castagnoli polynomial, lowest power first, without x^32.
const POLYNOMIAL: u32 = 0x82F6_3B78;
/// The polynomial 1 in that order of bits.
const ONE: u32 = 1 << 31;
/// x^(2^k) for all k that a length of 2^64 - 1 bytes needs.
const POWERS: [u32; 67] = powers();

/// CRC-32C (Castagnoli) of some bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// CRC-32C of `a` followed by `b`, from their checksums and the length of `b`.
pub fn crc32c_join(a: u32, b: u32, b_bytes: u64) -> u32 {
    if a == 0 {
        return b;
    }
    let (mut shift, mut rest, mut k) = (ONE, b_bytes, 3);
    while rest > 0 {
        if rest & 1 == 1 {
            shift = product(POWERS[k], shift);
        }
        rest >>= 1;
        k += 1;
    }
    product(shift, a) ^ b
}

/// The product of two polynomials modulo [`POLYNOMIAL`].
const fn product(a: u32, mut b: u32) -> u32 {
    let (mut sum, mut bit) = (0, ONE);
    while bit > 0 {
        if a & bit != 0 {
            sum ^= b;
        }
        b = if b & 1 == 1 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
        bit >>= 1;
    }
    sum
}

const fn powers() -> [u32; 67] {
    let mut table = [ONE >> 1; 67];
    let mut k = 1;
    while k < table.len() {
        table[k] = product(table[k - 1], table[k - 1]);
        k += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn checksum_is_castagnolis() {
        // The check value of the CRC catalogue, and RFC 3720's 32 zero bytes.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c_join(crc32c(b"1234"), crc32c(b"56789"), 5), 0xE306_9283);
        assert_eq!(crc32c_join(crc32c(b""), crc32c(b"123456789"), 9), 0xE306_9283);
    }

    proptest! {
        #[test]
        fn joining_agrees_with_the_library(a: u32, b: u32, length: u64, shift in 0..64_u32) {
            let length = length >> shift;
            let (wide_a, wide_b) = (u64::from(a), u64::from(b));
            let kind = CrcAlgorithm::Crc32Iscsi;
            let expected = crc_fast::checksum_combine(kind, wide_a, wide_b, length) as u32;
            prop_assert_eq!(crc32c_join(a, b, length), expected);
        }
    }
}
