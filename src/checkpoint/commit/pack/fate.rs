//! What becomes of each chunk of an image.

use bytes::Bytes;

use super::book::{Book, Kept, hash_of, key_of};
use super::compress::{compress, fits_memory};
use super::image::Image;
use super::{Packed, Packer};
use crate::checkpoint::commit::Job;
use crate::checkpoint::layout::{PLANES_CODEC, Piece, Placed, RAW_CODEC};
use crate::error::Result;
use crate::memory::PAGE_BYTES;

/// Shorter chunks are always written: a reference would keep a whole step for less than a page.
const REFER_BYTES_MIN: u64 = PAGE_BYTES as u64;

/// What becomes of a chunk.
#[derive(Debug)]
pub enum Fate {
    /// It is written as it is.
    Raw,
    /// It is written compressed: the stored form.
    Packed(Bytes),
    /// It lies in an earlier step, which is referred to.
    Refer(Box<Kept>),
}

/// A chunk of a staged image.
#[derive(Debug)]
pub struct Decided<'a> {
    /// Its entry, and the number of that.
    pub entry: &'a Placed,
    pub position: usize,
    /// The piece, and the number of that.
    pub piece: &'a Piece,
    pub index: usize,
    /// Its key and the hash of its bytes, if later saves may refer to it.
    pub identity: Option<(u128, u128)>,
    pub fate: Fate,
}

impl Decided<'_> {
    /// How it is stored.
    pub fn codec(&self) -> &'static str {
        match &self.fate {
            Fate::Raw => RAW_CODEC,
            Fate::Packed(_) => PLANES_CODEC,
            Fate::Refer(kept) => kept.codec,
        }
    }

    /// Bytes of its compressed form, if it has one.
    pub fn packed(&self) -> Option<&Bytes> {
        if let Fate::Packed(bytes) = &self.fate { Some(bytes) } else { None }
    }
}

impl Packer {
    /// Decides for every chunk of an image.
    pub fn decide<'a>(
        &self,
        job: &'a Job,
        image: &Image<'a>,
        packed: &mut Packed,
    ) -> Result<Vec<Decided<'a>>> {
        let book = self.book.lock();
        let mut found = Vec::with_capacity(image.plan.entries.len());
        for (position, entry) in image.plan.entries.iter().enumerate() {
            let Some(index) = entry.piece else { continue };
            let Some(piece) = job.pieces.get(index) else { continue };
            let bytes = bytes_of(image.bytes, entry);
            packed.tally.raw_bytes += entry.length;
            let refers = self.is_delta() && entry.length >= REFER_BYTES_MIN;
            let identity = refers.then(|| (key_of(piece), hash_of(bytes)));
            let kept = identity.and_then(|identity| self.unchanged(&book, job.step, identity));
            let fate = match kept {
                Some(kept) => {
                    packed.tally.referred_bytes += entry.length;
                    Fate::Refer(Box::new(kept))
                }
                None => Fate::Raw,
            };
            found.push(Decided { entry, position, piece, index, identity, fate });
        }
        drop(book);
        if self.is_compressing() && fits_memory(image.plan) {
            compress(&mut found, image.bytes)?;
        }
        Ok(found)
    }

    /// Where a chunk lies already, as it is after one more save that refers to it.
    fn unchanged(&self, book: &Book, step: i64, (key, hash): (u128, u128)) -> Option<Kept> {
        let kept = book.get(key)?;
        let saves_max = self.options.delta_saves_max.unwrap_or_default();
        // Only earlier steps are referred to: so no two ever refer to each other, and a step that
        // is overwritten does not need what it replaces.
        let fits = kept.hash == hash && kept.step < step && kept.age < saves_max;
        fits.then(|| Kept { age: kept.age + 1, ..kept.clone() })
    }
}

/// The staged bytes of an entry.
pub fn bytes_of<'a>(image: &'a [u8], entry: &Placed) -> &'a [u8] {
    let (start, end) = (entry.start as usize, (entry.start + entry.length) as usize);
    image.get(start..end).unwrap_or_default()
}
