//! Which chunks the targets of a restore need, proven to cover each target exactly once.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::fill::{Sharing, Target};
use super::packed::{Table, wanted};
use super::windows::Wanted;
use super::{OLDER, OpenStep};
use crate::checkpoint::flat::{fits, moves, prove};
use crate::checkpoint::layout::{Chunk, Dtype, crc32c_join, shape_bytes};
use crate::checkpoint::rects::{Rect, Runs};
use crate::error::{Error, Result};

/// A chunk that is read, and where its bytes go.
pub struct Need<'s> {
    pub chunk: &'s Chunk,
    pub uses: Vec<(usize, Runs)>,
    /// Of a compressed chunk that comes in more than one part.
    pub table: Option<Table>,
    /// Start, checksum and bytes of the parts seen so far, in no order.
    sums: Mutex<Vec<(u64, u32, u64)>>,
}

impl Need<'_> {
    /// Whether it is read through the page cache.
    pub fn is_shared(&self, sharing: Sharing) -> bool {
        let used: u64 = self.uses.iter().map(|(_, runs)| runs.run_bytes * runs.count).sum();
        match sharing {
            Sharing::Alone => false,
            Sharing::Partial => used < self.chunk.raw_bytes(),
            Sharing::All => true,
        }
    }

    /// What is to be read of the chunk.
    pub fn wanted(&self, id: usize) -> Vec<Wanted> {
        if let Some(table) = &self.table {
            return wanted(id, self.chunk, &table.index);
        }
        let (start, whole) = (self.chunk.start, !self.chunk.is_raw());
        vec![Wanted { id, start, end: start + self.chunk.length, whole }]
    }

    /// File and tensor, for messages.
    pub fn named(&self, step: &OpenStep) -> String {
        format!("{}, tensor {}", step.path_of(self.chunk), self.chunk.path)
    }

    /// Notes the checksum and bytes of a part that starts at `start` of the file.
    pub fn passed(&self, start: u64, (sum, bytes): (u32, u64)) {
        self.sums.lock().push((start, sum, bytes));
    }

    /// Whether the parts make up what is stored.
    pub fn check_sum(&self, step: &OpenStep) -> Result<()> {
        let mut sums = self.sums.lock();
        sums.sort_unstable();
        let found = sums.iter().fold(0, |sum, &(_, part, bytes)| crc32c_join(sum, part, bytes));
        if found == self.chunk.crc32c {
            return Ok(());
        }
        Err(Error::corrupt(
            self.named(step),
            self.chunk.start,
            format!("crc32c {:08x}", self.chunk.crc32c),
            format!("{found:08x}"),
            OLDER,
        ))
    }
}

/// The chunks that the targets need, in the order of the targets.
pub fn needs<'s>(step: &'s OpenStep, targets: &[Target<'_>]) -> Result<Vec<Need<'s>>> {
    let mut needs: Vec<Need<'s>> = Vec::with_capacity(targets.len());
    // Targets may need one chunk several times: by its place in memory, which all rows have.
    let mut known: HashMap<*const Chunk, usize> = HashMap::with_capacity(targets.len());
    for (t, target) in targets.iter().enumerate() {
        let Some(chunks) = step.tensors.get(&target.path) else {
            return Err(Error::NotFound {
                what: format!("tensor {} in step {}", target.path, step.manifest.step),
                advice: "compare the names with `drivetrain ckpt inspect`".into(),
            });
        };
        let dtype = check_target(target, &chunks[0])?;
        let mut add = |chunk: &'s Chunk, runs: Runs| {
            let id = *known.entry(std::ptr::from_ref(chunk)).or_insert_with(|| {
                needs.push(Need { chunk, uses: Vec::new(), table: None, sums: Mutex::default() });
                needs.len() - 1
            });
            needs[id].uses.push((t, runs));
        };
        if let [chunk] = chunks.as_slice()
            && is_same(chunk, target)
        {
            // The usual small tensor, for which there is nothing to prove.
            if !target.data.is_empty() {
                add(chunk, Runs::all(target.data.len() as u64));
            }
            continue;
        }
        let rects: Vec<_> = chunks.iter().map(Chunk::rect).collect();
        proven(step, target, &rects)?;
        for (chunk, rect) in chunks.iter().zip(&rects) {
            for runs in moves(&target.shape, rect, &target.rect, dtype.bytes) {
                add(chunk, runs);
            }
        }
    }
    Ok(needs)
}

/// Whether a chunk is the very rectangle that is wanted, so that it is copied as it is.
fn is_same(chunk: &Chunk, target: &Target<'_>) -> bool {
    chunk.flat.is_none()
        && chunk.offsets == target.rect.offsets
        && chunk.extent == target.rect.extent
}

fn proven(step: &OpenStep, target: &Target<'_>, rects: &[Rect]) -> Result<()> {
    prove(&target.shape, &target.rect, rects).map_err(|fault| {
        let list = |rects: &[Rect]| rects.iter().map(Rect::describe).collect::<Vec<_>>().join(" ");
        let found =
            format!("missing {}; more than once {}", list(&fault.missing), list(&fault.twice));
        let file = format!("{}, tensor {}", step.folder, target.path);
        Error::corrupt(file, 0, "each element in exactly one chunk", found, OLDER)
    })
}

fn check_target(target: &Target<'_>, stored: &Chunk) -> Result<Dtype> {
    let dtype = Dtype::named(&target.dtype)?;
    let what = || format!("tensor {}", target.path);
    if (&target.dtype, &target.shape) != (&stored.dtype, &stored.shape) {
        let expected = format!("{} {:?} as stored", stored.dtype, stored.shape);
        return Err(Error::invalid(
            what(),
            expected,
            format!("{} {:?}", target.dtype, target.shape),
        ));
    }
    let bytes = shape_bytes(&target.rect.extent, dtype);
    if !fits(&target.rect, &target.shape) || bytes != Some(target.data.len() as u64) {
        let found = format!("{} bytes for {}", target.data.len(), target.rect.describe());
        return Err(Error::invalid(what(), "memory for a rectangle inside the tensor", found));
    }
    Ok(dtype)
}
