//! The commit's machines, driven through every order of events on a simulated disk and room.
//!
//! | file | what it does |
//! |---|---|
//! | `disk` | a disk that forgets what was not synced |
//! | `world` | ranks, messages, and what can happen next |
//! | `step` | what a move does |
//! | `check` | what must hold at every moment |
//! | `explore` | all orders, and random runs |
//! | `mutations` | orders that are wrong, which the checks must notice |
//!
//! The machines are production's own; only the driver is replaced. At every world a power cut is
//! judged, so crashes of the whole machine cost no branches; the death of one rank is a move.

mod check;
mod disk;
mod explore;
mod mutations;
mod step;
mod world;

use crate::checkpoint::meet::draw;
use explore::{explore, walk};
use world::{Config, Mutation};

const PLAIN: Config = Config {
    ranks: 2,
    rival: false,
    overwrite: false,
    differ: false,
    refers: false,
    faults: 1,
    mutation: Mutation::None,
    mutated: None,
};

/// How many faults a run may have: one more when there is time.
fn faults(usual: u8) -> u8 {
    usual + u8::from(long())
}

fn long() -> bool {
    std::env::var("DRIVETRAIN_LONG").is_ok_and(|v| v == "1")
}

fn holds(config: Config) {
    let started = std::time::Instant::now();
    match explore(&config) {
        Ok(worlds) => println!("{worlds} worlds in {:?}: {config:?}", started.elapsed()),
        Err(broken) => panic!("{config:?}: {}\n{:#?}", broken.what, broken.path),
    }
}

#[test]
fn one_rank_keeps_every_promise() {
    for overwrite in [false, true] {
        holds(Config { ranks: 1, overwrite, faults: 5, ..PLAIN });
    }
}

#[test]
fn two_ranks_keep_every_promise() {
    for (overwrite, differ) in [(false, false), (true, false), (false, true)] {
        holds(Config { overwrite, differ, faults: faults(3), ..PLAIN });
    }
}

#[test]
fn no_manifest_names_bytes_of_a_step_that_is_gone() {
    holds(Config { ranks: 1, refers: true, faults: faults(3), ..PLAIN });
    holds(Config { ranks: 2, refers: true, faults: faults(1), ..PLAIN });
}

#[test]
fn three_ranks_keep_every_promise() {
    for (overwrite, differ) in [(false, false), (true, false), (false, true)] {
        holds(Config { ranks: 3, overwrite, differ, faults: faults(1), ..PLAIN });
    }
}

#[test]
fn of_two_jobs_in_one_folder_one_commits() {
    holds(Config { ranks: 1, rival: true, faults: faults(3), ..PLAIN });
    holds(Config { ranks: 2, rival: true, faults: faults(1), ..PLAIN });
}

#[test]
fn long_random_runs_keep_every_promise() {
    let text = std::env::var("DRIVETRAIN_MODEL_SEED").ok();
    let first = text.and_then(|t| t.parse().ok()).unwrap_or_else(|| draw() >> 1);
    println!("seeds from DRIVETRAIN_MODEL_SEED={first}");
    let runs = if long() { 500_000 } else { 20_000 };
    for seed in first..first + runs {
        let (overwrite, differ) = (seed % 3 == 0, seed % 5 == 0);
        let rival = seed % 7 == 0 && !overwrite;
        let refers = seed % 2 == 0 && !rival && !overwrite;
        let config = Config { ranks: 3, rival, overwrite, differ, refers, faults: 6, ..PLAIN };
        if let Err(broken) = walk(&config, seed) {
            panic!("seed {seed} {config:?}: {}\n{:#?}", broken.what, broken.path);
        }
    }
}
