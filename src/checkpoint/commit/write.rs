//! Writes a rank's staged images, computing the checksums of what is written on the way.

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};

use super::pack::{Image, Packed, Packer, write_packed};
use super::{Folders, Job};
use crate::checkpoint::layout::{
    Chunk, FileImage, FileRecord, Piece, Placed, Referred, crc32c, crc32c_join, join,
};
use crate::checkpoint::meet::Progress;
use crate::checkpoint::snapshot::{Staged, image_bytes, image_starts};
use crate::error::{Error, Result};
use crate::storage::{Store, WriteOptions, Writer};

/// Bytes per write: large enough for full speed, small enough that checksums of the next slice
/// are computed while the device takes this one.
const SLICE_BYTES: usize = 8 << 20;

/// What a rank wrote.
#[derive(Debug, Default)]
pub struct Written {
    /// Its files.
    pub files: Vec<FileRecord>,
    /// Its chunks.
    pub chunks: Vec<Chunk>,
    /// Files of other steps that hold some of them.
    pub referred: Vec<Referred>,
}

/// A file whose bytes were written but may not be durable.
pub struct OpenFile {
    pub path: String,
    /// None for a file that is not written, since all its chunks lie elsewhere.
    pub writer: Option<Box<dyn Writer>>,
    pub record: Option<FileRecord>,
    pub chunks: Vec<Chunk>,
}

/// Writes image `i` of a job, packed if there is something to pack it with, else into `made` where
/// its space was reserved. After an error nothing of it stays.
pub async fn write_image(
    store: &dyn Store,
    folders: &Folders,
    job: &Job,
    rank: u32,
    i: usize,
    pack: Option<(&Packer, &mut Packed)>,
    made: Option<Box<dyn Writer>>,
) -> Result<OpenFile> {
    let slot = job.staged.as_ref().map(Staged::bytes).unwrap_or_default();
    let (starts, _) = image_starts(&job.images);
    let (Some(image), Some(&start)) = (job.images.get(i), starts.get(i)) else {
        return Err(Error::invalid("file of a save", format!("below {}", job.images.len()), i));
    };
    let mut bytes = image_bytes(&slot, image, start);
    if store.uri().starts_with("memory://") {
        // That store keeps the very slices it is given, and the slot could never be re-used.
        bytes = Bytes::copy_from_slice(&bytes);
    }
    if let Some((packer, packed)) = pack {
        let staged = Image { plan: image, bytes: &bytes, sums: job.sums(i) };
        return write_packed(store, folders, job, rank, staged, packer, packed).await;
    }
    let path = join(&folders.path, &image.name);
    let options = WriteOptions { direct: true, size_bytes: Some(image.size_bytes) };
    let mut writer = match made {
        Some(writer) => writer,
        None => create(store, &path, options).await?,
    };
    let mut sums = Sums::given(image, job.sums(i));
    job.progress.begin(image.size_bytes);
    let written = write_slices(writer.as_mut(), &bytes, &mut sums, &job.progress).await;
    let writer = unless_failed(store, &path, writer, written).await?;
    let (record, chunks) = sums.record(image, &job.pieces, folders, rank);
    Ok(OpenFile { path, writer: Some(writer), record: Some(record), chunks })
}

/// Writes a small file in one piece. After an error nothing of it stays.
pub async fn write_small(
    store: &dyn Store,
    path: String,
    bytes: Bytes,
    record: FileRecord,
) -> Result<OpenFile> {
    let options = WriteOptions { direct: false, size_bytes: Some(bytes.len() as u64) };
    let mut writer = create(store, &path, options).await?;
    let written = writer.write(bytes).await;
    let writer = unless_failed(store, &path, writer, written).await?;
    Ok(OpenFile { path, writer: Some(writer), record: Some(record), chunks: Vec::new() })
}

/// What [`write_image`] would report, with checksums of nothing: for simulations.
pub fn pretend_written(
    image: &FileImage,
    pieces: &[Piece],
    folders: &Folders,
    rank: u32,
) -> (FileRecord, Vec<Chunk>) {
    let mut sums = Sums::new(image);
    sums.done = vec![0; sums.lengths.len()];
    sums.record(image, pieces, folders, rank)
}

/// Starts a file. A failed answer may come from a file that is there; its name is this save's own,
/// so it is removed.
pub async fn create(
    store: &dyn Store,
    path: &str,
    options: WriteOptions,
) -> Result<Box<dyn Writer>> {
    let created = store.create(path, options).await;
    if created.is_err() {
        let _ = store.delete(path).await;
    }
    created
}

/// Makes the bytes durable. After an error the file is removed.
pub async fn sync_file(
    store: &dyn Store,
    file: OpenFile,
) -> Result<(Option<FileRecord>, Vec<Chunk>)> {
    if let Some(writer) = file.writer
        && let Err(e) = writer.finish().await
    {
        let _ = store.delete(&file.path).await;
        return Err(e);
    }
    Ok((file.record, file.chunks))
}

/// Removes a file that will not be finished.
pub async fn discard(store: &dyn Store, file: OpenFile) {
    let Some(writer) = file.writer else { return };
    let _ = writer.abort().await;
    let _ = store.delete(&file.path).await;
}

/// Gives the writer back, or removes what it wrote.
pub async fn unless_failed(
    store: &dyn Store,
    path: &str,
    writer: Box<dyn Writer>,
    written: Result<()>,
) -> Result<Box<dyn Writer>> {
    let Err(e) = written else { return Ok(writer) };
    let _ = writer.abort().await;
    let _ = store.delete(path).await;
    Err(e)
}

/// Removes files of a failed save. Best effort: what stays is under an attempt folder that no
/// manifest names, and retention sweeps it later.
pub async fn remove_files(store: &dyn Store, folders: &Folders, files: &[FileRecord]) {
    for file in files {
        let _ = store.delete(&join(&folders.step, &file.path)).await;
    }
}

/// Removes the folders of a failed save if they are empty. Only once the verdict is known: another
/// rank may have made them just now and be about to create its file in them.
pub async fn remove_folders(store: &dyn Store, folders: &Folders) {
    let _ = store.remove_dir(&folders.path).await;
    let _ = store.remove_dir(&folders.step).await;
}

/// Appends bytes, a slice at a time.
pub async fn write_slices(
    writer: &mut dyn Writer,
    bytes: &Bytes,
    sums: &mut Sums,
    progress: &Progress,
) -> Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        let end = (at + SLICE_BYTES).min(bytes.len());
        let slice = bytes.slice(at..end);
        sums.update(&slice);
        writer.write(slice).await?;
        progress.add(end - at);
        at = end;
    }
    Ok(())
}

/// Checksums of an image's parts, computed as its slices pass by in order.
pub struct Sums {
    /// Lengths of the header and of each entry: together the whole file.
    lengths: Vec<u64>,
    done: Vec<u32>,
    open: Digest,
    open_bytes: u64,
}

impl Sums {
    /// Sums that staging computed; those it did not are computed here.
    pub fn given(image: &FileImage, known: &[u32]) -> Self {
        let mut sums = Self::new(image);
        if known.len() == sums.lengths.len() {
            sums.done = known.to_vec();
        }
        sums
    }

    fn new(image: &FileImage) -> Self {
        let header = std::iter::once(image.header.len() as u64);
        let lengths = header.chain(image.entries.iter().map(|e| e.length)).collect();
        let mut sums = Self {
            lengths,
            done: Vec::new(),
            open: Digest::new(CrcAlgorithm::Crc32Iscsi),
            open_bytes: 0,
        };
        sums.close_full();
        sums
    }

    fn update(&mut self, mut slice: &[u8]) {
        while let (false, Some(&length)) = (slice.is_empty(), self.lengths.get(self.done.len())) {
            let take = (length - self.open_bytes).min(slice.len() as u64);
            let (now, rest) = slice.split_at(take as usize);
            if take == length {
                // The usual small entry: one call without a digest's set-up.
                self.done.push(crc32c(now));
            } else {
                self.open.update(now);
                self.open_bytes += take;
            }
            slice = rest;
            self.close_full();
        }
    }

    /// Ends parts that have all their bytes, empty ones included.
    fn close_full(&mut self) {
        while let Some(&length) = self.lengths.get(self.done.len()) {
            if self.open_bytes < length {
                return;
            }
            let sum = if length == 0 { 0 } else { self.open.finalize() as u32 };
            self.done.push(sum);
            self.open.reset();
            self.open_bytes = 0;
        }
    }

    /// The record of the file, and its chunks in their order.
    pub fn record(
        &self,
        image: &FileImage,
        pieces: &[Piece],
        folders: &Folders,
        rank: u32,
    ) -> (FileRecord, Vec<Chunk>) {
        let path = join(&folders.attempt, &image.name);
        let parts = self.done.iter().zip(&self.lengths);
        let whole = parts.fold(0, |sum, (&part, &bytes)| crc32c_join(sum, part, bytes));
        let record = FileRecord {
            path: path.clone(),
            size_bytes: image.size_bytes,
            crc32c: format!("{whole:08x}"),
            header_bytes: image.header.len() as u64,
            header_crc32c: format!("{:08x}", self.done.first().copied().unwrap_or_default()),
            rank,
        };
        let entries = image.entries.iter().zip(self.done.iter().skip(1));
        let chunk = |(entry, &sum): (&Placed, &u32)| {
            let piece = entry.piece.and_then(|i| pieces.get(i))?;
            Some(Chunk {
                entry: entry.entry.clone(),
                file: path.clone(),
                start: entry.start,
                length: entry.length,
                crc32c: sum,
                ..Chunk::of(piece)
            })
        };
        (record, entries.filter_map(chunk).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_the_parts_however_the_slices_fall() {
        let lengths = [10_u64, 0, 7, 1, 0, 30];
        let total: u64 = lengths.iter().sum();
        let bytes: Vec<u8> = (0..total).map(|i| (i * 7) as u8).collect();
        let mut start = 10;
        let entries = lengths[1..].iter().map(|&length| {
            start += length;
            Placed { piece: None, entry: String::new(), start: start - length, length }
        });
        let image = FileImage {
            name: "x".into(),
            header: bytes[..10].to_vec(),
            entries: entries.collect(),
            size_bytes: total,
        };
        for slice in 1..=bytes.len() {
            let mut sums = Sums::new(&image);
            bytes.chunks(slice).for_each(|s| sums.update(s));
            let mut at = 0;
            let expected: Vec<_> = lengths
                .iter()
                .map(|&n| {
                    at += n as usize;
                    crc32c(&bytes[at - n as usize..at])
                })
                .collect();
            assert_eq!(sums.done, expected, "slices of {slice}");
            let folders = Folders::new(1, 2, 3).unwrap();
            let (record, _) = sums.record(&image, &[], &folders, 0);
            assert_eq!(record.crc32c, format!("{:08x}", crc32c(&bytes)));
        }
    }
}
