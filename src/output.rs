//! Output: one JSON document or text, whole files, and progress on a terminal.

use crate::failure::Failure;
use foretell_executor::write_whole;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// Prints a command's only JSON document.
pub fn json<T: Serialize>(document: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(document).map_err(|error| Failure::Undone(error.to_string()))?;
    line(&text)
}

/// Prints text. A closed pipe (`| head`) is no error.
pub fn line(text: &str) -> Result<(), Failure> {
    match writeln!(std::io::stdout(), "{text}") {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Undone(format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Prints a note on standard error.
pub fn note(text: &str) {
    eprintln!("note: {text}");
}

/// Writes a file whole or not at all.
pub fn write(path: &Path, contents: &[u8]) -> Result<(), Failure> {
    Ok(write_whole(path, contents)?)
}

/// Makes a progress bar; hidden if standard error is not a terminal.
pub fn progress(length: usize, what: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length as u64);
    let style = ProgressStyle::with_template("{prefix:<10} {bar:40} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(what.to_string());
    bar
}
