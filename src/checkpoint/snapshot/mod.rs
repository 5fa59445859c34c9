//! Copies a training state into a staging slot, as fast as memory allows, so that the trainer may
//! go on while the slot is written.
//!
//! The slot holds the file images themselves (headers, entries, padding), each from a page on, and
//! a sealed record of what they are, so that another process can commit them if this one is killed.
//!
//! | file | what it does |
//! |---|---|
//! | `planned` | what follows from names and shapes alone, kept between saves |
//! | `copy`, `copy_sum` | many copies by a few threads, with checksums |
//! | `seal` | what makes a slot believable |
//! | `slots` | two slots, used again and again |
//! | `adopt` | slots of a killed process of this run |

mod adopt;
mod copy;
mod copy_sum;
mod planned;
mod seal;
mod slots;

use bytes::Bytes;

use super::layout::{FileImage, Piece};
use super::plan::TensorIn;
use crate::error::Result;
use crate::memory::{PAGE_BYTES, Slot};

pub use adopt::{Adopted, Claims, Left};
pub use planned::{Groups, Planned};
pub use seal::{DATA_START, Identity, Record, seal};
pub use slots::{SlotPlace, Slots, Staged};

use copy::{CopyList, copy_all};

/// Checksums of each image's parts: the header, then the entries.
pub type ImageSums = Vec<Vec<u32>>;

/// Where each image starts after [`DATA_START`], and the bytes all need.
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

/// Copies headers, tensors and padding into the slot; returns the checksums of all parts.
pub fn stage(
    slot: &mut Slot,
    images: &[FileImage],
    pieces: &[Piece],
    tensors: &[TensorIn<'_>],
) -> Result<ImageSums> {
    let (starts, _) = image_starts(images);
    let mut list = CopyList::default();
    for (image, &base) in images.iter().zip(&starts) {
        let base = base + DATA_START;
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
    let sums = copy_all(&list, slot)?;
    Ok(split_sums(images, &sums))
}

/// The checksums of all parts in a row, by image.
fn split_sums(images: &[FileImage], mut sums: &[u32]) -> ImageSums {
    let mut of_image = |image: &FileImage| {
        let (own, rest) = sums.split_at(sums.len().min(1 + image.entries.len()));
        sums = rest;
        own.to_vec()
    };
    images.iter().map(&mut of_image).collect()
}

/// One image's bytes in those of a staged slot.
pub fn image_bytes(slot: &Bytes, image: &FileImage, start: usize) -> Bytes {
    slot.slice(start..start + image.size_bytes as usize)
}
