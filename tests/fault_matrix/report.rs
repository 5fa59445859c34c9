//! Rows of a section, and the document they make.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use serde_json::json;

/// Set to write the document instead of comparing with it.
const BLESS_ENV: &str = "DRIVETRAIN_BLESS";
const DOCUMENT: &str = "docs/fault-matrix.md";

/// Sections are tests that run at the same time and share one document.
static DOCUMENT_LOCK: Mutex<()> = Mutex::new(());

/// What one case ended in. Texts are the same in every run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub fault: String,
    /// Where it struck.
    pub place: String,
    /// What a restore finds.
    pub restores: String,
    /// What the caller was told.
    pub told: String,
    /// What lies around besides committed steps.
    pub left: String,
}

impl Row {
    fn outcome(&self) -> [&str; 4] {
        [&self.fault, &self.restores, &self.told, &self.left]
    }
}

/// Ends a section: nothing may be lost, and the document must say what happened.
pub fn finish(section: &str, rows: &[Row]) {
    keep_lines(section, rows);
    let lost: Vec<_> = rows.iter().filter(|row| row.restores.contains("NEITHER")).collect();
    assert!(lost.is_empty(), "{section}: neither old nor new: {lost:#?}");
    compare(section, &render(rows));
}

fn keep_lines(section: &str, rows: &[Row]) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fault-matrix");
    fs::create_dir_all(&folder).unwrap();
    let mut lines = String::new();
    for row in rows {
        let Row { fault, place, restores, told, left } = row;
        let line = json!({
            "section": section, "fault": fault, "place": place,
            "restores": restores, "told": told, "left": left,
        });
        let _ = writeln!(lines, "{line}");
    }
    fs::write(folder.join(format!("{section}.jsonl")), lines).unwrap();
}

/// A table with one line per fault and outcome; its places are named once each, in order.
fn render(rows: &[Row]) -> String {
    let mut groups: Vec<(&Row, Vec<&str>)> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|(first, _)| first.outcome() == row.outcome()) {
            Some((_, places)) if places.contains(&row.place.as_str()) => {}
            Some((_, places)) => places.push(&row.place),
            None => groups.push((row, vec![&row.place])),
        }
    }
    // Lines of one fault stay together, in the order in which the faults first came.
    let mut faults: Vec<&str> = Vec::new();
    for row in rows {
        if !faults.contains(&row.fault.as_str()) {
            faults.push(&row.fault);
        }
    }
    let mut text = String::from("| fault | where | restores | told | left over |\n");
    text.push_str("|---|---|---|---|---|\n");
    for fault in faults {
        for (row, places) in groups.iter().filter(|(row, _)| row.fault == fault) {
            let places = places.join("; ");
            let [_, restores, told, left] = row.outcome();
            let _ = writeln!(text, "| {fault} | {places} | {restores} | {told} | {left} |");
        }
    }
    text
}

fn compare(section: &str, table: &str) {
    let _alone = DOCUMENT_LOCK.lock();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(DOCUMENT);
    let document = fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- begin {section} -->\n"), format!("<!-- end {section} -->"));
    let missing = || panic!("{DOCUMENT} has no part {begin}");
    let from = document.find(&begin).map_or_else(missing, |at| at + begin.len());
    let to = document[from..].find(&end).map_or_else(missing, |at| from + at);
    if document[from..to] == *table {
        return;
    }
    assert!(
        std::env::var_os(BLESS_ENV).is_some(),
        "{DOCUMENT}, part {section}, is not what the tests found. If the difference is meant, \
         run `make fault-matrix` and commit it.\n{}",
        difference(&document[from..to], table)
    );
    let whole = format!("{}{table}{}", &document[..from], &document[to..]);
    fs::write(&path, whole).unwrap();
}

fn difference(old: &str, new: &str) -> String {
    let mut text = String::new();
    for line in old.lines().filter(|line| !new.lines().any(|other| other == *line)) {
        let _ = writeln!(text, "- {line}");
    }
    for line in new.lines().filter(|line| !old.lines().any(|other| other == *line)) {
        let _ = writeln!(text, "+ {line}");
    }
    text
}

#[test]
fn equal_outcomes_share_a_line() {
    let row = |place: &str, restores: &str| Row {
        fault: "eio".into(),
        place: place.into(),
        restores: restores.into(),
        told: "error".into(),
        left: "nothing".into(),
    };
    let table = render(&[row("a", "old"), row("b", "new"), row("c", "old"), row("a", "old")]);
    let lines: Vec<_> = table.lines().skip(2).collect();
    let expected =
        ["| eio | a; c | old | error | nothing |", "| eio | b | new | error | nothing |"];
    assert_eq!(lines, expected);
}
