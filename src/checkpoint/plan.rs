//! Who writes what. Each rank works it out alone from its own list of tensors; ranks that hold the
//! same replicas come to the same answer, and a hash of the list proves it when they meet.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use xxhash_rust::xxh3::xxh3_64;

use super::flat::fits;
use super::layout::{Dtype, Piece, shape_bytes};
use super::rects::Rect;
use crate::error::{Error, Result};

/// Replicated tensors above this are split, so that one embedding does not decide how long the
/// slowest rank writes. Also about the size below which a disk stops gaining from larger writes.
const SPLIT_BYTES_MIN: u64 = 16 << 20;

/// A tensor, or this rank's rectangle of one, to be saved.
#[derive(Debug, Clone)]
pub struct TensorIn<'a> {
    /// Compact JSON array of keys.
    pub path: String,
    /// safetensors' name of the element type.
    pub dtype: String,
    /// Shape of the whole tensor, in elements.
    pub shape: Vec<i64>,
    /// The rectangle that `data` holds, or the range of the flattened tensor (see
    /// [`flat`](super::flat)).
    pub rect: Rect,
    /// Its bytes, row-major.
    pub data: &'a [u8],
    /// All ranks that hold these very bytes, this one included; empty means only this one.
    pub replicas: Vec<u32>,
    /// The rank among them that must write it.
    pub pin_rank: Option<u32>,
}

/// Tensors that the same ranks hold.
#[derive(Debug, Clone, Default)]
pub struct Group {
    /// One line per tensor, sorted; equal on all ranks of the group.
    pub lines: Vec<String>,
}

impl Group {
    /// Hash of the lines.
    pub fn hash(&self) -> u64 {
        xxh3_64(self.lines.join("\n").as_bytes())
    }
}

/// What this rank writes, and what it believes the others write.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Pieces that this rank writes.
    pub pieces: Vec<Piece>,
    /// Replicated tensors by the ranks that hold them.
    pub groups: BTreeMap<Vec<u32>, Group>,
}

/// Checks the tensors and decides what `rank` of `world_size` writes.
pub fn plan(rank: u32, world_size: u32, tensors: &[TensorIn<'_>]) -> Result<Plan> {
    let mut plan = Plan::default();
    let mut members: BTreeMap<Vec<u32>, Vec<usize>> = BTreeMap::new();
    let mut seen = HashSet::new();
    for (i, tensor) in tensors.iter().enumerate() {
        let dtype = check(tensor, rank, world_size)?;
        if !seen.insert((tensor.path.as_str(), &tensor.rect)) {
            let what = format!("tensor {}", tensor.path);
            return Err(Error::invalid(what, "one tensor per path", "two of the same range"));
        }
        if tensor.replicas.len() > 1 {
            members.entry(tensor.replicas.clone()).or_default().push(i);
        } else {
            plan.pieces.push(whole_piece(i, tensor, dtype));
        }
    }
    for (ranks, indices) in members {
        let group = share(rank, &ranks, indices, tensors, &mut plan.pieces)?;
        plan.groups.insert(ranks, group);
    }
    Ok(plan)
}

fn check(tensor: &TensorIn<'_>, rank: u32, world_size: u32) -> Result<Dtype> {
    let dtype = Dtype::named(&tensor.dtype)?;
    let bad = |expected: &str, found: String| {
        Err(Error::invalid(format!("tensor {}", tensor.path), expected, found))
    };
    if !fits(&tensor.rect, &tensor.shape) {
        let found = format!("{} of {:?}", tensor.rect.describe(), tensor.shape);
        return bad("a rectangle inside the tensor", found);
    }
    let bytes = shape_bytes(&tensor.rect.extent, dtype);
    if bytes != Some(tensor.data.len() as u64) {
        let found = format!("{} bytes for {:?}", tensor.data.len(), tensor.rect.extent);
        return bad("as many bytes as its shape and dtype need", found);
    }
    let ranks = &tensor.replicas;
    let sorted = ranks.windows(2).all(|w| w[0] < w[1]);
    let mine = ranks.is_empty() || ranks.contains(&rank);
    if !sorted || !mine || ranks.last().is_some_and(|&r| r >= world_size) {
        return bad("sorted replica ranks that contain this one", format!("{ranks:?}"));
    }
    match tensor.pin_rank {
        Some(pin) if !ranks.contains(&pin) && (pin != rank || !ranks.is_empty()) => {
            bad("a writing rank that holds the tensor", pin.to_string())
        }
        _ => Ok(dtype),
    }
}

fn whole_piece(source: usize, tensor: &TensorIn<'_>, dtype: Dtype) -> Piece {
    Piece {
        path: tensor.path.clone(),
        dtype,
        shape: tensor.shape.clone(),
        rect: tensor.rect.clone(),
        length: tensor.data.len() as u64,
        source,
        source_start: 0,
    }
}

/// Spreads the tensors of one group over its ranks: pinned ones first, then by falling size, each
/// to the rank with the fewest bytes so far.
fn share(
    rank: u32,
    ranks: &[u32],
    mut indices: Vec<usize>,
    tensors: &[TensorIn<'_>],
    pieces: &mut Vec<Piece>,
) -> Result<Group> {
    indices.sort_by(|&a, &b| {
        let key = |i: usize| {
            let t = &tensors[i];
            (t.pin_rank.is_none(), u64::MAX - t.data.len() as u64, &t.path, &t.rect)
        };
        key(a).cmp(&key(b))
    });
    let mut load = Load::new(ranks);
    let mut group = Group::default();
    for i in indices {
        let tensor = &tensors[i];
        group.lines.push(line(tensor));
        let whole = whole_piece(i, tensor, Dtype::named(&tensor.dtype)?);
        for piece in split(whole, tensor, ranks.len()) {
            let writer = tensor.pin_rank.or(load.least()).unwrap_or(rank);
            load.add(writer, piece.length);
            if writer == rank {
                pieces.push(piece);
            }
        }
    }
    group.lines.sort();
    Ok(group)
}

/// Bytes that each rank of a group writes so far; finds the least of thousands in log time.
struct Load {
    bytes: HashMap<u32, u64>,
    order: BTreeSet<(u64, u32)>,
}

impl Load {
    fn new(ranks: &[u32]) -> Self {
        let bytes = ranks.iter().map(|&r| (r, 0)).collect();
        Self { bytes, order: ranks.iter().map(|&r| (0, r)).collect() }
    }

    fn least(&self) -> Option<u32> {
        self.order.first().map(|&(_, rank)| rank)
    }

    fn add(&mut self, rank: u32, bytes: u64) {
        let sum = self.bytes.entry(rank).or_default();
        self.order.remove(&(*sum, rank));
        *sum += bytes;
        self.order.insert((*sum, rank));
    }
}

fn line(t: &TensorIn<'_>) -> String {
    let pin = t.pin_rank.map_or_else(String::new, |r| format!(", written by rank {r}"));
    format!("{} {} {:?} {}{pin}", t.path, t.dtype, t.shape, t.rect.describe())
}

/// Cuts a large piece into at most `parts` along its first dimension of more than one element, so
/// that each part is still one run of bytes.
fn split(whole: Piece, tensor: &TensorIn<'_>, parts: usize) -> Vec<Piece> {
    if whole.length <= SPLIT_BYTES_MIN || tensor.pin_rank.is_some() {
        return vec![whole];
    }
    let wanted = whole.length.div_ceil(SPLIT_BYTES_MIN).min(parts as u64);
    cut(whole, wanted)
}

/// The same pieces in parts of at most `bytes_max` each, as far as elements can be parted.
pub fn cut_long(pieces: Vec<Piece>, bytes_max: u64) -> Vec<Piece> {
    let mut found = Vec::with_capacity(pieces.len());
    // Ends: a part has fewer elements than what it is a part of.
    let mut work: Vec<Piece> = pieces.into_iter().rev().collect();
    while let Some(piece) = work.pop() {
        let parts = piece.length.div_ceil(bytes_max.max(1));
        let can = piece.rect.extent.iter().any(|&e| e > 1);
        if parts > 1 && can {
            work.extend(cut(piece, parts).into_iter().rev());
        } else {
            found.push(piece);
        }
    }
    found
}

/// Cuts a piece into at most `wanted` along its first dimension of more than one element.
fn cut(whole: Piece, wanted: u64) -> Vec<Piece> {
    let Some(axis) = whole.rect.extent.iter().position(|&e| e > 1) else { return vec![whole] };
    let rows = whole.rect.extent[axis];
    let parts = i64::try_from(wanted).unwrap_or(i64::MAX).clamp(1, rows);
    let row_bytes = whole.length / rows as u64;
    let cut = |i: i64| rows * i / parts;
    let part = |i: i64| {
        let mut piece = whole.clone();
        let (from, to) = (cut(i), cut(i + 1));
        piece.rect.offsets[axis] += from;
        piece.rect.extent[axis] = to - from;
        piece.length = (to - from) as u64 * row_bytes;
        piece.source_start = whole.source_start + from as u64 * row_bytes;
        piece
    };
    (0..parts).map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::rects::prove_cover;

    fn tensor<'a>(path: &str, shape: &[i64], data: &'a [u8], replicas: &[u32]) -> TensorIn<'a> {
        TensorIn {
            path: format!("[\"{path}\"]"),
            dtype: "U8".into(),
            shape: shape.to_vec(),
            rect: Rect::whole(shape),
            data: &data[..shape.iter().product::<i64>() as usize],
            replicas: replicas.to_vec(),
            pin_rank: None,
        }
    }

    #[test]
    fn replicas_are_written_exactly_once_and_evenly() {
        let zeros = vec![0; 40 << 20];
        let mut tensors = vec![tensor("big", &[1, 40, 1 << 20], &zeros, &[0, 1, 2])];
        for i in 0..50 {
            tensors.push(tensor(&format!("t{i}"), &[i * 1000], &zeros, &[0, 1, 2]));
        }
        tensors.push(tensor("buffer", &[7], &zeros, &[0, 1, 2]));
        tensors.last_mut().unwrap().pin_rank = Some(2);
        let plans: Vec<_> = (0..3).map(|r| plan(r, 3, &tensors).unwrap()).collect();
        for t in &tensors {
            let all = plans.iter().flat_map(|p| &p.pieces).filter(|p| p.path == t.path);
            let rects: Vec<_> = all.map(|p| p.rect.clone()).collect();
            assert_eq!(prove_cover(&t.rect, &rects), Ok(()), "{}", t.path);
        }
        let bytes = |p: &Plan| p.pieces.iter().map(|p| p.length).sum::<u64>();
        let (low, high) =
            (plans.iter().map(bytes).min().unwrap(), plans.iter().map(bytes).max().unwrap());
        // A row of the split tensor is the finest grain.
        assert!(high - low <= 1 << 20, "{low} {high}");
        assert!(plans[2].pieces.iter().any(|p| p.path.contains("buffer")));
        let hashes: HashSet<_> = plans.iter().map(|p| p.groups[&vec![0, 1, 2]].hash()).collect();
        assert_eq!(hashes.len(), 1);
    }

    #[test]
    fn long_pieces_are_cut_until_they_are_short() {
        let zeros = vec![0; 6000];
        let tensors = [
            tensor("rows", &[10, 100], &zeros, &[]),
            tensor("wide", &[1, 2, 3000], &zeros, &[]),
            tensor("short", &[7], &zeros, &[]),
            tensor("scalar", &[], &zeros, &[]),
        ];
        let pieces = plan(0, 1, &tensors).unwrap().pieces;
        let parts = cut_long(pieces, 250);
        assert!(parts.iter().all(|p| p.length <= 250));
        for t in &tensors {
            let own: Vec<&Piece> = parts.iter().filter(|p| p.path == t.path).collect();
            let rects: Vec<_> = own.iter().map(|p| p.rect.clone()).collect();
            assert_eq!(prove_cover(&t.rect, &rects), Ok(()), "{}", t.path);
            // Each a run of bytes, one after the other.
            let mut at = 0;
            for piece in own {
                assert_eq!(piece.source_start, at, "{}", t.path);
                at += piece.length;
            }
            assert_eq!(at, t.data.len() as u64);
        }
        assert_eq!(cut_long(parts.clone(), 250).len(), parts.len());
        assert_eq!(cut_long(parts, 1).len(), 1000 + 6000 + 7 + 1);
    }

    #[test]
    fn parts_point_at_their_bytes() {
        let zeros = vec![0; 40 << 20];
        let tensors = [tensor("big", &[10, 4 << 20], &zeros, &[0, 1])];
        for r in 0..2 {
            for piece in plan(r, 2, &tensors).unwrap().pieces {
                assert_eq!(piece.source_start, piece.rect.offsets[0] as u64 * (4 << 20));
                assert_eq!(piece.length, piece.rect.extent[0] as u64 * (4 << 20));
            }
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        let data = [0; 16];
        let good = tensor("w", &[4], &data, &[]);
        let wrong: [fn(&mut TensorIn<'_>); 6] = [
            |t| t.shape = vec![3, 1],
            |t| t.rect.offsets = vec![1],
            |t| t.dtype = "F64".into(),
            |t| t.replicas = vec![1, 2],
            |t| t.replicas = vec![1, 0],
            |t| t.pin_rank = Some(1),
        ];
        for change in wrong {
            let mut bad = good.clone();
            change(&mut bad);
            let text = plan(0, 3, &[bad]).unwrap_err().to_string();
            assert!(text.contains("[\"w\"]"), "{text}");
        }
        assert!(plan(0, 1, &[good.clone(), good]).unwrap_err().to_string().contains("[\"w\"]"));
    }
}
