//! Reads every byte of a step once and compares checksums of files, headers and chunks. Compressed
//! chunks are then read again and decoded.

use std::collections::BTreeMap;
use std::sync::Arc;

use crc_fast::{CrcAlgorithm, Digest};

use super::{OpenStep, Stream};
use crate::checkpoint::codec::Decoder;
use crate::checkpoint::layout::{Chunk, FileRecord, crc32c_join, file_path};
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::storage::{OpenOptions, ReadAt};

/// Bytes per read.
const READ_BYTES: u64 = 8 << 20;

/// Something wrong in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// The tensor's path, or `""` if the problem is not in one.
    pub tensor: String,
    /// What was expected and what was found.
    pub reason: String,
}

/// A stretch of a file whose checksum is known.
struct Stretch<'a> {
    length: u64,
    expected: Option<u32>,
    tensor: &'a str,
    start: u64,
}

pub async fn verify(step: &OpenStep, progress: &mut dyn FnMut(u64)) -> Result<Vec<Problem>> {
    let mut chunks: BTreeMap<(Option<i64>, &str), Vec<&Chunk>> = BTreeMap::new();
    for chunk in step.tensors.values().flatten() {
        chunks.entry((chunk.step_ref, &chunk.file)).or_default().push(chunk);
    }
    let mut problems = Vec::new();
    for (step_ref, file) in step.manifest.all_files() {
        let mut inside = chunks.remove(&(step_ref, file.path.as_str())).unwrap_or_default();
        inside.sort_by_key(|c| (c.start, c.length));
        let path = file_path(&step.folder, step_ref, &file.path);
        match verify_file(step, &path, file, &inside, progress).await {
            // What was stored as it was written may have been written wrong.
            Ok(found) if found.is_empty() => {
                problems.extend(undecodable(step, &path, &inside).await?);
            }
            Ok(found) => problems.extend(found),
            Err(e @ (Error::NotFound { .. } | Error::Corrupt { .. } | Error::Io { .. })) => {
                problems.push(Problem { file: path, tensor: String::new(), reason: e.to_string() });
            }
            Err(e) => return Err(e),
        }
    }
    Ok(problems)
}

/// Header, chunks and the gaps between them, in order. Chunks that overlap are a problem of their
/// own, which the caller's coverage proof finds.
fn stretches<'a>(file: &FileRecord, chunks: &[&'a Chunk]) -> Vec<Stretch<'a>> {
    let header = u32::from_str_radix(&file.header_crc32c, 16).ok();
    let mut list = vec![Stretch {
        length: file.header_bytes.min(file.size_bytes),
        expected: header,
        tensor: "",
        start: 0,
    }];
    let mut at = file.header_bytes;
    let gap_to = |at: &mut u64, to: u64, list: &mut Vec<Stretch<'a>>| {
        if to > *at {
            list.push(Stretch { length: to - *at, expected: None, tensor: "", start: *at });
            *at = to;
        }
    };
    for chunk in chunks {
        gap_to(&mut at, chunk.start, &mut list);
        if chunk.start == at {
            let (length, expected) = (chunk.length, Some(chunk.crc32c));
            list.push(Stretch { length, expected, tensor: &chunk.path, start: at });
            at += chunk.length;
        }
    }
    gap_to(&mut at, file.size_bytes, &mut list);
    list
}

async fn verify_file(
    step: &OpenStep,
    path: &str,
    file: &FileRecord,
    chunks: &[&Chunk],
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<Problem>> {
    let open = step.store.open(path, OpenOptions { direct: true }).await?;
    let list = stretches(file, chunks);
    let mut sums = Vec::with_capacity(list.len());
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    let (mut at, mut fill) = (0, 0);
    let mut buf = Buffer::heap(READ_BYTES.min(file.size_bytes) as usize);
    while at < file.size_bytes {
        let len = READ_BYTES.min(file.size_bytes - at);
        buf.set_len(len as usize);
        buf = open.read_at(at, buf).await?;
        let mut rest: &[u8] = &buf;
        while let Some(stretch) = list.get(sums.len()) {
            let take = (stretch.length - fill).min(rest.len() as u64);
            let (now, later) = rest.split_at(take as usize);
            digest.update(now);
            fill += take;
            rest = later;
            if fill < stretch.length {
                break;
            }
            let empty = stretch.length == 0;
            sums.push(if empty { 0 } else { digest.finalize() as u32 });
            digest.reset();
            fill = 0;
        }
        at += len;
        progress(len);
    }
    Ok(compare(path, file, &list, &sums))
}

/// Compressed chunks of a file that cannot be decoded, or not to the bytes that were saved.
async fn undecodable(step: &OpenStep, path: &str, chunks: &[&Chunk]) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    let mut decoder = Decoder::default();
    for chunk in chunks.iter().filter(|chunk| !chunk.is_raw()) {
        let file = step.store.open(path, OpenOptions { direct: true }).await?;
        if let Err(e) = decode_all(file, path, chunk, &mut decoder).await {
            let (file, tensor) = (path.to_string(), chunk.path.clone());
            problems.push(Problem { file, tensor, reason: e.to_string() });
        }
    }
    Ok(problems)
}

async fn decode_all(
    file: Arc<dyn ReadAt>,
    path: &str,
    chunk: &Chunk,
    decoder: &mut Decoder,
) -> Result<()> {
    let mut stream = Stream::open(file, path.into(), chunk).await?;
    let mut left = chunk.raw_bytes();
    let mut raw = vec![0; READ_BYTES.min(left) as usize];
    while left > 0 {
        let take = READ_BYTES.min(left);
        stream.next(decoder, &mut raw[..take as usize]).await?;
        left -= take;
    }
    Ok(())
}

fn compare(path: &str, file: &FileRecord, list: &[Stretch<'_>], sums: &[u32]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut whole = 0;
    for (stretch, &sum) in list.iter().zip(sums) {
        whole = crc32c_join(whole, sum, stretch.length);
        if stretch.expected.is_some_and(|expected| expected != sum) {
            let expected = stretch.expected.unwrap_or_default();
            problems.push(Problem {
                file: path.into(),
                tensor: stretch.tensor.into(),
                reason: format!(
                    "expected crc32c {expected:08x}, found {sum:08x} in bytes {}..{}{}",
                    stretch.start,
                    stretch.start + stretch.length,
                    if stretch.tensor.is_empty() { " (header)" } else { "" }
                ),
            });
        }
    }
    if problems.is_empty() && format!("{whole:08x}") != file.crc32c {
        problems.push(Problem {
            file: path.into(),
            tensor: String::new(),
            reason: format!("expected crc32c {} of the whole file, found {whole:08x}", file.crc32c),
        });
    }
    problems
}
