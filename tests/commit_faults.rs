//! Every operation of a save fails, lies or kills, in turn: the folder holds the old steps or the
//! old and the new one, bit for bit, and never neither.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use drivetrain::Error;
use drivetrain::checkpoint::meet::MemoryMeet;
use drivetrain::checkpoint::{Checkpointer, Options, SaveOptions};
use drivetrain::storage::fault::{FaultScript, FaultStore};
use drivetrain::storage::{StorageOptions, Store, open_store};

use crate::commit::{
    BLOCKING, Owned, alone, local, on_all, ranks, read, save, save_with, share, walk,
};

const CHILD_ENV: &str = "DRIVETRAIN_TEST_COMMIT_CHILD";

fn small(seed: u64) -> Vec<Owned> {
    vec![
        Owned::whole("w", &[300, 7], seed),
        Owned::whole("b", &[5], seed + 1),
        Owned::whole("s", &[], seed + 2),
    ]
}

fn faulty(root: &Path, script: &str) -> Arc<FaultStore> {
    Arc::new(FaultStore::new(local(root), FaultScript::parse(script).unwrap()))
}

fn open_faulty(store: &Arc<FaultStore>) -> Result<Checkpointer, Error> {
    let store = Arc::clone(store) as Arc<dyn Store>;
    Checkpointer::new(store, 0, 1, Options { keep_last: Some(2), ..Options::default() }, None)
}

/// Operations of opening a checkpointer and saving one more step.
fn operations(overwrite: bool) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    save(&alone(dir.path(), Options::default()), 1, &small(1)).unwrap();
    let store = faulty(dir.path(), "");
    let ckpt = open_faulty(&store).unwrap();
    let step = if overwrite { 1 } else { 2 };
    save_with(&ckpt, step, &small(2), "{}", SaveOptions { overwrite, ..BLOCKING }).unwrap();
    ckpt.close().unwrap();
    store.operations()
}

/// All steps that look committed are good and hold `small(seed)` for one of the seeds.
fn all_good(root: &Path, what: &str) -> Vec<(i64, u64)> {
    let ckpt = alone(root, Options::default());
    let mut found = Vec::new();
    for (step, reason) in ckpt.candidates().unwrap() {
        assert_eq!(reason, None, "{what}: step {step}");
        let got = read(&ckpt, step, &small(0)).unwrap();
        let seed = (1..9).find(|&s| got == small(s));
        found.push((step, seed.unwrap_or_else(|| panic!("{what}: step {step} is neither"))));
        assert!(ckpt.verify(step).unwrap().is_empty(), "{what}");
    }
    found
}

#[test]
fn an_error_at_any_operation_leaves_old_or_new() {
    let total = operations(false);
    assert!(total > 15, "{total}");
    for action in ["eio", "enospc", "lost", "halt"] {
        for n in 1..=total {
            let what = format!("{action}@{n}");
            let dir = tempfile::tempdir().unwrap();
            save(&alone(dir.path(), Options::default()), 1, &small(1)).unwrap();
            let store = faulty(dir.path(), &what);
            let saved = open_faulty(&store).map_err(Arc::new).and_then(|ckpt| {
                let saved = save(&ckpt, 2, &small(2));
                ckpt.close().unwrap();
                saved
            });
            let found = all_good(dir.path(), &what);
            assert!(found.contains(&(1, 1)), "{what}: the older step is gone: {found:?}");
            let there = found.contains(&(2, 2));
            match saved {
                Ok(_) => assert!(there, "{what}: said to be saved"),
                Err(e) if e.to_string().contains("outcome unknown") => {}
                Err(e) => {
                    assert!(!there, "{what}: said to have failed: {e}");
                    // A store that still works has been cleaned up.
                    let left = walk(dir.path()).into_keys().filter(|f| f.contains("step-00000002"));
                    let left: Vec<_> = left.collect();
                    assert!(left.is_empty() || action != "eio", "{what}: {left:?}");
                }
            }
            let next = alone(dir.path(), Options::default());
            save(&next, 3, &small(3)).unwrap();
            assert!(all_good(dir.path(), &what).contains(&(3, 3)), "{what}");
        }
    }
}

#[test]
fn a_full_disk_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = faulty(dir.path(), "enospc@write:1");
    let error = save(&open_faulty(&store).unwrap(), 2, &small(2)).unwrap_err();
    assert!(matches!(&*error, Error::NoSpace { need_bytes, .. } if *need_bytes > 0), "{error}");
    assert!(walk(dir.path()).is_empty());
}

#[test]
fn overwriting_leaves_old_or_new_at_any_fault() {
    let total = operations(true);
    for action in ["eio", "lost", "halt"] {
        for n in 1..=total {
            let what = format!("{action}@{n}");
            let dir = tempfile::tempdir().unwrap();
            save(&alone(dir.path(), Options::default()), 1, &small(1)).unwrap();
            let store = faulty(dir.path(), &what);
            let saved = open_faulty(&store).map_err(Arc::new).and_then(|ckpt| {
                save_with(&ckpt, 1, &small(2), "{}", SaveOptions { overwrite: true, ..BLOCKING })
            });
            let found = all_good(dir.path(), &what);
            match saved {
                Ok(_) => assert_eq!(found, [(1, 2)], "{what}"),
                Err(e) => assert!(found == [(1, 1)] || found == [(1, 2)], "{what}: {e} {found:?}"),
            }
        }
    }
}

#[test]
fn a_device_that_lies_is_found_out() {
    let total = operations(false);
    for action in ["truncate", "flip"] {
        for n in 1..=total {
            let what = format!("{action}@{n}");
            let dir = tempfile::tempdir().unwrap();
            save(&alone(dir.path(), Options::default()), 1, &small(1)).unwrap();
            let store = faulty(dir.path(), &what);
            if let Ok(ckpt) = open_faulty(&store) {
                let _ = save(&ckpt, 2, &small(2));
            }
            let ckpt = alone(dir.path(), Options::default());
            assert_eq!(read(&ckpt, 1, &small(1)).unwrap(), small(1), "{what}");
            for (step, reason) in ckpt.candidates().unwrap() {
                let problems = ckpt.verify(step).unwrap();
                match (reason, read(&ckpt, step, &small(0))) {
                    (Some(_), opened) => assert!(opened.is_err() && !problems.is_empty(), "{what}"),
                    (None, Err(e)) => {
                        assert!(matches!(e, Error::Corrupt { .. }), "{what}: {e}");
                        assert!(!problems.is_empty(), "{what}");
                    }
                    // What restore does not need may be damaged, and verify says so.
                    (None, Ok(got)) => assert!(got == small(step as u64), "{what}"),
                }
            }
        }
    }
}

/// Not a test of its own: the process that is killed. It says on standard output what it knows.
#[test]
fn child() {
    let Ok(root) = std::env::var(CHILD_ENV) else { return };
    let store = open_store(&root, &StorageOptions::default()).unwrap();
    let options = Options { keep_last: Some(1), ..Options::default() };
    let ckpt = Checkpointer::new(store, 0, 1, options, None).unwrap();
    for step in [1, 2] {
        save(&ckpt, step, &small(step as u64)).unwrap();
        println!("committed {step}");
    }
    save_with(&ckpt, 2, &small(3), "{}", SaveOptions { overwrite: true, ..BLOCKING }).unwrap();
    println!("replaced 2");
    ckpt.close().unwrap();
    println!("done");
}

fn run_child(root: &Path, script: &str) -> (String, bool) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "commit_faults::child", "--nocapture", "--test-threads=1"])
        .env(CHILD_ENV, root)
        .env("DRIVETRAIN_FAULT", script)
        .env("DRIVETRAIN_SHM_DIR", root.parent().unwrap())
        .output()
        .unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}

#[test]
fn sigkill_at_every_operation_leaves_old_or_new() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let root = dir.path().join("ckpt");
    let script = "eio@head:no such path";
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "commit_faults::child", "--nocapture", "--test-threads=1"])
        .env(CHILD_ENV, &root)
        .env("DRIVETRAIN_FAULT", script)
        .env("DRIVETRAIN_FAULT_LOG", &log)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&log).unwrap();
    let total = text.lines().filter(|line| line.contains("before")).count();
    assert!(total > 30, "{total} operations: {text}");
    for n in 1..=total {
        for action in ["kill", "tear"] {
            let what = format!("{action}@{n}");
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("ckpt");
            let (said, finished) = run_child(&root, &what);
            assert!(!finished, "{what} did not kill: {said}");
            if !root.exists() {
                continue;
            }
            let found = all_good(&root, &what);
            check_found(&said, &found, &what);
            // The next run goes on as if nothing had been, and its slots replace the dead one's.
            let next =
                alone(&root, Options { shm_dir: Some(dir.path().into()), ..Options::default() });
            save(&next, 9, &small(8)).unwrap();
            next.close().unwrap();
            let slots = std::fs::read_dir(dir.path()).unwrap().count();
            assert_eq!(slots, 1, "{what}: staging slots stay");
        }
    }
}

/// What was said to be committed is there, unless a later step replaced it.
fn check_found(said: &str, found: &[(i64, u64)], what: &str) {
    let newest = found.first().copied();
    if said.contains("replaced 2") {
        assert_eq!(newest, Some((2, 3)), "{what}");
    } else if said.contains("committed 2") {
        assert!(newest == Some((2, 2)) || newest == Some((2, 3)), "{what}: {found:?}");
    } else if said.contains("committed 1") {
        assert!(newest == Some((1, 1)) || newest == Some((2, 2)), "{what}: {found:?}");
    } else {
        assert!(newest.is_none() || newest == Some((1, 1)), "{what}: {found:?}");
    }
}

#[test]
fn a_fault_on_one_rank_is_one_error_on_all_and_leaves_nothing() {
    for (bad, n) in (0..2).flat_map(|bad| (1..=30).map(move |n| (bad, n))) {
        let what = format!("rank {bad} eio@{n}");
        let dir = tempfile::tempdir().unwrap();
        let meet = Arc::new(MemoryMeet::default());
        let good = local(dir.path());
        let mut two = ranks(&good, Some(&meet), 2, Duration::from_secs(20));
        let store = faulty(dir.path(), &format!("eio@{n}"));
        let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
        let place = Arc::clone(&meet) as Arc<dyn drivetrain::checkpoint::meet::Meet>;
        match Checkpointer::new(store.clone() as Arc<dyn Store>, bad, 2, options, Some(place)) {
            Ok(ckpt) => two[bad as usize] = ckpt,
            Err(_) => continue,
        }
        let before = store.operations();
        let tensors: Vec<_> = (0..2).map(light).collect();
        let saved = on_all(&two, |r, ckpt| save(ckpt, 1, &tensors[r as usize]));
        if store.operations() < n {
            assert!(saved.iter().all(Result::is_ok), "{what}: {saved:?}");
            if store.operations() == before {
                break;
            }
            continue;
        }
        let steps = alone(dir.path(), Options::default()).candidates().unwrap();
        if saved.iter().all(Result::is_ok) {
            assert_eq!(steps, [(1, None)], "{what}: a fault after the commit");
            continue;
        }
        let errors: Vec<_> = saved.into_iter().map(|s| s.unwrap_err().to_string()).collect();
        assert_eq!(errors[0], errors[1], "{what}");
        assert!(errors[0].contains(&format!("rank {bad}")), "{what}: {}", errors[0]);
        if errors[0].contains("outcome unknown") {
            // The manifest is there, and a rank that heard nothing may count on it.
            assert_eq!(steps, [(1, None)], "{what}");
            continue;
        }
        assert!(steps.is_empty(), "{what}: {steps:?}");
        drop(two);
        let left = walk(dir.path());
        assert!(left.keys().all(|f| f.starts_with(".drivetrain-probe")), "{what}: {left:?}");
    }
}

/// A rank's share without the large tensor.
fn light(rank: u32) -> Vec<Owned> {
    let mut tensors = share(rank, 2, 1);
    tensors.remove(1);
    tensors
}

/// The ranks of a job in one process: one stands still, and the others are told what it was at.
#[test]
fn the_last_words_of_a_rank_that_stands_still_reach_all_others() {
    let cases = [
        ("delay=9000ms@create:rank-00001", "saving step 1: writing rank-00001.safetensors, "),
        ("delay=9000ms@finish:rank-00001", "saving step 1: making rank-00001.safetensors durable"),
    ];
    std::thread::scope(|scope| {
        for (script, words) in cases {
            scope.spawn(move || stands_still(script, words));
        }
    });
}

fn stands_still(script: &str, words: &str) {
    let dir = tempfile::tempdir().unwrap();
    let meet = Arc::new(MemoryMeet::default());
    let options = || Options {
        timeout: Duration::from_secs(4),
        shm_dir: Some(dir.path().join("shm")),
        ..Options::default()
    };
    let root = dir.path().join("run");
    let three: Vec<_> = (0..3)
        .map(|rank| {
            let store: Arc<dyn Store> =
                if rank == 1 { faulty(&root, script) } else { local(&root) };
            let meet = Some(Arc::clone(&meet) as _);
            Checkpointer::new(store, rank, 3, options(), meet).unwrap()
        })
        .collect();
    let failed = on_all(&three, |r, ckpt| save(ckpt, 1, &share(r, 3, 1)).unwrap_err().to_string());
    for rank in [0, 2] {
        let text = &failed[rank];
        assert!(text.contains("by rank 1 (its last word, "), "{text}");
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(failed[0], failed[2]);
    on_all(&three, |_, ckpt| ckpt.close().unwrap());
    assert!(meet.keys().iter().all(|key| !key.contains("words")), "{:?}", meet.keys());
    assert!(alone(&root, Options::default()).steps().unwrap().is_empty());
}
