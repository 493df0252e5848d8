//! The work list of a calibration: the kernels of layouts, the steps in which they occur, and
//! message sizes.

use foretell_executor::TimedPlan;
use foretell_models::{Kernel, Model};
use foretell_planner::{Fixed, Request, families};
use foretell_program::{Compiled, Group, Operation, Plan, PlanError, StageProgram, compile, reuse_distances};
use foretell_simulator::CostModel;
use foretell_topologies::Topology;
use foretell_units::Bytes;
use std::collections::{BTreeMap, BTreeSet};

/// The work list of a calibration.
#[derive(Clone, Debug, Default)]
pub struct Needs {
    /// Kernels, each with its operands' reuse distances at every place where it occurs in a step.
    pub(super) kernels: BTreeMap<(Kernel, bool), Vec<Vec<Bytes>>>,
    /// Sizes of collectives and messages, each with the reuse distances of the sent data.
    pub(super) messages: BTreeMap<Bytes, Vec<Bytes>>,
    /// Bytes that a step touches: its largest arena.
    pub(super) footprint: Bytes,
    /// For each instruction list that communicates: bytes that its kernels touch per collective or
    /// message.
    pub(super) between_exchanges: Vec<Bytes>,
    /// The largest collective or message.
    pub(super) longest_message: Bytes,
    /// Sizes of the groups that communicate.
    pub(super) group_sizes: BTreeSet<usize>,
    /// The plans in whose steps kernels occur, and the instructions at which they are timed.
    pub(super) passages: Vec<TimedPlan>,
    /// Number of places at which each kernel is timed so far.
    places: BTreeMap<(Kernel, bool), usize>,
}

impl Needs {
    /// Adds the work of every layout family in a plan's search space. Leaves out layouts that do
    /// not fit.
    ///
    /// # Errors
    /// The first layout's error, if no layout can be compiled.
    pub fn add_layouts(
        &mut self,
        model: &Model,
        name: &str,
        base: &Plan,
        topology: &Topology,
        devices: usize,
        fixed: &Fixed,
    ) -> Result<(), PlanError> {
        let (mut is_any, mut refusal) = (false, None);
        let memory = topology.least_memory();
        let costs = CostModel::new(None, topology);
        let request = Request { devices, fixed: fixed.clone(), ..Request::new(model, name, topology, &costs, base) };
        // The search itself refuses an empty search space later.
        for layout in families(&request).unwrap_or_default() {
            // A layout that does not compile has no kernels.
            let plan = Plan { layout, ..base.clone() };
            let compiled = match compile(model, name, &plan) {
                Ok(compiled) => compiled,
                Err(error) => {
                    refusal.get_or_insert(error);
                    continue;
                }
            };
            is_any = true;
            if compiled.arenas().into_iter().all(|arena| arena <= memory) {
                self.add(model, name, &plan, &compiled);
            }
        }
        refusal.filter(|_| !is_any).map_or(Ok(()), Err)
    }

    /// Adds the work of all kinds of training steps of a plan.
    pub fn add(&mut self, model: &Model, name: &str, plan: &Plan, compiled: &Compiled) {
        let programs = compiled.step_programs();
        let lists = || programs.iter().flat_map(|program| &program.lists);
        for list in lists() {
            let mesh = compiled.training.mesh.stage(list.stage);
            let size = |group: &Group| group.axes.iter().map(|&axis| mesh.size(axis)).product::<usize>();
            self.group_sizes.extend(list.groups.iter().map(size));
        }
        for (instruction, distances) in lists().flat_map(|list| list.instructions.iter().zip(reuse_distances(list))) {
            match &*instruction.operation {
                Operation::Compute { kernel, accumulate, .. } => {
                    for index in 0..kernel.parts() {
                        let timed = (kernel.for_member(index).without_constants(), *accumulate);
                        self.kernels.entry(timed).or_default().push(distances.clone());
                    }
                }
                Operation::Collective { bytes, .. } | Operation::Send { bytes, .. } => {
                    self.longest_message = self.longest_message.max(*bytes);
                    self.messages.entry(*bytes).or_default().extend(distances.first());
                }
                Operation::Traced { .. }
                | Operation::Receive { .. }
                | Operation::Load { .. }
                | Operation::Copy { .. }
                | Operation::Save { .. }
                | Operation::Write { .. } => {}
            }
        }
        self.footprint = compiled.arenas().into_iter().fold(self.footprint, Bytes::max);
        self.between_exchanges.extend(lists().filter_map(between_exchanges));
        let timed: Vec<Vec<Vec<u32>>> =
            programs.iter().map(|program| program.lists.iter().map(|list| self.places_in(list)).collect()).collect();
        if timed.iter().flatten().any(|places| !places.is_empty()) {
            self.passages.push(TimedPlan { model: model.clone(), name: name.into(), plan: plan.clone(), timed });
        }
    }

    /// Chooses the instructions of a list at which kernels are timed: spread over the list, for
    /// each kernel that has too few places so far.
    fn places_in(&mut self, stage: &StageProgram) -> Vec<u32> {
        let mut standing: BTreeMap<(Kernel, bool), Vec<u32>> = BTreeMap::new();
        for (number, instruction) in stage.instructions.iter().enumerate() {
            if let Operation::Compute { kernel, accumulate, .. } = *instruction.operation {
                standing.entry((kernel.without_constants(), accumulate)).or_default().push(number as u32);
            }
        }
        let mut chosen = Vec::new();
        for (kernel, all) in standing {
            let known = self.places.entry(kernel).or_default();
            let count = all.len().min(MOST_PLACES_IN_A_LIST).min(MOST_PLACES - *known);
            *known += count;
            // The middles of equal parts of the occurrences.
            chosen.extend((0..count).map(|part| all[(2 * part + 1) * all.len() / (2 * count)]));
        }
        chosen.sort_unstable();
        chosen
    }
}

/// Cap on bytes touched between communication: beyond a core's private caches more makes no
/// difference.
pub(super) const MOST_BETWEEN_EXCHANGES: Bytes = Bytes::new(4 << 20);

/// Bytes that a list's kernels touch per collective or message; `None` if it does not communicate.
fn between_exchanges(stage: &StageProgram) -> Option<Bytes> {
    let (mut touched, mut exchanges) = (0, 0);
    for instruction in &stage.instructions {
        match *instruction.operation {
            Operation::Compute { .. } => {
                let operands = instruction.reads.iter().chain(&instruction.writes);
                touched += operands.map(|&id| stage.buffer(id).bytes.count()).sum::<u64>();
            }
            Operation::Collective { .. } | Operation::Send { .. } | Operation::Receive { .. } => exchanges += 1,
            Operation::Traced { .. }
            | Operation::Load { .. }
            | Operation::Copy { .. }
            | Operation::Save { .. }
            | Operation::Write { .. } => {}
        }
    }
    (exchanges > 0).then(|| Bytes::new(touched / exchanges))
}

/// Most places at which a kernel is timed, and most of them in one list.
const MOST_PLACES: usize = 16;
const MOST_PLACES_IN_A_LIST: usize = 8;
