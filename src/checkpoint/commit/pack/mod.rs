//! What is really written of a staged image: chunks that are what the last save left are referred
//! to instead, others are compressed where that is worth it.
//!
//! Without these options nothing of this runs, and images are written as they were staged.
//!
//! | file | what it does |
//! |---|---|
//! | `book` | where chunks lie since the last commit, by what they are |
//! | `fate` | what becomes of each chunk of an image |
//! | `compress` | compresses the chunks of an image |
//! | `image` | writes the file that holds what is left |
//! | `hold` | referred steps stay until the manifest says so |

mod book;
mod compress;
mod fate;
mod hold;
mod image;

use std::collections::BTreeMap;

use parking_lot::Mutex;

use self::book::{Book, Kept};
use self::fate::Decided;
use super::write::Written;
use crate::checkpoint::layout::Referred;
use crate::error::{Error, Result};

pub use hold::{check_held, held_steps, hold, let_go};
pub use image::{Image, write_packed};

/// How chunks are stored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PackOptions {
    /// Refer to chunks that have not changed since the last save instead of writing them again; a
    /// chunk is written anew at the latest after so many saves that referred to it.
    pub delta_saves_max: Option<u32>,
    /// Compress chunks by [the codec](crate::checkpoint::codec), each if samples of it say that it
    /// is worth it. Pieces and files are then small enough to be compressed in memory.
    pub compress: bool,
}

impl PackOptions {
    /// Whether anything differs from writing images as they are.
    pub fn is_any(&self) -> bool {
        self.delta_saves_max.is_some() || self.compress
    }

    /// Refuses numbers that make no sense.
    pub fn check(&self) -> Result<()> {
        match self.delta_saves_max {
            Some(0) => Err(Error::invalid("delta", "at least 1 save", 0)),
            _ => Ok(()),
        }
    }
}

/// Packs a checkpointer's saves, one after the other.
#[derive(Debug)]
pub struct Packer {
    options: PackOptions,
    /// Chunks of the last committed save of this rank.
    book: Mutex<Book>,
}

/// What a save under way has packed so far.
#[derive(Debug, Default)]
pub struct Packed {
    /// Its chunks, for the saves after it.
    next: Book,
    /// Files of other steps that it refers to.
    referred: BTreeMap<(i64, String), Referred>,
    /// What it saved.
    pub tally: Tally,
}

/// Bytes of a rank's part of a save.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes of its chunks as they are in memory.
    pub raw_bytes: u64,
    /// Of them, those of chunks that were referred to.
    pub referred_bytes: u64,
    /// Bytes of the files that were written.
    pub written_bytes: u64,
}

impl Packer {
    /// A packer that knows of no save yet; `None` if there is nothing to do.
    pub fn new(options: PackOptions) -> Option<Self> {
        options.is_any().then(|| Self { options, book: Mutex::default() })
    }

    /// Whether later steps may refer to what is written.
    pub fn is_delta(&self) -> bool {
        self.options.delta_saves_max.is_some()
    }

    /// Whether images must be small.
    pub fn is_compressing(&self) -> bool {
        self.options.compress
    }

    /// Takes over what a save has packed, or forgets all: after a failure nobody knows whether the
    /// other ranks and retention go by that save or the one before it.
    pub fn settle(&self, packed: Packed, outcome: &Result<()>) {
        match outcome {
            Ok(()) => *self.book.lock() = packed.next,
            // On no rank anything was committed, and so nothing was pruned.
            Err(Error::Skipped { .. }) => {}
            Err(_) => *self.book.lock() = Book::default(),
        }
    }
}

impl Packed {
    /// Puts down where a chunk lies.
    fn keep(&mut self, one: &Decided<'_>, kept: Kept) {
        if let Some((key, _)) = one.identity {
            self.next.insert(key, kept);
        }
    }

    fn refer(&mut self, kept: &Kept) {
        let file = kept.file.as_ref();
        self.referred
            .entry((kept.step, file.path.clone()))
            .or_insert_with(|| Referred { step: kept.step, file: file.clone() });
    }

    /// Moves the files that it refers to over to what the rank tells rank 0.
    pub fn tell(&mut self, written: &mut Written) {
        written.referred.extend(std::mem::take(&mut self.referred).into_values());
    }
}
