//! Style rules that a compiler does not know, as a test that fails with file:line.
//!
//! The patterns are put together from pieces so that this file passes its own rules.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
const LINE_COLUMNS_MAX: usize = 100;
/// A SAFETY comment stands at most this many lines above its block (a long statement between).
const SAFETY_LINES_MAX: usize = 12;
const FOLDERS: [&str; 11] = [
    "src",
    "formats",
    "gpu-decode",
    "python",
    "benches",
    "tests",
    "docs",
    "examples",
    "scripts",
    "fuzz",
    ".ci",
];
const SKIPPED_FOLDERS: [&str; 8] =
    ["target", ".venv", ".demo", "__pycache__", "corpus", "artifacts", ".pytest_cache", ".git"];
const MARKERS: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("X", "XX"), concat!("HA", "CK")];
const MACHINE_PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];
const PANICS: [&str; 7] = [
    concat!(".unw", "rap()"),
    concat!(".unw", "rap_err()"),
    concat!(".exp", "ect("),
    concat!("pan", "ic!("),
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("unrea", "chable!("),
];

/// A text file of the tree.
struct Text {
    name: String,
    lines: Vec<String>,
}

impl Text {
    fn is(&self, extension: &str) -> bool {
        self.name.ends_with(extension)
    }

    /// Code a release contains: not a test by place or name.
    fn is_shipped(&self) -> bool {
        let shipped = ["src/", "formats/src/", "gpu-decode/src/", "python/src/"];
        self.is(".rs")
            && shipped.iter().any(|folder| self.name.starts_with(folder))
            && !self.name.ends_with("tests.rs")
            && !self.name.contains("/tests/")
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn texts() -> Vec<Text> {
    let root = root();
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|folder| root.join(folder)).collect();
    folders.retain(|folder| folder.is_dir());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !SKIPPED_FOLDERS.contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if let Some(text) = read(&root, &path) {
                found.push(text);
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(found.len() > 20, "the tree was not found below {}", root.display());
    found
}

fn read(root: &Path, path: &Path) -> Option<Text> {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or("");
    if !["rs", "py", "pyi", "sh", "cu", "md", "toml"].contains(&extension) {
        return None;
    }
    let name = path.strip_prefix(root).unwrap().to_string_lossy().replace('\\', "/");
    let lines = std::fs::read_to_string(path).ok()?.lines().map(String::from).collect();
    Some(Text { name, lines })
}

/// Runs a rule over all files; `rule` returns (line number from 1, what is wrong).
fn check(rule: impl Fn(&Text) -> Vec<(usize, String)>) {
    let mut report = String::new();
    for text in texts() {
        for (line, what) in rule(&text) {
            let _ = writeln!(report, "{}:{line}: {what}", text.name);
        }
    }
    assert!(report.is_empty(), "style:\n{report}");
}

fn lines_where(text: &Text, bad: impl Fn(&str) -> Option<String>) -> Vec<(usize, String)> {
    let numbered = text.lines.iter().enumerate();
    numbered.filter_map(|(i, line)| bad(line).map(|what| (i + 1, what))).collect()
}

#[test]
fn files_and_lines_have_limits() {
    check(|text| {
        if text.is(".md") || text.is(".toml") {
            return Vec::new();
        }
        let mut bad = lines_where(text, |line| {
            let columns = line.chars().count();
            let table = line.trim_start().starts_with("//! |");
            (columns > LINE_COLUMNS_MAX && !table).then(|| format!("{columns} columns"))
        });
        if text.lines.len() > FILE_LINES_MAX {
            bad.push((text.lines.len(), format!("more than {FILE_LINES_MAX} lines")));
        }
        bad
    });
}

#[test]
fn functions_have_limits() {
    check(|text| {
        let length = if text.is(".rs") {
            rust_function_lines
        } else if text.is(".py") {
            python_function_lines
        } else {
            return Vec::new();
        };
        let long = |i: usize| {
            let lines = length(&text.lines, i)?;
            (lines > FUNCTION_LINES_MAX).then(|| (i + 1, format!("function of {lines} lines")))
        };
        (0..text.lines.len()).filter_map(long).collect()
    });
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Lines of the function that starts at line `i`, by rustfmt's indentation.
fn rust_function_lines(lines: &[String], i: usize) -> Option<usize> {
    let line = &lines[i];
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|&word| word == "fn")?;
    let qualifier = |word: &&str| {
        let known = ["pub", "async", "const", "unsafe", "extern"];
        known.contains(word) || word.starts_with("pub(") || word.starts_with('"')
    };
    if !words[..at].iter().all(qualifier) || line.ends_with(';') || line.ends_with('}') {
        return None;
    }
    let end = " ".repeat(indent(line)) + "}";
    let rest = lines[i..].iter().position(|other| other.trim_end() == end)?;
    Some(rest + 1)
}

fn python_function_lines(lines: &[String], i: usize) -> Option<usize> {
    let line = &lines[i];
    let start = line.trim_start();
    if !start.starts_with("def ") && !start.starts_with("async def ") {
        return None;
    }
    let outside = |other: &String| {
        let text = other.trim_start();
        !text.is_empty() && indent(other) <= indent(line) && !text.starts_with(')')
    };
    let after = lines[i + 1..].iter().position(outside).unwrap_or(lines.len() - i - 1);
    let body = &lines[i..=i + after];
    Some(body.iter().rposition(|other| !other.trim().is_empty()).unwrap_or(0) + 1)
}

#[test]
fn rust_files_say_what_they_are_for() {
    check(|text| {
        let opens = text.lines.first().is_some_and(|line| line.starts_with("//!"));
        if text.is(".rs") && !opens { vec![(1, "no //! at its head".into())] } else { Vec::new() }
    });
}

#[test]
fn every_unsafe_block_says_why_it_is_sound() {
    check(|text| {
        if !text.is(".rs") {
            return Vec::new();
        }
        let needs = |line: &str| {
            let code = line.trim_start();
            let opens = [concat!("unsa", "fe {"), concat!("unsa", "fe impl")];
            !code.starts_with("//") && opens.iter().any(|open| code.contains(open))
        };
        let said = |i: usize| {
            let above = text.lines[i.saturating_sub(SAFETY_LINES_MAX)..i].iter().rev();
            above.take_while(|line| !line.trim().is_empty()).any(|line| line.contains("SAFETY:"))
        };
        let silent = |i: &usize| needs(&text.lines[*i]) && !said(*i);
        (0..text.lines.len())
            .filter(silent)
            .map(|i| (i + 1, concat!("unsa", "fe without a SAFETY line").to_string()))
            .collect()
    });
}

#[test]
fn nothing_is_left_for_later_and_no_machine_is_named() {
    check(|text| {
        lines_where(text, |line| {
            let words = || line.split(|c: char| !c.is_alphanumeric() && c != '_');
            let marker = MARKERS.iter().find(|marker| words().any(|word| word == **marker));
            let path = MACHINE_PATHS.iter().find(|path| line.contains(**path));
            marker.or(path).map(|found| format!("contains {found}"))
        })
    });
}

#[test]
fn shipped_code_does_not_panic_on_purpose() {
    check(|text| {
        if !text.is_shipped() {
            return Vec::new();
        }
        let tests = text.lines.iter().position(|line| line.trim() == "#[cfg(test)]");
        let shipped = tests.unwrap_or(text.lines.len());
        let mut bad = lines_where(text, |line| {
            let code = line.split("//").next().unwrap_or("");
            PANICS.iter().find(|call| code.contains(**call)).map(|call| format!("calls {call}"))
        });
        bad.retain(|(line, _)| *line <= shipped);
        bad
    });
}

#[test]
fn the_rules_see_what_they_should() {
    let lines = |text: &str| text.lines().map(String::from).collect::<Vec<_>>();
    let rust = lines("    pub async fn a(\n        x: u8,\n    ) -> u8 {\n        x\n    }\n");
    assert_eq!(rust_function_lines(&rust, 0), Some(5));
    assert_eq!(rust_function_lines(&rust, 3), None);
    let python = lines("def a(\n    x,\n) -> int:\n    return x\n\n\nb = 1\n");
    assert_eq!(python_function_lines(&python, 0), Some(4));
}
