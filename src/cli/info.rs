//! `drivetrain info`: what is in a data set.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::cli::EXIT_OK;
use crate::cli::args::DatasetArgs;
use crate::cli::output::Output;
use crate::error::Result;
use crate::index::SampleTable;

/// Keys shown as examples.
const KEYS_SHOWN: usize = 3;

/// Arguments of `info`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    dataset: DatasetArgs,
}

/// Opens the data set and describes it.
pub fn run(args: Args, out: &Output) -> Result<u8> {
    let (table, _) = args.dataset.open()?;
    describe(&table, out)?;
    Ok(EXIT_OK)
}

#[derive(Debug, Serialize)]
struct Info {
    root: String,
    index: Option<String>,
    format: String,
    fingerprint: String,
    samples: usize,
    scenes: usize,
    sources: usize,
    source_bytes: u64,
    missing_sources: usize,
    start_ns: Option<i64>,
    end_ns: Option<i64>,
    first_keys: Vec<String>,
    fields: Vec<Field>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Field {
    name: String,
    kind: &'static str,
    frame: Option<String>,
    columns: Vec<String>,
    samples: usize,
    bytes: u64,
    missing: usize,
}

/// Prints what a table holds.
pub(super) fn describe(table: &SampleTable, out: &Output) -> Result<()> {
    let info = collect(table)?;
    out.answer(&info, text);
    Ok(())
}

fn collect(table: &SampleTable) -> Result<Info> {
    let rows = 0..table.len();
    let scenes: BTreeSet<_> = rows.clone().map(|row| table.scene(row)).collect();
    let times = || rows.clone().map(|row| table.timestamp_ns(row));
    let (mut source_bytes, mut missing_sources) = (0, 0);
    for id in 0..table.source_count() {
        let source = table.source(id as u32)?;
        missing_sources += usize::from(source.is_missing());
        source_bytes += if source.is_missing() { 0 } else { source.size_bytes };
    }
    let fields = (0..table.fields().len()).map(|field| field_info(table, field));
    Ok(Info {
        root: table.root().to_string(),
        index: table.path().map(|path| path.display().to_string()),
        format: table.format().to_string(),
        fingerprint: table.fingerprint().to_string(),
        samples: table.len(),
        scenes: scenes.len(),
        sources: table.source_count(),
        source_bytes,
        missing_sources,
        start_ns: times().min(),
        end_ns: times().max(),
        first_keys: rows.clone().take(KEYS_SHOWN).map(|row| table.key(row).to_string()).collect(),
        fields: fields.collect(),
        notes: table.notes().iter().map(|note| (*note).to_string()).collect(),
    })
}

fn field_info(table: &SampleTable, field: usize) -> Field {
    let spec = &table.fields()[field];
    let (mut samples, mut bytes, mut missing) = (0, 0, 0);
    if table.is_blob(field) {
        for row in 0..table.len() {
            match table.blob(field, row) {
                Ok(Some(blob)) => {
                    samples += 1;
                    bytes += blob.length;
                }
                Ok(None) => {}
                Err(_) => missing += 1,
            }
        }
    } else {
        samples = (0..table.len()).filter(|row| table.has_value(field, *row)).count();
    }
    Field {
        name: spec.name.clone(),
        kind: spec.kind.name(),
        frame: spec.frame.clone(),
        columns: spec.columns.clone(),
        samples,
        bytes,
        missing,
    }
}

fn text(info: &Info) -> String {
    let mut lines = vec![
        format!("{} of {}", info.format, info.root),
        format!("  index        {}", info.index.as_deref().unwrap_or("in memory")),
        format!("  fingerprint  {}", info.fingerprint),
        format!("  samples      {} in {} scenes", info.samples, info.scenes),
        format!("  files        {} ({})", info.sources, human_bytes(info.source_bytes)),
        format!("  first keys   {}", info.first_keys.join(" ")),
    ];
    if let Some((start, end)) = info.start_ns.zip(info.end_ns).filter(|(s, e)| e > s) {
        let span_s = (end - start) as f64 * 1e-9;
        lines.push(format!("  time         {start} to {end} ns ({span_s:.1} s)"));
    }
    lines.push(format!(
        "  {:<28} {:<12} {:<12} {:>9} {:>10}",
        "field", "kind", "frame", "samples", "size"
    ));
    for field in &info.fields {
        let size = if field.bytes > 0 { human_bytes(field.bytes) } else { String::new() };
        let mut line = format!(
            "  {:<28} {:<12} {:<12} {:>9} {size:>10}",
            field.name,
            field.kind,
            field.frame.as_deref().unwrap_or(""),
            field.samples,
        );
        if field.missing > 0 {
            line = format!("{line}  {} missing", field.missing);
        }
        lines.push(line.trim_end().to_string());
    }
    lines.extend(info.notes.iter().map(|note| format!("  note: {note}")));
    lines.join("\n")
}

fn human_bytes(bytes: u64) -> String {
    let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let unit = units.iter().find(|(_, size)| bytes >= *size);
    unit.map_or(format!("{bytes} B"), |(name, size)| {
        format!("{:.1} {name}", bytes as f64 / *size as f64)
    })
}
