//! Every request of a save to S3 fails in every way a request can.

use std::sync::Arc;

use drivetrain::Error;

use super::outcome::{Ground, LARGE_SEED, NEW_SEED, honest, restored, save, told};
use super::places::{NEW_STEP, name, thing};
use super::report::{Row, finish};
use crate::support::s3::{Record, Server};

const BUCKET: &str = "matrix";
const FAULTS: [(&str, &str); 8] = [
    ("500", "500"),
    ("503", "503 SlowDown"),
    ("drop", "connection closed, nothing done"),
    ("lose", "done, connection closed"),
    ("hang", "silence, nothing done"),
    ("hang-after", "timeout after success"),
    ("half-request", "half of the request arrives"),
    ("half-answer", "half of the answer arrives"),
];
/// Cases wait most of their time, for a client that gives up or tries again.
const THREADS: usize = 6;

/// Whether a fault is different at this request from one that others stand for.
fn applies(action: &str, record: &Record) -> bool {
    match action {
        "half-request" => ["Put", "UploadPart", "Complete"].contains(&record.op),
        "half-answer" => {
            ["Get", "List", "ListUploads", "CreateUpload", "Complete"].contains(&record.op)
        }
        _ => true,
    }
}

fn place(record: &Record) -> String {
    if record.op == "DeleteMany" {
        // What it deletes is in its body.
        return record.op.into();
    }
    let path = record.key.strip_prefix("run/").unwrap_or("");
    format!("{} {}", record.op, thing(path.trim_end_matches('/')))
}

fn save_to(ground: &Ground<'_>, seed: u64) -> Result<i64, Arc<Error>> {
    let ckpt = ground.checkpointer(&ground.store, Some(1)).map_err(Arc::new)?;
    let saved = save(&ckpt, NEW_STEP, seed, false);
    let _ = ckpt.close();
    saved
}

/// One case: `script` meets the save of the new step.
fn case(server: &Server, fault: &str, script: &str, at: &Record, seed: u64) -> Row {
    let ground = Ground::bucket(server, BUCKET).with_old_step();
    server.script(script);
    let saved = save_to(&ground, seed);
    assert!(server.faults() > 0, "{script} did not happen: {:?}", server.log());
    server.script("");
    let uploads = server.uploads(BUCKET);
    let (restores, mut left) = ground.look();
    assert!(honest(&saved, &restores), "{script} at {at:?}: {saved:?}, restores {restores}");
    if uploads > 0 {
        left = if left == "nothing" { String::new() } else { format!("{left}, ") };
        left += "an unfinished upload";
    }
    let path = at.key.strip_prefix("run/").unwrap_or_default();
    let told = told(&saved, name(path));
    Row { fault: fault.into(), place: place(at), restores, told, left }
}

fn requests(server: &Server, seed: u64) -> Vec<Record> {
    let ground = Ground::bucket(server, BUCKET).with_old_step();
    server.script("");
    save_to(&ground, seed).unwrap();
    let log = server.log();
    assert_eq!(restored(&ground.store), "new");
    log
}

/// Runs cases on several servers at a time; the rows keep the order of the cases.
fn run(cases: &[(&str, String, Record)], seed: u64) -> Vec<Row> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let rows = parking_lot::Mutex::new(vec![None; cases.len()]);
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(cases.len()) {
            scope.spawn(|| {
                let server = Server::start(&[BUCKET]);
                loop {
                    let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some((fault, script, at)) = cases.get(i) else { return };
                    let row = case(&server, fault, script, at, seed);
                    rows.lock()[i] = Some(row);
                }
            });
        }
    });
    rows.into_inner().into_iter().flatten().collect()
}

#[test]
fn a_fault_at_any_request_of_a_save_to_s3() {
    let all = requests(&Server::start(&[BUCKET]), NEW_SEED);
    assert!(all.len() > 12, "{all:?}");
    let mut cases = Vec::new();
    for (action, fault) in FAULTS {
        for at in all.iter().filter(|record| applies(action, record)) {
            cases.push((fault, format!("{action}@{}", at.number), at.clone()));
        }
    }
    // Refused for good, by request: what a policy of the bucket can do.
    for at in &all {
        cases.push(("403", format!("403@{}", at.number), at.clone()));
    }
    finish("s3", &run(&cases, NEW_SEED));
}

#[test]
fn a_fault_at_any_request_of_an_upload_in_parts() {
    let mut all = requests(&Server::start(&[BUCKET]), LARGE_SEED);
    all.retain(|record| ["CreateUpload", "UploadPart", "Complete"].contains(&record.op));
    assert_eq!(all.len(), 4, "{all:?}");
    let mut cases = Vec::new();
    for (action, fault) in FAULTS.into_iter().chain([("ok-with-error", "200 with an error")]) {
        let fits = |record: &&Record| action != "ok-with-error" || record.op == "Complete";
        for at in all.iter().filter(fits).filter(|record| applies(action, record)) {
            // By operation and count: parts are on their way at the same time.
            cases.push((fault, format!("{action}@{}::1", at.op), at.clone()));
        }
    }
    cases.dedup_by(|a, b| a.1 == b.1);
    for at in all.iter().skip(1) {
        cases.push(("403", format!("403@{}::1", at.op), at.clone()));
        let script = format!("403@{}::1; 403@AbortUpload", at.op);
        cases.push(("403, and the abort fails too", script, at.clone()));
    }
    finish("s3-upload", &run(&cases, LARGE_SEED));
}

#[test]
fn stale_listings_hide_at_most_the_newest_step() {
    let server = Server::start(&[BUCKET]);
    let ground = Ground::bucket(&server, BUCKET).with_old_step();
    server.freeze(BUCKET);
    let mut rows = Vec::new();
    // While saving: retention sees a step that is gone, or misses one that is there.
    server.script("stale@List");
    let saved = save_to(&ground, NEW_SEED);
    saved.as_ref().unwrap();
    let row = |place: &str, restores: String, told: String| Row {
        fault: "stale listing".into(),
        place: place.into(),
        restores,
        told,
        left: "nothing".into(),
    };
    let hidden = restored(&ground.store);
    server.script("");
    rows.push(row("every listing of a save", restored(&ground.store), told(&saved, "")));
    rows.push(row("every listing of a save and of the restore", hidden, told(&saved, "")));
    server.freeze(BUCKET);
    save(&ground.checkpointer(&ground.store, Some(1)).unwrap(), 3, NEW_SEED, false).unwrap();
    server.script("stale@List:step-");
    let restores = restored(&ground.store);
    rows.push(row("listings of the step folders of a restore", restores, "nothing".into()));
    server.script("");
    assert_eq!(restored(&ground.store), "new");
    finish("s3-stale", &rows);
}
