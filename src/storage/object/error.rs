//! Errors of the `object_store` crate as ours: sorted by what the caller can do, without secrets.

use std::error::Error as _;
use std::io;

use object_store::Error as Theirs;
use object_store::client::{HttpError, HttpErrorKind};

use crate::error::Error;

/// Longest part of a server's answer that an error quotes.
const QUOTED_CHARS_MAX: usize = 400;

/// Removes secrets from texts. Servers echo parts of a request in their error pages.
#[derive(Clone, Default)]
pub struct Scrubber {
    secrets: Vec<String>,
}

impl std::fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scrubber({} secrets)", self.secrets.len())
    }
}

impl Scrubber {
    /// A scrubber for these values; very short ones would blank out ordinary text.
    pub fn new(secrets: impl IntoIterator<Item = String>) -> Self {
        const SECRET_CHARS_MIN: usize = 4;
        Self { secrets: secrets.into_iter().filter(|s| s.len() >= SECRET_CHARS_MIN).collect() }
    }

    /// The text with every secret replaced, cut to a readable length.
    pub fn clean(&self, text: &str) -> String {
        let mut clean = text.to_string();
        for secret in &self.secrets {
            clean = clean.replace(secret.as_str(), "***");
        }
        match clean.char_indices().nth(QUOTED_CHARS_MAX) {
            Some((at, _)) => format!("{}…", &clean[..at]),
            None => clean,
        }
    }
}

/// Whether the request may have had its effect although it failed: everything that is not a clear
/// refusal by the server.
pub fn outcome_unknown(error: &Theirs) -> bool {
    matches!(error, Theirs::Generic { .. } | Theirs::JoinError { .. })
}

/// Whether the server was silent for too long, after which the client repeats only what it knows to
/// be harmless.
pub fn timed_out(error: &Theirs) -> bool {
    http_kind(error) == Some(HttpErrorKind::Timeout)
}

/// `error` of operation `op` on the object `uri`.
pub fn map(op: &'static str, uri: &str, error: &Theirs, scrubber: &Scrubber) -> Error {
    match error {
        Theirs::NotFound { .. } => missing(uri),
        Theirs::AlreadyExists { .. } => exists(uri),
        Theirs::Precondition { .. } | Theirs::NotModified { .. } => Error::Changed {
            file: uri.to_string(),
            expected: "the version it was opened with".into(),
            found: "another version".into(),
        },
        Theirs::InvalidPath { source } => {
            Error::invalid("object path", "a path the store accepts", format!("{source}"))
        }
        Theirs::NotSupported { .. } | Theirs::NotImplemented { .. } => Error::Unsupported {
            what: format!("{op} on {uri}"),
            advice: "use a store with conditional writes, or allow them in its options".into(),
        },
        _ => refused(op, uri, error, scrubber),
    }
}

/// No such object.
pub fn missing(uri: &str) -> Error {
    Error::NotFound {
        what: uri.to_string(),
        advice: "check bucket, prefix and name, and that the key may list them".into(),
    }
}

/// The name is taken.
pub fn exists(uri: &str) -> Error {
    Error::AlreadyExists {
        what: uri.to_string(),
        advice: "choose another name or delete it first".into(),
    }
}

fn refused(op: &'static str, uri: &str, error: &Theirs, scrubber: &Scrubber) -> Error {
    let (kind, advice) = match error {
        Theirs::PermissionDenied { .. } => (
            io::ErrorKind::PermissionDenied,
            "check what this key may do in the bucket's policy (get, put, list, delete, abort)",
        ),
        Theirs::Unauthenticated { .. } => (
            io::ErrorKind::PermissionDenied,
            "check access key, secret, session token and the machine's clock",
        ),
        _ => transport(error),
    };
    let text = scrubber.clean(&chain(error));
    Error::Io {
        op,
        path: uri.to_string(),
        source: io::Error::new(kind, text),
        advice: advice.into(),
    }
}

fn transport(error: &Theirs) -> (io::ErrorKind, &'static str) {
    match http_kind(error) {
        Some(HttpErrorKind::Timeout) => {
            (io::ErrorKind::TimedOut, "the server stopped answering; check it and the network")
        }
        Some(HttpErrorKind::Connect) => (
            io::ErrorKind::NotConnected,
            "check the endpoint, DNS and the network; plain http needs allow_http=true",
        ),
        Some(_) => (io::ErrorKind::ConnectionAborted, "the connection broke; check the network"),
        None => (io::ErrorKind::Other, "see the server's answer"),
    }
}

/// Longest chain of causes that is followed.
const CAUSES_MAX: usize = 16;

fn causes(error: &Theirs) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(error.source(), |&cause| cause.source()).take(CAUSES_MAX)
}

fn http_kind(error: &Theirs) -> Option<HttpErrorKind> {
    causes(error).find_map(|cause| cause.downcast_ref::<HttpError>()).map(HttpError::kind)
}

/// The error and its causes, leaving out those whose text the one before quotes already.
fn chain(error: &Theirs) -> String {
    let mut text = error.to_string();
    for cause in causes(error) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: &str) -> Theirs {
        Theirs::Generic { store: "S3", source: text.to_string().into() }
    }

    #[test]
    fn secrets_do_not_reach_the_message() {
        let scrubber = Scrubber::new(["hunter2secret".to_string(), "abc".to_string()]);
        let error = generic("denied for hunter2secret, abc");
        let text = map("get", "s3://b/k", &error, &scrubber).to_string();
        assert!(!text.contains("hunter2secret") && text.contains("***"), "{text}");
        assert!(text.contains("abc"), "too short to be a secret");
        assert!(!format!("{scrubber:?}").contains("hunter2"));
    }

    #[test]
    fn long_answers_are_cut_at_a_character() {
        let text = Scrubber::default().clean(&"ä".repeat(3000));
        assert_eq!(text.chars().count(), QUOTED_CHARS_MAX + 1);
    }

    #[test]
    fn only_clear_refusals_are_certain() {
        let missing = Theirs::NotFound { path: "k".into(), source: "x".into() };
        assert!(outcome_unknown(&generic("reset")) && !outcome_unknown(&missing));
    }
}
