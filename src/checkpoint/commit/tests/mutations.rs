//! The commit with one step left out or two neighbours exchanged: where the order matters the
//! explorer must find a broken promise, and where it does not this file says why.

use std::collections::BTreeMap;

use super::PLAIN;
use super::explore::{explore, trace};
use super::world::{Config, Mutation};
use crate::checkpoint::commit::machine::Action;
use crate::checkpoint::commit::machine::Action::{
    Ack, CheckHeld, Gather, GatherDetails, Hold, Join, Judge, LookEarly, LookOld, Prepare,
    PutManifest, RemoveOwn, Retire, Seal, SendDetails, SendPart, Sync, SyncFolder, SyncTable, Tell,
    WaitFinal, WaitVerdict, WaitVisible, Write, WriteTable,
};
use crate::checkpoint::commit::machine::Folder::{Attempt, Root, Step};
use crate::checkpoint::commit::machine::Word::{Committed, Explain, Failed};

/// Saves that together do every action.
const SAVES: [Config; 7] = [
    Config { ranks: 1, ..PLAIN },
    Config { ranks: 1, overwrite: true, ..PLAIN },
    Config { ranks: 2, ..PLAIN },
    Config { ranks: 2, overwrite: true, ..PLAIN },
    Config { ranks: 2, differ: true, ..PLAIN },
    Config { ranks: 1, refers: true, ..PLAIN },
    Config { ranks: 2, refers: true, ..PLAIN },
];

/// What may be left out without breaking a promise, and why.
const NEEDLESS: [(Action, &str); 8] = [
    (Join, "the model's keys have no session"),
    (Prepare, "only saves the work: the put itself refuses a committed step"),
    (LookEarly, "only saves the work"),
    (WaitVisible, "the model's ranks all see one folder at once"),
    (Tell(Committed), "a rank that hears nothing reads the manifest"),
    (Retire, "files nobody names cost space, nothing else"),
    (Ack, "lets rank 0 clear the room"),
    (GatherDetails, "details only name the difference"),
];

/// Neighbours whose order is free, and why.
const FREE: [(Action, Action, &str); 25] = [
    (Join, Prepare, "neither writes"),
    (Join, LookEarly, "the model's keys have no session"),
    (LookEarly, Prepare, "neither writes"),
    (Prepare, Write(0), "the put itself refuses a committed step"),
    (Sync(0), Write(1), "two files"),
    (Sync(1), Gather, "rank 0's own file is durable before the manifest"),
    (Sync(1), Judge, "the table is not written yet"),
    (Judge, WriteTable, "a table that is not published is removed"),
    (Judge, WaitVisible, "neither writes"),
    (WaitVisible, WriteTable, "a table that is not published is removed"),
    (Judge, Hold, "the mark of a refused save is removed"),
    (WaitVisible, Hold, "the same"),
    (CheckHeld, WriteTable, "a table that is not published is removed"),
    (SyncTable, SyncFolder(Attempt), "bytes and entry are durable before the manifest"),
    (SyncFolder(Attempt), SyncFolder(Step), "all are durable before the manifest"),
    (SyncFolder(Step), SyncFolder(Root), "the same"),
    (SyncFolder(Root), LookOld, "looking writes nothing"),
    (Tell(Committed), Retire, "the commit is durable before both"),
    (GatherDetails, RemoveOwn, "details only name the difference"),
    (RemoveOwn, Tell(Failed), "the save has failed before both"),
    (RemoveOwn, Ack, "the same"),
    (WaitVerdict, Ack, HANGS),
    (WaitVerdict, SendDetails, HANGS),
    (WaitFinal, RemoveOwn, HANGS),
    (Judge, Tell(Explain), HANGS),
];

/// The second is there only because of how the first ended, so there is no other order.
const HANGS: &str = "cannot be exchanged";

fn noticed(mutation: Mutation) -> Option<String> {
    let found = SAVES.into_iter().find_map(|c| explore(&Config { mutation, ..c }).err());
    found.map(|broken| broken.what)
}

/// Every action of a save in which nothing fails, with the one that follows.
fn pairs() -> Vec<(Action, Action)> {
    let traces: Vec<_> = SAVES.iter().flat_map(trace).collect();
    let pairs = traces.iter().flat_map(|t| t.windows(2)).map(|w| (w[0], w[1]));
    let unique: BTreeMap<_, _> = pairs.map(|p| (format!("{p:?}"), p)).collect();
    unique.into_values().collect()
}

#[test]
fn every_step_left_out_is_noticed() {
    let mut wrong = Vec::new();
    for (action, _) in pairs() {
        let why = NEEDLESS.iter().find(|(free, _)| *free == action);
        match (noticed(Mutation::Drop(action)), why) {
            (Some(_), None) | (None, Some(_)) => {}
            found => wrong.push(format!("without {action:?}: {found:?}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_exchange_that_matters_is_noticed() {
    let (mut free, mut wrong) = (0, Vec::new());
    for (a, b) in pairs() {
        let why = FREE.iter().find(|(x, y, _)| (*x, *y) == (a, b));
        free += usize::from(why.is_some());
        match (noticed(Mutation::Swap(a, b)), why) {
            (Some(_), None) | (None, Some(_)) => {}
            found => wrong.push(format!("{b:?} before {a:?}: {found:?}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(free, FREE.len(), "a pair that no save has");
}

#[test]
fn the_orders_that_a_commit_hangs_on_are_among_them() {
    let matters = [
        (Write(0), Sync(0)),
        (Sync(1), SendPart),
        (Gather, Judge),
        (WriteTable, SyncTable),
        (Hold, CheckHeld),
        (SyncFolder(Root), PutManifest),
        (PutManifest, Seal),
        (Seal, Tell(Committed)),
        (Seal, Retire),
    ];
    for (a, b) in matters {
        assert!(
            pairs().contains(&(a, b)) && noticed(Mutation::Swap(a, b)).is_some(),
            "{a:?} {b:?}"
        );
    }
}

#[test]
fn a_rank_that_heard_nothing_must_seal_what_it_found() {
    let config = Config { mutation: Mutation::Drop(Seal), mutated: Some(1), ..PLAIN };
    let broken = explore(&config).unwrap_err();
    assert!(broken.what.contains("rank 1 said committed"), "{broken:?}");
}
