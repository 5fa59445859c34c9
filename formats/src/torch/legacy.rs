//! Files of `torch.save` before torch 1.6: pickles one after the other, then the storages.

use super::names::NAMES;
use crate::error::{Error, Result};
use crate::pickle::{Pickle, Value, View};

/// `0x1950a86a20f9469cfc6c`, little-endian.
const MAGIC: [u8; 10] = [0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
/// The one version there is.
const PROTOCOL: i64 = 1001;
/// Largest head that is read: the pickles of a file without its storages.
pub const HEAD_BYTES_MAX: u64 = 1 << 30;

/// The head of such a file.
#[derive(Debug)]
pub struct Legacy {
    /// The saved object.
    pub object: Pickle,
    /// Keys of the storages in the order they follow.
    pub keys: Vec<String>,
    /// Where the first storage starts: 8 bytes with its number of elements, then the elements.
    pub storages: u64,
}

/// Whether a file may start like this: a pickle of the magic number.
pub fn is_legacy(head: &[u8]) -> bool {
    head.windows(MAGIC.len()).take(16).any(|window| window == MAGIC)
}

/// Reads the head of a file. [`Error::Truncated`] asks for more of it.
pub fn legacy(bytes: &[u8]) -> Result<Legacy> {
    let mut at = 0;
    let mut next = || {
        let (pickle, end) = Pickle::parse_symbolic(&bytes[at..], NAMES)?;
        at += end;
        Ok::<_, Error>((pickle, at))
    };
    let bad = |offset: usize, expected: &str, found: &str| Error::Malformed {
        what: "torch.save file",
        offset: offset as u64,
        expected: expected.into(),
        found: found.into(),
    };
    let (magic, end) = next()?;
    if !matches!(magic.root().view(), View::Long(bytes) if bytes == MAGIC) {
        return Err(bad(0, "the magic number of torch.save", magic.root().kind()));
    }
    let (protocol, end) = next().map_err(|e| shifted(e, end))?;
    if protocol.root().as_i64() != Some(PROTOCOL) {
        return Err(bad(end, "protocol 1001", protocol.root().kind()));
    }
    let (system, end) = next().map_err(|e| shifted(e, end))?;
    let little = system.root().get("little_endian").and_then(Value::as_i64);
    if little != Some(1) {
        return Err(bad(end, "little-endian storages", "others"));
    }
    let (object, end) = next().map_err(|e| shifted(e, end))?;
    let (keys, storages) = next().map_err(|e| shifted(e, end))?;
    let View::List(list) = keys.root().view() else {
        return Err(bad(end, "a list of storage keys", keys.root().kind()));
    };
    let keys: Option<Vec<String>> = list.iter().map(|k| k.as_str().map(String::from)).collect();
    let keys = keys.ok_or_else(|| bad(end, "keys of text", "others"))?;
    Ok(Legacy { object, keys, storages: storages as u64 })
}

/// The same error with its offset in the file.
fn shifted(mut error: Error, by: usize) -> Error {
    if let Error::Truncated { offset, .. } | Error::Malformed { offset, .. } = &mut error {
        *offset += by as u64;
    }
    error
}
