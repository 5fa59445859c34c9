//! Copies a training state into a staging slot, as fast as memory allows, so that the trainer may
//! go on while the slot is written.
//!
//! The slot holds the file images themselves (headers, entries, padding), each from a page on.

mod copy;
mod slots;

use bytes::Bytes;

use super::layout::{FileImage, Piece};
use super::plan::TensorIn;
use crate::error::Result;
use crate::memory::{PAGE_BYTES, Slot};

pub use slots::{SlotPlace, Slots, Staged};

use copy::{CopyList, copy_all};

/// Where each image starts in the slot, and the bytes all need.
pub fn image_starts(images: &[FileImage]) -> (Vec<usize>, usize) {
    let mut at = 0_usize;
    let starts = images
        .iter()
        .map(|image| {
            let start = at;
            at += (image.size_bytes as usize).next_multiple_of(PAGE_BYTES);
            start
        })
        .collect();
    (starts, at)
}

/// Copies headers, tensors and padding into the slot.
pub fn stage(
    slot: &mut Slot,
    images: &[FileImage],
    pieces: &[Piece],
    tensors: &[TensorIn<'_>],
) -> Result<()> {
    let (starts, _) = image_starts(images);
    let mut list = CopyList::default();
    for (image, &base) in images.iter().zip(&starts) {
        list.push(base, &image.header);
        for entry in &image.entries {
            let at = base + entry.start as usize;
            let Some(piece) = entry.piece.and_then(|i| pieces.get(i)) else {
                list.push_zeros(at, entry.length as usize);
                continue;
            };
            let from = piece.source_start as usize;
            let source = tensors.get(piece.source).map_or(&[][..], |t| t.data);
            list.push(at, source.get(from..from + piece.length as usize).unwrap_or_default());
        }
    }
    copy_all(list, slot)
}

/// One image's bytes in a staged slot.
pub fn image_bytes(slot: &Bytes, image: &FileImage, start: usize) -> Bytes {
    slot.slice(start..start + image.size_bytes as usize)
}
