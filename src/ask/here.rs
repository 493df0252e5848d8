//! One answer on hosts that cannot start processes: the command runs in this program, which answers
//! only this question.

use super::answer::{REPORT, WRITTEN, notes};
use super::typed::Typed;
use super::{Answer, Refusal, Request};
use crate::confined;
use crate::host::{self, FOLDER, Instant};
use std::collections::BTreeMap;

/// Answers a question. `line` is clap's description of the command line, and `run` runs a command
/// line and returns its exit status.
pub fn answer(line: &clap::Command, request: &Request, run: impl FnOnce(&[String]) -> u8) -> Result<Answer, Refusal> {
    let started = Instant::now();
    let typed = Typed::new(line, request)?;
    for (name, text) in &typed.files {
        host::write(name, text.as_bytes()).map_err(|error| Refusal::Broken(format!("a file cannot be written: {error}")))?;
    }
    let mut words = ["foretell", "--json", "--confined", FOLDER].map(str::to_owned).to_vec();
    words.extend(typed.words(request));
    let status = run(&words);
    let [document, messages] = host::printed();
    let mut files = texts_in("");
    let message = files.remove(confined::FAILURE).filter(|_| status != 0);
    let document = document.trim();
    if document.is_empty() {
        return Err(Refusal::Broken(message.unwrap_or_else(|| format!("the command ended with status {status}"))));
    }
    Ok(Answer {
        status: status.into(),
        document: document.to_owned(),
        message,
        notes: notes(&messages),
        line: typed.line,
        seconds: started.elapsed().as_secs_f64(),
        report: files.remove(REPORT),
        files: texts_in(WRITTEN),
    })
}

/// The texts of the files in a folder, by name.
fn texts_in(folder: &str) -> BTreeMap<String, String> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    host::files_in(folder).into_iter().map(|(name, bytes)| (name, text(bytes))).collect()
}
