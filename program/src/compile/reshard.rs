//! Messages between stages with different meshes: the part of a tensor that each rank sends to each
//! rank of the other stage.
//!
//! Each stage shards the tensor over its own mesh. A receiver gets every part of its shard from a
//! rank that has it. If several ranks have a part, its receivers are spread over them, so that no
//! sender does all the work.
//!
//! Ranks with equal transfers and equal numbers of samples share one instruction list.

use super::cuts::Cuts;
use super::lowering::{Lowering, Lowerings};
use crate::mesh::{Axis, Coordinates, Mesh, Rank, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::PlanError;
use crate::program::{Peer, PeerId};
use foretell_models::TensorId;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// The box within a rank's shard of a tensor that is sent to, or received from, one peer.
#[derive(Clone, Debug)]
pub(super) struct Fragment {
    pub(super) peer: PeerId,
    /// The first index in the rank's shard, by dimension.
    pub(super) start: Vec<usize>,
    /// The length, by dimension.
    pub(super) extent: Vec<usize>,
}

/// The fragments that the ranks of one list exchange with stages that have other meshes.
#[derive(Clone, Debug, Default)]
pub(super) struct Routes {
    pub(super) peers: Vec<Peer>,
    /// Keyed by tensor and receiving stage; no entry if that stage has the same mesh. An entry is
    /// empty if other ranks with the same shard send it.
    pub(super) sends: FxHashMap<(TensorId, usize), Vec<Fragment>>,
    /// Keyed by tensor and sending stage; no entry if that stage has the same mesh.
    pub(super) receives: FxHashMap<(TensorId, usize), Vec<Fragment>>,
}

/// A fragment before peers are numbered for a whole list.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Transfer {
    direction: Direction,
    tensor: TensorId,
    /// The index of the peer among the rank's peers in this direction.
    slot: usize,
    start: Vec<usize>,
    extent: Vec<usize>,
}

/// Sending to a stage, or receiving from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Direction {
    sends: bool,
    /// The other stage.
    stage: usize,
}

/// Everything that one rank sends to and receives from stages with other meshes.
#[derive(Clone, Debug, Default)]
struct RankTransfers {
    peers: BTreeMap<Direction, BTreeSet<Rank>>,
    /// The direction, tensor and peer of each fragment, and its region within this rank's shard.
    fragments: Vec<(Direction, TensorId, Rank, Region)>,
}

/// The tensors that cross between stages with different meshes in one Program, and every rank's
/// transfers.
#[derive(Debug, Default)]
pub(super) struct Crossings {
    /// Tensor, sending stage, receiving stage.
    tensors: Vec<(TensorId, usize, usize)>,
    /// Indexed by rank; empty if all meshes are equal.
    of_rank: Vec<RankTransfers>,
}

/// A box within a tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Region {
    start: Vec<usize>,
    extent: Vec<usize>,
}

impl Region {
    /// A rank's shard within a tensor over all samples of a micro-batch. `full` is the tensor's
    /// shape if every rank of the stage had as many samples as this one.
    fn of(full: &[usize], placements: Placements, mesh: &StageMesh, coordinates: Coordinates) -> Self {
        let mut region = Self { start: vec![0; full.len()], extent: full.to_vec() };
        let mut batch = None;
        for axis in [Axis::Data, Axis::Shard] {
            if let Placement::Shard(dimension) = placements.get(axis) {
                region.extent[dimension] /= mesh.size(axis);
                batch = Some(dimension);
            }
        }
        if let Some(dimension) = batch {
            // `extent` covers all ranks of `expert`: convert a count of samples to elements.
            let samples = mesh.samples(coordinates) * mesh.size(Axis::Expert);
            let before = mesh.samples_before(coordinates.with(Axis::Expert, 0));
            region.start[dimension] = region.extent[dimension] / samples * before;
        }
        for axis in [Axis::Expert, Axis::Context, Axis::Tensor] {
            if let Placement::Shard(dimension) = placements.get(axis) {
                region.extent[dimension] /= mesh.size(axis);
                region.start[dimension] += coordinates.along(axis) * region.extent[dimension];
            }
        }
        region
    }

    fn intersection(&self, other: &Self) -> Option<Self> {
        let mut both = self.clone();
        for dimension in 0..self.start.len() {
            let end = |region: &Self| region.start[dimension] + region.extent[dimension];
            both.start[dimension] = self.start[dimension].max(other.start[dimension]);
            both.extent[dimension] = end(self).min(end(other)).checked_sub(both.start[dimension]).filter(|&extent| extent > 0)?;
        }
        Some(both)
    }

    /// This region with its start relative to that of `whole`.
    fn within(mut self, whole: &Self) -> Self {
        self.start.iter_mut().zip(&whole.start).for_each(|(start, whole)| *start -= whole);
        self
    }
}

/// The placements of a tensor when it crosses to another mesh: the settled ones, with every partial
/// sum reduced.
pub(super) fn crossing_placements(lowering: &Lowering, tensor: TensorId) -> Placements {
    lowering.sharding.settled(tensor).summed()
}

impl Crossings {
    /// Finds the tensors that cross between stages with different meshes, and which rank sends
    /// which fragment to which rank.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] if a receiving stage reads a tensor as a partial sum.
    pub(super) fn new(lowerings: &Lowerings, cuts: &Cuts, mesh: &Mesh) -> Result<Self, PlanError> {
        let mut crossings = Self::default();
        // The stages that produce and read a tensor are the same in all lowerings.
        let any = lowerings.any();
        for operator in &any.graph.operators {
            let from = cuts.stage_of_block[operator.block];
            for output in operator.outputs.iter().filter(|output| any.is_activation(output.tensor)) {
                for to in any.other_readers(output.tensor, from, &cuts.stage_of_block) {
                    let crossing = (output.tensor, from, to);
                    if mesh.stage(from) != mesh.stage(to) && !crossings.tensors.contains(&crossing) {
                        crossings.tensors.push(crossing);
                    }
                }
            }
        }
        if crossings.tensors.is_empty() {
            return Ok(crossings);
        }
        crossings.of_rank = vec![RankTransfers::default(); mesh.world_size()];
        for (tensor, from, to) in crossings.tensors.clone() {
            crossings.add(lowerings, cuts, mesh, tensor, from, to)?;
        }
        Ok(crossings)
    }

    /// Adds the transfers of one tensor from one stage to another.
    fn add(
        &mut self,
        lowerings: &Lowerings,
        cuts: &Cuts,
        mesh: &Mesh,
        tensor: TensorId,
        from: usize,
        to: usize,
    ) -> Result<(), PlanError> {
        let shards = |stage: usize| {
            let mut shards: BTreeMap<Region, Vec<Rank>> = BTreeMap::new();
            for rank in mesh.stage_ranks(stage) {
                let coordinates = mesh.coordinates(rank);
                let lowering = lowerings.of(mesh.stage(stage), coordinates);
                let full = lowering.shape(tensor);
                let region = Region::of(&full, crossing_placements(lowering, tensor), mesh.stage(stage), coordinates);
                shards.entry(region).or_default().push(rank);
            }
            shards
        };
        let reader = lowerings.of(mesh.stage(to), mesh.coordinates(mesh.stage_ranks(to)[0]));
        let reads_partial_sums = reader.consumers[tensor.0].iter().any(|&id| {
            let operator = &reader.graph.operators[id.0];
            let mut inputs = operator.inputs.iter().filter(|input| input.tensor == tensor);
            cuts.stage_of_block[operator.block] == to && inputs.any(|input| reader.sharding.wanted(id, input).is_partial())
        });
        if reads_partial_sums {
            return Err(PlanError::Invalid {
                field: "stages",
                reason: format!(
                    "`{}` crosses from stage {from} to stage {to} before it is summed",
                    reader.graph.tensor(tensor).name
                ),
                hint: "give both stages the same mesh, or cut elsewhere".into(),
            });
        }
        let senders = shards(from);
        for (whole, receivers) in shards(to) {
            for (held, holders) in &senders {
                let Some(common) = whole.intersection(held) else { continue };
                for (turn, &receiver) in receivers.iter().enumerate() {
                    let sender = holders[turn % holders.len()];
                    let send = Direction { sends: true, stage: to };
                    self.of_rank[sender.0].add(send, tensor, receiver, common.clone().within(held));
                    let receive = Direction { sends: false, stage: from };
                    self.of_rank[receiver.0].add(receive, tensor, sender, common.clone().within(&whole));
                }
            }
        }
        Ok(())
    }

    /// A rank's transfers, sorted.
    fn transfers(&self, rank: Rank) -> Vec<Transfer> {
        self.of_rank.get(rank.0).map(RankTransfers::sorted).unwrap_or_default()
    }

    /// The routes of the ranks of one list, whose transfers are equal.
    pub(super) fn routes(&self, stage: usize, ranks: &[Rank]) -> Routes {
        let mut routes = Routes::default();
        for &(tensor, from, to) in &self.tensors {
            if from == stage {
                routes.sends.insert((tensor, to), Vec::new());
            } else if to == stage {
                routes.receives.insert((tensor, from), Vec::new());
            }
        }
        let Some(&first) = ranks.first() else { return routes };
        let mut peer_ids: FxHashMap<(Direction, usize), PeerId> = FxHashMap::default();
        // `of_rank` is empty if no tensor crosses between different meshes.
        let peers_of_first = self.of_rank.get(first.0).into_iter().flat_map(|transfers| &transfers.peers);
        for (&direction, peers) in peers_of_first {
            for slot in 0..peers.len() {
                let peer_of = |rank: &Rank| Some((*rank, *self.of_rank[rank.0].peers.get(&direction)?.iter().nth(slot)?));
                let peer = Peer { stage: direction.stage, ranks: Some(ranks.iter().filter_map(peer_of).collect()) };
                let index = routes.peers.iter().position(|known| *known == peer).unwrap_or_else(|| {
                    routes.peers.push(peer);
                    routes.peers.len() - 1
                });
                peer_ids.insert((direction, slot), PeerId(index as u16));
            }
        }
        for Transfer { direction, tensor, slot, start, extent } in self.transfers(first) {
            let fragments = if direction.sends { &mut routes.sends } else { &mut routes.receives };
            let peer = peer_ids[&(direction, slot)];
            fragments.entry((tensor, direction.stage)).or_default().push(Fragment { peer, start, extent });
        }
        routes
    }
}

impl RankTransfers {
    fn add(&mut self, direction: Direction, tensor: TensorId, peer: Rank, region: Region) {
        self.peers.entry(direction).or_default().insert(peer);
        self.fragments.push((direction, tensor, peer, region));
    }

    fn sorted(&self) -> Vec<Transfer> {
        let slot = |direction: &Direction, peer: &Rank| self.peers[direction].range(..peer).count();
        let transfer = |(direction, tensor, peer, Region { start, extent }): &(Direction, TensorId, Rank, Region)| Transfer {
            direction: *direction,
            tensor: *tensor,
            slot: slot(direction, peer),
            start: start.clone(),
            extent: extent.clone(),
        };
        let mut transfers: Vec<Transfer> = self.fragments.iter().map(transfer).collect();
        transfers.sort_unstable();
        transfers
    }
}

/// The ranks of a stage that share one instruction list.
#[derive(Clone, Debug)]
pub(super) struct ListRanks {
    pub(super) stage: usize,
    /// Ascending.
    pub(super) ranks: Vec<Rank>,
}

/// The ranks of every list, stage by stage. Ranks of a stage are in different lists if they have
/// different numbers of samples, or different transfers in any of the Programs.
pub(super) fn list_ranks(mesh: &Mesh, crossings: &[Crossings]) -> Vec<ListRanks> {
    let mut lists = Vec::new();
    for stage in 0..mesh.stage_count() {
        let ranks = mesh.stage_ranks(stage);
        let may_differ = !mesh.stage(stage).is_even() || crossings.iter().any(|crossing| !crossing.of_rank.is_empty());
        if !may_differ {
            lists.push(ListRanks { stage, ranks });
            continue;
        }
        let mut known: BTreeMap<(usize, Vec<Vec<Transfer>>), usize> = BTreeMap::new();
        for rank in ranks {
            let samples = mesh.stage(stage).samples(mesh.coordinates(rank));
            let transfers = crossings.iter().map(|crossing| crossing.transfers(rank)).collect();
            let list = *known.entry((samples, transfers)).or_insert_with(|| {
                lists.push(ListRanks { stage, ranks: Vec::new() });
                lists.len() - 1
            });
            lists[list].ranks.push(rank);
        }
    }
    lists
}
