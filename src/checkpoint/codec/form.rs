//! The numbers that a dtype is made of.

use crate::checkpoint::layout::Dtype;

/// How the bytes of a dtype are taken apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Bytes of a number: 1, 2, 4 or 8. A complex element is two numbers.
    pub width: usize,
    /// Whether the number's bits are rotated left by one, so that the exponent of a float is not
    /// spread over two bytes with the sign before it.
    pub rotated: bool,
}

impl Form {
    /// The form of a dtype.
    pub fn of(dtype: Dtype) -> Self {
        match dtype.name {
            "BF16" | "F16" => Self { width: 2, rotated: true },
            "F32" | "C64" => Self { width: 4, rotated: true },
            "F64" | "C128" => Self { width: 8, rotated: true },
            _ => Self { width: dtype.bytes as usize, rotated: false },
        }
    }
}
