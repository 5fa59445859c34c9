//! Joins against a search of every item, and the rules' corners by hand.

use proptest::prelude::*;

use super::*;
use crate::index::stream::Stamp;
use crate::index::types::FieldKind;

fn stream(items: Vec<(u32, i64, u32, Option<u32>)>) -> Stream {
    let items = items
        .into_iter()
        .enumerate()
        .map(|(at, (recording, timestamp_ns, chain, assigned))| StreamItem {
            recording,
            timestamp_ns,
            chain,
            assigned,
            payload: at as u32,
        })
        .collect();
    Stream::new("s", FieldKind::Bytes, Stamp::Trigger, None, items).unwrap()
}

fn times(all: &[i64]) -> Stream {
    stream(all.iter().map(|t| (0, *t, 0, None)).collect())
}

fn one(anchor: &Stream, other: &Stream, rule: JoinRule) -> Vec<Range<u32>> {
    let field = JoinField { stream: other, rule, miss: Miss::Mask };
    join(anchor, &[field]).unwrap().matches.remove(0)
}

#[test]
fn unsorted_items_are_refused() {
    let item = |timestamp_ns| StreamItem {
        recording: 0,
        timestamp_ns,
        chain: 0,
        assigned: None,
        payload: 0,
    };
    let result = Stream::new("can", FieldKind::Can, Stamp::Start, None, vec![item(2), item(1)]);
    assert!(result.unwrap_err().to_string().contains("stream can"));
}

#[test]
fn rules_by_hand() {
    let (anchor, other) = (times(&[10, 20, 30]), times(&[8, 12, 20, 26]));
    assert_eq!(one(&anchor, &other, JoinRule::Exact), [0..0, 2..3, 0..0]);
    let nearest = JoinRule::Nearest { tolerance_ns: 3 };
    assert_eq!(one(&anchor, &other, nearest), [0..1, 2..3, 0..0], "8 and 12 tie: the earlier");
    let before = JoinRule::AtOrBefore { age_max_ns: 4 };
    assert_eq!(one(&anchor, &other, before), [0..1, 2..3, 3..4]);
    assert_eq!(one(&anchor, &other, JoinRule::Previous(2)), [0..1, 0..2, 2..4]);
    assert_eq!(one(&anchor, &other, JoinRule::RowPosition), [0..1, 1..2, 2..3]);
}

#[test]
fn a_broken_chain_ends_the_past() {
    let other = stream(vec![(0, 1, 1, None), (0, 2, 2, None), (0, 3, 2, Some(0)), (1, 1, 3, None)]);
    assert_eq!(one(&times(&[3]), &other, JoinRule::Previous(5)), vec![1..2; 1]);
    assert_eq!(one(&times(&[3]), &other, JoinRule::Assigned), vec![2..3; 1]);
}

#[test]
fn misses_are_errors_skips_or_masks() {
    let (anchor, other) = (times(&[10, 20]), times(&[20]));
    let field = |miss| JoinField { stream: &other, rule: JoinRule::Exact, miss };
    let message = join(&anchor, &[field(Miss::Error)]).unwrap_err().to_string();
    assert!(message.contains("item 0 of recording 0 at 10 ns"), "{message}");
    let joined = join(&anchor, &[field(Miss::Skip)]).unwrap();
    assert_eq!((joined.anchors, joined.matches), (vec![1], vec![vec![0..1]]));
    let joined = join(&anchor, &[field(Miss::Mask)]).unwrap();
    assert_eq!(joined.anchors, [0, 1]);
}

/// The rule's meaning, by looking at every item.
fn brute(anchor: &StreamItem, row: usize, items: &[StreamItem], rule: JoinRule) -> Vec<u32> {
    let here = |i: &&StreamItem| i.recording == anchor.recording;
    let same: Vec<_> = items.iter().filter(here).collect();
    let distance = |i: &StreamItem| i.timestamp_ns.abs_diff(anchor.timestamp_ns);
    let found = match rule {
        JoinRule::Exact => same.iter().find(|i| distance(i) == 0).copied(),
        JoinRule::Nearest { tolerance_ns } => same
            .iter()
            .filter(|i| distance(i) <= tolerance_ns as u64)
            .min_by_key(|i| (distance(i), i.timestamp_ns, i.payload))
            .copied(),
        JoinRule::AtOrBefore { age_max_ns } => same
            .iter()
            .rfind(|i| i.timestamp_ns <= anchor.timestamp_ns)
            .filter(|i| distance(i) <= age_max_ns as u64)
            .copied(),
        JoinRule::RowPosition => same.get(row).copied(),
        JoinRule::Previous(count) => {
            let past: Vec<_> =
                same.iter().filter(|i| i.timestamp_ns < anchor.timestamp_ns).collect();
            let chain = past.last().map(|i| i.chain);
            let run = past.iter().rev().take_while(|i| Some(i.chain) == chain);
            let mut all: Vec<_> = run.take(count as usize).map(|i| i.payload).collect();
            all.reverse();
            return all;
        }
        JoinRule::Assigned => items.iter().find(|i| i.assigned == Some(row as u32)),
    };
    found.map(|i| i.payload).into_iter().collect()
}

fn sorted_stream() -> impl Strategy<Value = Stream> {
    proptest::collection::vec((0_u32..3, 0_i64..60, any::<bool>()), 0..40).prop_map(|mut all| {
        all.sort_unstable();
        let mut chain = 0;
        let items = all.into_iter().map(|(recording, time, breaks)| {
            chain += u32::from(breaks);
            (recording, time, chain, None)
        });
        stream(items.collect())
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn joins_equal_a_search_of_every_item(
        anchor in sorted_stream(),
        other in sorted_stream(),
        limit in 0_i64..20,
        count in 0_u32..5,
    ) {
        let rules = [
            JoinRule::Exact,
            JoinRule::Nearest { tolerance_ns: limit },
            JoinRule::AtOrBefore { age_max_ns: limit },
            JoinRule::Previous(count),
            JoinRule::RowPosition,
        ];
        for rule in rules {
            for (at, found) in one(&anchor, &other, rule).into_iter().enumerate() {
                let item = &anchor.items()[at];
                let row = anchor.items()[..at].iter().filter(|i| i.recording == item.recording);
                let expected = brute(item, row.count(), other.items(), rule);
                prop_assert_eq!(found.collect::<Vec<_>>(), expected, "{:?} at {}", rule, at);
            }
        }
    }
}
