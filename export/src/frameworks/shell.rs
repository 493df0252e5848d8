//! Shell scripts as far as a job's launch needs them: assignments, arrays, variables and sums are
//! expanded, branches on the script's own variables are decided, and the words of the launching
//! command are found. Nothing is run. What a script leaves to its surroundings stays as it is
//! written (`$NAME`), and so does what it assigns in a branch that may not be taken.
//! It must not know a framework.

mod blocks;
mod branches;
mod lexer;

use super::FrameworkError;
use super::deciding::may_decide;
use blocks::{Loop, definition};
use branches::{Branches, Joined, Taken};
use lexer::{Piece, Token, Word};
use std::collections::{BTreeMap, BTreeSet};

/// The words of the command that starts a job, after the name of its Python script; or all words,
/// where the text is a list of arguments.
pub(super) fn launch(text: &str) -> Result<Started, FrameworkError> {
    let mut script = Script::default();
    script.read(&lexer::tokens(text));
    script.run_uncalled();
    if script.launches.is_empty() {
        return Ok(script.without_launch());
    }
    let is_training = |launch: &&Launch| launch.script.contains("train");
    let of_training: Vec<&Launch> = script.launches.iter().filter(is_training).collect();
    let mut chosen = if of_training.is_empty() { script.launches.iter().collect() } else { of_training };
    chosen.dedup_by(|one, other| one.arguments == other.arguments);
    match chosen[..] {
        [only] => Ok(Started {
            script: Some(only.script.clone()),
            launcher: only.launcher.clone(),
            arguments: only.arguments.clone(),
            ranks: ranks_of(&only.launcher).or_else(|| script.ranks_of_environment(&only.script)),
            notes: script.notes.clone(),
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
    /// `None` where the text has arguments alone.
    pub(super) script: Option<String>,
    /// The words before it.
    pub(super) launcher: Vec<String>,
    /// The words behind the name of its Python script.
    pub(super) arguments: Vec<String>,
    /// The ranks that `torchrun` starts, if its words are numbers.
    pub(super) ranks: Option<usize>,
    /// What is left out, a sentence each.
    pub(super) notes: Vec<String>,
    /// Variables that are not expanded although the script assigns them, with why.
    pub(super) unexpanded: BTreeMap<String, String>,
    /// A command of another launcher, which starts no Python script by its name.
    pub(super) foreign: Option<String>,
    /// The file of settings that the command names.
    pub(super) settings: Option<String>,
}

/// Where TRL's scripts lie in its package.
const TRL_MODULES: &str = "trl.scripts.";

/// Launchers with a command of their own, and the first word of it.
fn is_foreign(launcher: &str, command: &str) -> bool {
    let launcher = launcher.rsplit('/').next().unwrap_or(launcher);
    match launcher {
        "swift" | "megatron" => matches!(command, "sft" | "pt" | "rlhf" | "train"),
        "llamafactory-cli" | "axolotl" => command == "train",
        "trl" => matches!(command, "sft" | "dpo" | "grpo" | "kto" | "reward" | "rloo"),
        "tune" => command == "run",
        "nemo" => command == "llm",
        // `torchrun -m trl.scripts.dpo`
        "-m" => command.starts_with(TRL_MODULES),
        _ => false,
    }
}

/// Whether a script's first word is the file of its settings.
pub(super) fn is_recipe(word: &str) -> bool {
    [".yaml", ".yml"].iter().any(|end| word.ends_with(end)) && !word.starts_with('-')
}

/// Whether a word starts a shell.
fn is_shell(word: &str) -> bool {
    matches!(word.rsplit('/').next(), Some("bash" | "sh" | "zsh"))
}

/// Whether values are arguments: the first word is a flag.
fn is_flags(values: &[String]) -> bool {
    values.first().is_some_and(|first| first.trim_start().starts_with("--"))
}

/// A command or sum whose value is not known: one word, wherever it is used.
fn without_blanks(text: &str) -> String {
    text.split_whitespace().collect()
}

fn words_of(text: &str) -> Vec<String> {
    text.split_whitespace().map(String::from).collect()
}

/// A command that starts a Python script.
#[derive(Debug)]
struct Launch {
    script: String,
    launcher: Vec<String>,
    arguments: Vec<String>,
}

/// Where the module stands that `python -m` or `deepspeed --module` starts, beside modules that are
/// launchers themselves.
fn module_of(words: &[String]) -> Option<usize> {
    let is_launcher = |name: &str| name.starts_with("torch.") || name.starts_with("accelerate.");
    let is_module = |pair: &[String]| {
        let name = pair[1].as_str();
        matches!(pair[0].as_str(), "-m" | "--module") && name.contains("train") && name.contains('.') && !is_launcher(name)
    };
    words.windows(2).position(is_module).map(|at| at + 1)
}

/// The ranks that a launcher's words ask for: `torchrun`, `deepspeed` or `accelerate launch`.
fn ranks_of(words: &[String]) -> Option<usize> {
    let value = |name: &str| {
        let place = words.iter().position(|word| {
            word.trim_start_matches('-').replace('_', "-").split('=').next() == Some(name) && word.starts_with('-')
        })?;
        let word = words.get(place)?;
        word.split_once('=').map_or_else(|| words.get(place + 1)?.parse().ok(), |(_, value)| value.parse::<usize>().ok())
    };
    // The number of all ranks.
    if let Some(all) = value("num-processes") {
        return Some(all);
    }
    let has = |name: &str| words.iter().any(|word| word.starts_with(name));
    let nodes = match (has("--nnodes"), has("--num_nodes")) {
        (true, _) => value("nnodes")?,
        (_, true) => value("num-nodes")?,
        _ => 1,
    };
    value("nproc-per-node").or_else(|| value("num-gpus"))?.checked_mul(nodes)
}

/// What has been read of a script.
#[derive(Default)]
struct Script {
    variables: BTreeMap<String, Vec<String>>,
    /// The variables in the order in which they were first assigned.
    order: Vec<String>,
    /// Variables that branches change which may not be taken, with why they are not expanded.
    unexpanded: BTreeMap<String, String>,
    /// Variables that only branches assign which are not taken: they are empty.
    undone: BTreeSet<String>,
    branches: Branches,
    joined: Joined,
    /// The result of the command before this one.
    last: Option<Taken>,
    /// Words of lines that begin with a flag.
    arguments: Vec<String>,
    launches: Vec<Launch>,
    functions: BTreeMap<String, Function>,
    /// The arguments of the functions that are being run, the innermost last.
    calls: Vec<Vec<String>>,
    /// The first command of another launcher, which starts no Python script.
    foreign: Option<String>,
    /// Its name and its first word, with a dash between.
    command: Option<String>,
    /// The file of settings that it names.
    settings: Option<String>,
    /// What is left out, a sentence each.
    notes: Vec<String>,
}

/// A function of a script.
#[derive(Clone, Debug)]
struct Function {
    body: Vec<Token>,
    is_called: bool,
}

/// The most calls within each other that are run: a function may call itself.
const MOST_CALLS: usize = 16;

/// The most rounds of a loop that are run.
const MOST_ROUNDS: usize = 256;

/// What a variable is assigned.
enum Assigned {
    Text(String),
    /// `(...)`
    Elements(Vec<String>),
}

impl Assigned {
    fn elements(self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text],
            Self::Elements(elements) => elements,
        }
    }
}

impl Script {
    fn read(&mut self, tokens: &[Token]) {
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
                        // Keywords before it (`then ARGS=(...)`).
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

    /// Begins an arm of a `case`, behind whose patterns a bracket closes: `case $SIZE in 7b)` or
    /// `70b)`.
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

    /// Runs the body of a loop for each of its words. A loop over words that are not known, or over
    /// very many, is a branch that may not be taken.
    fn repeat(&mut self, counted: &Loop<'_>) {
        let words: Vec<String> = counted.words.iter().flat_map(|word| self.expand(word)).collect();
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

    /// The ranks that ms-swift's commands start: its variables say so.
    fn ranks_of_environment(&self, script: &str) -> Option<usize> {
        let number = |name: &str| self.variables.get(name)?.first()?.trim().parse::<usize>().ok();
        let is_of_swift = ["swift-", "megatron-"].iter().any(|start| script.starts_with(start));
        number("NPROC_PER_NODE").filter(|_| is_of_swift)?.checked_mul(number("NNODES").unwrap_or(1))
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

    /// Takes note of one command.
    fn run(&mut self, mut command: Vec<Word>) {
        let mut is_negated = false;
        while let Some(keyword) = command.first().and_then(Word::literal) {
            if keyword == "case" {
                let subject = command.get(1).map(|word| self.expand(word).join(" ")).unwrap_or_default();
                self.branches.case(subject);
                return;
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
        while let Some(word) = command.first().filter(|word| word.assigned().is_some()) {
            if let Some((name, adds)) = word.assigned().map(|(name, adds)| (name.to_string(), adds)) {
                let value = self.expand(&word.value()).join(" ");
                self.assign(&name, Assigned::Text(value), adds);
            }
            command.remove(0);
        }
        let words: Vec<String> = command.iter().flat_map(|word| self.expand(word)).collect();
        let result = self.without_arguments(&words).or_else(|| branches::result(&words));
        if result.is_none() && self.taken() != Taken::No {
            self.look_at(words);
        }
        let result = if is_negated { result.map(Taken::not) } else { result };
        // A condition of another command is not known; elsewhere a command is taken to succeed.
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

    /// Runs the functions that nothing called: a script may be sourced, and another one call them.
    fn run_uncalled(&mut self) {
        let uncalled = self.functions.iter().filter(|(_, function)| !function.is_called).map(|(name, _)| name.clone());
        for name in uncalled.collect::<Vec<_>>() {
            if self.launches.is_empty() {
                self.call(&name, Vec::new());
            }
        }
    }

    /// The values of a positional parameter of the innermost call: `$1`, or all of them (`$@`). The
    /// script's own arguments are none.
    fn positional(&self, name: &str) -> Option<Vec<String>> {
        let arguments = self.calls.last();
        if name == "@" || name == "*" {
            return Some(arguments.cloned().unwrap_or_default());
        }
        if name == "#" {
            return arguments.map(|arguments| vec![arguments.len().to_string()]);
        }
        let place = name.parse::<usize>().ok()?.checked_sub(1)?;
        arguments?.get(place).map(|argument| vec![argument.clone()])
    }

    /// The result of a list of commands up to this one.
    fn combined(&self, result: Taken) -> Taken {
        let last = self.last.unwrap_or(Taken::Yes);
        match self.joined {
            Joined::Apart => result,
            Joined::And => last.and(result),
            Joined::Or => last.or(result),
        }
    }

    fn assign(&mut self, name: &str, value: Assigned, adds: bool) {
        let before = self.variables.get(name).map(Vec::as_slice);
        match self.taken() {
            Taken::No => {
                self.undone.insert(name.into());
                return;
            }
            Taken::Unknown => {
                // `CMD="$CMD --more"` adds, too.
                let rest = match (&value, before) {
                    (Assigned::Text(longer), Some([text])) if !adds && !text.is_empty() => longer.strip_prefix(text.as_str()),
                    _ => None,
                };
                let rest = rest.map(String::from);
                let (value, adds) = match rest {
                    Some(rest) => (vec![rest], true),
                    None => (value.elements(), adds),
                };
                return self.assign_perhaps(name, &value, adds);
            }
            Taken::Yes => {}
        }
        if adds && self.unexpanded.contains_key(name) {
            return;
        }
        let value = match (value, before.filter(|_| adds)) {
            (Assigned::Text(more), Some([text])) => vec![format!("{text}{more}")],
            (value, before) => [before.unwrap_or_default(), &value.elements()].concat(),
        };
        self.unexpanded.remove(name);
        self.variables.insert(name.into(), value);
        if !self.order.iter().any(|known| known == name) {
            self.order.push(name.into());
        }
    }

    /// Takes note of an assignment that may not be run. What is added is left out if it decides
    /// nothing.
    fn assign_perhaps(&mut self, name: &str, value: &[String], adds: bool) {
        let words = value.iter().flat_map(|text| text.split_whitespace());
        let flags: Vec<&str> = words.filter(|word| word.starts_with("--")).collect();
        if adds && !flags.is_empty() && !flags.iter().any(|flag| may_decide(flag)) {
            self.notes.push(format!("a branch of the script adds {}, which are left out", flags.join(", ")));
            return;
        }
        self.variables.remove(name);
        let what = if flags.is_empty() { String::new() } else { format!(" ({})", flags.join(", ")) };
        let why = format!("is assigned in a branch or loop of the script that may not be taken{what}");
        self.unexpanded.entry(name.into()).or_insert(why);
    }

    /// What a script without a launch is: a list of arguments, or variables that hold them.
    fn without_launch(mut self) -> Started {
        if self.arguments.is_empty() {
            let begins = |name: &&String| self.variables.get(*name).is_some_and(|values| is_flags(values));
            let holders: Vec<String> = self.order.iter().filter(begins).cloned().collect();
            for name in &holders {
                let values = self.variables.get(name).into_iter().flatten();
                // Text of several words is split where it is used without quotes.
                let words = values
                    .flat_map(|value| if value.trim_start().starts_with("--") { words_of(value) } else { vec![value.clone()] });
                self.arguments.extend(words);
            }
            if !holders.is_empty() {
                let names = holders.join("`, `");
                self.notes.push(format!("the script starts nothing itself: the arguments in `{names}` are taken"));
            }
        }
        let Self { arguments, notes, unexpanded, foreign, command, settings, .. } = self;
        let script = command.filter(|_| settings.is_some());
        Started { script, launcher: Vec::new(), arguments, ranks: None, notes, unexpanded, foreign, settings }
    }

    fn look_at(&mut self, words: Vec<String>) {
        let Some(first) = words.first() else { return };
        if first.starts_with("--") {
            // A comment between the lines of a command ends it in a shell, and is not meant to.
            let open = self.launches.last_mut().map(|launch| &mut launch.arguments);
            return open.unwrap_or(&mut self.arguments).extend(words);
        }
        if matches!(first.as_str(), "echo" | "printf" | "cat" | "mkdir" | "cp" | "cd" | "source") {
            return;
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
            let launcher = words.get(..at).unwrap_or_default();
            self.launches[before..].iter_mut().for_each(|launch| {
                launch.launcher.splice(0..0, launcher.iter().cloned());
            });
            return;
        }
        // `eval $COMMAND`: quotes and redirections within the words are the shell's.
        if first == "eval" && self.calls.len() < MOST_CALLS {
            let tokens = lexer::tokens(&words.get(1..).unwrap_or_default().join(" "));
            self.calls.push(self.calls.last().cloned().unwrap_or_default());
            self.read(&tokens);
            self.calls.pop();
            return;
        }
        // A command in one word.
        let words: Vec<String> =
            words.into_iter().flat_map(|word| if word.contains(".py ") { words_of(&word) } else { vec![word] }).collect();
        // `python tool.py --option -- accelerate launch train.py --bf16`: the tool starts the
        // launch.
        let words = match words.iter().rposition(|word| word == "--") {
            Some(at) if words[at..].iter().any(|word| word.ends_with(".py")) => words[at + 1..].to_vec(),
            _ => words,
        };
        let script = |word: &String| word.ends_with(".py");
        let Some(place) = words.iter().position(script).or_else(|| module_of(&words)) else {
            let is_foreign = |pair: &[String]| matches!(pair, [one, two] if is_foreign(one, two));
            if let Some(at) = words.windows(2).position(is_foreign) {
                let arguments = words.get(at + 2..).unwrap_or_default();
                // `llamafactory-cli train --stage sft ...`, `trl sft --config job.yaml`
                let [launcher, job] = [at, at + 1].map(|at| words.get(at).cloned().unwrap_or_default());
                let name = launcher.rsplit('/').next().unwrap_or_default();
                let is_read = matches!(name, "llamafactory-cli" | "trl" | "-m" | "swift" | "megatron") && is_flags(arguments);
                if is_read || name == "tune" {
                    let script = match name {
                        "llamafactory-cli" => name.to_owned(),
                        "swift" | "megatron" | "tune" => format!("{name}-{job}"),
                        _ => job.replacen(TRL_MODULES, "", 1),
                    };
                    let arguments = arguments.to_vec();
                    self.launches.push(Launch { script, launcher: words[..at].to_vec(), arguments });
                    return;
                }
                let settings = words.iter().find(|word| word.ends_with(".yaml") || word.ends_with(".yml"));
                let command = words.get(at..at + 2).unwrap_or_default().join(" ");
                self.command = self.command.take().or_else(|| Some(format!("{launcher}-{job}")));
                self.settings = self.settings.take().or_else(|| settings.cloned());
                self.foreign.get_or_insert(match settings {
                    Some(file) => format!("`{command}`, whose settings are in `{file}`"),
                    None => format!("`{command}`"),
                });
            }
            return;
        };
        let arguments = words.get(place + 1..).unwrap_or_default().to_vec();
        // `accelerate launch train.py recipe.yaml`
        let is_launcher = |word: &String| matches!(word.rsplit('/').next(), Some("accelerate" | "torchrun" | "deepspeed"));
        let has_recipe = words.iter().take(place).any(is_launcher) && arguments.first().is_some_and(|word| is_recipe(word));
        if has_recipe || arguments.iter().any(|word| word.starts_with("--") || word.starts_with('$')) {
            let script = words.get(place).cloned().unwrap_or_default();
            let launcher = words.get(..place).unwrap_or_default().to_vec();
            self.launches.push(Launch { script, launcher, arguments });
        }
    }

    /// The result of a loop's condition that asks for the script's own arguments, of which there
    /// are none.
    fn without_arguments(&mut self, words: &[String]) -> Option<Taken> {
        let asks = |word: &String| ["$1", "$#", "$@"].contains(&word.as_str());
        let is_asked = words.first().is_some_and(|first| first == "getopts") || words.iter().any(asks);
        let result = self.branches.ends_loop().filter(|_| self.calls.is_empty() && is_asked)?;
        let note = "the script is taken to be started without arguments of its own";
        if !self.notes.iter().any(|known| known == note) {
            self.notes.push(note.into());
        }
        Some(result)
    }

    /// A default's text with its variables expanded.
    fn expand_text(&self, text: &str) -> String {
        if !text.contains('$') {
            return text.to_owned();
        }
        let words = lexer::tokens(&format!("\"{text}\""));
        let expanded =
            words.iter().map(|token| if let Token::Word(word) = token { self.expand(word).join(" ") } else { String::new() });
        expanded.collect::<Vec<_>>().join("")
    }

    /// The words that a word becomes.
    fn expand(&self, word: &Word) -> Vec<String> {
        let mut done: Vec<String> = Vec::new();
        let mut current: Option<String> = word.is_quoted.then(String::new);
        for piece in &word.pieces {
            match piece {
                Piece::Literal(text) => current.get_or_insert_default().push_str(text),
                Piece::Sum(text) => {
                    let sum = lexer::sum(text, &|name| self.variables.get(name)?.first()?.trim().parse().ok());
                    let open = || format!("$(({}))", without_blanks(text));
                    current.get_or_insert_default().push_str(&sum.map_or_else(open, |sum| sum.to_string()));
                }
                Piece::Variable { name, default, is_quoted, is_all } => {
                    let found = self.positional(name).or_else(|| self.variables.get(name).cloned());
                    let found = found.or_else(|| default.as_ref().map(|text| vec![self.expand_text(text)]));
                    let is_empty = self.undone.contains(name) && !self.unexpanded.contains_key(name);
                    let found = found.or_else(|| is_empty.then(|| vec![String::new()]));
                    let Some(values) = found else {
                        current.get_or_insert_default().push_str(&format!("${}", without_blanks(name)));
                        continue;
                    };
                    let values = if *is_all { values } else { values.into_iter().take(1).collect() };
                    let parts: Vec<String> = if *is_quoted {
                        values
                    } else {
                        values.iter().flat_map(|value| value.split_whitespace().map(String::from)).collect()
                    };
                    for (index, part) in parts.into_iter().enumerate() {
                        if index > 0 {
                            done.extend(current.take());
                        }
                        current.get_or_insert_default().push_str(&part);
                    }
                }
            }
        }
        // `"${ALL[@]}"` of an empty list is no word.
        let is_nothing = word.pieces.iter().all(|piece| matches!(piece, Piece::Variable { .. })) && !word.pieces.is_empty();
        done.extend(current.filter(|text| !(is_nothing && text.is_empty())));
        done
    }
}
