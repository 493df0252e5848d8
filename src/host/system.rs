//! The operating system, through the standard library and the executor.

use crate::failure::{Failure, code};
use foretell_executor::regular;
use indicatif::ProgressStyle;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::error::Error;
use std::fs::Permissions;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::level_filters::LevelFilter;

pub use foretell_executor::write_whole;
pub use indicatif::ProgressBar;
pub use std::fs::File;
pub use std::time::Instant;

/// Whether `local` and `local-gpus` can be looked up.
pub const SEES_MACHINE: bool = true;

/// Reads a regular file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    regular::read(path, most)
}

/// Returns whether there is a regular file.
pub fn is_file(path: &Path) -> bool {
    path.is_file()
}

/// Makes a path absolute, without following links.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    std::path::absolute(path)
}

/// Makes the path of something that exists absolute, with links followed.
pub fn resolved(path: &Path) -> io::Result<PathBuf> {
    path.canonicalize()
}

/// Creates a file to which lines are added, or empties it.
pub fn create(path: &Path) -> io::Result<File> {
    File::create(path)
}

/// Writes a short file.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    std::fs::write(path, contents)
}

/// Writes a file piece by piece, completely or not at all.
pub fn write_streamed(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let readable = Permissions::from_mode(0o644);
    let mut writer = BufWriter::new(tempfile::Builder::new().permissions(readable).tempfile_in(folder)?);
    write(&mut writer)?;
    let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Makes this process end with the one that started it, which is `parent` if that is known.
pub fn end_with_parent(parent: Option<i32>) -> Result<(), Failure> {
    // If the call fails, the process that asked still ends this one at the time limit.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // A parent that ended before the call sends no signal.
    if parent.is_some() && getppid().map(|parent| parent.as_raw_nonzero().get()) != parent {
        return Err(Failure::undone(code::SYSTEM, "the process that asked has ended"));
    }
    Ok(())
}

/// Standard output.
pub fn stdout() -> impl Write {
    io::stdout()
}

/// Standard error.
pub fn stderr() -> impl Write {
    io::stderr()
}

/// Returns whether standard error is a terminal.
pub fn has_terminal() -> bool {
    io::stderr().is_terminal()
}

/// Prints trace events from `level` on to standard error.
pub fn trace_from(level: LevelFilter) {
    // Rank processes share standard error, and lines with colours would be escaped in their logs.
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_timer(tracing_subscriber::fmt::time::uptime());
    // It fails only if there is one already.
    let _ = subscriber.try_init();
}

/// Makes a progress bar of `length` parts, with the text `what`.
pub fn progress_bar(length: usize, what: &str) -> ProgressBar {
    let bar = ProgressBar::new(length as u64);
    let style = ProgressStyle::with_template("{prefix:<10} {bar:40} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(what.to_string());
    bar
}

/// Makes a bar for work of unknown length.
pub fn spinner(what: &str) -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{prefix:<10} {spinner} {elapsed} {wide_msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.set_prefix(what.to_string());
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
