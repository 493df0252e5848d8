//! Blocks of a script that may run several times: loops over words, and functions.

use super::MOST_ROUNDS;
use super::lexer::{Token, Word};

/// A loop over words: `for NAME in WORDS; do BODY; done`.
pub(super) struct Loop<'a> {
    pub(super) name: String,
    pub(super) words: Vec<Word>,
    pub(super) body: &'a [Token],
}

impl<'a> Loop<'a> {
    /// The loop that `tokens` start with, and the tokens after it.
    pub(super) fn begin(tokens: &'a [Token]) -> Option<(Self, &'a [Token])> {
        let literal = |token: &'a Token| if let Token::Word(word) = token { word.literal() } else { None };
        let [first, name, within, rest @ ..] = tokens else { return None };
        if literal(first) != Some("for") || literal(within) != Some("in") {
            return None;
        }
        let name = literal(name)?.to_string();
        let end = rest.iter().position(|token| !matches!(token, Token::Word(_)))?;
        let words = rest[..end].iter().filter_map(|token| if let Token::Word(word) = token { Some(word.clone()) } else { None });
        let words = words.collect();
        let start = (end..rest.len()).find(|&at| !matches!(rest[at], Token::End))?;
        if literal(&rest[start]) != Some("do") {
            return None;
        }
        // Keywords count only at the beginning of a command.
        let (mut depth, mut begins) = (1, true);
        for (at, token) in rest.iter().enumerate().skip(start + 1) {
            let word = literal(token).filter(|_| begins);
            match word {
                Some("for" | "while" | "until" | "select") => depth += 1,
                Some("done") => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                return Some((Self { name, words, body: &rest[start + 1..at] }, &rest[at + 1..]));
            }
            begins = !matches!(token, Token::Word(_)) || matches!(word, Some("do" | "then" | "else"));
        }
        None
    }
}

/// The words of `{1..8}` or `{a,b}`; any other word is returned as it is.
pub(super) fn in_braces(word: &str) -> Vec<String> {
    let alone = || vec![word.to_owned()];
    let Some(inside) = word.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) else { return alone() };
    let count = |text: &str| text.parse::<usize>().ok().filter(|count| *count <= MOST_ROUNDS);
    match inside.split_once("..") {
        Some((first, last)) => match (count(first), count(last)) {
            (Some(first), Some(last)) if first <= last => (first..=last).map(|number| number.to_string()).collect(),
            _ => alone(),
        },
        None if inside.contains(',') => inside.split(',').map(String::from).collect(),
        None => alone(),
    }
}

/// The function whose definition `tokens` start with: its name, its body, and the tokens after it.
pub(super) fn definition(tokens: &[Token]) -> Option<(String, &[Token], &[Token])> {
    let literal = |token: &'_ Token| if let Token::Word(word) = token { word.literal().map(str::to_owned) } else { None };
    let (name, rest) = match tokens {
        [keyword, name, Token::Open, Token::Close, rest @ ..] if literal(keyword).as_deref() == Some("function") => (name, rest),
        [keyword, name, rest @ ..] if literal(keyword).as_deref() == Some("function") => (name, rest),
        [name, Token::Open, Token::Close, rest @ ..] => (name, rest),
        _ => return None,
    };
    let name = literal(name)?;
    let start = rest.iter().position(|token| !matches!(token, Token::End))?;
    if literal(&rest[start]).as_deref() != Some("{") {
        return None;
    }
    let mut depth = 0;
    for (at, token) in rest.iter().enumerate().skip(start) {
        match literal(token).as_deref() {
            Some("{") => depth += 1,
            Some("}") => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((name, &rest[start + 1..at], &rest[at + 1..]));
        }
    }
    None
}
