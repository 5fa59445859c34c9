//! What several tests share and none owns.

pub mod s3;
