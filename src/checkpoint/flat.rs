//! Ranges of flattened tensors, as ZeRO and distributed optimizers cut them, next to rectangles.
//!
//! A range is a [`Rect`] with one dimension that stands for a tensor with another number of them:
//! its offset and extent count elements in row-major order. A tensor of one dimension has no other
//! ranges than its rectangles. Any range is at most `2 * dims - 1` boxes in the order of memory, so
//! what is known about boxes (common parts, copies, the coverage proof) holds for ranges and for
//! mixtures of both.

use super::rects::{CoverFault, Rect, Runs, prove_cover};

/// Whether `range` counts elements of the flattened tensor.
pub fn is_flat(range: &Rect, shape: &[i64]) -> bool {
    shape.len() != 1 && range.offsets.len() == 1 && range.extent.len() == 1
}

/// The range `start..start + len` of a flattened tensor.
pub fn flat_range(start: i64, len: i64) -> Rect {
    Rect { offsets: vec![start], extent: vec![len] }
}

/// Elements of a shape as an i64; saturates, so that nothing is inside a shape that overflows.
fn count(shape: &[i64]) -> i64 {
    shape.iter().fold(1_i64, |n, &d| n.saturating_mul(d.max(0)))
}

/// Whether `range`, a rectangle or a flat range, lies within a tensor of `shape`.
pub fn fits(range: &Rect, shape: &[i64]) -> bool {
    if is_flat(range, shape) { range.is_inside(&[count(shape)]) } else { range.is_inside(shape) }
}

/// The boxes of a range that [`fits`], each with the elements of the range before it. Empty boxes
/// are left out of flat ranges.
pub fn boxes(range: &Rect, shape: &[i64]) -> Vec<(Rect, i64)> {
    if !is_flat(range, shape) {
        return vec![(range.clone(), 0)];
    }
    let (start, end) = (range.offsets[0], range.offsets[0] + range.extent[0]);
    let mut found = Vec::new();
    if start < end {
        let mut whole = Rect::whole(shape);
        cut(&mut whole, shape, 0, (start, end), &mut found);
    }
    let mut before = 0;
    found
        .into_iter()
        .map(|part| {
            let at = before;
            before += count(&part.extent);
            (part, at)
        })
        .collect()
}

/// Cuts elements `range` of the block that `block` fixes in its first `dim` dimensions: a part of
/// the first row, whole rows, a part of the last.
fn cut(block: &mut Rect, shape: &[i64], dim: usize, range: (i64, i64), found: &mut Vec<Rect>) {
    let Some(&size) = shape.get(dim) else {
        found.push(block.clone());
        return;
    };
    let row = count(&shape[dim + 1..]);
    let (mut start, end) = range;
    let mut part = |from: i64, rows: i64, inner: Option<(i64, i64)>| {
        (block.offsets[dim], block.extent[dim]) = (from, rows);
        match inner {
            Some(inner) => cut(block, shape, dim + 1, inner, found),
            None => found.push(block.clone()),
        }
    };
    if start % row != 0 {
        let first = start / row;
        let stop = end.min((first + 1) * row);
        part(first, 1, Some((start - first * row, stop - first * row)));
        start = stop;
    }
    let rows = (end - start) / row;
    if rows > 0 {
        part(start / row, rows, None);
        start += rows * row;
    }
    if start < end {
        part(start / row, 1, Some((0, end - start)));
    }
    (block.offsets[dim], block.extent[dim]) = (0, size);
}

/// Proves that `pieces` cover each element of `target` exactly once; all are rectangles or flat
/// ranges of one tensor. Costs what [`prove_cover`] costs.
pub fn prove(shape: &[i64], target: &Rect, pieces: &[Rect]) -> Result<(), CoverFault> {
    let all_flat = pieces.iter().all(|p| is_flat(p, shape));
    if is_flat(target, shape) && all_flat {
        return prove_cover(target, pieces);
    }
    if all_flat && *target == Rect::whole(shape) {
        return prove_cover(&flat_range(0, count(shape)), pieces);
    }
    let parts: Vec<Rect> =
        pieces.iter().flat_map(|p| boxes(p, shape)).map(|(part, _)| part).collect();
    boxes(target, shape).iter().try_for_each(|(part, _)| prove_cover(part, &parts))
}

/// The copies that carry the common part of a stored range into a wanted one.
pub fn moves(shape: &[i64], stored: &Rect, wanted: &Rect, element_bytes: u64) -> Vec<Runs> {
    let both_alike = is_flat(stored, shape) == is_flat(wanted, shape);
    if both_alike {
        return Runs::between(stored, wanted, element_bytes).into_iter().collect();
    }
    let mut found = Vec::new();
    let wanted = boxes(wanted, shape);
    for (from, source) in boxes(stored, shape) {
        for (to, target) in &wanted {
            let runs = Runs::between(&from, to, element_bytes);
            let shift = |at: i64| at as u64 * element_bytes;
            found.extend(runs.map(|r| r.shifted(shift(source), shift(*target))));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Row-major numbers of a range's elements, counted one by one.
    fn elements(range: &Rect, shape: &[i64]) -> Vec<i64> {
        if is_flat(range, shape) {
            return (range.offsets[0]..range.offsets[0] + range.extent[0]).collect();
        }
        let inside = |n: i64| {
            let mut rest = n;
            let mut found = true;
            for d in (0..shape.len()).rev() {
                let i = rest % shape[d];
                rest /= shape[d];
                found &= (range.offsets[d]..range.offsets[d] + range.extent[d]).contains(&i);
            }
            found
        };
        (0..shape.iter().product()).filter(|&n| inside(n)).collect()
    }

    /// A shape, and ranges of both kinds in it.
    fn ranges() -> impl Strategy<Value = (Vec<i64>, Vec<Rect>)> {
        prop::collection::vec(1_i64..5, 0..4).prop_flat_map(|shape| {
            let one = prop::collection::vec((0.0..1.0_f64, 0.0..=1.0_f64), 4);
            let kinds = prop::collection::vec((any::<bool>(), one), 1..6);
            kinds.prop_map(move |kinds| {
                let pick = |n: i64, (from, len): (f64, f64)| {
                    let start = (n as f64 * from) as i64;
                    (start, ((n - start) as f64 * len).round() as i64)
                };
                let make = |(flat, cuts): &(bool, Vec<(f64, f64)>)| {
                    if *flat {
                        let (start, len) = pick(shape.iter().product(), cuts[0]);
                        return flat_range(start, len);
                    }
                    let (offsets, extent) =
                        shape.iter().zip(cuts).map(|(&n, &cut)| pick(n, cut)).unzip();
                    Rect { offsets, extent }
                };
                (shape.clone(), kinds.iter().map(make).collect())
            })
        })
    }

    proptest! {
        #[test]
        fn boxes_are_the_range_in_order((shape, ranges) in ranges()) {
            for range in ranges {
                prop_assert!(fits(&range, &shape));
                let mut seen = Vec::new();
                let parts = boxes(&range, &shape);
                prop_assert!(parts.len() < (2 * shape.len()).max(2));
                for (part, before) in parts {
                    prop_assert_eq!(before, seen.len() as i64);
                    prop_assert_eq!(part.offsets.len(), shape.len());
                    seen.extend(elements(&part, &shape));
                }
                prop_assert_eq!(seen, elements(&range, &shape));
            }
        }

        #[test]
        fn the_proof_agrees_with_counting((shape, ranges) in ranges()) {
            let (target, pieces) = ranges.split_first().unwrap();
            let once = elements(target, &shape).iter().all(|n| {
                pieces.iter().filter(|p| elements(p, &shape).contains(n)).count() == 1
            });
            prop_assert_eq!(prove(&shape, target, pieces).is_ok(), once);
        }

        #[test]
        fn moves_carry_the_common_part((shape, ranges) in ranges(), bytes in 1_u64..4) {
            for pair in ranges.windows(2) {
                let (from, to) = (elements(&pair[0], &shape), elements(&pair[1], &shape));
                let mut got = vec![-1; to.len() * bytes as usize];
                for runs in moves(&shape, &pair[0], &pair[1], bytes) {
                    runs.within(0, from.len() as u64 * bytes, |source, target, len| {
                        for i in 0..len {
                            let at = (target + i) as usize;
                            assert_eq!(got[at], -1, "copied twice");
                            assert_eq!((source + i) % bytes, (target + i) % bytes);
                            got[at] = from[((source + i) / bytes) as usize];
                        }
                    });
                }
                let want: Vec<i64> = to
                    .iter()
                    .flat_map(|n| vec![if from.contains(n) { *n } else { -1 }; bytes as usize])
                    .collect();
                prop_assert_eq!(got, want);
            }
        }
    }

    #[test]
    fn tensors_beyond_32_bits() {
        let shape = [1 << 17, 1 << 17];
        let last_row = Rect { offsets: vec![(1 << 17) - 1, 0], extent: vec![1, 1 << 17] };
        let tail = flat_range((1 << 34) - (1 << 16), 1 << 16);
        let head = flat_range(0, (1 << 34) - (1 << 16));
        assert_eq!(prove(&shape, &Rect::whole(&shape), &[tail.clone(), head.clone()]), Ok(()));
        let runs = moves(&shape, &tail, &last_row, 8);
        assert_eq!((runs.len(), runs[0].at(0), runs[0].run_bytes), (1, (0, 1 << 19), 1 << 19));
        let runs = moves(&shape, &head, &last_row, 8);
        let from = ((1 << 34) - (1 << 17)) * 8;
        assert_eq!((runs.len(), runs[0].at(0), runs[0].run_bytes), (1, (from, 0), 1 << 19));
    }

    #[test]
    fn what_lies_outside_does_not_fit() {
        assert!(fits(&flat_range(5, 1), &[2, 3]));
        assert!(!fits(&flat_range(5, 2), &[2, 3]));
        assert!(!fits(&flat_range(-1, 2), &[2, 3]));
        assert!(!fits(&flat_range(i64::MAX, 1), &[i64::MAX, 3]));
        assert!(fits(&flat_range(0, 0), &[0, 3]) && !fits(&flat_range(0, 1), &[0, 3]));
        assert!(fits(&flat_range(0, 1), &[]) && !is_flat(&flat_range(0, 1), &[7]));
    }
}
