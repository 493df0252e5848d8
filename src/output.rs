//! Output: one JSON document or text, complete files, and progress on a terminal.

use crate::confined;
use crate::escaping::escaped;
use crate::failure::{Colours, Failure, code, in_terminal};
use crate::host::{self, Instant, ProgressBar};
use foretell_units::SchemaVersion;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use tracing::level_filters::LevelFilter;

/// How much the command prints on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Errors only.
    Quiet,
    /// Notes and progress as well.
    Usual,
    /// Also each action, with its duration.
    Verbose,
    /// Also every file that is read.
    Detailed,
}

/// Whether notes and progress are shown.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Sets what is printed on standard error. Call it once, at the start.
pub fn set_verbosity(verbosity: Verbosity) {
    IS_QUIET.store(verbosity == Verbosity::Quiet, Ordering::Relaxed);
    let level = match verbosity {
        Verbosity::Quiet => LevelFilter::ERROR,
        Verbosity::Usual => LevelFilter::WARN,
        Verbosity::Verbose => LevelFilter::INFO,
        Verbosity::Detailed => LevelFilter::DEBUG,
    };
    host::trace_from(level);
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

/// Prints a command's only JSON document: a list, or an object that already has its version.
pub fn json_as_it_is<T: Serialize>(document: &T) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(document).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))?;
    HAS_DOCUMENT.store(true, Ordering::Relaxed);
    line(&text)
}

/// Returns whether the command has printed its JSON document. A failure after it prints no second
/// one.
pub fn has_document() -> bool {
    HAS_DOCUMENT.load(Ordering::Relaxed)
}

/// Prints text. A closed pipe (`| head`) is not an error.
pub fn line(text: &str) -> Result<(), Failure> {
    match writeln!(host::stdout(), "{}", escaped(text)) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::undone(code::FILE_UNWRITABLE, format!("standard output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// The notes that were printed.
static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Prints a note on standard error, at most once: a command may read the same inputs several times.
pub fn note(text: &str) {
    let is_new = SAID.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned());
    if is_new && !IS_QUIET.load(Ordering::Relaxed) {
        message(&format!("note: {text}"));
    }
}

/// Prints a failure on standard error: with colours if that is a terminal and `NO_COLOR` is not
/// set.
pub fn failure(failure: &Failure) {
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = if host::has_terminal() && !is_plain { Colours::On } else { Colours::Off };
    let _ = writeln!(host::stderr(), "{}", in_terminal(failure.diagnostic(), colours));
}

/// Prints a failure on standard error, and with `--json` also as one document on standard output,
/// unless the command has printed its own.
pub fn report(failure: &Failure, is_json: bool) {
    self::failure(failure);
    confined::tell(failure);
    if is_json && !has_document() {
        // The exit status reports the failure even if standard output is closed.
        let _ = json(&failure.document());
    }
}

/// Prints a line on standard error. Errors are ignored: a run continues even if the stream is
/// closed.
pub fn message(text: &str) {
    let _ = writeln!(host::stderr(), "{}", escaped(text));
}

/// Writes a file completely or not at all.
pub fn write(path: &Path, contents: &[u8]) -> Result<(), Failure> {
    confined::permit(path)?;
    host::write_whole(path, contents)?;
    tracing::info!("wrote `{}`, {} bytes", path.display(), contents.len());
    Ok(())
}

/// Whether progress is shown: on a terminal, unless the command is quiet.
fn shows_progress() -> bool {
    host::has_terminal() && !IS_QUIET.load(Ordering::Relaxed)
}

/// Makes a progress bar; hidden if standard error is not a terminal.
pub fn progress(length: usize, what: &str) -> ProgressBar {
    if shows_progress() { host::progress_bar(length, what) } else { ProgressBar::hidden() }
}

/// Shows that work of unknown length is in progress; hidden if standard error is not a terminal.
pub fn spinner(what: &str) -> ProgressBar {
    if shows_progress() { host::spinner(what) } else { ProgressBar::hidden() }
}

/// Runs `work`, which may take seconds, under a spinner.
pub fn with_spinner<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let (bar, started) = (spinner(what), Instant::now());
    let result = work();
    bar.finish_and_clear();
    tracing::info!("{what}: {:.3} s", started.elapsed().as_secs_f64());
    result
}
