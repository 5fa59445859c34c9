//! A deterministic S3 server inside the test's process: buckets in memory, requests numbered, and a
//! script that says which of them fails how (`script.rs`).
//!
//! It speaks HTTP on the loopback through the s3s crate, so that signatures, headers and XML are
//! parsed by code that is not ours. Moto (`tests/s3_server.rs`) is the independent second opinion
//! on what S3 means.

mod api;
mod bucket;
mod script;

use std::fmt;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use drivetrain::storage::{OptionMap, StorageOptions, Store, open_store};
use futures::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use s3s::Body;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::runtime::Runtime;

use self::api::{Api, Buckets, StaleListing};
use self::bucket::Bucket;
pub use self::script::Fault;
use self::script::Script;

const ACCESS_KEY: &str = "AKIDSIMULATED";
const SECRET_KEY: &str = "simulated-secret-value";
/// Longer than the read timeout of [`Server::open_hasty`], and an end if nobody hangs up.
const HANG: Duration = Duration::from_secs(20);
/// How long a hasty client waits for a silent server.
const HASTY: (&str, &str) = ("read_timeout", "300ms");
/// Requests that the log remembers.
const LOG_MAX: usize = 1 << 16;

/// One request, as it was counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// From 1.
    pub number: u64,
    /// As scripts spell it.
    pub op: &'static str,
    pub key: String,
    pub fault: Option<Fault>,
    /// The answer's status; 0 if there was none.
    pub status: u16,
}

#[derive(Debug, Default)]
struct Control {
    script: Script,
    requests: u64,
    log: Vec<Record>,
}

struct Shared {
    service: S3Service,
    control: Mutex<Control>,
}

/// A running server; ends with the value.
pub struct Server {
    port: u16,
    shared: Arc<Shared>,
    buckets: Buckets,
    // Last: its tasks use what is above.
    runtime: Option<Runtime>,
}

/// The connection is to be closed without an answer.
#[derive(Debug)]
struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("closed by the fault script")
    }
}

impl std::error::Error for Closed {}

impl Server {
    /// Starts a server on a free port with these empty buckets.
    pub fn start(buckets: &[&str]) -> Self {
        Self::with_pages(buckets, 1000)
    }

    /// The same, with small pages of listings.
    pub fn with_pages(buckets: &[&str], page_keys: usize) -> Self {
        let names = buckets.iter().map(|name| ((*name).to_string(), Bucket::default()));
        let buckets: Buckets = Arc::new(Mutex::new(names.collect()));
        let api = Api { buckets: Arc::clone(&buckets), page_keys };
        let mut builder = S3ServiceBuilder::new(api);
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let shared = Arc::new(Shared { service: builder.build(), control: Mutex::default() });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let port = listener.local_addr().unwrap().port();
        runtime.spawn(accept(listener, Arc::clone(&shared)));
        Self { port, shared, buckets, runtime: Some(runtime) }
    }

    /// From now on this script holds, and requests count from 1.
    pub fn script(&self, text: &str) {
        *self.shared.control.lock() = Control { script: Script::parse(text), ..Control::default() };
    }

    /// Requests since the script was set.
    pub fn log(&self) -> Vec<Record> {
        self.shared.control.lock().log.clone()
    }

    /// How often a fault happened since the script was set.
    pub fn faults(&self) -> usize {
        self.log().iter().filter(|record| record.fault.is_some()).count()
    }

    /// Listings with the fault `stale` show what is stored now.
    pub fn freeze(&self, bucket: &str) {
        self.buckets.lock().get_mut(bucket).unwrap().freeze();
    }

    /// Makes all objects of a bucket older.
    pub fn age(&self, bucket: &str, by: Duration) {
        for object in self.buckets.lock().get_mut(bucket).unwrap().objects.values_mut() {
            object.modified -= by;
        }
    }

    /// Makes all unfinished uploads of a bucket older.
    pub fn age_uploads(&self, bucket: &str, by: Duration) {
        for upload in self.buckets.lock().get_mut(bucket).unwrap().uploads.values_mut() {
            upload.started -= by;
        }
    }

    /// Keys of unfinished uploads.
    pub fn upload_keys(&self, bucket: &str) -> Vec<String> {
        self.buckets.lock()[bucket].uploads.values().map(|upload| upload.key.clone()).collect()
    }

    /// Keys and sizes of a bucket, past the network.
    pub fn objects(&self, bucket: &str) -> Vec<(String, usize)> {
        let buckets = self.buckets.lock();
        buckets[bucket].objects.iter().map(|(key, o)| (key.clone(), o.data.len())).collect()
    }

    /// Unfinished uploads of a bucket.
    pub fn uploads(&self, bucket: &str) -> usize {
        self.buckets.lock()[bucket].uploads.len()
    }

    /// Removes what a bucket holds.
    pub fn clear(&self, bucket: &str) {
        *self.buckets.lock().get_mut(bucket).unwrap() = Bucket::default();
    }

    /// A store on this server.
    pub fn open(&self, uri: &str) -> Arc<dyn Store> {
        self.open_with(uri, &[])
    }

    /// A store that does not wait long for a server that is silent.
    pub fn open_hasty(&self, uri: &str) -> Arc<dyn Store> {
        self.open_with(uri, &[HASTY])
    }

    /// Options of [`Server::open_hasty`], for another process.
    pub fn hasty_options(&self) -> OptionMap {
        self.options(&[HASTY])
    }

    fn options(&self, more: &[(&str, &str)]) -> OptionMap {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let pairs = [
            ("aws_endpoint", endpoint.as_str()),
            ("allow_http", "true"),
            ("aws_access_key_id", ACCESS_KEY),
            ("aws_secret_access_key", SECRET_KEY),
            ("aws_region", "us-east-1"),
            ("proxy_excludes", "127.0.0.1"),
        ];
        let pairs = pairs.iter().chain(more);
        pairs.map(|(key, value)| ((*key).to_string(), (*value).to_string())).collect()
    }

    fn open_with(&self, uri: &str, more: &[(&str, &str)]) -> Arc<dyn Store> {
        open_store(uri, &StorageOptions { options: self.options(more) }).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        let answer = move |request| answer(Arc::clone(&shared), request);
        let service = hyper::service::service_fn(answer);
        tokio::spawn(async move {
            // A connection that a fault closes is an error of the connection.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

/// Operation and key of a request, by S3's path-style addresses.
fn classify(request: &Request<Incoming>) -> (&'static str, String) {
    let path = request.uri().path().trim_start_matches('/');
    let key = path.split_once('/').map_or("", |(_, key)| key).to_string();
    let query = request.uri().query().unwrap_or_default();
    let has = |name: &str| {
        query.split('&').any(|pair| pair == name || pair.starts_with(&format!("{name}=")))
    };
    let op = match *request.method() {
        Method::GET if key.is_empty() && has("uploads") => "ListUploads",
        Method::GET if key.is_empty() => "List",
        Method::GET => "Get",
        Method::HEAD => "Head",
        Method::PUT if has("partNumber") => "UploadPart",
        Method::PUT => "Put",
        Method::POST if has("delete") => "DeleteMany",
        Method::POST if has("uploads") => "CreateUpload",
        Method::POST if has("uploadId") => "Complete",
        Method::DELETE if has("uploadId") => "AbortUpload",
        Method::DELETE => "Delete",
        _ => "Other",
    };
    // A listing's key is the prefix it asks for.
    let prefix = || query.split('&').find_map(|pair| pair.strip_prefix("prefix="));
    let key = if key.is_empty() { prefix().unwrap_or("").replace("%2F", "/") } else { key };
    (op, key)
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, Closed> {
    let (op, key) = classify(&request);
    let (number, fault) = {
        let mut control = shared.control.lock();
        control.requests += 1;
        let number = control.requests;
        let fault = control.script.decide(number, op, &key);
        if control.log.len() < LOG_MAX {
            control.log.push(Record { number, op, key, fault, status: 0 });
        }
        (number, fault)
    };
    let done = harmed(&shared.service, request, fault).await;
    let status = done.as_ref().map_or(0, |response| response.status().as_u16());
    let mut control = shared.control.lock();
    if let Some(record) = control.log.iter_mut().find(|record| record.number == number) {
        record.status = status;
    }
    done
}

async fn harmed(
    service: &S3Service,
    request: Request<Incoming>,
    fault: Option<Fault>,
) -> Result<Response<Body>, Closed> {
    match fault {
        None => serve(service, request).await,
        Some(Fault::Stale) => {
            let mut request = request;
            request.extensions_mut().insert(StaleListing);
            serve(service, request).await
        }
        Some(Fault::Refuse(status)) => {
            let _ = request.into_body().collect().await;
            Ok(refusal(status))
        }
        Some(Fault::OkWithError) => {
            let _ = request.into_body().collect().await;
            Ok(refusal(200))
        }
        Some(Fault::Drop) => {
            let _ = request.into_body().collect().await;
            Err(Closed)
        }
        Some(Fault::HalfRequest) => {
            let mut body = request.into_body();
            let half = body.size_hint().exact().unwrap_or(0) / 2;
            let mut seen = 0;
            while seen < half
                && let Some(Ok(frame)) = body.frame().await
            {
                seen += frame.data_ref().map_or(0, |data| data.len() as u64);
            }
            Err(Closed)
        }
        Some(Fault::Hang) => {
            tokio::time::sleep(HANG).await;
            Err(Closed)
        }
        Some(Fault::Lose) => serve(service, request).await.and(Err(Closed)),
        Some(Fault::HangAfter) => {
            let _done = serve(service, request).await;
            tokio::time::sleep(HANG).await;
            Err(Closed)
        }
        Some(Fault::HalfAnswer) => Ok(cut(serve(service, request).await?).await),
    }
}

async fn serve(service: &S3Service, request: Request<Incoming>) -> Result<Response<Body>, Closed> {
    service.call(request.map(Body::from)).await.map_err(|_| Closed)
}

/// As S3 words it.
fn refusal(status: u16) -> Response<Body> {
    let code = match status {
        200 | 500 => "InternalError",
        403 => "AccessDenied",
        409 => "ConditionalRequestConflict",
        503 => "SlowDown",
        _ => "Refused",
    };
    let text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code>\
         <Message>by the fault script</Message><RequestId>0</RequestId></Error>"
    );
    Response::builder().status(status).body(Body::from(text)).unwrap()
}

/// The answer with its whole length announced and half of it sent.
async fn cut(response: Response<Body>) -> Response<Body> {
    let (mut parts, body) = response.into_parts();
    let whole = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    parts.headers.insert("content-length", whole.len().into());
    let half = Ok::<_, std::io::Error>(Frame::data(whole.slice(..whole.len() / 2)));
    let broken = Err(std::io::Error::other(Closed));
    let body = StreamBody::new(stream::iter([half, broken]));
    Response::from_parts(parts, Body::http_body_unsync(body))
}
