//! What must hold at every moment, as if power were cut right then.

use super::world::{Config, Rank, World};
use crate::checkpoint::commit::machine::Outcome;

/// What is wrong, if anything.
pub fn broken(world: &World, config: &Config) -> Option<String> {
    let disk = &world.disk;
    if let Some(torn) = disk.manifest.possible().flatten().find(|m| !disk.whole(*m)) {
        return Some(format!("after a power cut {torn:?} may name bytes that are not there"));
    }
    let values: Vec<_> = disk.manifest.possible().collect();
    if config.refers && !disk.referred[1] && values.iter().any(Option::is_some) {
        return Some("a manifest names bytes of a step that was removed".into());
    }
    let restorable = if config.overwrite {
        disk.step.surely(true) && values.iter().all(Option::is_some)
    } else {
        disk.older || (disk.step.surely(true) && values.iter().all(Option::is_some))
    };
    if !restorable {
        return Some("neither the old nor the new step can be restored".into());
    }
    let changed = values.windows(2).any(|w| w[0].is_some() && w[0] != w[1]);
    if changed && !config.overwrite {
        return Some(format!("one step had two manifests: {values:?}"));
    }
    world.ranks.iter().find_map(|rank| {
        let ours = values.iter().flatten().any(|m| m.attempt == rank.attempt);
        match rank.outcome()? {
            Outcome::Committed if !disk.committed(rank.attempt) => {
                Some(format!("rank {} said committed, which a power cut undoes", rank.id))
            }
            Outcome::Failed if rank.id == 0 && rank.alive && ours => {
                Some("rank 0 said failed, but its manifest is there".into())
            }
            _ => None,
        }
    })
}

/// What is wrong with an end.
pub fn broken_end(world: &World, config: &Config) -> Option<String> {
    if let Some(rank) = world.ranks.iter().find(|r| !r.ended()) {
        return Some(format!("rank {} waits for ever in {:?}", rank.id, rank.pending));
    }
    let outcomes: Vec<_> = world.ranks.iter().filter_map(Rank::outcome).collect();
    let first = world.ranks.iter().filter(|r| r.attempt == 1).filter_map(Rank::outcome);
    let committed = outcomes.iter().filter(|o| **o == Outcome::Committed).count();
    if world.faults_left < config.faults {
        return None;
    }
    if config.differ && world.disk.files[1].iter().any(|f| f.entry.now()) {
        return Some("a refused save left files".into());
    }
    let right = match (config.differ, config.rival) {
        (true, false) => committed == 0 && outcomes.iter().all(|o| *o == Outcome::Failed),
        // Of two jobs in one folder exactly one commits.
        (_, true) => {
            let all: Vec<_> = first.collect();
            all.iter().all(|o| *o == all[0]) && (committed == all.len() || committed == 1)
        }
        // Whoever refers to a step that another process removes may fail; then nothing is left.
        (false, false) if config.refers && committed == 0 => {
            let left = world.disk.mark || world.disk.files[1].iter().any(|f| f.entry.now());
            !world.disk.referred[0] && !left
        }
        (false, false) => committed == outcomes.len(),
    };
    (!right).then(|| format!("without a fault the ranks ended {outcomes:?}"))
}
