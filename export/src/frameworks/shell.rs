//! Shell scripts as far as a job's launch needs them: assignments, arrays, variables and sums are
//! expanded, and the words of the launching command are found. Nothing is run. What a script leaves
//! to its surroundings stays as it is written (`$NAME`), and so does what it assigns in a branch.
//! It must not know a framework.

mod lexer;

use super::FrameworkError;
use super::deciding::may_decide;
use lexer::{Piece, Token, Word};
use std::collections::BTreeMap;

/// The words of the command that starts a job, after the name of its Python script; or all words,
/// where the text is a list of arguments.
pub(super) fn launch(text: &str) -> Result<Started, FrameworkError> {
    let mut script = Script::default();
    script.read(lexer::tokens(text));
    if script.launches.is_empty() {
        return Ok(Started { arguments: script.arguments, ranks: None, notes: script.notes });
    }
    let is_training = |launch: &&Launch| launch.script.contains("train");
    let of_training: Vec<&Launch> = script.launches.iter().filter(is_training).collect();
    let mut chosen = if of_training.is_empty() { script.launches.iter().collect() } else { of_training };
    chosen.dedup_by(|one, other| one.arguments == other.arguments);
    match chosen[..] {
        [only] => Ok(Started { arguments: only.arguments.clone(), ranks: only.ranks, notes: script.notes.clone() }),
        _ => Err(FrameworkError::Form {
            reason: format!("the script starts {} different jobs", chosen.len()),
            hint: "give the one command that you mean, with its arguments".into(),
        }),
    }
}

/// A job that a script starts.
pub(super) struct Started {
    /// The words behind the name of its Python script.
    pub(super) arguments: Vec<String>,
    /// The ranks that `torchrun` starts, if its words are numbers.
    pub(super) ranks: Option<usize>,
    /// What is left out, a sentence each.
    pub(super) notes: Vec<String>,
}

/// A command that starts a Python script.
#[derive(Debug)]
struct Launch {
    script: String,
    arguments: Vec<String>,
    ranks: Option<usize>,
}

/// The ranks that a launcher's words ask for.
fn ranks_of(words: &[String]) -> Option<usize> {
    let value = |name: &str| {
        let place = words.iter().position(|word| {
            word.trim_start_matches('-').replace('_', "-").split('=').next() == Some(name) && word.starts_with('-')
        })?;
        let word = words.get(place)?;
        word.split_once('=').map_or_else(|| words.get(place + 1)?.parse().ok(), |(_, value)| value.parse::<usize>().ok())
    };
    let nodes = if words.iter().any(|word| word.starts_with("--nnodes")) { value("nnodes")? } else { 1 };
    value("nproc-per-node")?.checked_mul(nodes)
}

/// What has been read of a script.
#[derive(Default)]
struct Script {
    variables: BTreeMap<String, Vec<String>>,
    /// Open branches and loops.
    depth: usize,
    /// Words of lines that begin with a flag.
    arguments: Vec<String>,
    launches: Vec<Launch>,
    /// What is left out, a sentence each.
    notes: Vec<String>,
}

impl Script {
    fn read(&mut self, tokens: Vec<Token>) {
        let mut command: Vec<Word> = Vec::new();
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                Token::Word(word) => {
                    let assigned = word.assigned().map(|(name, adds)| (name.to_string(), adds));
                    if let Some((name, adds)) = assigned.filter(|_| word.is_bare_assignment())
                        && tokens.next_if(|token| matches!(token, Token::Open)).is_some()
                    {
                        let mut elements = Vec::new();
                        for token in tokens.by_ref() {
                            match token {
                                Token::Close => break,
                                Token::Word(word) => elements.extend(self.expand(&word)),
                                _ => {}
                            }
                        }
                        self.assign(&name, elements, adds);
                    } else {
                        command.push(word);
                    }
                }
                Token::End => self.run(std::mem::take(&mut command)),
                Token::Open | Token::Close => {}
            }
        }
        self.run(command);
    }

    /// Takes note of one command.
    fn run(&mut self, mut command: Vec<Word>) {
        while let Some(keyword) = command.first().and_then(Word::literal) {
            match keyword {
                "if" | "case" | "for" | "while" | "until" => self.depth += 1,
                "fi" | "esac" | "done" => self.depth = self.depth.saturating_sub(1),
                "then" | "else" | "elif" | "do" | "{" | "}" | "!" | "export" | "local" | "declare" | "readonly" | "time"
                | "exec" => {}
                _ => break,
            }
            command.remove(0);
        }
        while let Some(word) = command.first().filter(|word| word.assigned().is_some()) {
            if let Some((name, adds)) = word.assigned().map(|(name, adds)| (name.to_string(), adds)) {
                let value = self.expand(&word.value()).join(" ");
                self.assign(&name, vec![value], adds);
            }
            command.remove(0);
        }
        let words: Vec<String> = command.iter().flat_map(|word| self.expand(word)).collect();
        self.look_at(words);
    }

    fn assign(&mut self, name: &str, mut value: Vec<String>, adds: bool) {
        if self.depth > 0 {
            // The branch may not be taken. What it adds is left out if it decides nothing.
            let flags: Vec<&str> = value.iter().map(String::as_str).filter(|word| word.starts_with("--")).collect();
            if adds && !flags.is_empty() && !flags.iter().any(|flag| may_decide(flag)) {
                self.notes.push(format!("a branch of the script adds {}, which are left out", flags.join(", ")));
            } else {
                self.variables.remove(name);
            }
            return;
        }
        if adds && let Some(before) = self.variables.get(name) {
            value = match (&before[..], &value[..]) {
                ([text], [more]) => vec![format!("{text}{more}")],
                _ => [&before[..], &value[..]].concat(),
            };
        }
        self.variables.insert(name.into(), value);
    }

    fn look_at(&mut self, words: Vec<String>) {
        let Some(first) = words.first() else { return };
        if first.starts_with("--") {
            // A comment between the lines of a command ends it in a shell, and is not meant to.
            let open = self.launches.last_mut().map(|launch| &mut launch.arguments);
            return open.unwrap_or(&mut self.arguments).extend(words);
        }
        if matches!(first.as_str(), "echo" | "printf" | "cat" | "mkdir" | "cp" | "cd" | "source" | "[" | "[[" | "test") {
            return;
        }
        // `bash -c "torchrun train.py ..."`, and `eval $COMMAND`.
        let words: Vec<String> = words
            .into_iter()
            .flat_map(|word| if word.contains(".py ") { word.split_whitespace().map(String::from).collect() } else { vec![word] })
            .collect();
        let Some(place) = words.iter().position(|word| word.ends_with(".py")) else { return };
        let arguments = words.get(place + 1..).unwrap_or_default().to_vec();
        if arguments.iter().any(|word| word.starts_with("--") || word.starts_with('$')) {
            let script = words.get(place).cloned().unwrap_or_default();
            let ranks = ranks_of(words.get(..place).unwrap_or_default());
            self.launches.push(Launch { script, arguments, ranks });
        }
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
                    current.get_or_insert_default().push_str(&sum.map_or_else(|| format!("$(({text}))"), |sum| sum.to_string()));
                }
                // The script's own arguments: none are given.
                Piece::Variable { name, .. } if name == "@" || name == "*" => {}
                Piece::Variable { name, default, is_quoted, is_all } => {
                    let found = self.variables.get(name).cloned().or_else(|| default.clone().map(|text| vec![text]));
                    let Some(values) = found else {
                        current.get_or_insert_default().push_str(&format!("${name}"));
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
