//! Every order of events from a start, each world visited once; and long random runs.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::rc::Rc;

use xxhash_rust::xxh3::Xxh3;

use super::check::{broken, broken_end};
use super::world::{Config, Move, World};
use crate::checkpoint::commit::machine::Action;

/// A run that broke a promise.
#[derive(Debug)]
pub struct Broken {
    pub what: String,
    pub path: Vec<Move>,
}

struct Path {
    step: Move,
    before: Option<Rc<Path>>,
}

fn unroll(path: Option<&Rc<Path>>) -> Vec<Move> {
    let mut steps: Vec<_> =
        std::iter::successors(path, |p| p.before.as_ref()).map(|p| p.step).collect();
    steps.reverse();
    steps
}

fn key(world: &World) -> u64 {
    let mut hasher = Xxh3::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// Worlds of one search; one that was cut short would prove nothing, so more is a panic.
const WORLDS_MAX: usize = 20_000_000;

/// Number of worlds visited, or the first broken promise.
pub fn explore(config: &Config) -> Result<usize, Box<Broken>> {
    let mut seen = HashSet::new();
    let mut stack = vec![(World::new(config), None::<Rc<Path>>)];
    let mut moves = Vec::new();
    while let Some((world, path)) = stack.pop() {
        if !seen.insert(key(&world)) {
            continue;
        }
        assert!(seen.len() <= WORLDS_MAX, "more than {WORLDS_MAX} worlds in {config:?}");
        world.moves(&mut moves);
        let end = if moves.is_empty() { broken_end(&world, config) } else { None };
        if let Some(what) = broken(&world, config).or(end) {
            return Err(Box::new(Broken { what, path: unroll(path.as_ref()) }));
        }
        for &step in &moves {
            let path = Some(Rc::new(Path { step, before: path.clone() }));
            stack.push((world.after(step, config), path));
        }
    }
    Ok(seen.len())
}

/// One move in this many is drawn among faults too: otherwise all would come at the start.
const FAULT_ONE_IN: u64 = 12;

/// One random run.
pub fn walk(config: &Config, seed: u64) -> Result<(), Box<Broken>> {
    let mut world = World::new(config);
    let (mut moves, mut path, mut state) = (Vec::new(), Vec::new(), seed);
    let mut draw = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % below
    };
    loop {
        world.moves(&mut moves);
        let end = if moves.is_empty() { broken_end(&world, config) } else { None };
        if let Some(what) = broken(&world, config).or(end) {
            return Err(Box::new(Broken { what, path }));
        }
        if moves.is_empty() {
            return Ok(());
        }
        if draw(FAULT_ONE_IN) > 0 {
            let all = std::mem::take(&mut moves);
            world.unforced(&mut moves);
            if moves.is_empty() {
                moves = all;
            }
        }
        let step = moves[draw(moves.len() as u64) as usize];
        path.push(step);
        world = world.after(step, config);
    }
}

/// What each rank does where nothing fails, in order.
pub fn trace(config: &Config) -> Vec<Vec<Action>> {
    let mut world = World::new(config);
    let mut actions = vec![Vec::new(); world.ranks.len()];
    let mut moves = Vec::new();
    loop {
        world.unforced(&mut moves);
        let Some(&step) = moves.first() else { return actions };
        if let Move::Run(i, action, _) = step {
            actions[i].push(action);
        }
        world = world.after(step, config);
        moves.clear();
    }
}
