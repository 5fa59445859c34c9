//! Stored elements as numbers, for norms and statistics.

use half::{bf16, f16};

use super::layout::Dtype;

/// Calls `f` with each pair of differing elements of `a` and `b` as numbers (complex ones as two),
/// and with how many elements apart; equal bits are skipped. Lengths must be equal.
pub fn differing(dtype: &str, a: &[u8], b: &[u8], f: &mut dyn FnMut(f64, f64)) {
    match dtype {
        "F64" | "C128" => pairs::<8>(a, b, f64::from_le_bytes, f),
        "F32" | "C64" => pairs::<4>(a, b, |v| f64::from(f32::from_le_bytes(v)), f),
        "F16" => pairs::<2>(a, b, |v| f16::from_le_bytes(v).to_f64(), f),
        "BF16" => pairs::<2>(a, b, |v| bf16::from_le_bytes(v).to_f64(), f),
        "I64" => pairs::<8>(a, b, |v| i64::from_le_bytes(v) as f64, f),
        "U64" => pairs::<8>(a, b, |v| u64::from_le_bytes(v) as f64, f),
        "I32" => pairs::<4>(a, b, |v| f64::from(i32::from_le_bytes(v)), f),
        "U32" => pairs::<4>(a, b, |v| f64::from(u32::from_le_bytes(v)), f),
        "I16" => pairs::<2>(a, b, |v| f64::from(i16::from_le_bytes(v)), f),
        "U16" => pairs::<2>(a, b, |v| f64::from(u16::from_le_bytes(v)), f),
        "I8" => pairs::<1>(a, b, |[v]| f64::from(v as i8), f),
        "F8_E4M3" => pairs::<1>(a, b, |[v]| small_float(v, 4, 7, Special::TopNan), f),
        "F8_E5M2" => pairs::<1>(a, b, |[v]| f16::from_bits(u16::from(v) << 8).to_f64(), f),
        "F8_E4M3FNUZ" => pairs::<1>(a, b, |[v]| small_float(v, 4, 8, Special::ZeroNan), f),
        "F8_E5M2FNUZ" => pairs::<1>(a, b, |[v]| small_float(v, 5, 16, Special::ZeroNan), f),
        "F8_E8M0" => pairs::<1>(a, b, |[v]| scale(v), f),
        _ => pairs::<1>(a, b, |[v]| f64::from(v), f),
    }
}

fn pairs<const N: usize>(
    a: &[u8],
    b: &[u8],
    number: impl Fn([u8; N]) -> f64,
    f: &mut dyn FnMut(f64, f64),
) {
    let (a, _) = a.as_chunks::<N>();
    let (b, _) = b.as_chunks::<N>();
    for (x, y) in a.iter().zip(b).filter(|(x, y)| x != y) {
        f(number(*x), number(*y));
    }
}

/// Numbers in some elements: a complex one is two.
pub fn count(dtype: &str, bytes: &[u8]) -> u64 {
    let size = match dtype {
        "C64" => 4,
        "C128" => 8,
        other => Dtype::named(other).map_or(1, |d| d.bytes),
    };
    bytes.len() as u64 / size
}

/// Sum of the squares of finite elements.
pub fn squares(dtype: &str, bytes: &[u8]) -> f64 {
    // Against something that differs everywhere: the complement.
    let other: Vec<u8> = bytes.iter().map(|b| !b).collect();
    let mut sum = 0.0;
    differing(dtype, bytes, &other, &mut |x, _| {
        if x.is_finite() {
            sum += x * x;
        }
    });
    sum
}

/// What a format of eight bits has instead of infinities.
enum Special {
    /// All bits but the sign set is NaN.
    TopNan,
    /// The pattern of minus zero is NaN.
    ZeroNan,
}

fn small_float(bits: u8, exponent_bits: u32, bias: i32, special: Special) -> f64 {
    let nan = match special {
        Special::TopNan => bits & 0x7f == 0x7f,
        Special::ZeroNan => bits == 0x80,
    };
    if nan {
        return f64::NAN;
    }
    let mantissa_bits = 7 - exponent_bits;
    let exponent = i32::from((bits & 0x7f) >> mantissa_bits);
    let fraction = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
    let size = match exponent {
        0 => fraction * f64::from(1 - bias).exp2(),
        e => (1.0 + fraction) * f64::from(e - bias).exp2(),
    };
    if bits & 0x80 == 0 { size } else { -size }
}

/// A power of two, as block scales are stored.
fn scale(bits: u8) -> f64 {
    if bits == 0xff { f64::NAN } else { f64::from(i32::from(bits) - 127).exp2() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(dtype: &str, bytes: &[u8]) -> f64 {
        let other: Vec<u8> = bytes.iter().map(|b| !b).collect();
        let mut found = Vec::new();
        differing(dtype, bytes, &other, &mut |x, _| found.push(x));
        found[0]
    }

    #[test]
    fn elements_are_the_numbers_their_formats_say() {
        // Values of the tables in the OCP 8-bit formats' text, and of the FNUZ proposal.
        assert_eq!(number("F8_E4M3", &[0x7e]), 448.0);
        assert_eq!(number("F8_E4M3", &[0x01]), 0.001_953_125);
        assert_eq!(number("F8_E4M3", &[0xb8]), -1.0);
        assert!(number("F8_E4M3", &[0x7f]).is_nan());
        assert_eq!(number("F8_E5M2", &[0x7b]), 57344.0);
        assert_eq!(number("F8_E5M2", &[0x7c]), f64::INFINITY);
        assert_eq!(number("F8_E4M3FNUZ", &[0x7f]), 240.0);
        assert!(number("F8_E4M3FNUZ", &[0x80]).is_nan());
        assert_eq!(number("F8_E5M2FNUZ", &[0x7f]), 57344.0);
        assert_eq!(number("F8_E8M0", &[127]), 1.0);
        assert_eq!(number("F8_E8M0", &[130]), 8.0);
        assert_eq!(number("BF16", &[0xc0, 0x3f]), 1.5);
        assert_eq!(number("F16", &[0x00, 0x3e]), 1.5);
        assert_eq!(number("I8", &[0xff]), -1.0);
        assert_eq!(number("BOOL", &[1]), 1.0);
        assert_eq!(number("U64", &3_u64.to_le_bytes()), 3.0);
    }

    #[test]
    fn only_what_differs_is_told() {
        let bytes = |v: [f32; 3]| v.map(f32::to_le_bytes).concat();
        let mut found = Vec::new();
        let (a, b) = (bytes([1.0, 2.0, f32::NAN]), bytes([1.0, 2.5, f32::NAN]));
        differing("F32", &a, &b, &mut |x, y| found.push((x, y)));
        assert_eq!(found, [(2.0, 2.5)]);
        assert_eq!(squares("F32", &a), 5.0);
    }
}
