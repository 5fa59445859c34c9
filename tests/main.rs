//! Integration tests in one binary (one link): contract suites, conformance, faults, style.
// Helpers outside `#[test]` functions are test code too; clippy cannot see that here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checkpoint_layout;
mod ckpt_cli;
mod commit;
mod commit_faults;
mod compressed;
mod compressed_saves;
mod data_cli;
mod delta;
mod fault_matrix;
mod fault_store;
mod index;
mod loader;
mod memory;
mod mesh;
mod mmdet;
mod nuscenes;
mod order;
mod retain;
mod s3_faults;
mod s3_server;
mod seccomp;
mod store_contract;
mod style;
mod support;
mod synth;
mod uring;
mod webdataset;
