//! What the instructions of a list take on a kind of device, alone, and when its host has launched them.
//!
//! It must not know when anything happens: only how long it takes.

use super::list::{Action, LoweredList};
use crate::cost::{CostModel, HostWaits, KernelCost, Quantile, Source};
use foretell_models::Kernel;
use foretell_program::{GroupId, Operation, Phase, Program, StageProgram};
use foretell_units::{Picoseconds, Seconds};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// What the instructions of a list take on a kind of device.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Of the processor, at each quantile: of each different operation ([`LoweredList::operations`]).
    durations: Vec<[Picoseconds; 3]>,
    /// When the host has launched each instruction, if it never waits; empty where launches take no time.
    pub(crate) launched: Vec<Picoseconds>,
    /// Whether the host launches nothing more before it has ended; empty where launches take no time.
    pub(crate) host_waits: Vec<bool>,
}

const QUANTILES: [Quantile; 3] = [Quantile::P10, Quantile::Median, Quantile::P90];

const PHASES: [Phase; 4] = [Phase::Forward, Phase::Recompute, Phase::Backward, Phase::Update];

impl Work {
    /// What an instruction takes of the processor.
    pub(crate) fn duration(&self, list: &LoweredList, instruction: u32, quantile: Quantile) -> Picoseconds {
        self.durations[list.operations.of_instruction[instruction as usize] as usize][quantile as usize]
    }
}

/// The groups in which some kernel of a stage does more on one member than on another: causal attention of a part of the positions.
pub(crate) fn uneven_groups(stage: &StageProgram, list: &LoweredList) -> BTreeSet<GroupId> {
    let uneven =
        list.operations.first_instruction.iter().filter_map(|&first| match *stage.instructions[first as usize].operation {
            Operation::Compute { kernel, group, .. } if kernel.for_member(0) != kernel => group,
            _ => None,
        });
    uneven.collect()
}

/// The members whose parts a rank is taken to do that is one of so many in a group whose kernels do more on one member than on another, the last
/// the most: their mean is that of all where parts are balanced, of an even number that of the two in the middle.
pub(crate) fn balanced_parts(members: usize) -> [usize; 2] {
    [members.saturating_sub(1) / 2, members / 2]
}

/// The work of each instruction of a stage on a kind of device, at each quantile, for the rank that has the place in each group that
/// `places_in` says: the mean of two, which are the same for a rank that is one of them. Each distinct kernel is estimated once.
pub(crate) fn work_of(
    program: &Program,
    (stage, list): (&StageProgram, &LoweredList),
    costs: &CostModel,
    kind: usize,
    places_in: &dyn Fn(GroupId) -> [usize; 2],
    uncalibrated: &mut BTreeSet<String>,
) -> Work {
    let parameters = costs.parameters(kind);
    // Only looked up, never walked through, so that its order does not matter.
    let mut known: FxHashMap<(Kernel, bool), ([Picoseconds; 3], Seconds)> = FxHashMap::default();
    let each = |time: &dyn Fn(Quantile) -> Seconds| QUANTILES.map(|quantile| Picoseconds::from(time(quantile)));
    // A step that is launched as one costs no launches.
    let kernel_launch = if stage.is_alone() { Seconds::ZERO } else { parameters.launch };
    let exchange_launch = costs.exchange_launch(kind);
    let shares = PHASES.map(|phase| costs.launch_share(kind, phase));
    let operations = list.operations.first_instruction.iter().map(|&first| {
        let instruction = &stage.instructions[first as usize];
        let (work, launch) = match *instruction.operation {
            Operation::Compute { kernel, accumulate, group } => {
                let mut estimate = |kernel: Kernel| {
                    *known.entry((kernel, accumulate)).or_insert_with(|| {
                        let KernelCost { time: estimate, launch } =
                            costs.kernel_cost(&kernel, accumulate, program.precision, kind);
                        if !estimate.source.is_calibrated() {
                            let why = if estimate.source == Source::Extrapolated { ", far from any sample" } else { "" };
                            let (name, device) = (kernel.name(), costs.kind_name(kind));
                            uncalibrated.insert(format!("{name} in {} on {device}{why}", program.precision));
                        }
                        let work = each(&|quantile| estimate.at(quantile) + parameters.instruction_overhead.at(quantile));
                        (work, launch + kernel_launch)
                    })
                };
                match group.map(|group| places_in(group).map(|place| kernel.for_member(place))) {
                    None => estimate(kernel),
                    Some([one, other]) if one == other => estimate(one),
                    Some(both) => {
                        let [(work, launch), (other, other_launch)] = both.map(estimate);
                        let mean = |quantile: Quantile| {
                            let [one, other] = [work, other].map(|work| Seconds::from(work[quantile as usize]));
                            Picoseconds::from((one + other) * 0.5)
                        };
                        (QUANTILES.map(mean), (launch + other_launch) * 0.5)
                    }
                }
            }
            Operation::Load { .. } => {
                let buffers = instruction.writes.iter().filter_map(|buffer| stage.buffers.get(buffer.0 as usize));
                let bytes: f64 = buffers.map(|buffer| buffer.bytes.value()).sum();
                (each(&|_| parameters.load_seconds_per_byte * bytes), Seconds::ZERO)
            }
            Operation::Copy { bytes, .. } => {
                let copy = costs.copy_time(kind, bytes);
                if !copy.source.is_calibrated() {
                    uncalibrated.insert(format!("copies between {} and its host", costs.kind_name(kind)));
                }
                (each(&|quantile| copy.at(quantile)), exchange_launch)
            }
            Operation::Collective { .. } | Operation::Send { .. } => ([Picoseconds::ZERO; 3], exchange_launch),
            Operation::Receive { .. } => ([Picoseconds::ZERO; 3], Seconds::ZERO),
        };
        (work, shares.map(|share| Picoseconds::from(launch * share)))
    });
    let (durations, launches): (Vec<_>, Vec<[Picoseconds; 4]>) = operations.unzip();
    let mut host = Picoseconds::ZERO;
    let launched = list.operations.of_instruction.iter().zip(&list.phases).map(|(&which, &phase)| {
        host += launches[which as usize][phase as usize];
        host
    });
    let launched: Vec<Picoseconds> = launched.collect();
    // Where the host has nothing to do, it says nothing.
    if host == Picoseconds::ZERO {
        return Work { durations, ..Work::default() };
    }
    Work { durations, launched, host_waits: host_waits(stage, list, parameters.host_waits) }
}

/// What a host waits for: messages, or the last kernel of each pass over a micro-batch.
fn host_waits(stage: &StageProgram, list: &LoweredList, waits: HostWaits) -> Vec<bool> {
    let mut found: Vec<bool> = vec![false; list.actions.len()];
    let mut last: Option<(usize, (bool, Option<u32>))> = None;
    for (index, (action, &phase)) in list.actions.iter().zip(&list.phases).enumerate() {
        match action {
            Action::Receive { .. } => found[index] = waits.for_messages,
            Action::Compute if waits.between_passes && phase != Phase::Update => {
                let pass = (phase == Phase::Forward, stage.instructions[index].micro_batch);
                if let Some((before, _)) = last.filter(|(_, other)| *other != pass) {
                    found[before] = true;
                }
                last = Some((index, pass));
            }
            _ => {}
        }
    }
    found
}
