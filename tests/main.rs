//! Integration tests in one binary (one link): contract suites, conformance, faults, style.
// Helpers outside `#[test]` functions are test code too; clippy cannot see that here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod index;
mod memory;
mod order;
mod s3_server;
mod store_contract;
mod synth;
mod uring;
