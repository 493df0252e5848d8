//! JSON as Python writes it: with `Infinity`, `-Infinity` and `NaN`, which JSON lacks. They become
//! null: no size of a model is one of them.

use serde_json::Value;

/// Parses a text.
pub(super) fn parse(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text).or_else(|error| {
        let finite = finite(text);
        if finite == text { Err(error) } else { serde_json::from_str(&finite) }
    })
}

/// The text with `null` in place of `Infinity`, `-Infinity` and `NaN`, except inside strings.
fn finite(text: &str) -> String {
    let mut finite = String::with_capacity(text.len());
    let mut rest = text;
    let mut is_string = false;
    while let Some(character) = rest.chars().next() {
        let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| !is_string && rest.starts_with(word));
        let length = word.map_or(character.len_utf8(), str::len);
        let (part, others) = rest.split_at(length);
        match (word, character) {
            (Some(_), _) => finite.push_str("null"),
            (None, '\\') => {
                // An escaped character does not end a string.
                let escaped = others.chars().next().map_or(0, char::len_utf8);
                let (next, others) = others.split_at(escaped);
                finite.push_str(part);
                finite.push_str(next);
                rest = others;
                continue;
            }
            (None, _) => {
                is_string ^= character == '"';
                finite.push_str(part);
            }
        }
        rest = others;
    }
    finite
}
