//! Rectangles of tensors: what two have in common, how bytes move between them, and the proof that
//! a set of them covers another exactly once.

/// A box of elements: where it starts and how far it reaches in each dimension.
/// A 0-d tensor has empty vectors and one element.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rect {
    /// First element per dimension.
    pub offsets: Vec<i64>,
    /// Elements per dimension.
    pub extent: Vec<i64>,
}

/// Gaps and overlaps are named up to this many; the rest only adds noise to a message.
const REPORTED_RECTS_MAX: usize = 4;
/// The search for what is missing stops at this many fragments.
const FRAGMENTS_MAX: usize = 4096;

/// Why a set of rectangles is no exact cover.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CoverFault {
    /// Some of what nobody covers.
    pub missing: Vec<Rect>,
    /// Some of what is covered more than once.
    pub twice: Vec<Rect>,
}

impl Rect {
    /// All of a tensor.
    pub fn whole(shape: &[i64]) -> Self {
        Self { offsets: vec![0; shape.len()], extent: shape.to_vec() }
    }

    /// Elements inside. Saturates instead of overflowing.
    pub fn volume(&self) -> i128 {
        self.extent.iter().fold(1, |n: i128, &d| n.saturating_mul(i128::from(d.max(0))))
    }

    /// Whether the numbers describe a box within `shape`.
    pub fn is_inside(&self, shape: &[i64]) -> bool {
        self.offsets.len() == shape.len()
            && self.extent.len() == shape.len()
            && self.offsets.iter().zip(&self.extent).zip(shape).all(|((&o, &e), &s)| {
                o >= 0 && e >= 0 && o.checked_add(e).is_some_and(|end| end <= s)
            })
    }

    fn end(&self, d: usize) -> i64 {
        self.offsets[d].saturating_add(self.extent[d])
    }

    /// What both contain; `None` if that is nothing.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        if self.offsets.len() != other.offsets.len() {
            return None;
        }
        let mut both = self.clone();
        for d in 0..self.offsets.len() {
            both.offsets[d] = self.offsets[d].max(other.offsets[d]);
            both.extent[d] = self.end(d).min(other.end(d)) - both.offsets[d];
            if both.extent[d] <= 0 {
                return None;
            }
        }
        Some(both)
    }

    /// What is left of `self` without `hole`, as at most 2 boxes per dimension.
    fn without(&self, hole: &Self) -> Vec<Self> {
        let Some(hole) = self.intersect(hole) else { return vec![self.clone()] };
        let mut rest = Vec::new();
        let mut core = self.clone();
        for d in 0..self.offsets.len() {
            for (from, to) in [(core.offsets[d], hole.offsets[d]), (hole.end(d), core.end(d))] {
                if from < to {
                    let mut part = core.clone();
                    part.offsets[d] = from;
                    part.extent[d] = to - from;
                    rest.push(part);
                }
            }
            core.offsets[d] = hole.offsets[d];
            core.extent[d] = hole.extent[d];
        }
        rest
    }

    /// The range as a person reads it: `[0:4, 2:8]`.
    pub fn describe(&self) -> String {
        let range = |d| format!("{}:{}", self.offsets[d], self.end(d));
        let dims: Vec<_> = (0..self.offsets.len()).map(range).collect();
        format!("[{}]", dims.join(", "))
    }
}

/// Proves that `pieces` cover each element of `target` exactly once. Pieces may reach beyond it.
///
/// Disjoint pieces whose volumes add up to the target's cover it; pieces are compared only with
/// those whose range along the most divided dimension overlaps theirs, so grids cost n log n.
pub fn prove_cover(target: &Rect, pieces: &[Rect]) -> Result<(), CoverFault> {
    if target.volume() == 0 {
        return Ok(());
    }
    let mut inside: Vec<Rect> = pieces.iter().filter_map(|p| target.intersect(p)).collect();
    let twice = overlaps(&mut inside);
    let covered: i128 = inside.iter().map(Rect::volume).sum();
    if twice.is_empty() && covered == target.volume() {
        return Ok(());
    }
    Err(CoverFault { missing: missing(target, &inside), twice })
}

/// Overlapping parts of `rects`, which it sorts.
fn overlaps(rects: &mut [Rect]) -> Vec<Rect> {
    let dims = rects.first().map_or(0, |r| r.offsets.len());
    if dims == 0 {
        return rects.iter().skip(1).take(REPORTED_RECTS_MAX).cloned().collect();
    }
    let axis = (0..dims).max_by_key(|&d| distinct_starts(rects, d)).unwrap_or(0);
    rects.sort_by_key(|r| r.offsets[axis]);
    let mut active: Vec<usize> = Vec::new();
    let mut found = Vec::new();
    for i in 0..rects.len() {
        active.retain(|&a| rects[a].end(axis) > rects[i].offsets[axis]);
        for &a in &active {
            if let Some(both) = rects[a].intersect(&rects[i]) {
                found.push(both);
            }
            if found.len() >= REPORTED_RECTS_MAX {
                return found;
            }
        }
        active.push(i);
    }
    found
}

fn distinct_starts(rects: &[Rect], d: usize) -> usize {
    let mut starts: Vec<i64> = rects.iter().map(|r| r.offsets[d]).collect();
    starts.sort_unstable();
    starts.dedup();
    starts.len()
}

fn missing(target: &Rect, pieces: &[Rect]) -> Vec<Rect> {
    let mut left = vec![target.clone()];
    for piece in pieces {
        if left.len() > FRAGMENTS_MAX {
            break;
        }
        left = left.iter().flat_map(|r| r.without(piece)).collect();
    }
    left.sort();
    left.truncate(REPORTED_RECTS_MAX);
    left
}

/// The contiguous runs that carry the common part of a stored box into a wanted one, row-major.
/// Run `k` starts at ever larger offsets of the stored box, so a reader that holds only a window of
/// it finds its runs by bisection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs {
    /// Bytes of each run.
    pub run_bytes: u64,
    /// Number of runs.
    pub count: u64,
    /// Extent, stride in the source and stride in the target (bytes) of each outer dimension.
    outer: Vec<(u64, u64, u64)>,
    source_base: u64,
    target_base: u64,
}

impl Runs {
    /// Runs between a stored box and a wanted box; `None` if they have nothing in common.
    pub fn between(stored: &Rect, wanted: &Rect, element_bytes: u64) -> Option<Self> {
        let both = stored.intersect(wanted)?;
        let dims = both.extent.len();
        let (source_strides, target_strides) =
            (strides(&stored.extent, element_bytes), strides(&wanted.extent, element_bytes));
        let base = |from: &Rect, strides: &[u64]| {
            (0..dims).map(|d| (both.offsets[d] - from.offsets[d]) as u64 * strides[d]).sum()
        };
        let mut inner = dims;
        let mut run_bytes = element_bytes;
        while inner > 0 {
            inner -= 1;
            run_bytes *= both.extent[inner] as u64;
            let full = both.extent[inner] == stored.extent[inner]
                && both.extent[inner] == wanted.extent[inner];
            if !full {
                break;
            }
        }
        let outer: Vec<_> = (0..inner)
            .map(|d| (both.extent[d] as u64, source_strides[d], target_strides[d]))
            .collect();
        Some(Self {
            run_bytes,
            count: outer.iter().map(|o| o.0).product(),
            source_base: base(stored, &source_strides),
            target_base: base(wanted, &target_strides),
            outer,
        })
    }

    /// The one run of a box that is wanted as it is stored.
    pub fn all(bytes: u64) -> Self {
        Self { run_bytes: bytes, count: 1, outer: Vec::new(), source_base: 0, target_base: 0 }
    }

    /// The same runs when both boxes start this many bytes later.
    pub fn shifted(mut self, source_bytes: u64, target_bytes: u64) -> Self {
        self.source_base += source_bytes;
        self.target_base += target_bytes;
        self
    }

    /// Byte offsets of run `k` in the stored and in the wanted box.
    pub fn at(&self, k: u64) -> (u64, u64) {
        let (mut source, mut target, mut rest) = (self.source_base, self.target_base, k);
        for &(extent, source_stride, target_stride) in self.outer.iter().rev() {
            let i = rest % extent;
            rest /= extent;
            source += i * source_stride;
            target += i * target_stride;
        }
        (source, target)
    }

    /// Where `from..to` of the stored box lies in the wanted one, if all of it lies there in one
    /// piece.
    pub fn straight(&self, from: u64, to: u64) -> Option<u64> {
        let (source, target) = self.at(0);
        let inside = self.count == 1 && source <= from && to <= source + self.run_bytes;
        inside.then(|| target + (from - source))
    }

    /// Calls `copy(source_offset, target_offset, bytes)` for each piece of a run that lies within
    /// `from..to` of the stored box.
    pub fn within(&self, from: u64, to: u64, mut copy: impl FnMut(u64, u64, u64)) {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = u64::midpoint(low, high);
            if self.at(middle).0 + self.run_bytes <= from {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        for k in low..self.count {
            let (source, target) = self.at(k);
            if source >= to {
                return;
            }
            let start = source.max(from);
            let end = (source + self.run_bytes).min(to);
            copy(start, target + (start - source), end - start);
        }
    }
}

fn strides(extent: &[i64], element_bytes: u64) -> Vec<u64> {
    let mut strides = vec![element_bytes; extent.len()];
    for d in (1..extent.len()).rev() {
        strides[d - 1] = strides[d] * extent[d] as u64;
    }
    strides
}

#[cfg(test)]
#[path = "rects_tests.rs"]
mod tests;
