//! Snapshot → write → commit → read back.

pub mod layout;
pub mod rects;
