//! Object stores through the `object_store` crate.
//!
//! | file | what it does |
//! |---|---|
//! | `adapter` | the `Store` trait over any `object_store::ObjectStore`, below a prefix |
//! | `commit` | conditional puts whose outcome is always known |
//! | `read` | ranged reads straight into buffers, in parallel where large |
//! | `write` | streamed writes as multipart uploads |
//! | `uploads` | uploads that nobody finished: found and aborted |
//! | `s3` | building the S3 client: options, time limits, counting |
//! | `keys` | names of options, and the nearest ones to a mistyped name |
//! | `error` | their errors as ours, without credentials |

mod adapter;
mod commit;
mod error;
mod keys;
mod read;
mod s3;
mod uploads;
mod write;

pub use adapter::ObjectStoreAdapter;
pub use keys::refuse_all;
pub use s3::{RetryPolicy, open_s3};
