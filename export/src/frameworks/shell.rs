//! Shell scripts as far as a job's launch needs them: assignments, arrays, variables and sums are
//! expanded, branches on the script's own variables are decided, and the words of the launching
//! command are found. No command is executed. Variables that the script does not assign stay as
//! written (`$NAME`), and so do those that it assigns in a branch that may not be taken. It must
//! not know frameworks.

mod assignments;
mod blocks;
mod branches;
mod expansion;
mod launches;
mod lexer;
mod ranks;
mod sourced;

use super::FrameworkError;
use assignments::Assigned;
use blocks::{Loop, definition, in_braces};
use branches::{Branches, Joined, Taken};
use expansion::assigned_next;
use launches::Launch;
pub(super) use launches::is_recipe;
use lexer::{Piece, Token, Word};
use std::collections::{BTreeMap, BTreeSet};

/// Reads a file in the folder of a script; `None` if it does not exist.
type ReadFile<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Finds the command that starts a job: its words after the name of the Python script. If the text
/// is a list of arguments, that is all words. `file` reads a script that this one sources or runs.
pub(super) fn launch(text: &str, file: ReadFile<'_>) -> Result<Started, FrameworkError> {
    let mut script = Script { file: Some(file), ..Script::default() };
    script.read(&lexer::tokens(text));
    script.run_uncalled();
    if script.launches.is_empty() {
        return Ok(script.without_launch());
    }
    let is_training = |launch: &&Launch| launch.script.contains("train");
    // A script's own launches have precedence over those of scripts that it runs.
    let own: Vec<&Launch> = script.launches.iter().filter(|launch| !launch.is_inner).collect();
    let all: Vec<&Launch> = if own.is_empty() { script.launches.iter().collect() } else { own };
    let of_training: Vec<&Launch> = all.iter().copied().filter(is_training).collect();
    let mut chosen = if of_training.is_empty() { all } else { of_training };
    chosen.dedup_by(|left, right| left.arguments == right.arguments);
    let mut notes = script.notes.clone();
    if let [only] = chosen[..] {
        let mut others: Vec<&str> =
            script.launches.iter().map(|launch| launch.script.as_str()).filter(|other| *other != only.script).collect();
        others.dedup();
        if !others.is_empty() {
            notes.push(format!("the script also starts `{}`: the job is that of `{}`", others.join("`, `"), only.script));
        }
    }
    match chosen[..] {
        [only] => Ok(Started {
            script: Some(only.script.clone()),
            launcher: only.launcher.clone(),
            arguments: only.arguments.clone(),
            ranks: script.ranks(text, only),
            notes,
            unexpanded: script.unexpanded.clone(),
            foreign: None,
            settings: None,
        }),
        _ => Err(FrameworkError::Form {
            reason: format!("the script starts {} different jobs", chosen.len()),
            hint: "give the one command that you mean, with its arguments".into(),
        }),
    }
}

/// A job that a script starts.
pub(super) struct Started {
    /// The Python script, or the command of a tool whose settings are in a file (`swift-sft`);
    /// `None` if the text has only arguments.
    pub(super) script: Option<String>,
    /// The words before the script.
    pub(super) launcher: Vec<String>,
    /// The words after the name of the script.
    pub(super) arguments: Vec<String>,
    /// The ranks that the launcher starts, if they are known.
    pub(super) ranks: Option<usize>,
    /// What was left out, a sentence each.
    pub(super) notes: Vec<String>,
    /// Variables that are not expanded although the script assigns them, each with the reason.
    pub(super) unexpanded: BTreeMap<String, String>,
    /// A command of another launcher, which does not name a Python script.
    pub(super) foreign: Option<String>,
    /// The file of settings that the command names.
    pub(super) settings: Option<String>,
}

/// Whether a word starts a shell.
fn is_shell(word: &str) -> bool {
    matches!(word.rsplit('/').next(), Some("bash" | "sh" | "zsh"))
}

/// Whether values are arguments, which is so if the first one is a flag.
fn is_flags(values: &[String]) -> bool {
    values.first().is_some_and(|first| first.trim_start().starts_with("--"))
}

fn words_of(text: &str) -> Vec<String> {
    text.split_whitespace().map(String::from).collect()
}

/// The state while a script is read.
#[derive(Default)]
struct Script<'a> {
    /// Reads a script that this one sources or runs.
    file: Option<ReadFile<'a>>,
    variables: BTreeMap<String, Vec<String>>,
    /// The variables in the order in which they were first assigned.
    order: Vec<String>,
    /// Variables that are not expanded because a branch that may not be taken changes them, each
    /// with the reason.
    unexpanded: BTreeMap<String, String>,
    /// Variables that are empty because only branches that are not taken assign them.
    undone: BTreeSet<String>,
    branches: Branches,
    joined: Joined,
    /// The result of the previous command.
    last: Option<Taken>,
    /// The variables that scripts run by this one see, too.
    exported: BTreeSet<String>,
    /// `true` while a script that the first one runs with a shell is read.
    is_inner: bool,
    /// The number of bodies that were read.
    reads: usize,
    /// The variable that the next command assigns.
    next_assigned: Option<String>,
    /// Words of lines that start with a flag.
    arguments: Vec<String>,
    launches: Vec<Launch>,
    functions: BTreeMap<String, Function>,
    /// The arguments of the functions that are running, the innermost last.
    calls: Vec<Vec<String>>,
    /// The first command of another launcher, which does not name a Python script.
    foreign: Option<String>,
    /// That launcher's name and its first word, joined by a dash.
    command: Option<String>,
    /// The file of settings that the command names.
    settings: Option<String>,
    /// What was left out, a sentence each.
    notes: Vec<String>,
}

/// A function of a script.
#[derive(Clone, Debug)]
struct Function {
    body: Vec<Token>,
    is_called: bool,
}

/// The deepest nesting of calls that is run, since a function may call itself.
const MOST_CALLS: usize = 16;

/// The most bodies of functions, loops and other scripts that are read, since each may call itself
/// twice.
const MOST_READS: usize = 1 << 14;

/// The most rounds of a loop that are run.
const MOST_ROUNDS: usize = 256;

impl Script<'_> {
    fn read(&mut self, tokens: &[Token]) {
        self.reads += 1;
        if self.reads > MOST_READS {
            return self
                .note_once("the script calls itself, or runs loops, too often: the rest of these calls is left out".into());
        }
        let mut command: Vec<Word> = Vec::new();
        let mut rest = tokens;
        let mut depth = 0;
        loop {
            if command.is_empty()
                && let Some((counted, behind)) = Loop::begin(rest)
            {
                self.repeat(&counted);
                rest = behind;
            }
            if command.is_empty()
                && let Some((name, body, behind)) = definition(rest)
            {
                self.functions.insert(name, Function { body: body.to_vec(), is_called: false });
                rest = behind;
                continue;
            }
            let Some((token, behind)) = rest.split_first() else { break };
            rest = behind;
            match token {
                Token::Word(word) => {
                    let assigned = word.assigned().map(|(name, adds)| (name.to_string(), adds));
                    if let Some((name, adds)) = assigned.filter(|_| word.is_bare_assignment())
                        && let Some((Token::Open, inside)) = rest.split_first()
                    {
                        // Run the keywords before the array (`then ARGS=(...)`).
                        self.run(std::mem::take(&mut command));
                        let end = inside.iter().position(|token| matches!(token, Token::Close)).unwrap_or(inside.len());
                        let mut elements = Vec::new();
                        for token in &inside[..end] {
                            if let Token::Word(word) = token {
                                elements.extend(self.expand(word));
                            }
                        }
                        rest = inside.get(end + 1..).unwrap_or_default();
                        self.assign(&name, Assigned::Elements(elements), adds);
                    } else {
                        command.push(word.clone());
                    }
                }
                Token::End | Token::And | Token::Or => {
                    self.next_assigned = if command.is_empty() { None } else { assigned_next(rest) };
                    self.run(std::mem::take(&mut command));
                    self.joined = match token {
                        Token::And => Joined::And,
                        Token::Or => Joined::Or,
                        _ => Joined::Apart,
                    };
                }
                Token::Open => depth += 1,
                Token::Close if depth > 0 => depth -= 1,
                Token::Close => self.begin_arm(std::mem::take(&mut command)),
            }
        }
        self.run(command);
    }

    /// Begins an arm of a `case`, whose patterns end with a bracket: `case $SIZE in 7b)` or `70b)`.
    fn begin_arm(&mut self, mut words: Vec<Word>) {
        if words.first().and_then(Word::literal) == Some("case") {
            self.run(words.drain(..3.min(words.len())).collect());
        }
        if self.branches.has_arms() {
            let patterns: Vec<String> = words.iter().flat_map(|word| self.expand(word)).collect();
            let patterns: Vec<String> = patterns.iter().flat_map(|pattern| pattern.split('|')).map(String::from).collect();
            self.branches.arm(&patterns);
        } else {
            self.run(words);
        }
    }

    /// Runs the body of a loop for each of its words. If words are not known or are more than
    /// [`MOST_ROUNDS`], the loop is treated as a branch that may not be taken.
    fn repeat(&mut self, counted: &Loop<'_>) {
        let words: Vec<String> =
            counted.words.iter().flat_map(|word| self.expand(word)).flat_map(|word| in_braces(&word)).collect();
        let is_open = |word: &String| word.contains(['$', '*', '?', '`', '{']);
        if words.len() > MOST_ROUNDS || words.iter().any(is_open) {
            self.branches.keyword("for");
            self.read(counted.body);
            self.branches.keyword("done");
            return;
        }
        for word in words {
            self.assign(&counted.name, Assigned::Text(word), false);
            self.read(counted.body);
        }
    }

    /// Whether the next command is run.
    fn taken(&self) -> Taken {
        let last = self.last.unwrap_or(Taken::Yes);
        let by_result = match self.joined {
            Joined::Apart => Taken::Yes,
            Joined::And => last,
            Joined::Or => last.not(),
        };
        self.branches.taken().and(by_result)
    }

    /// Interprets one command.
    fn run(&mut self, mut command: Vec<Word>) {
        let mut is_negated = false;
        while let Some(keyword) = command.first().and_then(Word::literal) {
            if keyword == "case" {
                let subject = command.get(1).map(|word| self.expand(word).join(" ")).unwrap_or_default();
                self.branches.case(subject);
                return;
            }
            if keyword == "export" {
                let names = command.iter().skip(1).filter_map(|word| match word.assigned() {
                    Some((name, _)) => Some(name.to_owned()),
                    None => word.literal().map(str::to_owned),
                });
                self.exported.extend(names);
            }
            if keyword == "!" {
                is_negated = !is_negated;
            } else if !self.branches.keyword(keyword) {
                break;
            }
            command.remove(0);
        }
        if command.is_empty() {
            return;
        }
        // `: "${NAME:=default}"` assigns the default.
        if command.first().and_then(Word::literal) == Some(":") {
            for piece in command.iter().flat_map(|word| &word.pieces) {
                if let Piece::Variable { name, default: Some(default), .. } = piece
                    && !self.variables.contains_key(name)
                {
                    self.assign(name, Assigned::Text(default.clone()), false);
                }
            }
            return;
        }
        // `NAME=value command`: the command sees the variable.
        let is_prefix = command.iter().any(|word| word.assigned().is_none());
        while let Some(word) = command.first().filter(|word| word.assigned().is_some()) {
            if let Some((name, adds)) = word.assigned().map(|(name, adds)| (name.to_string(), adds)) {
                if is_prefix {
                    self.exported.insert(name.clone());
                }
                let value = self.expand(&word.value()).join(" ");
                self.assign(&name, Assigned::Text(value), adds);
            }
            command.remove(0);
        }
        let words: Vec<String> = command.iter().flat_map(|word| self.expand(word)).collect();
        let words = self.without_surroundings(words);
        let result = self.without_arguments(&words).or_else(|| branches::result(&words));
        if result.is_none() && self.taken() != Taken::No {
            self.look_at(words);
        }
        let result = if is_negated { result.map(Taken::not) } else { result };
        // The result of another command is unknown in a condition; elsewhere the command is assumed
        // to succeed.
        self.branches.result(self.combined(result.unwrap_or(Taken::Unknown)));
        self.last = Some(self.combined(result.unwrap_or(Taken::Yes)));
    }

    /// Runs a function's body with its arguments.
    fn call(&mut self, name: &str, arguments: Vec<String>) {
        let Some(function) = self.functions.get_mut(name).filter(|_| self.calls.len() < MOST_CALLS) else { return };
        function.is_called = true;
        let body = function.body.clone();
        self.calls.push(arguments);
        self.read(&body);
        self.calls.pop();
    }

    /// Runs the functions that nothing called, until one starts a job: another script may source
    /// this one and call them.
    fn run_uncalled(&mut self) {
        let uncalled = self.functions.iter().filter(|(_, function)| !function.is_called).map(|(name, _)| name.clone());
        for name in uncalled.collect::<Vec<_>>() {
            if self.launches.is_empty() {
                self.call(&name, Vec::new());
            }
        }
    }

    /// The result of a chain of commands joined by `&&` or `||`, up to this one.
    fn combined(&self, result: Taken) -> Taken {
        let last = self.last.unwrap_or(Taken::Yes);
        match self.joined {
            Joined::Apart => result,
            Joined::And => last.and(result),
            Joined::Or => last.or(result),
        }
    }

    /// Runs a command if it starts a job or has further commands.
    fn look_at(&mut self, words: Vec<String>) {
        let Some(first) = words.first() else { return };
        if first.starts_with("--") {
            // In a shell, a comment between the lines of a command ends it; the author did not mean
            // that.
            let open = self.launches.last_mut().map(|launch| &mut launch.arguments);
            return open.unwrap_or(&mut self.arguments).extend(words);
        }
        if matches!(first.as_str(), "echo" | "printf" | "cat" | "mkdir" | "cp" | "cd") {
            return;
        }
        if matches!(first.as_str(), "source" | ".") {
            return self.source(words.get(1).map(String::as_str).unwrap_or_default());
        }
        if first == "shift" {
            let count = words.get(1).and_then(|count| count.parse().ok()).unwrap_or(1);
            if let Some(arguments) = self.calls.last_mut() {
                arguments.drain(..arguments.len().min(count));
            }
            return;
        }
        if self.functions.contains_key(first) {
            let name = first.clone();
            return self.call(&name, words.into_iter().skip(1).collect());
        }
        if let Some(at) =
            words.windows(2).position(|pair| is_shell(&pair[0]) && pair[1].starts_with('-') && pair[1].ends_with('c'))
            && let Some(text) = words.get(at + 2).filter(|_| self.calls.len() < MOST_CALLS)
        {
            // `srun bash -c '$LAUNCHER $COMMAND'`: the inner shell expands what is exported.
            let (before, inner) = (self.launches.len(), lexer::tokens(text));
            self.calls.push(words.get(at + 4..).unwrap_or_default().to_vec());
            self.read(&inner);
            self.calls.pop();
            return self.put_launcher(before, &words[..at]);
        }
        // `bash train.sh 7b`
        if let Some(at) = words.windows(2).position(|pair| is_shell(&pair[0]) && pair[1].ends_with(".sh")) {
            let (before, arguments) = (self.launches.len(), words.get(at + 2..).unwrap_or_default().to_vec());
            self.run_script(&words[at + 1], arguments);
            return self.put_launcher(before, &words[..at]);
        }
        // `eval $COMMAND`: quotes and redirections within the words are interpreted again.
        if first == "eval" && self.calls.len() < MOST_CALLS {
            let tokens = lexer::tokens(&words.get(1..).unwrap_or_default().join(" "));
            self.calls.push(self.calls.last().cloned().unwrap_or_default());
            self.read(&tokens);
            self.calls.pop();
            return;
        }
        self.start(words);
    }

    /// The result of a loop's condition that tests the script's own arguments, of which there are
    /// assumed to be none.
    fn without_arguments(&mut self, words: &[String]) -> Option<Taken> {
        let asks = |word: &String| ["$1", "$#", "$@"].contains(&word.as_str());
        let is_asked = words.first().is_some_and(|first| first == "getopts") || words.iter().any(asks);
        let result = self.branches.ends_loop().filter(|_| self.calls.is_empty() && is_asked)?;
        self.note_once("the script is taken to be started without arguments of its own".into());
        Some(result)
    }

    fn note_once(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Prepends the words before a shell (`srun bash job.sh`) to the launches that it started,
    /// those from `first` on.
    fn put_launcher(&mut self, first: usize, words: &[String]) {
        self.launches[first..].iter_mut().for_each(|launch| {
            launch.launcher.splice(0..0, words.iter().cloned());
        });
    }
}
