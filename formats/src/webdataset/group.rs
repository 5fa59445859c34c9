//! Samples: runs of adjacent members that share their path up to the first dot of the base name.

use std::collections::HashSet;

use super::walker::Member;
use crate::error::{Error, Result};

/// A sample: its key and its members by extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Path up to the first dot of the base name.
    pub key: String,
    /// (extension in lower case, offset, length), in the tar's order.
    pub members: Vec<(String, u64, u64)>,
}

/// Collects members into samples.
#[derive(Debug, Default)]
pub struct Grouper {
    open: Option<Sample>,
    seen: HashSet<String>,
    skipped: u64,
    reopened: u64,
}

/// Key and extension of a member's name; `None` without an extension or with a hidden base name,
/// which WebDataset skips too.
pub fn split_name(name: &str) -> Option<(&str, String)> {
    let base = name.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name[base..].find('.')?;
    if dot == 0 {
        return None;
    }
    Some((&name[..base + dot], name[base + dot + 1..].to_lowercase()))
}

impl Grouper {
    /// Adds a member; the sample before it, if it ended there.
    pub fn push(&mut self, member: &Member) -> Result<Option<Sample>> {
        let Some((key, extension)) = split_name(&member.name) else {
            self.skipped += 1;
            return Ok(None);
        };
        let item = (extension, member.offset, member.length);
        if let Some(open) = self.open.as_mut().filter(|open| open.key == key) {
            if open.members.iter().any(|(known, ..)| *known == item.0) {
                return Err(Error::Malformed {
                    what: "tar member",
                    offset: member.offset,
                    expected: "each extension once per sample".into(),
                    found: format!("a second {}", member.name.escape_debug()),
                });
            }
            open.members.push(item);
            return Ok(None);
        }
        self.reopened += u64::from(!self.seen.insert(key.to_string()));
        Ok(self.open.replace(Sample { key: key.to_string(), members: vec![item] }))
    }

    /// The last sample.
    pub fn finish(&mut self) -> Option<Sample> {
        self.open.take()
    }

    /// Members without an extension, which belong to no sample.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Samples whose key came before, with others between: usually a tar that was not written
    /// sample by sample.
    pub fn reopened(&self) -> u64 {
        self.reopened
    }
}
