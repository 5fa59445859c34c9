//! Compresses the chunks of one image, by a few threads: the trainer's cores are its own.

use std::thread;

use bytes::Bytes;
use parking_lot::Mutex;

use super::fate::{Decided, Fate, bytes_of};
use crate::checkpoint::codec::Encoder;
use crate::checkpoint::layout::{FileImage, WINDOW_DATA_BYTES_MAX};
use crate::error::{Error, Result};

/// Of this many cores one compresses, and so many threads at most: by then the disk is slower.
const CORES_PER_THREAD: usize = 4;
const THREADS_MAX: usize = 4;

/// Whether an image may be compressed: what comes of it is held in memory until it is written, and
/// one that a process without `compress` has staged may be as large as the whole state.
pub fn fits_memory(image: &FileImage) -> bool {
    image.size_bytes - image.header.len() as u64 <= WINDOW_DATA_BYTES_MAX
}

/// Compresses those of an image's chunks that are to be written and are worth it.
pub fn compress(decided: &mut [Decided<'_>], image: &[u8]) -> Result<()> {
    let mut found: Vec<&mut Decided<'_>> =
        decided.iter_mut().filter(|one| matches!(one.fate, Fate::Raw)).collect();
    // The largest first, so that no thread begins it when the others have ended.
    found.sort_by_key(|one| one.entry.length);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = (cores / CORES_PER_THREAD).clamp(1, THREADS_MAX).min(found.len());
    let work = Mutex::new(found);
    let worker = || -> Result<()> {
        let mut encoder = Encoder::new()?;
        loop {
            let Some(one) = work.lock().pop() else { return Ok(()) };
            let raw = bytes_of(image, one.entry);
            let mut packed = Vec::new();
            if encoder.encode(one.piece.dtype, raw, &mut packed).is_some() {
                one.fate = Fate::Packed(Bytes::from(packed));
            }
        }
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        let own = worker();
        let panicked = || Error::Closed { what: "a thread that compresses".into() };
        let ended =
            others.into_iter().map(|other| other.join().unwrap_or_else(|_| Err(panicked())));
        ended.fold(own, Result::and)
    })
}
