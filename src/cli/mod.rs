//! The `drivetrain` program: one file per verb. Exit codes: 0 ok, 1 problems found, 2 usage.
//!
//! A verb is a file with `pub struct Args` (clap) and `pub fn run(Args, &Output) -> Result<u8>`,
//! a variant of [`Verb`] and an arm of [`dispatch`]. It prints through [`Output`] only, so that
//! `--json` and terminals are decided in one place, and returns errors instead of printing them.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{Error, Result};

pub mod args;
pub mod check;
pub mod ckpt;
pub mod doctor;
pub mod index;
pub mod info;
pub mod output;
pub mod synth;
pub mod view;

use output::Output;

/// Everything is fine.
pub const EXIT_OK: u8 = 0;
/// The verb ran and found problems, or could not finish.
pub const EXIT_PROBLEMS: u8 = 1;
/// The command line makes no sense.
pub const EXIT_USAGE: u8 = 2;

/// Data loading and checkpoints for training autonomous-driving models.
#[derive(Debug, Parser)]
#[command(name = "drivetrain", version, arg_required_else_help = true)]
struct Program {
    /// Print one JSON document for programs instead of text for people
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

/// The verbs, in the order `--help` lists them.
#[derive(Debug, Subcommand)]
enum Verb {
    /// Make a deterministic nuScenes-layout driving dataset
    Synth(synth::Args),
    /// Read a data set's tables once and write its sample table
    Index(index::Args),
    /// Say what is in a data set
    Info(info::Args),
    /// Read and decode everything once and report each problem
    Check(check::Args),
    /// Write one sample as a page with pictures, points and boxes
    View(view::Args),
    /// List, inspect, verify, compare, prune and adopt checkpoints
    Ckpt(ckpt::Args),
    /// Say what this machine offers and what to change
    Doctor(doctor::Args),
}

fn dispatch(verb: Verb, out: &Output) -> Result<u8> {
    match verb {
        Verb::Synth(args) => synth::run(args, out),
        Verb::Index(args) => index::run(args, out),
        Verb::Info(args) => info::run(args, out),
        Verb::Check(args) => check::run(args, out),
        Verb::View(args) => view::run(args, out),
        Verb::Ckpt(args) => ckpt::run(args, out),
        Verb::Doctor(args) => doctor::run(args, out),
    }
}

/// Runs the program with its arguments (the first is the program's name).
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    ExitCode::from(run_code(args))
}

/// As [`run`], with the exit code as a number, for callers that are not a process of their own.
pub fn run_code(args: impl IntoIterator<Item = OsString>) -> u8 {
    let program = match Program::try_parse_from(args) {
        Ok(program) => program,
        Err(usage) => return print_usage(&usage),
    };
    let out = Output::new(program.json);
    match dispatch(program.verb, &out) {
        Ok(code) => code,
        Err(error) => {
            out.error(&error);
            exit_code_of(&error)
        }
    }
}

/// Help and version are answers (stdout, 0); everything else clap says is a usage error.
fn print_usage(usage: &clap::Error) -> u8 {
    // A reader that closed the pipe does not want to hear about it.
    let _ = usage.print();
    if usage.use_stderr() { EXIT_USAGE } else { EXIT_OK }
}

fn exit_code_of(error: &Error) -> u8 {
    match error {
        Error::Invalid { .. } => EXIT_USAGE,
        _ => EXIT_PROBLEMS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(args: &[&str]) -> u8 {
        run_code(args.iter().map(OsString::from))
    }

    #[test]
    fn the_command_line_is_consistent() {
        <Program as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn help_is_ok_and_nonsense_is_usage() {
        assert_eq!(code(&["drivetrain", "--help"]), EXIT_OK);
        assert_eq!(code(&["drivetrain", "--version"]), EXIT_OK);
        assert_eq!(code(&["drivetrain"]), EXIT_USAGE);
        assert_eq!(code(&["drivetrain", "no-such-verb"]), EXIT_USAGE);
    }
}
