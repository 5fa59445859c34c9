//! Names of folders and files, and the rule that keeps a name inside its folder.

use crate::error::{Error, Result};

/// Name, up to a random number, of the object that shows whether a root can be written.
pub const PROBE_PREFIX: &str = ".drivetrain-probe-";
/// The commit record, created last.
pub const MANIFEST: &str = "manifest.json";
/// The table of chunks, one per attempt.
pub const TENSORS: &str = "tensors.arrow";
/// First letter of an attempt folder, so that clean-up can tell ours from foreign folders.
const ATTEMPT_PREFIX: &str = "a-";
/// Hex digits after the prefix.
const ATTEMPT_HEX_DIGITS: usize = 16;
/// Digits of a step number in its folder's name; larger steps simply have more.
const STEP_DIGITS_MIN: usize = 8;

/// Folder of a step, `step-00001000`.
pub fn step_dir(step: i64) -> Result<String> {
    if step < 0 {
        return Err(Error::invalid("step", "a number from 0 up", step));
    }
    Ok(format!("step-{step:0STEP_DIGITS_MIN$}"))
}

/// The step of a folder name with or without its final `/`; `None` for any other name.
pub fn parse_step_dir(name: &str) -> Option<i64> {
    let digits = name.strip_suffix('/').unwrap_or(name).strip_prefix("step-")?;
    if digits.len() < STEP_DIGITS_MIN || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let step = digits.parse().ok()?;
    // One name per step: `step-000000012` would be a second folder for step 12.
    (step_dir(step).ok()? == format!("step-{digits}")).then_some(step)
}

/// Attempt folder's name from a number that no other save call has.
pub fn attempt_dir(id: u64) -> String {
    format!("{ATTEMPT_PREFIX}{id:0ATTEMPT_HEX_DIGITS$x}")
}

/// Whether `name` (with or without a final `/`) is an attempt folder of ours.
pub fn is_attempt_dir(name: &str) -> bool {
    let name = name.strip_suffix('/').unwrap_or(name);
    name.strip_prefix(ATTEMPT_PREFIX).is_some_and(|hex| {
        hex.len() == ATTEMPT_HEX_DIGITS && hex.bytes().all(|b| b.is_ascii_hexdigit())
    })
}

/// Rank file number `part` of a rank: `rank-00003.safetensors`, then `rank-00003.1.safetensors`.
pub fn rank_file(rank: u32, part: usize) -> String {
    match part {
        0 => format!("rank-{rank:05}.safetensors"),
        n => format!("rank-{rank:05}.{n}.safetensors"),
    }
}

/// Whether a file name inside an attempt folder is one that a save writes.
pub fn is_attempt_file(name: &str) -> bool {
    name == TENSORS || (name.starts_with("rank-") && name.ends_with(".safetensors"))
}

/// Joins a folder (`""` for the root itself) and a name.
pub fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_string() } else { format!("{folder}/{name}") }
}

/// Path of a file that the manifest in `folder` names: in that folder or, if `step_ref` names
/// another step, in the one beside it.
pub fn file_path(folder: &str, step_ref: Option<i64>, file: &str) -> String {
    let Some(other) = step_ref.and_then(|step| step_dir(step).ok()) else {
        return join(folder, file);
    };
    let root = folder.rsplit_once('/').map_or("", |(root, _)| root);
    join(&join(root, &other), file)
}

/// Refuses a file name from a checkpoint that would leave the checkpoint's folder.
pub fn check_relative(name: &str, named_in: &str) -> Result<()> {
    let bad = name.is_empty()
        || name.contains(['\\', '\0'])
        || name.split('/').any(|part| part.is_empty() || part == "." || part == "..");
    if bad {
        return Err(Error::corrupt(
            named_in,
            0,
            "a relative file name without `..`",
            format!("{name:?}"),
            "do not use this checkpoint: it was not written by this program",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_go_both_ways_and_only_one_name_names_a_step() {
        for step in [0, 7, 1000, 99_999_999, 100_000_000, i64::MAX] {
            let name = step_dir(step).unwrap();
            assert_eq!(parse_step_dir(&name), Some(step));
            assert_eq!(parse_step_dir(&format!("{name}/")), Some(step));
        }
        assert_eq!(step_dir(1000).unwrap(), "step-00001000");
        for name in ["step-12", "step-000000012", "step-0000001x", "step-", "stop-00000001", ""] {
            assert_eq!(parse_step_dir(name), None, "{name}");
        }
        assert!(step_dir(-1).is_err());
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/./b", "a\\b", "a\0b"] {
            assert!(check_relative(name, "tensors.arrow").is_err(), "{name:?}");
        }
        check_relative("a-0123456789abcdef/rank-00000.safetensors", "tensors.arrow").unwrap();
    }

    #[test]
    fn files_of_other_steps_lie_beside() {
        assert_eq!(file_path("step-00000009", None, "a/f"), "step-00000009/a/f");
        assert_eq!(file_path("step-00000009", Some(7), "a/f"), "step-00000007/a/f");
        assert_eq!(file_path("runs/x/step-00000009", Some(7), "a/f"), "runs/x/step-00000007/a/f");
        assert_eq!(file_path("", None, "a/f"), "a/f");
    }

    #[test]
    fn own_names_are_recognised() {
        assert!(is_attempt_dir(&attempt_dir(7)));
        assert!(!is_attempt_dir("a-123"));
        assert!(!is_attempt_dir("notes"));
        assert_eq!(rank_file(3, 0), "rank-00003.safetensors");
        assert_eq!(rank_file(3, 1), "rank-00003.1.safetensors");
        assert!(is_attempt_file(&rank_file(3, 1)) && is_attempt_file(TENSORS));
        assert!(!is_attempt_file("notes.txt"));
    }
}
