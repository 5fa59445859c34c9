//! numpy's scalars and arrays, as numbers.

use super::{ARRAY_ITEMS_MAX, Node};

/// Kind and width of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dtype {
    kind: u8,
    width_bytes: usize,
    big_endian: bool,
}

/// Numbers of an array in C order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Array {
    pub(super) values: Vec<f64>,
}

impl Dtype {
    /// `f8`, `<i4`, `b1`, …
    pub(super) fn parse(code: &str) -> Option<Self> {
        let (order, code) = match code.as_bytes().first()? {
            b'<' | b'>' | b'=' | b'|' => code.split_at(1),
            _ => ("<", code),
        };
        let kind = *code.as_bytes().first()?;
        let width_bytes = code.get(1..)?.parse().ok()?;
        let known = matches!(
            (kind, width_bytes),
            (b'f', 2 | 4 | 8) | (b'i' | b'u', 1 | 2 | 4 | 8) | (b'b', 1)
        );
        known.then_some(Self { kind, width_bytes, big_endian: order == ">" })
    }

    pub(super) fn with_order(self, order: &str) -> Option<Self> {
        matches!(order, "<" | ">" | "=" | "|").then_some(Self { big_endian: order == ">", ..self })
    }

    pub(super) fn scalar(self, bytes: &[u8]) -> Option<Node> {
        let bits = self.bits(bytes)?;
        Some(match self.kind {
            b'b' => Node::Bool(bits != 0),
            b'i' => Node::Int(self.signed(bits)),
            b'u' => Node::Int(i64::try_from(bits).ok()?),
            _ => Node::Float(self.float(bits)),
        })
    }

    pub(super) fn array(self, shape: &[usize], fortran: bool, data: &[u8]) -> Option<Array> {
        let items = shape.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        let fits = items <= ARRAY_ITEMS_MAX && data.len() == items * self.width_bytes;
        // Column-major order of anything but a vector would need turning; infos have none.
        let ordered = !fortran || shape.len() <= 1;
        if !(fits && ordered) {
            return None;
        }
        let number = |bytes: &[u8]| {
            let bits = self.bits(bytes)?;
            Some(match self.kind {
                b'i' => self.signed(bits) as f64,
                b'u' | b'b' => bits as f64,
                _ => self.float(bits),
            })
        };
        let values = data.chunks_exact(self.width_bytes).map(number).collect::<Option<_>>()?;
        Some(Array { values })
    }

    fn bits(self, bytes: &[u8]) -> Option<u64> {
        if bytes.len() != self.width_bytes {
            return None;
        }
        let push = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        Some(if self.big_endian {
            bytes.iter().fold(0, push)
        } else {
            bytes.iter().rev().fold(0, push)
        })
    }

    fn signed(self, bits: u64) -> i64 {
        let unused = 64 - 8 * self.width_bytes as u32;
        ((bits << unused) as i64) >> unused
    }

    fn float(self, bits: u64) -> f64 {
        match self.width_bytes {
            8 => f64::from_bits(bits),
            4 => f64::from(f32::from_bits(bits as u32)),
            _ => half(bits as u16),
        }
    }
}

/// Value of an IEEE half float.
fn half(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let size = match exponent {
        0 => fraction * 2_f64.powi(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1.0 + fraction / 1024.0) * 2_f64.powi(exponent - 15),
    };
    if bits >> 15 == 1 { -size } else { size }
}

/// Protocol 2 stores bytes as text of code points below 256.
pub(super) fn latin1(text: &str) -> Option<Box<[u8]>> {
    text.chars().map(|c| u8::try_from(u32::from(c)).ok()).collect()
}

pub(super) fn dimension(node: &Node) -> Option<usize> {
    if let Node::Int(value) = node { usize::try_from(*value).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves() {
        let pairs = [(0x3c00, 1.0), (0xc000, -2.0), (0x7bff, 65504.0), (1, 2_f64.powi(-24))];
        for (bits, value) in pairs {
            assert_eq!(half(bits), value);
        }
        assert!(half(0x7e00).is_nan() && half(0xfc00) == f64::NEG_INFINITY);
    }

    #[test]
    fn widths_signs_and_orders() {
        let number = |code: &str, bytes: &[u8]| {
            Dtype::parse(code)?.array(&[1], false, bytes).map(|a| a.values[0])
        };
        assert_eq!(number("i2", &[0xfe, 0xff]), Some(-2.0));
        assert_eq!(number(">u2", &[1, 2]), Some(258.0));
        assert_eq!(number("f4", &1.5_f32.to_le_bytes()), Some(1.5));
        assert_eq!(number("i8", &[0; 7]), None);
        assert_eq!(number("O8", &[0; 8]), None);
        assert_eq!(Dtype::parse("f8").unwrap().array(&[usize::MAX, 2], false, &[]), None);
    }
}
