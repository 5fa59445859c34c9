//! Saves that refer to what has not changed: what is written, what comes back, what stays.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use drivetrain::Error;
use drivetrain::checkpoint::layout::{Manifest, join, step_dir};
use drivetrain::checkpoint::meet::MemoryMeet;
use drivetrain::checkpoint::{
    Adopted, Checkpointer, Keep, Options, PackOptions, SaveOptions, adopt, remove_steps,
    superfluous,
};
use drivetrain::runtime::block_on;
use drivetrain::storage::Store;
use drivetrain::storage::fault::{FaultScript, FaultStore};

use crate::commit::{BLOCKING, Owned, alone, local, on_all, read, save, save_with, share, walk};

const HOUR: Duration = Duration::from_hours(1);
/// Bytes of the frozen tensor and of the one that is trained.
const BACKBONE: i64 = 3 << 19;
const HEAD: i64 = 5000;
/// A rank file's header fits a page here.
const PAGE: u64 = 4096;

fn delta(keep_last: Option<u32>, saves_max: u32) -> Options {
    let pack = PackOptions { delta_saves_max: Some(saves_max), compress: false };
    Options { keep_last, pack, ..Options::default() }
}

/// A frozen backbone and a head that differs from step to step.
fn tune(step: i64) -> Vec<Owned> {
    vec![
        Owned::whole("backbone", &[BACKBONE / 1024, 1024], 7),
        Owned::whole("head", &[HEAD], 1000 + step as u64),
        Owned::whole("frozen scale", &[], 8),
    ]
}

/// Sizes of a step's rank files.
fn rank_bytes(root: &Path, step: i64) -> u64 {
    let folder = step_dir(step).unwrap();
    let files = walk(root).into_iter();
    files.filter(|(f, _)| f.starts_with(&folder) && f.ends_with(".safetensors")).map(|f| f.1).sum()
}

fn manifest(root: &Path, step: i64) -> Manifest {
    let path = root.join(step_dir(step).unwrap()).join("manifest.json");
    Manifest::decode(&std::fs::read(path).unwrap(), "manifest.json").unwrap()
}

fn whole(ckpt: &Checkpointer, step: i64, saved: &[Owned]) {
    assert!(read(ckpt, step, saved).unwrap() == saved, "step {step}");
    assert_eq!(ckpt.verify(step).unwrap(), [], "step {step}");
}

#[test]
fn a_frozen_backbone_is_written_once() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    for step in [1, 2, 3] {
        save(&ckpt, step, &tune(step)).unwrap();
    }
    assert_eq!(rank_bytes(dir.path(), 1), PAGE + (BACKBONE + HEAD + 1) as u64);
    for step in [2, 3] {
        assert_eq!(
            rank_bytes(dir.path(), step),
            PAGE + HEAD as u64 + 1,
            "less than a page is, too"
        );
        let said = manifest(dir.path(), step);
        assert_eq!(said.refers_to, [1], "where the bytes are, not the save before");
        assert_eq!(said.referred.len(), 1);
        assert_eq!(said.referred[0].file, manifest(dir.path(), 1).files[1]);
    }
    for step in [1, 2, 3] {
        whole(&ckpt, step, &tune(step));
        let open = ckpt.open(step).unwrap();
        let refs = |name: &str| open.tensor(&format!("[\"{name}\"]")).unwrap().1[0].step_ref;
        let elsewhere = (step > 1).then_some(1);
        assert_eq!([refs("backbone"), refs("head")], [elsewhere, None]);
    }
    // All of it as before: no rank file at all.
    save(&ckpt, 4, &tune(3)[..2]).unwrap();
    assert_eq!(rank_bytes(dir.path(), 4), 0);
    assert_eq!(manifest(dir.path(), 4).refers_to, [1, 3]);
    whole(&ckpt, 4, &tune(3)[..2]);
    assert!(!walk(dir.path()).keys().any(|f| f.contains("referring")), "no mark stays");
    // Whoever knows nothing of deltas reads it, too.
    ckpt.close().unwrap();
    whole(&alone(dir.path(), Options::default()), 4, &tune(3)[..2]);
}

#[test]
fn what_the_save_came_to_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    save(&ckpt, 1, &tune(1)).unwrap();
    let state = tune(2);
    let inputs: Vec<_> = state.iter().map(Owned::input).collect();
    let handle = ckpt.save(2, &inputs, "{}", "{}", SaveOptions::default()).unwrap();
    handle.wait(HOUR).unwrap();
    let tally = handle.tally().unwrap();
    assert_eq!(tally.raw_bytes, (BACKBONE + HEAD + 1) as u64);
    assert_eq!(tally.referred_bytes, BACKBONE as u64);
    assert_eq!(tally.written_bytes, PAGE + HEAD as u64 + 1);
    let plain = alone(&dir.path().join("plain"), Options::default());
    let handle = plain.save(1, &inputs, "{}", "{}", SaveOptions::default()).unwrap();
    handle.wait(HOUR).unwrap();
    assert_eq!(handle.tally(), None);
}

#[test]
fn bytes_that_changed_back_or_moved_are_told_from_those_that_did_not() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    let mut state = tune(1);
    save(&ckpt, 1, &state).unwrap();
    state[0].data[1_000_000] ^= 1;
    save(&ckpt, 2, &state).unwrap();
    assert_eq!(rank_bytes(dir.path(), 2), PAGE + BACKBONE as u64 + 1);
    whole(&ckpt, 2, &state);
    // As step 1 was: but the save before it was another.
    state[0].data[1_000_000] ^= 1;
    save(&ckpt, 3, &state).unwrap();
    assert_eq!(rank_bytes(dir.path(), 3), PAGE + BACKBONE as u64 + 1);
    // The same bytes as another shape are another tensor.
    state[0] = Owned::whole("backbone", &[BACKBONE / 2048, 2048], 7);
    save(&ckpt, 4, &state).unwrap();
    assert_eq!(rank_bytes(dir.path(), 4), PAGE + BACKBONE as u64 + 1);
    whole(&ckpt, 4, &state);
}

#[test]
fn a_chunk_is_written_anew_after_so_many_saves() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 2));
    for step in 1..=7 {
        save(&ckpt, step, &tune(step)).unwrap();
    }
    let full: Vec<i64> =
        (1..=7).filter(|&s| manifest(dir.path(), s).refers_to.is_empty()).collect();
    assert_eq!(full, [1, 4, 7]);
    assert_eq!(manifest(dir.path(), 6).refers_to, [4]);
    let refused = Checkpointer::new(local(dir.path()), 0, 1, delta(None, 0), None).unwrap_err();
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
}

#[test]
fn retention_keeps_a_referred_step_until_no_reference_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(Some(1), 3));
    for step in [1, 2, 3, 4] {
        save(&ckpt, step, &tune(step)).unwrap();
        let expected = if step == 1 { vec![1] } else { vec![1, step] };
        assert_eq!(ckpt.steps().unwrap(), expected);
        whole(&ckpt, step, &tune(step));
    }
    // Written anew: nobody needs step 1 any more.
    save(&ckpt, 5, &tune(5)).unwrap();
    assert_eq!(ckpt.steps().unwrap(), [5]);
    assert!(walk(dir.path()).keys().all(|f| f.contains("step-00000005")), "{:?}", walk(dir.path()));
}

#[test]
fn a_new_process_writes_all_anew_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    for (first, second) in [(1, 2), (3, 4)] {
        let ckpt = alone(dir.path(), delta(Some(1), 100));
        save(&ckpt, first, &tune(first)).unwrap();
        assert_eq!(manifest(dir.path(), first).refers_to, [] as [i64; 0]);
        save(&ckpt, second, &tune(second)).unwrap();
        assert_eq!(manifest(dir.path(), second).refers_to, [first]);
        assert_eq!(ckpt.steps().unwrap(), [first, second]);
        whole(&ckpt, second, &tune(second));
        ckpt.close().unwrap();
    }
}

#[test]
fn an_older_step_refers_to_no_later_one_and_an_overwritten_one_not_to_itself() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    save(&ckpt, 10, &tune(10)).unwrap();
    save(&ckpt, 5, &tune(5)).unwrap();
    assert_eq!(manifest(dir.path(), 5).refers_to, [] as [i64; 0]);
    save(&ckpt, 20, &tune(20)).unwrap();
    assert_eq!(manifest(dir.path(), 20).refers_to, [5]);
    let over = SaveOptions { overwrite: true, ..BLOCKING };
    // The step that step 20 refers to.
    save_with(&ckpt, 5, &tune(6), "{}", over.clone()).unwrap();
    assert_eq!(manifest(dir.path(), 5).refers_to, [] as [i64; 0]);
    whole(&ckpt, 5, &tune(6));
    whole(&ckpt, 20, &tune(20));
    save(&ckpt, 30, &tune(30)).unwrap();
    whole(&ckpt, 30, &tune(30));
    save_with(&ckpt, 30, &tune(31), "{}", over).unwrap();
    assert_eq!(manifest(dir.path(), 30).refers_to, [5]);
    whole(&ckpt, 30, &tune(31));
}

#[test]
fn damage_in_the_referred_step_is_named_and_found_by_every_check() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    for step in [1, 2] {
        save(&ckpt, step, &tune(step)).unwrap();
    }
    let file = manifest(dir.path(), 1).files[1].path.clone();
    let path = dir.path().join("step-00000001").join(&file);
    let bytes = std::fs::read(&path).unwrap();
    let mut flipped = bytes.clone();
    flipped[5000] ^= 1;
    std::fs::write(&path, &flipped).unwrap();
    let name = join("step-00000001", &file);
    let error = read(&ckpt, 2, &tune(2)).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("crc32c"), "{error}");
    let problems = ckpt.verify(2).unwrap();
    assert!(problems.iter().any(|p| p.file == name && p.tensor.contains("backbone")));
    // Only the head: it lies in step 2.
    let head = [tune(2).swap_remove(1)];
    assert_eq!(read(&ckpt, 2, &head).unwrap(), head);
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let reasons: Vec<_> = ckpt.candidates().unwrap().into_iter().map(|(_, r)| r.unwrap()).collect();
    assert!(reasons[0].contains(&name) && reasons[0].contains("step 2 refers to"), "{reasons:?}");
    std::fs::remove_file(&path).unwrap();
    let reason = ckpt.candidates().unwrap()[0].1.clone().unwrap();
    assert!(reason.contains(&name) && reason.contains("no such file"), "{reason}");
    // Training that goes on does not refer to what is gone.
    let error = save(&ckpt, 3, &tune(3)).unwrap_err().to_string();
    assert!(error.contains(&name) && error.contains("save again"), "{error}");
    save(&ckpt, 3, &tune(3)).unwrap();
    whole(&ckpt, 3, &tune(3));
}

#[test]
fn a_copied_step_without_what_it_refers_to_is_refused_by_name() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let ckpt = alone(from.path(), delta(None, 100));
    for step in [1, 2] {
        save(&ckpt, step, &tune(step)).unwrap();
    }
    copy_step(from.path(), to.path(), 2);
    let store = local(to.path());
    let error = adopt(&store, 2, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("step-00000001/a-") && error.contains("no such file"), "{error}");
    copy_step(from.path(), to.path(), 1);
    assert_eq!(adopt(&store, 2, &mut |_| {}).unwrap(), Adopted::Now);
    // The copy of step 1 is nobody's, and step 2 needs it.
    let plain = alone(to.path(), Options { keep_last: Some(1), ..Options::default() });
    save(&plain, 3, &tune(3)).unwrap();
    assert_eq!(plain.steps().unwrap(), [1, 3]);
    // One folder of a root, by itself: its neighbours are found.
    let by_itself = local(&from.path().join("step-00000002"));
    let open = drivetrain::checkpoint::open_folder(&by_itself, "").unwrap();
    assert!(open.verify().unwrap().is_empty());
    let moved = tempfile::tempdir().unwrap();
    std::fs::rename(from.path().join("step-00000002"), moved.path().join("mine")).unwrap();
    let alone = local(&moved.path().join("mine"));
    let error = drivetrain::checkpoint::open_folder(&alone, "").unwrap_err().to_string();
    assert!(error.contains("refers to steps [1]") && error.contains("root"), "{error}");
}

fn copy_step(from: &Path, to: &Path, step: i64) {
    let folder = step_dir(step).unwrap();
    for file in walk(&from.join(&folder)).into_keys() {
        let target = to.join(&folder).join(&file);
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        std::fs::copy(from.join(&folder).join(&file), target).unwrap();
    }
}

#[test]
fn ranks_refer_each_to_its_own_and_any_world_reads() {
    let dir = tempfile::tempdir().unwrap();
    let store = local(dir.path());
    let meet = Arc::new(MemoryMeet::default());
    let three: Vec<Checkpointer> = (0..3)
        .map(|rank| {
            let meet = Arc::clone(&meet) as Arc<dyn drivetrain::checkpoint::meet::Meet>;
            Checkpointer::new(Arc::clone(&store), rank, 3, delta(Some(1), 100), Some(meet)).unwrap()
        })
        .collect();
    // What is sharded stays as it is; of the replicated ones one changes.
    let state = |rank: u32, step: i64| {
        let mut tensors = share(rank, 3, 5);
        tensors[2] = Owned::whole("small", &[100], step as u64).replicated(3);
        tensors
    };
    for step in [1, 2, 3] {
        let saved = on_all(&three, |r, ckpt| save(ckpt, step, &state(r, step)));
        assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    }
    // Rank 0 knows the outcome last: it prunes after that.
    assert_eq!(three[0].steps().unwrap(), [1, 3]);
    assert_eq!(rank_bytes(dir.path(), 3), PAGE + 100, "one file of one rank");
    assert_eq!(manifest(dir.path(), 3).referred.len(), 3, "a file of each rank");
    on_all(&three, |_, c| c.close().unwrap());
    let one = alone(dir.path(), Options::default());
    let all = [
        Owned::whole("sharded", &[37, 1000], 5),
        Owned::whole("big", &[20, 1 << 20], 6),
        Owned::whole("small", &[100], 3),
    ];
    whole(&one, 3, &all);
    let part = [all[0].rows(10, 20)];
    assert_eq!(read(&one, 3, &part).unwrap(), part);
}

/// The same, small: for many saves.
fn little(step: i64) -> Vec<Owned> {
    vec![Owned::whole("w", &[300, 70], 7), Owned::whole("head", &[30], 1000 + step as u64)]
}

/// Steps 1 and 2, of which the second refers to the first.
fn referring(root: &Path) {
    let ckpt = alone(root, delta(None, 100));
    for step in [1, 2] {
        save(&ckpt, step, &little(step)).unwrap();
    }
    ckpt.close().unwrap();
}

#[test]
fn a_delta_save_stopped_at_any_operation_leaves_only_whole_steps() {
    let run = |store: &Arc<dyn Store>| -> Result<(), Error> {
        let ckpt = Checkpointer::new(Arc::clone(store), 0, 1, delta(Some(1), 100), None)?;
        for step in [3, 4, 5] {
            let _ = save(&ckpt, step, &little(step));
        }
        let _ = ckpt.close();
        Ok(())
    };
    let dir = tempfile::tempdir().unwrap();
    referring(dir.path());
    let counting = Arc::new(FaultStore::new(local(dir.path()), FaultScript::parse("").unwrap()));
    run(&(Arc::clone(&counting) as Arc<dyn Store>)).unwrap();
    assert_eq!(manifest(dir.path(), 5).refers_to, [3]);
    let total = counting.operations();
    assert!(total > 60, "{total}");
    // All of them take minutes.
    let long = std::env::var("DRIVETRAIN_LONG").is_ok_and(|v| v == "1");
    let places = |action: &'static str, first: u64, every: usize| {
        let every = if long { 1 } else { every };
        let first = if long { 1 } else { first };
        (first..=total).step_by(every).map(move |n| (action, n))
    };
    let cases = places("halt", 1, 2).chain(places("eio", 2, 8)).chain(places("lost", 6, 8));
    for (action, n) in cases {
        let what = format!("{action}@{n}");
        let dir = tempfile::tempdir().unwrap();
        referring(dir.path());
        let script = FaultScript::parse(&what).unwrap();
        let faulty: Arc<dyn Store> = Arc::new(FaultStore::new(local(dir.path()), script));
        let _ = run(&faulty);
        let ckpt = alone(dir.path(), delta(Some(1), 100));
        let found = ckpt.candidates().unwrap();
        assert!(!found.is_empty(), "{what}");
        for (step, reason) in found {
            assert_eq!(reason, None, "{what}: step {step}");
            whole(&ckpt, step, &little(step));
        }
        age(dir.path());
        // The next saves clear away what is left.
        for step in [6, 7] {
            save(&ckpt, step, &little(step)).unwrap();
        }
        assert_eq!(ckpt.steps().unwrap(), [6, 7], "{what}");
        let left = walk(dir.path());
        let own = |f: &String| f.contains("step-00000006") || f.contains("step-00000007");
        assert!(left.keys().all(own), "{what}: {left:?}");
    }
}

fn age(root: &Path) {
    for file in walk(root).into_keys() {
        let file = std::fs::File::options().write(true).open(root.join(file)).unwrap();
        file.set_modified(SystemTime::now() - HOUR).unwrap();
    }
}

#[test]
fn a_save_that_finds_its_step_removed_fails_and_the_next_writes_all() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    save(&ckpt, 1, &tune(1)).unwrap();
    let foreign = alone(dir.path(), Options::default());
    save(&foreign, 50, &tune(50)).unwrap();
    let store = local(dir.path());
    let rule = Keep { last: Some(1), ..Keep::default() };
    let victims = block_on(superfluous(store.as_ref(), &rule)).unwrap().unwrap();
    assert_eq!(victims.iter().map(|k| (k.step, k.delta)).collect::<Vec<_>>(), [(1, true)]);
    block_on(remove_steps(store.as_ref(), &victims, &mut |_| {})).unwrap().unwrap();
    let error = save(&ckpt, 2, &tune(2)).unwrap_err().to_string();
    assert!(error.contains("step 1") && error.contains("save again"), "{error}");
    assert_eq!(ckpt.steps().unwrap(), [50]);
    save(&ckpt, 3, &tune(3)).unwrap();
    whole(&ckpt, 3, &tune(3));
    assert!(!walk(dir.path()).keys().any(|f| f.contains("referring")));
}

#[test]
fn a_prune_that_meets_a_save_under_way_leaves_the_data() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), delta(None, 100));
    for step in [1, 2] {
        save(&ckpt, step, &tune(step)).unwrap();
    }
    let store = local(dir.path());
    let mark = dir.path().join(".drivetrain/referring/step-00000001.a-0123456789abcdef");
    std::fs::create_dir_all(mark.parent().unwrap()).unwrap();
    std::fs::write(&mark, "").unwrap();
    let known = |step| drivetrain::checkpoint::Known { step, delta: true, ..Default::default() };
    block_on(remove_steps(store.as_ref(), &[known(2), known(1)], &mut |_| {})).unwrap().unwrap();
    assert!(ckpt.steps().unwrap().is_empty());
    let left = |step: i64| rank_bytes(dir.path(), step) > 0;
    assert_eq!([left(1), left(2)], [true, false], "the mark's step has its data");
    std::fs::remove_file(&mark).unwrap();
    // And so has one that a committed step refers to.
    let dir = tempfile::tempdir().unwrap();
    referring(dir.path());
    let store = local(dir.path());
    block_on(remove_steps(store.as_ref(), &[known(1)], &mut |_| {})).unwrap().unwrap();
    let ckpt = alone(dir.path(), delta(Some(1), 100));
    assert_eq!(ckpt.steps().unwrap(), [2]);
    whole(&ckpt, 2, &little(2));
    // It goes with the step that needed it, when it is old.
    age(dir.path());
    for step in [3, 4] {
        save(&ckpt, step, &little(step)).unwrap();
    }
    ckpt.close().unwrap();
    age(dir.path());
    let next = alone(dir.path(), delta(Some(1), 100));
    save(&next, 5, &little(5)).unwrap();
    next.steps().unwrap();
    let left = walk(dir.path());
    assert!(left.keys().all(|f| f.contains("step-00000005")), "{left:?}");
}
