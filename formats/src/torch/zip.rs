//! Zip archives as `torch.save` writes them: stored, never compressed, so that every record is a
//! range of the file. Given the bytes of the archive's end, says where the directory is; given the
//! directory, where the records are.

use crate::error::{Error, Result};

/// Bytes at an archive's end that certainly hold the end records: a comment of 64 KiB and the rest.
pub const TAIL_BYTES_MAX: u64 = (1 << 16) + 256;
/// Largest directory; some hundred bytes per record.
pub const DIRECTORY_BYTES_MAX: u64 = 1 << 30;
/// Length of a record's own header without its name and extra field.
pub const LOCAL_BYTES: u64 = 30;

const END_MARK: u32 = 0x0605_4b50;
const END_BYTES: usize = 22;
const END64_MARK: u32 = 0x0606_4b50;
const LOCATOR_MARK: u32 = 0x0706_4b50;
const CENTRAL_MARK: u32 = 0x0201_4b50;
const CENTRAL_BYTES: usize = 46;
const LOCAL_MARK: u32 = 0x0403_4b50;
/// Tag of the extra field with 64-bit sizes.
const ZIP64_TAG: u16 = 1;
/// First bytes of an archive.
pub const MAGIC: &[u8; 4] = b"PK\x03\x04";

/// Where the directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Directory {
    /// Its offset in the archive.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
    /// Records it lists.
    pub records: u64,
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its name.
    pub name: String,
    /// Offset of its own header in the archive.
    pub header: u64,
    /// Length of its data.
    pub bytes: u64,
    /// CRC-32 (IEEE) of its data; writers may leave it wrong.
    pub crc32: u32,
}

fn bad(offset: u64, expected: &str, found: impl std::fmt::Display) -> Error {
    let found = found.to_string();
    Error::Malformed { what: "zip archive", offset, expected: expected.into(), found }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?)))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// Finds the directory from the last bytes of an archive of `size` bytes.
pub fn directory(tail: &[u8], size: u64) -> Result<Directory> {
    let start = size.saturating_sub(tail.len() as u64);
    let last = tail.len().checked_sub(END_BYTES);
    let end = last.and_then(|last| {
        (0..=last).rev().find(|&at| {
            let comment = u16_at(tail, at + 20).map(|n| n as usize);
            u32_at(tail, at) == Some(END_MARK.into())
                && comment == Some(tail.len() - at - END_BYTES)
        })
    });
    let end = end.ok_or_else(|| bad(size, "the end of a zip archive", "none (truncated?)"))?;
    let at = start + end as u64;
    let read = |offset| u32_at(tail, end + offset).unwrap_or_default();
    let mut found = Directory {
        records: u16_at(tail, end + 10).unwrap_or_default(),
        bytes: read(12),
        offset: read(16),
    };
    let wide = found.records == 0xffff || found.bytes == 0xffff_ffff || found.offset == 0xffff_ffff;
    let limit = if wide { wide_directory(tail, start, end, &mut found)? } else { at };
    let fits = found.offset.checked_add(found.bytes).is_some_and(|end| end <= limit);
    if !fits || found.bytes > DIRECTORY_BYTES_MAX {
        let range = format!("{} bytes from {}", found.bytes, found.offset);
        return Err(bad(at, "a directory before the end records", range));
    }
    Ok(found)
}

/// Reads the 64-bit end record; returns where it starts.
fn wide_directory(tail: &[u8], start: u64, end: usize, found: &mut Directory) -> Result<u64> {
    let none = || bad(start + end as u64, "64-bit end records", "none");
    let locator = end.checked_sub(20).ok_or_else(none)?;
    if u32_at(tail, locator) != Some(LOCATOR_MARK.into()) {
        return Err(none());
    }
    let offset = u64_at(tail, locator + 8).ok_or_else(none)?;
    let at = offset.checked_sub(start).and_then(|at| usize::try_from(at).ok());
    let at = at.filter(|&at| at < locator).ok_or_else(none)?;
    if u32_at(tail, at) != Some(END64_MARK.into()) {
        return Err(none());
    }
    found.records = u64_at(tail, at + 32).ok_or_else(none)?;
    found.bytes = u64_at(tail, at + 40).ok_or_else(none)?;
    found.offset = u64_at(tail, at + 48).ok_or_else(none)?;
    Ok(offset)
}

/// The records of a directory, sorted by where they lie; none overlaps another.
pub fn records(bytes: &[u8], directory: Directory) -> Result<Vec<Record>> {
    let mut all = Vec::new();
    let mut at = 0;
    for _ in 0..directory.records {
        if bytes.len() - at < CENTRAL_BYTES {
            let (offset, have) = (directory.offset + at as u64, (bytes.len() - at) as u64);
            let need = CENTRAL_BYTES as u64;
            return Err(Error::Truncated { what: "zip directory", offset, need, have });
        }
        let (record, next) = record(bytes, at, directory.offset)?;
        at = next;
        all.push(record);
    }
    all.sort_by_key(|r| r.header);
    let ends = all.iter().skip(1).map(|r| r.header).chain([directory.offset]);
    for (record, end) in all.iter().zip(ends) {
        let least = LOCAL_BYTES + record.name.len() as u64;
        let fits = least.checked_add(record.bytes).and_then(|n| n.checked_add(record.header));
        if fits.is_none_or(|fits| fits > end) {
            let found = format!("{} of {} bytes", record.name.escape_debug(), record.bytes);
            return Err(bad(record.header, "a record that ends before the next begins", found));
        }
    }
    Ok(all)
}

fn record(bytes: &[u8], at: usize, base: u64) -> Result<(Record, usize)> {
    let offset = base + at as u64;
    let half = |i: usize| u16_at(bytes, at + i).unwrap_or_default();
    let word = |i: usize| u32_at(bytes, at + i).unwrap_or_default();
    if word(0) != u64::from(CENTRAL_MARK) {
        return Err(bad(offset, "an entry of the directory", format!("{:08x}", word(0))));
    }
    let (flags, method) = (half(8), half(10));
    if flags & 1 != 0 || method != 0 {
        let what = format!("a zip record with method {method} and flags {flags:#x}");
        return Err(Error::Unsupported { what });
    }
    let (name_bytes, extra_bytes, comment_bytes) = (half(28), half(30), half(32));
    let name_at = at + CENTRAL_BYTES;
    let extra_at = name_at + name_bytes as usize;
    let next = extra_at + extra_bytes as usize + comment_bytes as usize;
    let (Some(name), Some(extra)) = (
        bytes.get(name_at..extra_at),
        bytes.get(extra_at..extra_at + extra_bytes as usize).filter(|_| next <= bytes.len()),
    ) else {
        return Err(bad(offset, "a name inside the directory", "its end"));
    };
    let name = checked_name(name, offset)?;
    let mut values = [word(24), word(20), word(42)];
    widen(extra, &mut values).ok_or_else(|| bad(offset, "64-bit sizes", "none"))?;
    let [size, packed, header] = values;
    if size != packed {
        return Err(bad(offset, "a stored record", format!("{packed} bytes for {size}")));
    }
    Ok((Record { name, header, bytes: size, crc32: word(16) as u32 }, next))
}

fn checked_name(name: &[u8], offset: u64) -> Result<String> {
    let text = std::str::from_utf8(name).ok().filter(|text| {
        !text.is_empty()
            && !text.contains(['\\', '\0'])
            && !text.split('/').any(|part| part == ".." || part == ".")
            && !text.starts_with('/')
    });
    let unsafe_name = || {
        let found = String::from_utf8_lossy(name).escape_debug().to_string();
        Error::UnsafeName { offset, found }
    };
    text.map(String::from).ok_or_else(unsafe_name)
}

/// Replaces values that are all ones by those of the 64-bit field, in its order.
fn widen(extra: &[u8], values: &mut [u64; 3]) -> Option<()> {
    if values.iter().all(|&v| v != 0xffff_ffff) {
        return Some(());
    }
    let mut at = 0;
    loop {
        let (tag, bytes) = (u16_at(extra, at)?, u16_at(extra, at + 2)? as usize);
        let field = extra.get(at + 4..at + 4 + bytes)?;
        if tag == u64::from(ZIP64_TAG) {
            let mut next = 0;
            for value in values.iter_mut().filter(|v| **v == 0xffff_ffff) {
                *value = u64_at(field, next)?;
                next += 8;
            }
            return Some(());
        }
        at += 4 + bytes;
    }
}

/// Where a record's data starts, from its own header's first [`LOCAL_BYTES`].
pub fn data_start(local: &[u8], record: &Record) -> Result<u64> {
    let mark = u32_at(local, 0);
    let lengths = u16_at(local, 26).zip(u16_at(local, 28));
    match (mark, lengths) {
        (Some(mark), Some((name, extra))) if mark == u64::from(LOCAL_MARK) => {
            Ok(record.header + LOCAL_BYTES + name + extra)
        }
        _ => Err(bad(record.header, "the header of a record", "something else")),
    }
}
