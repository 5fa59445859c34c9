//! Element types by their safetensors names.

use crate::error::{Error, Result};

/// One element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dtype {
    /// Name as safetensors spells it, where it has one.
    pub name: &'static str,
    /// Bytes of an element.
    pub bytes: u64,
    /// Whether the safetensors library knows the type; others are stored as 1-D `U8` entries.
    pub in_safetensors: bool,
}

const fn row(name: &'static str, bytes: u64, in_safetensors: bool) -> Dtype {
    Dtype { name, bytes, in_safetensors }
}

const TABLE: [Dtype; 20] = [
    row("BOOL", 1, true),
    row("U8", 1, true),
    row("I8", 1, true),
    row("F8_E4M3", 1, true),
    row("F8_E5M2", 1, true),
    row("F8_E8M0", 1, true),
    row("F8_E4M3FNUZ", 1, true),
    row("F8_E5M2FNUZ", 1, true),
    row("U16", 2, true),
    row("I16", 2, true),
    row("F16", 2, true),
    row("BF16", 2, true),
    row("U32", 4, true),
    row("I32", 4, true),
    row("F32", 4, true),
    row("U64", 8, true),
    row("I64", 8, true),
    row("F64", 8, true),
    row("C64", 8, true),
    row("C128", 16, false),
];

impl Dtype {
    /// Looks a name up.
    pub fn named(name: &str) -> Result<Self> {
        TABLE.iter().find(|d| d.name == name).copied().ok_or_else(|| {
            let known: Vec<_> = TABLE.iter().map(|d| d.name).collect();
            Error::invalid("dtype", known.join(", "), name)
        })
    }
}

/// Elements of a shape; `None` for a negative extent or more than `i64::MAX` elements.
pub fn elements(shape: &[i64]) -> Option<i64> {
    shape.iter().try_fold(1_i64, |n, &d| if d < 0 { None } else { n.checked_mul(d) })
}

/// Bytes of a shape; `None` where [`elements`] is, or where they do not fit.
pub fn shape_bytes(shape: &[i64], dtype: Dtype) -> Option<u64> {
    u64::try_from(elements(shape)?).ok()?.checked_mul(dtype.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_types() {
        assert_eq!(Dtype::named("BF16").unwrap().bytes, 2);
        assert_eq!(Dtype::named("C128").unwrap().bytes, 16);
        assert!(Dtype::named("bfloat16").unwrap_err().to_string().contains("BF16"));
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[3, 0, 5]), Some(0));
        assert_eq!(elements(&[-1]), None);
        assert_eq!(elements(&[i64::MAX, 2]), None);
        assert_eq!(shape_bytes(&[2, 3], Dtype::named("F64").unwrap()), Some(48));
    }
}
