//! One rank saves, and every operation of its save fails, lies or is the last one of its process.

use std::process::Command;
use std::sync::Arc;

use drivetrain::storage::fault::{FaultScript, FaultStore, Operation};
use drivetrain::storage::{StorageOptions, Store, open_store};

use super::outcome::{Ground, NEW_SEED, honest, save, told};
use super::places::{NEW_STEP, OLD_STEP, name, place};
use super::report::{Row, finish};
use crate::support::s3::Server;

const CHILD_ENV: &str = "DRIVETRAIN_TEST_MATRIX_CHILD";
/// JSON object of the store's options, for the child.
const OPTIONS_ENV: &str = "DRIVETRAIN_TEST_MATRIX_OPTIONS";
/// Faults that the caller hears of.
const ERRORS: [(&str, &str); 4] =
    [("eio", "EIO"), ("enospc", "ENOSPC"), ("lost", "lost answer"), ("halt", "store goes away")];
/// Faults that nobody hears of: the device says that all is well.
const LIES: [(&str, &str); 2] = [("truncate", "short write"), ("flip", "bit flip")];

/// What a save does: a new step, or another state in the old step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    New { keep_last: u32 },
    Overwrite,
}

impl Kind {
    fn step(self) -> i64 {
        if self == Self::Overwrite { OLD_STEP } else { NEW_STEP }
    }

    fn keep_last(self) -> Option<u32> {
        match self {
            Self::New { keep_last } => Some(keep_last),
            Self::Overwrite => None,
        }
    }
}

/// Opens a checkpointer and saves.
fn run(
    ground: &Ground<'_>,
    store: &Arc<dyn Store>,
    kind: Kind,
) -> Result<i64, Arc<drivetrain::Error>> {
    let ckpt = ground.checkpointer(store, kind.keep_last()).map_err(Arc::new)?;
    let saved = save(&ckpt, kind.step(), NEW_SEED, kind == Kind::Overwrite);
    let _ = ckpt.close();
    saved
}

fn faulty(ground: &Ground<'_>, script: &str) -> (Arc<FaultStore>, Arc<dyn Store>) {
    let script = FaultScript::parse(script).unwrap();
    let store = Arc::new(FaultStore::new(Arc::clone(&ground.store), script));
    (Arc::clone(&store), store)
}

fn operations(ground: &Ground<'_>, kind: Kind) -> Vec<Operation> {
    let (counter, store) = faulty(ground, "");
    run(ground, &store, kind).unwrap();
    counter.history()
}

fn fails<'a>(make: impl Fn() -> Ground<'a>, kind: Kind) -> Vec<Row> {
    let mut rows = Vec::new();
    let all = operations(&make().with_old_step(), kind);
    assert!(all.len() > 15, "{all:?}");
    for (action, fault) in ERRORS.into_iter().chain(LIES).chain([("delay=20ms", "slow")]) {
        let lies = LIES.contains(&(action, fault));
        // What a lying device damages in the only step there is, nothing can bring back.
        if lies && kind == Kind::Overwrite {
            continue;
        }
        for operation in all.iter().filter(|o| !lies || o.bytes > 0) {
            let ground = make().with_old_step();
            let (_, store) = faulty(&ground, &format!("{action}@{}", operation.number));
            let saved = run(&ground, &store, kind);
            let (restores, left) = ground.look();
            let what = format!("{fault} at {operation:?}: {saved:?}, restores {restores}");
            assert!(lies || honest(&saved, &restores), "{what}");
            assert!(lies || ground.leftovers() == "nothing", "{what}: {}", ground.leftovers());
            rows.push(Row {
                fault: fault.into(),
                place: place(operation.op, &operation.path),
                told: told(&saved, name(&operation.path)),
                restores,
                left,
            });
        }
    }
    rows
}

#[test]
fn a_fault_at_any_operation_of_a_save_in_a_folder() {
    finish("folder", &fails(Ground::folder, Kind::New { keep_last: 2 }));
}

#[test]
fn a_fault_at_any_operation_of_an_overwriting_save() {
    finish("overwrite", &fails(Ground::folder, Kind::Overwrite));
}

/// Not a test of its own: the process that is killed. It says on standard output what it knows.
#[test]
fn child() {
    let Ok(what) = std::env::var(CHILD_ENV) else { return };
    let (uri, kind) = what.split_once('|').unwrap();
    let kind = if kind == "overwrite" { Kind::Overwrite } else { Kind::New { keep_last: 1 } };
    let options = StorageOptions {
        options: serde_json::from_str(&std::env::var(OPTIONS_ENV).unwrap()).unwrap(),
    };
    let store = open_store(uri, &options).unwrap();
    let shm_dir = std::env::var_os("DRIVETRAIN_SHM_DIR").map(Into::into);
    let options = drivetrain::checkpoint::Options {
        keep_last: kind.keep_last(),
        shm_dir,
        ..Default::default()
    };
    let ckpt = drivetrain::checkpoint::Checkpointer::new(store, 0, 1, options, None).unwrap();
    save(&ckpt, kind.step(), NEW_SEED, kind == Kind::Overwrite).unwrap();
    println!("committed");
    ckpt.close().unwrap();
}

/// What a child said before it ended, and whether it ended by itself.
fn run_child(ground: &Ground<'_>, kind: Kind, script: &str, log: Option<&str>) -> (String, bool) {
    let word = if kind == Kind::Overwrite { "overwrite" } else { "new" };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "fault_matrix::save::child", "--nocapture", "--test-threads=1"])
        .env(CHILD_ENV, format!("{}|{word}", ground.uri))
        .env("DRIVETRAIN_FAULT", script)
        .env("DRIVETRAIN_SHM_DIR", ground.shm.path())
        .env(OPTIONS_ENV, serde_json::to_string(&ground.options).unwrap());
    if let Some(log) = log {
        command.env("DRIVETRAIN_FAULT_LOG", log);
    }
    let output = command.output().unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}

/// (operation, path, bytes) of a child's save, in order.
fn child_operations(ground: &Ground<'_>, kind: Kind) -> Vec<(String, String, u64)> {
    let log = ground.shm.path().join("log");
    let log = log.to_str().unwrap();
    let (said, finished) = run_child(ground, kind, "eio@head:no such path", Some(log));
    assert!(finished && said.contains("committed"), "{said}");
    let text = std::fs::read_to_string(log).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let started = lines.filter(|line| line["stage"] == "before");
    let word = |value: &serde_json::Value| value.as_str().unwrap().to_string();
    started.map(|l| (word(&l["op"]), word(&l["path"]), l["bytes"].as_u64().unwrap())).collect()
}

fn killed<'a>(make: impl Fn() -> Ground<'a>, kind: Kind) -> Vec<Row> {
    let mut rows = Vec::new();
    let all = child_operations(&make().with_old_step(), kind);
    assert!(all.len() > 15, "{all:?}");
    for (action, fault) in [("kill", "SIGKILL before"), ("tear", "SIGKILL halfway")] {
        for (n, (op, path, bytes)) in all.iter().enumerate() {
            if action == "tear" && (*bytes == 0 || op == "read") {
                continue;
            }
            let ground = make().with_old_step();
            let (said, finished) = run_child(&ground, kind, &format!("{action}@{}", n + 1), None);
            assert!(!finished, "{action}@{} of {op} {path} did not kill: {said}", n + 1);
            let (restores, left) = ground.look();
            assert_eq!(ground.leftovers(), "nothing", "{fault} {op} {path}, after a later save");
            let knew = said.contains("committed");
            assert!(!knew || restores == "new", "{fault} {op} {path}: committed, but {restores}");
            rows.push(Row {
                fault: fault.into(),
                place: place(op, path),
                // Whether it heard of its commit before pruning killed it is a race.
                told: "–".into(),
                restores,
                left,
            });
        }
    }
    rows
}

#[test]
fn sigkill_at_any_operation_of_a_save_in_a_folder() {
    finish("folder-kill", &killed(Ground::folder, Kind::New { keep_last: 1 }));
}

#[test]
fn sigkill_at_any_operation_of_an_overwriting_save() {
    finish("overwrite-kill", &killed(Ground::folder, Kind::Overwrite));
}

#[test]
fn sigkill_at_any_operation_of_a_save_to_s3() {
    let server = Server::start(&["kill"]);
    let make = || Ground::bucket(&server, "kill");
    finish("s3-kill", &killed(make, Kind::New { keep_last: 1 }));
}
