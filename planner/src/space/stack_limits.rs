//! What a framework's current release can run: limits of the space for a plan that names its stack.
//!
//! Our own executor and stacks that are not listed have no limits. A field that the user fixes is
//! taken as it is: a fork of the framework may have more.

use super::Fixed;
use foretell_program::{Offload, Schedule, Stack};

/// What a framework can run.
#[derive(Debug, PartialEq, Eq)]
pub struct StackLimits {
    /// Whether it splits models at all, and not only batches and the state of parameters.
    splits_models: bool,
    /// Whether it shards the state of parameters (ZeRO).
    shards_state: bool,
    /// Whether it keeps activations and optimizer state on the hosts as a Program does: all of
    /// them, copied to the device for each use. Others update parameters on the host, or move the
    /// inputs of some modules.
    offloads: bool,
    /// Its pipeline schedules.
    schedules: &'static [Schedule],
    /// The limits in words, and where they are from.
    reason: &'static str,
}

const PLAIN: &[Schedule] = &[Schedule::OneForwardOneBackward];
const MEGATRON: &[Schedule] = &[Schedule::OneForwardOneBackward, Schedule::Interleaved];
const NANOTRON: &[Schedule] = &[Schedule::Gpipe, Schedule::OneForwardOneBackward];
const TORCHTITAN: &[Schedule] = &[Schedule::Gpipe, Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::ZeroBubbleV];

/// Limits by the beginning of the stack's name; the first that fits counts.
const LIMITS: &[(&str, StackLimits)] = &[
    ("megatron-deepspeed", OF_DEEPSPEED),
    ("deepspeed-zero", OF_ZERO),
    ("hf-deepspeed", OF_ZERO),
    ("deepspeed", OF_DEEPSPEED),
    ("megatron-", OF_MEGATRON),
    ("mlperf-nemo", OF_MEGATRON),
    ("nemo-automodel", OF_FSDP),
    ("nemo-adapters", OF_MEGATRON),
    ("nemo", OF_MEGATRON),
    (
        "nanotron",
        StackLimits {
            splits_models: true,
            shards_state: true,
            offloads: false,
            schedules: NANOTRON,
            reason: "Nanotron's pipelines run all forward passes first or 1F1B (`PipelineEngine` in \
                     nanotron/parallel/pipeline_parallel/engine.py)",
        },
    ),
    (
        "maxtext",
        StackLimits {
            splits_models: true,
            shards_state: true,
            offloads: true,
            schedules: &[Schedule::Gpipe],
            reason: "MaxText differentiates a loop over all micro-batches, so its pipelines run all forward passes first \
                     (src/MaxText/layers/pipeline.py; its circular repeats are not in the space)",
        },
    ),
    ("torchtitan", OF_TORCHTITAN),
    ("fsdp2", OF_TORCHTITAN),
    ("fsdp", OF_FSDP),
    ("hf-trainer", OF_FSDP),
    ("trl", OF_FSDP),
    ("torchtune", OF_FSDP),
    ("axolotl", OF_FSDP),
    ("llama-factory", OF_FSDP),
    ("accelerate", OF_FSDP),
    ("mosaicml-composer", OF_FSDP),
    ("ddp", OF_DDP),
    ("nanogpt", OF_DDP),
];

const OF_MEGATRON: StackLimits = StackLimits {
    splits_models: true,
    shards_state: true,
    offloads: false,
    schedules: MEGATRON,
    reason: "Megatron-LM's pipelines run 1F1B, interleaved or not (`get_forward_backward_func` in \
             megatron/core/pipeline_parallel/schedules.py)",
};

const OF_ZERO: StackLimits = StackLimits {
    splits_models: false,
    shards_state: true,
    offloads: false,
    schedules: PLAIN,
    reason: "ZeRO splits batches and the state of parameters alone (Rajbhandari et al. 2020)",
};

const OF_DEEPSPEED: StackLimits = StackLimits {
    splits_models: true,
    shards_state: true,
    offloads: false,
    schedules: PLAIN,
    reason: "DeepSpeed's pipelines run 1F1B alone (`TrainSchedule` in deepspeed/runtime/pipe/schedule.py)",
};

const OF_TORCHTITAN: StackLimits = StackLimits {
    splits_models: true,
    shards_state: true,
    offloads: false,
    schedules: TORCHTITAN,
    reason: "no ZB-H1, which torch/distributed/pipelining/schedules.py does not have",
};

const OF_DDP: StackLimits = StackLimits {
    splits_models: false,
    shards_state: false,
    offloads: false,
    schedules: PLAIN,
    reason: "DDP copies the whole model to each rank (Li et al. 2020, \"PyTorch Distributed\")",
};

const OF_FSDP: StackLimits = StackLimits {
    splits_models: false,
    shards_state: true,
    offloads: false,
    schedules: PLAIN,
    reason: "FSDP splits batches and the state of parameters alone (Zhao et al. 2023)",
};

impl StackLimits {
    /// The limits of a stack; `None` for our own executor and for stacks of unknown limits.
    pub fn of(stack: &Stack) -> Option<&'static Self> {
        LIMITS.iter().find(|(name, _)| stack.name().starts_with(name)).map(|(_, limits)| limits)
    }

    /// Whether `tensor` must divide the heads of keys and values, and not only those of queries:
    /// `TransformerConfig` in megatron/core/transformer/transformer_config.py, and torchtitan's
    /// column-wise shards of both products.
    pub fn divides_key_heads(&self) -> bool {
        *self == OF_MEGATRON || *self == OF_TORCHTITAN
    }

    /// All limits in words.
    pub fn in_words(&self) -> String {
        format!("{}{}", self.reason, if self.offloads { "" } else { "; without offloading to hosts" })
    }

    /// The limits of splitting in words, with their source.
    pub fn reason(&self) -> &'static str {
        self.reason
    }

    /// A stack that splits what this one cannot: the state of parameters, or the model itself.
    pub(crate) fn wider(&self) -> Option<&'static str> {
        match (self.shards_state, self.splits_models) {
            (false, _) => Some("fsdp"),
            (true, false) => Some("megatron-core"),
            (true, true) => None,
        }
    }

    /// Whether the framework has a pipeline schedule.
    pub(crate) fn has(&self, schedule: Schedule) -> bool {
        self.schedules.contains(&schedule)
    }

    /// Fixes the fields that the framework has only one value of, unless the user has fixed them.
    /// A layout with stages of their own meshes says its sizes there.
    pub fn fix(&self, fixed: &mut Fixed) {
        if !self.splits_models && fixed.stages.is_none() {
            for size in [&mut fixed.tensor, &mut fixed.pipeline, &mut fixed.context, &mut fixed.expert] {
                size.get_or_insert(1);
            }
        }
        if !self.shards_state {
            fixed.zero.get_or_insert(0);
        }
        if !self.offloads {
            fixed.offload.get_or_insert(Offload::None);
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
        assert!(["megatron-core", "torchtitan"].map(|stack| limits(stack).divides_key_heads()).iter().all(|&divides| divides));
        assert!(!limits("ddp").divides_key_heads());
    }

    #[test]
    fn no_framework_of_nvidia_has_zero_bubble_schedules() {
        for stack in ["megatron-core", "nemo-2024", "megatron-bridge"] {
            assert!(limits(stack).has(Schedule::Interleaved) && !limits(stack).has(Schedule::ZeroBubbleH1));
        }
        assert!(limits("torchtitan").has(Schedule::ZeroBubbleV) && !limits("torchtitan").has(Schedule::ZeroBubbleH1));
        assert!(!limits("megatron-deepspeed").has(Schedule::Interleaved));
        assert!(limits("maxtext-tpu").has(Schedule::Gpipe) && !limits("maxtext").has(Schedule::OneForwardOneBackward));
        assert_eq!(StackLimits::of(&Stack::default()), None);
    }

    #[test]
    fn what_the_user_fixes_goes_before_the_stack() {
        let mut fixed: Fixed = "tensor=2".parse().expect("it is well formed");
        limits("ddp").fix(&mut fixed);
        assert_eq!((fixed.tensor, fixed.pipeline, fixed.zero), (Some(2), Some(1), Some(0)));
        let mut fixed = Fixed::default();
        limits("fsdp").fix(&mut fixed);
        assert_eq!((fixed.tensor, fixed.expert, fixed.zero), (Some(1), Some(1), None));
        assert_eq!(fixed.offload, Some(Offload::None));
        let mut fixed: Fixed = "offload=both".parse().expect("it is well formed");
        limits("megatron-core").fix(&mut fixed);
        assert_eq!(fixed.offload, Some(Offload::Both));
        let mut fixed = Fixed::default();
        limits("maxtext-tpu").fix(&mut fixed);
        assert_eq!(fixed.offload, None);
    }
}
