//! What the blocks of a layout take, found from a short model: of equal blocks one and two are compiled, and what `n` of them take
//! follows.
//!
//! The longest chain through `n` equal blocks is the greatest of functions that are linear in `n`, and so convex: the line through its values at one
//! and at two is nowhere above it. So what is told here is a bound, and where one chain is the longest throughout it is exact. A chain that there is only from
//! some number of blocks on could contradict this; the property test of the bounds looks for one.

use crate::windows::{Busy, Chain, Held, Kept, Window, busy, gathers, head, kernels, tail, window};
use foretell_models::Model;
use foretell_program::{
    Axis, CollectiveRole, Compiler, Layout, Mesh, Operation, Plan, PlanError, Program, Rank, StagePass, StageProgram, Stream,
};
use foretell_simulator::{CostModel, LeastTimes, Oversubscription, SimulationError, least_times, least_times_on};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Picoseconds};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Blocks of the shorter and of the longer stack that are compiled.
const SHORT: usize = 1;
const LONG: usize = 2;

/// Stages of a probe of a pipeline: the first blocks, the two stacks, the last.
pub(crate) const PROBE_STAGES: usize = 4;

/// The fewest equal blocks of a model that is worth being bounded so.
pub(crate) const FEWEST_LAYERS: usize = SHORT + LONG + 2;

/// What some blocks in one stage take at least, in picoseconds, bytes and launches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Piece {
    pub(crate) forward: Window,
    /// The backward pass, or that of the input's gradient alone.
    pub(crate) backward: Window,
    /// That of the parameters' gradients, where it is a pass of its own.
    pub(crate) weights: Window,
    /// From the last pass until the step is over.
    pub(crate) tail: Window,
    /// From the beginning of the step until the first pass is over, and how long parameters are gathered for it.
    pub(crate) head: Chain,
    pub(crate) gathers: f64,
    /// How long collectives of the ranks that share out parameters keep their stream busy, and those of the ranks that have the same.
    pub(crate) sharing: Busy,
    pub(crate) alike: Busy,
    /// Kernels after the last pass.
    pub(crate) update: f64,
    /// What is kept from step to step.
    pub(crate) kept: Kept,
    /// What each micro-batch holds.
    pub(crate) held: Held,
    /// What kernels of a micro-batch's pass take on the way there, and on the way back.
    kernels: [f64; 2],
    pub(crate) returning: Returning,
}

/// What a micro-batch takes to the hosts at least, where activations go there: of the equal blocks but for those that may stay.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Returning {
    pub(crate) bytes: f64,
    /// With those that may stay: what there is where they do not.
    pub(crate) of_all: f64,
    /// What the kernels of these blocks take on the way there, and on the way back.
    pub(crate) forward: f64,
    pub(crate) backward: f64,
}

/// Blocks of a chunk of which it is not said that what they leave goes to the host: where the way back follows at once the last two's stays
/// (`BLOCKS_THAT_STAY` in the compiler), and what the ends of a chunk leave other chunks may read.
const NOT_RETURNING: usize = 3;

/// Compilers of the models that are compiled to find out what longer ones take: with so few equal blocks.
pub(crate) struct Stacks<'a>([Option<(usize, Compiler<'a>)>; 3]);

/// Operators of which a compiler of short models keeps what it found: of some forty graphs. Plans that have a graph in common follow each other in the
/// space; all of them would be more memory than the rest of a search.
const ROOM: usize = 8192;

impl<'a> Stacks<'a> {
    pub(crate) fn new(model: &Model, name: &'a str) -> Self {
        let lengths = [SHORT, LONG, SHORT + LONG + 2];
        let compiler = |layers| Some(Compiler::owning(model.with_repeated_layers(layers)?, name).with_operator_limit(ROOM));
        Self(lengths.map(|layers| Some((layers, compiler(layers)?))))
    }

    fn of(&self, layers: usize) -> Option<&Compiler<'a>> {
        self.0.iter().flatten().find(|(own, _)| *own == layers).map(|(_, compiler)| compiler)
    }
}

/// What the model's blocks take in a layout.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    /// The first block and an equal one.
    first: Piece,
    /// The shorter and the longer stack; where there is but one stage, with the first and the last block.
    short: Piece,
    long: Piece,
    /// An equal block and the last.
    last: Piece,
    is_cut: bool,
    /// Where some of the blocks are computed again: the same with all of them.
    all_again: Option<Arc<Self>>,
    /// What is done once a step is then in no pass that it tells of.
    pub(crate) has_several_micro_batches: bool,
    /// How much longer at least than it says messages take between stages of which no two ranks that send to each other share a node.
    pub(crate) between_nodes: f64,
    /// The bytes of the largest message between its stages.
    pub(crate) message: f64,
}

/// Whether messages between stages take any time: they do not where it is not known of which sizes they are, and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Messages {
    Counted,
    LeftOut,
}

/// Whether what the two ends of a pipeline sum together, gradients of a table that both have, takes any time: it does not where these may lie nearer to
/// each other than the probe's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Sums {
    Counted,
    LeftOut,
}

/// Why a layout has no probe.
#[derive(Debug)]
pub(crate) enum ProbeError {
    /// It does not divide the model.
    Plan(PlanError),
    /// It does not fit the devices.
    Simulation(SimulationError),
}

impl Probe {
    /// The probe of a plan with one stage, or with [`PROBE_STAGES`] of one chunk each, on devices of one kind if that is said.
    pub(crate) fn new(
        stacks: &Stacks<'_>,
        plan: &Plan,
        (topology, costs): (&Topology, &CostModel),
        micro_batches: usize,
        kind: Option<usize>,
        (messages, sums): (Messages, Sums),
    ) -> Result<Self, ProbeError> {
        let is_cut = plan.layout.pipeline == PROBE_STAGES;
        let (between_nodes, message) = (Cell::new(0.0), Cell::new(0.0));
        let summarise = |layers: usize, cuts: Option<Vec<usize>>| -> Result<Vec<Piece>, ProbeError> {
            let Some(stack) = stacks.of(layers) else { return Ok(Vec::new()) };
            let layout = Layout { cuts, ..plan.layout.clone() };
            let global_batch = layout.samples_at_once().saturating_mul(micro_batches);
            let plan = Plan { layout, global_batch, ..plan.clone() };
            let program = stack.unplaced(&plan).map_err(ProbeError::Plan)?;
            let alone = match kind {
                Some(kind) => least_times_on(&program, costs, plan.layout.bucket, |_| kind),
                None => least_times(&program, topology, costs, Oversubscription::Allowed, plan.layout.bucket),
            };
            let mut alone = alone.map_err(ProbeError::Simulation)?;
            if is_cut && sums == Sums::LeftOut {
                leave_out_sums_over_stages(&program.lists, &mut alone);
            }
            message.set(largest_message(&program));
            match messages {
                Messages::Counted => {
                    // On devices of a kind that is said it is not known which share a node.
                    let nodes = kind.is_none().then_some(topology);
                    between_nodes.set(level_sends(&program, &mut alone, nodes));
                }
                Messages::LeftOut => leave_out_messages(&program.lists, &mut alone),
            }
            Ok(program.lists.iter().zip(&alone).map(|(list, alone)| piece(list, alone, &plan)).collect())
        };
        let pieces = if is_cut {
            summarise(SHORT + LONG + 2, Some(vec![2, SHORT, LONG, 2]))?
        } else {
            let (short, long) = (summarise(SHORT, None)?, summarise(LONG, None)?);
            short.into_iter().take(1).chain(long.into_iter().take(1)).collect()
        };
        let at = |index: usize| pieces.get(index).copied().unwrap_or_default();
        let (first, short, long, last) =
            if is_cut { (at(0), at(1), at(2), at(3)) } else { (Piece::default(), at(0), at(1), Piece::default()) };
        Ok(Self {
            first,
            short,
            long,
            last,
            is_cut,
            all_again: None,
            has_several_micro_batches: micro_batches > 1,
            between_nodes: between_nodes.get(),
            message: message.get(),
        })
    }

    /// That of a plan which computes some of the blocks again, from that of one that computes none again, and of one that does all.
    pub(crate) fn of_some(none: &Self, all: Arc<Self>) -> Self {
        Self { all_again: Some(all), ..none.clone() }
    }

    /// What a chunk of `layers` equal blocks takes, so many of which are computed again, with the model's first and last blocks where it has them.
    pub(crate) fn chunk(&self, layers: usize, again: usize, has_first: bool, has_last: bool) -> Piece {
        let piece = self.chunk_as_it_is(layers, has_first, has_last);
        let Some(all) = self.all_again.as_ref().filter(|_| again > 0) else { return piece };
        if again >= layers {
            // What is done again before a gradient has arrived takes no time of the chain: only where the last block is computed again, too.
            return all.chunk_as_it_is(layers, has_first, has_last);
        }
        let of_each = |probe: &Self| probe.long.with(&probe.short, |long, short| (long - short) / (LONG - SHORT) as f64);
        let more = of_each(all).with(&of_each(self), |all, none| all - none);
        let count = again as f64;
        // Of what there is none it is not known whether there is a chain.
        let with = |own: f64, more: f64| if own > 0.0 { (own + count * more).max(0.0) } else { own };
        let between = with(piece.held.between, more.held.between);
        // Beside that a block that is computed again has no less than another.
        let less = piece.held.between - between;
        Piece {
            backward: piece.backward.with(more.backward, with),
            weights: piece.weights.with(more.weights, |own, more| with(own, more.min(0.0))),
            // The last pass may be that of the parameters' gradients.
            tail: piece.tail.with(more.tail, |own, more| with(own, more.min(0.0))),
            held: Held {
                between,
                for_weights: with(piece.held.for_weights, more.held.for_weights),
                forward: piece.held.forward - less,
                backward: piece.held.backward - less,
                ..piece.held
            },
            // How much is left to go to the hosts is not said.
            returning: Returning::default(),
            ..piece
        }
    }

    fn chunk_as_it_is(&self, layers: usize, has_first: bool, has_last: bool) -> Piece {
        let count = layers as f64;
        let piece = match (self.is_cut, has_first, has_last) {
            (false, ..) | (true, false, false) => self.line(&self.short, count - SHORT as f64),
            (true, true, false) => self.line(&self.first, count - 1.0),
            (true, false, true) => self.line(&self.last, count - 1.0),
            // Of a chunk that has both ends its blocks in between count once.
            (true, true, true) => {
                let (first, last) = (self.line(&self.first, -1.0), self.line(&self.last, -1.0));
                in_turn(&in_turn(&first, &self.line(&self.short, count - SHORT as f64)), &last)
            }
        };
        Piece { returning: self.returning(layers), ..piece }
    }

    /// What so many equal blocks take to the hosts.
    fn returning(&self, layers: usize) -> Returning {
        let of_each = |value: fn(&Piece) -> f64| (value(&self.long) - value(&self.short)).max(0.0) / (LONG - SHORT) as f64;
        let (bytes, all) = (of_each(|piece| piece.held.activations), layers as f64);
        let sure = layers.saturating_sub(NOT_RETURNING) as f64;
        Returning {
            bytes: bytes * sure,
            of_all: bytes * all,
            forward: of_each(|piece| piece.kernels[0]) * sure,
            backward: of_each(|piece| piece.kernels[1]) * sure,
        }
    }

    /// A piece with so many equal blocks more.
    fn line(&self, from: &Piece, more: f64) -> Piece {
        let steps = more / (LONG - SHORT) as f64;
        let slope = self.long.with(&self.short, |long, short| long - short);
        let mut line = from.with(&slope, |own, slope| (own + steps * slope).max(0.0));
        // Gradients are reduced bucket by bucket, which a longer stack may need fewer of for each block: the least of what a block takes on average.
        let of_buckets = |value: &dyn Fn(&Piece) -> f64| {
            let (short, long) = (value(&self.short), value(&self.long));
            let average = (short / SHORT as f64).min(long / LONG as f64);
            (value(from) + more * average.min((long - short) / (LONG - SHORT) as f64)).max(0.0)
        };
        line.sharing = Busy { each: of_buckets(&|piece| piece.sharing.each), once: of_buckets(&|piece| piece.sharing.once) };
        line.alike = Busy { each: of_buckets(&|piece| piece.alike.each), once: of_buckets(&|piece| piece.alike.once) };
        // What there is beside what every micro-batch holds is that of one block at a time.
        // Of fewer blocks than were compiled it is not known what they have beside.
        let beside = if more < 0.0 { 0.0 } else { 1.0 };
        line.held.forward = line.held.between + beside * (from.held.forward - from.held.between);
        line.held.backward = line.held.between + beside * (from.held.backward - from.held.between);
        let tail = |over: fn(&Piece) -> f64| of_buckets(&over);
        line.tail.free.over = tail(|piece| piece.tail.free.over);
        line.tail.arrival.over = tail(|piece| piece.tail.arrival.over);
        line.update = tail(|piece| piece.update);
        line.gathers = of_buckets(&|piece| piece.gathers);
        line
    }
}

impl Piece {
    /// The value that `choose` finds of each number of it and of another.
    fn with(&self, other: &Self, choose: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            forward: self.forward.with(other.forward, &choose),
            backward: self.backward.with(other.backward, &choose),
            weights: self.weights.with(other.weights, &choose),
            tail: self.tail.with(other.tail, &choose),
            head: self.head.with(other.head, &choose),
            gathers: choose(self.gathers, other.gathers),
            sharing: self.sharing.with(other.sharing, &choose),
            alike: self.alike.with(other.alike, &choose),
            update: choose(self.update, other.update),
            kept: self.kept.with(other.kept, &choose),
            held: self.held.with(other.held, &choose),
            kernels: [0, 1].map(|way| choose(self.kernels[way], other.kernels[way])),
            returning: Returning::default(),
        }
    }
}

/// The bytes of the largest message between stages.
fn largest_message(program: &Program) -> f64 {
    let instructions = program.lists.iter().flat_map(|list| &list.instructions);
    let bytes = instructions.filter_map(|instruction| match *instruction.operation {
        Operation::Send { bytes, .. } => Some(bytes.value()),
        _ => None,
    });
    bytes.fold(0.0, f64::max)
}

/// Gives all messages of a size the time of the fastest: which neighbours share a node differs from stage to stage. How much longer those of any size
/// take at least, in picoseconds, between stages that share no node.
fn level_sends(program: &Program, alone: &mut [LeastTimes], topology: Option<&Topology>) -> f64 {
    let mut least: BTreeMap<Bytes, Picoseconds> = BTreeMap::new();
    let mut of_stages: BTreeMap<(Bytes, usize, usize), Picoseconds> = BTreeMap::new();
    for again in [false, true] {
        for (list, alone) in program.lists.iter().zip(alone.iter_mut()) {
            for (instruction, duration) in list.instructions.iter().zip(&mut alone.in_full_buckets) {
                let Operation::Send { bytes, .. } = *instruction.operation else { continue };
                let least = least.entry(bytes).or_insert(*duration);
                *least = (*least).min(*duration);
                if again {
                    *duration = *least;
                } else if let Stream::SendTo(peer) = list.streams[instruction.stream.0 as usize] {
                    let own = of_stages.entry((bytes, list.stage, list.peers[peer.0 as usize].stage)).or_insert(*duration);
                    *own = (*own).min(*duration);
                }
            }
        }
    }
    let longer =
        |(&(bytes, ..), duration): (&(Bytes, usize, usize), &Picoseconds)| duration.saturating_sub(least[&bytes]).0 as f64;
    let Some(topology) = topology.filter(|_| of_stages.iter().any(|one| longer(one) > 0.0)) else { return 0.0 };
    let share = share_nodes(&program.mesh, topology);
    let between = |&(&(_, from, to), _): &(&(Bytes, usize, usize), _)| from.abs_diff(to) == 1 && !share[from.min(to)];
    of_stages.iter().filter(between).map(longer).reduce(f64::min).unwrap_or(0.0)
}

/// Exchanges between stages, of a table that two have, take no time.
fn leave_out_sums_over_stages(lists: &[StageProgram], alone: &mut [LeastTimes]) {
    for (list, alone) in lists.iter().zip(alone) {
        for (index, instruction) in list.instructions.iter().enumerate() {
            if let Operation::Collective { group, .. } = *instruction.operation
                && list.groups[group.0 as usize].axes.contains(&Axis::Pipeline)
            {
                alone.durations[index] = Picoseconds::ZERO;
                alone.in_full_buckets[index] = Picoseconds::ZERO;
            }
        }
    }
}

/// Of each stage, whether any of its ranks shares a node with the rank that stands where it does in the next, or after the last in the first: of the
/// ranks that share out no samples, which are a pipeline of their own. No step is over before that is.
pub(crate) fn share_nodes(mesh: &Mesh, topology: &Topology) -> Vec<bool> {
    let node_of = |rank: Rank| topology.node_of(topology.device_of_rank(rank.0));
    let mut share = vec![false; mesh.stage_count()];
    for rank in (0..mesh.world_size()).map(Rank) {
        let own = mesh.coordinates(rank);
        if own.along(Axis::Data) + own.along(Axis::Shard) > 0 {
            continue;
        }
        let stage = own.along(Axis::Pipeline);
        let next = mesh.rank(own.with(Axis::Pipeline, (stage + 1) % share.len()));
        share[stage] = share[stage] || node_of(rank) == node_of(next);
    }
    share
}

/// Messages take no time, nor does launching them; and no more do the exchanges nearest to them: sums that a stage makes before it sends
/// may be made after it was received between unequal meshes.
fn leave_out_messages(lists: &[StageProgram], alone: &mut [LeastTimes]) {
    for (list, alone) in lists.iter().zip(alone) {
        let operation = |index: usize| &*list.instructions[index].operation;
        let is_message = |index: usize| matches!(operation(index), Operation::Send { .. } | Operation::Receive { .. });
        let is_exchange = |&index: &usize| matches!(operation(index), Operation::Collective { role: CollectiveRole::Tensor, .. });
        let mut are_left_out: Vec<bool> = (0..list.instructions.len()).map(is_message).collect();
        for pass in &list.passes {
            let range = pass.instructions.start as usize..pass.instructions.end as usize;
            if range.clone().any(is_message) {
                let (first, last) = (range.clone().find(is_exchange), range.clone().rfind(is_exchange));
                first.into_iter().chain(last).for_each(|index| are_left_out[index] = true);
            }
        }
        let (mut before, mut left_out) = (Picoseconds::ZERO, Picoseconds::ZERO);
        for (index, is_left_out) in are_left_out.into_iter().enumerate() {
            if is_left_out {
                let of_each = [&mut alone.durations, &mut alone.in_full_buckets, &mut alone.processor];
                of_each.into_iter().for_each(|times| times[index] = Picoseconds::ZERO);
            }
            if let Some(launched) = alone.launched.get_mut(index) {
                let own = launched.saturating_sub(before);
                before = *launched;
                if is_left_out {
                    left_out += own;
                }
                *launched = launched.saturating_sub(left_out);
            }
        }
    }
}

/// Two pieces of the model one after the other in a chunk.
fn in_turn(before: &Piece, after: &Piece) -> Piece {
    let sum = |value: fn(&Piece) -> f64| value(before) + value(after);
    Piece {
        forward: before.forward.then(after.forward),
        backward: after.backward.then(before.backward),
        weights: after.weights.then(before.weights),
        tail: after.backward.then(before.tail),
        head: before.head.then(after.forward.free),
        gathers: sum(|piece| piece.gathers),
        sharing: before.sharing.with(after.sharing, |a, b| a + b),
        alike: before.alike.with(after.alike, |a, b| a + b),
        update: sum(|piece| piece.update),
        kept: before.kept.with(after.kept, |a, b| a + b),
        held: before.held.with(after.held, |a, b| a + b),
        kernels: [0, 1].map(|way| before.kernels[way] + after.kernels[way]),
        returning: Returning::default(),
    }
}

fn piece(list: &StageProgram, alone: &LeastTimes, plan: &Plan) -> Piece {
    let least = |pass: &dyn Fn(StagePass) -> bool| {
        let windows =
            list.passes.iter().filter(|one| pass(one.task.pass)).map(|one| window(list, alone, &plan.overlap, &one.instructions));
        windows.reduce(|a, b| a.with(b, f64::min))
    };
    let of_kernels = |pass: &dyn Fn(StagePass) -> bool| {
        let ranges = list
            .passes
            .iter()
            .filter(|one| pass(one.task.pass))
            .map(|one| one.instructions.start as usize..one.instructions.end as usize);
        ranges.map(|range| kernels(list, alone, range)).reduce(f64::min).unwrap_or(0.0)
    };
    let count = list.instructions.len();
    let last = list.passes.last();
    let end = last.map_or(0, |pass| pass.instructions.end as usize);
    let micro_batches = list.passes.iter().map(|pass| pass.task.micro_batch + 1).max().unwrap_or(1);
    let first_end = list.passes.first().map_or(0, |pass| pass.instructions.end);
    Piece {
        head: head(list, alone, &plan.overlap, first_end),
        gathers: gathers(list, alone, first_end),
        sharing: busy(list, alone, micro_batches, |axes| axes.contains(&Axis::Shard)),
        alike: busy(list, alone, micro_batches, |axes| axes.contains(&Axis::Data) && !axes.contains(&Axis::Shard)),
        forward: least(&|pass| pass == StagePass::Forward).unwrap_or_default(),
        backward: least(&|pass| matches!(pass, StagePass::Backward | StagePass::InputGradient)).unwrap_or_default(),
        weights: least(&|pass| pass == StagePass::WeightGradient).unwrap_or_default(),
        tail: tail(list, alone, &plan.overlap),
        update: kernels(list, alone, end..count),
        kept: Kept::of(list),
        held: Held::of(list),
        kernels: [of_kernels(&|pass| pass == StagePass::Forward), of_kernels(&|pass| pass == StagePass::Backward)],
        returning: Returning::default(),
    }
}
