//! Command lines as words, and as flags with values.

use super::FrameworkError;
use std::collections::BTreeMap;

/// Splits a command line or a script into words, as a shell does: quotes keep blanks, `#` begins a
/// comment, a backslash joins lines. Parentheses of arrays are left out.
pub fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), close) if open == close => quote = None,
            (Some(_), other) => word.get_or_insert_default().push(other),
            (None, '"' | '\'') => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (None, '\\') => {
                if let Some(next) = characters.next().filter(|&next| next != '\n') {
                    word.get_or_insert_default().push(next);
                }
            }
            (None, '#') if word.is_none() => while characters.next_if(|&next| next != '\n').is_some() {},
            (None, '(' | ')') => words.extend(word.take()),
            (None, blank) if blank.is_whitespace() => words.extend(word.take()),
            (None, other) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    words
}

/// Flags with their values.
pub(super) struct Flags {
    values: BTreeMap<String, Vec<String>>,
    read: Vec<String>,
}

impl Flags {
    /// Reads the flags of a command line. Words before the first flag, and those between a value
    /// and the next flag, belong to no flag.
    pub(super) fn parse(text: &str) -> Self {
        let mut values: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut last: Option<String> = None;
        for word in words(text) {
            match word.strip_prefix("--") {
                Some(flag) if !flag.is_empty() => {
                    let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                    let name = name.replace('_', "-");
                    let entry = values.entry(name.clone()).or_default();
                    entry.clear();
                    entry.extend(value.map(String::from));
                    last = value.is_none().then_some(name);
                }
                _ => {
                    if let Some(entry) = last.as_ref().and_then(|last| values.get_mut(last)) {
                        entry.push(word);
                    }
                }
            }
        }
        Self { values, read: Vec::new() }
    }

    /// Whether there are no flags.
    pub(super) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The value of a flag.
    pub(super) fn text(&mut self, name: &str) -> Option<String> {
        self.read.push(name.into());
        self.values.get(name).and_then(|values| values.first().cloned())
    }

    /// All values of a flag.
    pub(super) fn list(&mut self, name: &str) -> Vec<String> {
        self.read.push(name.into());
        self.values.get(name).cloned().unwrap_or_default()
    }

    /// Whether a switch is there.
    pub(super) fn switch(&mut self, name: &str) -> bool {
        self.read.push(name.into());
        self.values.contains_key(name)
    }

    /// A number.
    pub(super) fn number<T: std::str::FromStr>(&mut self, name: &str) -> Result<Option<T>, FrameworkError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| FrameworkError::Form {
            reason: format!("`--{name} {text}` has no number"),
            hint: if text.contains('$') {
                "give the command as the shell expands it, without variables".into()
            } else {
                "give it as the framework's help says".into()
            },
        })
    }

    /// Marks flags as read that change neither time nor memory.
    pub(super) fn neutral(&mut self, names: &[&str]) {
        self.read.extend(names.iter().map(ToString::to_string));
    }

    /// The flags that nobody read.
    pub(super) fn unread(&self) -> Vec<String> {
        let unread = self.values.iter().filter(|(name, _)| !self.read.contains(name));
        unread.map(|(name, values)| format!("--{name} {}", values.join(" ")).trim_end().to_string()).collect()
    }
}
