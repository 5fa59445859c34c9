//! One 512-byte tar header: v7, POSIX ustar and GNU.

use crate::error::{Error, Result};

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A file with contents.
    File,
    /// Directories, links, devices: no sample, and no contents whatever the size field says.
    Other,
    /// GNU long name of the next member.
    LongName,
    /// GNU long link target of the next member; of no interest.
    LongLink,
    /// PAX records for the next member.
    Pax,
    /// PAX records for all later members.
    PaxGlobal,
}

/// A parsed header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) name: Vec<u8>,
    pub(super) size_bytes: u64,
    pub(super) kind: Kind,
}

impl Header {
    /// Parses the header `block` that lies at `offset`.
    pub(super) fn parse(block: &[u8; 512], offset: u64) -> Result<Self> {
        check_sum(block, offset)?;
        let kind = match block[156] {
            0 | b'0' | b'7' => Kind::File,
            b'1'..=b'6' => Kind::Other,
            b'L' => Kind::LongName,
            b'K' => Kind::LongLink,
            b'x' => Kind::Pax,
            b'g' => Kind::PaxGlobal,
            other => {
                let what = format!("tar member type {:?} at byte {offset}", char::from(other));
                return Err(Error::Unsupported { what });
            }
        };
        let size_bytes = number(&block[124..136], offset + 124)?;
        // Links and devices may carry a size, but no contents follow.
        let size_bytes = if kind == Kind::Other { 0 } else { size_bytes };
        Ok(Self { name: name(block), size_bytes, kind })
    }
}

fn name(block: &[u8; 512]) -> Vec<u8> {
    let text = |range: std::ops::Range<usize>| {
        let bytes = &block[range];
        &bytes[..bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len())]
    };
    // Only POSIX has a prefix there; GNU keeps times in that place.
    let prefix = if &block[257..263] == b"ustar\0" { text(345..500) } else { &[] };
    let mut name = prefix.to_vec();
    if !prefix.is_empty() {
        name.push(b'/');
    }
    name.extend(text(0..100));
    name
}

/// Old tars summed signed bytes; both sums are right.
fn check_sum(block: &[u8; 512], offset: u64) -> Result<()> {
    let stored = number(&block[148..156], offset + 148)?;
    let bytes =
        || block.iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { b' ' } else { *b });
    let unsigned: u64 = bytes().map(u64::from).sum();
    let signed: i64 = bytes().map(|b| i64::from(b as i8)).sum();
    if stored == unsigned || i64::try_from(stored) == Ok(signed) {
        return Ok(());
    }
    Err(Error::Malformed {
        what: "tar header checksum",
        offset: offset + 148,
        expected: unsigned.to_string(),
        found: stored.to_string(),
    })
}

/// Octal text, or base-256 where the top bit is set (files over 8 GB).
fn number(field: &[u8], offset: u64) -> Result<u64> {
    let bad = || Error::Malformed {
        what: "tar number",
        offset,
        expected: "octal digits or base-256".into(),
        found: field.escape_ascii().to_string(),
    };
    if field[0] & 0x80 != 0 {
        // 0xff would begin a negative number, which no field here may be.
        let first = u64::from(field[0] & 0x7f);
        let step = |value: u64, byte: &u8| value.checked_mul(256)?.checked_add(u64::from(*byte));
        return field[1..].iter().try_fold(first, step).ok_or_else(bad);
    }
    let digits = field.iter().position(|b| matches!(b, 0 | b' '));
    let text = field.trim_ascii_start();
    let text = if text.len() == field.len() {
        &field[..digits.unwrap_or(field.len())]
    } else {
        &text[..text.iter().position(|b| matches!(b, 0 | b' ')).unwrap_or(text.len())]
    };
    let step = |value: u64, byte: &u8| {
        let digit = matches!(byte, b'0'..=b'7').then(|| u64::from(byte - b'0'))?;
        value.checked_mul(8)?.checked_add(digit)
    };
    text.iter().try_fold(0, step).ok_or_else(bad)
}
