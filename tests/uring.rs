//! The local store on both engines and in both modes moves the right bytes.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use drivetrain::Error;
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::local::{EngineChoice, EngineKind, LocalOptions, LocalStore};
use drivetrain::storage::{OpenOptions, Store, WriteOptions};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// A folder on the disk that holds the build, where O_DIRECT means something (on tmpfs it does
/// not).
pub fn disk_folder() -> tempfile::TempDir {
    let base = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(&base).unwrap();
    tempfile::tempdir_in(base).unwrap()
}

/// Stores over one folder: every engine this machine has.
pub fn stores(root: &std::path::Path) -> Vec<Arc<LocalStore>> {
    let open = |engine| {
        let options = LocalOptions { engine, ..LocalOptions::default() };
        let store = LocalStore::new(root, options).unwrap();
        match store.engine_kind() {
            Ok(_) => Some(Arc::new(store)),
            Err(e) => {
                println!("skipped: {e}");
                None
            }
        }
    };
    [EngineChoice::Uring, EngineChoice::Threads].into_iter().filter_map(open).collect()
}

fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let mut state = salt | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

#[test]
fn random_ranges_are_the_same_on_every_engine_and_mode() {
    let root = disk_folder();
    let data = pattern((3 << 20) + 777, 1);
    std::fs::write(root.path().join("file"), &data).unwrap();
    let size = data.len();
    let ranges = (0..size).prop_flat_map(move |start| (Just(start), 0..=(size - start)));
    for store in stores(root.path()) {
        for direct in [false, true] {
            let file = block_on(store.open("file", OpenOptions { direct })).unwrap().unwrap();
            let config =
                ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) };
            TestRunner::new(config)
                .run(&ranges, |(start, len)| {
                    let buf = Buffer::heap(len);
                    let mut buf = buf;
                    buf.set_len(len);
                    let got = block_on(file.read_at(start as u64, buf)).unwrap().unwrap();
                    prop_assert_eq!(&got[..], &data[start..start + len]);
                    Ok(())
                })
                .unwrap();
        }
        let counters = store.counters();
        assert!(counters.direct_reads > 0, "{counters:?}");
    }
}

#[test]
fn writes_of_odd_pieces_land_whole_on_every_engine_and_mode() {
    let root = disk_folder();
    let pieces = [1, 4095, 4096, 8192, 12345, 3 << 20, 0, 100_000, 4096, 7];
    for (n, store) in stores(root.path()).iter().enumerate() {
        for direct in [false, true] {
            for hint in [false, true] {
                let name = format!("out/{n}-{direct}-{hint}");
                let total: usize = pieces.iter().sum();
                let size_bytes = hint.then_some(total as u64);
                let options = WriteOptions { direct, size_bytes };
                let expected = block_on(async {
                    let mut writer = store.create(&name, options).await.unwrap();
                    let mut all = Vec::new();
                    for (i, len) in pieces.into_iter().enumerate() {
                        let mut buf = Buffer::heap(len);
                        buf.set_len(len);
                        buf.copy_from_slice(&pattern(len, i as u64));
                        all.extend_from_slice(&buf);
                        writer.write(buf.into_bytes()).await.unwrap();
                    }
                    assert_eq!(writer.finish().await.unwrap(), total as u64);
                    all
                })
                .unwrap();
                assert!(std::fs::read(root.path().join(name)).unwrap() == expected);
            }
        }
        assert!(store.counters().direct_writes > 0);
    }
}

#[test]
fn an_aborted_write_leaves_nothing() {
    let root = disk_folder();
    for store in stores(root.path()) {
        block_on(async {
            let options = WriteOptions { direct: true, size_bytes: Some(1 << 20) };
            let mut writer = store.create("a/b", options).await.unwrap();
            writer.write(Bytes::from(vec![7; 100_000])).await.unwrap();
            writer.abort().await.unwrap();
            assert!(store.list("").await.unwrap().is_empty());
        })
        .unwrap();
    }
}

/// Everything goes through the ring where there is one, and a checkpoint-like write is direct.
#[test]
fn counters_tell_engine_and_mode() {
    let root = disk_folder();
    let Some(store) =
        stores(root.path()).into_iter().find(|s| s.engine_kind().unwrap() == EngineKind::Uring)
    else {
        return;
    };
    let total = 32 << 20;
    block_on(async {
        let options = WriteOptions { direct: true, size_bytes: Some(total) };
        let mut writer = store.create("rank-00000.safetensors", options).await.unwrap();
        let mut buf = Buffer::heap(total as usize);
        buf.set_len(total as usize);
        writer.write(buf.into_bytes()).await.unwrap();
        writer.finish().await.unwrap();
        let file = store.open("rank-00000.safetensors", OpenOptions::default()).await.unwrap();
        file.read_at(5, Buffer::heap(100)).await.unwrap();
    })
    .unwrap();
    let counted = store.counters();
    assert_eq!((counted.uring_writes, counted.direct_writes, counted.thread_writes), (4, 4, 0));
    assert_eq!((counted.uring_reads, counted.direct_reads, counted.thread_reads), (1, 0, 0));
    assert_eq!((counted.read_bytes, counted.written_bytes), (100, total));
}

#[test]
fn a_range_past_the_end_is_corrupt_also_when_the_file_shrank() {
    let root = disk_folder();
    for store in stores(root.path()) {
        for direct in [false, true] {
            std::fs::write(root.path().join("file"), vec![1; 10_000]).unwrap();
            let file = block_on(store.open("file", OpenOptions { direct })).unwrap().unwrap();
            let read = |at, len| block_on(file.read_at(at, Buffer::heap(len))).unwrap();
            assert!(matches!(read(9_999, 2), Err(Error::Corrupt { .. })));
            assert!(matches!(read(u64::MAX, 2), Err(Error::Corrupt { .. })));
            assert!(read(10_000, 0).is_ok());
            std::fs::File::options()
                .write(true)
                .open(root.path().join("file"))
                .unwrap()
                .set_len(4097)
                .unwrap();
            for at in [0, 1, 4096, 8192] {
                let error = read(at, 1_800).map(|b| b.len());
                let good = at + 1_800 <= 4097;
                assert_eq!(error.is_ok(), good, "{at} {error:?}");
            }
        }
    }
}

#[test]
fn a_full_disk_is_named_with_what_is_needed() {
    let root = disk_folder();
    for store in stores(root.path()) {
        let options = WriteOptions { direct: true, size_bytes: Some(1 << 50) };
        let error = block_on(store.create("huge", options)).unwrap().err().unwrap();
        let Error::NoSpace { need_bytes, have_bytes, .. } = error else { panic!("{error}") };
        assert!(need_bytes == 1 << 50 && have_bytes < need_bytes);
        assert!(!root.path().join("huge").exists());
    }
}

/// Set in the re-executed process that forks.
const FORK_ENV: &str = "DRIVETRAIN_TEST_FORK";

/// Reads, forks, and reads in the child through the file that was opened before.
#[test]
fn fork_child() {
    if std::env::var_os(FORK_ENV).is_none() {
        return;
    }
    let root = disk_folder();
    std::fs::write(root.path().join("file"), b"0123456789").unwrap();
    for store in stores(root.path()) {
        let file = block_on(store.open("file", OpenOptions::default())).unwrap().unwrap();
        let read = || block_on(file.read_at(3, Buffer::heap(4))).unwrap().unwrap();
        assert_eq!(&read()[..], b"3456");
        // SAFETY: nothing else runs in this process; the child only reads and leaves.
        match unsafe { libc::fork() } {
            0 => {
                let good = &read()[..] == b"3456";
                // SAFETY: leaves without the harness's exit handlers, which belong to the parent.
                unsafe { libc::_exit(if good { 42 } else { 1 }) }
            }
            pid => {
                let mut status = 0;
                // SAFETY: `pid` is our child and `status` is ours.
                unsafe { libc::waitpid(pid, &raw mut status, 0) };
                assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42);
            }
        }
        assert_eq!(&read()[..], b"3456");
    }
    println!("both read");
}

#[test]
fn a_forked_process_gets_engines_of_its_own() {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "uring::fork_child", "--nocapture", "--test-threads=1"])
        .env(FORK_ENV, "1")
        .env_remove("DRIVETRAIN_IO_ENGINE")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("both read"), "{said}");
}
