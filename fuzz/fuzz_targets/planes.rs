//! Fuzzes the decoder of compressed chunks.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drivetrain::checkpoint::codec::fuzz(bytes));
