//! Micro-batches that repeat another. A stage runs the same instructions for most micro-batches, on
//! other buffers. So one micro-batch is emitted, and its instructions and buffers are copied for
//! the others.
//!
//! Some micro-batches are unique: the first and the last of each kind of pass through a chunk. The
//! first writes to sums that later ones add to; the last completes gradients, which are then
//! reduced. If sharded parameters are gathered once a step, the micro-batch of the task before each
//! first pass is unique too: the gather runs during that task. If they are gathered for every pass,
//! all micro-batches are unique. Each other micro-batch repeats the first earlier one that has the
//! same passes and messages in the same order; if there is none, it is a template.
//!
//! A segment is emitted as one unit: a pass, or the receipt of one message. A micro-batch's
//! messages may arrive anywhere between its passes. So a buffer is identified by the segment that
//! added it and its number within the segment. Instructions are copied without looking at what they
//! do, except for those that depend on the index of a sample. It must not know the schedule: it
//! sees tasks in their order.

mod itinerary;

use crate::compile::messages::Receive;
use crate::compile::state::ParameterGathers;
use crate::program::{Buffer, BufferId, Few, Instruction, Operation, StageProgram};
use crate::schedule::Task;
use foretell_models::TensorId;
use itinerary::{Itinerary, itineraries, unique_micro_batches};
use std::sync::Arc;

/// The micro-batches of a list that repeat others.
pub(super) struct Repeats {
    /// Indexed by micro-batch.
    repetitions: Vec<Repetition>,
    templates: Vec<Template>,
    /// The number of instructions and buffers that are still to be copied from the segments
    /// recorded so far.
    left: ListEnd,
}

/// How a micro-batch relates to others.
enum Repetition {
    /// It is emitted and never copied.
    Unique,
    /// Others may repeat it. The index in [`Repeats::templates`].
    Template(usize),
    /// It repeats a template.
    Copy {
        template: usize,
        /// The id of the first buffer of each segment; segments count from 1. Entry [`OUTSIDE`]
        /// is 0.
        first_buffers: Vec<u32>,
        /// The number of its passes so far.
        passes: usize,
    },
}

/// A micro-batch that others repeat.
struct Template {
    /// The number of its passes in the whole list.
    passes: usize,
    /// The tensor and sending stage of each message that it receives, ascending.
    messages: Vec<(TensorId, usize)>,
    /// Its segments: passes in order, then messages.
    segments: Vec<RecordedSegment>,
    /// The runs of buffers that its segments added so far, ascending.
    added: Vec<AddedBuffers>,
    /// The number of its passes so far.
    emitted_passes: usize,
    /// The number of micro-batches that repeat it.
    copies: usize,
}

/// A run of buffers that one segment of a template added.
struct AddedBuffers {
    first: u32,
    count: u32,
    /// The segment, counted from 1.
    segment: u32,
}

/// The kind of segment to emit next for a micro-batch.
#[derive(Clone, Copy)]
pub(super) enum Segment<'a> {
    Pass,
    Message(&'a Receive),
}

/// How the next segment of a micro-batch is emitted.
pub(super) enum Next {
    /// The caller emits it.
    Emit,
    /// The caller emits it and passes the result to [`Repeats::record`].
    EmitAndRecord(SegmentId),
    /// The caller calls [`Repeats::copy`] instead of emitting it.
    Copy(SegmentId),
}

/// A segment of a template.
#[derive(Clone, Copy)]
pub(super) struct SegmentId {
    template: usize,
    /// Counted from 0.
    segment: usize,
}

/// The buffers and instructions of one segment of a template.
#[derive(Default)]
struct RecordedSegment {
    /// Each buffer, with its parent.
    buffers: Vec<(Buffer, Option<BufferReference>)>,
    instructions: Vec<RecordedInstruction>,
    /// The reads and then the writes of each instruction, one after the other.
    operands: Vec<BufferReference>,
}

/// An instruction whose operands are the next `reads + writes` entries of
/// [`RecordedSegment::operands`]. Its own lists of operands are empty.
struct RecordedInstruction {
    instruction: Instruction,
    reads: u32,
    writes: u32,
    /// Whether the operation depends on the index of the first sample.
    counts_samples: bool,
}

/// A template's reference to a buffer: the segment that added it, counted from 1, and its number
/// within the segment, counted from 0. With segment [`OUTSIDE`] `number` is the buffer's id.
#[derive(Clone, Copy)]
struct BufferReference {
    segment: u32,
    number: u32,
}

/// The segment of buffers that a template did not add.
const OUTSIDE: u32 = 0;

/// The length of a list.
#[derive(Clone, Copy, Default)]
pub(super) struct ListEnd {
    instructions: usize,
    buffers: usize,
}

impl ListEnd {
    pub(super) fn of(program: &StageProgram) -> Self {
        Self { instructions: program.instructions.len(), buffers: program.buffers.len() }
    }
}

impl Repeats {
    /// No micro-batch repeats another.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self { repetitions: Vec::new(), templates: Vec::new(), left: ListEnd::default() }
    }

    /// Finds the repetitions among a stage's tasks. `receives` has the messages that arrive before
    /// each task.
    pub(super) fn new(tasks: &[Task], receives: &[Vec<Receive>], gathers: ParameterGathers) -> Self {
        let itineraries = itineraries(tasks, receives);
        let mut repeats =
            Self { repetitions: Vec::with_capacity(itineraries.len()), templates: Vec::new(), left: ListEnd::default() };
        let unique = unique_micro_batches(tasks, gathers);
        let mut of_templates: Vec<&Itinerary> = Vec::new();
        for (micro_batch, itinerary) in itineraries.iter().enumerate() {
            if gathers == ParameterGathers::EveryPass || itinerary.passes.is_empty() || unique.contains(&micro_batch) {
                repeats.repetitions.push(Repetition::Unique);
                continue;
            }
            let segments = itinerary.passes.len() + itinerary.messages.len();
            repeats.repetitions.push(match of_templates.iter().position(|template| itinerary.repeats(template)) {
                Some(template) => {
                    repeats.templates[template].copies += 1;
                    Repetition::Copy { template, first_buffers: vec![0; segments + 1], passes: 0 }
                }
                None => {
                    of_templates.push(itinerary);
                    repeats.templates.push(Template {
                        passes: itinerary.passes.len(),
                        messages: itinerary.messages.clone(),
                        segments: (0..segments).map(|_| RecordedSegment::default()).collect(),
                        added: Vec::new(),
                        emitted_passes: 0,
                        copies: 0,
                    });
                    Repetition::Template(repeats.templates.len() - 1)
                }
            });
        }
        repeats
    }

    /// How the next segment of a micro-batch is emitted.
    pub(super) fn next(&mut self, micro_batch: usize, segment: Segment<'_>) -> Next {
        let Self { repetitions, templates, .. } = self;
        let (template, passes_of_copy) = match repetitions.get_mut(micro_batch) {
            Some(Repetition::Copy { template, passes, .. }) => (*template, Some(passes)),
            Some(Repetition::Template(template)) => (*template, None),
            Some(Repetition::Unique) | None => return Next::Emit,
        };
        let is_copy = passes_of_copy.is_some();
        let known = &mut templates[template];
        let segment = match segment {
            Segment::Pass => {
                let passes = passes_of_copy.unwrap_or(&mut known.emitted_passes);
                *passes += 1;
                Some(*passes - 1)
            }
            Segment::Message(receive) => {
                let key = (receive.tensor, receive.from);
                known.messages.binary_search(&key).ok().map(|message| known.passes + message)
            }
        };
        match segment {
            Some(segment) if is_copy => Next::Copy(SegmentId { template, segment }),
            Some(segment) => Next::EmitAndRecord(SegmentId { template, segment }),
            None => Next::Emit,
        }
    }

    /// Records a segment of a template: everything that the list has beyond `start`.
    pub(super) fn record(&mut self, SegmentId { template, segment }: SegmentId, program: &mut StageProgram, start: ListEnd) {
        let Self { templates, left, .. } = self;
        let Template { segments, added, copies, .. } = &mut templates[template];
        let count = (program.buffers.len() - start.buffers) as u32;
        added.push(AddedBuffers { first: start.buffers as u32, count, segment: segment as u32 + 1 });
        let reference = |id: BufferId| {
            let last = added.partition_point(|run| run.first <= id.0).checked_sub(1).map(|last| &added[last]);
            let own = last.filter(|run| id.0 - run.first < run.count);
            own.map_or(BufferReference { segment: OUTSIDE, number: id.0 }, |run| BufferReference {
                segment: run.segment,
                number: id.0 - run.first,
            })
        };
        let recorded = &mut segments[segment];
        let buffers = program.buffers[start.buffers..].iter();
        recorded.buffers = buffers.map(|buffer| (buffer.clone(), buffer.parent.map(reference))).collect();
        for instruction in &program.instructions[start.instructions..] {
            recorded.operands.extend(instruction.reads.iter().chain(&instruction.writes).map(|&id| reference(id)));
            let (reads, writes) = (instruction.reads.len() as u32, instruction.writes.len() as u32);
            let counts_samples = from_sample(&instruction.operation, usize::MAX).is_some();
            let instruction = Instruction { reads: Few::new(), writes: Few::new(), ..instruction.clone() };
            recorded.instructions.push(RecordedInstruction { instruction, reads, writes, counts_samples });
        }
        // Reserve space for all copies of the segments recorded so far: lists are long, and growing
        // them step by step would copy as much as the copies themselves.
        left.instructions += *copies * recorded.instructions.len();
        left.buffers += *copies * recorded.buffers.len();
        program.instructions.reserve(left.instructions);
        program.buffers.reserve(left.buffers);
    }

    /// Copies a segment for a micro-batch whose first sample is `first_sample`.
    pub(super) fn copy(
        &mut self,
        SegmentId { template, segment }: SegmentId,
        micro_batch: usize,
        first_sample: usize,
        program: &mut StageProgram,
    ) {
        let Some(Repetition::Copy { first_buffers, .. }) = self.repetitions.get_mut(micro_batch) else { return };
        let recorded = &self.templates[template].segments[segment];
        self.left.instructions = self.left.instructions.saturating_sub(recorded.instructions.len());
        self.left.buffers = self.left.buffers.saturating_sub(recorded.buffers.len());
        first_buffers[segment + 1] = program.buffers.len() as u32;
        let buffer = |reference: &BufferReference| BufferId(first_buffers[reference.segment as usize] + reference.number);
        program.buffers.extend(
            recorded.buffers.iter().map(|(original, parent)| Buffer { parent: parent.as_ref().map(buffer), ..original.clone() }),
        );
        let mut operands = recorded.operands.as_slice();
        let mut take = |count: u32| {
            let (own, rest) = operands.split_at(count as usize);
            operands = rest;
            buffer_ids(own, buffer)
        };
        program.instructions.extend(recorded.instructions.iter().map(|recorded| {
            let RecordedInstruction { instruction, reads, writes, counts_samples } = recorded;
            let operation = if *counts_samples { from_sample(&instruction.operation, first_sample).map(Arc::new) } else { None };
            Instruction {
                name: instruction.name,
                operation: operation.unwrap_or_else(|| Arc::clone(&instruction.operation)),
                stream: instruction.stream,
                after: Few::new(),
                reads: take(*reads),
                writes: take(*writes),
                micro_batch: instruction.micro_batch.map(|_| micro_batch as u32),
                phase: instruction.phase,
            }
        }));
    }
}

/// The ids of some operands. Most instructions have at most four, which need no heap and no
/// iterator.
fn buffer_ids(operands: &[BufferReference], buffer: impl Fn(&BufferReference) -> BufferId) -> Few<BufferId> {
    let mut ids = [BufferId(0); 4];
    if operands.len() > ids.len() {
        return operands.iter().map(buffer).collect();
    }
    ids.iter_mut().zip(operands).for_each(|(id, reference)| *id = buffer(reference));
    Few::from_buf_and_len(ids, operands.len())
}

/// The same operation for another first sample; `None` if it does not depend on samples.
fn from_sample(operation: &Operation, first_sample: usize) -> Option<Operation> {
    match *operation {
        Operation::Compute { kernel, accumulate, group } => {
            let moved = kernel.with_first_sample(first_sample);
            (moved != kernel).then_some(Operation::Compute { kernel: moved, accumulate, group })
        }
        Operation::Load { input, samples, order, .. } => Some(Operation::Load { input, first_sample, samples, order }),
        Operation::Traced { .. }
        | Operation::Collective { .. }
        | Operation::Send { .. }
        | Operation::Receive { .. }
        | Operation::Copy { .. }
        | Operation::Save { .. }
        | Operation::Write { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::compile::emit::Emission;
    use crate::compile::{Compiled, Compiler};
    use crate::plan::Plan;
    use foretell_models::Model;

    /// A plan's Programs, compiled twice: first with copied micro-batches, then with every
    /// micro-batch emitted.
    fn both(model: &str, rest: &str) -> [Compiled; 2] {
        let model: Model = serde_json::from_str(model).expect("a model");
        let plan: Plan = serde_json::from_str(&format!("{{\"optimizer\": \"adam\", {rest}}}")).expect("a plan");
        [Emission::Once, Emission::Each]
            .map(|emission| Compiler::new(&model, "m").all(&plan, emission).expect("a plan that fits the model"))
    }

    #[test]
    fn copied_micro_batches_equal_emitted_ones() {
        let models = [
            r#"{"family": "gpt", "layers": 8, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 8, "dropout": 0.1}"#,
            r#"{"family": "gpt", "layers": 8, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 8, "tied_embeddings": true}"#,
            r#"{"family": "resnet", "depth": 18, "stem": "small", "image": 8, "channels": 1, "classes": 10, "width": 4}"#,
        ];
        let schedules = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"];
        for model in models {
            for (number, schedule) in schedules.into_iter().enumerate() {
                for zero in 0..4 {
                    let chunks = if number == 2 || number == 4 { 2 } else { 1 };
                    let recompute = ["none", "selective", "full"][(number + zero) % 3];
                    let overlap = zero % 2 == 0;
                    // ResNets have no product of eight bits.
                    let precision = if model.contains("gpt") && (number + zero) % 2 == 0 { "fp8" } else { "bf16" };
                    let offload = if (number + zero) % 4 == 1 { "activations" } else { "none" };
                    let rest = format!(
                        r#""global_batch": 18, "precision": "{precision}", "overlap": {{"gradients": {overlap}, "parameters": {overlap}, "passes": {overlap}}},
                        "layout": {{"data": 2, "pipeline": 2, "micro_batch": 1, "schedule": "{schedule}", "virtual_stages": {chunks},
                        "zero": {zero}, "recompute": "{recompute}", "offload": "{offload}"}}"#
                    );
                    let [once, each] = both(model, &rest);
                    // Not with assert_eq, which would print them.
                    assert!(
                        format!("{once:?}") == format!("{each:?}"),
                        "{schedule}, zero {zero}, {recompute}, offload {offload}, of {model}"
                    );
                }
            }
        }
    }
}
