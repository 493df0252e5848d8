//! The Program of a checkpoint: every rank saves its part of the state of training, then writes it.
//!
//! Its buffers are those of the training step that hold state, at the same offsets in the arenas.
//! Over all ranks, each element of the state is saved once: ranks that hold the same elements save
//! equal parts of them, and parameters that several stages hold are saved by the first of these.
//! This file knows no files: where an element lies in a checkpoint follows from the model alone.

use crate::mesh::{Axis, StageMesh};
use crate::placement::Placement;
use crate::program::{
    Buffer, BufferId, Few, Instruction, InstructionId, MemoryKind, Operation, Phase, Program, StageProgram, StateContents,
    StateValue, Stream, StreamId, TensorShard,
};
use foretell_models::TensorId;
use foretell_units::{Bytes, Flops};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The bytes of a saved element, which is in single precision.
const SAVED_ELEMENT: usize = 4;

/// The first stage that holds each value of each tensor.
type FirstStages = BTreeMap<(StateValue, TensorId), usize>;

/// The Program that saves the state of a training step.
pub(super) fn saving(training: &Program) -> Program {
    let mut first_stages = FirstStages::new();
    for list in &training.lists {
        for key in list.buffers.iter().flat_map(values) {
            first_stages.entry(key).and_modify(|stage| *stage = list.stage.min(*stage)).or_insert(list.stage);
        }
    }
    let lists = training.lists.iter().map(|list| saving_list(list, training.mesh.stage(list.stage), &first_stages));
    Program {
        lists: lists.collect(),
        mesh: training.mesh.clone(),
        list_of_rank: training.list_of_rank.clone(),
        precision: training.precision,
        format: training.format,
        samples: 0,
        predictions: 0,
        tokens: None,
        model_flops: Flops::ZERO,
        hardware_flops: Flops::ZERO,
    }
}

/// The values that a buffer holds, and the tensors that they belong to.
fn values(buffer: &Buffer) -> impl Iterator<Item = (StateValue, TensorId)> + '_ {
    let contents = match buffer.state.as_deref() {
        Some(StateContents::Tensors { value, members, .. }) => Some((*value, members)),
        _ => None,
    };
    contents.into_iter().flat_map(|(value, members)| members.iter().map(move |(_, shard)| (value, shard.tensor)))
}

fn saving_list(list: &StageProgram, mesh: &StageMesh, first_stages: &FirstStages) -> StageProgram {
    let with_state = list.buffers.iter().filter(|buffer| buffer.state.is_some());
    let buffers: Vec<Buffer> = with_state.map(|buffer| Buffer { parent: None, lifetime: None, ..buffer.clone() }).collect();
    let masters: Vec<TensorId> =
        buffers.iter().flat_map(values).filter(|(value, _)| *value == StateValue::Master).map(|(_, tensor)| tensor).collect();
    let replicas_differ = buffers.iter().any(|buffer| {
        let state = buffer.state.as_deref();
        matches!(state, Some(StateContents::Tensors { value: StateValue::Parameter, replicas: Some(_), .. }))
    });
    let is_saved = |value: StateValue, tensor: TensorId| {
        // Rounded copies are not saved if their master copies are. After an exchange, the outer
        // optimizer's parameters equal the model's, unless each replica has its own parameters.
        let is_copy = match value {
            StateValue::OuterParameter => !replicas_differ,
            StateValue::Parameter => masters.contains(&tensor),
            StateValue::Master
            | StateValue::Optimizer(_)
            | StateValue::Running
            | StateValue::OuterVelocity
            | StateValue::Residual => false,
        };
        !is_copy && first_stages.get(&(value, tensor)) == Some(&list.stage)
    };
    let (mut instructions, mut names) = (Vec::new(), Vec::new());
    let mut push = |name: String, operation: Operation, stream: u16, reads: &[BufferId], after: Few<InstructionId>| {
        names.push(name);
        instructions.push(Instruction {
            name: names.len() as u32 - 1,
            operation: Arc::new(operation),
            stream: StreamId(stream),
            after,
            reads: Few::from_slice(reads),
            writes: Few::new(),
            micro_batch: None,
            phase: Phase::Update,
        });
    };
    let (mut total, mut saves) = (0, 0);
    for (number, buffer) in (0..).zip(&buffers) {
        for (sharers, part) in parts(buffer, mesh, &is_saved) {
            total += part.bytes;
            saves += 1;
            let operation =
                Operation::Save { members: part.members.into(), sharers: sharers.into(), bytes: Bytes::new(part.bytes) };
            push(buffer.name.to_string(), operation, 0, &[BufferId(number)], Few::new());
        }
    }
    let after = (saves > 0).then(|| InstructionId(saves - 1)).into_iter().collect();
    push("checkpoint".into(), Operation::Write { bytes: Bytes::new(total) }, 1, &[], after);
    StageProgram {
        stage: list.stage,
        streams: vec![Stream::CopyTo(MemoryKind::Host), Stream::Storage],
        groups: Vec::new(),
        peers: Vec::new(),
        buffers,
        instructions,
        names,
        passes: Vec::new(),
        metrics: Vec::new(),
        arena: list.arena,
        host_arena: list.host_arena,
    }
}

/// The members of a buffer whose elements the same ranks hold.
#[derive(Default)]
struct SavedPart {
    members: Vec<usize>,
    /// The elements of the members' shards, over all ranks that hold parts of the buffer.
    elements: usize,
    /// The size on the rank that saves most.
    bytes: u64,
}

/// The saved members of a buffer, by the axes whose ranks hold the same elements of them.
fn parts(buffer: &Buffer, mesh: &StageMesh, is_saved: &dyn Fn(StateValue, TensorId) -> bool) -> BTreeMap<Vec<Axis>, SavedPart> {
    let mut parts: BTreeMap<Vec<Axis>, SavedPart> = BTreeMap::new();
    let Some(StateContents::Tensors { value, members, axes, replicas }) = buffer.state.as_deref() else { return parts };
    for (index, (offset, TensorShard { tensor, placements, .. })) in members.iter().enumerate() {
        if !is_saved(*value, *tensor) {
            continue;
        }
        let is_shared = |axis: &Axis| placements.get(*axis) == Placement::Replicate && mesh.size(*axis) > 1;
        let has_others = |axis: &Axis| axes.contains(axis) || *replicas == Some(*axis);
        let sharers = Axis::WITHIN_STAGE.into_iter().filter(|axis| is_shared(axis) && !has_others(axis)).collect();
        let part = parts.entry(sharers).or_default();
        part.members.push(index);
        // A member ends where the next one starts, or at the end of the buffer over all its ranks.
        let held: usize = buffer.shape.iter().product();
        let all = held * axes.iter().map(|&axis| mesh.size(axis)).product::<usize>();
        part.elements += members.get(index + 1).map_or(all, |(next, _)| *next) - offset;
    }
    for (sharers, part) in &mut parts {
        let held: usize = buffer.shape.iter().product();
        let copies: usize = sharers.iter().map(|&axis| mesh.size(axis)).product();
        part.bytes = (SAVED_ELEMENT * part.elements.min(held).div_ceil(copies)) as u64;
    }
    parts
}
