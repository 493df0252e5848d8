//! Micro-batches that repeat another: what a stage does for one micro-batch it does for the next in other buffers, and nothing else. So one of
//! them is emitted, and what that left is copied for the others.
//!
//! Some micro-batches do what others do not: the first of a pass through a chunk writes to sums to which the later ones add, the last completes
//! gradients that are then reduced, and before the first of a pass shards of parameters are gathered for it. These stand for themselves. All others that
//! come to the same passes in the same order repeat the first of them.
//!
//! What is copied is what was emitted at one go: a pass, or taking a message from another stage. A micro-batch's passes come in one order, its
//! messages somewhere between them; so buffers are named by the pass or message that made them, and the how-manieth there. It must not know
//! what instructions mean, but for which of them count samples.

use super::messages::Receive;
use crate::program::{Buffer, BufferId, Few, Instruction, Operation, StageProgram};
use crate::schedule::{StagePass, Task};
use foretell_models::TensorId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Which micro-batches of a list repeat which.
pub(super) struct Repeats {
    /// By micro-batch.
    roles: Vec<Role>,
    models: Vec<Model>,
    /// What is still to be emitted again, as far as it is known.
    left: Mark,
}

/// What a micro-batch is to others.
enum Role {
    /// It does as no other does.
    Alone,
    /// Others repeat it: its place among the models.
    Model(usize),
    /// It repeats a model.
    Repeats {
        model: usize,
        /// Where the buffers of each of its parts begin; [`NOT_OF_IT`] stands before them.
        first: Vec<u32>,
        /// How many of its passes have been emitted.
        passes: usize,
    },
}

/// A micro-batch that others repeat.
struct Model {
    passes: usize,
    /// The messages that it takes, in the order of tensors.
    messages: Vec<(TensorId, usize)>,
    /// Its parts: passes in their order, then messages.
    parts: Vec<Part>,
    /// The buffers that its parts so far have made: the first, how many, and the part.
    made: Vec<(u32, u32, u32)>,
    /// How many of its passes have been emitted.
    emitted: usize,
    /// How many micro-batches repeat it.
    repeated: usize,
}

/// What is emitted at one go.
#[derive(Clone, Copy)]
pub(super) enum Piece<'a> {
    Pass,
    Message(&'a Receive),
}

/// How a piece is to be emitted.
pub(super) enum Way {
    /// As if there were no other.
    Alone,
    /// So, and what is emitted is to be shown to [`Repeats::learn`].
    Learned(PartOfModel),
    /// By [`Repeats::again`].
    Again(PartOfModel),
}

/// A part of a model.
#[derive(Clone, Copy)]
pub(super) struct PartOfModel {
    model: usize,
    part: usize,
}

/// What one part of a model left.
#[derive(Default)]
struct Part {
    buffers: Vec<(Buffer, Option<Place>)>,
    instructions: Vec<Repeated>,
    /// What the instructions read and write.
    operands: Vec<Place>,
}

/// An instruction, with how many of the operands are its reads, and its writes. Its own are empty.
struct Repeated {
    instruction: Instruction,
    reads: u32,
    writes: u32,
    counts_samples: bool,
}

/// A buffer: the how-manieth of which part, counted from 1; [`NOT_OF_IT`] where it is not the micro-batch's own, and then which.
#[derive(Clone, Copy)]
struct Place {
    part: u32,
    number: u32,
}

const NOT_OF_IT: u32 = 0;

/// Where a list ends: how many instructions and buffers it has.
#[derive(Clone, Copy, Default)]
pub(super) struct Mark {
    instructions: usize,
    buffers: usize,
}

impl Mark {
    pub(super) fn of(program: &StageProgram) -> Self {
        Self { instructions: program.instructions.len(), buffers: program.buffers.len() }
    }
}

/// What parameters do beside operators.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Gathers {
    /// They are there.
    Nothing,
    /// They are gathered before a pass through a chunk first needs them.
    Once,
    /// They come and go.
    Always,
}

/// What is emitted for a micro-batch, and in which order beside everything else. Of each pass also whether its way back follows at once.
#[derive(Default)]
struct Course {
    passes: Vec<(usize, StagePass, bool)>,
    messages: Vec<(TensorId, usize)>,
    /// When each of these comes.
    passes_at: Vec<usize>,
    messages_at: Vec<usize>,
}

impl Course {
    /// Whether another has the same parts, and each of them earlier.
    fn repeats(&self, other: &Self) -> bool {
        let later = |own: &[usize], theirs: &[usize]| own.iter().zip(theirs).all(|(own, theirs)| own > theirs);
        self.passes == other.passes
            && self.messages == other.messages
            && later(&self.passes_at, &other.passes_at)
            && later(&self.messages_at, &other.messages_at)
    }
}

impl Repeats {
    /// None.
    #[cfg(test)]
    pub(super) fn none() -> Self {
        Self { roles: Vec::new(), models: Vec::new(), left: Mark::default() }
    }

    /// Finds them in the order of a stage's tasks, each of which comes after what is received before it.
    pub(super) fn new(tasks: &[Task], receives: &[Vec<Receive>], gathers: Gathers) -> Self {
        let courses = courses(tasks, receives);
        let mut repeats = Self { roles: Vec::with_capacity(courses.len()), models: Vec::new(), left: Mark::default() };
        let alone = alone(tasks, gathers);
        let mut model_courses: Vec<&Course> = Vec::new();
        for (micro_batch, course) in courses.iter().enumerate() {
            if gathers == Gathers::Always || course.passes.is_empty() || alone.contains(&micro_batch) {
                repeats.roles.push(Role::Alone);
                continue;
            }
            let parts = course.passes.len() + course.messages.len();
            repeats.roles.push(match model_courses.iter().position(|model| course.repeats(model)) {
                Some(model) => {
                    repeats.models[model].repeated += 1;
                    Role::Repeats { model, first: vec![0; parts + 1], passes: 0 }
                }
                None => {
                    model_courses.push(course);
                    repeats.models.push(Model {
                        passes: course.passes.len(),
                        messages: course.messages.clone(),
                        parts: (0..parts).map(|_| Part::default()).collect(),
                        made: Vec::new(),
                        emitted: 0,
                        repeated: 0,
                    });
                    Role::Model(repeats.models.len() - 1)
                }
            });
        }
        repeats
    }

    /// How the next piece of a micro-batch is emitted.
    pub(super) fn way(&mut self, micro_batch: usize, piece: Piece<'_>) -> Way {
        let Self { roles, models, .. } = self;
        let (model, emitted) = match roles.get_mut(micro_batch) {
            Some(Role::Repeats { model, passes, .. }) => (*model, Some(passes)),
            Some(Role::Model(model)) => (*model, None),
            Some(Role::Alone) | None => return Way::Alone,
        };
        let is_again = emitted.is_some();
        let known = &mut models[model];
        let part = match piece {
            Piece::Pass => {
                let emitted = emitted.unwrap_or(&mut known.emitted);
                *emitted += 1;
                Some(*emitted - 1)
            }
            Piece::Message(receive) => {
                let key = (receive.tensor, receive.from);
                known.messages.binary_search(&key).ok().map(|place| known.passes + place)
            }
        };
        match part {
            Some(part) if is_again => Way::Again(PartOfModel { model, part }),
            Some(part) => Way::Learned(PartOfModel { model, part }),
            None => Way::Alone,
        }
    }

    /// Learns a part of a model: all that a list has beyond `mark`.
    pub(super) fn learn(&mut self, PartOfModel { model, part }: PartOfModel, program: &mut StageProgram, mark: Mark) {
        let Self { models, left, .. } = self;
        let Model { parts, made, repeated, .. } = &mut models[model];
        made.push((mark.buffers as u32, (program.buffers.len() - mark.buffers) as u32, part as u32 + 1));
        let place = |id: BufferId| {
            let last = made.partition_point(|&(first, ..)| first <= id.0).checked_sub(1);
            let own = last.map(|last| made[last]).filter(|&(first, count, _)| id.0 - first < count);
            own.map_or(Place { part: NOT_OF_IT, number: id.0 }, |(first, _, part)| Place { part, number: id.0 - first })
        };
        let learned = &mut parts[part];
        let buffers = program.buffers[mark.buffers..].iter();
        learned.buffers = buffers.map(|buffer| (buffer.clone(), buffer.parent.map(place))).collect();
        for instruction in &program.instructions[mark.instructions..] {
            learned.operands.extend(instruction.reads.iter().chain(&instruction.writes).map(|&id| place(id)));
            let (reads, writes) = (instruction.reads.len() as u32, instruction.writes.len() as u32);
            let counts_samples = from_sample(&instruction.operation, usize::MAX).is_some();
            let instruction = Instruction { reads: Few::new(), writes: Few::new(), ..instruction.clone() };
            learned.instructions.push(Repeated { instruction, reads, writes, counts_samples });
        }
        // Room for all that is known to come: lists are long, and to move them takes as long as to make them.
        left.instructions += *repeated * learned.instructions.len();
        left.buffers += *repeated * learned.buffers.len();
        program.instructions.reserve(left.instructions);
        program.buffers.reserve(left.buffers);
    }

    /// Emits a part again for a micro-batch that begins with this sample.
    pub(super) fn again(
        &mut self,
        PartOfModel { model, part }: PartOfModel,
        micro_batch: usize,
        first_sample: usize,
        program: &mut StageProgram,
    ) {
        let Some(Role::Repeats { first, .. }) = self.roles.get_mut(micro_batch) else { return };
        let learned = &self.models[model].parts[part];
        self.left.instructions = self.left.instructions.saturating_sub(learned.instructions.len());
        self.left.buffers = self.left.buffers.saturating_sub(learned.buffers.len());
        first[part + 1] = program.buffers.len() as u32;
        let buffer = |place: &Place| BufferId(first[place.part as usize] + place.number);
        program
            .buffers
            .extend(learned.buffers.iter().map(|(one, parent)| Buffer { parent: parent.as_ref().map(buffer), ..one.clone() }));
        let mut operands = learned.operands.as_slice();
        let mut take = |count: u32| {
            let (own, rest) = operands.split_at(count as usize);
            operands = rest;
            few(own, buffer)
        };
        program.instructions.extend(learned.instructions.iter().map(|repeated| {
            let Repeated { instruction, reads, writes, counts_samples } = repeated;
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

/// The buffers of some operands. Mostly they are so few that they need no more than to be written down.
fn few(operands: &[Place], buffer: impl Fn(&Place) -> BufferId) -> Few<BufferId> {
    let mut ids = [BufferId(0); 4];
    if operands.len() > ids.len() {
        return operands.iter().map(buffer).collect();
    }
    ids.iter_mut().zip(operands).for_each(|(id, place)| *id = buffer(place));
    Few::from_buf_and_len(ids, operands.len())
}

/// What is emitted for each micro-batch.
fn courses(tasks: &[Task], receives: &[Vec<Receive>]) -> Vec<Course> {
    let count = tasks.iter().map(|task| task.micro_batch + 1).max().unwrap_or(0);
    let mut courses: Vec<Course> = (0..count).map(|_| Course::default()).collect();
    let mut messages: Vec<Vec<(TensorId, usize, usize)>> = vec![Vec::new(); count];
    let mut now = 0;
    for (index, task) in tasks.iter().enumerate() {
        for receive in receives.get(index).into_iter().flatten() {
            now += 1;
            if let Some(messages) = messages.get_mut(receive.micro_batch) {
                messages.push((receive.tensor, receive.from, now));
            }
        }
        now += 1;
        let course = &mut courses[task.micro_batch];
        let returns = tasks.get(index + 1).is_some_and(|next| task.returns_with(next));
        course.passes.push((task.chunk, task.pass, returns));
        course.passes_at.push(now);
    }
    for (course, mut messages) in courses.iter_mut().zip(messages) {
        messages.sort_unstable();
        course.messages = messages.iter().map(|&(tensor, from, _)| (tensor, from)).collect();
        course.messages_at = messages.iter().map(|&(.., at)| at).collect();
    }
    courses
}

/// The micro-batches that do what others do not.
fn alone(tasks: &[Task], gathers: Gathers) -> BTreeSet<usize> {
    let mut alone = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for (index, task) in tasks.iter().enumerate() {
        if seen.insert((task.chunk, task.pass)) {
            alone.insert(task.micro_batch);
            // What a pass needs first is gathered beside the one before it.
            alone.extend(index.checked_sub(1).filter(|_| gathers == Gathers::Once).map(|before| tasks[before].micro_batch));
        }
    }
    for task in tasks.iter().rev() {
        if seen.remove(&(task.chunk, task.pass)) {
            alone.insert(task.micro_batch);
        }
    }
    alone
}

/// The same operation for a micro-batch that begins with another sample, if it counts samples at all.
fn from_sample(operation: &Operation, first_sample: usize) -> Option<Operation> {
    match *operation {
        Operation::Compute { kernel, accumulate, group } => {
            let moved = kernel.from_sample(first_sample);
            (moved != kernel).then_some(Operation::Compute { kernel: moved, accumulate, group })
        }
        Operation::Load { input, samples, .. } => Some(Operation::Load { input, first_sample, samples }),
        Operation::Collective { .. } | Operation::Send { .. } | Operation::Receive { .. } | Operation::Copy { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Compiler, Emission, Places, Purpose, programs};
    use crate::plan::Plan;
    use crate::program::Program;
    use foretell_models::Model;

    /// The Programs of a plan's layout, with micro-batches that repeat others and without.
    fn both(model: &str, rest: &str) -> [Vec<Program>; 2] {
        let model: Model = serde_json::from_str(model).expect("a model");
        let plan: Plan = serde_json::from_str(&format!("{{\"optimizer\": \"adam\", {rest}}}")).expect("a plan");
        [Emission::Once, Emission::Each].map(|emission| {
            let purposes = [Purpose::Training, Purpose::Evaluation];
            programs(&Compiler::new(&model, "m"), &plan, purposes, emission, Places::Planned)
                .expect("it can be laid out")
                .to_vec()
        })
    }

    #[test]
    fn what_is_repeated_is_what_would_be_emitted() {
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
                        r#""global_batch": 18, "precision": "{precision}", "overlap": {{"gradients": {overlap}, "parameters": {overlap}}},
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
