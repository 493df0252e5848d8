//! What a framework's current release can run.

use foretell_program::Schedule;
use serde::Deserialize;

/// What a framework can run.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackLimits {
    /// Whether it can split models, and not only batches and the state of parameters.
    #[serde(default)]
    pub splits_models: bool,
    /// Whether it can shard the state of parameters (ZeRO).
    #[serde(default)]
    pub shards_state: bool,
    /// Whether it can keep activations and optimizer state on the hosts as a Program does: all of
    /// them, copied to the device for each use. Other frameworks update parameters on the host, or
    /// offload the inputs of some modules only.
    #[serde(default)]
    pub offloads: bool,
    /// Whether `tensor` must divide the number of key and value heads, not only that of query
    /// heads: `TransformerConfig` in megatron/core/transformer/transformer_config.py, and
    /// torchtitan's column-wise shards of both products.
    #[serde(default)]
    pub divides_key_heads: bool,
    /// The pipeline schedules that it has.
    pub schedules: Vec<Schedule>,
    /// The limits in words, and their sources.
    pub reason: String,
}

impl StackLimits {
    /// All limits in words.
    pub fn in_words(&self) -> String {
        format!("{}{}", self.reason, if self.offloads { "" } else { "; without offloading to hosts" })
    }

    /// Whether the framework has a pipeline schedule.
    pub fn has(&self, schedule: Schedule) -> bool {
        self.schedules.contains(&schedule)
    }

    /// Returns a stack that splits what this one cannot: the state of parameters, or the model
    /// itself. `None` if this one splits both.
    pub fn wider(&self) -> Option<&'static str> {
        match (self.shards_state, self.splits_models) {
            (false, _) => Some("fsdp"),
            (true, false) => Some("megatron-core"),
            (true, true) => None,
        }
    }
}
