//! The seal of a staged slot: what lets another process believe it.
//!
//! ```text
//! slot:   head page │ file images, each from a page on │ record
//! head:   0 "dt-slot1"   8 version u32   12 zero u32   16 step i64   24 record start u64
//!         32 record bytes u64   40 record crc32c u32   44 crc32c of bytes 0..44 u32
//!         48 session u64   56 the same, inverted       (all little-endian)
//! record: five parts, each its length as u64 and its bytes:
//!         identity (JSON), state (JSON), state of the rank (JSON), layout (JSON), checksums (u32)
//! ```
//!
//! The head is wiped before the first byte of a new state is copied and written after the last, so
//! a process that is killed at any moment leaves a whole snapshot or none: the kernel keeps shared
//! memory as the dead process last wrote it. Checksums of the images' parts are in the record, and
//! that of the record in the head, for memory that was changed by somebody else since.
//!
//! The session number may come later than the seal, when the ranks first meet.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use serde::{Deserialize, Serialize};

use crate::checkpoint::layout::crc32c;
use crate::error::{Error, Result};
use crate::memory::{PAGE_BYTES, Slot};

/// Where the images start: after the head.
pub const DATA_START: usize = PAGE_BYTES;
const MAGIC: &[u8; 8] = b"dt-slot1";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 48;
const SESSION_AT: usize = 48;
/// Parts of a record.
const PARTS: usize = 5;

/// Whose snapshot it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The run.
    pub run: String,
    /// What tells this checkpoint root from a later one of the same name.
    pub root: String,
    /// The rank that staged it.
    pub rank: u32,
    /// Ranks that saved together.
    pub world_size: u32,
    /// The step.
    pub step: i64,
    /// Number of the save call.
    pub op: u64,
    /// Whether the save may replace a committed step.
    pub overwrite: bool,
    /// What was measured of the state.
    #[serde(default)]
    pub metrics: BTreeMap<String, Option<f64>>,
    /// The first rank of its stage, if there are several.
    #[serde(default)]
    pub stage: Option<u32>,
}

/// What is stored beside the images.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// JSON of [`Identity`].
    pub identity: &'a [u8],
    /// State that is equal on all ranks.
    pub state: &'a [u8],
    /// State of the rank.
    pub per_rank: &'a [u8],
    /// Files and pieces, as `planned` encodes them.
    pub layout: &'a [u8],
    /// Checksums of the images' parts, little-endian.
    pub sums: &'a [u8],
}

impl<'a> Record<'a> {
    fn parts(&self) -> [&'a [u8]; PARTS] {
        [self.identity, self.state, self.per_rank, self.layout, self.sums]
    }

    /// Bytes of the record in the slot.
    pub fn bytes(&self) -> usize {
        self.parts().iter().map(|part| part.len() + 8).sum()
    }

    fn write(&self, to: &mut [u8]) -> Option<()> {
        let mut at = 0;
        for part in self.parts() {
            let length = (part.len() as u64).to_le_bytes();
            for piece in [&length[..], part] {
                to.get_mut(at..at + piece.len())?.copy_from_slice(piece);
                at += piece.len();
            }
        }
        Some(())
    }

    fn read(mut from: &'a [u8]) -> Option<Self> {
        let mut parts = [&[][..]; PARTS];
        for part in &mut parts {
            let (length, rest) = from.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            (*part, from) = rest.split_at_checked(length)?;
        }
        let [identity, state, per_rank, layout, sums] = parts;
        Some(Self { identity, state, per_rank, layout, sums })
    }
}

/// Says that the slot holds nothing, before anything of it is overwritten.
pub fn wipe(slot: &mut Slot) {
    if let Some(head) = slot.get_mut(..PAGE_BYTES) {
        head.fill(0);
    }
    // The kernel keeps stores in the order in which they are made; the compiler might not.
    fence(Ordering::SeqCst);
}

/// Writes the record behind the images and then the head. The slot must have room for it.
pub fn seal(slot: &mut Slot, step: i64, start: usize, record: &Record<'_>) -> Result<()> {
    let bytes = record.bytes();
    let place = slot.get_mut(start..start + bytes).and_then(|to| record.write(to).map(|()| &*to));
    let Some(sum) = place.map(crc32c) else {
        return Err(Error::invalid("slot", format!("{bytes} bytes at {start}"), slot.len()));
    };
    fence(Ordering::SeqCst);
    let mut head = Vec::with_capacity(HEAD_BYTES);
    head.extend_from_slice(MAGIC);
    head.extend_from_slice(&VERSION.to_le_bytes());
    head.extend_from_slice(&[0; 4]);
    head.extend_from_slice(&step.to_le_bytes());
    head.extend_from_slice(&(start as u64).to_le_bytes());
    head.extend_from_slice(&(bytes as u64).to_le_bytes());
    head.extend_from_slice(&sum.to_le_bytes());
    head.extend_from_slice(&crc32c(&head).to_le_bytes());
    if let Some(to) = slot.get_mut(..HEAD_BYTES) {
        to.copy_from_slice(&head);
    }
    Ok(())
}

/// Whether a slot is sealed.
pub fn is_sealed(slot: &Slot) -> bool {
    matches!(Head::read(slot), Ok(Some(_)))
}

/// The head of a sealed slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The step.
    pub step: i64,
    /// Where the record starts, which is where the images end.
    pub record_start: usize,
    record_bytes: usize,
    record_crc32c: u32,
}

impl Head {
    /// The head; `None` if the slot holds nothing or was not finished.
    pub fn read(slot: &Slot) -> Result<Option<Self>> {
        let Some(head) = slot.get(..HEAD_BYTES) else { return Ok(None) };
        let word = |at: usize| head[at..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b));
        let long = |at: usize| head[at..].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        if head[..8] != *MAGIC || word(44) != crc32c(&head[..44]) {
            return Ok(None);
        }
        if word(8) != VERSION {
            return Err(Error::Unsupported {
                what: format!("a staged snapshot of version {}", word(8)),
                advice: "adopt it with the version that staged it".into(),
            });
        }
        Ok(Some(Self {
            step: long(16).cast_signed(),
            record_start: usize::try_from(long(24)).unwrap_or(usize::MAX),
            record_bytes: usize::try_from(long(32)).unwrap_or(usize::MAX),
            record_crc32c: word(40),
        }))
    }

    /// The record, whose checksum holds.
    pub fn record<'a>(&self, slot: &'a Slot) -> Result<Record<'a>> {
        let bad = |expected: &str, found: String| {
            let file = slot.path().map(|p| p.display().to_string()).unwrap_or_default();
            Error::corrupt(file, self.record_start as u64, expected, found, "it is not adopted")
        };
        let end = self.record_start.checked_add(self.record_bytes);
        let bytes = end.and_then(|end| slot.get(self.record_start..end));
        let bytes = bytes.ok_or_else(|| bad("a record inside the slot", format!("{self:?}")))?;
        let found = crc32c(bytes);
        if found != self.record_crc32c {
            return Err(bad(&format!("crc32c {:08x}", self.record_crc32c), format!("{found:08x}")));
        }
        Record::read(bytes).ok_or_else(|| bad("five parts", format!("{} bytes", bytes.len())))
    }
}

#[allow(clippy::cast_ptr_alignment, reason = "a slot starts on a page")]
fn session_words(slot: &Slot) -> Option<[&AtomicU64; 2]> {
    slot.get(..PAGE_BYTES)?;
    // SAFETY: both words lie in the head page, 8-aligned, of memory that lives as long as the slot
    // and is only accessed as atomics while the slot is shared.
    let word = |at: usize| unsafe { &*slot.as_ptr().add(at).cast::<AtomicU64>() };
    Some([word(SESSION_AT), word(SESSION_AT + 8)])
}

/// Adds the number of the ranks' session to a sealed slot.
pub fn set_session(slot: &Slot, session: u64) {
    if let Some([word, inverted]) = session_words(slot) {
        word.store(session, Ordering::SeqCst);
        inverted.store(!session, Ordering::SeqCst);
    }
}

/// The session in which a slot was staged, if the ranks had met.
pub fn session(slot: &Slot) -> Option<u64> {
    let [word, inverted] = session_words(slot)?.map(|word| word.load(Ordering::SeqCst));
    (word == !inverted && word != 0).then_some(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: Record<'_> =
        Record { identity: b"{}", state: b"[1]", per_rank: b"", layout: b"xyz", sums: &[7; 8] };

    fn sealed() -> Slot {
        let mut slot = Slot::private(3 * PAGE_BYTES).unwrap();
        wipe(&mut slot);
        seal(&mut slot, -5, 2 * PAGE_BYTES, &RECORD).unwrap();
        slot
    }

    #[test]
    fn what_was_sealed_is_found_and_a_wiped_slot_is_empty() {
        let mut slot = sealed();
        let head = Head::read(&slot).unwrap().unwrap();
        assert_eq!((head.step, head.record_start), (-5, 2 * PAGE_BYTES));
        assert_eq!(head.record(&slot).unwrap().parts(), RECORD.parts());
        assert_eq!(session(&slot), None);
        set_session(&slot, 0xABCD);
        assert_eq!(session(&slot), Some(0xABCD));
        assert!(is_sealed(&slot));
        wipe(&mut slot);
        assert!(!is_sealed(&slot) && session(&slot).is_none());
        assert!(!is_sealed(&Slot::private(10).unwrap()));
    }

    #[test]
    fn every_flipped_bit_of_head_and_record_is_noticed() {
        let mut slot = sealed();
        let record = 2 * PAGE_BYTES..2 * PAGE_BYTES + RECORD.bytes();
        for at in (0..HEAD_BYTES).chain(record) {
            for bit in 0..8 {
                slot[at] ^= 1 << bit;
                let found = Head::read(&slot).unwrap().map(|head| head.record(&slot).is_ok());
                assert_ne!(found, Some(true), "byte {at} bit {bit}");
                slot[at] ^= 1 << bit;
            }
        }
        assert!(Head::read(&slot).unwrap().unwrap().record(&slot).is_ok());
    }

    #[test]
    fn lengths_that_lead_outside_are_refused() {
        let mut slot = Slot::private(2 * PAGE_BYTES).unwrap();
        assert!(seal(&mut slot, 1, 2 * PAGE_BYTES - 8, &RECORD).is_err());
        assert!(!is_sealed(&slot));
        for n in 0..RECORD.bytes() {
            let mut bytes = vec![0; RECORD.bytes()];
            RECORD.write(&mut bytes).unwrap();
            assert!(Record::read(&bytes[..n]).is_none());
            bytes[7] = 0xFF;
            assert!(Record::read(&bytes).is_none());
        }
    }
}
