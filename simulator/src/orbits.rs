//! Ranks that do alike because the mesh may be turned: moved on along one axis, the last to the front, every rank does what the one before did and
//! lies as that lay. One rank of each orbit of such a turn is made ready, so that neither time nor memory grows with the ranks that it stands for.
//!
//! It is a matter of the mesh, of which list each rank runs, and of the nodes, which must be alike ([`AlikeNodes`]). Whether the flows of a
//! collective turn along is looked at where they are known ([`crate::network`]): a ring's do, a tree's do not. [`crate::folding`] then finds
//! what else is alike. It must not know time, and what instructions do.
//!
//! Links are numbered as the topology has them; the one of an orbit in the node of the first rank stands for all.

use foretell_program::{Axis, GroupId, Program, Rank, StageProgram};
use foretell_topologies::{AlikeNodes, Topology};
use std::collections::BTreeSet;

/// The orbits of a turn.
#[derive(Clone, Debug)]
pub(crate) struct Orbits {
    /// The axis along which ranks are moved on.
    pub(crate) axis: Axis,
    /// How far apart the ranks of an orbit are, and how many ranks each turning block has: rank r comes to (r + step) modulo block in its block.
    step: usize,
    block: usize,
    nodes: AlikeNodes,
}

impl Orbits {
    /// Those of the longest axis along which ranks on the topology's first devices, one on each, may be turned; none where they may not. Ranks go at
    /// these paces, and kernels do more on one member than on another of the groups of each list that are `uneven`.
    pub(crate) fn new(program: &Program, topology: &Topology, paces: &[f64], uneven: &[BTreeSet<GroupId>]) -> Option<Self> {
        let nodes = topology.alike_nodes()?;
        let mesh = &program.mesh;
        let turns = |&axis: &Axis| -> Option<Self> {
            let (step, size) = (mesh.stride(axis)?, mesh.stage(0).size(axis));
            let orbits = Self { axis, step, block: step * size, nodes };
            // Whole nodes are moved.
            let may_turn = size > 1 && step.is_multiple_of(nodes.devices);
            (may_turn && orbits.are_even(program, uneven) && orbits.are_alike(program, paces)).then_some(orbits)
        };
        Axis::WITHIN_STAGE.iter().filter_map(turns).max_by_key(Self::turns)
    }

    /// Those of one block of ranks on as many nodes.
    #[cfg(test)]
    pub(crate) fn of_blocks(step: usize, block: usize) -> Self {
        Self { axis: Axis::Data, step, block, nodes: AlikeNodes { count: block / step, devices: step, links: 1 } }
    }

    /// Whether no kernel does more on one rank of an orbit than on another.
    fn are_even(&self, program: &Program, uneven: &[BTreeSet<GroupId>]) -> bool {
        let turns = |list: &StageProgram, group: &GroupId| {
            list.groups.get(group.0 as usize).is_some_and(|group| group.axes.contains(&self.axis))
        };
        program.lists.iter().zip(uneven).all(|(list, uneven)| !uneven.iter().any(|group| turns(list, group)))
    }

    /// Whether all ranks of an orbit run one list at one pace, and send to ranks of the same position.
    fn are_alike(&self, program: &Program, paces: &[f64]) -> bool {
        let of_rank = &program.list_of_rank;
        program.lists.iter().flat_map(|list| &list.peers).all(|peer| peer.ranks.is_none())
            && of_rank.len() == program.mesh.world_size()
            && self.repeats(of_rank)
            && self.repeats(paces)
    }

    /// Whether ranks that come to each other have the same.
    fn repeats<T: PartialEq>(&self, of_ranks: &[T]) -> bool {
        of_ranks
            .chunks(self.block)
            .all(|block| block.iter().skip(self.step).eq(block.iter().take(block.len().saturating_sub(self.step))))
    }

    /// How many ranks an orbit has.
    pub(crate) fn turns(&self) -> usize {
        self.block / self.step
    }

    /// The rank that stands for this one.
    pub(crate) fn first(&self, rank: usize) -> usize {
        rank - self.turns_to(rank) * self.step
    }

    /// The ranks that stand for all of a world.
    pub(crate) fn firsts(&self, world: usize) -> impl Iterator<Item = usize> + use<> {
        let Self { step, block, .. } = *self;
        (0..world).step_by(block).flat_map(move |first| first..first + step)
    }

    /// The place among those of the rank that stands for this one.
    pub(crate) fn place(&self, rank: usize) -> usize {
        self.place_and_turns(rank).0
    }

    /// The same, and how often that rank is to be moved on to come to this one.
    pub(crate) fn place_and_turns(&self, rank: usize) -> (usize, usize) {
        let block = rank / self.block;
        let within = rank - block * self.block;
        let turns = within / self.step;
        (block * self.step + within - turns * self.step, turns)
    }

    /// [`Self::place`] of every rank of a world.
    pub(crate) fn places(&self, world: usize) -> Vec<u32> {
        let mut places = Vec::with_capacity(world);
        for block in 0..world / self.block {
            let of_block = (block * self.step) as u32..((block + 1) * self.step) as u32;
            (0..self.turns()).for_each(|_| places.extend(of_block.clone()));
        }
        places
    }

    /// How often the rank that stands for this one is to be moved on to come to it.
    pub(crate) fn turns_to(&self, rank: usize) -> usize {
        rank % self.block / self.step
    }

    /// Where a rank comes to when it is moved back so often.
    pub(crate) fn back(&self, rank: Rank, turns: usize) -> Rank {
        let Self { step, block, .. } = *self;
        Rank(rank.0 / block * block + (rank.0 % block + block - turns * step) % block)
    }

    /// The link that stands for this one; none for one that is in no node.
    pub(crate) fn first_link(&self, link: usize) -> Option<usize> {
        let device = self.device_of(link)?;
        Some(self.link_at(self.first(device), link))
    }

    /// A neighbour of a link, seen from the link that stands for that.
    pub(crate) fn as_seen_from(&self, link: usize, neighbour: usize) -> usize {
        let devices = self.device_of(link).zip(self.device_of(neighbour));
        devices.map_or(neighbour, |(own, other)| self.link_at(self.back(Rank(other), self.turns_to(own)).0, neighbour))
    }

    /// The first device of the node that has a link.
    fn device_of(&self, link: usize) -> Option<usize> {
        let node = link / self.nodes.links;
        (node < self.nodes.count).then_some(node * self.nodes.devices)
    }

    /// The link in the node of a device that is there what another is in its node.
    fn link_at(&self, device: usize, link: usize) -> usize {
        device / self.nodes.devices * self.nodes.links + link % self.nodes.links
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::CostModel;
    use crate::lists::LoweredList;
    use crate::rings::Collectives;
    use crate::simulation::{Folding, Options, simulate};
    use crate::work::uneven_groups;
    use foretell_models::Model;
    use foretell_program::{Plan, compile_training};

    fn nodes_of(devices: usize, network: &str) -> Topology {
        let text = format!(
            "name: test\n\
             devices:\n  one: {{architecture: gpu, memory: 1GiB, memory_bandwidth: 1GB/s, peak: {{fp32: 1GFLOP/s}}, link: 1GB/s}}\n\
             nodes:\n  - {{name: node, count: 8, devices: {{kind: one, count: {devices}}}, link: nvswitch-1GB/s, \
             nics: {{count: 1, bandwidth: 1GB/s}}}}\n\
             network: {network}\n"
        );
        Topology::from_yaml(&text, "test.yaml").expect("a topology")
    }

    fn program_of(layout: &str) -> Program {
        let model = r#"{"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "sequence": 4096}"#;
        let model: Model = serde_json::from_str(model).expect("a model");
        let plan: Plan = serde_json::from_str(&format!(r#"{{"global_batch": 8, "layout": {{{layout}}}}}"#)).expect("a plan");
        compile_training(&model, "m", &plan).expect("it can be laid out")
    }

    /// The axis that is turned along and by how many turns, of ranks at one pace but for one.
    fn turned(layout: &str, topology: &Topology, pace_of_the_third: f64) -> Option<(Axis, usize)> {
        let program = program_of(layout);
        let mut paces = vec![1.0; program.mesh.world_size()];
        if let Some(third) = paces.get_mut(2) {
            *third = pace_of_the_third;
        }
        let uneven: Vec<_> =
            program.lists.iter().map(|list| uneven_groups(list, &LoweredList::new(list).expect("a list that ends"))).collect();
        Orbits::new(&program, topology, &paces, &uneven).map(|orbits| (orbits.axis, orbits.turns()))
    }

    #[test]
    fn the_longest_axis_of_whole_nodes_is_turned_along() {
        let switch = "{kind: switch, latency: 10us}";
        assert_eq!(turned(r#""data": 8, "micro_batch": 1"#, &nodes_of(1, switch), 1.0), Some((Axis::Data, 8)));
        assert_eq!(turned(r#""data": 4, "tensor": 2, "micro_batch": 1"#, &nodes_of(2, switch), 1.0), Some((Axis::Data, 4)));
        // Half a node, another pace, and nodes that lie otherwise to some than to others.
        assert_eq!(turned(r#""data": 8, "micro_batch": 1"#, &nodes_of(2, switch), 1.0), None);
        assert_eq!(turned(r#""data": 8, "micro_batch": 1"#, &nodes_of(1, switch), 1.1), None);
        let leaves = "{kind: fat-tree, nodes_per_leaf: 2, uplinks: 2, latency: 10us}";
        assert_eq!(turned(r#""data": 8, "micro_batch": 1"#, &nodes_of(1, leaves), 1.0), None);
        // Causal attention of a part of the positions: the last has the most before it.
        assert_eq!(turned(r#""data": 2, "context": 4, "micro_batch": 1"#, &nodes_of(1, switch), 1.0), Some((Axis::Data, 2)));
    }

    #[test]
    fn parts_of_unequal_work_are_simulated_each() {
        let topology = nodes_of(1, "{kind: switch, latency: 10us}");
        for layout in [r#""context": 4, "micro_batch": 1"#, r#""data": 2, "context": 4, "micro_batch": 1"#] {
            let program = program_of(layout);
            let costs = CostModel::new(None, &topology);
            let step = |folding| {
                let options = Options { folding, collectives: Collectives::Steps, ..Options::default() };
                simulate(&program, &topology, &costs, &options).expect("it fits").step
            };
            assert_eq!(step(Folding::On), step(Folding::Off), "{layout}");
        }
    }
}
