//! `drivetrain doctor`: what this machine offers, and what to change.

use crate::cli::EXIT_OK;
use crate::cli::output::Output;
use crate::error::Result;

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Probes the machine.
pub fn run(_args: Args, out: &Output) -> Result<u8> {
    out.answer(&serde_json::json!({"version": env!("CARGO_PKG_VERSION")}), |_| {
        format!("drivetrain {}", env!("CARGO_PKG_VERSION"))
    });
    Ok(EXIT_OK)
}
