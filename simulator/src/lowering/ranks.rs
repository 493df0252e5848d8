//! The simulated ranks, and the devices that they run on.

use crate::cost::CostModel;
use crate::network::{FlowContext, MeshRotation};
use foretell_program::{Group, Program, Rank};
use foretell_topologies::{DeviceId, Topology};

/// A simulated rank. It may represent other, equivalent ranks.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedRank {
    pub(crate) rank: Rank,
    pub(crate) device: DeviceId,
    /// The index of its device's kind in the cost model.
    pub(crate) kind: usize,
    /// The index of its list.
    pub(crate) list: usize,
    /// The index of its durations in its list's entry of [`super::Lowered::times`].
    pub(crate) times: usize,
    /// The resource index of its processor.
    pub(crate) processor: u32,
    /// For each group of its list, the index in [`super::Lowered::groups`].
    pub(crate) groups: Vec<u32>,
    /// For each peer that it sends to, the index in [`super::Lowered::channels`].
    pub(crate) sends: Vec<u32>,
    /// For each peer that it receives from, the index in [`super::Lowered::channels`].
    pub(crate) receives: Vec<u32>,
}

/// Where a job runs on a topology, and which kinds of costs belong to it. The offset of a single
/// job is zero.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JobOffset {
    /// The device of its first rank.
    pub(crate) first_device: usize,
    /// The cost model's index of the topology's first kind of device.
    pub(crate) first_kind: usize,
}

/// The Program, topology and costs of a lowering, and the ranks that are lowered.
#[derive(Clone, Copy)]
pub(super) struct LoweringContext<'a> {
    pub(super) program: &'a Program,
    pub(super) topology: &'a Topology,
    pub(super) costs: &'a CostModel,
    pub(super) offset: JobOffset,
    /// Number of devices from the first one on. If there are more ranks, they wrap around.
    pub(super) devices: usize,
    /// The rotation whose representatives are lowered. `None` if every rank is lowered.
    pub(super) rotation: Option<&'a MeshRotation>,
}

impl LoweringContext<'_> {
    /// The device of a rank.
    pub(super) fn device(&self, rank: Rank) -> DeviceId {
        DeviceId::of_rank(rank.0, DeviceId(self.offset.first_device), self.devices)
    }

    /// The index of a rank's representative among the lowered ranks.
    pub(super) fn index(&self, rank: Rank) -> usize {
        self.rotation.map_or(rank.0, |rotation| rotation.representative_index(rank.0))
    }

    /// The ranks to lower, without their groups and channels.
    pub(super) fn unconnected_ranks(&self) -> Vec<SimulatedRank> {
        let world = self.program.mesh.world_size();
        match self.rotation {
            Some(rotation) => rotation.representatives(world).map(|rank| self.unconnected_rank(Rank(rank))).collect(),
            None => (0..world).map(|rank| self.unconnected_rank(Rank(rank))).collect(),
        }
    }

    fn unconnected_rank(&self, rank: Rank) -> SimulatedRank {
        let device = self.device(rank);
        SimulatedRank {
            rank,
            device,
            kind: self.offset.first_kind + self.topology.kind_index(device),
            list: self.program.list_index(rank),
            times: 0,
            processor: 0,
            groups: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
        }
    }

    /// The rotation, if it maps every such group onto itself. `None` if it maps a group onto
    /// another one.
    pub(super) fn rotation_within(&self, group: &Group) -> Option<&MeshRotation> {
        self.rotation.filter(|rotation| group.axes.contains(&rotation.axis))
    }

    /// The context of flows in a group. `rotation` is the rotation that maps the group onto itself,
    /// if any.
    pub(super) fn flow_context<'a>(&'a self, rotation: Option<&'a MeshRotation>) -> FlowContext<'a> {
        FlowContext { topology: self.topology, links: &self.costs.links, rotation }
    }
}
