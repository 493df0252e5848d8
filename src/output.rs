//! Output: one JSON document or text, whole files, and progress on a terminal.

use crate::confined;
use crate::failure::Failure;
use foretell_executor::write_whole;
use foretell_units::SchemaVersion;
use indicatif::{ProgressBar, ProgressStyle};
use schemars::JsonSchema;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::level_filters::LevelFilter;

/// How much the command says on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors only.
    Quiet,
    /// Notes and progress too.
    Usual,
    /// What it does, and how long that takes.
    Verbose,
    /// Every file that it reads, too.
    Detailed,
}

/// Whether notes and progress are shown.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Sets what is said on standard error. Call it once, at the start.
pub fn set_verbosity(verbosity: Verbosity) {
    IS_QUIET.store(verbosity == Verbosity::Quiet, Ordering::Relaxed);
    let level = match verbosity {
        Verbosity::Quiet => LevelFilter::ERROR,
        Verbosity::Usual => LevelFilter::WARN,
        Verbosity::Verbose => LevelFilter::INFO,
        Verbosity::Detailed => LevelFilter::DEBUG,
    };
    // Rank processes share standard error, and lines with colours would be escaped in their logs.
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_timer(tracing_subscriber::fmt::time::uptime());
    // It fails only if there is one already.
    let _ = subscriber.try_init();
}

/// Set once the command has printed its JSON document.
static HAS_DOCUMENT: AtomicBool = AtomicBool::new(false);

/// A document with the version of its form.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Versioned<'a, T> {
    /// The version of the document's form.
    schema_version: SchemaVersion,
    #[serde(flatten)]
    document: &'a T,
}

/// Prints a command's only JSON document: an object, with the version of its form.
pub fn json<T: Serialize>(document: &T) -> Result<(), Failure> {
    json_as_it_is(&Versioned { schema_version: SchemaVersion, document })
}

/// Prints a command's only JSON document: a list, or an object that has its version already.
pub fn json_as_it_is<T: Serialize>(document: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(document).map_err(|error| Failure::Undone(error.to_string()))?;
    HAS_DOCUMENT.store(true, Ordering::Relaxed);
    line(&text)
}

/// Returns whether the command has printed its JSON document. A failure after it prints no second
/// one.
pub fn has_document() -> bool {
    HAS_DOCUMENT.load(Ordering::Relaxed)
}

/// Prints text. A closed pipe (`| head`) is no error.
pub fn line(text: &str) -> Result<(), Failure> {
    match writeln!(std::io::stdout(), "{}", escaped(text)) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::Undone(format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// The notes that were printed.
static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Prints a note on standard error, once: a command may look at the same inputs several times.
pub fn note(text: &str) {
    let is_new = SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned());
    if is_new && !IS_QUIET.load(Ordering::Relaxed) {
        message(&format!("note: {text}"));
    }
}

/// Prints a line on standard error, which may be closed: a run goes on without its messages.
pub fn message(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", escaped(text));
}

/// The text without characters that control a terminal or reorder what it shows. They may come from
/// a file: a name, or a value that an error repeats.
fn escaped(text: &str) -> Cow<'_, str> {
    let is_plain = |character: char| match character {
        '\n' | '\t' => true,
        '\u{061c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => false,
        character => !character.is_control(),
    };
    if text.chars().all(is_plain) {
        return text.into();
    }
    // This form is JSON's too, so an escaped document stays one. All these characters have four
    // digits.
    let escape =
        |character: char| if is_plain(character) { character.to_string() } else { format!("\\u{:04x}", u32::from(character)) };
    text.chars().map(escape).collect()
}

/// Writes a file whole or not at all.
pub fn write(path: &Path, contents: &[u8]) -> Result<(), Failure> {
    confined::permit(path)?;
    write_whole(path, contents)?;
    tracing::info!("wrote `{}`, {} bytes", path.display(), contents.len());
    Ok(())
}

/// Whether progress is shown: on a terminal, unless the command is to be quiet.
fn shows_progress() -> bool {
    std::io::stderr().is_terminal() && !IS_QUIET.load(Ordering::Relaxed)
}

/// Makes a progress bar; hidden if standard error is not a terminal.
pub fn progress(length: usize, what: &str) -> ProgressBar {
    if !shows_progress() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length as u64);
    let style = ProgressStyle::with_template("{prefix:<10} {bar:40} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(what.to_string());
    bar
}

/// Shows that a command of unknown length goes on; hidden if standard error is not a terminal.
pub fn spinner(what: &str) -> ProgressBar {
    if !shows_progress() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner();
    bar.set_style(
        ProgressStyle::with_template("{prefix:<10} {spinner} {elapsed} {wide_msg}")
            .unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    bar.set_prefix(what.to_string());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Does something that may take seconds, under a spinner.
pub fn with_spinner<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let (bar, started) = (spinner(what), Instant::now());
    let result = work();
    bar.finish_and_clear();
    tracing::info!("{what}: {:.3} s", started.elapsed().as_secs_f64());
    result
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        assert_eq!(escaped("two\nlines, a\ttab and µs"), "two\nlines, a\ttab and µs");
        assert_eq!(escaped("\u{1b}[2Jred\r\u{9b}\u{202e}"), r"\u001b[2Jred\u000d\u009b\u202e");
        let json = serde_json::to_string("\u{9b}\u{202e}").expect("a text is JSON");
        assert!(serde_json::from_str::<String>(&escaped(&json)).is_ok(), "an escaped document stays one");
    }
}
