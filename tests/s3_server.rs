//! The object adapter against a real S3 server process (moto), started here on the loopback.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use drivetrain::Error;
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::fault::{FaultScript, FaultStore};
use drivetrain::storage::{OpenOptions, StorageOptions, Store, WriteOptions, open_store};

use crate::store_contract::contract;

/// Importing moto takes seconds on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(90);

/// A running server; ends with the value.
struct Server {
    process: Child,
    port: u16,
}

impl Server {
    /// Starts moto, or says why the test is skipped.
    fn start() -> Option<Self> {
        let Some(program) = moto() else {
            println!("skipped: no moto_server in .venv/bin or on PATH (make setup installs it)");
            return None;
        };
        // Bound and released: another process may take it in between, but then the start fails.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new(program)
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { process, port };
        let started = Instant::now();
        while server.request("GET", "/moto-api/").is_none() {
            assert!(started.elapsed() < START_TIMEOUT, "moto did not start");
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(server)
    }

    /// One plain HTTP request; the answer's status and body, none while nobody listens.
    fn request(&self, method: &str, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(START_TIMEOUT)).unwrap();
        let head = "Host: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        write!(stream, "{method} {path} HTTP/1.1\r\n{head}").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    }

    fn bucket(&self, name: &str) {
        let answer = self.request("PUT", &format!("/{name}")).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    fn open(&self, uri: &str) -> Arc<dyn Store> {
        Self::open_through(self.port, uri)
    }

    /// Opens a store of a server by its port.
    fn open_through(port: u16, uri: &str) -> Arc<dyn Store> {
        let endpoint = format!("http://127.0.0.1:{port}");
        let pairs = [
            ("aws_endpoint", endpoint.as_str()),
            ("allow_http", "true"),
            ("aws_access_key_id", "AKIDTESTKEY"),
            ("aws_secret_access_key", "test-secret-value"),
            ("aws_region", "us-east-1"),
            ("proxy_excludes", "127.0.0.1"),
        ];
        let pairs = pairs.map(|(key, value)| (key.to_string(), value.to_string()));
        open_store(uri, &StorageOptions { options: pairs.into() }).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn moto() -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join(".venv/bin/moto_server");
    let on_path = std::env::var_os("PATH").unwrap_or_default();
    let mut found = std::env::split_paths(&on_path).map(|folder| folder.join("moto_server"));
    if own.is_file() { Some(own) } else { found.find(|program| program.is_file()) }
}

#[test]
fn a_real_s3_server_keeps_the_contract() {
    let Some(server) = Server::start() else { return };
    server.bucket("contract");
    contract(&server.open("s3://contract"));
    contract(&server.open("s3://contract/some/prefix/"));
    unfinished_uploads_are_aborted(&server);
    abandoned_uploads_are_aborted(&server);
    requests_are_counted(&server);
    lost_answers_are_settled(&server);
    stores_work_after_a_fork(&server);
    errors_say_what_to_do_without_secrets(&server);
}

/// Aborted, dropped or failed: no upload may stay behind, where it would be billed for ever.
fn unfinished_uploads_are_aborted(server: &Server) {
    server.bucket("uploads");
    let store = server.open("s3://uploads");
    let options = WriteOptions { direct: false, size_bytes: Some(20 << 20) };
    let part = Bytes::from(vec![7_u8; 9 << 20]);
    block_on(async {
        for end in ["abort", "drop"] {
            let mut writer = store.create("unfinished", options).await.unwrap();
            writer.write(part.clone()).await.unwrap();
            writer.write(part.clone()).await.unwrap();
            let uploads = server.request("GET", "/uploads?uploads").unwrap();
            assert!(uploads.contains("<UploadId>"), "{end}: {uploads}");
            match end {
                "abort" => writer.abort().await.unwrap(),
                _ => drop(writer),
            }
            let started = Instant::now();
            while server.request("GET", "/uploads?uploads").unwrap().contains("<UploadId>") {
                assert!(started.elapsed() < START_TIMEOUT, "{end} left the upload behind");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            assert!(store.list("").await.unwrap().is_empty());
        }
    })
    .unwrap();
}

/// What killed processes left is found by the list of uploads, which this server has its own idea
/// of.
fn abandoned_uploads_are_aborted(server: &Server) {
    server.bucket("abandoned");
    let store = server.open("s3://abandoned/some/run");
    block_on(async {
        for path in ["step-00000001/a&b", "photos"] {
            let options = WriteOptions { direct: false, size_bytes: Some(20 << 20) };
            let mut writer = store.create(path, options).await.unwrap();
            writer.write(Bytes::from(vec![7_u8; 9 << 20])).await.unwrap();
            std::mem::forget(writer);
        }
        let started = Instant::now();
        let uploads = || server.request("GET", "/abandoned?uploads").unwrap();
        while uploads().matches("<UploadId>").count() < 2 {
            assert!(started.elapsed() < START_TIMEOUT, "{}", uploads());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let gone = |path: &str, begun_ns: i64| path.starts_with("step-") && begun_ns > 0;
        assert_eq!(store.abort_unfinished(&gone).await.unwrap(), 1, "{}", uploads());
        assert_eq!(uploads().matches("<UploadId>").count(), 1);
        assert_eq!(store.abort_unfinished(&gone).await.unwrap(), 0);
    })
    .unwrap();
}

/// Twenty MiB are three parts: a head, a start, three parts and a completion.
fn requests_are_counted(server: &Server) {
    server.bucket("counts");
    let store = server.open("s3://counts");
    block_on(async {
        let options = WriteOptions { direct: false, size_bytes: Some(20 << 20) };
        let mut writer = store.create("large", options).await.unwrap();
        writer.write(Bytes::from(vec![1_u8; 20 << 20])).await.unwrap();
        writer.finish().await.unwrap();
        assert_eq!(store.counters().object_requests, 6);
        let file = store.open("large", OpenOptions::default()).await.unwrap();
        file.read_at(1, Buffer::heap(17 << 20)).await.unwrap();
        let counters = store.counters();
        assert_eq!((counters.object_requests, counters.retries), (6 + 1 + 3, 0), "{counters:?}");
        assert_eq!((counters.read_bytes, counters.written_bytes), (17 << 20, 20 << 20));
    })
    .unwrap();
}

/// A commit whose answer is lost and that is tried again must not lose its own object: the second
/// try is told that the name is taken, and the object is the first try's.
fn lost_answers_are_settled(server: &Server) {
    server.bucket("lost");
    let script = FaultScript::parse("lost@put_new:1").unwrap();
    let store = FaultStore::new(server.open("s3://lost"), script);
    block_on(async {
        let data = Bytes::from_static(b"attempt 42");
        let lost = store.put_new("manifest", data.clone()).await.unwrap_err();
        assert!(matches!(lost, Error::Timeout { .. }), "{lost}");
        let again = store.put_new("manifest", data).await.unwrap_err();
        assert!(matches!(again, Error::AlreadyExists { .. }), "{again}");
        assert_eq!(store.head("manifest").await.unwrap().size_bytes, 10);
    })
    .unwrap();
}

/// Set for the child process of the fork test: the server's port.
const FORK_ENV: &str = "DRIVETRAIN_TEST_FORK_PORT";

/// A child of `fork` inherits a connection pool without its threads; using the store there must
/// work, not hang. In a process of its own, since the test runner has other threads.
fn stores_work_after_a_fork(server: &Server) {
    server.bucket("fork");
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "s3_server::child_that_forks"])
        .env(FORK_ENV, server.port.to_string())
        .stdout(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(block_on(server.open("s3://fork").list("")).unwrap().unwrap().len(), 2);
}

#[test]
fn child_that_forks() {
    let Ok(port) = std::env::var(FORK_ENV) else { return };
    let store = Server::open_through(port.parse().unwrap(), "s3://fork");
    block_on(store.put_new("parent", Bytes::new())).unwrap().unwrap();
    // SAFETY: this process does nothing else meanwhile; the child only uses the store and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let put = block_on(store.put_new("child", Bytes::new()));
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!matches!(put, Ok(Ok(_))))) }
    }
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child could not use the store");
}

fn errors_say_what_to_do_without_secrets(server: &Server) {
    let store = server.open("s3://no-such-bucket/p");
    let error = block_on(store.put_new("x", Bytes::new())).unwrap().unwrap_err().to_string();
    assert!(error.contains("s3://no-such-bucket/p/x"), "{error}");
    assert!(!error.contains("test-secret-value") && !error.contains("AKIDTESTKEY"), "{error}");
    assert!(!format!("{store:?}").contains("test-secret-value"), "{store:?}");
}
