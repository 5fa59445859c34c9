//! The object adapter against a server that fails: it loses answers, cuts bodies, hangs and
//! refuses, each at a chosen request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drivetrain::Error;
use drivetrain::checkpoint::{Checkpointer, Options};
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::{OpenOptions, Store, WriteOptions};

use crate::commit::{Owned, save};
use crate::store_contract::contract;
use crate::support::s3::Server;

const MANIFEST: Bytes = Bytes::from_static(b"attempt 1");
/// Three parts of a multipart upload.
const UPLOAD_BYTES: usize = 20 << 20;

#[test]
fn the_server_keeps_the_contract() {
    let server = Server::with_pages(&["contract"], 3);
    contract(&server.open("s3://contract"));
    contract(&server.open("s3://contract/some/prefix/"));
    assert_eq!((server.objects("contract").len(), server.uploads("contract")), (0, 0));
}

fn store() -> (Server, Arc<dyn Store>) {
    let server = Server::start(&["faults"]);
    let store = server.open_hasty("s3://faults");
    (server, store)
}

async fn read(store: &dyn Store, path: &str) -> Vec<u8> {
    let file = store.open(path, OpenOptions::default()).await.unwrap();
    let size = file.meta().size_bytes as usize;
    file.read_at(0, Buffer::heap(size)).await.unwrap().to_vec()
}

/// Faults of a single put that leave its outcome for the adapter to find out.
const PUT_FAULTS: [&str; 11] = [
    "lose@Put:x:1",
    "drop@Put:x:1",
    "hang@Put:x:1",
    "hang-after@Put:x:1",
    "half-request@Put:x:1",
    "500@Put:x:1",
    "503@Put:x:1-2",
    "409@Put:x:1",
    "503@Put:x:1; lose@Put:x:2",
    "409@Put:x:1-2; lose@Put:x:3",
    "lose@Put:x:1; half-answer@Get:x:1; 503@Get:x:2; drop@Get:x:3",
];

#[test]
fn creations_know_their_outcome() {
    let (server, store) = store();
    block_on(async {
        for fault in PUT_FAULTS {
            server.script(fault);
            let version = store.put_new("x", MANIFEST).await;
            let version = version.unwrap_or_else(|e| panic!("{fault}: {e}"));
            assert!(server.faults() > 0, "{fault} did not happen");
            server.script("");
            assert_eq!(store.head("x").await.unwrap().version, version, "{fault}");
            assert_eq!(read(&*store, "x").await, MANIFEST, "{fault}");
            store.delete("x").await.unwrap();
            // An unclear answer never turns another writer's object into ours.
            store.put_new("x", Bytes::from_static(b"attempt 2")).await.unwrap();
            server.script(fault);
            let error = store.put_new("x", MANIFEST).await.unwrap_err();
            assert!(matches!(error, Error::AlreadyExists { .. }), "{fault}: {error}");
            server.script("");
            store.delete("x").await.unwrap();
        }
    })
    .unwrap();
}

#[test]
fn replacements_know_their_outcome() {
    let (server, store) = store();
    block_on(async {
        let mut version = store.put_new("x", MANIFEST).await.unwrap();
        for (i, fault) in PUT_FAULTS.into_iter().enumerate() {
            let data = Bytes::from(format!("attempt {i} after"));
            server.script(fault);
            let next = store.replace("x", data.clone(), &version).await;
            let next = next.unwrap_or_else(|e| panic!("{fault}: {e}"));
            server.script(fault);
            let stale = store.replace("x", MANIFEST, &version).await.unwrap_err();
            assert!(matches!(stale, Error::Changed { .. }), "{fault}: {stale}");
            server.script("");
            assert_eq!(read(&*store, "x").await, data, "{fault}");
            version = next;
        }
    })
    .unwrap();
}

#[test]
fn reads_resume() {
    let (server, store) = store();
    block_on(async {
        let data: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
        store.put_new("read", Bytes::from(data.clone())).await.unwrap();
        let file = store.open("read", OpenOptions::default()).await.unwrap();
        for fault in ["half-answer", "503", "500", "lose", "drop", "hang", "hang-after"] {
            server.script(&format!("{fault}@Get:read:1"));
            let got = file.read_at(1, Buffer::heap(data.len() - 1)).await.unwrap();
            assert!(got[..] == data[1..], "{fault}");
            assert_eq!(server.log().len(), 2, "{fault}: {:?}", server.log());
        }
    })
    .unwrap();
}

async fn upload(store: &dyn Store, path: &str, data: &Bytes) -> Result<u64, Error> {
    let options = WriteOptions { direct: false, size_bytes: Some(data.len() as u64) };
    let mut writer = store.create(path, options).await?;
    match writer.write(data.clone()).await {
        Ok(()) => writer.finish().await,
        Err(e) => {
            let _ = writer.abort().await;
            Err(e)
        }
    }
}

fn pattern() -> Bytes {
    (0..UPLOAD_BYTES as u32).map(|i| (i >> 8) as u8).collect::<Vec<u8>>().into()
}

#[test]
fn uploads_repeat() {
    let (server, store) = store();
    let data = pattern();
    let places = [
        ("CreateUpload", vec!["503", "500", "lose", "drop", "hang-after", "half-answer"]),
        ("UploadPart", vec!["503", "500", "lose", "drop", "half-request", "hang", "half-answer"]),
        (
            "Complete",
            vec!["503", "500", "lose", "drop", "hang-after", "half-answer", "ok-with-error"],
        ),
        ("Head", vec!["503", "drop", "hang"]),
    ];
    block_on(async {
        for (op, fault) in places.iter().flat_map(|(op, f)| f.iter().map(move |f| (op, f))) {
            let what = format!("{fault}@{op}::1");
            server.script(&what);
            let written = upload(&*store, "up", &data).await;
            assert_eq!(written.unwrap_or_else(|e| panic!("{what}: {e}")), UPLOAD_BYTES as u64);
            assert_eq!(server.faults(), 1, "{what}: {:?}", server.log());
            assert!(read(&*store, "up").await == data, "{what}");
            store.delete("up").await.unwrap();
        }
    })
    .unwrap();
}

#[test]
fn failed_uploads_are_aborted_and_say_so_when_that_fails() {
    let (server, store) = store();
    let data = pattern();
    block_on(async {
        for refused in ["UploadPart::2", "Complete"] {
            server.script(&format!("403@{refused}"));
            let error = upload(&*store, "up", &data).await.unwrap_err();
            assert!(matches!(error, Error::Io { .. }), "{refused}: {error}");
            assert!(error.to_string().contains("s3://faults/up"), "{error}");
            assert_eq!(server.uploads("faults"), 0, "{refused}: {:?}", server.log());
            // The upload stays if the server will not abort it; the first error is the one told.
            server.script(&format!("403@{refused}; 403@AbortUpload"));
            let error = upload(&*store, "up", &data).await.unwrap_err();
            assert!(error.to_string().contains("AccessDenied"), "{error}");
            assert_eq!(server.uploads("faults"), 1, "{refused}");
            assert!(server.objects("faults").is_empty(), "{refused}");
            server.clear("faults");
        }
    })
    .unwrap();
}

#[test]
fn stale_listings_are_what_the_script_says() {
    let (server, store) = store();
    block_on(async {
        store.put_new("a/old", MANIFEST).await.unwrap();
        server.freeze("faults");
        store.put_new("a/new", MANIFEST).await.unwrap();
        store.delete("a/old").await.unwrap();
        server.script("stale@List:a/:1-2");
        assert_eq!(store.list_names("a").await.unwrap(), ["old"]);
        assert_eq!(store.list("a").await.unwrap()[0].path, "a/old");
        assert_eq!(store.list_names("a").await.unwrap(), ["new"]);
    })
    .unwrap();
}

#[test]
fn deletions_repeat() {
    let (server, store) = store();
    block_on(async {
        for fault in ["503", "500", "lose", "drop", "hang", "hang-after"] {
            store.put_new("gone", MANIFEST).await.unwrap();
            server.script(&format!("{fault}@DeleteMany::1"));
            store.delete("gone").await.unwrap_or_else(|e| panic!("{fault}: {e}"));
            assert_eq!((server.faults(), server.objects("faults").len()), (1, 0), "{fault}");
        }
    })
    .unwrap();
}

/// Begins an upload of two parts and goes away as a killed process does.
async fn abandon(store: &dyn Store, path: &str) {
    let options = WriteOptions { direct: false, size_bytes: Some(UPLOAD_BYTES as u64) };
    let mut writer = store.create(path, options).await.unwrap();
    writer.write(Bytes::from(vec![7; UPLOAD_BYTES / 2])).await.unwrap();
    std::mem::forget(writer);
}

#[test]
fn uploads_that_nobody_finished_are_found_page_by_page_and_aborted() {
    for (bucket, uri) in [("faults", "s3://faults"), ("below", "s3://below/some run&co/ä")] {
        let server = Server::with_pages(&[bucket], 2);
        let store = server.open_hasty(uri);
        block_on(async {
            for i in 0..5 {
                abandon(store.as_ref(), &format!("gone/{i}")).await;
            }
            abandon(store.as_ref(), "alive").await;
            let elsewhere = server.open_hasty(&format!("s3://{bucket}"));
            abandon(elsewhere.as_ref(), "zz-elsewhere").await;
            let seen = parking_lot::Mutex::new(Vec::new());
            let gone = |path: &str, begun_ns: i64| {
                seen.lock().push((path.to_string(), begun_ns));
                path.starts_with("gone/")
            };
            server.script("503@ListUploads::2; drop@ListUploads::4; lose@AbortUpload::1");
            assert_eq!(store.abort_unfinished(&gone).await.unwrap(), 5, "{:?}", server.log());
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let now_ns = now.unwrap().as_nanos() as i64;
            for (path, begun_ns) in seen.lock().iter() {
                assert!((now_ns - begun_ns).abs() < 3_600_000_000_000, "{path} {begun_ns}");
            }
            let left = server.upload_keys(bucket);
            assert_eq!(left.len(), 2, "{left:?}");
            assert!(left.iter().all(|k| k.ends_with("alive") || k == "zz-elsewhere"), "{left:?}");
            server.script("403@ListUploads");
            let refused = store.abort_unfinished(&gone).await.unwrap_err().to_string();
            assert!(refused.contains("403") && refused.contains("ListBucket"), "{refused}");
        })
        .unwrap();
    }
}

/// What a save may remove: its own kind of file, begun so long ago that nobody writes it any more.
#[test]
fn a_save_aborts_old_uploads_of_killed_saves_and_no_others() {
    let server = Server::start(&["sweep"]);
    let store = server.open("s3://sweep/run");
    let own = "step-00000001/a-0123456789abcdef/rank-00000.safetensors";
    block_on(async {
        abandon(store.as_ref(), own).await;
        abandon(store.as_ref(), "photos/large.tar").await;
        server.age_uploads("sweep", Duration::from_hours(25));
        abandon(store.as_ref(), "step-00000001/a-0123456789abcdee/rank-00000.safetensors").await;
    })
    .unwrap();
    let shm = tempfile::tempdir().unwrap();
    let options = Options { shm_dir: Some(shm.path().into()), ..Options::default() };
    let ckpt = Checkpointer::new(Arc::clone(&store), 0, 1, options, None).unwrap();
    save(&ckpt, 2, &[Owned::whole("w", &[9], 1)]).unwrap();
    ckpt.close().unwrap();
    let mut left = server.upload_keys("sweep");
    left.sort();
    assert_eq!(
        left,
        ["run/photos/large.tar", "run/step-00000001/a-0123456789abcdee/rank-00000.safetensors"]
    );
}
