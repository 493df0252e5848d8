//! The ranks that are simulated, and the devices that they run on.

use crate::cost::CostModel;
use crate::network::{FlowContext, MeshRotation};
use foretell_program::{Group, Program, Rank};
use foretell_topologies::{DeviceId, Topology};

/// A rank that is simulated.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedRank {
    pub(crate) rank: Rank,
    pub(crate) device: DeviceId,
    /// The kind of its device.
    pub(crate) kind: usize,
    /// Which of the Program's lists it runs.
    pub(crate) list: usize,
    /// Which of the list's [`LoweredList::work`] is its own.
    pub(crate) work: usize,
    /// Its processor's place among what is shared.
    pub(crate) processor: u32,
    /// For each group of its list, the place in [`Lowered::groups`].
    pub(crate) groups: Vec<u32>,
    /// For each peer that it sends to, the place in [`Lowered::channels`]; and for each that it receives from.
    pub(crate) sends: Vec<u32>,
    pub(crate) receives: Vec<u32>,
}

/// Where on a topology a Program runs, and which of the costs are its own: several run on one beside each other.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JobOffset {
    /// The device of its first rank.
    pub(crate) first_device: usize,
    /// The kind of costs that is the topology's first kind of device.
    pub(crate) first_kind: usize,
}

/// Where ranks run, and which of them are made ready.
#[derive(Clone, Copy)]
pub(crate) struct LoweringContext<'a> {
    pub(crate) program: &'a Program,
    pub(crate) topology: &'a Topology,
    pub(crate) costs: &'a CostModel,
    /// The device of the first rank, and over how many from there on they are dealt out.
    pub(crate) first_device: usize,
    pub(crate) devices: usize,
    /// What tells the ranks that stand for others; all are made ready where there is nothing of the kind.
    pub(crate) rotation: Option<&'a MeshRotation>,
}

impl LoweringContext<'_> {
    pub(crate) fn device(&self, rank: Rank) -> DeviceId {
        DeviceId::of_rank(rank.0, DeviceId(self.first_device), self.devices)
    }

    /// The place of a rank among those that are made ready, or of the one that stands for it.
    pub(crate) fn place(&self, rank: Rank) -> usize {
        self.rotation.map_or(rank.0, |rotation| rotation.representative_index(rank.0))
    }

    /// The ranks that are made ready.
    pub(crate) fn ranks(&self) -> Vec<Rank> {
        let world = self.program.mesh.world_size();
        match self.rotation {
            Some(rotation) => rotation.representatives(world).map(Rank).collect(),
            None => (0..world).map(Rank).collect(),
        }
    }

    /// The turns of the ranks that a group joins; none of a group that turns as a whole.
    pub(super) fn rotation_within(&self, group: &Group) -> Option<&MeshRotation> {
        self.rotation.filter(|rotation| group.axes.contains(&rotation.axis))
    }

    pub(crate) fn around<'a>(&'a self, rotation: Option<&'a MeshRotation>) -> FlowContext<'a> {
        FlowContext { topology: self.topology, links: &self.costs.links, rotation }
    }
}

/// A rank that has not met anybody yet.
pub(super) fn unconnected(context: &LoweringContext<'_>, offset: JobOffset, rank: Rank) -> SimulatedRank {
    let device = context.device(rank);
    SimulatedRank {
        rank,
        device,
        kind: offset.first_kind + context.topology.kind_index(device),
        list: context.program.list_index(rank),
        work: 0,
        processor: 0,
        groups: Vec::new(),
        sends: Vec::new(),
        receives: Vec::new(),
    }
}
