//! Files of the newest step are damaged where they lie: each is found out, and the older step is
//! taken.

use std::fs;
use std::path::{Path, PathBuf};

use super::outcome::{Ground, NEW_SEED, OLD_SEED, read_step, restored, save, state};
use super::places::{NEW_STEP, OLD_STEP, thing};
use super::report::{Row, finish};

/// How a file is damaged; the second text names the place in it.
type Damage = (&'static str, &'static str, fn(&mut Vec<u8>));

/// Flips a bit at this part of the way, in thirds; three are the last byte.
fn flip(bytes: &mut [u8], thirds: usize) {
    let at = (bytes.len() * thirds / 3).min(bytes.len() - 1);
    bytes[at] ^= 0x10;
}

const DAMAGES: [Damage; 8] = [
    ("bit flip", "its first byte", |bytes| flip(bytes, 0)),
    ("bit flip", "a third of the way", |bytes| flip(bytes, 1)),
    ("bit flip", "two thirds of the way", |bytes| flip(bytes, 2)),
    ("bit flip", "its last byte", |bytes| flip(bytes, 3)),
    ("truncation", "by one byte", |bytes| bytes.truncate(bytes.len() - 1)),
    ("truncation", "to half", |bytes| bytes.truncate(bytes.len() / 2)),
    ("zero length", "the whole", Vec::clear),
    ("trailing bytes", "its end", |bytes| bytes.extend_from_slice(b"more")),
];

fn two_steps() -> Ground<'static> {
    let ground = Ground::folder().with_old_step();
    let ckpt = ground.checkpointer(&ground.store, None).unwrap();
    save(&ckpt, NEW_STEP, NEW_SEED, false).unwrap();
    ckpt.close().unwrap();
    ground
}

/// The files of a step, relative to the root, in the order of their names.
fn files(root: &Path, step: i64) -> Vec<PathBuf> {
    let folder = root.join(format!("step-{step:08}"));
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
        if entry.path().is_dir() {
            let inner = fs::read_dir(entry.path()).unwrap();
            found.extend(inner.map(|file| file.unwrap().path()));
        } else {
            found.push(entry.path());
        }
    }
    found.sort_by_key(|path| path.file_name().map(ToOwned::to_owned));
    found
}

fn row(ground: &Ground<'_>, fault: &str, path: &Path, place: &str) -> Row {
    let relative = path.strip_prefix(ground.path()).unwrap().to_str().unwrap().to_string();
    let found = drivetrain::checkpoint::candidates(&ground.store).unwrap();
    let reason = match found.into_iter().find(|(step, _)| *step == NEW_STEP) {
        None => None,
        Some((_, Some(reason))) => Some(reason),
        Some((_, None)) => read_step(&ground.store, NEW_STEP).err().map(|e| e.to_string()),
    };
    let name = path.file_name().unwrap().to_str().unwrap();
    let told = match reason {
        None => "nothing: it is no checkpoint without its manifest",
        Some(text) if text.contains(name) => "skipped; file, offset, expected, found",
        Some(text) => panic!("{fault}, {place}: the reason does not name {name}: {text}"),
    };
    let (restores, left) = ground.look();
    Row {
        fault: fault.into(),
        place: format!("{}, {place}", thing(&relative)),
        restores,
        told: told.into(),
        left,
    }
}

#[test]
fn damaged_files_are_found_out() {
    let mut rows = Vec::new();
    let count = files(two_steps().path(), NEW_STEP).len();
    for (fault, place, damage) in DAMAGES {
        for i in 0..count {
            let ground = two_steps();
            let path = files(ground.path(), NEW_STEP).swap_remove(i);
            let mut bytes = fs::read(&path).unwrap();
            damage(&mut bytes);
            fs::write(&path, bytes).unwrap();
            rows.push(row(&ground, fault, &path, place));
        }
    }
    for i in 0..count {
        let ground = two_steps();
        let path = files(ground.path(), NEW_STEP).swap_remove(i);
        fs::remove_file(&path).unwrap();
        rows.push(row(&ground, "lost file", &path, "the whole"));
        let ground = two_steps();
        let path = files(ground.path(), NEW_STEP).swap_remove(i);
        fs::rename(&path, path.with_file_name(".drivetrain-tmp-0-0")).unwrap();
        rows.push(row(&ground, "lost rename", &path, "the whole"));
        let ground = two_steps();
        let path = files(ground.path(), NEW_STEP).swap_remove(i);
        fs::copy(&files(ground.path(), OLD_STEP)[i], &path).unwrap();
        rows.push(row(&ground, "the old step's file in its place", &path, "the whole"));
    }
    // Both steps are there and whole in the end of an undamaged run, or nothing above means much.
    let ground = two_steps();
    assert_eq!(restored(&ground.store), "new");
    let old = read_step(&ground.store, OLD_STEP).unwrap();
    assert!(old == state(OLD_SEED));
    finish("damage", &rows);
}
