//! Building an S3 client: options and environment, time limits that suit large objects, counting.
//!
//! The crate's default of 30 s for a whole request would cut large bodies on slow links, so there
//! is no total limit; instead a stalled connection is noticed (`read_timeout`), requests are at
//! most one part long, and every operation of the adapter has a deadline of its own.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, RetryConfig};
use parking_lot::Mutex;

use super::adapter::{Counts, ObjectStoreAdapter, Parts};
use super::error::{Scrubber, map};
use super::keys::{is_secret, s3_key};
use super::uploads::Uploads;
use crate::error::Result;
use crate::storage::StorageOptions;

/// How often and how long a failed request is repeated.
#[derive(Debug, Clone, Copy)]
pub struct RetryPolicy {
    /// Repetitions of one request.
    pub retries_max: usize,
    /// No repetition starts later than this after the first try.
    pub deadline: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        // A node of a busy object store answers 503 for seconds, not minutes.
        Self { retries_max: 8, deadline: Duration::from_secs(90) }
    }
}

/// A healthy endpoint accepts within milliseconds; two lost SYN packets cost 3 s.
const CONNECT_TIMEOUT: &str = "10s";
/// Longest silence of a server within one request.
const READ_TIMEOUT: &str = "30s";
/// Total time of a request: only a backstop, as parts are small.
const REQUEST_TIMEOUT: &str = "15m";

/// Opens `bucket` below `prefix` with options over the environment (`AWS_*`) over defaults.
pub fn open_s3(
    bucket: &str,
    prefix: &str,
    options: &StorageOptions,
    retry: RetryPolicy,
) -> Result<ObjectStoreAdapter> {
    install_crypto();
    let counts = Arc::new(Counts::default());
    let made = Arc::new(Mutex::new(None));
    let scrubber = scrubber(options);
    let uri = format!("s3://{bucket}/{prefix}").trim_end_matches('/').to_string();
    let build = |retry: RetryConfig| -> Result<Arc<AmazonS3>> {
        let builder = configure(bucket, options)?
            .with_http_connector(CountingConnector {
                counts: Arc::clone(&counts),
                made: Arc::clone(&made),
            })
            .with_retry(retry);
        Ok(Arc::new(builder.build().map_err(|e| map("open", &uri, &e, &scrubber))?))
    };
    let store = build(retrying(retry))?;
    let client = made.lock().take();
    let uploads = client.map(|client| Uploads { store: Arc::clone(&store), client });
    let parts = Parts {
        store,
        // A repeated conditional put cannot tell its own lost success from another writer's, so
        // the adapter repeats those itself and reads back.
        conditional: build(RetryConfig { max_retries: 0, ..retrying(retry) })?,
        counts: Arc::clone(&counts),
        counted_below: true,
        scrubber: scrubber.clone(),
        retry,
        uploads,
    };
    Ok(ObjectStoreAdapter::new(&uri, prefix, parts))
}

fn retrying(retry: RetryPolicy) -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(10),
        base: 2.0,
    };
    RetryConfig { backoff, max_retries: retry.retries_max, retry_timeout: retry.deadline }
}

fn configure(bucket: &str, options: &StorageOptions) -> Result<AmazonS3Builder> {
    let client = ClientOptions::new()
        .with_config(ClientConfigKey::ConnectTimeout, CONNECT_TIMEOUT)
        .with_config(ClientConfigKey::ReadTimeout, READ_TIMEOUT)
        .with_config(ClientConfigKey::Timeout, REQUEST_TIMEOUT);
    let mut builder = AmazonS3Builder::new().with_client_options(client);
    for (name, value) in environment() {
        // Variables that are not options (AWS_PROFILE, ...) belong to other programs.
        if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    for (name, value) in &options.options {
        builder = builder.with_config(s3_key(name)?, value.clone());
    }
    Ok(builder.with_bucket_name(bucket))
}

fn environment() -> impl Iterator<Item = (String, String)> {
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).filter(|(name, _)| name.starts_with("AWS_"))
}

fn scrubber(options: &StorageOptions) -> Scrubber {
    let given = options.options.iter().map(|(name, value)| (name.clone(), value.clone()));
    let secrets = given.chain(environment()).filter(|(name, _)| is_secret(name));
    Scrubber::new(secrets.map(|(_, value)| value))
}

/// reqwest is built without a crypto provider of its own, so that the build needs no C compiler
/// for one; rustls wants the choice before the first client. Another library's earlier choice is
/// as good.
fn install_crypto() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

/// Counts what really goes over the wire, repetitions by the crate included.
#[derive(Debug)]
struct CountingConnector {
    counts: Arc<Counts>,
    /// The client that was made last, which is the one for the bucket.
    made: Arc<Mutex<Option<HttpClient>>>,
}

impl HttpConnector for CountingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        let client = HttpClient::new(CountingClient {
            options: options.clone(),
            current: Mutex::new((std::process::id(), client)),
            counts: Arc::clone(&self.counts),
        });
        *self.made.lock() = Some(client.clone());
        Ok(client)
    }
}

struct CountingClient {
    options: ClientOptions,
    current: Mutex<(u32, HttpClient)>,
    counts: Arc<Counts>,
}

impl std::fmt::Debug for CountingClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The options may hold a proxy's password.
        f.write_str("CountingClient")
    }
}

impl CountingClient {
    /// The client of this process. A forked child inherits a pool of connections whose tasks did
    /// not survive the fork and would never answer, so it makes its own and leaks that one.
    fn client(&self) -> Result<HttpClient, HttpError> {
        let pid = std::process::id();
        let mut current = self.current.lock();
        if current.0 != pid {
            let fresh = ReqwestConnector::default()
                .connect(&self.options)
                .map_err(|e| HttpError::new(HttpErrorKind::Unknown, e))?;
            std::mem::forget(std::mem::replace(&mut *current, (pid, fresh)));
        }
        Ok(current.1.clone())
    }

    async fn counted(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let answer = self.client()?.execute(request).await;
        let repeated = match &answer {
            Ok(response) => {
                let status = response.status().as_u16();
                status >= 500 || status == 429
            }
            Err(_) => true,
        };
        self.counts.retries.fetch_add(u64::from(repeated), Ordering::Relaxed);
        answer
    }
}

/// What `async_trait` makes of `async fn call`, which this crate does not depend on.
type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for CountingClient {
    fn call<'life0, 'async_trait>(&'life0 self, request: HttpRequest) -> Answer<'async_trait>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(self.counted(request))
    }
}
