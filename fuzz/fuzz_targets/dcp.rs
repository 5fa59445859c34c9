//! Fuzzes the dcp parser.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drivetrain_formats::fuzz::dcp(bytes));
