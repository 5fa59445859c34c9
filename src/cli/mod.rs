//! The `drivetrain` program: one file per verb. Exit codes: 0 ok, 1 problems found, 2 usage.

use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the program with its arguments (the first is the program's name).
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    ExitCode::from(run_code(args))
}

/// As [`run`], with the exit code as a number, for callers that are not a process of their own.
pub fn run_code(args: impl IntoIterator<Item = OsString>) -> u8 {
    let _ = args.into_iter().count();
    2
}
