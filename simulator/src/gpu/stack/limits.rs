//! What a framework's current release can run.

use crate::gpu::Profiles;
use foretell_program::{Schedule, Stack};
use serde::Deserialize;

/// What a framework can run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackLimits {
    /// Whether it splits models at all, and not only batches and the state of parameters.
    #[serde(default)]
    pub splits_models: bool,
    /// Whether it shards the state of parameters (ZeRO).
    #[serde(default)]
    pub shards_state: bool,
    /// Whether it keeps activations and optimizer state on the hosts as a Program does: all of
    /// them, copied to the device for each use. Others update parameters on the host, or move the
    /// inputs of some modules.
    #[serde(default)]
    pub offloads: bool,
    /// Whether `tensor` must divide the heads of keys and values, and not only those of queries:
    /// `TransformerConfig` in megatron/core/transformer/transformer_config.py, and torchtitan's
    /// column-wise shards of both products.
    #[serde(default)]
    pub divides_key_heads: bool,
    /// Its pipeline schedules.
    pub schedules: Vec<Schedule>,
    /// The limits in words, and where they are from.
    pub reason: String,
}

impl StackLimits {
    /// The limits of a stack; `None` for our own executor and for stacks of unknown limits.
    pub fn of(stack: &Stack) -> Option<&'static Self> {
        Profiles::library().ok()?.stack(stack.name()).ok()?.limits.as_ref()
    }

    /// All limits in words.
    pub fn in_words(&self) -> String {
        format!("{}{}", self.reason, if self.offloads { "" } else { "; without offloading to hosts" })
    }

    /// Whether the framework has a pipeline schedule.
    pub fn has(&self, schedule: Schedule) -> bool {
        self.schedules.contains(&schedule)
    }

    /// A stack that splits what this one cannot: the state of parameters, or the model itself.
    pub fn wider(&self) -> Option<&'static str> {
        match (self.shards_state, self.splits_models) {
            (false, _) => Some("fsdp"),
            (true, false) => Some("megatron-core"),
            (true, true) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(stack: &str) -> &'static StackLimits {
        StackLimits::of(&Stack::new(stack)).expect("the stack has limits")
    }

    #[test]
    fn frameworks_that_shard_key_heads_divide_them() {
        assert!(["megatron-core", "torchtitan"].map(|stack| limits(stack).divides_key_heads).iter().all(|&divides| divides));
        assert!(!limits("ddp").divides_key_heads);
    }

    #[test]
    fn no_framework_of_nvidia_has_zero_bubble_schedules() {
        for stack in ["megatron-core", "nemo-2024", "megatron-bridge", "mlperf-nemo"] {
            assert!(limits(stack).has(Schedule::Interleaved) && !limits(stack).has(Schedule::ZeroBubbleH1));
        }
        assert!(limits("torchtitan").has(Schedule::ZeroBubbleV) && !limits("fsdp2").has(Schedule::ZeroBubbleH1));
        assert!(!limits("megatron-deepspeed").has(Schedule::Interleaved));
        assert!(limits("maxtext-tpu").has(Schedule::Gpipe) && !limits("maxtext").has(Schedule::OneForwardOneBackward));
    }

    #[test]
    fn limits_are_those_of_the_framework_and_not_of_the_stack_that_its_figures_begin_with() {
        for stack in ["foretell", "internevo", "mlperf-adapters", "paxml", "paxml-2023", "pytorch-eager", "mlperf-bert"] {
            assert_eq!(StackLimits::of(&Stack::new(stack)), None, "{stack}");
        }
        for stack in ["hf-trainer", "trl", "torchtune", "axolotl", "mosaicml-composer", "nemo-automodel", "fsdp"] {
            assert!(!limits(stack).splits_models && limits(stack).shards_state, "{stack}");
        }
        assert!(!limits("hf-deepspeed-4.48").splits_models && limits("deepspeed-3d").splits_models);
        assert!(!limits("nanogpt-compiled").shards_state && !limits("ddp").shards_state);
    }
}
