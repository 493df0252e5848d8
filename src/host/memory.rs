//! A browser's tab in place of a system: files and streams are bytes in memory, and the page
//! provides the clock. One instance of the module answers one question, so nothing is ever removed.

use crate::failure::{Failure, code};
use foretell_topologies::Topology;
use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, ErrorKind, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tracing::level_filters::LevelFilter;

pub use web_time::Instant;

/// Whether `local` and `local-gpus` can be looked up.
pub const SEES_MACHINE: bool = false;

/// The folder in which commands run.
pub const FOLDER: &str = "/question";

/// Files by their absolute paths.
static FILES: Mutex<BTreeMap<PathBuf, Vec<u8>>> = Mutex::new(BTreeMap::new());
static STDOUT: Mutex<Vec<u8>> = Mutex::new(Vec::new());
static STDERR: Mutex<Vec<u8>> = Mutex::new(Vec::new());

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An absolute path without `.` and `..`.
fn place(path: &Path) -> PathBuf {
    let mut place = PathBuf::new();
    for component in Path::new(FOLDER).join(path).components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(place.pop()),
            component => place.push(component),
        }
    }
    place
}

/// Reads a file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let bytes = lock(&FILES).get(&place(path)).cloned();
    // The message is Linux's.
    let bytes = bytes.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "No such file or directory (os error 2)"))?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it is longer than {} MiB", most >> 20)));
    }
    Ok(bytes)
}

/// Returns whether there is a file.
pub fn is_file(path: &Path) -> bool {
    lock(&FILES).contains_key(&place(path))
}

/// Makes a path absolute. `..` stays.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    Ok(Path::new(FOLDER).join(path).components().filter(|component| *component != Component::CurDir).collect())
}

/// Makes a path absolute. There are no links to follow.
pub fn resolved(path: &Path) -> io::Result<PathBuf> {
    Ok(place(path))
}

/// Writes a file.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    lock(&FILES).insert(place(path), contents.to_vec());
    Ok(())
}

/// Writes a file.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), Failure> {
    write(path, contents).map_err(|error| Failure::undone(code::FILE_UNWRITABLE, error.to_string()))
}

/// Writes a file piece by piece, completely or not at all.
pub fn write_streamed(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let mut contents = Vec::new();
    write(&mut contents)?;
    lock(&FILES).insert(place(path), contents);
    Ok(())
}

/// The files directly in a folder, by name.
pub fn files_in(folder: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = place(Path::new(folder));
    let files = lock(&FILES);
    let inside = files.iter().filter(|(path, _)| path.parent() == Some(&folder));
    inside.filter_map(|(path, text)| Some((path.file_name()?.to_str()?.to_owned(), text.clone()))).collect()
}

/// A file of lines. The page gets each line at once.
#[derive(Debug)]
pub struct File;

/// Makes a file of lines. The page keeps them.
pub fn create(_: &Path) -> io::Result<File> {
    Ok(File)
}

impl Write for File {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // SAFETY: The page reads these bytes during the call, and keeps no pointer.
        unsafe { page::progress(line.as_ptr(), line.len()) };
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A stream that is kept until the end.
struct Stream(&'static Mutex<Vec<u8>>);

impl Write for Stream {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        lock(self.0).extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Does nothing: the page ends an instance whose answer is not wanted any more.
pub fn end_with_parent(_: Option<i32>) -> Result<(), Failure> {
    Ok(())
}

/// Standard output.
pub fn stdout() -> impl Write {
    Stream(&STDOUT)
}

/// Standard error.
pub fn stderr() -> impl Write {
    Stream(&STDERR)
}

/// The texts of standard output and standard error.
pub fn printed() -> [String; 2] {
    [&STDOUT, &STDERR].map(|stream| String::from_utf8_lossy(&lock(stream)).into_owned())
}

/// Returns whether standard error is a terminal.
pub fn has_terminal() -> bool {
    false
}

/// Does nothing: no question asks for a trace.
pub fn trace_from(_: LevelFilter) {}

/// A progress bar that is not shown.
#[derive(Clone, Copy, Debug)]
pub struct ProgressBar;

#[allow(clippy::unused_self, reason = "the interface is indicatif's")]
impl ProgressBar {
    /// Makes a bar.
    pub fn hidden() -> Self {
        Self
    }

    /// Counts parts that are done.
    pub fn inc(&self, _: u64) {}

    /// Sets the text beside the bar.
    pub fn set_message(&self, _: String) {}

    /// Removes the bar.
    pub fn finish_and_clear(&self) {}
}

/// Makes a progress bar of a number of parts, with a text.
pub fn progress_bar(_: usize, _: &str) -> ProgressBar {
    ProgressBar
}

/// Makes a bar for work of unknown length.
pub fn spinner(_: &str) -> ProgressBar {
    ProgressBar
}

fn no_machine() -> Failure {
    Failure::input(code::OPTION_VALUE, "a page in a browser does not see this machine").hint("use `foretell` on the command line")
}

/// Refuses: a page does not see the machine's processors.
pub fn local() -> Result<Topology, Failure> {
    Err(no_machine())
}

/// Refuses: a page does not see the machine's GPUs.
pub fn local_gpus(_: &str) -> Result<Topology, Failure> {
    Err(no_machine())
}

/// The name of this machine's processor, which a page does not see.
pub fn processor() -> String {
    "a browser".into()
}

/// Tells the page of a panic, which ends the instance.
pub fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.to_string();
        // SAFETY: The page reads these bytes during the call, and keeps no pointer.
        unsafe { page::panicked(message.as_ptr(), message.len()) };
    }));
}

/// Functions of the page.
mod page {
    #[link(wasm_import_module = "page")]
    unsafe extern "C" {
        /// Receives the message of a panic.
        pub fn panicked(message: *const u8, length: usize);
        /// Receives a line of a search's progress.
        pub fn progress(line: *const u8, length: usize);
    }
}
