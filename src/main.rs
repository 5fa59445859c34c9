//! The `drivetrain` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    drivetrain::cli::run(std::env::args_os())
}
