//! Rectangles against brute force over every element.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn rect(offsets: &[i64], extent: &[i64]) -> Rect {
    Rect { offsets: offsets.to_vec(), extent: extent.to_vec() }
}

/// All coordinates of a box, row-major.
fn cells(r: &Rect) -> Vec<Vec<i64>> {
    let mut cells = vec![vec![]];
    for d in 0..r.offsets.len() {
        cells = cells
            .into_iter()
            .flat_map(|c: Vec<i64>| {
                (r.offsets[d]..r.offsets[d] + r.extent[d]).map(move |i| {
                    let mut c = c.clone();
                    c.push(i);
                    c
                })
            })
            .collect();
    }
    cells
}

#[test]
fn exact_covers_are_accepted_and_faults_are_named() {
    let whole = Rect::whole(&[4, 6]);
    let grid = [
        rect(&[0, 0], &[2, 3]),
        rect(&[0, 3], &[2, 3]),
        rect(&[2, 0], &[2, 3]),
        rect(&[2, 3], &[2, 3]),
    ];
    assert_eq!(prove_cover(&whole, &grid), Ok(()));
    let gap = prove_cover(&whole, &grid[..3]).unwrap_err();
    assert_eq!(gap.missing, vec![rect(&[2, 3], &[2, 3])]);
    assert_eq!(gap.missing[0].describe(), "[2:4, 3:6]");
    let mut more = grid.to_vec();
    more.push(rect(&[1, 1], &[1, 1]));
    let twice = prove_cover(&whole, &more).unwrap_err();
    assert_eq!(twice.twice, vec![rect(&[1, 1], &[1, 1])]);
}

#[test]
fn scalars_and_empty_tensors() {
    let scalar = Rect::whole(&[]);
    assert_eq!(scalar.volume(), 1);
    assert_eq!(prove_cover(&scalar, std::slice::from_ref(&scalar)), Ok(()));
    assert!(prove_cover(&scalar, &[]).is_err());
    assert!(prove_cover(&scalar, &[scalar.clone(), scalar.clone()]).is_err());
    assert_eq!(prove_cover(&Rect::whole(&[3, 0]), &[]), Ok(()));
    let runs = Runs::between(&scalar, &scalar, 4).unwrap();
    assert_eq!((runs.count, runs.run_bytes, runs.at(0)), (1, 4, (0, 0)));
}

fn boxes(dims: usize) -> impl Strategy<Value = Rect> {
    prop::collection::vec((0_i64..5, 0_i64..5), dims).prop_map(|v| Rect {
        offsets: v.iter().map(|x| x.0).collect(),
        extent: v.iter().map(|x| x.1).collect(),
    })
}

proptest! {
    #[test]
    fn cover_proof_agrees_with_counting(
        (target, pieces) in (1_usize..4)
            .prop_flat_map(|d| (boxes(d), prop::collection::vec(boxes(d), 0..6)))
    ) {
        let mut counts = BTreeMap::new();
        for piece in &pieces {
            for cell in cells(piece) {
                *counts.entry(cell).or_insert(0) += 1;
            }
        }
        let once = cells(&target).iter().all(|c| counts.get(c) == Some(&1));
        let proof = prove_cover(&target, &pieces);
        prop_assert_eq!(proof.is_ok(), once);
        if let Err(fault) = proof {
            for r in &fault.missing {
                prop_assert!(cells(r).iter().all(|c| !counts.contains_key(c)));
            }
            for r in &fault.twice {
                prop_assert!(cells(r).iter().all(|c| counts[c] > 1));
            }
            prop_assert!(!fault.missing.is_empty() || !fault.twice.is_empty());
        }
    }

    #[test]
    fn runs_move_the_common_part_through_any_window(
        (stored, wanted) in (1_usize..4).prop_flat_map(|d| (boxes(d), boxes(d))),
        element_bytes in 1_u64..4,
        window in 1_u64..9,
    ) {
        let tag = |cell: &[i64]| cell.iter().fold(1_u64, |n, &i| n * 16 + i as u64);
        let spread = |r: &Rect| -> Vec<u64> {
            let cells = cells(r);
            cells.iter().flat_map(|c| vec![tag(c); element_bytes as usize]).collect()
        };
        let source = spread(&stored);
        let mut got = vec![0; spread(&wanted).len()];
        if let Some(runs) = Runs::between(&stored, &wanted, element_bytes) {
            let mut at = 0;
            while at < source.len() as u64 {
                let end = (at + window).min(source.len() as u64);
                runs.within(at, end, |s, t, n| {
                    for i in 0..n {
                        assert!(s + i >= at && s + i < end);
                        assert_eq!(got[(t + i) as usize], 0, "copied twice");
                        got[(t + i) as usize] = source[(s + i) as usize];
                    }
                });
                at = end;
            }
        }
        let common: Vec<u64> = cells(&wanted)
            .iter()
            .flat_map(|c| {
                let inside = stored.intersect(&wanted).is_some_and(|b| cells(&b).contains(c));
                vec![if inside { tag(c) } else { 0 }; element_bytes as usize]
            })
            .collect();
        prop_assert_eq!(got, common);
    }
}

#[test]
fn a_box_that_is_wanted_as_it_is_stored_is_one_run() {
    for extent in [vec![], vec![1], vec![5], vec![2, 3, 4], vec![7, 1]] {
        let elements: i64 = extent.iter().product();
        let same = Rect { offsets: vec![3; extent.len()], extent };
        assert_eq!(Runs::between(&same, &same, 4), Some(Runs::all(4 * elements as u64)));
    }
}
