//! Writes the file that holds what is left of an image.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::book::Kept;
use super::fate::{Decided, Fate, bytes_of};
use super::{Packed, Packer};
use crate::checkpoint::commit::write::{OpenFile, Sums, create, unless_failed, write_slices};
use crate::checkpoint::commit::{Folders, Job};
use crate::checkpoint::layout::{Chunk, FileImage, Piece, Stored, crc32c, join, plan_packed};
use crate::error::Result;
use crate::memory::PAGE_BYTES;
use crate::storage::{Store, WriteOptions};

/// Padding is shorter than a page.
static ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// A staged image: its plan, its bytes, and the checksums of its parts.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    pub plan: &'a FileImage,
    pub bytes: &'a Bytes,
    pub sums: &'a [u32],
}

/// Writes what must be written of an image. Nothing is written if all of its chunks lie elsewhere.
/// After an error nothing of it stays.
pub async fn write_packed(
    store: &dyn Store,
    folders: &Folders,
    job: &Job,
    rank: u32,
    staged: Image<'_>,
    packer: &Packer,
    packed: &mut Packed,
) -> Result<OpenFile> {
    let decided = packer.decide(job, &staged, packed)?;
    let mut chunks = Vec::new();
    for one in &decided {
        let Fate::Refer(kept) = &one.fate else { continue };
        packed.refer(kept);
        packed.keep(one, (**kept).clone());
        chunks.push(referring(one.piece, kept));
    }
    let path = join(&folders.path, &staged.plan.name);
    if !decided.is_empty() && chunks.len() == decided.len() {
        return Ok(OpenFile { path, writer: None, record: None, chunks });
    }
    let smaller = left_of(staged.plan, &decided)?;
    let plan = smaller.as_ref().unwrap_or(staged.plan);
    let by_piece: HashMap<usize, &Decided<'_>> =
        decided.iter().map(|one| (one.index, one)).collect();
    let source = Source { staged, plan, by_piece };
    let options = WriteOptions { direct: true, size_bytes: Some(plan.size_bytes) };
    let mut writer = create(store, &path, options).await?;
    let mut sums = Sums::given(plan, &source.sums());
    let mut written = Ok(());
    job.progress.begin(plan.size_bytes);
    for slice in source.slices() {
        written = write_slices(writer.as_mut(), &slice, &mut sums, &job.progress).await;
        if written.is_err() {
            break;
        }
    }
    let writer = unless_failed(store, &path, writer, written).await?;
    let (record, mut own) = sums.record(plan, &job.pieces, folders, rank);
    packed.tally.written_bytes += record.size_bytes;
    let file = Arc::new(record.clone());
    for (one, chunk) in source.decided().zip(&mut own) {
        chunk.codec = one.codec().into();
        packed.keep(one, Kept::written(one, job.step, &file, chunk));
    }
    chunks.extend(own);
    Ok(OpenFile { path, writer: Some(writer), record: Some(record), chunks })
}

/// The row of a chunk that lies elsewhere.
fn referring(piece: &Piece, kept: &Kept) -> Chunk {
    Chunk {
        entry: kept.entry.clone(),
        file: kept.file.path.clone(),
        start: kept.start,
        length: kept.length,
        crc32c: kept.crc32c,
        codec: kept.codec.into(),
        step_ref: Some(kept.step),
        ..Chunk::of(piece)
    }
}

/// The plan of a file without the chunks that lie elsewhere, and of compressed ones; `None` if all
/// are written as they are.
fn left_of(image: &FileImage, decided: &[Decided<'_>]) -> Result<Option<FileImage>> {
    let stored: Vec<_> = decided
        .iter()
        .filter(|one| !matches!(one.fate, Fate::Refer(_)))
        .map(|one| {
            let packed = one.packed().map(|bytes| bytes.len() as u64);
            Stored { index: one.index, piece: one.piece, packed }
        })
        .collect();
    if stored.len() == decided.len() && stored.iter().all(|one| one.packed.is_none()) {
        return Ok(None);
    }
    plan_packed(&image.name, &stored).map(Some)
}

/// Where the bytes of a planned file come from.
struct Source<'a> {
    staged: Image<'a>,
    plan: &'a FileImage,
    by_piece: HashMap<usize, &'a Decided<'a>>,
}

impl<'a> Source<'a> {
    /// The chunks of the file, as they lie in it.
    fn decided(&self) -> impl Iterator<Item = &'a Decided<'a>> {
        let pieces = self.plan.entries.iter().filter_map(|entry| entry.piece);
        pieces.filter_map(|index| self.by_piece.get(&index).copied())
    }

    fn of(&self, piece: Option<usize>) -> Option<&'a Decided<'a>> {
        self.by_piece.get(&piece?).copied()
    }

    /// Checksums of the header and of the entries: staging knows those of what is not compressed.
    fn sums(&self) -> Vec<u32> {
        let header = std::iter::once(crc32c(&self.plan.header));
        let entries = self.plan.entries.iter().map(|entry| {
            let Some(one) = self.of(entry.piece) else {
                return crc32c(&ZEROS[..entry.length as usize % PAGE_BYTES]);
            };
            if let Some(bytes) = one.packed() {
                return crc32c(bytes);
            }
            let known = self.staged.sums.get(1 + one.position).copied();
            known.unwrap_or_else(|| crc32c(bytes_of(self.staged.bytes, one.entry)))
        });
        header.chain(entries).collect()
    }

    /// The file's bytes, in stretches of the staged image as long as can be.
    fn slices(&self) -> Vec<Bytes> {
        let mut found = vec![Bytes::copy_from_slice(&self.plan.header)];
        let mut open: Range<usize> = 0..0;
        let close = |open: &mut Range<usize>, found: &mut Vec<Bytes>| {
            if open.end > open.start {
                found.push(self.staged.bytes.slice(open.clone()));
            }
            *open = 0..0;
        };
        for entry in &self.plan.entries {
            let one = self.of(entry.piece);
            let own = match one {
                Some(one) => one.packed().cloned(),
                None => Some(Bytes::from_static(&ZEROS[..entry.length as usize % PAGE_BYTES])),
            };
            if let Some(bytes) = own {
                close(&mut open, &mut found);
                found.push(bytes);
            } else if let Some(one) = one {
                let from = one.entry.start as usize;
                if open.end != from || open.start == open.end {
                    close(&mut open, &mut found);
                    open.start = from;
                }
                open.end = from + one.entry.length as usize;
            }
        }
        close(&mut open, &mut found);
        found
    }
}
