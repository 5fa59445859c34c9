//! Every sample exactly once, whatever the ranks and wherever the job stopped.

use std::collections::BTreeMap;

use drivetrain::order::{LoaderState, Shuffle};
use drivetrain::pipeline::{Loader, LoaderConfig, Share};
use proptest::prelude::*;

use super::data::{Data, mixed};
use super::{drain, next};

fn config(batch_size: u64, rank: u64, world_size: u64, shuffle: Shuffle) -> LoaderConfig {
    LoaderConfig {
        fields: Some(Vec::new()),
        rank,
        world_size,
        shuffle,
        seed: 3,
        threads: Some(1),
        ..LoaderConfig::new(batch_size)
    }
}

/// Takes up to `steps` steps on every rank, counts valid keys, and returns the common state.
fn run(
    data: &Data,
    state: Option<&LoaderState>,
    (batch, world): (u64, u64),
    steps: u64,
    seen: &mut BTreeMap<String, u32>,
) -> LoaderState {
    let mut states = Vec::new();
    for rank in 0..world {
        let config = config(batch, rank, world, Shuffle::Full);
        let loader = Loader::new(data.table.clone(), config).unwrap();
        if let Some(state) = state {
            loader.load_state(state).unwrap();
            assert_eq!(loader.state(), *state);
        }
        let pass = loader.begin_pass(Share::ALL).unwrap();
        for _ in 0..steps {
            let Some(batch) = next(&loader, &pass).unwrap() else { break };
            for (key, _) in batch.keys.iter().zip(&batch.valid).filter(|(_, v)| **v) {
                *seen.entry(key.clone()).or_default() += 1;
            }
        }
        states.push(loader.state());
    }
    assert!(states.windows(2).all(|w| w[0] == w[1]));
    states.remove(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn a_job_that_stops_and_changes_size_sees_every_sample_once(
        samples in 1usize..40, batch in 1u64..6, world in 1u64..4, stop in 0u64..6,
        new_batch in 1u64..6, new_world in 1u64..4,
    ) {
        let data = mixed(samples);
        let mut seen = BTreeMap::new();
        let state = run(&data, None, (batch, world), stop, &mut seen);
        if state.epoch == 0 {
            let end = run(&data, Some(&state), (new_batch, new_world), u64::MAX, &mut seen);
            prop_assert_eq!((end.epoch, end.position), (1, 0));
        }
        prop_assert_eq!(seen.len(), samples);
        prop_assert!(seen.values().all(|n| *n == 1));
    }
}

#[test]
fn state_counts_batches_handed_out_and_not_prefetched_ones() {
    let data = mixed(20);
    let loader = Loader::new(data.table.clone(), config(4, 0, 1, Shuffle::Full)).unwrap();
    let position = |l: &Loader| (l.state().epoch, l.state().position);
    assert_eq!((position(&loader), loader.len()), ((0, 0), 5));
    let pass = loader.begin_pass(Share::ALL).unwrap();
    assert_eq!(position(&loader), (0, 0));
    for step in 1..5 {
        next(&loader, &pass).unwrap().unwrap();
        assert_eq!(position(&loader), (0, step * 4));
    }
    next(&loader, &pass).unwrap().unwrap();
    assert_eq!(position(&loader), (1, 0));
    assert!(next(&loader, &pass).unwrap().is_none());
}

#[test]
fn a_break_restarts_the_epoch_and_older_iterators_are_refused() {
    let data = mixed(20);
    let loader = Loader::new(data.table.clone(), config(4, 0, 1, Shuffle::Full)).unwrap();
    let first: Vec<_> = drain(&loader).into_iter().map(|b| b.keys).collect();
    loader.set_epoch(0);
    let old = loader.begin_pass(Share::ALL).unwrap();
    assert_eq!(next(&loader, &old).unwrap().unwrap().keys, first[0]);
    let new = loader.begin_pass(Share::ALL).unwrap();
    let refused = next(&loader, &old).unwrap_err().to_string();
    assert!(refused.starts_with("iterator"), "{refused}");
    assert_eq!(next(&loader, &new).unwrap().unwrap().keys, first[0]);
    let state = loader.state();
    loader.load_state(&state).unwrap();
    assert_eq!(loader.len(), 4);
    assert_eq!(drain(&loader)[0].keys, first[1]);
}

#[test]
fn shares_of_workers_are_the_native_order() {
    let data = mixed(22);
    let all = Loader::new(data.table.clone(), config(2, 0, 1, Shuffle::Full)).unwrap();
    let expected: Vec<_> = drain(&all).into_iter().map(|b| b.keys).collect();
    for worker in 0..3 {
        let loader = Loader::new(data.table.clone(), config(2, 0, 1, Shuffle::Full)).unwrap();
        let pass = loader.begin_pass(Share { first: worker, stride: 3 }).unwrap();
        let mut step = worker as usize;
        while let Some(batch) = next(&loader, &pass).unwrap() {
            assert_eq!(batch.keys, expected[step]);
            step += 3;
        }
        assert!(step >= expected.len());
    }
}
