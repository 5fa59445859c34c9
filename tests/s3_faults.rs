//! The object adapter against a network that fails: a proxy before the S3 server loses answers,
//! cuts bodies and refuses, each at a chosen request.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use drivetrain::Error;
use drivetrain::memory::Buffer;
use drivetrain::runtime::block_on;
use drivetrain::storage::{OpenOptions, Store, WriteOptions};
use parking_lot::Mutex;

use crate::s3_server::Server;

/// What the proxy does to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Harm {
    /// Forwards it and closes without an answer.
    LoseAnswer,
    /// Answers 503 without forwarding.
    Unavailable,
    /// Answers 409 without forwarding.
    Conflict,
    /// Forwards it and closes after half of the answer's body.
    CutBody,
}

/// The next request of this method meets this harm, once.
type Plan = Arc<Mutex<Vec<(&'static str, Harm)>>>;

/// A proxy with a plan; its thread ends with the process.
struct Proxy {
    port: u16,
    plan: Plan,
}

impl Proxy {
    fn start(server_port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let plan = Plan::default();
        let shared = Arc::clone(&plan);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (plan, client) = (Arc::clone(&shared), client.unwrap());
                std::thread::spawn(move || drop(relay(&client, server_port, &plan)));
            }
        });
        Self { port, plan }
    }

    fn harm(&self, method: &'static str, harms: &[Harm]) {
        self.plan.lock().extend(harms.iter().map(|harm| (method, *harm)));
    }

    /// Every planned harm has happened.
    fn assert_done(&self) {
        assert!(self.plan.lock().is_empty(), "{:?}", self.plan.lock());
    }
}

fn relay(mut client: &TcpStream, server_port: u16, plan: &Plan) -> std::io::Result<()> {
    let request = message(client, false)?;
    let method = String::from_utf8_lossy(&request).split(' ').next().unwrap_or("").to_string();
    let harm = {
        let mut plan = plan.lock();
        let at = plan.iter().position(|(planned, _)| *planned == method);
        at.map(|at| plan.remove(at).1)
    };
    match harm {
        Some(Harm::Unavailable) => return refuse(client, "503 Slow Down"),
        Some(Harm::Conflict) => return refuse(client, "409 Conflict"),
        _ => {}
    }
    let mut server = TcpStream::connect(("127.0.0.1", server_port))?;
    server.set_read_timeout(Some(Duration::from_mins(1)))?;
    server.write_all(&request)?;
    let answer = message(&server, method == "HEAD")?;
    match harm {
        Some(Harm::LoseAnswer) => {}
        Some(Harm::CutBody) => {
            let body = head_bytes(&answer).map_or(0, |head| answer.len() - head);
            client.write_all(&answer[..answer.len() - body / 2])?;
        }
        _ => client.write_all(&answer)?,
    }
    client.shutdown(Shutdown::Both)
}

fn refuse(mut client: &TcpStream, status: &str) -> std::io::Result<()> {
    write!(client, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
    client.shutdown(Shutdown::Both)
}

fn head_bytes(message: &[u8]) -> Option<usize> {
    message.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4)
}

/// One HTTP message; its connection is made to end after it.
fn message(mut from: &TcpStream, no_body: bool) -> std::io::Result<Vec<u8>> {
    let (mut data, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        if let Some(head) = head_bytes(&data) {
            let text = String::from_utf8_lossy(&data[..head]).to_ascii_lowercase();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
            let length = length.map_or(0, |n| n.trim().parse().unwrap());
            if no_body || data.len() >= head + length {
                let close = b"Connection: close\r\n";
                data.splice(head - 2..head - 2, close.iter().copied());
                return Ok(data);
            }
        }
        match from.read(&mut piece)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => data.extend_from_slice(&piece[..n]),
        }
    }
}

#[test]
fn commits_survive_a_network_that_fails() {
    let Some(server) = Server::start() else { return };
    server.bucket("faults");
    let proxy = Proxy::start(server.port());
    let store = Server::open_through(proxy.port, "s3://faults");
    creations_know_their_outcome(&proxy, &store);
    replacements_know_their_outcome(&proxy, &store);
    reads_resume(&proxy, &store);
    uploads_repeat(&proxy, &store);
}

const MANIFEST: Bytes = Bytes::from_static(b"attempt 1");

fn creations_know_their_outcome(proxy: &Proxy, store: &Arc<dyn Store>) {
    block_on(async {
        // (what happens to the puts, does it end as ours)
        let cases: [&[Harm]; 5] = [
            &[Harm::LoseAnswer],
            &[Harm::Unavailable, Harm::Unavailable],
            &[Harm::Conflict],
            &[Harm::Unavailable, Harm::LoseAnswer],
            &[Harm::Conflict, Harm::Conflict, Harm::LoseAnswer],
        ];
        for (i, harms) in cases.iter().enumerate() {
            let path = format!("create/{i}");
            proxy.harm("PUT", harms);
            let version = store.put_new(&path, MANIFEST).await.unwrap();
            proxy.assert_done();
            assert_eq!(store.head(&path).await.unwrap().version, version, "{harms:?}");
        }
        // An unclear answer never turns another writer's object into ours.
        store.put_new("create/other", Bytes::from_static(b"attempt 2")).await.unwrap();
        proxy.harm("PUT", &[Harm::LoseAnswer]);
        let error = store.put_new("create/other", MANIFEST).await.unwrap_err();
        assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    })
    .unwrap();
}

fn replacements_know_their_outcome(proxy: &Proxy, store: &Arc<dyn Store>) {
    block_on(async {
        let mut version = store.put_new("replace", MANIFEST).await.unwrap();
        for harm in [Harm::LoseAnswer, Harm::Unavailable, Harm::Conflict] {
            let data = Bytes::from(format!("after {harm:?}"));
            proxy.harm("PUT", &[harm]);
            let next = store.replace("replace", data.clone(), &version).await.unwrap();
            proxy.assert_done();
            let file = store.open("replace", OpenOptions::default()).await.unwrap();
            assert_eq!(file.meta().version, next);
            let got = file.read_at(0, Buffer::heap(data.len())).await.unwrap();
            assert_eq!(got[..], data[..]);
            let stale = store.replace("replace", MANIFEST, &version).await.unwrap_err();
            assert!(matches!(stale, Error::Changed { .. }), "{stale}");
            version = next;
        }
    })
    .unwrap();
}

fn reads_resume(proxy: &Proxy, store: &Arc<dyn Store>) {
    block_on(async {
        let data: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
        store.put_new("read", Bytes::from(data.clone())).await.unwrap();
        let file = store.open("read", OpenOptions::default()).await.unwrap();
        for harm in [Harm::CutBody, Harm::Unavailable, Harm::LoseAnswer] {
            let before = store.counters();
            proxy.harm("GET", &[harm]);
            let got = file.read_at(1, Buffer::heap(data.len() - 1)).await.unwrap();
            proxy.assert_done();
            assert!(got[..] == data[1..], "{harm:?}");
            let requests = store.counters().object_requests - before.object_requests;
            assert_eq!(requests, 2, "{harm:?}");
        }
    })
    .unwrap();
}

fn uploads_repeat(proxy: &Proxy, store: &Arc<dyn Store>) {
    block_on(async {
        let data = Bytes::from((0..20 << 20).map(|i: u32| (i >> 8) as u8).collect::<Vec<u8>>());
        for (i, (method, harm)) in
            [("POST", Harm::Unavailable), ("PUT", Harm::Unavailable), ("PUT", Harm::LoseAnswer)]
                .into_iter()
                .enumerate()
        {
            let path = format!("upload/{i}");
            let options = WriteOptions { direct: false, size_bytes: Some(data.len() as u64) };
            let mut writer = store.create(&path, options).await.unwrap();
            proxy.harm(method, &[harm]);
            writer.write(data.clone()).await.unwrap();
            assert_eq!(writer.finish().await.unwrap(), data.len() as u64);
            proxy.assert_done();
            let file = store.open(&path, OpenOptions::default()).await.unwrap();
            let got = file.read_at(0, Buffer::heap(data.len())).await.unwrap();
            assert!(got[..] == data[..], "{method} {harm:?}");
        }
        // Lost between the last part and its answer: the upload is complete, and known to be.
        let options = WriteOptions { direct: false, size_bytes: Some(data.len() as u64) };
        let mut writer = store.create("upload/settled", options).await.unwrap();
        writer.write(data.clone()).await.unwrap();
        proxy.harm("POST", &[Harm::LoseAnswer]);
        assert_eq!(writer.finish().await.unwrap(), data.len() as u64);
        proxy.assert_done();
        assert_eq!(store.head("upload/settled").await.unwrap().size_bytes, data.len() as u64);
        assert!(store.counters().retries > 0);
    })
    .unwrap();
}
