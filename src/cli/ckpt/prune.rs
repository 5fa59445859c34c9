//! `drivetrain ckpt prune` and `adopt`: which steps stay, by a person's word.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::{Place, human_bytes};
use crate::checkpoint::{
    Adopted, Best, Keep, Known, adopt as adopt_step, committed, open_step, remove_steps,
    superfluous,
};
use crate::cli::args::parse_duration;
use crate::cli::output::Output;
use crate::cli::{EXIT_OK, EXIT_PROBLEMS};
use crate::error::{Error, Result};
use crate::runtime::block_on;

/// Arguments of `ckpt prune`.
#[derive(Debug, clap::Args)]
pub struct Prune {
    #[command(flatten)]
    place: Place,
    /// Keep this many newest good steps
    #[arg(long, value_name = "N")]
    keep_last: u32,
    /// Also keep every step that is a multiple of this
    #[arg(long, value_name = "K")]
    keep_every: Option<i64>,
    /// Also keep this many best steps by --metric
    #[arg(long, value_name = "N", requires = "metric")]
    keep_best: Option<u32>,
    /// Name of the metric that the saves were given
    #[arg(long, value_name = "NAME", requires = "keep_best")]
    metric: Option<String>,
    /// Whether a low or a high metric is better
    #[arg(long, value_parser = ["min", "max"], default_value = "min")]
    mode: String,
    /// Also keep steps committed within this time, such as 7d
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_within: Option<Duration>,
    /// Also keep steps this far apart in time, such as 1h
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    keep_interval: Option<Duration>,
    /// Only say what would be removed
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct Pruned {
    dry_run: bool,
    removed: Vec<RemovedRow>,
    kept: Vec<i64>,
}

#[derive(Serialize)]
struct RemovedRow {
    step: i64,
    size_bytes: u64,
}

pub fn prune(args: &Prune, out: &Output) -> Result<u8> {
    let store = args.place.open()?;
    let best = args.keep_best.zip(args.metric.clone());
    let keep = Keep {
        last: Some(args.keep_last),
        every: args.keep_every,
        best: best.map(|(count, metric)| Best { count, metric, highest: args.mode == "max" }),
        within: args.keep_within,
        interval: args.keep_interval,
    };
    let victims = block_on(superfluous(store.as_ref(), &keep))??;
    let bar = out.progress(victims.len() as u64, "steps removed");
    // All sizes first: a step whose manifest is gone has none.
    let size = |step| open_step(&store, step).map_or(0, |open| open.size_bytes());
    let row = |victim: &Known| RemovedRow { step: victim.step, size_bytes: size(victim.step) };
    let removed: Vec<RemovedRow> = victims.iter().map(row).collect();
    if !args.dry_run {
        let mut done = |step| {
            bar.message(format!("step {step}"));
            bar.advance(1);
        };
        block_on(remove_steps(store.as_ref(), &victims, &mut done))??;
    }
    drop(bar);
    let gone = |step: &i64| removed.iter().any(|row| row.step == *step);
    let steps = block_on(committed(store.as_ref()))??;
    let kept = steps.into_iter().filter(|step| !gone(step)).collect();
    out.answer(&Pruned { dry_run: args.dry_run, removed, kept }, pruned_text);
    Ok(EXIT_OK)
}

fn pruned_text(it: &Pruned) -> String {
    let verb = if it.dry_run { "would remove" } else { "removed" };
    let mut text = String::new();
    for row in &it.removed {
        let _ = writeln!(text, "{verb} step {} ({})", row.step, human_bytes(row.size_bytes));
    }
    let total = it.removed.iter().map(|row| row.size_bytes).sum();
    let (n, kept) = (it.removed.len(), it.kept.len());
    let _ = writeln!(text, "{verb} {n} steps with {}, {kept} stay", human_bytes(total));
    text
}

/// Arguments of `ckpt adopt`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["step", "all"])))]
pub struct Adopt {
    #[command(flatten)]
    place: Place,
    /// Step to adopt
    #[arg(long)]
    step: Option<i64>,
    /// Adopt every step that was committed under another root
    #[arg(long)]
    all: bool,
}

#[derive(Serialize)]
struct AdoptedRow {
    step: i64,
    outcome: &'static str,
    problems: Vec<String>,
}

pub fn adopt(args: &Adopt, out: &Output) -> Result<u8> {
    let store = args.place.open()?;
    let steps = match args.step {
        Some(step) => vec![step],
        None => block_on(committed(store.as_ref()))??,
    };
    let mut rows = Vec::new();
    for step in steps {
        let bar = out.progress(0, "bytes verified");
        bar.message(format!("step {step}"));
        let adopted = adopt_step(&store, step, &mut |n| bar.advance(n));
        let (outcome, problems) = match adopted {
            Ok(Adopted::Now) => ("adopted", Vec::new()),
            Ok(Adopted::Already) => ("already ours", Vec::new()),
            Ok(Adopted::Damaged(problems)) => {
                let text = problems.into_iter().map(|p| format!("{}: {}", p.file, p.reason));
                ("damaged", text.collect())
            }
            Err(e @ Error::Corrupt { .. }) => ("damaged", vec![e.to_string()]),
            Err(e) => return Err(e),
        };
        rows.push(AdoptedRow { step, outcome, problems });
    }
    out.answer(&rows, |rows| adopted_text(rows));
    let damaged = rows.iter().any(|row| row.outcome == "damaged");
    Ok(if damaged { EXIT_PROBLEMS } else { EXIT_OK })
}

fn adopted_text(rows: &[AdoptedRow]) -> String {
    let mut text = String::new();
    for row in rows {
        let _ = writeln!(text, "step {}: {}", row.step, row.outcome);
        for problem in &row.problems {
            let _ = writeln!(text, "  {problem}");
        }
    }
    text
}
