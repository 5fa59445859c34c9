//! Names of store options: which exist, which hold secrets, and what a mistyped one meant.

use object_store::aws::AmazonS3ConfigKey;

use crate::error::{Error, Result};
use crate::storage::OptionMap;

/// Options that a person sets, in `object_store`'s long spelling; shorter aliases are accepted too.
const KNOWN: [&str; 34] = [
    "allow_http",
    "allow_invalid_certificates",
    "aws_access_key_id",
    "aws_checksum_algorithm",
    "aws_conditional_put",
    "aws_container_authorization_token_file",
    "aws_container_credentials_full_uri",
    "aws_container_credentials_relative_uri",
    "aws_default_region",
    "aws_disable_bulk_delete",
    "aws_endpoint",
    "aws_imdsv1_fallback",
    "aws_metadata_endpoint",
    "aws_region",
    "aws_request_payer",
    "aws_role_arn",
    "aws_role_session_name",
    "aws_s3_express",
    "aws_secret_access_key",
    "aws_session_token",
    "aws_skip_signature",
    "aws_sse_kms_key_id",
    "aws_unsigned_payload",
    "aws_virtual_hosted_style_request",
    "aws_web_identity_token_file",
    "connect_timeout",
    "http1_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_excludes",
    "proxy_url",
    "read_timeout",
    "timeout",
    "user_agent",
];

/// Suggestions an error names.
const SUGGESTIONS_MAX: usize = 3;

/// The S3 option of this name; an unknown name is an error that lists the nearest ones.
pub fn s3_key(name: &str) -> Result<AmazonS3ConfigKey> {
    let lower = name.to_ascii_lowercase();
    lower.parse().map_err(|_| {
        Error::invalid(
            "storage option",
            format!("an S3 option; near to it: {}", nearest(&lower).join(", ")),
            name,
        )
    })
}

/// Refuses options for a store that has none, by name.
pub fn refuse_all(scheme: &str, options: &OptionMap) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(name) => {
            Err(Error::invalid("storage option", format!("none for {scheme}"), name.clone()))
        }
    }
}

/// Whether a value of this option must never be shown.
pub fn is_secret(name: &str) -> bool {
    let lower = name.to_ascii_lowercase();
    let marks = ["secret", "token", "access_key", "password", "customer_key", "proxy_url"];
    marks.iter().any(|mark| lower.contains(mark)) && !lower.ends_with("_file")
}

fn nearest(name: &str) -> Vec<&'static str> {
    let bare = name.trim_start_matches("aws_");
    let mut ranked: Vec<_> = KNOWN
        .iter()
        .map(|known| (distance(bare, known.trim_start_matches("aws_")), *known))
        .collect();
    ranked.sort_unstable();
    ranked.into_iter().take(SUGGESTIONS_MAX).map(|(_, known)| known).collect()
}

/// Levenshtein distance over bytes; names are short ASCII, and a long input is cut.
fn distance(a: &str, b: &str) -> usize {
    const NAME_BYTES_MAX: usize = 64;
    let a = &a.as_bytes()[..a.len().min(NAME_BYTES_MAX)];
    let mut row: Vec<usize> = (0..=a.len()).collect();
    for (j, &right) in b.as_bytes().iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = j + 1;
        for (i, &left) in a.iter().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[i + 1];
            row[i + 1] = replaced.min(row[i] + 1).min(diagonal + 1);
        }
    }
    row[a.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_suggestion_is_a_real_option() {
        for name in KNOWN {
            assert!(s3_key(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn a_mistyped_name_is_refused_with_near_ones() {
        let text = s3_key("aws_acess_key").unwrap_err().to_string();
        assert!(
            text.contains("aws_access_key_id") && text.contains("found aws_acess_key"),
            "{text}"
        );
        assert!(s3_key("endpont").unwrap_err().to_string().contains("aws_endpoint"));
        assert!(s3_key(&"x".repeat(10_000)).is_err());
        assert!(s3_key("AWS_REGION").is_ok());
    }

    #[test]
    fn distances_by_hand() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!((distance("", "abc"), distance("abc", "")), (3, 3));
        assert_eq!(distance("same", "same"), 0);
    }

    #[test]
    fn secrets_are_known_by_name() {
        assert!(is_secret("aws_secret_access_key") && is_secret("AWS_SESSION_TOKEN"));
        assert!(!is_secret("aws_web_identity_token_file") && !is_secret("aws_region"));
    }
}
