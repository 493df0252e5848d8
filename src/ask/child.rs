//! One answer: a child process of this program in a private folder, watched until it ends, is
//! cancelled, or takes too much.

use super::answer::{PROGRESS, REPORT, WRITTEN, notes};
use super::typed::Typed;
use super::{Answer, Limits, Refusal, Request};
use crate::confined;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The files for a child's standard output and standard error, in its folder.
const DOCUMENT: &str = "document.json";
const MESSAGES: &str = "messages.txt";

/// The largest file that a child writes: its document, or a report.
const LARGEST_FILE: u64 = 64 << 20;
/// The most bytes of messages that are read.
const MOST_MESSAGES: u64 = 64 << 10;
/// The most open files of a child.
const MOST_OPEN: u64 = 256;

/// The exit status of a process that panicked.
const PANICKED: i32 = 101;
/// Texts that a process prints when it gets no memory: by its allocator, or by a thread that gets
/// no stack (EAGAIN, ENOMEM).
const OUT_OF_MEMORY: [&str; 5] = ["memory allocation of", "os error 11", "os error 12", "Os { code: 11", "Os { code: 12"];

/// Time between two checks of a child that has just started, and of one that takes longer.
const LOOKS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(8)];
/// How long a child counts as just started.
const JUST_STARTED: Duration = Duration::from_millis(250);

/// A child that works on an answer.
pub(super) struct RunningChild {
    folder: tempfile::TempDir,
    child: Child,
    line: String,
    started: Instant,
}

impl RunningChild {
    /// Starts a child. `program` is this program.
    pub fn start(program: &Path, request: &Request, typed: Typed, limits: &Limits) -> Result<Self, Refusal> {
        let folder = tempfile::Builder::new().prefix("foretell-").tempdir().map_err(broken("no folder"))?;
        let at = |name: &str| folder.path().join(name);
        for (name, text) in &typed.files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap_or(folder.path())).map_err(broken("no folder"))?;
            fs::write(path, text).map_err(broken("a file cannot be written"))?;
        }
        let mut command = Command::new(program);
        command.arg("--json").arg("--confined").arg(folder.path());
        command.arg(format!("--parent={}", std::process::id())).args(typed.words(request));
        if typed.writes_files {
            fs::create_dir(at(WRITTEN)).map_err(broken("no folder"))?;
        }
        let file = |name: &str| File::create(at(name)).map_err(broken("a file cannot be written"));
        command.current_dir(folder.path()).stdin(Stdio::null()).stdout(file(DOCUMENT)?).stderr(file(MESSAGES)?);
        let child = command.spawn().map_err(broken("no process starts"))?;
        let working = Self { folder, child, line: typed.line, started: Instant::now() };
        working.limit(limits).map_err(broken("a process cannot be limited"))?;
        Ok(working)
    }

    /// Sets the system's limits on the child right after its start.
    fn limit(&self, limits: &Limits) -> std::io::Result<()> {
        // CPU time that no process reaches within the time limit, even on all cores, unless it
        // outlives this one.
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
        let seconds = (limits.answer_time.value().ceil().max(1.0) as u64).saturating_mul(cores);
        let all = [
            (Resource::Data, limits.answer_memory.count()),
            (Resource::Fsize, LARGEST_FILE),
            (Resource::Nofile, MOST_OPEN),
            (Resource::Core, 0),
            (Resource::Cpu, seconds),
        ];
        for (resource, most) in all {
            match prlimit(Some(Pid::from_child(&self.child)), resource, Rlimit { current: Some(most), maximum: Some(most) }) {
                // The child has ended already.
                Err(rustix::io::Errno::SRCH) => break,
                set => set.map(drop)?,
            }
        }
        Ok(())
    }

    /// The file with the search's progress.
    pub fn progress_file(&self) -> PathBuf {
        self.folder.path().join(PROGRESS)
    }

    /// Waits for the answer. The child has ended when this returns.
    pub fn finish(mut self, limits: &Limits, is_cancelled: &AtomicBool) -> Result<Answer, Refusal> {
        let status = loop {
            if let Some(status) = self.child.try_wait().map_err(broken("a process is lost"))? {
                break status;
            }
            if is_cancelled.load(Ordering::Relaxed) {
                return Err(Refusal::Cancelled);
            }
            let elapsed = self.started.elapsed();
            if elapsed.as_secs_f64() > limits.answer_time.value() {
                return Err(Refusal::Time(limits.answer_time));
            }
            std::thread::sleep(LOOKS[usize::from(elapsed > JUST_STARTED)]);
        };
        self.answer(status, limits)
    }

    fn answer(&self, status: ExitStatus, limits: &Limits) -> Result<Answer, Refusal> {
        let messages = self.read(MESSAGES, MOST_MESSAGES)?;
        let is_crash = status.code().is_none_or(|status| status == PANICKED);
        if is_crash && OUT_OF_MEMORY.iter().any(|words| messages.contains(words)) {
            return Err(Refusal::Memory(limits.answer_memory));
        }
        let Some(status) = status.code() else {
            let signal = status.signal().expect("invariant: what has no code ended by a signal");
            return Err(Refusal::Broken(format!("signal {signal} ended the process that was to answer")));
        };
        let document = self.read(DOCUMENT, LARGEST_FILE)?;
        let document = document.trim();
        let failure = (status != 0).then(|| self.read(confined::FAILURE, MOST_MESSAGES)).and_then(Result::ok);
        if document.is_empty() {
            let why = failure.unwrap_or_else(|| format!("the process ended with status {status}"));
            return Err(Refusal::Broken(why));
        }
        Ok(Answer {
            status,
            document: document.to_owned(),
            message: failure,
            notes: notes(&messages),
            line: self.line.clone(),
            seconds: self.started.elapsed().as_secs_f64(),
            report: self.folder.path().join(REPORT).is_file().then(|| self.read(REPORT, LARGEST_FILE)).transpose()?,
            files: self.written()?,
        })
    }

    /// The text of a file in the folder, up to `most` bytes.
    fn read(&self, name: &str, most: u64) -> Result<String, Refusal> {
        read(&self.folder.path().join(name), most)
    }

    /// The files that the child wrote into its output folder, without those in subfolders.
    fn written(&self) -> Result<BTreeMap<String, String>, Refusal> {
        let entries = match fs::read_dir(self.folder.path().join(WRITTEN)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            entries => entries.map_err(broken("a folder cannot be read"))?,
        };
        let files = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        files.map(|entry| Ok((entry.file_name().to_string_lossy().into_owned(), read(&entry.path(), LARGEST_FILE)?))).collect()
    }
}

impl Drop for RunningChild {
    fn drop(&mut self) {
        // The child may have ended; then there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(path: &Path, most: u64) -> Result<String, Refusal> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(broken("a file cannot be read"))?;
    file.take(most).read_to_end(&mut bytes).map_err(broken("a file cannot be read"))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn broken<E: std::fmt::Display>(what: &'static str) -> impl Fn(E) -> Refusal {
    move |error| Refusal::Broken(format!("{what}: {error}"))
}
