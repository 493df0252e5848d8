//! The answer of a command, and the names of the files that the command writes for it.

use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The files and the folder that a command writes for its answer.
pub(super) const PROGRESS: &str = "progress.jsonl";
pub(super) const REPORT: &str = "report.html";
pub(super) const WRITTEN: &str = "written";

/// The answer of a command.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its exit status: 0, or that of a failure; then `document` usually describes the failure.
    pub status: i32,
    /// Its JSON document, as printed.
    pub document: String,
    /// Its error message, if it failed.
    pub message: Option<String>,
    /// Its notes.
    pub notes: Vec<String>,
    /// The command as a person would type it.
    pub line: String,
    /// How long the answer took.
    pub seconds: f64,
    /// The page of `--report`, if it was asked for and made.
    pub report: Option<String>,
    /// The files that it wrote, by name.
    pub files: BTreeMap<String, String>,
}

impl Answer {
    /// The answer as a JSON text: its document, unchanged as it was printed, and the other fields.
    /// `report` is the form in which a page gets the report.
    pub fn text(&self, report: &Value) -> String {
        let Self { status, document, message, notes, line, seconds, files, .. } = self;
        let beside = json!({"status": status, "message": message, "notes": notes, "line": line, "seconds": seconds,
            "report": report, "files": files})
        .to_string();
        format!("{}, \"answer\": {document}}}", beside.strip_suffix('}').unwrap_or(&beside))
    }
}

/// The notes among the lines that a command printed on standard error.
pub(super) fn notes(messages: &str) -> Vec<String> {
    messages.lines().filter_map(|line| line.strip_prefix("note: ")).map(str::to_owned).collect()
}
