//! `drivetrain ckpt diff`: what changed between two steps, of one root or of two.

use std::fmt::Write as _;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::{folders, keys_text, open_place};
use crate::checkpoint::{Change, OpenStep, differences, open_folder};
use crate::cli::args::StorageArgs;
use crate::cli::output::Output;
use crate::cli::{EXIT_OK, EXIT_PROBLEMS};
use crate::error::{Error, Result};
use crate::storage::Store;

/// Differences of the state that are listed; the rest is counted.
const STATE_ROWS_MAX: usize = 200;
/// Characters of a value in the text form.
const VALUE_CHARS_MAX: usize = 60;

/// Arguments of `ckpt diff`.
#[derive(Debug, clap::Args)]
pub struct Diff {
    /// Checkpoint root, or one checkpoint folder with a manifest.json inside
    a: String,
    /// The other one [default: the same]
    b: Option<String>,
    /// Step of the first [default: the newest; with one root, the one before it]
    #[arg(long)]
    step: Option<i64>,
    /// Step of the second [default: the newest]
    #[arg(long, value_name = "STEP")]
    to_step: Option<i64>,
    /// Compare only tensors whose path contains this text
    #[arg(long, value_name = "TEXT")]
    tensor: Option<String>,
    #[command(flatten)]
    storage: StorageArgs,
}

#[derive(Serialize)]
struct Answer {
    a: Side,
    b: Side,
    tensors: Vec<TensorRow>,
    state: Vec<StateRow>,
    state_more: usize,
}

#[derive(Serialize)]
struct Side {
    uri: String,
    step: i64,
    tensors: usize,
}

#[derive(Serialize, Default)]
struct TensorRow {
    path: String,
    change: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    values: Option<ValuesRow>,
}

#[derive(Serialize)]
struct ValuesRow {
    total: u64,
    changed: u64,
    not_finite: u64,
    norm: f64,
    max_abs: f64,
    relative: Option<f64>,
}

#[derive(Serialize)]
struct StateRow {
    key: String,
    from: Option<Value>,
    to: Option<Value>,
}

pub fn run(args: &Diff, out: &Output) -> Result<u8> {
    let first = open_place(&args.a, &args.storage)?;
    let second = match &args.b {
        Some(uri) => open_place(uri, &args.storage)?,
        None => Arc::clone(&first),
    };
    let before = if args.b.is_none() { args.to_step } else { None };
    let a = open_first(&first, args, before)?;
    let b = open_folder(&second, &folders(&second, args.to_step)?[0].1)?;
    let text = args.tensor.as_deref().unwrap_or_default();
    let bar = out.progress(a.size_bytes(), "bytes compared");
    let found = differences(&a, &b, &|path| path.contains(text), &mut |n| bar.advance(n))?;
    drop(bar);
    let (state, state_more) = if text.is_empty() { states(&a, &b) } else { (Vec::new(), 0) };
    let side = |store: &Arc<dyn Store>, open: &OpenStep| Side {
        uri: store.uri().into(),
        step: open.manifest().step,
        tensors: open.tensors().count(),
    };
    let answer = Answer {
        a: side(&first, &a),
        b: side(&second, &b),
        tensors: found.into_iter().map(row).collect(),
        state,
        state_more,
    };
    let same = answer.tensors.is_empty() && answer.state.is_empty();
    out.answer(&answer, answer_text);
    Ok(if same { EXIT_OK } else { EXIT_PROBLEMS })
}

/// The first side: with one root and no step given, the newest before the second side's.
fn open_first(store: &Arc<dyn Store>, args: &Diff, before: Option<i64>) -> Result<OpenStep> {
    if args.step.is_some() || args.b.is_some() {
        return open_folder(store, &folders(store, args.step)?[0].1);
    }
    let steps = folders(store, None)?;
    let newest = before.or(steps[0].0).unwrap_or(i64::MAX);
    match steps.iter().find(|(step, _)| step.is_some_and(|s| s < newest)) {
        Some((_, folder)) => open_folder(store, folder),
        None => Err(Error::NotFound {
            what: format!("a committed step before step {newest} in {}", store.uri()),
            advice: "name what to compare with: --step, or a second folder".into(),
        }),
    }
}

fn row((path, change): (String, Change)) -> TensorRow {
    let form = |(dtype, shape): (String, Vec<i64>)| Some(format!("{dtype} {shape:?}"));
    let row = TensorRow { path, ..TensorRow::default() };
    match change {
        Change::Added => TensorRow { change: "added", ..row },
        Change::Removed => TensorRow { change: "removed", ..row },
        Change::Form(from, to) => {
            TensorRow { change: "form", from: form(from), to: form(to), ..row }
        }
        Change::Values(v) => {
            let values = ValuesRow {
                total: v.total,
                changed: v.changed,
                not_finite: v.not_finite,
                norm: v.norm(),
                max_abs: v.max_abs,
                relative: v.relative(),
            };
            TensorRow { change: "values", values: Some(values), ..row }
        }
    }
}

/// Differences of what is not a tensor, and how many are not listed.
fn states(a: &OpenStep, b: &OpenStep) -> (Vec<StateRow>, usize) {
    let mut rows = Vec::new();
    let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
    let (one, other) = (a.manifest(), b.manifest());
    walk(
        &mut Vec::new(),
        Some(&parse(&one.state_json)),
        Some(&parse(&other.state_json)),
        &mut rows,
    );
    let ranks = one.per_rank_json.len().max(other.per_rank_json.len());
    for rank in 0..ranks {
        let side = |texts: &[String]| texts.get(rank).map(|text| parse(text));
        let keys = &mut vec![format!("~rank {rank}")];
        walk(
            keys,
            side(&one.per_rank_json).as_ref(),
            side(&other.per_rank_json).as_ref(),
            &mut rows,
        );
    }
    let more = rows.len().saturating_sub(STATE_ROWS_MAX);
    rows.truncate(STATE_ROWS_MAX);
    (rows, more)
}

/// Compares two values of the typed JSON. Tensors are compared elsewhere. The recursion ends where
/// the parser's did (128 deep).
fn walk(keys: &mut Vec<String>, a: Option<&Value>, b: Option<&Value>, rows: &mut Vec<StateRow>) {
    let tensor = |v: Option<&Value>| v.is_some_and(|v| v.get("~tensor").is_some());
    if a == b || (tensor(a) && tensor(b)) {
        return;
    }
    match (a, b) {
        (Some(Value::Object(x)), Some(Value::Object(y))) => {
            let names: Vec<&String> =
                x.keys().chain(y.keys().filter(|k| !x.contains_key(*k))).collect();
            for name in names {
                keys.push(name.clone());
                walk(keys, x.get(name), y.get(name), rows);
                keys.pop();
            }
        }
        (Some(Value::Array(x)), Some(Value::Array(y))) => {
            for i in 0..x.len().max(y.len()) {
                keys.push(i.to_string());
                walk(keys, x.get(i), y.get(i), rows);
                keys.pop();
            }
        }
        _ => rows.push(StateRow { key: keys.join("."), from: a.cloned(), to: b.cloned() }),
    }
}

fn answer_text(it: &Answer) -> String {
    let mut text = format!("step {} → step {}\n", it.a.step, it.b.step);
    for row in &it.tensors {
        let path = keys_text(&row.path);
        let _ = match (&row.values, &row.from, &row.to) {
            (Some(v), _, _) => writeln!(
                text,
                "  ~ {path}: {} of {} changed, ‖a−b‖ {:.4e}, max {:.4e}, relative {}{}",
                v.changed,
                v.total,
                v.norm,
                v.max_abs,
                v.relative.map_or("-".into(), |r| format!("{r:.3e}")),
                if v.not_finite > 0 {
                    format!(", {} not finite", v.not_finite)
                } else {
                    String::new()
                },
            ),
            (_, Some(from), Some(to)) => writeln!(text, "  ~ {path}: {from} → {to}"),
            _ => writeln!(text, "  {} {path}", if row.change == "added" { '+' } else { '-' }),
        };
    }
    for row in &it.state {
        let value = |v: &Option<Value>| v.as_ref().map_or("(none)".into(), shorten);
        let _ = writeln!(text, "  state {}: {} → {}", row.key, value(&row.from), value(&row.to));
    }
    if it.state_more > 0 {
        let _ = writeln!(text, "  … and {} more state differences", it.state_more);
    }
    if it.tensors.is_empty() && it.state.is_empty() {
        text.push_str("  no difference\n");
    }
    text
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(VALUE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
