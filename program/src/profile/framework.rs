//! A framework's own operators on a machine: which ones a step has, and how long each takes. They
//! are measured in Python (`foretell.trace.measure`), where the framework's own code calls them, so
//! the command line reads them from a file. It must not know layouts or durations of steps.

use super::Sample;
use foretell_units::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The measured operators of a framework's step on one kind of device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FrameworkProfile {
    /// The stack whose steps these are, such as `hf-trainer`.
    pub stack: String,
    /// The operator table of the step, traced with the operators of this machine's devices
    /// (docs/reference/operator-tables.md has the format).
    pub table: String,
    /// The number of ranks that worked at the same time.
    pub ranks: usize,
    /// The number of threads of each rank.
    pub threads: usize,
    /// The operators of forward and backward passes.
    pub operators: Vec<OperatorSample>,
    /// Passes over memory that optimizers and wrappers make.
    pub moves: Vec<MovesSample>,
}

/// The measured duration of one operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OperatorSample {
    /// The operator's name and the tensors that it reads, such as
    /// `aten.mm f32[512,768] f32[768,3072]`; `^` before a size says that the dimension repeats the
    /// same numbers in memory.
    pub call: String,
    /// The bytes that it reads and writes.
    pub bytes: Bytes,
    /// The duration within a step.
    pub time: Sample,
}

/// The measured duration of a pass over memory that an optimizer or a wrapper makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MovesSample {
    /// The name of the pass in predictions: `AdamW`, `gradients' norm`.
    pub name: String,
    /// The bytes that it reads and writes.
    pub bytes: Bytes,
    /// The duration.
    pub time: Sample,
}
