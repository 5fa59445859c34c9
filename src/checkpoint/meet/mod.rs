//! How ranks meet: a key-value store with deadlines, never a collective.
//!
//! [`Meet`] is the store; [`Room`] is the protocol on it. A room's keys carry a session number that
//! rank 0 draws, so that what a killed run left behind can never be mistaken for an answer.
//! [`Words`] are what each rank says it is doing, for the error when it does not answer.

mod files;
mod memory;
mod room;
mod words;

pub use files::{FILES_FOLDER, FileMeet};
pub use memory::MemoryMeet;
pub use room::{Room, Tick, draw, missing_error, no_tick};
pub use words::{Doing, Progress, Words};

use crate::error::Result;

/// A key-value store that all ranks reach. Keys are short, of letters, digits, `-`, `.` and `/`.
pub trait Meet: std::fmt::Debug + Send + Sync {
    /// Sets a key, replacing an older value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value, if the key is set.
    fn try_get(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// Deletes a key; a missing one is no error.
    fn delete(&self, key: &str) -> Result<()>;

    /// Called by rank 0 when it is closed: removes what the place itself needed, if it is empty.
    fn leave(&self) -> Result<()> {
        Ok(())
    }
}
