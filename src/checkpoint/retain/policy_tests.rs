//! Rules against steps made up by hand, and their promises against random ones.

use proptest::prelude::*;

use super::*;

const HOUR_NS: i64 = 3_600_000_000_000;

fn good(step: i64) -> Known {
    Known { step, sealed: true, whole: true, own: true, ..Known::default() }
}

fn steps(numbers: &[i64]) -> Vec<Known> {
    numbers.iter().map(|&n| good(n)).collect()
}

fn keep(last: u32) -> Keep {
    Keep { last: Some(last), ..Keep::default() }
}

#[test]
fn newest_and_divided_steps_stay() {
    let rule = Keep { every: Some(100), ..keep(2) };
    let known = steps(&[50, 100, 150, 200, 250]);
    assert_eq!(rule.victims(&known, Some(250), 0), [50, 150]);
    // A job that went back to an older step keeps what it just committed.
    assert_eq!(rule.victims(&known, Some(50), 0), [150]);
    assert!(Keep::default().victims(&known, Some(250), 0).is_empty());
    assert!(keep(9).victims(&known, None, 0).is_empty());
    assert!(keep(0).check().is_err());
    assert!(Keep { every: Some(0), ..keep(1) }.check().is_err());
    rule.check().unwrap();
}

#[test]
fn the_best_by_a_metric_stay() {
    let losses = [(1, 0.5), (2, 0.1), (3, 0.3), (4, 0.1), (5, 0.9), (6, 0.8)];
    let mut known: Vec<Known> = losses
        .iter()
        .map(|&(step, loss)| Known {
            metrics: BTreeMap::from([("loss".into(), loss)]),
            ..good(step)
        })
        .collect();
    known.push(good(7));
    let best = |count, highest, metric: &str| Keep {
        best: Some(Best { count, metric: metric.into(), highest }),
        ..keep(1)
    };
    assert_eq!(best(1, false, "loss").victims(&known, None, 0), [1, 2, 3, 5, 6], "newer of equals");
    assert_eq!(best(3, false, "loss").victims(&known, None, 0), [1, 5, 6]);
    assert_eq!(best(2, true, "loss").victims(&known, None, 0), [1, 2, 3, 4]);
    assert_eq!(best(2, true, "other").victims(&known, None, 0), [1, 2, 3, 4, 5, 6]);
    assert!(best(0, true, "loss").check().is_err() && best(1, true, "").check().is_err());
}

#[test]
fn time_rules_keep_the_young_and_one_an_interval() {
    // Committed at hours 0, 0.5, 1, 1.5, … 5.
    let known: Vec<Known> =
        (0..=10).map(|i| Known { committed_ns: Some(i * HOUR_NS / 2), ..good(i) }).collect();
    let hour = Duration::from_hours(1);
    let recent = Keep { within: Some(hour * 2), ..keep(1) };
    assert_eq!(recent.victims(&known, None, 5 * HOUR_NS), [0, 1, 2, 3, 4, 5]);
    assert_eq!(recent.victims(&known, None, 100 * HOUR_NS), (0..10).collect::<Vec<_>>());
    let hourly = Keep { interval: Some(hour * 2), ..keep(1) };
    assert_eq!(hourly.victims(&known, None, 0), [1, 2, 3, 5, 6, 7, 9]);
    // Pruning again, after each further step, keeps the same ones.
    let left: Vec<Known> =
        known.iter().filter(|k| [0, 4, 8, 10].contains(&k.step)).cloned().collect();
    assert!(hourly.victims(&left, None, 0).is_empty());
}

#[test]
fn only_good_steps_count_and_only_our_own_go() {
    let mut known = steps(&[1, 2, 3, 4, 5]);
    known[4].whole = false;
    known[3] = Known { step: 4, ..Known::default() };
    // 5 has lost a file and 4's manifest is damaged: 3 is the newest good one, and both stay.
    assert_eq!(keep(1).victims(&known, None, 0), [1, 2]);
    known[1].own = false;
    assert_eq!(keep(1).victims(&known, None, 0), [1]);
    known[0].whole = false;
    assert_eq!(keep(1).victims(&known, None, 0), [1], "an old damaged one that is ours");
    known[0].sealed = false;
    assert!(keep(1).victims(&known, None, 0).is_empty(), "who wrote it nobody knows");
    let none: Vec<Known> = known[..2].to_vec();
    assert!(keep(1).victims(&none, None, 0).is_empty());
}

#[test]
fn what_is_referred_to_stays_and_referrers_go_first() {
    let mut known = steps(&[1, 2, 3, 4, 5, 6]);
    known[5].refers_to = vec![4];
    known[3].refers_to = vec![2];
    assert_eq!(keep(1).victims(&known, None, 0), [1, 3, 5], "4 for 6, 2 for 4");
    known[5].refers_to = Vec::new();
    known[1].refers_to = vec![3];
    assert_eq!(keep(1).victims(&known, None, 0), [1, 4, 5, 2, 3]);
    known[2].refers_to = vec![4];
    let order = keep(1).victims(&known, None, 0);
    assert_eq!(order.len(), 5, "a circle ends: {order:?}");
}

proptest! {
    #[test]
    fn whatever_is_removed_the_rest_can_be_restored(
        flags in prop::collection::vec((any::<bool>(), any::<bool>(), any::<bool>()), 1..12),
        refs in prop::collection::vec((0_usize..12, 0_usize..12), 0..12),
        last in 1_u32..5,
        every in prop::option::of(1_i64..4),
    ) {
        let mut known: Vec<Known> = flags.iter().enumerate().map(|(i, &(sealed, whole, own))| {
            Known { sealed, whole, own: own && sealed, ..good(i as i64) }
        }).collect();
        for (from, to) in refs {
            if from < known.len() && to < known.len() && from != to && known[from].sealed {
                known[from].refers_to.push(to as i64);
            }
        }
        let rule = Keep { every, ..keep(last) };
        let victims = rule.victims(&known, None, 0);
        let mut left: BTreeSet<i64> = known.iter().map(|k| k.step).collect();
        let later = |k: &Known, other: &Known| other.step > k.step;
        let circle =
            |k: &Known| known.iter().any(|o| later(k, o) && k.refers_to.contains(&o.step));
        let newest = known.iter().rfind(|k| k.good()).map(|k| k.step);
        for victim in victims {
            let gone = &known[victim as usize];
            prop_assert!(gone.own && gone.sealed, "not ours: {victim}");
            left.remove(&victim);
            prop_assert!(newest.is_none_or(|n| left.contains(&n)), "newest good one");
            if known.iter().any(circle) {
                continue;
            }
            for step in &left {
                let needs = &known[*step as usize].refers_to;
                prop_assert!(!needs.contains(&victim), "{step} needs {victim}");
            }
        }
        let counted = left.iter().filter(|s| known[**s as usize].good()).count();
        let all = known.iter().filter(|k| k.good()).count();
        prop_assert!(counted >= all.min(last as usize));
    }
}
