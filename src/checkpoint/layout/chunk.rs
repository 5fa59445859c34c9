//! One row of `tensors.arrow`: where a rectangle of a tensor lies, and its checksum.

use super::dtype::{Dtype, elements, shape_bytes};
use super::rank_file::Piece;
use crate::checkpoint::flat::{fits, flat_range};
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};

/// Codec of bytes stored as they are in memory.
pub const RAW_CODEC: &str = "raw";
/// Codec of [compressed](crate::checkpoint::codec) chunks.
pub const PLANES_CODEC: &str = "planes-zstd";

/// A stored piece of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Compact JSON array of keys; int keys stay ints.
    pub path: String,
    /// Name of the entry in the rank file.
    pub entry: String,
    /// safetensors' name of the element type.
    pub dtype: String,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<i64>,
    /// Where the rectangle starts, in elements per dimension.
    pub offsets: Vec<i64>,
    /// How far the rectangle reaches, in elements per dimension.
    pub extent: Vec<i64>,
    /// Instead of a rectangle: start and length in the flattened tensor, in elements.
    pub flat: Option<(i64, i64)>,
    /// File, relative to the folder of the manifest.
    pub file: String,
    /// Offset of the stored bytes from the start of the file.
    pub start: u64,
    /// Stored bytes.
    pub length: u64,
    /// CRC-32C of the stored bytes.
    pub crc32c: u32,
    /// How the bytes are stored: `raw` or `planes-zstd`.
    pub codec: String,
    /// The step whose folder holds the file, if it is another one.
    pub step_ref: Option<i64>,
}

impl Chunk {
    /// The row of a piece that is stored as it is, up to where that is.
    pub fn of(piece: &Piece) -> Self {
        let flat = piece.is_flat();
        Self {
            path: piece.path.clone(),
            entry: String::new(),
            dtype: piece.dtype.name.into(),
            shape: piece.shape.clone(),
            offsets: if flat { vec![] } else { piece.rect.offsets.clone() },
            extent: if flat { vec![] } else { piece.rect.extent.clone() },
            flat: flat.then(|| (piece.rect.offsets[0], piece.rect.extent[0])),
            file: String::new(),
            start: 0,
            length: piece.length,
            crc32c: 0,
            codec: RAW_CODEC.into(),
            step_ref: None,
        }
    }

    /// The rectangle, or the flat range (see [`flat`](crate::checkpoint::flat)).
    pub fn rect(&self) -> Rect {
        match self.flat {
            Some((start, len)) if self.shape.len() != 1 => flat_range(start, len),
            _ => Rect { offsets: self.offsets.clone(), extent: self.extent.clone() },
        }
    }

    /// Whether the bytes are stored as they are in memory.
    pub fn is_raw(&self) -> bool {
        self.codec == RAW_CODEC
    }

    /// Bytes of the elements in memory.
    pub fn raw_bytes(&self) -> u64 {
        if self.is_raw() {
            return self.length;
        }
        let dtype = Dtype::named(&self.dtype);
        let bytes = dtype.ok().and_then(|dtype| shape_bytes(&self.rect().extent, dtype));
        bytes.unwrap_or_default()
    }

    /// Whether the stored bytes can be this many in memory.
    fn holds(&self, raw_bytes: u64) -> bool {
        let fewer = 0 < self.length && self.length < raw_bytes;
        if self.is_raw() { raw_bytes == self.length } else { fewer }
    }

    /// Checks that the row's numbers agree with each other and that this version can read it.
    /// `named_in` is the table's file name for the message.
    pub fn check(&self, named_in: &str) -> Result<Dtype> {
        let bad = |expected: &str, found: String| {
            Err(Error::corrupt(
                format!("{named_in}, tensor {}", self.path),
                0,
                expected,
                found,
                "use an older step",
            ))
        };
        super::check_relative(&self.file, named_in)?;
        let Ok(dtype) = Dtype::named(&self.dtype) else {
            return bad("a known dtype", self.dtype.clone());
        };
        if self.step_ref.is_some_and(|step| step < 0) {
            return bad("the number of a step", format!("{:?}", self.step_ref));
        }
        if !(self.is_raw() || self.codec == PLANES_CODEC) {
            return Err(Error::Unsupported {
                what: format!("chunk of tensor {} with codec {}", self.path, self.codec),
                advice: "read this checkpoint with a newer version".into(),
            });
        }
        if self.start.checked_add(self.length).is_none() {
            return bad("a byte range", format!("start {} length {}", self.start, self.length));
        }
        let flat = self.flat.is_some();
        if flat && (self.shape.len() == 1 || !self.offsets.is_empty() || !self.extent.is_empty()) {
            return bad("a rectangle or a flat range, not both", format!("{:?}", self.offsets));
        }
        if !flat && self.is_plain(dtype) {
            return Ok(dtype);
        }
        let range = self.rect();
        if elements(&self.shape).is_none() || !fits(&range, &self.shape) {
            return bad(
                "a range inside the tensor",
                format!("{} in {:?}", describe(&range), self.shape),
            );
        }
        if !shape_bytes(&range.extent, dtype).is_some_and(|bytes| self.holds(bytes)) {
            return bad(
                "the bytes of the range, or fewer if compressed",
                format!("{} bytes for {} of {}", self.length, describe(&range), self.dtype),
            );
        }
        Ok(dtype)
    }
}

impl Chunk {
    /// Whether all is well with a rectangle: the usual answer, at no allocation per row.
    fn is_plain(&self, dtype: Dtype) -> bool {
        let dims = self.shape.len();
        self.offsets.len() == dims
            && self.extent.len() == dims
            && elements(&self.shape).is_some()
            && shape_bytes(&self.extent, dtype).is_some_and(|bytes| self.holds(bytes))
            && (0..dims).all(|d| {
                let (from, n) = (self.offsets[d], self.extent[d]);
                from >= 0 && n >= 0 && from.checked_add(n).is_some_and(|to| to <= self.shape[d])
            })
    }
}

/// Offsets and extent of a row that may contradict itself.
fn describe(range: &Rect) -> String {
    format!("offsets {:?} extent {:?}", range.offsets, range.extent)
}
