//! The fault matrix: every fault at every place of a save, what restores afterwards, what the
//! caller was told and what is left over. `docs/fault-matrix.md` is made from these results.
//!
//! Each section is a test. It runs its cases, fails if one ends with neither the old nor the new
//! step, and compares what it found with its part of the document; with `DRIVETRAIN_BLESS=1`
//! (`make fault-matrix`) it writes that part instead. The rows are kept as JSON lines in the build
//! folder's `tmp/fault-matrix/`.

mod damage;
mod outcome;
mod places;
mod ranks;
mod report;
mod restore;
mod s3;
mod save;
