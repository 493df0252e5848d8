//! What a plan says of single operators: how `tensor` shares them out, by name.
//!
//! The rule of [`crate::strategy`] is made for stacks of products. Where a graph is something else, convolutions that had better share out samples
//! before products that had better share out features (Krizhevsky 2014), a plan says so here; operators that it leaves out follow their
//! inputs.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What of an operator `tensor` shares out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Share {
    /// Nothing: every rank does all of it.
    Whole,
    /// Samples, as `data` does.
    Batch,
    /// What is made: the output channels or features of a product, the channels or features of anything else.
    Outputs,
    /// What a product sums over: its input channels or features. Every rank makes a summand of the whole output.
    Inputs,
}

impl Share {
    /// All of them.
    pub const ALL: [Share; 4] = [Share::Whole, Share::Batch, Share::Outputs, Share::Inputs];

    /// The name used in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Share::Whole => "whole",
            Share::Batch => "batch",
            Share::Outputs => "outputs",
            Share::Inputs => "inputs",
        }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Patterns of names of operators or blocks, each with what `tensor` shares out of them. A `*` stands for any characters.
///
/// Of several patterns that an operator's name, or that of its block, matches, its own name in full counts, else its block's name in full, else the
/// longest pattern; of those the first by the alphabet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperatorShares(BTreeMap<String, Share>);

/// What a plan says of one operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Asked<'a> {
    pub(crate) pattern: &'a str,
    pub(crate) share: Share,
    /// Whether the pattern is the operator's own name.
    pub(crate) by_name: bool,
}

impl OperatorShares {
    /// Whether nothing is said of any operator.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The patterns, in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Share)> {
        self.0.iter().map(|(pattern, &share)| (pattern.as_str(), share))
    }

    /// What counts for an operator of a name in a block of a name.
    pub(crate) fn of(&self, operator: &str, block: &str) -> Option<Asked<'_>> {
        if let Some((pattern, &share)) = self.0.get_key_value(operator) {
            return Some(Asked { pattern, share, by_name: true });
        }
        if let Some((pattern, &share)) = self.0.get_key_value(block) {
            return Some(Asked { pattern, share, by_name: false });
        }
        let matching = self.iter().filter(|(pattern, _)| matches(pattern, operator) || matches(pattern, block));
        // Of equals `max_by_key` takes the last.
        let (pattern, share) = matching.collect::<Vec<_>>().into_iter().rev().max_by_key(|(pattern, _)| pattern.len())?;
        Some(Asked { pattern, share, by_name: false })
    }

    /// The patterns that match an operator or its block, whichever counts.
    pub(crate) fn matching<'a>(&'a self, operator: &'a str, block: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.keys().map(String::as_str).filter(move |pattern| matches(pattern, operator) || matches(pattern, block))
    }
}

impl<Name: Into<String>> FromIterator<(Name, Share)> for OperatorShares {
    fn from_iter<Shares: IntoIterator<Item = (Name, Share)>>(shares: Shares) -> Self {
        Self(shares.into_iter().map(|(name, share)| (name.into(), share)).collect())
    }
}

/// Whether a name is what a pattern with `*` for any characters says.
fn matches(pattern: &str, name: &str) -> bool {
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
    fn a_star_stands_for_any_characters() {
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

    #[test]
    fn the_own_name_counts_before_the_longest_pattern() {
        let shares: OperatorShares =
            [("layer1.*", Share::Batch), ("layer1.0.conv*", Share::Inputs), ("layer1.0", Share::Whole), ("fc", Share::Outputs)]
                .into_iter()
                .collect();
        let of = |operator, block| shares.of(operator, block).map(|asked| asked.share);
        assert_eq!(of("layer1.0.conv1", "layer1.0"), Some(Share::Whole));
        assert_eq!(of("layer1.0.conv1", "layer1"), Some(Share::Inputs));
        assert_eq!(of("layer1.0.bn1", "layer1.0"), Some(Share::Whole));
        assert_eq!(of("layer1.1.bn1", "layer1.1"), Some(Share::Batch));
        assert_eq!(of("fc", "head"), Some(Share::Outputs));
        assert_eq!(of("fc.bias", "head"), None);
    }

    #[test]
    fn a_tie_goes_to_the_first_by_the_alphabet() {
        let shares: OperatorShares = [("*b", Share::Batch), ("a*", Share::Inputs)].into_iter().collect();
        assert_eq!(shares.of("ab", "").map(|asked| asked.pattern), Some("*b"));
    }
}
