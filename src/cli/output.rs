//! What a verb prints: text for people or one JSON document for programs, never both; progress
//! bars on a terminal's stderr only.
//!
//! Writes ignore a closed pipe (`drivetrain info … | head`), which `println!` would panic on.

use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use crate::error::Error;

/// Redraws of a progress bar per second.
const REDRAWS_PER_S: u8 = 10;

/// Where a verb's answers go.
#[derive(Debug)]
pub struct Output {
    json: bool,
    bars: bool,
}

impl Output {
    /// JSON or text on stdout; progress bars if stderr is a terminal.
    pub fn new(json: bool) -> Self {
        Self { json, bars: !json && std::io::stderr().is_terminal() }
    }

    /// Whether a program is reading.
    pub fn json(&self) -> bool {
        self.json
    }

    /// One line of text; nothing with `--json`.
    pub fn line(&self, text: impl AsRef<str>) {
        if !self.json {
            write_line(text.as_ref());
        }
    }

    /// The JSON document; nothing without `--json`. Call it once per run.
    pub fn value(&self, value: &impl Serialize) {
        if self.json {
            match serde_json::to_string_pretty(value) {
                Ok(text) => write_line(&text),
                Err(e) => self.note(format!("cannot write the answer as JSON: {e}")),
            }
        }
    }

    /// The same answer in the form that was asked for.
    pub fn answer<T: Serialize>(&self, value: &T, text: impl FnOnce(&T) -> String) {
        if self.json {
            self.value(value);
        } else {
            write_line(text(value).trim_end_matches('\n'));
        }
    }

    /// A remark on stderr (warnings, what happens next), in both forms.
    pub fn note(&self, text: impl AsRef<str>) {
        let _ = writeln!(std::io::stderr(), "drivetrain: {}", text.as_ref());
    }

    /// The error a run ends with, on stderr, once.
    pub fn error(&self, error: &Error) {
        let _ = writeln!(std::io::stderr(), "drivetrain: error: {error}");
    }

    /// A bar of `total` steps, drawn only on a terminal. It vanishes when dropped.
    pub fn progress(&self, total: u64, what: &'static str) -> Bar {
        let target = if self.bars {
            ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_S)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target).with_prefix(what);
        let form = "{prefix} {bar:30} {human_pos}/{human_len} {per_sec} {eta} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style);
        }
        Bar(bar)
    }
}

fn write_line(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// A progress bar; safe to advance from many threads.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Sets the number of steps when it becomes known.
    pub fn total(&self, total: u64) {
        self.0.set_length(total);
    }

    /// Advances.
    pub fn advance(&self, steps: u64) {
        self.0.inc(steps);
    }

    /// Sets the position.
    pub fn position(&self, position: u64) {
        self.0.set_position(position);
    }

    /// Says what is being worked on.
    pub fn message(&self, text: impl Into<String>) {
        self.0.set_message(text.into());
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_count_without_a_terminal() {
        let bar = Output::new(true).progress(3, "work");
        bar.advance(2);
        assert_eq!(bar.0.position(), 2);
    }
}
