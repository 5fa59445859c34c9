//! Snapshot → write → commit → read back.
