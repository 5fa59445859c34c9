//! `drivetrain index`: reads a data set's own tables once and writes its sample table.

use std::path::PathBuf;
use std::sync::Mutex;

use crate::cli::EXIT_OK;
use crate::cli::args::StorageArgs;
use crate::cli::info::describe;
use crate::cli::output::{Bar, Output};
use crate::error::Result;
use crate::index::{Progress, build_index, compress, open_dataset};
use crate::storage::StorageOptions;

/// Arguments of `index`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder, tar or info file
    uri: String,
    /// Index file to write, ending in .index.arrow; without it the index goes to the cache that
    /// `dt.open` uses
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// auto, nuscenes, nuscenes:<table folder>, webdataset or mmdet3d
    #[arg(long, default_value = "auto")]
    format: String,
    /// Also write zstd copies of the files for transport; `dt.open` opens the .index.arrow.zst
    #[arg(long)]
    compress: bool,
    #[command(flatten)]
    storage: StorageArgs,
}

/// Builds the index.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    let options = StorageOptions { options: args.storage.map() };
    let table = match &args.out {
        None => open_dataset(&args.uri, &args.format, None, &options)?,
        Some(path) => {
            let bars = Bars { out, bar: Mutex::default() };
            build_index(&args.uri, &args.format, Some(path), &options, &bars)?
        }
    };
    if args.compress
        && let Some(path) = table.path()
    {
        for copy in compress(path)? {
            out.note(format!("wrote {}", copy.display()));
        }
    }
    describe(&table, out)?;
    Ok(EXIT_OK)
}

/// Progress bars, one stage after the other.
struct Bars<'a> {
    out: &'a Output,
    bar: Mutex<Option<Bar>>,
}

impl Progress for Bars<'_> {
    fn stage(&self, name: &'static str, total: Option<u64>) {
        if let Ok(mut bar) = self.bar.lock() {
            *bar = Some(self.out.progress(total.unwrap_or(0), name));
        }
    }

    fn advance(&self, steps: u64) {
        if let Ok(bar) = self.bar.lock()
            && let Some(bar) = bar.as_ref()
        {
            bar.advance(steps);
        }
    }
}
