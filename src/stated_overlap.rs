//! `overlap` in a plan file: the fields that the file states. It must not know what a stack
//! overlaps.

use foretell_program::Overlap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The communication that overlaps with kernels. Kernels wait for all other communication. A
/// missing key has the stack's default; Foretell's own executor overlaps everything except
/// `passes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(rename = "Overlap")]
pub struct StatedOverlap {
    /// Collectives of activations over `tensor`. Only the kernels that read the results wait for
    /// them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<bool>,
    /// Gathers and shifts of keys and values over `context`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<bool>,
    /// All-to-alls of tokens to experts and back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expert: Option<bool>,
    /// Reductions of gradients. If `false`, they come after the backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gradients: Option<bool>,
    /// Gathers of parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<bool>,
    /// Sends between stages. `false` is possible only for other stacks, whose sends are buffered.
    /// Foretell's sends wait for the receiver: two stages whose kernels waited for their sends to
    /// each other would deadlock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<bool>,
    /// Passes: a stage runs a forward and a backward pass of two micro-batches together. While one
    /// waits for tokens of its experts, or for activations over `tensor` or `context`, the other
    /// computes. "Two passes at a time" on the page about files has the schedules.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub passes: Option<bool>,
}

impl StatedOverlap {
    /// The fields of an overlap that differ from the usual one. `None` if none does.
    pub fn of(overlap: Overlap, usual: Overlap) -> Option<Self> {
        let stated = |value: bool, usual: bool| (value != usual).then_some(value);
        let found = Self {
            tensor: stated(overlap.tensor, usual.tensor),
            context: stated(overlap.context, usual.context),
            expert: stated(overlap.expert, usual.expert),
            gradients: stated(overlap.gradients, usual.gradients),
            parameters: stated(overlap.parameters, usual.parameters),
            pipeline: stated(overlap.pipeline, usual.pipeline),
            passes: stated(overlap.passes, usual.passes),
        };
        (found != Self::default()).then_some(found)
    }

    /// The overlap of a plan whose stack's default is `usual`.
    pub fn over(self, usual: Overlap) -> Overlap {
        Overlap {
            tensor: self.tensor.unwrap_or(usual.tensor),
            context: self.context.unwrap_or(usual.context),
            expert: self.expert.unwrap_or(usual.expert),
            gradients: self.gradients.unwrap_or(usual.gradients),
            parameters: self.parameters.unwrap_or(usual.parameters),
            pipeline: self.pipeline.unwrap_or(usual.pipeline),
            passes: self.passes.unwrap_or(usual.passes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_leaves_out_is_the_stacks() {
        let usual = Overlap { tensor: false, expert: false, ..Overlap::default() };
        let stated: StatedOverlap = serde_json::from_str(r#"{"passes": true, "tensor": false}"#).expect("it is well formed");
        let overlap = stated.over(usual);
        assert_eq!(overlap, Overlap { passes: true, ..usual });
        let written = StatedOverlap::of(overlap, usual).expect("it differs");
        assert_eq!((written, written.over(usual)), (StatedOverlap { tensor: None, ..stated }, overlap));
        assert_eq!(StatedOverlap::of(usual, usual), None);
    }
}
