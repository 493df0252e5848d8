//! The kinds of devices that a request may use, their memory limits, and the kind under each rank.
//!
//! Lower bounds treat memory on unequal devices in one unit: a *weighted byte* is a byte times the
//! device's memory weight, which is the smallest memory limit over the device's own. So a stage on
//! any kind fits if its weighted bytes are at most the smallest limit.

use foretell_program::{Axis, Mesh, Program, Rank};
use foretell_topologies::{Architecture, DeviceId, Topology};
use foretell_units::Bytes;

/// The kinds of devices that may be used.
#[derive(Clone, Debug)]
pub(crate) struct DeviceKinds {
    /// The topology's index of each kind, in order of first use by the devices. In this type, a
    /// kind's *place* is its index in this list.
    pub(crate) kinds: Vec<usize>,
    /// Memory limit of a rank, indexed by the kind's place.
    memory_limits: Vec<Bytes>,
    /// Memory weight, at most 1, indexed by the kind's place.
    weights: Vec<f64>,
    /// First device of each run of devices of one kind, and the place of that kind.
    runs: Vec<(usize, usize)>,
    /// Number of devices of the topology. Further ranks wrap around to the first device.
    count: usize,
}

impl DeviceKinds {
    /// Describes the first `devices` devices of `topology`, whose ranks may use at most `limit`,
    /// and on GPUs at most all memory but the share `headroom`.
    pub(crate) fn new(topology: &Topology, devices: usize, limit: Option<Bytes>, headroom: f64) -> Self {
        let (mut kinds, mut runs): (Vec<usize>, Vec<(usize, usize)>) = (Vec::new(), Vec::new());
        for device in 0..devices.min(topology.device_count()) {
            let kind = topology.kind_index(DeviceId(device));
            let place = kinds.iter().position(|&other| other == kind).unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            });
            if runs.last().is_none_or(|&(_, last)| last != place) {
                runs.push((device, place));
            }
        }
        let memory = kinds.iter().map(|&kind| {
            let kind = &topology.device_kinds()[kind];
            let free = if kind.architecture == Architecture::Cpu { 0.0 } else { headroom };
            Bytes::new((kind.memory.value() * (1.0 - free)) as u64)
        });
        let memory_limits: Vec<Bytes> = memory.map(|memory| limit.map_or(memory, |limit| limit.min(memory))).collect();
        let least = memory_limits.iter().copied().min().expect("invariant: a topology has a kind of device").value();
        let weights = memory_limits.iter().map(|memory| least / memory.value().max(1.0)).collect();
        Self { kinds, memory_limits, weights, runs, count: topology.device_count().max(1) }
    }

    /// Returns the smallest memory limit of any device.
    pub(crate) fn smallest_memory_limit(&self) -> Bytes {
        self.memory_limits.iter().copied().min().expect("invariant: a topology has a kind of device")
    }

    /// Returns the memory of the first `devices` devices together, in units of the smallest limit.
    /// If several ranks share a device, each counts with the device's whole memory.
    pub(crate) fn total_memory_in_smallest(&self, devices: usize) -> f64 {
        let own: f64 = (0..devices.min(self.count)).map(|device| 1.0 / self.weights[self.place_of(device)]).sum();
        own * (devices as f64 / devices.min(self.count).max(1) as f64).ceil()
    }

    /// Returns the memory weights, indexed by the kind's place.
    pub(crate) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Returns the memory weight of a kind of the topology, or the smallest weight for `None`.
    pub(crate) fn weight_of(&self, kind: Option<usize>) -> f64 {
        let place = kind.and_then(|kind| self.place_of_kind(kind));
        place.map_or_else(|| self.weights.iter().copied().fold(1.0, f64::min), |place| self.weights[place])
    }

    /// Returns the place of a kind of the topology, if its devices may be used.
    pub(crate) fn place_of_kind(&self, kind: usize) -> Option<usize> {
        self.kinds.iter().position(|&other| other == kind)
    }

    /// Returns, for each instruction list of a Program, the weight of the device with the least
    /// memory that runs it.
    pub(crate) fn weights_of_lists(&self, program: &Program) -> Vec<f64> {
        if !self.are_mixed() {
            return vec![1.0; program.lists.len()];
        }
        let mut weights = vec![0.0f64; program.lists.len()];
        for (rank, &list) in program.list_of_rank.iter().enumerate() {
            let weight = &mut weights[list as usize];
            *weight = weight.max(self.weights[self.place_of(rank)]);
        }
        weights
    }

    /// Returns, for each stage of a Program, the weight of the device with the least memory that
    /// runs it.
    pub(crate) fn weights_of_stages(&self, program: &Program) -> Vec<f64> {
        let mut weights = vec![0.0f64; program.mesh.stage_count()];
        for (list, weight) in program.lists.iter().zip(self.weights_of_lists(program)) {
            weights[list.stage] = weights[list.stage].max(weight);
        }
        weights
    }

    /// Returns `true` if there are several kinds.
    pub(crate) fn are_mixed(&self) -> bool {
        self.kinds.len() > 1
    }

    /// Returns the topology's index of the kind of the device under `rank`.
    pub(crate) fn kind_of(&self, rank: usize) -> Option<usize> {
        self.kinds.get(self.place_of(rank)).copied()
    }

    /// Returns the place of each device's kind for the first `devices` devices, or an empty list if
    /// all are of one kind.
    pub(crate) fn places(&self, devices: usize) -> Vec<usize> {
        if self.are_mixed() { (0..devices.min(self.count)).map(|device| self.place_of(device)).collect() } else { Vec::new() }
    }

    fn place_of(&self, rank: usize) -> usize {
        let device = DeviceId::of_rank(rank, DeviceId(0), self.count).0;
        let run = self.runs.partition_point(|&(first, _)| first <= device);
        run.checked_sub(1).map_or(0, |run| self.runs[run].1)
    }

    /// Returns the different assignments of a pipeline's replicas to kinds of devices: for each,
    /// the place of every stage's kind.
    ///
    /// Only replicas at which some stage moves to the next run of devices are examined, so there
    /// may be further assignments. A lower bound may leave out replicas, since a step ends when the
    /// slowest replica ends.
    pub(crate) fn pipelines(&self, mesh: &Mesh) -> Vec<Vec<usize>> {
        let stages = mesh.stage_count();
        if !self.are_mixed() {
            return vec![vec![0; stages]];
        }
        let origin = mesh.coordinates(Rank(0));
        let rank = |data: usize, stage: usize| mesh.rank(origin.with(Axis::Data, data).with(Axis::Pipeline, stage)).0;
        let count = mesh.stage(0).size(Axis::Data);
        // Neighbours along `data` are equally far apart, so the replica at which a stage reaches
        // the next run of devices follows by division.
        let stride = if count > 1 { (rank(1, 0) - rank(0, 0)).max(1) } else { 1 };
        let mut replicas = vec![0, count - 1];
        for stage in 0..stages {
            let first = rank(0, stage);
            for &(start, _) in &self.runs {
                let replica = start.saturating_sub(first).div_ceil(stride);
                replicas.extend([replica.saturating_sub(1), replica].into_iter().filter(|&replica| replica < count));
            }
        }
        replicas.sort_unstable();
        replicas.dedup();
        let mut found: Vec<Vec<usize>> = Vec::new();
        for data in replicas {
            let places: Vec<usize> = (0..stages).map(|stage| self.place_of(rank(data, stage))).collect();
            if !found.contains(&places) {
                found.push(places);
            }
        }
        found
    }
}
