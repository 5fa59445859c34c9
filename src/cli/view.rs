//! `drivetrain view`: one sample as a page for a browser.

use std::path::PathBuf;

use crate::cli::EXIT_OK;
use crate::cli::args::DatasetArgs;
use crate::cli::output::Output;
use crate::error::{Error, Result};
use crate::view;

/// Arguments of `view`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    dataset: DatasetArgs,
    /// Key of the sample, or the number of its row
    key: String,
    /// Page to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

/// Writes the page.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    let (table, options) = args.dataset.open()?;
    let by_key = table.find(&args.key);
    let by_row = args.key.parse().ok().filter(|row| *row < table.len());
    let page = match by_key.or(by_row) {
        Some(row) => view::page_of_row(&table, row, &options)?,
        None => view::page(&table, &args.key, &options)?,
    };
    std::fs::write(&args.out, &page)
        .map_err(|e| Error::io("write", args.out.display().to_string(), e))?;
    let answer = serde_json::json!({ "page": args.out, "bytes": page.len() });
    out.answer(&answer, |_| format!("wrote {} ({} bytes)", args.out.display(), page.len()));
    Ok(EXIT_OK)
}
