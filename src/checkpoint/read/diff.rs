//! What differs between two steps, tensor by tensor, with a few chunks in memory at a time.
//!
//! Tensors whose chunks have the same ranges and checksums are taken to be equal without reading
//! them: that is what makes a comparison of two fine-tunes quick.

use std::collections::BTreeSet;

use crc_fast::{CrcAlgorithm, Digest};

use super::{OLDER, OpenStep, Target};
use crate::checkpoint::layout::{Chunk, Dtype, RAW_CODEC, shape_bytes};
use crate::checkpoint::numbers::{count, differing, squares};
use crate::checkpoint::rects::Rect;
use crate::error::{Error, Result};
use crate::memory::Buffer;
use crate::runtime::block_on;
use crate::storage::OpenOptions;

/// Bytes of each side that are compared at a time where both have the same chunks.
const READ_BYTES: u64 = 8 << 20;

/// How a tensor differs.
#[derive(Debug, Clone, PartialEq)]
pub enum Change {
    /// Only the second step has it.
    Added,
    /// Only the first step has it.
    Removed,
    /// Another element type or shape; (dtype, shape) of both.
    Form((String, Vec<i64>), (String, Vec<i64>)),
    /// Other values.
    Values(Values),
}

/// How far the values of a tensor lie apart.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Values {
    /// Numbers of the tensor; a complex element is two.
    pub total: u64,
    /// Of them, those with other bits.
    pub changed: u64,
    /// Of the changed ones, those that are not finite on a side; the norms leave them out.
    pub not_finite: u64,
    /// Sum of squares of the first step's finite numbers.
    pub squares: f64,
    /// Sum of squares of the differences.
    pub difference_squares: f64,
    /// Largest difference.
    pub max_abs: f64,
}

impl Values {
    /// ‖a − b‖.
    pub fn norm(&self) -> f64 {
        self.difference_squares.sqrt()
    }

    /// ‖a − b‖ / ‖a‖; `None` where the first step is all zeros.
    pub fn relative(&self) -> Option<f64> {
        (self.squares > 0.0).then(|| (self.difference_squares / self.squares).sqrt())
    }

    fn add(&mut self, dtype: &str, a: &[u8], b: &[u8]) {
        self.total += count(dtype, a);
        self.squares += squares(dtype, a);
        differing(dtype, a, b, &mut |x, y| {
            self.changed += 1;
            if x.is_finite() && y.is_finite() {
                let apart = (x - y).abs();
                self.difference_squares += apart * apart;
                self.max_abs = self.max_abs.max(apart);
            } else {
                self.not_finite += 1;
            }
        });
    }
}

/// Paths of the tensors of either step that differ, in order, with how. `wanted` chooses tensors
/// by path; `progress` hears of the bytes of each side that were dealt with.
pub fn differences(
    a: &OpenStep,
    b: &OpenStep,
    wanted: &dyn Fn(&str) -> bool,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<(String, Change)>> {
    let paths: BTreeSet<&str> =
        a.tensors().chain(b.tensors()).map(|(path, _)| path).filter(|p| wanted(p)).collect();
    let mut found = Vec::new();
    for path in paths {
        let change = match (a.tensors.get(path), b.tensors.get(path)) {
            (Some(left), Some(right)) => tensor(a, left, b, right)?,
            (Some(_), None) => Some(Change::Removed),
            _ => Some(Change::Added),
        };
        progress(a.tensors.get(path).into_iter().flatten().map(|c| c.length).sum());
        found.extend(change.map(|change| (path.to_string(), change)));
    }
    Ok(found)
}

fn tensor(a: &OpenStep, left: &[Chunk], b: &OpenStep, right: &[Chunk]) -> Result<Option<Change>> {
    let (x, y) = (&left[0], &right[0]);
    if (&x.dtype, &x.shape) != (&y.dtype, &y.shape) {
        let form = |c: &Chunk| (c.dtype.clone(), c.shape.clone());
        return Ok(Some(Change::Form(form(x), form(y))));
    }
    let mut values = Values::default();
    match pairs(left, right) {
        Some(pairs) if pairs.iter().all(|(l, r)| same_bytes(l, r)) => return Ok(None),
        Some(pairs) if pairs.iter().all(|(l, r)| l.codec == RAW_CODEC && r.codec == RAW_CODEC) => {
            for (l, r) in pairs {
                block_on(side_by_side(a, l, b, r, &mut values))??;
            }
        }
        // Cut differently: whole chunks of the first step, and what the second has for them.
        _ => {
            for chunk in left {
                let range = chunk.rect();
                values.add(&x.dtype, &part(a, x, &range)?, &part(b, x, &range)?);
            }
        }
    }
    Ok((values.changed > 0).then_some(Change::Values(values)))
}

/// The chunks of both that hold the same elements; `None` if they are cut differently.
fn pairs<'a>(left: &'a [Chunk], right: &'a [Chunk]) -> Option<Vec<(&'a Chunk, &'a Chunk)>> {
    let sorted = |chunks: &'a [Chunk]| {
        let mut list: Vec<&Chunk> = chunks.iter().collect();
        list.sort_by(|a, b| (&a.offsets, a.flat).cmp(&(&b.offsets, b.flat)));
        list
    };
    let found: Vec<_> = sorted(left).into_iter().zip(sorted(right)).collect();
    let place = |c: &'a Chunk| (&c.offsets, &c.extent, c.flat);
    let same = left.len() == right.len() && found.iter().all(|(l, r)| place(l) == place(r));
    same.then_some(found)
}

fn same_bytes(a: &Chunk, b: &Chunk) -> bool {
    (a.length, a.crc32c, &a.codec) == (b.length, b.crc32c, &b.codec)
}

/// Compares two raw chunks of the same elements a piece at a time, and checks their checksums.
async fn side_by_side(
    a: &OpenStep,
    left: &Chunk,
    b: &OpenStep,
    right: &Chunk,
    values: &mut Values,
) -> Result<()> {
    let mut sides = Vec::new();
    for (step, chunk) in [(a, left), (b, right)] {
        let path = step.path_of(chunk);
        sides.push((step.store.open(&path, OpenOptions { direct: true }).await?, chunk, path));
    }
    let digest = || Digest::new(CrcAlgorithm::Crc32Iscsi);
    let mut digests = [digest(), digest()];
    let mut buffers = [Buffer::heap(0), Buffer::heap(0)];
    let mut at = 0;
    while at < left.length {
        let len = READ_BYTES.min(left.length - at) as usize;
        for (i, (file, chunk, _)) in sides.iter().enumerate() {
            let mut buffer = std::mem::replace(&mut buffers[i], Buffer::heap(0));
            if buffer.capacity() < len {
                buffer = Buffer::heap(len);
            }
            buffer.set_len(len);
            buffers[i] = file.read_at(chunk.start + at, buffer).await?;
            digests[i].update(&buffers[i]);
        }
        values.add(&left.dtype, &buffers[0], &buffers[1]);
        at += len as u64;
    }
    for ((_, chunk, path), digest) in sides.iter().zip(&digests) {
        let found = if chunk.length == 0 { 0 } else { digest.finalize() as u32 };
        if found != chunk.crc32c {
            return Err(Error::corrupt(
                format!("{path}, tensor {}", chunk.path),
                chunk.start,
                format!("crc32c {:08x}", chunk.crc32c),
                format!("{found:08x}"),
                OLDER,
            ));
        }
    }
    Ok(())
}

/// A range of a tensor of a step.
fn part(step: &OpenStep, like: &Chunk, rect: &Rect) -> Result<Vec<u8>> {
    let dtype = Dtype::named(&like.dtype)?;
    let bytes = shape_bytes(&rect.extent, dtype).unwrap_or_default();
    let mut data = vec![0; bytes as usize];
    step.read_into(vec![Target {
        path: like.path.clone(),
        dtype: like.dtype.clone(),
        shape: like.shape.clone(),
        rect: rect.clone(),
        data: &mut data,
    }])?;
    Ok(data)
}
