//! Where chunks lie since the last commit, by what they are.

use std::collections::HashMap;
use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::fate::Decided;
use crate::checkpoint::layout::{Chunk, FileRecord, Piece};

/// A chunk of a committed step.
#[derive(Debug, Clone)]
pub struct Kept {
    /// XXH3-128 of its bytes in memory.
    pub hash: u128,
    /// The step in whose folder it lies.
    pub step: i64,
    /// Saves that have referred to it.
    pub age: u32,
    /// The file.
    pub file: Arc<FileRecord>,
    /// Name of its entry.
    pub entry: String,
    /// Offset from the start of the file.
    pub start: u64,
    /// Stored bytes.
    pub length: u64,
    /// CRC-32C of the stored bytes.
    pub crc32c: u32,
    /// How they are stored.
    pub codec: &'static str,
}

impl Kept {
    /// A chunk that this save has written.
    pub fn written(one: &Decided<'_>, step: i64, file: &Arc<FileRecord>, chunk: &Chunk) -> Self {
        Self {
            hash: one.identity.map_or(0, |(_, hash)| hash),
            step,
            age: 0,
            file: Arc::clone(file),
            entry: chunk.entry.clone(),
            start: chunk.start,
            length: chunk.length,
            crc32c: chunk.crc32c,
            codec: one.codec(),
        }
    }
}

/// Chunks by [`key_of`].
#[derive(Debug, Default)]
pub struct Book(HashMap<u128, Kept>);

impl Book {
    pub fn get(&self, key: u128) -> Option<&Kept> {
        self.0.get(&key)
    }

    pub fn insert(&mut self, key: u128, kept: Kept) {
        self.0.insert(key, kept);
    }
}

/// What tells a chunk from every other: its tensor's path, dtype and shape, and its place in it.
pub fn key_of(piece: &Piece) -> u128 {
    let mut hasher = Xxh3::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(piece.path.as_bytes());
    part(piece.dtype.name.as_bytes());
    for numbers in [&piece.shape, &piece.rect.offsets, &piece.rect.extent] {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        part(&bytes);
    }
    hasher.digest128()
}

/// What tells bytes from other bytes: 128 bits, since a checksum of 32 would call every four
/// thousand millionth change none.
pub fn hash_of(bytes: &[u8]) -> u128 {
    xxh3_128(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::layout::Dtype;
    use crate::checkpoint::rects::Rect;

    #[test]
    fn any_difference_makes_another_chunk() {
        let piece = Piece {
            path: "[\"w\"]".into(),
            dtype: Dtype::named("F32").unwrap(),
            shape: vec![4, 3],
            rect: Rect { offsets: vec![1, 0], extent: vec![2, 3] },
            length: 24,
            source: 3,
            source_start: 12,
        };
        let same = Piece { source: 0, source_start: 0, ..piece.clone() };
        assert_eq!(key_of(&piece), key_of(&same), "wherever its bytes are in memory");
        let others: [fn(&mut Piece); 6] = [
            |p| p.path = "[\"v\"]".into(),
            |p| p.dtype = Dtype::named("I32").unwrap(),
            |p| p.shape = vec![4, 3, 1],
            |p| p.rect.offsets = vec![2, 0],
            |p| p.rect.extent = vec![1, 3],
            // The same numbers, cut elsewhere.
            |p| (p.shape, p.rect.offsets) = (vec![4, 3, 1], vec![0]),
        ];
        for change in others {
            let mut other = piece.clone();
            change(&mut other);
            assert_ne!(key_of(&other), key_of(&piece), "{other:?}");
        }
        // The vector of the reference implementation for no input, and a changed bit.
        assert_eq!(hash_of(b""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
        assert_ne!(hash_of(&[0; 64]), hash_of(&[1; 64]));
    }
}
