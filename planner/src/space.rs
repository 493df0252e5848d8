//! The space of layouts: every way to share out the devices, the batch and the memory that the compiler can lay out.

use crate::fixed::Fixed;
use crate::own_meshes::Run;
use foretell_program::{ContextMethod, Layout, Offload, Recompute, Schedule};
use foretell_units::Bytes;
use std::collections::BTreeMap;

/// The most micro-batches of a step that are considered where the user fixes no micro-batch and the pipeline is short.
const MOST_MICRO_BATCHES: usize = 64;

/// The same for each stage of a long one: with so many its bubble is 3 % without interleaving.
const MICRO_BATCHES_PER_STAGE: usize = 32;

/// Positions that a rank of `context` has at least: with fewer it only gathers keys and values.
const FEWEST_POSITIONS: usize = 2048;

/// Over more nodes than so many each operator's activations are not shared out: they would go over the network twice in every layer.
const MOST_NODES_OF_TENSOR: usize = 4;

/// Micro-batches for each stage of a pipeline that GPipe, which holds them all, is considered with: as its authors ran it (Huang et al. 2019).
const MOST_HELD_PER_STAGE: usize = 4;

/// Devices of which every number may share out operators: some clusters have nodes of three.
const FEW_DEVICES: usize = 32;

/// The most chunks of a stage that are considered: more cost more messages than they save of the bubble.
const MOST_CHUNKS: usize = 12;

/// Samples that the slowest rank of `data` may have of a micro-batch of unequal shares, in units of it.
const SHARES_OF_SLOWEST: [usize; 4] = [1, 2, 3, 4];

/// How much of what a device is faster at matrix products than the slowest it may be given more samples for, the likeliest first: other kernels
/// gain less, and the shares must divide the batch.
const FAVOURS: [f64; 11] = [0.8, 0.9, 0.7, 1.0, 0.6, 1.1, 0.5, 1.2, 0.4, 1.3, 0.3];

/// Unequal shares that are tried on each mesh.
const MOST_SHARES: usize = 4;

/// What a search is over: the model, as far as that says what can be shared out, the devices, and what is fixed.
#[derive(Clone, Debug)]
pub struct Space<'a> {
    /// What is not searched of a layout.
    pub base: &'a Layout,
    /// Choices that are the user's.
    pub fixed: &'a Fixed,
    /// How many devices there are.
    pub devices: usize,
    /// How many of them are in a node.
    pub node: usize,
    /// Blocks of the model.
    pub blocks: usize,
    /// Samples of a step.
    pub global_batch: usize,
    /// Positions of a sample, if it is a sequence whose positions several ranks can share out.
    pub sequence: Option<usize>,
    /// Experts, if the model has any.
    pub experts: Option<usize>,
    /// Whether recomputing attention alone is of use.
    pub has_attention: bool,
    /// Whether there are blocks that may be computed again.
    pub is_recomputable: bool,
    /// Whether it is a stack of enough equal blocks for it to matter how many of them are computed again.
    pub is_stack: bool,
    /// Sizes of buckets of gradients that are considered, ascending; at least one.
    pub buckets: Vec<Bytes>,
    /// Room that all gradients take in buckets, were they on one rank.
    pub gradients: Bytes,
    /// The arithmetic of each block.
    pub work: Vec<f64>,
    /// How fast each device is, where they are of several kinds; empty where they are of one.
    pub speeds: Vec<f64>,
    /// Of each device the number of its kind, where they are of several; empty where they are of one.
    pub kinds: Vec<usize>,
    /// The runs of devices of one kind, where stages may have meshes of their own on them; else empty.
    pub runs: Vec<Run>,
    /// Whether blocks share parameters.
    pub shares_parameters: bool,
    /// Whether these kinds have different memories.
    pub memory_differs: bool,
    /// What every layout is considered with on the hosts, too: nothing where it is not known how much memory these have, or the user says what lies there.
    pub offloads: &'a [Offload],
}

/// Layouts that differ only in what their ranks of `data` share and how they are placed.
#[derive(Clone, Debug, PartialEq)]
pub struct Family {
    /// One of them, without ZeRO, in the usual order.
    pub layout: Layout,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl Space<'_> {
    /// Every family of layouts over at most as many devices as there are. Where all three of `data`, `tensor` and `pipeline` are fixed that is
    /// the one mesh, if there are as many devices. Else a mesh has a divisor of the devices, or leaves some idle that the batch, the model or what is fixed
    /// has no use for.
    pub fn families(&self) -> Vec<Family> {
        let mut families = self.own_meshes();
        let has_cuts = |family: &Family| self.fixed.cuts.as_ref().is_none_or(|cuts| cuts.len() == family.layout.pipeline);
        families.retain(|family| self.fixed.shares.is_none() && has_cuts(family));
        if self.fixed.stages.is_some() {
            return families;
        }
        for context in self.contexts() {
            for expert in self.expert_sizes() {
                // What is left for the other axes.
                let devices = context.checked_mul(expert).map_or(0, |ranks| self.devices / ranks);
                for [data, tensor, pipeline] in self.meshes(devices) {
                    let possible = pipeline <= self.blocks && tensor.checked_mul(context).is_some();
                    let is_even = self.global_batch.is_multiple_of(data * expert) && self.fixed.shares.is_none();
                    let shares = self.shares([data, tensor, pipeline, context, expert]);
                    if !possible || !is_even && shares.is_empty() {
                        continue;
                    }
                    let splits = [None, Some(1)].into_iter().filter(|split| split.is_none() || expert > 1 && tensor > 1);
                    for expert_tensor in splits {
                        let usual: &[ContextMethod] = if context > 1 { &ContextMethod::ALL } else { &[ContextMethod::Gather] };
                        let methods = self.fixed.context_method.as_ref().map_or(usual, std::slice::from_ref);
                        for (sequence_parallel, &context_method) in pairs(&self.sequence_parallel(tensor), methods) {
                            let mesh = Layout {
                                data,
                                tensor,
                                pipeline,
                                context,
                                context_method,
                                expert,
                                expert_tensor,
                                sequence_parallel,
                                zero: 0,
                                shard_group: None,
                                bucket: self.buckets[0],
                                offload: self.fixed.offload.unwrap_or(self.base.offload),
                                collective: self.fixed.collective.unwrap_or(self.base.collective),
                                ..self.base.clone()
                            };
                            if is_even {
                                families.extend(self.with_micro_batches(&mesh, self.global_batch / data / expert));
                            }
                            for shares in &shares {
                                let uneven = Layout { shares: Some(shares.clone()), ..mesh.clone() };
                                families
                                    .extend(self.with_micro_batches(&uneven, self.global_batch / shares.iter().sum::<usize>()));
                            }
                        }
                    }
                }
            }
        }
        families
    }

    /// Unequal shares of samples that ranks of a mesh's `data` may have: the user's, or such as suit devices of several speeds.
    fn shares(&self, [data, tensor, pipeline, context, expert]: [usize; 5]) -> Vec<Vec<usize>> {
        match &self.fixed.shares {
            Some(shares) => {
                let is_whole = self.global_batch.is_multiple_of(shares.iter().fold(0, |all, share| all.saturating_add(*share)));
                if shares.len() == data && is_whole && expert == 1 { vec![shares.clone()] } else { Vec::new() }
            }
            None if expert == 1 && pipeline == 1 => self.shares_by_speed(data, tensor * context),
            None => Vec::new(),
        }
    }

    /// Shares of samples for ranks of `data` on devices of several speeds, each on so many devices that follow each other: about in the proportion of
    /// their speeds, as far as they divide the samples.
    fn shares_by_speed(&self, data: usize, devices: usize) -> Vec<Vec<usize>> {
        let mut found: Vec<Vec<usize>> = Vec::new();
        if self.base.shares.is_some() || data < 2 || self.speeds.len() < data * devices {
            return found;
        }
        let speeds: Vec<f64> = self.speeds[..data * devices]
            .chunks(devices)
            .map(|ranks| ranks.iter().copied().fold(f64::INFINITY, f64::min))
            .collect();
        let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        for (favour, &unit) in pairs(&FAVOURS, &SHARES_OF_SLOWEST) {
            let share = |speed: &f64| (unit as f64 * (1.0 + (speed / slowest - 1.0) * favour)).round().max(1.0) as usize;
            let shares: Vec<usize> = speeds.iter().map(share).collect();
            let divisor = shares.iter().copied().fold(0, greatest_common_divisor);
            let shares: Vec<usize> = shares.into_iter().map(|share| share / divisor).collect();
            let is_uneven = shares.iter().any(|&share| share != shares[0]);
            if is_uneven
                && self.global_batch.is_multiple_of(shares.iter().sum())
                && found.len() < MOST_SHARES
                && !found.contains(&shares)
            {
                found.push(shares);
            }
        }
        found
    }

    fn meshes(&self, devices: usize) -> Vec<[usize; 3]> {
        let fixed = self.fixed;
        let worlds = match (fixed.data, fixed.tensor, fixed.pipeline) {
            (Some(data), Some(tensor), Some(pipeline)) => {
                let world = data.checked_mul(tensor).and_then(|ranks| ranks.checked_mul(pipeline));
                world.filter(|&ranks| ranks <= devices).into_iter().collect()
            }
            _ => divisors(devices),
        };
        let mut meshes = Vec::new();
        for world in worlds {
            for tensor in self.tensors(world) {
                let stages = divisors(world / tensor).into_iter();
                for pipeline in stages.filter(|&size| fixed.pipeline.is_none_or(|fixed| fixed == size)) {
                    let data = world / tensor / pipeline;
                    if fixed.data.is_none_or(|fixed| fixed == data) {
                        meshes.push([data, tensor, pipeline]);
                    }
                }
            }
        }
        self.add_with_idle(devices, &mut meshes);
        meshes
    }

    /// Meshes that leave some devices idle, for a batch, a model or a choice of the user's that all of them do not divide: for each `tensor` and
    /// `pipeline` as many ranks of `data` as there can be, if that is more than what divides the devices gives them.
    fn add_with_idle(&self, devices: usize, meshes: &mut Vec<[usize; 3]>) {
        let fixed = self.fixed;
        if fixed.data.is_some() && fixed.tensor.is_some() && fixed.pipeline.is_some() {
            return;
        }
        let layers = self.blocks.saturating_sub(2).max(1);
        let mut stages: Vec<usize> =
            [devices, self.blocks, layers].into_iter().flat_map(divisors).chain(fixed.pipeline).collect();
        stages.sort_unstable();
        stages.dedup();
        stages.retain(|&size| size <= devices.min(self.blocks) && fixed.pipeline.is_none_or(|fixed| fixed == size));
        let of_batch = divisors(self.global_batch);
        // Ranks of `data` that share out the batch, of each `tensor` and `pipeline`: the most so far.
        let mut most: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for &[data, tensor, pipeline] in meshes.iter().filter(|[data, ..]| self.global_batch.is_multiple_of(*data)) {
            let most = most.entry((tensor, pipeline)).or_insert(data);
            *most = data.max(*most);
        }
        for tensor in self.tensors_with_idle(devices) {
            for &pipeline in &stages {
                let room = devices / tensor / pipeline;
                let fits = |&&data: &&usize| data <= room && fixed.data.is_none_or(|fixed| fixed == data);
                let Some(&data) = of_batch.iter().rev().find(fits) else { continue };
                if most.get(&(tensor, pipeline)).is_none_or(|&most| data > most) {
                    meshes.push([data, tensor, pipeline]);
                }
            }
        }
    }

    /// Sizes of `tensor` of so many devices: up to [`MOST_NODES_OF_TENSOR`] nodes, such that groups do not lie over parts of nodes unless there are only
    /// [`FEW_DEVICES`].
    fn tensors(&self, devices: usize) -> Vec<usize> {
        divisors(devices).into_iter().filter(|&size| self.may_share_out_operators(size)).collect()
    }

    /// The same where some devices may be idle: those that divide the devices or a node, and powers of two, which divide most models.
    fn tensors_with_idle(&self, devices: usize) -> Vec<usize> {
        let powers =
            (0..usize::BITS).map(|power| 1 << power).take_while(|&size| size <= devices.min(MOST_NODES_OF_TENSOR * self.node));
        let mut sizes: Vec<usize> =
            divisors(devices).into_iter().chain(divisors(self.node.max(1))).chain(powers).chain(self.fixed.tensor).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes.retain(|&size| size > 0 && size <= devices && self.may_share_out_operators(size));
        sizes
    }

    fn may_share_out_operators(&self, size: usize) -> bool {
        let node = self.node.max(1);
        let is_whole = self.devices <= FEW_DEVICES || size.is_multiple_of(node) || node.is_multiple_of(size);
        self.fixed.tensor.map_or(size <= MOST_NODES_OF_TENSOR * node && is_whole, |fixed| fixed == size)
    }

    /// Sizes of `context`: long sequences are worth being shared out, so that each rank has [`FEWEST_POSITIONS`] at least.
    fn contexts(&self) -> Vec<usize> {
        match (self.fixed.context, self.sequence) {
            (Some(fixed), _) => vec![fixed],
            (None, Some(sequence)) => {
                let most = (sequence / FEWEST_POSITIONS).max(1);
                divisors(self.devices)
                    .into_iter()
                    .filter(|&size| size == 1 || size <= most && sequence.is_multiple_of(2 * size))
                    .collect()
            }
            (None, None) => vec![1],
        }
    }

    fn expert_sizes(&self) -> Vec<usize> {
        match (self.fixed.expert, self.experts) {
            (Some(fixed), _) => vec![fixed],
            (None, Some(experts)) => divisors(experts).into_iter().filter(|&size| self.devices.is_multiple_of(size)).collect(),
            (None, None) => vec![1],
        }
    }

    fn sequence_parallel(&self, tensor: usize) -> Vec<bool> {
        match self.fixed.sequence_parallel {
            Some(fixed) => vec![fixed],
            None if tensor > 1 && self.sequence.is_some_and(|sequence| sequence.is_multiple_of(tensor)) => vec![false, true],
            None => vec![self.base.sequence_parallel && tensor > 1],
        }
    }

    pub(crate) fn with_micro_batches(&self, mesh: &Layout, samples: usize) -> Vec<Family> {
        let mut families = Vec::new();
        let most = MOST_MICRO_BATCHES.max(MICRO_BATCHES_PER_STAGE * mesh.pipeline);
        for micro_batch in divisors(samples) {
            let micro_batches = samples / micro_batch;
            let considered = self.fixed.micro_batch.map_or(micro_batches <= most, |fixed| fixed == micro_batch);
            if !considered {
                continue;
            }
            let selective = self.has_attention.then_some(Recompute::Selective);
            let full = self.is_recomputable.then_some(Recompute::Full);
            let usual: Vec<Recompute> = [Recompute::None].into_iter().chain(selective).chain(full).collect();
            for (schedule, virtual_stages) in schedules(mesh, self.blocks, micro_batches, self.fixed) {
                for recompute in self.fixed.recompute.as_ref().map_or(&usual[..], std::slice::from_ref) {
                    let recompute = recompute.clone();
                    let layout = Layout { micro_batch, schedule, virtual_stages, recompute, ..mesh.clone() };
                    families.push(Family { layout, micro_batches });
                }
            }
        }
        families
    }
}

/// The schedules, each with a number of chunks, that may be of use for a mesh's pipeline and that do not contradict what is fixed.
fn schedules(mesh: &Layout, blocks: usize, micro_batches: usize, fixed: &Fixed) -> Vec<(Schedule, usize)> {
    let mut found = Vec::new();
    let stages = mesh.pipeline;
    // What is exchanged on the way back may go on beside what no other waits for.
    let is_exchanged = mesh.tensor.max(mesh.context).max(mesh.expert) > 1;
    for schedule in Schedule::ALL {
        // Without a pipeline the order that holds least is as fast as any where nothing is exchanged. GPipe is faster than 1F1B, which holds less, where
        // messages between stages take so long that those few micro-batches do not hide them.
        let sensible = match schedule {
            Schedule::Gpipe => stages > 1 && micro_batches <= MOST_HELD_PER_STAGE * stages,
            Schedule::OneForwardOneBackward => true,
            Schedule::ZeroBubbleH1 => stages > 1 || is_exchanged,
            Schedule::Interleaved | Schedule::ZeroBubbleV => stages > 1,
        };
        if !fixed.schedule.map_or(sensible, |fixed| fixed == schedule) {
            continue;
        }
        // One chunk of an interleaved stage is 1F1B.
        let usual: Vec<usize> = if schedule == Schedule::Interleaved { chunk_counts(blocks, stages) } else { vec![1, 2] };
        let considered = fixed.virtual_stages.as_ref().map_or(&usual[..], std::slice::from_ref);
        for &chunks in considered.iter().filter(|&&chunks| schedule.allows(chunks)) {
            // With a smaller last group of micro-batches interleaving saves little, and with one alone nothing. What splits the backward pass
            // is worth it with any number: the fewer there are, the more of the step is the way back.
            let is_worth_it = schedule != Schedule::Interleaved || micro_batches.is_multiple_of(stages);
            let is_chosen = fixed.schedule.is_some() || fixed.virtual_stages.is_some();
            let is_cut = |positions: usize| fixed.cuts.as_ref().map_or(positions <= blocks, |cuts| cuts.len() == positions);
            if (is_worth_it || is_chosen) && stages.checked_mul(chunks).is_some_and(is_cut) {
                found.push((schedule, chunks));
            }
        }
    }
    found
}

/// Each of some things with each of others.
fn pairs<'a, A: Copy, B>(some: &'a [A], others: &'a [B]) -> impl Iterator<Item = (A, &'a B)> {
    some.iter().flat_map(|&one| others.iter().map(move |other| (one, other)))
}

/// How many chunks an interleaved stage may have: 2 to 4; and those that share out the blocks evenly, with the first and the last or without.
fn chunk_counts(blocks: usize, stages: usize) -> Vec<usize> {
    let inner = blocks.saturating_sub(2);
    let is_even = |chunks: usize| [blocks, inner].iter().any(|&blocks| blocks > 0 && blocks.is_multiple_of(stages * chunks));
    (2..=MOST_CHUNKS).filter(|&chunks| chunks <= 4 || is_even(chunks)).collect()
}

pub(crate) fn greatest_common_divisor(one: usize, other: usize) -> usize {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

/// The divisors of a number, ascending: those up to its root, each with its counterpart.
pub(crate) fn divisors(number: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..=number.isqrt()).filter(|&divisor| number.is_multiple_of(divisor)).collect();
    let large = small.iter().rev().map(|divisor| number / divisor).filter(|&large| large > number.isqrt());
    small.iter().copied().chain(large).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts(devices: usize, blocks: usize, global_batch: usize, fixed: &Fixed) -> Vec<Layout> {
        let base = Layout::default();
        let space = Space {
            base: &base,
            fixed,
            devices,
            node: devices,
            blocks,
            global_batch,
            sequence: None,
            experts: None,
            has_attention: false,
            is_recomputable: true,
            is_stack: false,
            buckets: vec![base.bucket],
            gradients: Bytes::ZERO,
            work: vec![1.0; blocks],
            speeds: Vec::new(),
            kinds: Vec::new(),
            runs: Vec::new(),
            shares_parameters: false,
            memory_differs: false,
            offloads: &[],
        };
        space.families().iter().flat_map(|family| space.members(family)).collect()
    }

    #[test]
    fn what_is_fixed_stays_and_the_rest_is_enumerated() {
        let fixed: Fixed = "tensor=2, schedule=gpipe,recompute=none".parse().expect("it is well formed");
        let layouts = layouts(8, 10, 16, &fixed);
        assert!(layouts.iter().all(|layout| layout.tensor == 2 && layout.schedule == Schedule::Gpipe));
        let meshes: std::collections::BTreeSet<_> = layouts.iter().map(|layout| (layout.data, layout.pipeline)).collect();
        assert_eq!(meshes.into_iter().collect::<Vec<_>>(), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]);
    }

    #[test]
    fn a_mesh_that_is_fixed_need_not_divide_the_devices() {
        let fixed: Fixed =
            "data=3,tensor=1,pipeline=2,micro_batch=2,recompute=none,schedule=1f1b,zero=0".parse().expect("well formed");
        let found = layouts(8, 10, 12, &fixed);
        assert!(found.contains(&Layout { data: 3, pipeline: 2, micro_batch: 2, ..Layout::default() }), "{found:?}");
        assert!(layouts(5, 10, 12, &fixed).is_empty(), "there are too few devices");
        let enormous: Fixed = "data=4294967296,tensor=4294967296,pipeline=2".parse().expect("well formed");
        assert!(layouts(8, 10, 12, &enormous).is_empty());
    }

    #[test]
    fn divisors_are_all_there_are_ascending() {
        for number in 0usize..200 {
            let all: Vec<usize> = (1..=number).filter(|divisor| number.is_multiple_of(*divisor)).collect();
            assert_eq!(divisors(number), all);
        }
    }
}
