//! Expands a script's words: replaces variables, sums and arguments by their values. It must not
//! know which commands are run.

use super::Script;
use super::lexer::{self, Piece, Token, Word};

/// The text of a command or sum of unknown value, without blanks: so it stays one word.
fn without_blanks(text: &str) -> String {
    text.split_whitespace().collect()
}

/// The variable that the next command assigns, after an optional `then`.
pub(super) fn assigned_next(tokens: &[Token]) -> Option<String> {
    let mut words = tokens.iter().skip_while(|token| match token {
        Token::End => true,
        Token::Word(word) => word.literal() == Some("then"),
        _ => false,
    });
    match words.next()? {
        Token::Word(word) => word.assigned().map(|(name, _)| name.to_string()),
        _ => None,
    }
}

impl Script<'_> {
    /// The values of a positional parameter of the innermost call: `$1`, or all of them (`$@`). The
    /// script itself has no arguments.
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

    /// The words of a test whether a variable has a value. These are assumed to have none: missing
    /// arguments, and a variable that gets its default after the test (`[ -z "$X" ] && X=1`), as
    /// with `${X:-1}`.
    pub(super) fn without_surroundings(&mut self, mut words: Vec<String>) -> Vec<String> {
        if !matches!(words.first().map(String::as_str), Some("[" | "[[" | "test")) {
            return words;
        }
        for at in 1..words.len() {
            let Some(name) = words[at].strip_prefix('$').map(str::to_owned) else { continue };
            let is_default = words[at - 1] == "-z" && self.next_assigned.as_deref() == Some(name.as_str());
            let has_none = |number: usize| self.calls.last().is_none_or(|arguments| arguments.len() < number);
            let is_argument = name.parse::<usize>().is_ok_and(has_none) && matches!(words[at - 1].as_str(), "-z" | "-n");
            if !self.unexpanded.contains_key(&name) && (is_default || is_argument) {
                self.note_once(format!("`${name}` is taken to have no value where the script tests it"));
                words[at] = String::new();
            }
        }
        words
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

    /// The words that a word expands to.
    pub(super) fn expand(&self, word: &Word) -> Vec<String> {
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
        // If all variables of a word are empty it expands to no word, as `"${ALL[@]}"` of an empty
        // list does.
        let is_nothing = word.pieces.iter().all(|piece| matches!(piece, Piece::Variable { .. })) && !word.pieces.is_empty();
        done.extend(current.filter(|text| !(is_nothing && text.is_empty())));
        done
    }
}
