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
    let cores = thread::available_parallelism().map_or(1, usize::from);
    compress_by((cores / CORES_PER_THREAD).clamp(1, THREADS_MAX), decided, image)
}

fn compress_by(threads: usize, decided: &mut [Decided<'_>], image: &[u8]) -> Result<()> {
    let mut found: Vec<&mut Decided<'_>> =
        decided.iter_mut().filter(|one| matches!(one.fate, Fate::Raw)).collect();
    // The largest first, so that no thread begins it when the others have ended.
    found.sort_by_key(|one| one.entry.length);
    let threads = threads.min(found.len());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::layout::{Dtype, Piece, Placed};
    use crate::checkpoint::rects::Rect;

    #[test]
    fn any_number_of_threads_makes_the_same() {
        let dtype = Dtype::named("F32").unwrap();
        let mut image = Vec::new();
        let (mut pieces, mut entries) = (Vec::new(), Vec::new());
        for i in 0..9_usize {
            let count = 5000 + 1000 * ((i * 7) % 9);
            let start = image.len() as u64;
            image.extend((0..count).flat_map(|n| ((n * 31 + i) as f32).sin().to_le_bytes()));
            let (shape, length) = (vec![count as i64], 4 * count as u64);
            let (path, rect) = (format!("[{i}]"), Rect::whole(&shape));
            let (source, source_start) = (0, 0);
            pieces.push(Piece { path, dtype, shape, rect, length, source, source_start });
            entries.push(Placed { piece: Some(i), entry: i.to_string(), start, length });
        }
        let run = |threads| {
            let one = |(i, (piece, entry))| Decided {
                entry,
                position: i,
                piece,
                index: i,
                identity: None,
                fate: Fate::Raw,
            };
            let mut decided: Vec<_> = pieces.iter().zip(&entries).enumerate().map(one).collect();
            compress_by(threads, &mut decided, &image).unwrap();
            decided.iter().map(|one| one.packed().cloned()).collect::<Vec<_>>()
        };
        let mut encoder = Encoder::new().unwrap();
        let expected: Vec<_> = entries
            .iter()
            .map(|entry| {
                let mut out = Vec::new();
                let sum = encoder.encode(dtype, bytes_of(&image, entry), &mut out);
                sum.map(|_| Bytes::from(out))
            })
            .collect();
        assert!(expected.iter().all(Option::is_some));
        for threads in [1, 3, 20] {
            assert_eq!(run(threads), expected, "{threads} threads");
        }
        assert!(compress(&mut [], &image).is_ok());
    }
}
