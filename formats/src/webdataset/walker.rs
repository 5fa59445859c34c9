//! Walks the headers of a tar.

use super::BLOCK_BYTES;
use super::header::{Header, Kind};
use crate::error::{Error, Result};

/// Longest GNU name or PAX record block.
pub const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// Longest member name.
const NAME_BYTES_MAX: usize = 4096;

/// A file in the tar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Relative path below the tar's root.
    pub name: String,
    /// First byte of its contents.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// What the walker waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Header,
    /// Contents of an extension header.
    Extension(Kind, u64),
    /// Only zeros may follow.
    Trailer,
    Done,
}

/// Walks a tar of known size, from header to header.
#[derive(Debug)]
pub struct Walker {
    size_bytes: u64,
    position: u64,
    state: State,
    long_name: Option<Vec<u8>>,
    pax_name: Option<Vec<u8>>,
    pax_size_bytes: Option<u64>,
    zero_before: bool,
}

impl Walker {
    /// A walker at the start of a tar.
    pub fn new(size_bytes: u64) -> Self {
        Self {
            size_bytes,
            position: 0,
            state: State::Header,
            long_name: None,
            pax_name: None,
            pax_size_bytes: None,
            zero_before: false,
        }
    }

    /// The range to feed next: (offset, length). `None` at the end of the tar.
    pub fn want(&mut self) -> Result<Option<(u64, u64)>> {
        let left = self.size_bytes.saturating_sub(self.position);
        let need = match self.state {
            State::Done => return Ok(None),
            State::Extension(_, length) => length,
            State::Header | State::Trailer => BLOCK_BYTES,
        };
        if left >= need {
            return Ok(Some((self.position, need)));
        }
        // A tar may end at a header's place without its two zero blocks, but an empty file is none.
        let clean = left == 0 && self.state == State::Header && !self.has_pending();
        if (clean && self.position > 0) || self.state == State::Trailer {
            self.state = State::Done;
            return Ok(None);
        }
        Err(Error::Truncated { what: "tar header", offset: self.position, need, have: left })
    }

    /// Whether the end was marked with a zero block; if not, later members may have been cut off.
    pub fn end_was_marked(&self) -> bool {
        self.zero_before
    }

    fn has_pending(&self) -> bool {
        self.long_name.is_some() || self.pax_name.is_some() || self.pax_size_bytes.is_some()
    }

    /// Takes the wanted bytes. A member if they completed a file's header.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<Option<Member>> {
        let offset = self.position;
        if let State::Extension(kind, length) = self.state {
            self.state = State::Header;
            self.position += length.next_multiple_of(BLOCK_BYTES);
            return self.extension(kind, bytes, offset).map(|()| None);
        }
        let block = <&[u8; 512]>::try_from(bytes).map_err(|_| Error::Truncated {
            what: "tar header",
            offset,
            need: BLOCK_BYTES,
            have: bytes.len() as u64,
        })?;
        self.position += BLOCK_BYTES;
        if block.iter().all(|byte| *byte == 0) {
            self.zero_block(offset)?;
            return Ok(None);
        }
        if self.zero_before || self.state == State::Trailer {
            return Err(Error::Malformed {
                what: "end of the tar",
                offset,
                expected: "zeros to the end of the file".into(),
                found: "more data; unpack tars that were joined into one and pack them anew".into(),
            });
        }
        self.header(&Header::parse(block, offset)?, offset)
    }

    fn zero_block(&mut self, offset: u64) -> Result<()> {
        if self.has_pending() {
            return Err(Error::Malformed {
                what: "tar header",
                offset,
                expected: "the member that an extension header announced".into(),
                found: "the end".into(),
            });
        }
        if self.zero_before {
            self.state = State::Trailer;
        }
        self.zero_before = true;
        Ok(())
    }

    fn header(&mut self, header: &Header, offset: u64) -> Result<Option<Member>> {
        if header.kind != Kind::File && header.kind != Kind::Other {
            if header.size_bytes > EXTENSION_BYTES_MAX {
                return Err(Error::TooLarge {
                    what: "tar extension header",
                    offset,
                    found: header.size_bytes,
                    limit: EXTENSION_BYTES_MAX,
                });
            }
            self.state = State::Extension(header.kind, header.size_bytes);
            return Ok(None);
        }
        let raw = self.pax_name.take().or(self.long_name.take());
        self.long_name = None;
        let name = safe_name(raw.as_deref().unwrap_or(&header.name), offset)?;
        // A PAX size replaces the header's: a reader that used the header's would take contents
        // for headers.
        let length = self.pax_size_bytes.take().unwrap_or(header.size_bytes);
        if header.kind == Kind::Other {
            return Ok(None);
        }
        let start = self.position;
        let have = self.size_bytes - start;
        if length > have {
            return Err(Error::Truncated { what: "tar member", offset: start, need: length, have });
        }
        // The padding of the last member may be cut off.
        let next = start + length.next_multiple_of(BLOCK_BYTES);
        self.position = next.min(self.size_bytes);
        Ok(Some(Member { name, offset: start, length }))
    }

    fn extension(&mut self, kind: Kind, bytes: &[u8], offset: u64) -> Result<()> {
        match kind {
            Kind::LongName => {
                let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
                self.long_name = Some(bytes[..end].to_vec());
            }
            Kind::Pax => {
                for record in pax_records(bytes, offset) {
                    let (key, value, at) = record?;
                    self.pax(key, value, at)?;
                }
            }
            Kind::PaxGlobal => {
                for record in pax_records(bytes, offset) {
                    let (key, _, at) = record?;
                    if matches!(key, b"path" | b"size") {
                        let what = format!("a global tar {} at byte {at}", key.escape_ascii());
                        return Err(Error::Unsupported { what });
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn pax(&mut self, key: &[u8], value: &[u8], at: u64) -> Result<()> {
        match key {
            b"path" => self.pax_name = Some(value.to_vec()),
            b"size" => {
                let size = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
                let size = size.filter(|_| value.iter().all(u8::is_ascii_digit));
                self.pax_size_bytes = Some(size.ok_or_else(|| Error::Malformed {
                    what: "PAX size",
                    offset: at,
                    expected: "a number".into(),
                    found: value.escape_ascii().to_string(),
                })?);
            }
            sparse if sparse.starts_with(b"GNU.sparse.") => {
                return Err(Error::Unsupported {
                    what: format!("a sparse tar member at byte {at}"),
                });
            }
            _ => {}
        }
        Ok(())
    }
}

/// `length key=value\n`, the length counting itself. Yields (key, value, offset).
fn pax_records(bytes: &[u8], offset: u64) -> impl Iterator<Item = Result<(&[u8], &[u8], u64)>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..).filter(|rest| !rest.is_empty())?;
        let here = offset + at as u64;
        let parsed = pax_record(rest);
        at = parsed.map_or(bytes.len(), |(len, ..)| at + len);
        Some(parsed.map(|(_, key, value)| (key, value, here)).ok_or_else(|| Error::Malformed {
            what: "PAX record",
            offset: here,
            expected: "length key=value and a line end".into(),
            found: rest[..rest.len().min(40)].escape_ascii().to_string(),
        }))
    })
}

fn pax_record(rest: &[u8]) -> Option<(usize, &[u8], &[u8])> {
    let space = rest.iter().take(20).position(|b| *b == b' ')?;
    let digits = rest[..space].iter().all(u8::is_ascii_digit).then_some(&rest[..space])?;
    let len: usize = std::str::from_utf8(digits).ok()?.parse().ok()?;
    let body = rest.get(space + 1..len)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|b| *b == b'=')?;
    Some((len, &body[..equals], &body[equals + 1..]))
}

/// A relative UTF-8 path that stays below the root; `./` in front is dropped.
fn safe_name(raw: &[u8], offset: u64) -> Result<String> {
    let unsafe_name = || Error::UnsafeName {
        offset,
        found: raw.escape_ascii().to_string().chars().take(200).collect(),
    };
    let text = std::str::from_utf8(raw).map_err(|_| unsafe_name())?;
    let mut name = text.trim_end_matches('/');
    while let Some(rest) = name.strip_prefix("./") {
        name = rest;
    }
    let part_ok = |part: &str| !matches!(part, "" | "..") && !part.contains('\0');
    let is_root = name == ".";
    let ok = is_root || (!text.starts_with('/') && name.split('/').all(part_ok));
    if ok && name.len() <= NAME_BYTES_MAX { Ok(name.to_string()) } else { Err(unsafe_name()) }
}
