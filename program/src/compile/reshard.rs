//! Messages between stages whose meshes differ: which part of a tensor each rank sends to whom.
//!
//! Each stage lays a tensor out on its own mesh. A receiver takes every part of its share from a rank that has it; where several have, those that
//! receive the same take turns, so that no sender does all the work. Ranks that send and receive alike, and have as many samples, run one list.

use super::cuts::Cuts;
use super::{Lowering, Lowerings};
use crate::mesh::{Axis, Coordinates, Mesh, Rank, StageMesh};
use crate::placement::{Placement, Placements};
use crate::plan::PlanError;
use crate::program::{Peer, PeerId};
use foretell_models::TensorId;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};

/// A part of a rank's share of a tensor that goes to, or comes from, one peer.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) peer: PeerId,
    /// Where it begins in the rank's share, and how long it is, dimension by dimension.
    pub(super) start: Vec<usize>,
    pub(super) extent: Vec<usize>,
}

/// What the ranks of one list send to, and receive from, stages with other meshes.
#[derive(Clone, Debug, Default)]
pub(super) struct Routes {
    pub(super) peers: Vec<Peer>,
    /// By tensor and the other stage; nothing where that stage has the same mesh. A rank whose share others have, too, may have nothing to send.
    pub(super) sends: FxHashMap<(TensorId, usize), Vec<Piece>>,
    pub(super) receives: FxHashMap<(TensorId, usize), Vec<Piece>>,
}

/// A piece before peers are numbered for a whole list: with the peer's place among those that the rank has in that stage.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Hop {
    way: Way,
    tensor: TensorId,
    slot: usize,
    start: Vec<usize>,
    extent: Vec<usize>,
}

/// To or from which stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Way {
    sends: bool,
    stage: usize,
}

/// What one rank sends and receives.
#[derive(Clone, Debug, Default)]
struct Traveller {
    peers: BTreeMap<Way, BTreeSet<Rank>>,
    /// With the peer in place of its slot.
    pieces: Vec<(Way, TensorId, Rank, Region)>,
}

/// The pieces of all ranks, of one kind of Program.
#[derive(Debug, Default)]
pub(super) struct Crossings {
    /// Tensors that cross between stages whose meshes differ: whence and whither.
    tensors: Vec<(TensorId, usize, usize)>,
    /// By rank; empty where no meshes differ.
    travellers: Vec<Traveller>,
}

/// A box within a tensor.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Region {
    start: Vec<usize>,
    extent: Vec<usize>,
}

impl Region {
    /// The share of a rank of a tensor over all samples of a micro-batch. `full` is the tensor's shape if all ranks of the stage had as many
    /// samples as this one.
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
            // What the ranks of `expert` have together, in elements and in samples.
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

    /// The same, counted from the start of another.
    fn within(mut self, whole: &Self) -> Self {
        self.start.iter_mut().zip(&whole.start).for_each(|(start, whole)| *start -= whole);
        self
    }
}

/// How a tensor lies when it crosses: as it does otherwise, but that sums are made before.
pub(super) fn crossing_placements(lowering: &Lowering, tensor: TensorId) -> Placements {
    let settled = lowering.sharding.settled(tensor);
    settled.partial_axes().fold(settled, |made, axis| made.with(axis, Placement::Replicate))
}

impl Crossings {
    /// Finds out what crosses between stages whose meshes differ.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] where the receiving stage wants a sum that is not made yet.
    pub(super) fn new(lowerings: &Lowerings, cuts: &Cuts, mesh: &Mesh) -> Result<Self, PlanError> {
        let mut crossings = Self::default();
        // Which stage's operators make and read a tensor is the same in all lowerings.
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
        crossings.travellers = vec![Traveller::default(); mesh.world_size()];
        for (tensor, from, to) in crossings.tensors.clone() {
            crossings.add(lowerings, cuts, mesh, tensor, from, to)?;
        }
        Ok(crossings)
    }

    fn add(
        &mut self,
        lowerings: &Lowerings,
        cuts: &Cuts,
        mesh: &Mesh,
        tensor: TensorId,
        from: usize,
        to: usize,
    ) -> Result<(), PlanError> {
        let shares = |stage: usize| {
            let mut shares: BTreeMap<Region, Vec<Rank>> = BTreeMap::new();
            for rank in mesh.stage_ranks(stage) {
                let coordinates = mesh.coordinates(rank);
                let lowering = lowerings.of(mesh.stage(stage), coordinates);
                let full: Vec<usize> = lowering.graph.tensor(tensor).dimensions.iter().map(|one| one.extent).collect();
                let region = Region::of(&full, crossing_placements(lowering, tensor), mesh.stage(stage), coordinates);
                shares.entry(region).or_default().push(rank);
            }
            shares
        };
        let reader = lowerings.of(mesh.stage(to), mesh.coordinates(mesh.stage_ranks(to)[0]));
        let wants_parts = reader.consumers[tensor.0].iter().any(|&id| {
            let operator = &reader.graph.operators[id.0];
            let mut inputs = operator.inputs.iter().filter(|input| input.tensor == tensor);
            cuts.stage_of_block[operator.block] == to
                && inputs.any(|input| reader.sharding.wanted(id, input).partial_axes().next().is_some())
        });
        if wants_parts {
            return Err(PlanError::Invalid {
                field: "stages",
                reason: format!(
                    "`{}` crosses from stage {from} to stage {to} before it is summed",
                    reader.graph.tensor(tensor).name
                ),
                hint: "give both stages the same mesh, or cut elsewhere".into(),
            });
        }
        let senders = shares(from);
        for (whole, receivers) in shares(to) {
            for (held, holders) in &senders {
                let Some(common) = whole.intersection(held) else { continue };
                for (turn, &receiver) in receivers.iter().enumerate() {
                    let sender = holders[turn % holders.len()];
                    self.travellers[sender.0].add(Way { sends: true, stage: to }, tensor, receiver, common.clone().within(held));
                    let way = Way { sends: false, stage: from };
                    self.travellers[receiver.0].add(way, tensor, sender, common.clone().within(&whole));
                }
            }
        }
        Ok(())
    }

    fn hops(&self, rank: Rank) -> Vec<Hop> {
        self.travellers.get(rank.0).map(Traveller::hops).unwrap_or_default()
    }

    /// What the ranks of one list do, which all do alike.
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
        let mut number: FxHashMap<(Way, usize), PeerId> = FxHashMap::default();
        let own = self.travellers.get(first.0).into_iter().flat_map(|traveller| &traveller.peers);
        for (&way, peers) in own {
            for slot in 0..peers.len() {
                let peer_of = |rank: &Rank| Some((*rank, *self.travellers[rank.0].peers.get(&way)?.iter().nth(slot)?));
                let peer = Peer { stage: way.stage, ranks: Some(ranks.iter().filter_map(peer_of).collect()) };
                let known = routes.peers.iter().position(|one| *one == peer).unwrap_or_else(|| {
                    routes.peers.push(peer);
                    routes.peers.len() - 1
                });
                number.insert((way, slot), PeerId(known as u16));
            }
        }
        for Hop { way, tensor, slot, start, extent } in self.hops(first) {
            let pieces = if way.sends { &mut routes.sends } else { &mut routes.receives };
            let Some(&peer) = number.get(&(way, slot)) else { continue };
            pieces.entry((tensor, way.stage)).or_default().push(Piece { peer, start, extent });
        }
        routes
    }
}

impl Traveller {
    fn add(&mut self, way: Way, tensor: TensorId, peer: Rank, region: Region) {
        self.peers.entry(way).or_default().insert(peer);
        self.pieces.push((way, tensor, peer, region));
    }

    fn hops(&self) -> Vec<Hop> {
        let slot = |way: &Way, peer: &Rank| self.peers.get(way).map_or(0, |peers| peers.range(..peer).count());
        let hop = |(way, tensor, peer, Region { start, extent }): &(Way, TensorId, Rank, Region)| Hop {
            way: *way,
            tensor: *tensor,
            slot: slot(way, peer),
            start: start.clone(),
            extent: extent.clone(),
        };
        let mut hops: Vec<Hop> = self.pieces.iter().map(hop).collect();
        hops.sort_unstable();
        hops
    }
}

/// Ranks of a stage that run one list.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) stage: usize,
    /// Ascending.
    pub(super) ranks: Vec<Rank>,
}

/// The ranks of each stage, those apart that have other numbers of samples or do not send and receive alike, in any of the Programs.
pub(super) fn parts(mesh: &Mesh, crossings: &[Crossings]) -> Vec<Part> {
    let mut all = Vec::new();
    for stage in 0..mesh.stage_count() {
        let ranks = mesh.stage_ranks(stage);
        let differ = !mesh.stage(stage).is_even() || crossings.iter().any(|one| !one.travellers.is_empty());
        if !differ {
            all.push(Part { stage, ranks });
            continue;
        }
        let mut known: BTreeMap<(usize, Vec<Vec<Hop>>), usize> = BTreeMap::new();
        for rank in ranks {
            let samples = mesh.stage(stage).samples(mesh.coordinates(rank));
            let hops = crossings.iter().map(|one| one.hops(rank)).collect();
            let part = *known.entry((samples, hops)).or_insert_with(|| {
                all.push(Part { stage, ranks: Vec::new() });
                all.len() - 1
            });
            all[part].ranks.push(rank);
        }
    }
    all
}
