//! `drivetrain check`: reads and decodes everything once, compares every source with what was
//! indexed, and reports each problem.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde::Serialize;

use crate::cli::args::DatasetArgs;
use crate::cli::output::{Bar, Output};
use crate::cli::{EXIT_OK, EXIT_PROBLEMS};
use crate::error::{Error, Result};
use crate::index::{BlobReader, BlobRef, SampleTable};
use crate::storage::StorageOptions;
use crate::transform::{ImageScratch, natural};

/// Problems that are listed; more are counted.
const PROBLEMS_MAX: usize = 10_000;
/// Threads, at most: reading is bound by storage sooner than this.
const THREADS_MAX: usize = 16;

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    dataset: DatasetArgs,
}

#[derive(Debug, Serialize)]
struct Problem {
    key: String,
    field: String,
    what: String,
}

#[derive(Debug, Default, Serialize)]
struct Report {
    samples: usize,
    blobs: usize,
    bytes: u64,
    problem_count: usize,
    problems: Vec<Problem>,
}

/// Checks the data set; 1 if there are problems.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    let (table, options) = args.dataset.open()?;
    let bar = out.progress(table.len() as u64, "checking");
    let report = check(&table, &options, &bar)?;
    drop(bar);
    out.answer(&report, text);
    Ok(if report.problem_count == 0 { EXIT_OK } else { EXIT_PROBLEMS })
}

fn text(report: &Report) -> String {
    let mut lines: Vec<_> =
        report.problems.iter().map(|p| format!("{} {}: {}", p.key, p.field, p.what)).collect();
    lines.push(format!(
        "{} samples, {} ranges, {} bytes: {}",
        report.samples,
        report.blobs,
        report.bytes,
        match report.problem_count {
            0 => "no problems".to_string(),
            n => format!("{n} problems"),
        }
    ));
    lines.join("\n")
}

struct Check<'a> {
    table: &'a SampleTable,
    bar: &'a Bar,
    next: AtomicUsize,
    /// Ranges that were read: neighbouring samples share most sweeps.
    seen: Mutex<HashSet<(u32, u64, u64)>>,
    report: Mutex<Report>,
}

fn check(table: &SampleTable, options: &StorageOptions, bar: &Bar) -> Result<Report> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS_MAX);
    let check = Check {
        table,
        bar,
        next: AtomicUsize::new(0),
        seen: Mutex::default(),
        report: Mutex::new(Report { samples: table.len(), ..Report::default() }),
    };
    let readers: Result<Vec<_>> = (0..threads).map(|_| BlobReader::new(table, options)).collect();
    std::thread::scope(|scope| {
        for reader in readers? {
            scope.spawn(|| check.run(reader));
        }
        Ok::<_, Error>(())
    })?;
    let mut report = check.report.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    report.problems.sort_by(|a, b| (&a.key, &a.field).cmp(&(&b.key, &b.field)));
    Ok(report)
}

impl Check<'_> {
    fn run(&self, mut reader: BlobReader) {
        let mut scratch = ImageScratch::default();
        loop {
            let row = self.next.fetch_add(1, Ordering::Relaxed);
            if row >= self.table.len() {
                return;
            }
            for field in 0..self.table.fields().len() {
                if self.table.is_blob(field) {
                    self.field(row, field, &mut reader, &mut scratch);
                }
            }
            self.bar.advance(1);
        }
    }

    fn field(&self, row: usize, field: usize, reader: &mut BlobReader, scratch: &mut ImageScratch) {
        match self.table.blob(field, row) {
            Ok(Some(blob)) => self.blob(row, field, &blob, reader, scratch),
            Ok(None) => {}
            Err(e) => self.problem(row, field, &e),
        }
        match self.table.sequence(field, row) {
            Ok(items) => {
                for item in items {
                    self.blob(row, field, &item.blob, reader, scratch);
                }
            }
            Err(e) => self.problem(row, field, &e),
        }
    }

    fn blob(
        &self,
        row: usize,
        field: usize,
        blob: &BlobRef,
        reader: &mut BlobReader,
        scratch: &mut ImageScratch,
    ) {
        let range = (blob.source, blob.offset, blob.length);
        if !self.seen.lock().is_ok_and(|mut seen| seen.insert(range)) {
            return;
        }
        let spec = &self.table.fields()[field];
        let file = reader.name(blob);
        let result = reader.read(blob).and_then(|bytes| {
            natural(spec.kind, &blob.codec, &spec.columns, bytes, scratch, &file)
                .map(|_| ())
                .map_err(|e| e.in_part(blob.offset))
        });
        if let Ok(mut report) = self.report.lock() {
            report.blobs += 1;
            report.bytes += blob.length;
        }
        if let Err(e) = result {
            self.problem(row, field, &e);
        }
    }

    fn problem(&self, row: usize, field: usize, error: &Error) {
        let Ok(mut report) = self.report.lock() else { return };
        report.problem_count += 1;
        if report.problems.len() < PROBLEMS_MAX {
            report.problems.push(Problem {
                key: self.table.key(row).to_string(),
                field: self.table.fields()[field].name.clone(),
                what: error.to_string(),
            });
        }
    }
}
