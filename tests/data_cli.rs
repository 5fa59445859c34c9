//! The data verbs as a person calls them: index, info, check and view, with their exit codes.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::nuscenes::{test_data, tree};

/// Runs the program with its own cache.
fn run(cache: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_drivetrain"))
        .args(args.iter().map(OsString::from))
        .env("XDG_CACHE_HOME", cache)
        .output()
        .unwrap()
}

fn json(cache: &Path, args: &[&str]) -> (i32, Value) {
    let output = run(cache, &[args, &["--json"]].concat());
    let value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap(), value)
}

#[test]
fn index_info_and_check_of_a_tree() {
    let tree = tree(3);
    let root = tree.write().root().to_str().unwrap().to_string();
    let cache = tempfile::tempdir().unwrap();
    let out = cache.path().join("t.index.arrow");
    let (code, made) = json(cache.path(), &["index", &root, "--out", out.to_str().unwrap()]);
    assert_eq!((code, &made["samples"]), (0, &3.into()));
    assert!(out.exists() && cache.path().join("t.sources.arrow").exists());
    let (code, info) = json(cache.path(), &["info", out.to_str().unwrap()]);
    assert_eq!((code, &info["fingerprint"]), (0, &made["fingerprint"]));
    assert_eq!(info["format"], "nuscenes:v1.0-test");
    assert_eq!((&info["scenes"], &info["missing_sources"]), (&1.into(), &0.into()));
    let text = run(cache.path(), &["info", &root]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("LIDAR_TOP") && text.contains("3 in 1 scenes"), "{text}");
    // The tree's pictures are zeros; everything else is fine.
    let (code, report) = json(cache.path(), &["check", &root]);
    assert_eq!((code, &report["problem_count"]), (1, &3.into()));
    assert!(report["problems"][0]["what"].as_str().unwrap().contains("samples/CAM_FRONT/0.jpg"));
}

#[test]
fn check_names_what_is_wrong() {
    let tree = tree(2);
    let root = tree.write().root().to_str().unwrap().to_string();
    let cache = tempfile::tempdir().unwrap();
    let what = || {
        let (code, report) = json(cache.path(), &["check", &root]);
        assert_eq!(code, 1);
        let problems = report["problems"].as_array().unwrap().clone();
        problems.iter().map(|p| p["what"].to_string()).collect::<Vec<_>>().join("\n")
    };
    assert!(!what().contains("LIDAR_TOP"));
    let sweep = tree.root().join("sweeps/LIDAR_TOP/3.pcd.bin");
    fs::write(&sweep, [0; 81]).unwrap();
    let changed = what();
    assert!(changed.contains("3.pcd.bin changed") && changed.contains("81 bytes"), "{changed}");
    fs::remove_dir_all(cache.path()).unwrap();
    let ragged = what();
    assert!(ragged.contains("3.pcd.bin") && ragged.contains("20"), "{ragged}");
    fs::remove_file(&sweep).unwrap();
    assert!(what().contains("3.pcd.bin"));
}

#[test]
fn view_of_the_real_sample_draws_everything() {
    let Some(data) = test_data() else { return };
    let cache = tempfile::tempdir().unwrap();
    let page = cache.path().join("page.html");
    let info = data.join("nuscenes_demo/n015-2018-07-24-11-22-45+0800.pkl");
    let key = "ca9a282c9e77460f8360f564131a8af5";
    let args = ["view", info.to_str().unwrap(), key, "--out", page.to_str().unwrap()];
    let output = run(cache.path(), &args);
    assert!(output.status.success(), "{output:?}");
    let html = fs::read_to_string(&page).unwrap();
    assert_eq!(html.matches("data:image/jpeg;base64,").count(), 6);
    assert!(html.contains("34688 points of LIDAR_TOP") && html.contains("69 boxes"));
    assert!(html.contains("<title>pedestrian</title>") && html.contains("-35.5 ms"));
    // Nothing is loaded from elsewhere.
    assert!(!html.contains("http") && !html.contains("<script"));
    let missing = run(cache.path(), &["view", info.to_str().unwrap(), "nokey", "--out", "x"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8(missing.stderr).unwrap().contains("sample nokey"));
}

#[test]
fn a_missing_picture_does_not_hide_the_others() {
    let tree = tree(2);
    fs::remove_file(tree.root().join("samples/CAM_FRONT/0.jpg")).unwrap();
    let root = tree.write().root().to_str().unwrap().to_string();
    let cache = tempfile::tempdir().unwrap();
    let page = cache.path().join("page.html");
    let output = run(cache.path(), &["view", &root, "sample-0", "--out", page.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let html = fs::read_to_string(&page).unwrap();
    assert!(html.contains("class=\"gone\">samples/CAM_FRONT/0.jpg"), "{html}");
    assert!(html.contains("<title>vehicle.car</title>"));
}
