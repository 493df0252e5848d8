//! Assigns the calls of a step to the instructions of a Program's list. It must not know the
//! trace's format or predictions.

use super::calls::{Call, Part};
use super::operators::{ProductShape, Work};
use super::trace::TraceStep;
use foretell_models::{Kernel, KernelFamily};
use foretell_program::{Collective, Exchange, Operation, Phase, StageProgram};
use foretell_units::DataType;
use std::collections::BTreeMap;

/// A step whose calls have been assigned.
#[derive(Clone, Debug, Default)]
pub struct MatchedStep {
    /// Start and end of each instruction, in nanoseconds from the start of the step. An instruction
    /// without a call takes no time.
    pub spans: Vec<(u64, u64)>,
    /// The time in which each instruction ran, in nanoseconds; 0 without a call.
    pub busy: Vec<u64>,
    /// The time from the end of each kernel to the start of the next one, in nanoseconds.
    pub gaps: Vec<u64>,
}

/// Operators that belong to no instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unmatched {
    /// The operators' name.
    pub name: String,
    /// Calls per step, rounded up.
    pub count: usize,
    /// Time per step, in nanoseconds.
    pub nanoseconds: u64,
}

/// The properties that a call and its instruction have in common. Calls and instructions with the
/// same key are matched in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Kernel(Part, u8, Option<ProductShape>),
    Exchange(Exchange),
    Load,
}

/// Kinds of work that Programs fuse into the previous kernel.
const FUSED: [KernelFamily; 4] =
    [KernelFamily::Activation, KernelFamily::BiasGradient, KernelFamily::Residual, KernelFamily::Bias];

impl Call {
    fn key(&self) -> Key {
        match self.work {
            Work::Kernel(family, shape) => Key::Kernel(self.part, family as u8, shape),
            Work::Exchange(exchange) => Key::Exchange(exchange),
            Work::Load => Key::Load,
        }
    }

    fn is_fused(&self) -> bool {
        matches!(self.work, Work::Kernel(family, _) if FUSED.contains(&family))
    }
}

impl TraceStep {
    /// Assigns the step's calls to a list's instructions.
    pub fn matched(&self, stage: &StageProgram) -> MatchedStep {
        let mut places: Vec<Option<Place>> = vec![None; stage.instructions.len()];
        let groups = instruction_groups(stage);
        let mut calls: BTreeMap<Key, Vec<&Call>> = BTreeMap::new();
        for call in &self.calls {
            calls.entry(call.key()).or_default().push(call);
        }
        for (key, instructions) in &groups {
            if let Some(calls) = calls.get(key) {
                assign(calls, instructions, &mut places);
            }
        }
        self.fuse(&groups, &mut places);
        self.finish(&places)
    }

    /// Adds calls of kinds that the Program fuses to the kernel that ran before them.
    fn fuse(&self, groups: &Groups, places: &mut [Option<Place>]) {
        let is_fused = |call: &&Call| call.is_fused() && !groups.contains_key(&call.key());
        for call in self.calls.iter().filter(is_fused) {
            let before = places.iter_mut().flatten().filter(|place| place.is_kernel && place.start <= call.start);
            if let Some(place) = before.max_by_key(|place| place.start) {
                place.end = place.end.max(call.end);
                place.busy = place.busy.saturating_add(call.busy);
            }
        }
    }

    fn finish(&self, places: &[Option<Place>]) -> MatchedStep {
        let relative = |time: u64| time.saturating_sub(self.start);
        let mut matched = MatchedStep::default();
        let mut clock = 0;
        for place in places {
            let span = place.as_ref().map_or((clock, clock), |place| (relative(place.start), relative(place.end)));
            if place.as_ref().is_none_or(|place| place.is_kernel) {
                clock = span.1;
            }
            matched.spans.push(span);
            matched.busy.push(place.as_ref().map_or(0, |place| place.busy));
        }
        let mut kernels: Vec<(u64, u64)> =
            places.iter().flatten().filter(|place| place.is_kernel).map(|place| (place.start, place.end)).collect();
        kernels.sort_unstable();
        matched.gaps = kernels.windows(2).map(|pair| pair[1].0.saturating_sub(pair[0].1)).collect();
        matched
    }

    /// The calls that belong to no instruction.
    fn unmatched_calls(&self, groups: &Groups) -> impl Iterator<Item = (&str, u64)> {
        let is_left = |call: &&Call| !groups.contains_key(&call.key()) && !call.is_fused();
        self.calls.iter().filter(is_left).map(|call| (call.name.as_str(), call.busy))
    }
}

/// The operators that belong to no instruction, averaged over the steps, longest first.
pub fn unmatched(steps: &[TraceStep], stage: &StageProgram) -> Vec<Unmatched> {
    let groups = instruction_groups(stage);
    let mut totals: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for step in steps {
        let others = step.others.iter().map(|(name, own)| (name.as_str(), *own));
        for (name, time) in others.chain(step.unmatched_calls(&groups)) {
            let total = totals.entry(name).or_default();
            total.0 += 1;
            total.1 = total.1.saturating_add(time);
        }
    }
    let mean = |(name, (count, time)): (&str, (usize, u64))| Unmatched {
        name: name.into(),
        count: count.div_ceil(steps.len().max(1)),
        nanoseconds: time / steps.len().max(1) as u64,
    };
    let mut rows: Vec<Unmatched> = totals.into_iter().map(mean).collect();
    rows.sort_by(|row, other| other.nanoseconds.cmp(&row.nanoseconds).then_with(|| row.name.cmp(&other.name)));
    rows
}

/// Where an instruction ran.
#[derive(Clone, Debug)]
struct Place {
    start: u64,
    end: u64,
    busy: u64,
    is_kernel: bool,
}

/// An instruction's index, and its weight if several instructions share a call.
type Weighted = (usize, f64);

/// The instructions of each key, in order.
type Groups = BTreeMap<Key, Vec<Weighted>>;

fn instruction_groups(stage: &StageProgram) -> Groups {
    let mut groups = Groups::new();
    for (index, instruction) in stage.instructions.iter().enumerate() {
        let part = match instruction.phase {
            Phase::Forward => Part::Forward,
            Phase::Recompute | Phase::Backward => Part::Backward,
            Phase::Update => Part::Update,
        };
        if let Some((key, weight)) = key_of(&instruction.operation, part) {
            groups.entry(key).or_default().push((index, weight));
        }
    }
    groups
}

fn key_of(operation: &Operation, part: Part) -> Option<(Key, f64)> {
    let exchange = |exchange| Some((Key::Exchange(exchange), 1.0));
    match operation {
        Operation::Compute { kernel, .. } => {
            let weight = kernel.flops().value() + kernel.bytes(DataType::Fp32).count() as f64;
            Some((Key::Kernel(part, kernel.family() as u8, product_shape(kernel)), weight.max(1.0)))
        }
        Operation::Collective { kind: Collective::AllReduce, .. } => exchange(Exchange::AllReduce),
        Operation::Collective { kind: Collective::ReduceScatter, .. } => exchange(Exchange::ReduceScatter),
        Operation::Collective { kind: Collective::AllGather, .. } => exchange(Exchange::AllGather),
        Operation::Send { .. } => exchange(Exchange::SendReceive),
        Operation::Load { .. } => Some((Key::Load, 1.0)),
        Operation::Collective { kind: Collective::AllToAll | Collective::Shift, .. }
        | Operation::Receive { .. }
        | Operation::Copy { .. }
        | Operation::Save { .. }
        | Operation::Write { .. }
        | Operation::Traced { .. } => None,
    }
}

/// The shape of a kernel that is a single product.
fn product_shape(kernel: &Kernel) -> Option<ProductShape> {
    match *kernel {
        Kernel::Matmul { rows, columns, contracted, .. } | Kernel::EightBitMatmul { rows, columns, contracted, .. } => {
            Some(ProductShape::new(contracted, rows, columns))
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, .. }
        | Kernel::EightBitMatmulInputGradient { rows, columns, contracted, .. } => {
            Some(ProductShape::new(columns, rows, contracted))
        }
        Kernel::MatmulWeightGradient { rows, columns, contracted, .. }
        | Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
            Some(ProductShape::new(rows, columns, contracted))
        }
        _ => None,
    }
}

/// Assigns calls to instructions with the same key, in order. If there are more calls than
/// instructions, an instruction spans several calls; if there are fewer, the instructions of a call
/// divide its time by their weights.
fn assign(calls: &[&Call], instructions: &[Weighted], places: &mut [Option<Place>]) {
    let (many, few) = (calls.len(), instructions.len());
    let mut add = |index: usize, start: u64, end: u64, call: &Call, busy: u64| {
        let is_kernel = matches!(call.work, Work::Kernel(..));
        if let Some(place) = places.get_mut(index) {
            let place = place.get_or_insert(Place { start, end, busy: 0, is_kernel });
            (place.start, place.end) = (place.start.min(start), place.end.max(end));
            place.busy = place.busy.saturating_add(busy);
        }
    };
    if many >= few {
        for (place, call) in calls.iter().enumerate() {
            if let Some(&(index, _)) = instructions.get(place * few / many) {
                add(index, call.start, call.end, call, call.busy);
            }
        }
        return;
    }
    for (place, call) in calls.iter().enumerate() {
        let (first, last) = ((place * few).div_ceil(many), ((place + 1) * few).div_ceil(many));
        let own = &instructions[first..last];
        let total: f64 = own.iter().map(|(_, weight)| weight).sum();
        let mut before = 0.0;
        for &(index, weight) in own {
            let length = call.end.saturating_sub(call.start) as f64;
            let at = |share: f64| call.start.saturating_add((length * share / total) as u64);
            let busy = (call.busy as f64 * weight / total) as u64;
            add(index, at(before), at(before + weight), call, busy);
            before += weight;
        }
    }
}
