//! The manifest: a JSON object whose last key is the checksum of everything before it.
//!
//! The caller's state is kept as the very text that was given, since a parse and print could lose
//! big integers or the spelling of floats.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::crc32c;
use super::names::{MANIFEST, check_relative};
use crate::error::{Error, Result};

/// What `format` must say.
const FORMAT: &str = "drivetrain-checkpoint";
/// Version of the on-disk form that this program writes, and the newest it reads.
const FORMAT_VERSION: u32 = 1;
/// Before the eight hex digits.
const SEAL: &str = ",\"crc32c\":\"";
/// `"}` after them.
const SEAL_END: &str = "\"}";

/// A file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Path relative to the manifest's folder.
    pub path: String,
    /// Size.
    pub size_bytes: u64,
    /// CRC-32C of all its bytes, eight hex digits.
    pub crc32c: String,
    /// Bytes before the first entry, for rank files; 0 for the table.
    pub header_bytes: u64,
    /// CRC-32C of those.
    pub header_crc32c: String,
    /// The rank that wrote it.
    pub rank: u32,
}

/// A file of another step that holds chunks of this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Referred {
    /// The step whose folder it lies in.
    pub step: i64,
    /// The file; its path is relative to that folder.
    #[serde(flatten)]
    pub file: FileRecord,
}

/// The commit record.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Manifest {
    /// The step.
    pub step: i64,
    /// Ranks that wrote it.
    pub world_size: u32,
    /// Folder of this save call, next to the manifest.
    pub attempt: String,
    /// Every file, the table of chunks first.
    pub files: Vec<FileRecord>,
    /// Other steps that hold chunks of this one, ascending.
    pub refers_to: Vec<i64>,
    /// The files of those steps that hold them.
    pub referred: Vec<Referred>,
    /// Whether later steps may refer to chunks of this one.
    pub delta: bool,
    /// Program and version that wrote it.
    pub tool: String,
    /// When it was committed by rank 0's clock, nanoseconds since the Unix epoch.
    pub committed_ns: Option<i64>,
    /// Which root it was committed in, so that a copy in another root is known for one.
    pub root: Option<String>,
    /// What was measured of the state, by name; `None` where the number was not finite.
    pub metrics: BTreeMap<String, Option<f64>>,
    /// The state that is equal on all ranks: JSON text.
    pub state_json: String,
    /// The state of each rank: JSON text.
    pub per_rank_json: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    format: String,
    format_version: u32,
    step: i64,
    world_size: u32,
    attempt: String,
    tool: String,
    refers_to: Vec<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    committed_ns: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    root: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    metrics: BTreeMap<String, Option<f64>>,
    #[serde(default, skip_serializing_if = "is_false")]
    delta: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    referred: Vec<Referred>,
    files: Vec<FileRecord>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_false(flag: &bool) -> bool {
    !*flag
}

impl Manifest {
    /// The bytes to store.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let head = Head {
            format: FORMAT.into(),
            format_version: FORMAT_VERSION,
            step: self.step,
            world_size: self.world_size,
            attempt: self.attempt.clone(),
            tool: self.tool.clone(),
            refers_to: self.refers_to.clone(),
            committed_ns: self.committed_ns,
            root: self.root.clone(),
            metrics: self.metrics.clone(),
            delta: self.delta,
            referred: self.referred.clone(),
            files: self.files.clone(),
        };
        let mut text = serde_json::to_string(&head)
            .map_err(|e| Error::invalid("manifest", "encodable fields", e))?;
        text.pop();
        text.push_str(",\"state\":");
        text.push_str(one_value(&self.state_json, "state")?);
        text.push_str(",\"per_rank\":[");
        for (i, rank) in self.per_rank_json.iter().enumerate() {
            if i > 0 {
                text.push(',');
            }
            text.push_str(one_value(rank, "per-rank state")?);
        }
        text.push(']');
        let seal = format!("{SEAL}{:08x}{SEAL_END}", crc32c(text.as_bytes()));
        text.push_str(&seal);
        Ok(text.into_bytes())
    }

    /// Checks the seal, then reads. `file` names the manifest in errors.
    pub fn decode(bytes: &[u8], file: &str) -> Result<Self> {
        let text = unseal(bytes, file)?;
        let body = format!("{text}}}");
        let bad = |what: String| damaged(file, 0, "a manifest of this program", &what);
        let head: Head = serde_json::from_str(&body).map_err(|e| bad(e.to_string()))?;
        if head.format != FORMAT {
            return Err(bad(format!("format {:?}", head.format)));
        }
        if head.format_version > FORMAT_VERSION {
            return Err(Error::Unsupported {
                what: format!("{file} with format version {}", head.format_version),
                advice: "read it with a newer version of this program".into(),
            });
        }
        for record in head.files.iter().chain(head.referred.iter().map(|r| &r.file)) {
            check_relative(&record.path, file)?;
        }
        // Retention goes by the list of steps, so nothing may be missing from it.
        let named =
            |r: &&Referred| head.refers_to.contains(&r.step) && (0..head.step).contains(&r.step);
        if let Some(odd) = head.referred.iter().find(|r| !named(r)) {
            return Err(bad(format!("a file of step {} that refers_to does not name", odd.step)));
        }
        check_relative(&head.attempt, file)?;
        let spans = spans(&body, file)?;
        let find = |key: &str| {
            let found = spans.iter().find(|(name, _)| name == key);
            found.map(|(_, span)| body[span.clone()].to_string())
        };
        let state_json = find("state").ok_or_else(|| bad("no state".into()))?;
        let per_rank = find("per_rank").ok_or_else(|| bad("no per_rank".into()))?;
        Ok(Self {
            step: head.step,
            world_size: head.world_size,
            attempt: head.attempt,
            files: head.files,
            refers_to: head.refers_to,
            referred: head.referred,
            delta: head.delta,
            tool: head.tool,
            committed_ns: head.committed_ns,
            root: head.root,
            metrics: head.metrics,
            state_json,
            per_rank_json: items(&per_rank, file)?,
        })
    }

    /// The record of a file.
    pub fn file(&self, path: &str) -> Option<&FileRecord> {
        self.files.iter().find(|f| f.path == path)
    }

    /// The record of a file that chunks lie in, of this step or the one that they refer to.
    pub fn file_of(&self, step_ref: Option<i64>, path: &str) -> Option<&FileRecord> {
        let Some(step) = step_ref else { return self.file(path) };
        let found = self.referred.iter().find(|r| r.step == step && r.file.path == path);
        found.map(|r| &r.file)
    }

    /// All files that it names, with the other step they lie in, if it is one.
    pub fn all_files(&self) -> impl Iterator<Item = (Option<i64>, &FileRecord)> {
        let own = self.files.iter().map(|f| (None, f));
        own.chain(self.referred.iter().map(|r| (Some(r.step), &r.file)))
    }
}

fn damaged(file: &str, offset: u64, expected: &str, found: &str) -> Error {
    Error::corrupt(file, offset, expected, found, "use an older step")
}

/// `text` without surrounding space, if it is exactly one JSON value.
fn one_value<'a>(text: &'a str, what: &str) -> Result<&'a str> {
    serde_json::from_str::<IgnoredAny>(text)
        .map_err(|e| Error::invalid(what, "one JSON value", e))?;
    Ok(text.trim())
}

/// The text before the seal, whose checksum holds.
fn unseal<'a>(bytes: &'a [u8], file: &str) -> Result<&'a str> {
    let seal_bytes = SEAL.len() + 8 + SEAL_END.len();
    let at = bytes.len().checked_sub(seal_bytes);
    let parts = at.map(|at| bytes.split_at(at)).and_then(|(body, seal)| {
        let digits = seal.strip_prefix(SEAL.as_bytes())?.strip_suffix(SEAL_END.as_bytes())?;
        let digits = std::str::from_utf8(digits).ok()?;
        Some((body, u32::from_str_radix(digits, 16).ok()?))
    });
    let Some((body, expected)) = parts else {
        let found = format!("{} bytes without it ({MANIFEST} truncated?)", bytes.len());
        return Err(damaged(file, bytes.len() as u64, "a final crc32c", &found));
    };
    let found = crc32c(body);
    if found != expected {
        let (expected, found) = (format!("crc32c {expected:08x}"), format!("{found:08x}"));
        return Err(damaged(file, 0, &expected, &found));
    }
    std::str::from_utf8(body).map_err(|e| damaged(file, e.valid_up_to() as u64, "UTF-8", "bytes"))
}

/// Where the values of a JSON object's keys lie in its text.
fn spans(body: &str, file: &str) -> Result<Vec<(String, Range<usize>)>> {
    let bad = |at: usize| damaged(file, at as u64, "a JSON object", "something else");
    let mut at = skip(body, 0, '{').ok_or_else(|| bad(0))?;
    let mut found = Vec::new();
    loop {
        let (key, after) = next::<String>(body, at).ok_or_else(|| bad(at))?;
        let start = skip(body, after, ':').ok_or_else(|| bad(after))?;
        let start = start + blank(&body[start..]);
        let (_, end) = next::<IgnoredAny>(body, start).ok_or_else(|| bad(start))?;
        found.push((key, start..end));
        match skip(body, end, ',') {
            Some(next) => at = next,
            None => return Ok(found),
        }
    }
}

/// The texts of a JSON array's items.
fn items(array: &str, file: &str) -> Result<Vec<String>> {
    let bad = || damaged(file, 0, "a JSON array of per-rank states", "something else");
    let mut at = skip(array, 0, '[').ok_or_else(bad)?;
    let mut found = Vec::new();
    while skip(array, at, ']').is_none() {
        let start = at + blank(&array[at..]);
        let (_, end) = next::<IgnoredAny>(array, start).ok_or_else(bad)?;
        found.push(array[start..end].to_string());
        at = skip(array, end, ',').unwrap_or(end);
    }
    Ok(found)
}

fn blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// Position after `symbol`, if that is what comes next.
fn skip(text: &str, at: usize, symbol: char) -> Option<usize> {
    let at = at + blank(text.get(at..)?);
    text[at..].starts_with(symbol).then(|| at + symbol.len_utf8())
}

/// The JSON value that starts at `at`, and where it ends.
fn next<'a, T: Deserialize<'a>>(text: &'a str, at: usize) -> Option<(T, usize)> {
    let mut values = serde_json::Deserializer::from_str(text.get(at..)?).into_iter::<T>();
    let value = values.next()?.ok()?;
    Some((value, at + values.byte_offset()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            step: 12,
            world_size: 2,
            attempt: "a-0000000000000001".into(),
            files: vec![FileRecord {
                path: "a-0000000000000001/tensors.arrow".into(),
                size_bytes: 10,
                crc32c: "0badcafe".into(),
                header_bytes: 0,
                header_crc32c: "00000000".into(),
                rank: 0,
            }],
            refers_to: vec![],
            referred: vec![],
            delta: false,
            tool: "drivetrain 0".into(),
            committed_ns: Some(1_700_000_000_123_456_789),
            root: Some("0123456789abcdef".into()),
            metrics: BTreeMap::from([("loss".into(), Some(0.1)), ("nan".into(), None)]),
            state_json: r#"{"big": 123456789012345678901234567890, "x":[1e400, -0.0, "},]"]}"#
                .into(),
            per_rank_json: vec!["{\"a\":1}".into(), "null".into()],
        }
    }

    #[test]
    fn state_text_survives_to_the_letter() {
        let bytes = manifest().encode().unwrap();
        assert_eq!(Manifest::decode(&bytes, "m").unwrap(), manifest());
        let mut none = manifest();
        none.per_rank_json.clear();
        assert_eq!(Manifest::decode(&none.encode().unwrap(), "m").unwrap(), none);
    }

    #[test]
    fn the_seal_is_the_last_key_over_all_before_its_comma() {
        let bytes = manifest().encode().unwrap();
        let text = std::str::from_utf8(&bytes).unwrap();
        let at = text.rfind(",\"crc32c\":\"").unwrap();
        let digits = &text[at + 11..at + 19];
        assert_eq!(digits, format!("{:08x}", crc32c(&bytes[..at])));
        assert_eq!(&text[at + 19..], "\"}");
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_noticed() {
        let bytes = manifest().encode().unwrap();
        for i in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[i] ^= 1 << bit;
                // The hex digits' case is no information.
                let same = bad.to_ascii_lowercase() == bytes && i >= bytes.len() - 10;
                assert_eq!(Manifest::decode(&bad, "m").is_ok(), same, "byte {i} bit {bit}");
            }
            assert!(Manifest::decode(&bytes[..i], "m").is_err());
        }
    }

    #[test]
    fn states_that_are_not_json_are_refused() {
        for bad in ["", "{", "1 2", "{} trailing"] {
            let mut m = manifest();
            m.state_json = bad.into();
            assert!(m.encode().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn names_outside_the_folder_are_refused() {
        let mut m = manifest();
        m.files[0].path = "../../etc/passwd".into();
        assert!(Manifest::decode(&m.encode().unwrap(), "m").is_err());
        let mut m = manifest();
        m.refers_to = vec![7];
        m.referred = vec![Referred { step: 7, file: m.files[0].clone() }];
        m.referred[0].file.path = "../step-00000001/x".into();
        assert!(Manifest::decode(&m.encode().unwrap(), "m").is_err());
    }

    #[test]
    fn files_of_other_steps_come_back_and_retention_is_told_of_them() {
        let mut m = manifest();
        (m.delta, m.refers_to) = (true, vec![7]);
        m.referred = vec![Referred { step: 7, file: m.files[0].clone() }];
        assert_eq!(Manifest::decode(&m.encode().unwrap(), "m").unwrap(), m);
        let path = m.files[0].path.clone();
        assert_eq!(m.file_of(Some(7), &path), Some(&m.files[0]));
        assert_eq!(m.file_of(Some(8), &path), None);
        assert_eq!(m.all_files().count(), 2);
        for refers_to in [vec![], vec![8]] {
            m.refers_to = refers_to;
            assert!(Manifest::decode(&m.encode().unwrap(), "m").is_err());
        }
        // Only earlier steps: so no two refer to each other.
        (m.refers_to, m.referred[0].step) = (vec![12], 12);
        assert!(Manifest::decode(&m.encode().unwrap(), "m").is_err());
    }

    #[test]
    fn a_manifest_without_references_says_nothing_of_them() {
        let text = String::from_utf8(manifest().encode().unwrap()).unwrap();
        assert!(!text.contains("referred") && !text.contains("delta"), "{text}");
    }
}
