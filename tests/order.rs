//! Order, partition and cursor together: what a job of several ranks sees over epochs, stops and
//! resumes; and the specification in `docs/order.md` against the code.

use std::collections::BTreeMap;

use drivetrain::order::{Cursor, LoaderState, Order, Partition, Pass, Shuffle, Stream, philox4x32};
use proptest::prelude::*;

/// A job: one cursor per rank, stepped together.
struct Job {
    ranks: Vec<Cursor>,
}

impl Job {
    fn new(order: Order, world: u64, batch: u64, drop_last: bool) -> Self {
        let cursor = |rank| {
            let part = Partition::new(batch, world, rank, drop_last).unwrap();
            Cursor::new(order, part, "fingerprint")
        };
        Self { ranks: (0..world).map(cursor).collect() }
    }

    /// The state, asserted to be the same on every rank.
    fn state(&self) -> LoaderState {
        let state = self.ranks[0].state();
        assert!(self.ranks.iter().all(|rank| rank.state() == state));
        state
    }

    /// Runs at most `limit` steps of one pass on every rank; counts each valid sample into `seen`.
    /// Returns the epoch and whether the pass was exhausted.
    fn run(&mut self, limit: u64, seen: &mut BTreeMap<(u64, u64), u32>) -> (u64, bool) {
        let passes: Vec<Pass> = self.ranks.iter_mut().map(Cursor::begin_pass).collect();
        let first = passes[0];
        assert!(
            passes
                .iter()
                .all(|p| (p.epoch, p.start, p.steps) == (first.epoch, first.start, first.steps))
        );
        for step in 0..first.steps.min(limit) {
            for (rank, pass) in self.ranks.iter_mut().zip(&passes) {
                let epoch = rank.order().epoch(pass.epoch);
                let samples = rank.order().samples();
                let slots: Vec<_> = rank.partition().slots(samples, pass.start, step).collect();
                assert_eq!(slots.len() as u64, rank.partition().batch_size());
                for slot in slots {
                    let sample = epoch.at(slot.position);
                    assert!(sample < samples);
                    *seen.entry((pass.epoch, sample)).or_default() += u32::from(slot.valid);
                }
                rank.handed_out(pass, step).unwrap();
            }
            self.state();
        }
        let exhausted = first.steps <= limit;
        if exhausted {
            self.ranks.iter_mut().zip(&passes).for_each(|(rank, pass)| rank.end_pass(pass));
        }
        (first.epoch, exhausted)
    }
}

fn shuffles() -> impl Strategy<Value = Shuffle> {
    prop_oneof![
        Just(Shuffle::Full),
        Just(Shuffle::Sequential),
        (1_u64..20, 1_u64..6).prop_map(|(block, window)| Shuffle::Block { block, window }),
    ]
}

/// World size and batch size of one leg of a job, and the steps until it stops.
fn legs() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    prop::collection::vec((1_u64..6, 1_u64..9, 0_u64..12), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// However often a job stops and resumes on other ranks and batch sizes, each epoch hands out
    /// every sample exactly once (or at most once, with `drop_last`).
    #[test]
    fn every_sample_exactly_once_over_stops_and_resumes(
        samples in 0_u64..300, seed: u64, shuffle in shuffles(), legs in legs(), drop_last: bool,
    ) {
        let order = Order::new(samples, seed, shuffle).unwrap();
        let mut seen = BTreeMap::new();
        let mut state: Option<LoaderState> = None;
        for (world, batch, stop) in legs {
            let mut job = Job::new(order, world, batch, drop_last);
            if let Some(state) = &state {
                job.ranks.iter_mut().for_each(|rank| rank.load(state).unwrap());
                prop_assert_eq!(&job.state(), state, "save, load, save is a fixed point");
            }
            job.run(stop, &mut seen);
            let text = job.state().to_json().unwrap();
            state = Some(LoaderState::from_json(&text).unwrap());
        }
        let state = state.unwrap();
        let mut job = Job::new(order, 2, 3, drop_last);
        job.ranks.iter_mut().for_each(|rank| rank.load(&state).unwrap());
        job.run(u64::MAX, &mut seen);
        let end = job.state();
        prop_assert_eq!((end.epoch, end.position), (state.epoch + 1, 0));
        for epoch in 0..end.epoch {
            for sample in 0..samples {
                let times = seen.get(&(epoch, sample)).copied().unwrap_or(0);
                prop_assert!(times == 1 || (drop_last && times == 0), "{epoch} {sample} {times}");
            }
        }
    }

    /// Without stops, `drop_last` loses exactly the tail that fills no global batch.
    #[test]
    fn whole_epochs_lose_only_the_tail(
        samples in 1_u64..300, seed: u64, shuffle in shuffles(),
        world in 1_u64..6, batch in 1_u64..9, drop_last: bool,
    ) {
        let order = Order::new(samples, seed, shuffle).unwrap();
        let mut job = Job::new(order, world, batch, drop_last);
        for epoch in 0..2 {
            let mut seen = BTreeMap::new();
            prop_assert_eq!(job.run(u64::MAX, &mut seen), (epoch, true));
            let global = world * batch;
            let expected = if drop_last { samples / global * global } else { samples };
            prop_assert_eq!(seen.values().map(|&n| u64::from(n)).sum::<u64>(), expected);
            prop_assert!(seen.values().all(|&n| n <= 1));
        }
    }

    /// Break and iterate restarts the epoch; set_epoch of the current epoch keeps the position of
    /// a loaded state, another one starts at 0.
    #[test]
    fn break_and_set_epoch(
        samples in 1_u64..100, seed: u64, shuffle in shuffles(), world in 1_u64..4,
        batch in 1_u64..5, stop in 0_u64..30, epoch in 0_u64..4,
    ) {
        let order = Order::new(samples, seed, shuffle).unwrap();
        let mut job = Job::new(order, world, batch, false);
        let (_, exhausted) = job.run(stop, &mut BTreeMap::new());
        let state = job.state();
        let mut seen = BTreeMap::new();
        prop_assert_eq!(job.run(u64::MAX, &mut seen), (u64::from(exhausted), true));
        prop_assert_eq!(seen.values().sum::<u32>() as u64, samples, "the whole epoch again");

        job.ranks.iter_mut().for_each(|rank| rank.load(&state).unwrap());
        job.ranks.iter_mut().for_each(|rank| rank.set_epoch(state.epoch));
        prop_assert_eq!(&job.state(), &state);
        job.ranks.iter_mut().for_each(|rank| rank.set_epoch(epoch));
        let moved = job.state();
        let position = if epoch == state.epoch { state.position } else { 0 };
        prop_assert_eq!((moved.epoch, moved.position), (epoch, position));
    }

    /// Large datasets stay in range, at any position of the epoch.
    #[test]
    fn large_orders_stay_in_range(
        samples in 1_u64..(1 << 56), seed: u64, epoch: u64, shuffle in shuffles(), position: u64,
    ) {
        let order = Order::new(samples, seed, shuffle).unwrap();
        prop_assert!(order.at(epoch, position) < samples);
    }
}

/// Rows of the Markdown table that follows the line `marker` in the specification.
fn vectors(marker: &str) -> Vec<Vec<String>> {
    let page = include_str!("../docs/order.md");
    let table = page.split_once(marker).expect("the page has this table").1;
    let rows = table.lines().skip_while(|line| !line.starts_with('|')).skip(2);
    let cells = |line: &str| {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_string()).collect()
    };
    rows.take_while(|line| line.starts_with('|')).map(cells).collect()
}

fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
        None => text.parse().unwrap(),
    }
}

fn numbers(text: &str) -> Vec<u64> {
    text.split_whitespace().map(number).collect()
}

#[test]
fn the_specified_philox_blocks() {
    let rows = vectors("<!-- vectors: philox -->");
    assert!(rows.len() >= 3);
    for row in rows {
        let word = |cell: &str| -> Vec<u32> { numbers(cell).iter().map(|&n| n as u32).collect() };
        let (counter, key) = (word(&row[0]), word(&row[1]));
        let block = philox4x32(counter.try_into().unwrap(), key.try_into().unwrap());
        assert_eq!(block.to_vec(), word(&row[2]));
    }
}

#[test]
fn the_specified_streams() {
    let rows = vectors("<!-- vectors: stream -->");
    assert!(rows.len() >= 3);
    for row in rows {
        let key: Vec<u64> = row[..4].iter().map(|cell| number(cell)).collect();
        let stream = Stream::new(key[0], key[1], key[2], key[3] as u32);
        let mut words = stream.clone();
        let expected = numbers(&row[4]);
        let found: Vec<u64> = expected.iter().map(|_| u64::from(words.next_u32())).collect();
        assert_eq!(found, expected, "{row:?}");
        assert_eq!(stream.clone().next_f64().to_string(), row[5], "{row:?}");
        assert_eq!(stream.clone().below(1000).to_string(), row[6], "{row:?}");
        let normal: f64 = row[7].parse().unwrap();
        assert!((stream.clone().normal() - normal).abs() < 1e-12, "{row:?}");
    }
}

#[test]
fn the_specified_orders() {
    let rows = vectors("<!-- vectors: order -->");
    assert!(rows.len() >= 6);
    for row in rows {
        let shuffle: Shuffle = serde_json::from_str(row[0].trim_matches('`')).unwrap();
        let order = Order::new(number(&row[1]), number(&row[2]), shuffle).unwrap();
        let epoch = order.epoch(number(&row[3]));
        let found: Vec<u64> = numbers(&row[4]).iter().map(|&p| epoch.at(p)).collect();
        assert_eq!(found, numbers(&row[5]), "{row:?}");
    }
}
