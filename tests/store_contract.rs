//! What every store must do, whatever it is made of: each implementation runs this one suite.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use drivetrain::Error;
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::fault::{FaultScript, FaultStore};
use drivetrain::storage::local::{EngineChoice, LocalOptions, LocalStore};
use drivetrain::storage::{
    OpenOptions, StorageOptions, Store, Version, WriteOptions, Writer, open_store,
};

/// Three S3 parts of 8 MiB and a bit, so that multipart uploads and split reads both happen.
const LARGE_BYTES: usize = (20 << 20) + 4321;
/// Writers that race for one name.
const RACERS: usize = 12;

/// Test data that differs at every offset.
fn pattern() -> Bytes {
    static DATA: OnceLock<Bytes> = OnceLock::new();
    let make = || {
        let words = (0..=LARGE_BYTES as u64 / 8).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Bytes::from(words.flat_map(u64::to_be_bytes).take(LARGE_BYTES).collect::<Vec<u8>>())
    };
    DATA.get_or_init(make).clone()
}

/// Runs the whole suite. The store must be empty.
pub fn contract(store: &Arc<dyn Store>) {
    let store = Arc::clone(store);
    block_on(async move {
        for direct in [false, true] {
            streamed_writes_read_back(&*store, direct).await;
        }
        ranges_are_exact(&*store).await;
        missing_and_taken_names(&*store).await;
        aborts_leave_nothing(&*store).await;
        unsafe_paths_are_refused(&*store).await;
        listings_are_complete_and_sorted(&*store).await;
        one_racer_wins(&store).await;
        replacing_needs_the_current_version(&*store).await;
        deleting(&*store).await;
        dropped_operations_do_no_harm(&*store).await;
        changed_objects_are_noticed(&*store).await;
        let counters = store.counters();
        assert!(counters.read_bytes > LARGE_BYTES as u64, "{counters:?}");
        assert!(counters.written_bytes > LARGE_BYTES as u64, "{counters:?}");
        assert!(store.list("").await.unwrap().is_empty(), "the suite cleans up after itself");
    })
    .unwrap();
}

async fn write(store: &dyn Store, path: &str, data: Bytes, options: WriteOptions, slice: usize) {
    let mut writer = store.create(path, options).await.unwrap();
    for at in (0..data.len()).step_by(slice) {
        writer.write(data.slice(at..data.len().min(at + slice))).await.unwrap();
    }
    assert_eq!(writer.finish().await.unwrap(), data.len() as u64);
}

async fn read(store: &dyn Store, path: &str, direct: bool) -> Vec<u8> {
    let file = store.open(path, OpenOptions { direct }).await.unwrap();
    let buf = Buffer::heap(file.meta().size_bytes as usize);
    file.read_at(0, buf).await.unwrap().to_vec()
}

async fn streamed_writes_read_back(store: &dyn Store, direct: bool) {
    let sizes = [(0, 1), (1, 1), (4095, 100), (4096, 4096), (70_001, 997), (LARGE_BYTES, 3 << 20)];
    for (i, (size, slice)) in sizes.into_iter().enumerate() {
        for known in [false, true] {
            let path = format!("streams/{i}-{known}");
            let size_bytes = known.then_some(size as u64);
            let data = pattern().slice(..size);
            let options = WriteOptions { direct, size_bytes };
            write(store, &path, data.clone(), options, slice).await;
            let meta = store.head(&path).await.unwrap();
            assert_eq!((meta.size_bytes, meta.path.as_str()), (size as u64, path.as_str()));
            // Compared without assert_eq, which would print both.
            assert!(read(store, &path, direct).await == data, "{path} direct {direct}");
            store.delete(&path).await.unwrap();
        }
    }
    store.remove_dir("streams").await.unwrap();
}

async fn ranges_are_exact(store: &dyn Store) {
    let data = pattern();
    write(store, "ranges", data.clone(), WriteOptions::default(), 8 << 20).await;
    for direct in [false, true] {
        let file = store.open("ranges", OpenOptions { direct }).await.unwrap();
        let ends = [(0, 1), (1, 4095), (4095, 2), (5, 0), (12_345, 1 << 20), (8 << 20, 4096)];
        let odd = [((8 << 20) - 7, 100), (3, LARGE_BYTES - 3), (LARGE_BYTES - 1, 1)];
        for (offset, len) in ends.into_iter().chain(odd).chain([(LARGE_BYTES, 0)]) {
            let got = file.read_at(offset as u64, Buffer::heap(len)).await.unwrap();
            assert!(got[..] == data[offset..offset + len], "{offset} {len} direct {direct}");
        }
        let past = [(LARGE_BYTES, 1), (LARGE_BYTES - 1, 2), (LARGE_BYTES * 2, 4096), (0, 21 << 20)];
        for (offset, len) in past {
            let error = file.read_at(offset as u64, Buffer::heap(len)).await.unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
            assert!(error.to_string().contains("ranges"), "{error}");
        }
        let overflow = file.read_at(u64::MAX, Buffer::heap(8)).await;
        assert!(overflow.is_err());
    }
    store.delete("ranges").await.unwrap();
}

async fn missing_and_taken_names(store: &dyn Store) {
    let is_missing = |e: &Error| matches!(e, Error::NotFound { .. });
    assert!(is_missing(&store.head("no/such").await.unwrap_err()));
    assert!(is_missing(&store.open("no/such", OpenOptions::default()).await.unwrap_err()));
    let first = Bytes::from_static(b"first");
    let version = store.put_new("taken/name", first.clone()).await.unwrap();
    assert_eq!(store.head("taken/name").await.unwrap().version, version);
    let is_taken = |e: &Error| matches!(e, Error::AlreadyExists { .. });
    // The same bytes again are refused too: that is how a store is probed.
    for data in [first, Bytes::from_static(b"other")] {
        assert!(is_taken(&store.put_new("taken/name", data).await.unwrap_err()));
    }
    let refused = store.create("taken/name", WriteOptions::default()).await;
    assert!(is_taken(&refused.err().unwrap()));
    assert_eq!(read(store, "taken/name", false).await, b"first");
    store.delete("taken/name").await.unwrap();
    store.remove_dir("taken").await.unwrap();
}

async fn aborts_leave_nothing(store: &dyn Store) {
    for size in [0, 10, LARGE_BYTES] {
        let options = WriteOptions { direct: true, size_bytes: Some(size as u64) };
        let mut writer: Box<dyn Writer> = store.create("gone/object", options).await.unwrap();
        writer.write(pattern().slice(..size)).await.unwrap();
        writer.abort().await.unwrap();
        assert!(store.head("gone/object").await.is_err());
        assert_eq!(store.list("gone").await.unwrap(), []);
    }
    store.remove_dir("gone").await.unwrap();
}

async fn unsafe_paths_are_refused(store: &dyn Store) {
    for path in ["", "..", "../x", "a/../b", "/a", "a//b", "a/.", "./a", "a/..", "//"] {
        let refused = [
            store.head(path).await.err(),
            store.open(path, OpenOptions::default()).await.err(),
            store.create(path, WriteOptions::default()).await.err(),
            store.put_new(path, Bytes::new()).await.err(),
            store.replace(path, Bytes::new(), &Version("v".into())).await.err(),
            store.delete(path).await.err(),
        ];
        for error in refused {
            let error = error.unwrap_or_else(|| panic!("{path:?} was accepted"));
            assert!(matches!(error, Error::Invalid { .. }), "{path:?}: {error}");
        }
        if !path.is_empty() {
            assert!(store.list(path).await.is_err(), "{path:?}");
        }
    }
}

async fn listings_are_complete_and_sorted(store: &dyn Store) {
    let paths = ["list/b/2", "list/a", "list/b/10", "list/b.txt", "list/c/d/e", "listing", "zz ü"];
    for path in paths {
        store.put_new(path, Bytes::from(path)).await.unwrap();
    }
    let names = |metas: Vec<drivetrain::storage::ObjectMeta>| -> Vec<String> {
        assert!(metas.iter().all(|meta| meta.size_bytes == meta.path.len() as u64));
        metas.into_iter().map(|meta| meta.path).collect()
    };
    let mut sorted = paths.map(String::from).to_vec();
    sorted.sort();
    assert_eq!(names(store.list("").await.unwrap()), sorted);
    sorted.retain(|path| path.starts_with("list/"));
    assert_eq!(names(store.list("list").await.unwrap()), sorted);
    assert_eq!(names(store.list("list/").await.unwrap()), sorted);
    assert_eq!(names(store.list("nothing/here").await.unwrap()), Vec::<String>::new());
    assert_eq!(store.list_names("list").await.unwrap(), ["a", "b.txt", "b/", "c/"]);
    assert_eq!(store.list_names("").await.unwrap(), ["list/", "listing", "zz ü"]);
    assert_eq!(store.list_names("nothing").await.unwrap(), Vec::<String>::new());
    for path in paths {
        store.delete(path).await.unwrap();
    }
    for folder in ["list/c/d", "list/c", "list/b", "list"] {
        store.remove_dir(folder).await.unwrap();
    }
}

async fn one_racer_wins(store: &Arc<dyn Store>) {
    for round in 0..3 {
        let path = format!("race/{round}");
        let racers: Vec<_> = (0..RACERS)
            .map(|i| {
                let (store, path) = (Arc::clone(store), path.clone());
                tokio::spawn(async move {
                    let put = store.put_new(&path, Bytes::from(format!("racer {i}"))).await;
                    put.map(|version| (i, version))
                })
            })
            .collect();
        let mut winners = Vec::new();
        for racer in racers {
            match racer.await.unwrap() {
                Ok(winner) => winners.push(winner),
                Err(e) => assert!(matches!(e, Error::AlreadyExists { .. }), "{e}"),
            }
        }
        assert_eq!(winners.len(), 1, "{winners:?}");
        let (winner, version) = winners.remove(0);
        assert_eq!(read(&**store, &path, false).await, format!("racer {winner}").into_bytes());
        assert_eq!(store.head(&path).await.unwrap().version, version);
        store.delete(&path).await.unwrap();
    }
    store.remove_dir("race").await.unwrap();
}

async fn replacing_needs_the_current_version(store: &dyn Store) {
    let text = |text: &'static str| Bytes::from_static(text.as_bytes());
    let first = store.put_new("record", text("one")).await.unwrap();
    let second = store.replace("record", text("two"), &first).await.unwrap();
    assert_ne!(first, second);
    let stale = store.replace("record", text("three"), &first).await.unwrap_err();
    assert!(matches!(stale, Error::Changed { .. }), "{stale}");
    assert_eq!(read(store, "record", false).await, b"two");
    store.delete("record").await.unwrap();
    let gone = store.replace("record", text("four"), &second).await.unwrap_err();
    assert!(matches!(gone, Error::NotFound { .. }), "{gone}");
    assert!(store.head("record").await.is_err());
}

async fn deleting(store: &dyn Store) {
    store.delete("never/there").await.unwrap();
    store.put_new("folder/object", Bytes::from_static(b"x")).await.unwrap();
    // Whether this is an error is the store's choice; that it keeps the object is not.
    let _ = store.remove_dir("folder").await;
    assert_eq!(store.head("folder/object").await.unwrap().size_bytes, 1);
    store.sync_dir("folder").await.unwrap();
    store.delete("folder/object").await.unwrap();
    store.remove_dir("folder").await.unwrap();
    assert_eq!(store.list_names("").await.unwrap(), Vec::<String>::new());
}

async fn dropped_operations_do_no_harm(store: &dyn Store) {
    let data = pattern();
    write(store, "dropped", data.clone(), WriteOptions::default(), 4 << 20).await;
    let file = store.open("dropped", OpenOptions { direct: true }).await.unwrap();
    for _ in 0..8 {
        let reading = file.read_at(0, Buffer::heap(LARGE_BYTES));
        tokio::select! {
            biased;
            () = tokio::task::yield_now() => {}
            _ = reading => {}
        }
    }
    assert!(read(store, "dropped", true).await == data);
    store.delete("dropped").await.unwrap();
}

async fn changed_objects_are_noticed(store: &dyn Store) {
    let version = store.put_new("changing", Bytes::from_static(b"one")).await.unwrap();
    let file = store.open("changing", OpenOptions::default()).await.unwrap();
    store.replace("changing", Bytes::from_static(b"two"), &version).await.unwrap();
    match file.read_at(0, Buffer::heap(3)).await {
        // An open local file is the old one, whole.
        Ok(old) => assert_eq!(&old[..], b"one"),
        Err(e) => assert!(matches!(e, Error::Changed { .. }), "{e}"),
    }
    store.delete("changing").await.unwrap();
}

fn local(folder: &Path, engine: EngineChoice) -> Arc<dyn Store> {
    let options = LocalOptions { engine, ..LocalOptions::default() };
    Arc::new(LocalStore::new(folder, options).unwrap())
}

/// A folder on the file system of the build, which unlike /tmp is rarely a tmpfs (no O_DIRECT).
pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn local_files_on_threads() {
    let folder = folder();
    contract(&local(folder.path(), EngineChoice::Threads));
}

#[test]
fn local_files_on_io_uring() {
    let folder = folder();
    let options = LocalOptions { engine: EngineChoice::Uring, ..LocalOptions::default() };
    let store = LocalStore::new(folder.path(), options).unwrap();
    if let Err(error) = store.engine_kind() {
        println!("skipped: {error}");
        return;
    }
    let store: Arc<dyn Store> = Arc::new(store);
    contract(&store);
}

#[test]
fn memory() {
    contract(&open_store("memory://contract", &StorageOptions::default()).unwrap());
    contract(&open_store("memory://contract/below/a/prefix", &StorageOptions::default()).unwrap());
}

#[test]
fn opened_by_uri() {
    let folder = folder();
    let uri = format!("file://{}", folder.path().display());
    contract(&open_store(&uri, &StorageOptions::default()).unwrap());
}

#[test]
fn a_fault_store_without_faults_is_transparent() {
    let folder = folder();
    let inner = [
        local(folder.path(), EngineChoice::Auto),
        open_store("memory://contract-fault", &StorageOptions::default()).unwrap(),
    ];
    for inner in inner {
        let fault = Arc::new(FaultStore::new(inner, FaultScript::none()));
        contract(&(Arc::clone(&fault) as Arc<dyn Store>));
        let history = fault.history();
        assert_eq!(history.len() as u64, fault.operations());
        assert!(history.iter().zip(1..).all(|(op, number)| op.number == number));
    }
}
