//! Two ranks save as two processes, and one of them dies, is slow or fails at a named place.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use drivetrain::checkpoint::{Checkpointer, Options};

use super::outcome::{Ground, NEW_SEED, save, state};
use super::places::NEW_STEP;
use super::report::{Row, finish};
use crate::commit::{Owned, local, on_all, save_with};

const CHILD_ENV: &str = "DRIVETRAIN_TEST_MATRIX_RANK";
/// How long a rank waits for another: long enough for a start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(8);
/// Cases wait most of their time.
const THREADS: usize = 8;

/// (fault, where, its rank, its script; an empty one means that the rank never starts)
type Case = (&'static str, &'static str, u32, &'static str);

const CASES: [Case; 21] = [
    ("rank 1 dead", "before it starts", 1, ""),
    ("rank 1 dead", "before staging: after it opened", 1, "kill@delete:probe"),
    ("rank 1 dead", "before it creates its file", 1, "kill@create:rank-00001"),
    ("rank 1 dead", "before it writes", 1, "kill@write:rank-00001"),
    ("rank 1 dead", "halfway through its bytes", 1, "tear@write:rank-00001"),
    ("rank 1 dead", "before its bytes are durable", 1, "kill@finish:rank-00001"),
    (
        "rank 1 dead",
        "after its bytes are durable, before it says so",
        1,
        "kill-after@finish:rank-00001",
    ),
    ("rank 0 dead", "before it starts", 0, ""),
    ("rank 0 dead", "before it creates its file", 0, "kill@create:rank-00000"),
    ("rank 0 dead", "halfway through its bytes", 0, "tear@write:rank-00000"),
    ("rank 0 dead", "before the table", 0, "kill@create:tensors.arrow"),
    ("rank 0 dead", "halfway through the table", 0, "tear@write:tensors.arrow"),
    ("rank 0 dead", "before the root is synced", 0, "kill@sync_dir::3"),
    ("rank 0 dead", "before the manifest", 0, "kill@put_new:manifest.json"),
    ("rank 0 dead", "halfway through the manifest", 0, "tear@put_new:manifest.json"),
    ("rank 0 dead", "after the manifest, before it says so", 0, "kill-after@put_new:manifest.json"),
    ("rank 1 slow", "less than the deadline", 1, "delay=1500ms@write:rank-00001"),
    ("rank 1 slow", "beyond every deadline", 1, "delay=20000ms@write:rank-00001"),
    ("rank 0 slow", "less than the deadline", 0, "delay=1500ms@write:rank-00000"),
    ("rank 1 EIO", "at its bytes", 1, "eio@write:rank-00001"),
    ("rank 0 EIO", "at the table", 0, "eio@write:tensors.arrow"),
];

/// Rank `rank`'s part of a state: half of the rows, and the rest on both.
fn share(rank: u32, seed: u64) -> Vec<Owned> {
    let whole = state(seed);
    let rows = i64::from(rank) * 150;
    let mut tensors = vec![whole[0].rows(rows, rows + 150)];
    tensors.extend(whole[1..].iter().map(|tensor| tensor.clone().replicated(2)));
    tensors
}

/// Not a test of its own: one rank.
#[test]
fn child() {
    let Ok(what) = std::env::var(CHILD_ENV) else { return };
    let (rank, root) = what.split_once('|').unwrap();
    let rank: u32 = rank.parse().unwrap();
    let store =
        drivetrain::storage::open_store(root, &drivetrain::storage::StorageOptions::default());
    let shm_dir = std::env::var_os("DRIVETRAIN_SHM_DIR").map(Into::into);
    let options = Options { timeout: PATIENCE, keep_last: Some(1), shm_dir, ..Options::default() };
    let saved = Checkpointer::new(store.unwrap(), rank, 2, options, None)
        .map_err(Arc::new)
        .and_then(|ckpt| {
            let options =
                drivetrain::checkpoint::SaveOptions { blocking: true, ..Default::default() };
            let text = format!("{{\"seed\":{NEW_SEED}}}");
            let saved = save_with(&ckpt, NEW_STEP, &share(rank, NEW_SEED), &text, options);
            let _ = ckpt.close();
            saved
        });
    match saved {
        Ok(_) => println!("\nheard committed"),
        Err(error) => println!("\nheard {}", error.to_string().replace('\n', " ")),
    }
}

fn start(ground: &Ground<'_>, rank: u32, script: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fault_matrix::ranks::child", "--nocapture", "--test-threads=1"])
        .env(CHILD_ENV, format!("{rank}|{}", ground.uri))
        .env("DRIVETRAIN_FAULT", script)
        .env("DRIVETRAIN_SHM_DIR", ground.shm.path())
        .env("RANK", rank.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// What a rank heard; none if it did not live to hear anything.
fn heard(child: Child) -> Option<String> {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("heard ").map(ToString::to_string))
}

/// What all ranks that could hear something were told, and whether it names the rank at fault.
fn summary(told: &[Option<String>], bad: u32) -> String {
    let mut kinds: Vec<String> = Vec::new();
    for text in told.iter().flatten() {
        let kind = if text == "committed" {
            "committed".to_string()
        } else if text.contains(&format!("rank {bad}")) {
            format!("error that names rank {bad}")
        } else {
            format!("ERROR WITHOUT THE RANK: {text}")
        };
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let alive = told.iter().flatten().count();
    let who = if alive == 2 { "both ranks" } else { "the other rank" };
    format!("{who}: {}", kinds.join("; "))
}

fn case((fault, place, bad, script): Case) -> Row {
    let ground = Ground::folder().with_old_step();
    let children: Vec<Child> = (0..2)
        .filter(|&rank| rank != bad || !script.is_empty())
        .map(|rank| start(&ground, rank, if rank == bad { script } else { "" }))
        .collect();
    let told: Vec<_> = children.into_iter().map(heard).collect();
    let dies = fault.ends_with("dead");
    let alive = told.iter().flatten().count();
    assert_eq!(alive, 2 - usize::from(dies), "{fault} {place}: {told:?}");
    let what = format!("{fault} {place}: {told:?}");
    let (restores, left) = ground.look();
    if told.iter().flatten().any(|text| text == "committed") {
        assert_eq!(restores, "new", "{what}");
    } else {
        assert_eq!(restores, "old", "{what}");
    }
    let told = summary(&told, bad);
    assert!(!told.contains("WITHOUT"), "{what}");
    // Keys of the meeting may or may not be cleared away when a rank is gone.
    let left = left.replace(", meeting files", "").replace("meeting files", "nothing");
    Row { fault: fault.into(), place: place.into(), restores, told, left }
}

#[test]
fn a_rank_that_dies_is_slow_or_fails() {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let rows = parking_lot::Mutex::new(vec![None; CASES.len()]);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(&one) = CASES.get(i) else { return };
                    let row = case(one);
                    rows.lock()[i] = Some(row);
                }
            });
        }
    });
    let rows: Vec<Row> = rows.into_inner().into_iter().flatten().collect();
    finish("ranks", &rows);
}

#[test]
fn two_jobs_in_one_folder() {
    let mut rows = Vec::new();
    for (place, steps) in
        [("the same step", [NEW_STEP, NEW_STEP]), ("different steps", [0, NEW_STEP])]
    {
        let ground = Ground::folder().with_old_step();
        let open = |_| {
            let options = Options { shm_dir: Some(ground.shm.path().into()), ..Options::default() };
            Checkpointer::new(local(ground.path()), 0, 1, options, None).unwrap()
        };
        let jobs: Vec<Checkpointer> = (0..2).map(open).collect();
        let saved = on_all(&jobs, |r, ckpt| save(ckpt, steps[r as usize], NEW_SEED, false));
        drop(jobs);
        let won = saved.iter().filter(|saved| saved.is_ok()).count();
        let told = match won {
            1 => {
                let lost = saved.iter().find_map(|saved| saved.as_ref().err()).unwrap();
                assert!(lost.to_string().contains("committed"), "{lost}");
                "one job: committed; the other: already committed"
            }
            2 => "both jobs: committed",
            _ => "NEITHER",
        };
        assert_eq!(won, if steps[0] == steps[1] { 1 } else { 2 }, "{place}: {saved:?}");
        let (restores, left) = ground.look();
        rows.push(Row {
            fault: "two jobs in one folder".into(),
            place: format!("save {place}"),
            restores,
            told: told.into(),
            left,
        });
    }
    finish("jobs", &rows);
}
