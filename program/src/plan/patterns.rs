//! Patterns for names, in which `*` stands for any characters.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A list of patterns for names. A `*` matches any characters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct NamePatterns(Vec<String>);

impl NamePatterns {
    /// Whether there is no pattern.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of the patterns matches a name.
    pub fn match_name(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| matches(pattern, name))
    }

    /// The first pattern that matches none of the names.
    pub(crate) fn unmatched<'a>(&self, names: impl Iterator<Item = &'a str> + Clone) -> Option<&str> {
        self.0.iter().map(String::as_str).find(|pattern| !names.clone().any(|name| matches(pattern, name)))
    }
}

impl<Name: Into<String>> FromIterator<Name> for NamePatterns {
    fn from_iter<Names: IntoIterator<Item = Name>>(names: Names) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }
}

/// Whether a pattern, in which `*` stands for any characters, matches a name.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_matches_any_characters() {
        for (pattern, name) in
            [("fc", "fc"), ("*", ""), ("layer4.*", "layer4.0.conv1"), ("*.conv*", "a.conv1"), ("a*b*a", "abba"), ("a*a", "aa")]
        {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("fc", "fc.bias"), ("layer4.*", "layer4"), ("a*a", "a"), ("a*b*a", "aba "), ("", "x"), ("*c", "cb")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }
}
