//! WebDataset tars: byte ranges of members, and samples as runs of neighbours.
//!
//! [`Walker`] reads headers only. It asks for a range with [`Walker::want`], gets it through
//! [`Walker::feed`] and skips the contents: indexing a terabyte costs a header per member.

mod group;
mod header;
mod walker;

pub use group::{Grouper, Sample, split_name};
pub use walker::{EXTENSION_BYTES_MAX, Member, Walker};

/// Size of a tar block.
pub const BLOCK_BYTES: u64 = 512;

#[cfg(test)]
mod tests;
