//! Indices into the lists of a [`StageProgram`](super::StageProgram).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// A list of mostly at most four ids. Up to four are stored inline: a Program has hundreds of
/// thousands of such lists.
pub type Few<Id> = SmallVec<[Id; 4]>;

/// An index into [`StageProgram::instructions`](super::StageProgram::instructions).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct InstructionId(pub u32);

/// An index into [`StageProgram::streams`](super::StageProgram::streams).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StreamId(pub u16);

/// An index into [`StageProgram::groups`](super::StageProgram::groups).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u16);

/// An index into [`StageProgram::peers`](super::StageProgram::peers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u16);

/// An index into [`StageProgram::buffers`](super::StageProgram::buffers).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BufferId(pub u32);
