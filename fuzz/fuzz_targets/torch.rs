//! Fuzzes the torch parser.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drivetrain_formats::fuzz::torch(bytes));
