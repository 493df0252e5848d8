//! Choices of a plan for single operators, by name: the loop that `tensor` shards.
//!
//! The rule of [`crate::strategy`] is made for stacks of matrix products. Other graphs may need
//! another sharding, for example convolutions sharded over samples before products sharded over
//! features (Krizhevsky 2014). Operators that a plan does not name follow their inputs.

use super::patterns::matches;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// The part of an operator that `tensor` shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ShardedPart {
    /// Nothing: every rank runs the whole operator.
    Whole,
    /// Samples, as `data` does.
    Batch,
    /// The output channels or features.
    Outputs,
    /// The input channels or features of a product, which it sums over. Every rank computes a
    /// partial sum of the whole output.
    Inputs,
}

impl ShardedPart {
    /// Every choice.
    pub const ALL: [ShardedPart; 4] = [ShardedPart::Whole, ShardedPart::Batch, ShardedPart::Outputs, ShardedPart::Inputs];

    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            ShardedPart::Whole => "whole",
            ShardedPart::Batch => "batch",
            ShardedPart::Outputs => "outputs",
            ShardedPart::Inputs => "inputs",
        }
    }
}

impl fmt::Display for ShardedPart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// Patterns for names of operators or blocks, each with the part that `tensor` shards. A `*`
/// matches any characters.
///
/// If several patterns match an operator's name or that of its block, the operator's full name
/// wins, then the block's full name, then the longest pattern. Among equally long patterns the
/// alphabetically first wins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct OperatorPatterns(BTreeMap<String, ShardedPart>);

/// The choice of a plan for one operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperatorChoice<'a> {
    pub(crate) pattern: &'a str,
    pub(crate) part: ShardedPart,
    /// Whether the pattern is the operator's own name.
    pub(crate) by_name: bool,
}

impl OperatorPatterns {
    /// Whether the plan makes no choice for any operator.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The patterns, in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, ShardedPart)> {
        self.0.iter().map(|(pattern, &part)| (pattern.as_str(), part))
    }

    /// The choice for the operator called `operator` in the block called `block`.
    pub(crate) fn of(&self, operator: &str, block: &str) -> Option<OperatorChoice<'_>> {
        if let Some((pattern, &part)) = self.0.get_key_value(operator) {
            return Some(OperatorChoice { pattern, part, by_name: true });
        }
        if let Some((pattern, &part)) = self.0.get_key_value(block) {
            return Some(OperatorChoice { pattern, part, by_name: false });
        }
        let matching = self.iter().filter(|(pattern, _)| matches(pattern, operator) || matches(pattern, block));
        // `max_by_key` returns the last of equal keys.
        let (pattern, part) = matching.collect::<Vec<_>>().into_iter().rev().max_by_key(|(pattern, _)| pattern.len())?;
        Some(OperatorChoice { pattern, part, by_name: false })
    }

    /// All patterns that match an operator or its block.
    pub(crate) fn matching<'a>(&'a self, operator: &'a str, block: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.keys().map(String::as_str).filter(move |pattern| matches(pattern, operator) || matches(pattern, block))
    }
}

impl<Name: Into<String>> FromIterator<(Name, ShardedPart)> for OperatorPatterns {
    fn from_iter<Parts: IntoIterator<Item = (Name, ShardedPart)>>(parts: Parts) -> Self {
        Self(parts.into_iter().map(|(name, part)| (name.into(), part)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_names_win_over_patterns_and_longer_patterns_over_shorter() {
        let sharding: OperatorPatterns = [
            ("layer1.*", ShardedPart::Batch),
            ("layer1.0.conv*", ShardedPart::Inputs),
            ("layer1.0", ShardedPart::Whole),
            ("fc", ShardedPart::Outputs),
        ]
        .into_iter()
        .collect();
        let of = |operator, block| sharding.of(operator, block).map(|choice| choice.part);
        assert_eq!(of("layer1.0.conv1", "layer1.0"), Some(ShardedPart::Whole));
        assert_eq!(of("layer1.0.conv1", "layer1"), Some(ShardedPart::Inputs));
        assert_eq!(of("layer1.0.bn1", "layer1.0"), Some(ShardedPart::Whole));
        assert_eq!(of("layer1.1.bn1", "layer1.1"), Some(ShardedPart::Batch));
        assert_eq!(of("fc", "head"), Some(ShardedPart::Outputs));
        assert_eq!(of("fc.bias", "head"), None);
    }

    #[test]
    fn of_equally_long_patterns_the_alphabetically_first_wins() {
        let sharding: OperatorPatterns = [("*b", ShardedPart::Batch), ("a*", ShardedPart::Inputs)].into_iter().collect();
        assert_eq!(sharding.of("ab", "").map(|choice| choice.pattern), Some("*b"));
    }
}
