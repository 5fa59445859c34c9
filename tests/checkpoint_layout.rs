//! The bytes on disk: readable by what the format promises, and damage anywhere is found and named.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use drivetrain::Error;
use drivetrain::checkpoint::layout::{crc32c, decode_table};
use drivetrain::checkpoint::{Checkpointer, Options, open_folder, open_step};
use drivetrain::storage::{StorageOptions, Store, open_store};

use crate::commit::{Owned, alone, local, read, save, state, walk};

fn files(root: &Path, step: i64) -> Vec<PathBuf> {
    let folder = format!("step-{step:08}/");
    let mine = walk(root).into_keys().filter(|f| f.starts_with(&folder));
    mine.map(|f| root.join(f)).collect()
}

fn saved(root: &Path) -> Checkpointer {
    let ckpt = alone(root, Options::default());
    for step in [1, 2] {
        save(&ckpt, step, &state(step as u64)).unwrap();
    }
    ckpt
}

/// After damage to step 2: it is refused or found out, the reason names the file, and step 1 holds.
fn found_out(ckpt: &Checkpointer, file: &Path, what: &str) {
    let name = file.file_name().unwrap().to_str().unwrap();
    let problems = ckpt.verify(2).unwrap();
    assert!(!problems.is_empty(), "{what}: verify sees nothing");
    assert!(problems[0].file.contains(name), "{what}: {problems:?} does not name {name}");
    let candidates = ckpt.candidates().unwrap();
    assert_eq!(candidates[1], (1, None), "{what}");
    match (&candidates[0].1, read(ckpt, 2, &state(0))) {
        (Some(reason), Err(e)) => {
            assert!(reason.contains(name) && e.to_string().contains(name), "{what}: {reason}");
        }
        (None, Err(e)) => {
            assert!(matches!(e, Error::Corrupt { .. }), "{what}: {e}");
            assert!(e.to_string().contains(name), "{what}: {e}");
        }
        (None, Ok(got)) => assert!(got == state(2), "{what}: silent garbage"),
        (Some(reason), Ok(_)) => panic!("{what}: refused ({reason}) and read"),
    }
    assert_eq!(read(ckpt, 1, &state(1)).unwrap(), state(1), "{what}");
}

#[test]
fn a_flipped_bit_anywhere_is_found_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = saved(dir.path());
    for file in files(dir.path(), 2) {
        let good = std::fs::read(&file).unwrap();
        let stride = (good.len() / 23).max(1);
        for at in (0..good.len()).step_by(stride).chain([8, good.len() - 1]) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            std::fs::write(&file, &bad).unwrap();
            found_out(&ckpt, &file, &format!("bit flip at {at} of {}", file.display()));
        }
        std::fs::write(&file, &good).unwrap();
        assert!(ckpt.verify(2).unwrap().is_empty());
    }
}

#[test]
fn truncated_grown_and_missing_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = saved(dir.path());
    for file in files(dir.path(), 2) {
        let good = std::fs::read(&file).unwrap();
        let grown = [&good[..], b"\n"].concat();
        for bad in [&good[..0], &good[..good.len() / 2], &good[..good.len() - 1], &grown[..]] {
            std::fs::write(&file, bad).unwrap();
            let what = format!("{} bytes of {}", bad.len(), file.display());
            found_out(&ckpt, &file, &what);
        }
        std::fs::remove_file(&file).unwrap();
        if file.ends_with("manifest.json") {
            assert_eq!(ckpt.steps().unwrap(), [1], "without a manifest there is no step");
        } else {
            found_out(&ckpt, &file, &format!("missing {}", file.display()));
        }
        std::fs::write(&file, &good).unwrap();
    }
}

/// Reads a safetensors file by the rules of the format alone.
fn parse_safetensors(bytes: &[u8]) -> Vec<(String, String, Vec<u64>, Vec<u8>)> {
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    assert_eq!(header % 8, 0, "the data is aligned to 8 bytes");
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let data = &bytes[8 + header..];
    let mut end = 0;
    let mut entries: Vec<_> = json
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, entry)| {
            let at: Vec<usize> = serde_json::from_value(entry["data_offsets"].clone()).unwrap();
            let shape: Vec<u64> = serde_json::from_value(entry["shape"].clone()).unwrap();
            let dtype = entry["dtype"].as_str().unwrap().to_string();
            (at[0], at[1], name.clone(), dtype, shape)
        })
        .collect();
    entries.sort();
    let rows = entries.into_iter().map(|(from, to, name, dtype, shape)| {
        assert_eq!(from, end, "hole before {name}");
        end = to;
        (name, dtype, shape, data[from..to].to_vec())
    });
    let rows: Vec<_> = rows.collect();
    assert_eq!(end, data.len(), "trailing bytes");
    rows
}

#[test]
fn rank_files_table_and_manifest_say_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = alone(dir.path(), Options::default());
    let mut tensors = state(5);
    let rows = Owned::whole("rows", &[10, 3], 9);
    tensors.extend([rows.rows(0, 4), rows.rows(4, 10)]);
    save(&ckpt, 7, &tensors).unwrap();
    let folder = dir.path().join("step-00000007");
    let text = std::fs::read_to_string(folder.join("manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys: Vec<_> = manifest.as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys.last().unwrap(), "crc32c");
    let cut = text.rfind(",\"crc32c\"").unwrap();
    assert_eq!(manifest["crc32c"], format!("{:08x}", crc32c(&text.as_bytes()[..cut])));
    assert_eq!((&manifest["step"], &manifest["world_size"]), (&7.into(), &1.into()));
    assert_eq!(manifest["state"]["step"], 7);
    for file in manifest["files"].as_array().unwrap() {
        let bytes = std::fs::read(folder.join(file["path"].as_str().unwrap())).unwrap();
        assert_eq!(file["size_bytes"], bytes.len());
        assert_eq!(file["crc32c"], format!("{:08x}", crc32c(&bytes)));
    }
    let attempt = folder.join(manifest["attempt"].as_str().unwrap());
    let table = std::fs::read(attempt.join("tensors.arrow")).unwrap();
    let chunks = decode_table(&table, "t").unwrap();
    assert_eq!(chunks.len(), tensors.len());
    let file = std::fs::read(attempt.join("rank-00000.safetensors")).unwrap();
    let entries = parse_safetensors(&file);
    for chunk in chunks {
        assert_eq!(folder.join(&chunk.file), attempt.join("rank-00000.safetensors"));
        let bytes = &file[chunk.start as usize..(chunk.start + chunk.length) as usize];
        assert_eq!(crc32c(bytes), chunk.crc32c);
        let entry = entries.iter().find(|e| e.0 == chunk.entry).unwrap();
        assert_eq!((&entry.1, &entry.3[..]), (&chunk.dtype, bytes));
        let whole = tensors.iter().find(|t| t.path == chunk.path && t.rect == chunk.rect());
        assert_eq!(whole.unwrap().data, bytes, "{}", chunk.path);
    }
    let names: Vec<_> = entries.iter().map(|e| e.0.as_str()).collect();
    assert!(names.contains(&"rows@0,0") && names.contains(&"rows@4,0"), "{names:?}");
    assert!(names.contains(&"weird.name/.."), "{names:?}");
}

#[test]
fn a_checkpoint_folder_opens_wherever_it_lies() {
    let dir = tempfile::tempdir().unwrap();
    saved(dir.path());
    let step = local(&dir.path().join("step-00000002"));
    let open = open_folder(&step, "").unwrap();
    assert_eq!(open.manifest().step, 2);
    assert!(open.verify().unwrap().is_empty());
    std::fs::rename(dir.path().join("step-00000002"), dir.path().join("step-00000003")).unwrap();
    let error = open_step(&local(dir.path()), 3).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "a renamed step: {error}");
}

#[test]
fn an_object_store_keeps_the_same_contract() {
    let options = StorageOptions::default();
    let store: Arc<dyn Store> = open_store("memory://checkpoint-layout/root", &options).unwrap();
    let keep = Options { keep_last: Some(1), ..Options::default() };
    let ckpt = Checkpointer::new(Arc::clone(&store), 0, 1, keep, None).unwrap();
    for step in [1, 2] {
        save(&ckpt, step, &state(step as u64)).unwrap();
    }
    assert!(matches!(*save(&ckpt, 2, &state(1)).unwrap_err(), Error::AlreadyExists { .. }));
    assert_eq!(ckpt.steps().unwrap(), [2]);
    assert_eq!(read(&ckpt, 2, &state(2)).unwrap(), state(2));
    assert!(ckpt.verify(2).unwrap().is_empty());
    let left = drivetrain::runtime::block_on(store.list("")).unwrap().unwrap();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn wrong_targets_are_refused_before_anything_is_touched() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = saved(dir.path());
    let refused = |change: &dyn Fn(&mut Owned)| {
        let mut like = state(2);
        change(&mut like[0]);
        read(&ckpt, 2, &like).unwrap_err().to_string()
    };
    assert!(refused(&|t| t.path = "[\"nobody\"]".into()).contains("nobody"));
    assert!(refused(&|t| t.shape = vec![33, 1000]).contains("embedding"));
    let text = refused(&|t| {
        t.data.pop();
    });
    assert!(text.contains("embedding"), "{text}");
}

/// Runs the program and returns its exit code and what it printed.
fn program(args: &[&str]) -> (i32, String) {
    let output =
        std::process::Command::new(env!("CARGO_BIN_EXE_drivetrain")).args(args).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(said).unwrap())
}

#[test]
fn the_program_lists_inspects_and_verifies() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_str().unwrap();
    let (code, said) = program(&["ckpt", "ls", root]);
    assert!(code == 0 && said.contains("no committed step"), "{said}");
    assert_eq!(program(&["ckpt", "verify", root]).0, 1);
    saved(dir.path());
    let (code, said) = program(&["ckpt", "ls", root, "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &rows[0]["step"], &rows[1]["ok"]), (0, &2.into(), &true.into()));
    assert_eq!(rows[0]["tensors"], 5);
    let (code, said) = program(&["ckpt", "inspect", root, "--tensor", "embed"]);
    assert!(code == 0 && said.contains("[1000, 33]") && !said.contains("scalar"), "{said}");
    let step = format!("{root}/step-00000001");
    assert_eq!(program(&["ckpt", "verify", &step]).0, 0);
    let (code, said) = program(&["ckpt", "verify", root]);
    assert!(code == 0 && said.contains("step 2: ok") && said.contains("step 1: ok"), "{said}");
    let file = files(dir.path(), 2).into_iter().find(|f| f.ends_with("rank-00000.safetensors"));
    let file = file.unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let (code, said) = program(&["ckpt", "verify", root, "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &rows[0]["ok"], &rows[1]["ok"]), (1, &false.into(), &true.into()));
    assert!(rows[0]["problems"][0]["tensor"].as_str().unwrap().starts_with('['), "{said}");
    assert_eq!(program(&["ckpt", "inspect", root, "--step", "77"]).0, 1);
    assert_eq!(program(&["ckpt", "inspect"]).0, 2);
}
