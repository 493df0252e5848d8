//! Scripts that a script sources or runs.

use super::{MOST_CALLS, Script, lexer};

/// Ends of the names of files that are sourced for a machine's or Python's set-up.
const ENVIRONMENTS: [&str; 6] = ["activate", "bashrc", "profile", "conda.sh", "setvars.sh", "modules.sh"];

impl Script<'_> {
    /// Runs another script with its arguments.
    pub(super) fn run_script(&mut self, path: &str, arguments: Vec<String>) {
        let path = path.trim_start_matches("./");
        match self.file.and_then(|file| file(path)).filter(|_| self.calls.len() < MOST_CALLS) {
            Some(text) => {
                self.calls.push(arguments);
                self.read(&lexer::tokens(&text));
                self.calls.pop();
            }
            None => _ = self.foreign.get_or_insert(format!("`{path}`, a script that does not lie beside this one,")),
        }
    }

    /// Reads a script that this one sources. What is in a directory that is not known
    /// (`$DIR/job.sh`) is looked for beside the script.
    pub(super) fn source(&mut self, path: &str) {
        let name = path.rsplit('/').next().unwrap_or(path);
        let path = if path.contains('$') { name } else { path.trim_start_matches("./") };
        match self.file.and_then(|file| file(path)).filter(|_| self.calls.len() < MOST_CALLS) {
            Some(text) => {
                self.calls.push(self.calls.last().cloned().unwrap_or_default());
                self.read(&lexer::tokens(&text));
                self.calls.pop();
            }
            // They set up a machine or Python, and no job.
            None if ENVIRONMENTS.iter().any(|end| name.ends_with(end)) => {}
            None => self
                .notes
                .push(format!("`source {path}`: there is no such file beside the script, and what it assigns is left out")),
        }
    }
}
