//! Element types that tensors leave the engine with.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Element type of a tensor, with the names torch and numpy use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// Unsigned byte.
    U8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// IEEE half precision.
    F16,
    /// The upper half of an IEEE single.
    BF16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Every element type.
    pub const ALL: [Self; 9] = [
        Self::U8,
        Self::U16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::BF16,
        Self::F32,
        Self::F64,
        Self::Bool,
    ];

    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            Self::U8 | Self::Bool => 1,
            Self::U16 | Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// Name as torch and numpy spell it (`bfloat16` is ml_dtypes' in numpy).
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "uint8",
            Self::U16 => "uint16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    /// Accepts `float32` and `torch.float32` alike.
    fn from_str(text: &str) -> Result<Self> {
        let name = text.strip_prefix("torch.").unwrap_or(text);
        Self::ALL.into_iter().find(|d| d.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid("dtype", format!("one of {names}"), text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_with_and_without_prefix() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
            assert_eq!(format!("torch.{dtype}").parse::<DType>().unwrap(), dtype);
        }
        assert!("float8".parse::<DType>().is_err());
    }
}
