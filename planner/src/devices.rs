//! Which kinds of devices the pipelines of a layout lie on, where there are several.
//!
//! It knows where ranks lie, and not what they do.

use foretell_program::{Axis, Mesh, Program, Rank};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::Bytes;

/// The kinds of the devices that may be used.
#[derive(Clone, Debug)]
pub(crate) struct Devices {
    /// Their numbers in the topology, in the order of first use.
    pub(crate) kinds: Vec<usize>,
    /// What a rank on each of these may use.
    memory: Vec<Bytes>,
    /// The least of that over each.
    weights: Vec<f64>,
    /// The first device of each run of devices of one kind, and the place of its kind among these.
    runs: Vec<(usize, usize)>,
    /// Where there are more ranks than devices in the topology they begin again at the first.
    count: usize,
}

impl Devices {
    pub(crate) fn new(topology: &Topology, devices: usize, limit: Option<Bytes>) -> Self {
        let (kinds, memory, weights, runs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut found = Self { kinds, memory, weights, runs, count: topology.device_count().max(1) };
        for device in 0..devices.min(topology.device_count()) {
            let kind = topology.kind_index(DeviceId(device));
            let place = found.kinds.iter().position(|&other| other == kind).unwrap_or_else(|| {
                found.kinds.push(kind);
                found.kinds.len() - 1
            });
            if found.runs.last().is_none_or(|&(_, last)| last != place) {
                found.runs.push((device, place));
            }
        }
        let memory = found.kinds.iter().map(|&kind| topology.device_kinds()[kind].memory);
        found.memory = memory.map(|memory| limit.map_or(memory, |limit| limit.min(memory))).collect();
        let least = found.least_memory().value();
        found.weights = found.memory.iter().map(|memory| least / memory.value().max(1.0)).collect();
        found
    }

    /// What a rank may use of the device that has the least.
    pub(crate) fn least_memory(&self) -> Bytes {
        self.memory.iter().copied().min().unwrap_or(Bytes::ZERO)
    }

    /// How many times the least memory so many devices have together.
    pub(crate) fn least_memories(&self, devices: usize) -> f64 {
        let own: f64 = (0..devices.min(self.count)).map(|device| 1.0 / self.weights[self.place_of(device)]).sum();
        // Where several ranks share a device each is given all of it.
        own * (devices as f64 / devices.min(self.count).max(1) as f64).ceil()
    }

    /// By the places of kinds among [`Self::kinds`]: the least memory over that of such a device. What a rank there holds, times this,
    /// may be no more than the least.
    pub(crate) fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// The weight of a kind by its number in the topology; the least of all where it is not said.
    pub(crate) fn weight_of(&self, kind: Option<usize>) -> f64 {
        let place = kind.and_then(|kind| self.kinds.iter().position(|&other| other == kind));
        place.map_or_else(|| self.weights.iter().copied().fold(1.0, f64::min), |place| self.weights[place])
    }

    /// Of each list of a Program the weight of the device with the least memory that runs it.
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

    /// The same of each stage.
    pub(crate) fn weights_of_stages(&self, program: &Program) -> Vec<f64> {
        let mut of_stage = vec![0.0f64; program.mesh.stage_count()];
        for (list, weight) in program.lists.iter().zip(self.weights_of_lists(program)) {
            of_stage[list.stage] = of_stage[list.stage].max(weight);
        }
        of_stage
    }

    pub(crate) fn are_mixed(&self) -> bool {
        self.kinds.len() > 1
    }

    /// A device's kind by its number in the topology.
    pub(crate) fn kind_of(&self, device: usize) -> Option<usize> {
        self.kinds.get(self.place_of(device)).copied()
    }

    /// Of each device the place of its kind; nothing where all are of one.
    pub(crate) fn places(&self, devices: usize) -> Vec<usize> {
        if self.are_mixed() { (0..devices.min(self.count)).map(|device| self.place_of(device)).collect() } else { Vec::new() }
    }

    fn place_of(&self, device: usize) -> usize {
        let device = device % self.count;
        let run = self.runs.partition_point(|&(first, _)| first <= device);
        run.checked_sub(1).map_or(0, |run| self.runs[run].1)
    }

    /// For different pipelines of a layout, of each stage the place of its device's kind among [`Self::kinds`]. There may be others: for a bound
    /// any will do.
    pub(crate) fn pipelines(&self, mesh: &Mesh) -> Vec<Vec<usize>> {
        let stages = mesh.stage_count();
        if !self.are_mixed() {
            return vec![vec![0; stages]];
        }
        let origin = mesh.coordinates(Rank(0));
        let rank = |data: usize, stage: usize| mesh.rank(origin.with(Axis::Data, data).with(Axis::Pipeline, stage)).0;
        let count = mesh.stage(0).size(Axis::Data);
        // Ranks of `data` are evenly far apart: where a stage goes from one kind to the next follows.
        let apart = if count > 1 { (rank(1, 0) - rank(0, 0)).max(1) } else { 1 };
        let mut replicas = vec![0, count - 1];
        for stage in 0..stages {
            let first = rank(0, stage);
            for &(start, _) in &self.runs {
                let place = start.saturating_sub(first).div_ceil(apart);
                replicas.extend([place.saturating_sub(1), place].into_iter().filter(|&place| place < count));
            }
        }
        replicas.sort_unstable();
        replicas.dedup();
        let mut found: Vec<Vec<usize>> = Vec::new();
        for data in replicas {
            let kinds: Vec<usize> = (0..stages).map(|stage| self.place_of(rank(data, stage))).collect();
            if !found.contains(&kinds) {
                found.push(kinds);
            }
        }
        found
    }
}
