//! `drivetrain ckpt` as a person calls it: what diff, prune, adopt and inspect say, and their exit
//! codes.

use std::path::Path;
use std::process::{Command, Output};

use drivetrain::checkpoint::rects::Rect;
use drivetrain::checkpoint::{Options, TensorIn};
use serde_json::{Value, json};

use crate::commit::{BLOCKING, Owned, alone, save};

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_drivetrain")).arg("ckpt").args(args).output().unwrap()
}

fn ask(args: &[&str]) -> (i32, Value) {
    let output = run(&[args, &["--json"]].concat());
    let value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap(), value)
}

fn text(args: &[&str]) -> String {
    String::from_utf8(run(args).stdout).unwrap()
}

/// Saves F32 tensors.
fn commit(root: &Path, step: i64, tensors: &[(&str, &[f32])], state: &str) {
    let ckpt = alone(root, Options::default());
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|(_, v)| v.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let inputs: Vec<TensorIn<'_>> = tensors
        .iter()
        .zip(&bytes)
        .map(|((name, values), data)| TensorIn {
            path: format!("[\"model\",\"{name}\"]"),
            dtype: "F32".into(),
            shape: vec![values.len() as i64],
            rect: Rect::whole(&[values.len() as i64]),
            data,
            replicas: Vec::new(),
            pin_rank: None,
        })
        .collect();
    ckpt.save(step, &inputs, state, "{}", BLOCKING).unwrap();
    ckpt.close().unwrap();
}

fn two_steps(root: &Path) {
    let same = [1.0, f32::NAN];
    commit(
        root,
        10,
        &[("same", &same), ("moved", &[3.0, 4.0, 0.0]), ("gone", &[1.0]), ("grown", &[1.0])],
        r#"{"lr":0.1,"epoch":1,"old":[1,2]}"#,
    );
    commit(
        root,
        20,
        &[
            ("same", &same),
            ("moved", &[3.0, 4.5, f32::INFINITY]),
            ("new", &[1.0]),
            ("grown", &[1.0, 2.0]),
        ],
        r#"{"lr":0.1,"epoch":2,"old":[1,2,3]}"#,
    );
}

#[test]
fn diff_says_what_changed_and_how_much() {
    let dir = tempfile::tempdir().unwrap();
    two_steps(dir.path());
    let root = dir.path().to_str().unwrap();
    let (code, answer) = ask(&["diff", root]);
    assert_eq!((code, &answer["a"]["step"], &answer["b"]["step"]), (1, &json!(10), &json!(20)));
    let rows = answer["tensors"].as_array().unwrap();
    let kinds: Vec<_> = rows.iter().map(|r| (&r["path"], &r["change"])).collect();
    let path = |name: &str| json!(format!("[\"model\",\"{name}\"]"));
    assert_eq!(
        kinds,
        [
            (&path("gone"), &json!("removed")),
            (&path("grown"), &json!("form")),
            (&path("moved"), &json!("values")),
            (&path("new"), &json!("added")),
        ]
    );
    assert_eq!((&rows[1]["from"], &rows[1]["to"]), (&json!("F32 [1]"), &json!("F32 [2]")));
    // 3-4-5: half a unit on 5, and one that is not finite.
    let values = &rows[2]["values"];
    assert_eq!(values["changed"], 2);
    assert_eq!(values["total"], 3);
    assert_eq!(values["not_finite"], 1);
    assert_eq!(values["norm"], 0.5);
    assert_eq!(values["max_abs"], 0.5);
    assert_eq!(values["relative"], 0.1);
    let state = answer["state"].as_array().unwrap();
    assert_eq!(state[0], json!({"key": "epoch", "from": 1, "to": 2}));
    assert_eq!(state[1], json!({"key": "old.2", "from": null, "to": 3}));
    assert_eq!(state.len(), 2);
    let shown = text(&["diff", root]);
    assert!(shown.contains("~ model.moved: 2 of 3 changed") && shown.contains("- model.gone"));
    assert_eq!(ask(&["diff", root, "--step", "20", "--to-step", "20"]).0, 0);
    assert_eq!(ask(&["diff", root, "--tensor", "same"]).0, 0);
    assert_eq!(ask(&["diff", root, "--step", "11"]).0, 1, "no such step");
    assert_eq!(run(&["diff"]).status.code(), Some(2));
}

#[test]
fn diff_of_two_roots_with_other_cuts_compares_elements() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let whole = Owned::whole("w", &[64, 1000], 5);
    save(&alone(one.path(), Options::default()), 1, std::slice::from_ref(&whole)).unwrap();
    let mut parts = vec![whole.rows(0, 10), whole.rows(10, 64)];
    let (a, b) = (one.path().to_str().unwrap(), two.path().to_str().unwrap());
    save(&alone(two.path(), Options::default()), 1, &parts).unwrap();
    assert_eq!(ask(&["diff", a, b]).0, 0);
    let before = parts[1].data[77];
    parts[1].data[77] = before.wrapping_add(200);
    save(&alone(two.path(), Options::default()), 2, &parts).unwrap();
    let (code, answer) = ask(&["diff", a, b]);
    assert_eq!((code, &answer["tensors"][0]["values"]["changed"]), (1, &json!(1)));
    let apart = f64::from(before.abs_diff(before.wrapping_add(200)));
    assert_eq!(answer["tensors"][0]["values"]["max_abs"], apart);
    assert_eq!(ask(&["diff", b, a]).1["tensors"][0]["values"]["max_abs"], apart);
    // A damaged side is an error, not a difference.
    let damaged = std::fs::read_dir(two.path().join("step-00000002"))
        .unwrap()
        .map(|e| e.unwrap().path().join("rank-00000.safetensors"))
        .find(|p| p.exists())
        .unwrap();
    let mut bytes = std::fs::read(&damaged).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let output = run(&["diff", b, "--step", "1", "--to-step", "2"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("crc32c"), "{said}");
}

#[test]
fn prune_says_first_and_then_does() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_str().unwrap();
    for step in [10, 20, 30, 40] {
        commit(dir.path(), step, &[("w", &[step as f32])], "{}");
    }
    let rules = ["prune", root, "--keep-last", "1", "--keep-every", "20"];
    let (code, answer) = ask(&[&rules[..], &["--dry-run"]].concat());
    assert_eq!((code, &answer["kept"]), (0, &json!([20, 40])));
    assert_eq!(answer["removed"][0]["step"], 10);
    assert!(answer["removed"][0]["size_bytes"].as_u64().unwrap() > 4096);
    let steps = || alone(dir.path(), Options::default()).steps().unwrap();
    assert_eq!(steps(), [10, 20, 30, 40]);
    assert!(text(&rules).contains("removed step 30"));
    assert_eq!(steps(), [20, 40]);
    assert_eq!(run(&["prune", root]).status.code(), Some(2), "without a rule");
    assert_eq!(run(&["prune", root, "--keep-last", "0"]).status.code(), Some(2));
    assert_eq!(
        run(&["prune", root, "--keep-last", "1", "--keep-best", "1"]).status.code(),
        Some(2)
    );
    assert_eq!(
        run(&["prune", root, "--keep-last", "1", "--keep-within", "x"]).status.code(),
        Some(2)
    );
    let (_, kept) = ask(&["prune", root, "--keep-last", "1", "--keep-within", "1h"]);
    assert_eq!(kept["kept"], json!([20, 40]));
}

#[test]
fn adopt_takes_a_copy_in() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    commit(from.path(), 7, &[("w", &[1.0])], "{}");
    commit(to.path(), 8, &[("w", &[2.0])], "{}");
    let copy = Command::new("cp")
        .arg("-r")
        .args([from.path().join("step-00000007"), to.path().to_path_buf()])
        .status();
    assert!(copy.unwrap().success());
    let root = to.path().to_str().unwrap();
    let prune = ["prune", root, "--keep-last", "1"];
    assert_eq!(ask(&prune).1["kept"], json!([7, 8]));
    assert_eq!(run(&["adopt", root]).status.code(), Some(2));
    let (code, answer) = ask(&["adopt", root, "--all"]);
    assert_eq!(code, 0);
    let outcomes: Vec<_> = answer.as_array().unwrap().iter().map(|r| &r["outcome"]).collect();
    assert_eq!(outcomes, ["adopted", "already ours"]);
    assert_eq!(ask(&prune).1["kept"], json!([8]));
}

#[test]
fn inspect_is_a_tree() {
    let dir = tempfile::tempdir().unwrap();
    two_steps(dir.path());
    let shown = text(&["inspect", dir.path().to_str().unwrap(), "--step", "10"]);
    assert!(shown.contains("model  (4 tensors)") && shown.contains("moved  F32 [3]"), "{shown}");
    let flat = text(&["inspect", dir.path().to_str().unwrap(), "--depth", "1"]);
    assert!(!flat.contains("moved"), "{flat}");
}
