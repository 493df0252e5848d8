//! Scripts that a script sources or runs.

use super::{MOST_CALLS, Script, lexer};

/// Ends of the names of files that only set up a machine or Python.
const ENVIRONMENTS: [&str; 6] = ["activate", "bashrc", "profile", "conda.sh", "setvars.sh", "modules.sh"];

impl Script<'_> {
    /// Runs another script with its arguments. The script sees exported variables, and does not
    /// change this script's.
    pub(super) fn run_script(&mut self, path: &str, arguments: Vec<String>) {
        let Some(text) = self.beside(path) else {
            self.foreign.get_or_insert(format!("`{path}`, a script that does not lie beside this one,"));
            return;
        };
        if self.calls.len() >= MOST_CALLS {
            return;
        }
        let exported = self.variables.iter().filter(|(name, _)| self.exported.contains(*name));
        let seen = exported.map(|(name, value)| (name.clone(), value.clone())).collect();
        let variables = std::mem::replace(&mut self.variables, seen);
        let (unexpanded, undone) = (std::mem::take(&mut self.unexpanded), std::mem::take(&mut self.undone));
        let functions = std::mem::take(&mut self.functions);
        let was_inner = std::mem::replace(&mut self.is_inner, true);
        self.calls.push(arguments);
        self.read(&lexer::tokens(&text));
        self.calls.pop();
        (self.variables, self.functions, self.is_inner) = (variables, functions, was_inner);
        (self.unexpanded, self.undone) = (unexpanded, undone);
    }

    /// Reads a script that this one sources. If its folder is not known (`$DIR/job.sh`), the file
    /// is looked for in this script's folder.
    pub(super) fn source(&mut self, path: &str) {
        let name = path.rsplit('/').next().unwrap_or(path);
        // These set up a machine or Python, and start no job.
        if ENVIRONMENTS.iter().any(|end| name.ends_with(end)) {
            return;
        }
        let path = if path.contains('$') { name } else { path };
        let Some(text) = self.beside(path) else {
            let note = format!("`source {path}`: there is no such file beside the script, and what it assigns is left out");
            return self.note_once(note);
        };
        if self.calls.len() < MOST_CALLS {
            self.note_once(format!("`source {path}`: the file of that name beside the script counts"));
            self.calls.push(self.calls.last().cloned().unwrap_or_default());
            self.read(&lexer::tokens(&text));
            self.calls.pop();
        }
    }

    /// A file in the script's folder. Absolute paths are not read: this machine's files are not the
    /// job's.
    fn beside(&self, path: &str) -> Option<String> {
        let path = path.strip_prefix("./").map_or(path, |rest| rest.trim_start_matches('/'));
        self.file.filter(|_| !path.starts_with(['/', '~'])).and_then(|file| file(path))
    }
}
