//! The fault store does exactly what its script says: it is what other fault tests stand on.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;

use bytes::Bytes;
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::fault::{FAULT_ENV, FAULT_LOG_ENV, FaultScript, FaultStore, Operation};
use drivetrain::storage::local::is_temporary;
use drivetrain::storage::{OpenOptions, StorageOptions, Store, WriteOptions, open_store};
use drivetrain::{Error, Result};

use crate::store_contract::folder;

/// Folder that the child process of the kill test works in; unset in ordinary runs.
const CHILD_ENV: &str = "DRIVETRAIN_TEST_FAULT_CHILD";

fn faulty(script: &str) -> FaultStore {
    // A name per script: memory stores live as long as the process.
    let name = format!("memory://fault-{}", script.replace(['@', ':', ';', '=', '~', '/'], "-"));
    let inner = open_store(&name, &StorageOptions::default()).unwrap();
    FaultStore::new(inner, FaultScript::parse(script).unwrap())
}

async fn write(store: &dyn Store, path: &str, pieces: &[&'static str]) -> Result<u64> {
    let mut writer = store.create(path, WriteOptions::default()).await?;
    for piece in pieces {
        writer.write(Bytes::from_static(piece.as_bytes())).await?;
    }
    writer.finish().await
}

async fn read_bytes(store: &dyn Store, path: &str) -> Result<Vec<u8>> {
    let file = store.open(path, OpenOptions::default()).await?;
    let buf = file.read_at(0, Buffer::heap(file.meta().size_bytes as usize)).await?;
    Ok(buf.to_vec())
}

async fn read(store: &dyn Store, path: &str) -> Result<String> {
    Ok(String::from_utf8_lossy(&read_bytes(store, path).await?).into_owned())
}

#[test]
fn errors_come_in_place_of_the_operation() {
    type Expected = fn(&Error) -> bool;
    block_on(async {
        let cases: [(&str, Expected); 4] = [
            ("eio@put_new", |e| {
                matches!(e, Error::Io { source, .. }
                if source.raw_os_error() == Some(libc::EIO))
            }),
            ("enospc@put_new", |e| matches!(e, Error::NoSpace { need_bytes: 4, .. })),
            ("timeout@put_new", |e| matches!(e, Error::Timeout { .. })),
            ("fail@put_new", |e| matches!(e, Error::Injected { operation: 1, .. })),
        ];
        for (script, expected) in cases {
            let store = faulty(script);
            let error = store.put_new("a", Bytes::from_static(b"data")).await.unwrap_err();
            assert!(expected(&error), "{script}: {error}");
            assert!(store.head("a").await.is_err(), "{script} did the operation");
        }
    })
    .unwrap();
}

#[test]
fn a_lost_answer_has_its_effect() {
    block_on(async {
        let store = faulty("lost@put_new:a;lost@finish:b");
        assert!(matches!(
            store.put_new("a", Bytes::from_static(b"data")).await,
            Err(Error::Timeout { .. })
        ));
        assert_eq!(read(&store, "a").await.unwrap(), "data");
        assert!(write(&store, "b", &["xy"]).await.is_err());
        assert_eq!(read(&store, "b").await.unwrap(), "xy");
    })
    .unwrap();
}

#[test]
fn data_is_cut_and_flipped_silently() {
    block_on(async {
        let store = faulty("truncate@write:cut:2;flip@put_new:bit;truncate@read:short;flip@read:x");
        assert_eq!(write(&store, "cut", &["abcd", "efgh", "ij"]).await.unwrap(), 8);
        assert_eq!(read(&store, "cut").await.unwrap(), "abcdefij");
        store.put_new("bit", Bytes::from_static(&[0; 64])).await.unwrap();
        let flipped = read_bytes(&store, "bit").await.unwrap();
        let ones: u32 = flipped.iter().map(|byte| byte.count_ones()).sum();
        assert_eq!((flipped.len(), ones), (64, 1));
        store.put_new("short", Bytes::from_static(b"abcd")).await.unwrap();
        assert!(matches!(read(&store, "short").await, Err(Error::Corrupt { .. })));
        store.put_new("x", Bytes::from_static(&[0; 8])).await.unwrap();
        let flipped = read_bytes(&store, "x").await.unwrap();
        let ones: u32 = flipped.iter().map(|byte| byte.count_ones()).sum();
        assert_eq!(ones, 1);
    })
    .unwrap();
}

#[test]
fn a_halted_store_stays_dead() {
    block_on(async {
        let store = faulty("halt@3");
        store.put_new("a", Bytes::new()).await.unwrap();
        store.put_new("b", Bytes::new()).await.unwrap();
        assert!(store.put_new("c", Bytes::new()).await.is_err());
        assert!(store.delete("a").await.is_err());
        assert!(matches!(store.list("").await, Err(Error::Injected { operation: 5, .. })));
        assert_eq!(store.operations(), 5);
    })
    .unwrap();
}

/// What a save looks like to the store, in small.
async fn save(store: &dyn Store) -> Result<()> {
    write(store, "step/attempt/data", &["one", "two"]).await?;
    store.sync_dir("step").await?;
    store.put_new("step/manifest.json", Bytes::from_static(b"{}")).await?;
    store.sync_dir("step").await
}

#[test]
fn operations_are_numbered_in_order() {
    block_on(async {
        let store = faulty("delay=1ms@any");
        save(&store).await.unwrap();
        let short = |op: Operation| format!("{} {} {} {}", op.number, op.op, op.path, op.bytes);
        let history: Vec<String> = store.history().into_iter().map(short).collect();
        assert_eq!(
            history,
            [
                "1 create step/attempt/data 0",
                "2 write step/attempt/data 3",
                "3 write step/attempt/data 3",
                "4 finish step/attempt/data 0",
                "5 sync_dir step 0",
                "6 put_new step/manifest.json 2",
                "7 sync_dir step 0",
            ]
        );
    })
    .unwrap();
}

/// The child of the kill test: saves once into the folder that the parent names.
#[test]
fn child_that_saves() {
    let Some(folder) = std::env::var_os(CHILD_ENV) else { return };
    let folder = folder.into_string().unwrap();
    let store: Arc<dyn Store> = open_store(&folder, &StorageOptions::default()).unwrap();
    block_on(save(&*store)).unwrap().unwrap();
}

fn child(folder: &Path, script: &str) -> (ExitStatus, Vec<serde_json::Value>) {
    let log = folder.join("log-{rank}");
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fault_store::child_that_saves"])
        .env(CHILD_ENV, folder.join("store"))
        .env(FAULT_ENV, script)
        .env(FAULT_LOG_ENV, &log)
        .env("RANK", "3")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    let text = std::fs::read_to_string(folder.join("log-3")).unwrap_or_default();
    (status, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// Real kills, through the environment: before each operation nothing of it is there, after it all.
#[test]
fn processes_are_killed_at_every_operation() {
    let place = folder();
    let (status, log) = child(place.path(), "");
    assert!(status.success());
    let operations = log.iter().map(|line| line["n"].as_u64().unwrap()).max().unwrap();
    assert_eq!((operations, log.len()), (7, 14), "a line before and after each operation");
    assert_eq!((&log[0]["rank"], &log[0]["op"]), (&3.into(), &"create".into()));
    for n in 1..=operations {
        for (script, committed) in [("kill", n > 6), ("kill-after", n >= 6)] {
            let place = folder();
            let (status, log) = child(place.path(), &format!("rank=3;{script}@{n}"));
            assert_eq!(status.signal(), Some(libc::SIGKILL), "{script}@{n}");
            let last = log.last().unwrap();
            assert_eq!((&last["stage"], &last["n"]), (&"kill".into(), &n.into()));
            let manifest = place.path().join("store/step/manifest.json");
            assert_eq!(manifest.exists(), committed, "{script}@{n}");
        }
    }
}

#[test]
fn processes_are_killed_in_the_middle_of_a_write() {
    let left = |script: &str| {
        let place = folder();
        let (status, _) = child(place.path(), script);
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{script}");
        let store =
            open_store(place.path().join("store").to_str().unwrap(), &StorageOptions::default());
        let found = block_on(async move { store.unwrap().list("").await.unwrap() }).unwrap();
        found.into_iter().map(|meta| (meta.path, meta.size_bytes)).collect::<Vec<_>>()
    };
    let data = |size| ("step/attempt/data".to_string(), size);
    let torn = "step/.drivetrain-tmp-torn".to_string();
    assert!(is_temporary(".drivetrain-tmp-torn"));
    assert_eq!(left("tear@put_new"), [(torn, 1), data(6)], "half a temporary, no manifest");
    // The writer may hold the half back; more than it must not be there.
    assert!(left("tear@write:2")[0].1 <= 4);
    assert_eq!(left("tear@sync_dir"), [data(6)], "as a kill before it");
}

#[test]
fn scripts_for_others_do_nothing() {
    for script in ["rank=1;kill@1", "uri=elsewhere;kill@1"] {
        let place = folder();
        assert!(child(place.path(), script).0.success(), "{script}");
    }
    let place = folder();
    let (status, _) = child(place.path(), "explode@1");
    assert_eq!(status.code(), Some(101), "a wrong script is an error, not silence");
}
