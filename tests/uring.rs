//! The local store on both engines and in both modes moves the right bytes.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::local::{EngineChoice, LocalOptions, LocalStore};
use drivetrain::storage::{OpenOptions, Store, WriteOptions};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// A folder on the disk that holds the build, where O_DIRECT means something (on tmpfs it does not).
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
