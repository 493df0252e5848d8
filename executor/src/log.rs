//! A rank's log: its standard error, which the launcher keeps in a file.

use std::io::Write;

/// Writes a line. A log that cannot be written, on a full disk or to a closed pipe, must not end
/// the rank, and must not hide the error that the rank reports to the launcher.
pub(crate) fn log(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
