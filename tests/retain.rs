//! Retention through real files: the rules, whose steps are pruned, and a kill at every operation
//! of a prune.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use drivetrain::checkpoint::{Adopted, Best, Checkpointer, Keep, Options, SaveOptions, adopt};
use drivetrain::checkpoint::{remove_steps, superfluous};
use drivetrain::runtime::block_on;
use drivetrain::storage::Store;
use drivetrain::storage::fault::{FaultScript, FaultStore};

use crate::commit::{BLOCKING, Owned, alone, local, read, save, save_with, walk};

fn small(seed: u64) -> Vec<Owned> {
    vec![Owned::whole("w", &[300, 7], seed), Owned::whole("s", &[], seed + 1)]
}

fn last(n: u32) -> Options {
    Options { keep_last: Some(n), ..Options::default() }
}

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

fn measured(ckpt: &Checkpointer, step: i64, loss: f64) {
    let metrics = BTreeMap::from([("loss".into(), loss.is_finite().then_some(loss))]);
    let options = SaveOptions { metrics, ..BLOCKING };
    save_with(ckpt, step, &small(step as u64), "{}", options).unwrap();
}

#[test]
fn the_best_by_metric_stay_whoever_saves_next() {
    let dir = tempfile::tempdir().unwrap();
    let best = Best { count: 2, metric: "loss".into(), highest: false };
    let options = Options { keep_best: Some(best), ..last(1) };
    let losses = [0.9, 0.2, 0.7, f64::NAN, 0.3, 0.8];
    let ckpt = alone(dir.path(), options.clone());
    for (i, &loss) in losses.iter().enumerate().take(4) {
        measured(&ckpt, i as i64, loss);
    }
    assert_eq!(ckpt.steps().unwrap(), [1, 2, 3]);
    ckpt.close().unwrap();
    // The next process reads the metrics from the manifests.
    let ckpt = alone(dir.path(), options);
    for (i, &loss) in losses.iter().enumerate().skip(4) {
        measured(&ckpt, i as i64, loss);
    }
    assert_eq!(ckpt.steps().unwrap(), [1, 4, 5]);
    let open = ckpt.open(4).unwrap();
    assert_eq!(open.manifest().metrics, BTreeMap::from([("loss".into(), Some(0.3))]));
    assert!(open.manifest().committed_ns.unwrap() > 1_700_000_000_000_000_000);
}

#[test]
fn steps_committed_within_a_time_stay() {
    let dir = tempfile::tempdir().unwrap();
    let long = Options { keep_within: Some(Duration::from_hours(1)), ..last(1) };
    let ckpt = alone(dir.path(), long);
    for step in 0..4 {
        save(&ckpt, step, &small(1)).unwrap();
    }
    assert_eq!(ckpt.steps().unwrap(), [0, 1, 2, 3]);
    ckpt.close().unwrap();
    let ckpt = alone(dir.path(), Options { keep_within: Some(Duration::ZERO), ..last(2) });
    save(&ckpt, 4, &small(1)).unwrap();
    assert_eq!(ckpt.steps().unwrap(), [3, 4]);
}

#[test]
fn a_copied_step_is_restored_from_but_not_pruned_until_adopted() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = alone(from.path(), Options::default());
    save(&source, 7, &small(7)).unwrap();
    source.close().unwrap();
    copy_tree(&from.path().join("step-00000007"), &to.path().join("step-00000007"));
    let ckpt = alone(to.path(), last(1));
    assert_eq!(read(&ckpt, 7, &small(0)).unwrap(), small(7));
    for step in [8, 9] {
        save(&ckpt, step, &small(step as u64)).unwrap();
    }
    assert_eq!(ckpt.steps().unwrap(), [7, 9], "the copy does not count and stays");
    let store = local(to.path());
    let rule = Keep { last: Some(1), ..Keep::default() };
    assert!(block_on(superfluous(store.as_ref(), &rule)).unwrap().unwrap().is_empty());
    assert_eq!(adopt(&store, 7, &mut |_| {}).unwrap(), Adopted::Now);
    assert_eq!(adopt(&store, 7, &mut |_| {}).unwrap(), Adopted::Already);
    assert_eq!(adopt(&store, 9, &mut |_| {}).unwrap(), Adopted::Already);
    let found = block_on(superfluous(store.as_ref(), &rule)).unwrap().unwrap();
    assert_eq!(found.iter().map(|k| k.step).collect::<Vec<_>>(), [7]);
    save(&ckpt, 10, &small(10)).unwrap();
    assert_eq!(ckpt.steps().unwrap(), [10]);
    let left = walk(to.path());
    assert!(left.keys().all(|f| f.contains("step-00000010")), "{:?}", left.keys());
}

#[test]
fn a_damaged_copy_is_not_adopted() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = alone(from.path(), Options::default());
    save(&source, 7, &small(7)).unwrap();
    copy_tree(&from.path().join("step-00000007"), &to.path().join("step-00000007"));
    let name = walk(to.path()).into_keys().find(|f| f.ends_with(".safetensors")).unwrap();
    let mut bytes = std::fs::read(to.path().join(&name)).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    std::fs::write(to.path().join(name), bytes).unwrap();
    let Adopted::Damaged(problems) = adopt(&local(to.path()), 7, &mut |_| {}).unwrap() else {
        panic!("adopted")
    };
    assert!(problems[0].reason.contains("crc32c"), "{problems:?}");
    assert!(!to.path().join(".drivetrain").exists());
}

#[test]
fn one_folder_by_two_names_is_one_root() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    save(&alone(&real, Options::default()), 1, &small(1)).unwrap();
    let ckpt = alone(&link, last(1));
    save(&ckpt, 2, &small(2)).unwrap();
    assert_eq!(ckpt.steps().unwrap(), [2]);
}

#[test]
fn manifests_that_nobody_can_read_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), last(1));
    save(&ckpt, 1, &small(1)).unwrap();
    assert_eq!(ckpt.steps().unwrap(), [1]);
    let foreign = dir.path().join("step-00000000");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("manifest.json"), "{\"another\": \"program\"}").unwrap();
    for step in [2, 3] {
        save(&ckpt, step, &small(step as u64)).unwrap();
    }
    assert_eq!(ckpt.steps().unwrap(), [0, 3]);
    assert!(foreign.join("manifest.json").exists());
}

/// Steps 1 to 5 of which a prune removes three, one of them with a foreign file.
fn full(root: &Path) {
    let ckpt = alone(root, Options::default());
    for step in 1..=5 {
        save(&ckpt, step, &small(step as u64)).unwrap();
    }
    ckpt.close().unwrap();
    std::fs::write(root.join("step-00000002/notes.txt"), "mine").unwrap();
}

async fn prune(store: &dyn Store) -> drivetrain::Result<()> {
    let keep = Keep { last: Some(2), ..Keep::default() };
    remove_steps(store, &superfluous(store, &keep).await?, &mut |_| {}).await
}

#[test]
fn a_prune_stopped_at_any_operation_leaves_only_whole_steps() {
    let dir = tempfile::tempdir().unwrap();
    full(dir.path());
    let counting = FaultStore::new(local(dir.path()), FaultScript::parse("").unwrap());
    block_on(prune(&counting)).unwrap().unwrap();
    let total = counting.operations();
    assert!(total > 20, "{total}");
    for (action, n) in ["halt", "eio", "lost"].iter().flat_map(|a| (1..=total).map(move |n| (a, n)))
    {
        let what = format!("{action}@{n}");
        let dir = tempfile::tempdir().unwrap();
        full(dir.path());
        let script = FaultScript::parse(&what).unwrap();
        let store: Arc<dyn Store> = Arc::new(FaultStore::new(local(dir.path()), script));
        let _ = block_on(prune(store.as_ref())).unwrap();
        let ckpt = alone(dir.path(), last(2));
        let found = ckpt.candidates().unwrap();
        assert_eq!(found[..2], [(5, None), (4, None)], "{what}");
        for (step, reason) in found {
            assert_eq!(reason, None, "{what}: step {step}");
            assert!(ckpt.verify(step).unwrap().is_empty(), "{what}: step {step}");
            assert_eq!(read(&ckpt, step, &small(0)).unwrap(), small(step as u64), "{what}");
        }
        // The next commit finishes what was begun.
        save(&ckpt, 6, &small(6)).unwrap();
        assert_eq!(ckpt.steps().unwrap(), [5, 6], "{what}");
        assert!(dir.path().join("step-00000002/notes.txt").exists(), "{what}");
    }
}
