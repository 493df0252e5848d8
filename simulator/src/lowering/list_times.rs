//! Durations of a list's instructions on a kind of device, and when its host has launched them.
//! Nothing here depends on the start times of instructions.

use super::list::{Action, LoweredList};
use crate::cost::{CostModel, HostWaits, KernelCost, Quantile, Source};
use crate::gpu::ExpertRows;
use foretell_models::Kernel;
use foretell_program::{GroupId, Operation, Phase, Program, StageProgram};
use foretell_units::{Picoseconds, Seconds};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// Durations of a list's instructions on a kind of device.
#[derive(Debug, Default)]
pub(crate) struct ListTimes {
    /// For each distinct operation ([`LoweredList::operations`]), its duration at each quantile.
    /// Zero for collectives and messages.
    durations: Vec<[Picoseconds; 3]>,
    /// For each instruction, the time from the start of the step until the host has launched it, if
    /// the host never waits. Empty if launches take no time.
    pub(crate) launched: Vec<Picoseconds>,
    /// For each instruction, whether the host waits for its end before it launches anything else.
    /// Empty if launches take no time.
    pub(crate) host_waits: Vec<bool>,
}

const QUANTILES: [Quantile; 3] = [Quantile::P10, Quantile::Median, Quantile::P90];

const PHASES: [Phase; 4] = [Phase::Forward, Phase::Recompute, Phase::Backward, Phase::Update];

impl ListTimes {
    /// An instruction's duration.
    pub(crate) fn duration(&self, list: &LoweredList, instruction: u32, quantile: Quantile) -> Picoseconds {
        self.durations[list.operations.of_instruction[instruction as usize] as usize][quantile as usize]
    }
}

/// The groups of a list in which some kernel costs more on one member than on another, such as
/// causal attention over parts of the sequence.
pub(crate) fn uneven_groups(source: &StageProgram, list: &LoweredList) -> BTreeSet<GroupId> {
    let uneven =
        list.operations.first_instruction.iter().filter_map(|&first| match *source.instructions[first as usize].operation {
            Operation::Compute { kernel, group, .. } if kernel.is_uneven() => group,
            _ => None,
        });
    uneven.collect()
}

/// The two members whose mean work is the work of every member of an uneven group if the parts are
/// balanced. Work grows linearly with the index, so they are the two middle members, or the middle
/// one twice if the number is odd.
pub(crate) fn balanced_parts(members: usize) -> [usize; 2] {
    [members.saturating_sub(1) / 2, members / 2]
}

/// Durations of a list's instructions on a kind of device. Adds descriptions of uncalibrated
/// kernels and copies to `uncalibrated`.
///
/// In each group, the rank does the mean work of the two members that `members_in` returns for the
/// group, which may be equal.
pub(crate) fn list_times(
    program: &Program,
    (source, list): (&StageProgram, &LoweredList),
    costs: &CostModel,
    kind: usize,
    members_in: &dyn Fn(GroupId) -> [usize; 2],
    uncalibrated: &mut BTreeSet<String>,
) -> ListTimes {
    let parameters = costs.parameters(kind);
    // Each distinct kernel is estimated once. The map is never iterated, so its order does not
    // matter.
    let mut known: FxHashMap<(Kernel, bool), ([Picoseconds; 3], Seconds)> = FxHashMap::default();
    let each = |time: &dyn Fn(Quantile) -> Seconds| QUANTILES.map(|quantile| Picoseconds::from(time(quantile)));
    // A step that consists only of kernels and loads is captured and launched as one graph.
    let kernel_launch = if source.is_alone() { Seconds::ZERO } else { parameters.launch };
    let communication_launch = costs.exchange_launch(kind);
    let more_rows = more_rows(source, list, costs, kind);
    let launch_shares = PHASES.map(|phase| costs.launch_share(kind, phase));
    let operations = list.operations.first_instruction.iter().enumerate().map(|(number, &first)| {
        let instruction = &source.instructions[first as usize];
        let (durations, launch) = match *instruction.operation {
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
                        let durations = each(&|quantile| estimate.at(quantile) + parameters.instruction_overhead.at(quantile));
                        (durations, launch + kernel_launch)
                    })
                };
                match group.map(|group| members_in(group).map(|member| kernel.for_member(member))) {
                    None => estimate(kernel),
                    Some([one, other]) if one == other => estimate(one),
                    Some(both) => {
                        let [(durations, launch), (other, other_launch)] = both.map(estimate);
                        let mean = |quantile: Quantile| {
                            let [one, other] = [durations, other].map(|both| Seconds::from(both[quantile as usize]));
                            Picoseconds::from((one + other) * 0.5)
                        };
                        (QUANTILES.map(mean), (launch + other_launch) * 0.5)
                    }
                }
            }
            Operation::Load { .. } => {
                let buffers = instruction.writes.iter().filter_map(|buffer| source.buffers.get(buffer.0 as usize));
                let bytes: f64 = buffers.map(|buffer| buffer.bytes.value()).sum();
                (each(&|_| parameters.load_seconds_per_byte * bytes), Seconds::ZERO)
            }
            Operation::Write { bytes } => {
                let written = costs.storage.map_or(Seconds::ZERO, |storage| storage.latency + bytes / storage.write);
                (each(&|_| written), Seconds::ZERO)
            }
            Operation::Copy { bytes, .. } | Operation::Save { bytes, .. } => {
                let is_saved = matches!(*instruction.operation, Operation::Save { .. });
                let copy = if is_saved { costs.save_time(kind, bytes) } else { costs.copy_time(kind, bytes) };
                if !copy.source.is_calibrated() {
                    uncalibrated.insert(format!("copies between {} and its host", costs.kind_name(kind)));
                }
                (each(&|quantile| copy.at(quantile)), communication_launch)
            }
            Operation::Collective { .. } | Operation::Send { .. } => ([Picoseconds::ZERO; 3], communication_launch),
            Operation::Receive { .. } => ([Picoseconds::ZERO; 3], Seconds::ZERO),
            Operation::Traced { .. } => unreachable!("invariant: a draft has no operators of traced frameworks"),
        };
        let rows = more_rows.get(number).copied().unwrap_or(1.0);
        let durations = if rows > 1.0 { durations.map(|duration| (Seconds::from(duration) * rows).into()) } else { durations };
        (durations, launch_shares.map(|share| Picoseconds::from(launch * share)))
    });
    let (durations, launches): (Vec<_>, Vec<[Picoseconds; 4]>) = operations.unzip();
    let mut host = Picoseconds::ZERO;
    let launched = list.operations.of_instruction.iter().zip(&list.phases).map(|(&operation, &phase)| {
        host += launches[operation as usize][phase as usize];
        host
    });
    let launched: Vec<Picoseconds> = launched.collect();
    if host == Picoseconds::ZERO {
        return ListTimes { durations, ..ListTimes::default() };
    }
    ListTimes { durations, launched, host_waits: host_waits(source, list, parameters.host_waits) }
}

/// For each distinct operation, the factor that skewed routing puts on its duration: the rows on
/// the fullest rank of experts over the Program's slots, averaged over the operation's
/// instructions. 1 for operations without rows of experts, and for products of experts, whose costs
/// account for the rows. Empty if routing is balanced.
fn more_rows(source: &StageProgram, list: &LoweredList, costs: &CostModel, kind: usize) -> Vec<f64> {
    let Some(gpu) = costs.profiled_gpu(kind).filter(|gpu| gpu.has_skewed_routing()) else { return Vec::new() };
    let experts = ExpertRows::of(source);
    let mut sums = vec![(0.0, 0.0); list.operations.first_instruction.len()];
    for (instruction, &operation) in source.instructions.iter().zip(&list.operations.of_instruction) {
        let rows = experts.beside_products(instruction).map_or(1.0, |experts| gpu.rows_over_slots(experts));
        let (sum, count) = &mut sums[operation as usize];
        (*sum, *count) = (*sum + rows, *count + 1.0);
    }
    sums.into_iter().map(|(sum, count): (f64, f64)| sum / count.max(1.0)).collect()
}

/// For each instruction, whether the host waits for its end: a received message, or the last kernel
/// of a pass over a micro-batch.
fn host_waits(source: &StageProgram, list: &LoweredList, waits: HostWaits) -> Vec<bool> {
    let mut found: Vec<bool> = vec![false; list.actions.len()];
    let mut last: Option<(usize, (bool, Option<u32>))> = None;
    for (index, (action, &phase)) in list.actions.iter().zip(&list.phases).enumerate() {
        match action {
            Action::Receive { .. } => found[index] = waits.for_messages,
            Action::Compute if waits.between_passes && phase != Phase::Update => {
                let pass = (phase == Phase::Forward, source.instructions[index].micro_batch);
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
