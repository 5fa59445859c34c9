//! A delivered batch: keys, validity, and arrays that share a few page-aligned buffers.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;

use super::budget::{Budget, Charge, Lease};
use super::quarantine::BadSample;
use crate::index::{Boxes, Calibration, Pose};
use crate::memory::Buffer;
use crate::transform::DType;

/// An array inside one part of a batch's memory. Row-major unless `strides_bytes` says otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Array {
    /// Index into [`BatchMemory::part`].
    pub part: usize,
    /// First byte inside the part.
    pub offset_bytes: usize,
    /// Shape.
    pub shape: Vec<usize>,
    /// Distance between neighbours along the first axis, where it is not the size of an item.
    pub first_stride_bytes: Option<usize>,
    /// Element type.
    pub dtype: DType,
}

impl Array {
    /// Elements, by the shape.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of one item along the first axis.
    pub fn item_bytes(&self) -> usize {
        self.shape.iter().skip(1).product::<usize>() * self.dtype.size_bytes()
    }

    /// Bytes of the part it spans.
    pub fn range(&self) -> Range<usize> {
        let count = self.shape.first().copied().unwrap_or(1);
        let stride = self.first_stride_bytes.unwrap_or(self.item_bytes());
        let span = if count == 0 { 0 } else { (count - 1) * stride + self.item_bytes() };
        self.offset_bytes..self.offset_bytes + span
    }
}

/// A field of a batch of B samples.
#[derive(Debug)]
#[non_exhaustive]
pub enum FieldData {
    /// One array whose first axis is B.
    Dense(Array),
    /// One array per sample, of different shapes.
    List(Vec<Array>),
    /// (ΣN, C) and int64 offsets (B+1).
    Ragged {
        /// The rows of all samples, one after the other.
        values: Array,
        /// Sample i has rows `offsets[i]..offsets[i + 1]`.
        offsets: Vec<i64>,
    },
    /// (B, M, C) and int64 counts (B).
    Padded {
        /// Zeros after each sample's rows.
        values: Array,
        /// Rows of each sample.
        count: Vec<i64>,
    },
    /// Bytes per sample that have no decoder, one-dimensional uint8.
    Blobs(Vec<Array>),
    /// Text per sample.
    Text(Vec<String>),
    /// Number per sample; NaN where it is missing.
    Scalars(Vec<f64>),
    /// Pose per sample; `None` for masked samples.
    Poses(Vec<Option<Pose>>),
    /// Calibration per sample; `None` where it is missing or masked.
    Calibrations(Vec<Option<Calibration>>),
    /// Boxes per sample.
    Boxes(Vec<Boxes>),
}

/// Bytes of a batch: buffers made for it, and read buffers that it shows as they are.
#[derive(Debug)]
pub enum Part {
    /// Written by decoders.
    Owned(Buffer),
    /// Read from storage.
    Read(Bytes),
}

impl Part {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(buffer) => buffer,
            Self::Read(bytes) => bytes,
        }
    }
}

/// The memory of one delivered batch. It returns to the arena, and its bytes to the budget, when
/// the last array that shows it is gone.
#[derive(Debug, Default)]
pub struct BatchMemory {
    // Dropped in this order: bytes first, then the permission to have them.
    parts: Vec<Part>,
    charge: Option<Charge>,
    lease: Option<Lease>,
}

impl BatchMemory {
    pub(super) fn new(parts: Vec<Part>) -> Self {
        Self { parts, ..Self::default() }
    }

    /// Takes over the step's permission to have this memory.
    pub(super) fn charge(&mut self, charge: Charge) {
        self.charge = Some(charge);
    }

    /// From now on the caller holds it.
    pub(super) fn hand_out(&mut self, budget: &Budget) {
        let private_bytes = self.bytes_len();
        self.lease = Some(budget.lease(self.charge.take(), private_bytes));
    }

    /// One of its parts.
    pub fn part(&self, index: usize) -> Option<&Part> {
        self.parts.get(index)
    }

    /// Number of parts.
    pub fn part_count(&self) -> usize {
        self.parts.len()
    }

    /// First byte, length and whether it may be written, of one part: for views in another
    /// language that keep this memory alive. Parts that were read may share their bytes.
    pub fn pointer(&mut self, index: usize) -> Option<(NonNull<u8>, usize, bool)> {
        let part = self.parts.get_mut(index)?;
        let (start, length, writable) = match part {
            Part::Owned(buffer) => (buffer.as_mut_ptr(), buffer.len(), true),
            Part::Read(bytes) => (bytes.as_ptr().cast_mut(), bytes.len(), false),
        };
        Some((NonNull::new(start).unwrap_or(NonNull::dangling()), length, writable))
    }

    /// Bytes of all parts.
    pub fn bytes_len(&self) -> u64 {
        self.parts.iter().map(|p| p.bytes().len() as u64).sum()
    }
}

/// A batch of B samples.
#[derive(Debug)]
pub struct Batch {
    /// Epoch it belongs to.
    pub epoch: u64,
    /// Step of its pass, from 0.
    pub step: u64,
    /// Key of each sample.
    pub keys: Vec<String>,
    /// Row of each sample in the table.
    pub rows: Vec<u64>,
    /// Whether each sample counts: not padding of the tail, not masked.
    pub valid: Vec<bool>,
    /// Fields in the order they were asked for.
    pub fields: Vec<(String, FieldData)>,
    /// What the arrays lie in.
    pub memory: Arc<BatchMemory>,
    /// It lies outside the memory limit, because the caller holds all of that.
    pub copied: bool,
    /// Samples that were replaced or masked.
    pub bad: Vec<BadSample>,
}

impl Batch {
    /// A field by name.
    pub fn field(&self, name: &str) -> Option<&FieldData> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, data)| data)
    }

    /// The bytes an array spans; empty if it is not this batch's.
    pub fn bytes(&self, array: &Array) -> &[u8] {
        let part = self.memory.part(array.part).map_or(&[][..], Part::bytes);
        part.get(array.range()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_spans_its_last_item_but_not_the_gap_behind_it() {
        let mut array = Array {
            part: 0,
            offset_bytes: 64,
            shape: vec![2, 3, 4],
            first_stride_bytes: None,
            dtype: DType::F32,
        };
        assert_eq!((array.elements(), array.item_bytes(), array.range()), (24, 48, 64..160));
        array.first_stride_bytes = Some(100);
        assert_eq!(array.range(), 64..212);
        array.shape[0] = 0;
        assert_eq!(array.range(), 64..64);
    }
}
