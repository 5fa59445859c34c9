//! Names of places that are the same in every run: operations without numbers, hashes and steps.

use drivetrain::checkpoint::layout::{MANIFEST, TENSORS, parse_step_dir};

/// The step that stands before a fault.
pub const OLD_STEP: i64 = 1;
/// The step that the fault meets.
pub const NEW_STEP: i64 = 2;

/// What a path is, in words.
pub fn thing(path: &str) -> String {
    if path.is_empty() {
        return "the root".into();
    }
    let mut parts = path.split('/');
    let first = parts.next().unwrap_or_default();
    if first.starts_with(".drivetrain-probe") {
        return "the probe".into();
    }
    if first == ".meet" {
        return "the meeting".into();
    }
    if first == ".drivetrain" {
        return "the adoptions".into();
    }
    let whose = match parse_step_dir(first) {
        Some(OLD_STEP) => " of the old step",
        Some(NEW_STEP) => "",
        _ => " of another step",
    };
    let rest: Vec<&str> = parts.collect();
    let what = match rest.as_slice() {
        [] => "the step folder",
        [MANIFEST] => "the manifest",
        [_] => "the attempt folder",
        [_, TENSORS] => "the table",
        [_, file] if file.starts_with("rank-") => "a rank file",
        _ => "another file",
    };
    format!("{what}{whose}")
}

/// An operation as the document names it.
pub fn place(op: &str, path: &str) -> String {
    format!("`{op}` {}", thing(path))
}

/// What an error about `path` must contain: its last part, as far as it is the same in every run.
pub fn name(path: &str) -> &str {
    let last = path.rsplit('/').next().unwrap_or_default();
    let drawn = [".drivetrain-probe-", "a-"];
    drawn.into_iter().find(|prefix| last.starts_with(prefix)).unwrap_or(last)
}

/// What lies in `files` that no committed step names: kinds, in words.
pub fn leftovers(files: &[String], named: &[String]) -> String {
    let mut kinds: Vec<&str> = Vec::new();
    for file in files.iter().filter(|file| !named.contains(file)) {
        let kind = if file.contains(".drivetrain-tmp") {
            "a temporary file"
        } else if file.contains(".drivetrain-probe") {
            "a probe"
        } else if file.starts_with(".meet") {
            "meeting files"
        } else if file.starts_with("step-") {
            "an attempt that no manifest names"
        } else {
            "A FOREIGN FILE"
        };
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds.sort_unstable();
    if kinds.is_empty() { "nothing".into() } else { kinds.join(", ") }
}

#[test]
fn places_have_no_numbers() {
    let at = |path| place("write", path);
    assert_eq!(
        at("step-00000002/a-0123456789abcdef/rank-00000.safetensors"),
        "`write` a rank file"
    );
    assert_eq!(at("step-00000001/manifest.json"), "`write` the manifest of the old step");
    assert_eq!(at("step-00000002/a-0123456789abcdef"), "`write` the attempt folder");
    assert_eq!(at("step-00000002"), "`write` the step folder");
    assert_eq!(at(".drivetrain-probe-77"), "`write` the probe");
    assert_eq!(at(""), "`write` the root");
}
