//! A profile from matched steps: the duration of each kernel and each collective.
//!
//! A trace does not tell the costs that only a calibration separates, such as hand-overs between
//! streams and the pace of a shared machine. They are zero; the share of a device that
//! communication takes is that of usual hardware.

use super::matching::MatchedStep;
use foretell_models::Kernel;
use foretell_program::{
    Collective, Exchange, ExchangeSample, KernelSample, MachineIdentity, Operation, Profile, Program, Rank, Reach, Sample,
};
use foretell_units::{Seconds, quantile_place};
use std::collections::BTreeMap;

/// Where the traces were made.
#[derive(Clone, Debug)]
pub struct TracedMachine {
    /// Library name of the device.
    pub kind: String,
    /// The device's own name.
    pub device: String,
    /// Whether kernels ran on an accelerator.
    pub is_accelerator: bool,
    /// `gloo` or `nccl`.
    pub transport: String,
    /// When the traces were made, in seconds since 1970.
    pub measured_at: u64,
}

/// Bytes that a sender may be ahead of its receiver: the buffer of a socket.
const BUFFERED: u64 = 1 << 20;

/// Makes a profile of the matched steps of each rank.
pub fn traced_profile(program: &Program, ranks: &[Vec<MatchedStep>], machine: &TracedMachine) -> Profile {
    let mut kernels: BTreeMap<(Kernel, bool), Vec<u64>> = BTreeMap::new();
    let mut exchanges: BTreeMap<(Exchange, usize, u64), Vec<u64>> = BTreeMap::new();
    let mut gaps = Vec::new();
    for (rank, steps) in ranks.iter().enumerate() {
        let list = program.list_of(Rank(rank));
        gaps.extend(steps.iter().flat_map(|step| step.gaps.iter().copied()));
        for (index, instruction) in list.instructions.iter().enumerate() {
            match &*instruction.operation {
                Operation::Compute { kernel, accumulate, .. } => {
                    let times = steps.iter().filter_map(|step| step.busy.get(index).copied()).filter(|&busy| busy > 0);
                    kernels.entry((*kernel, *accumulate)).or_default().extend(times);
                }
                Operation::Collective { kind, group, bytes, .. } => {
                    let (Some(exchange), Some(group)) = (exchange(*kind), list.groups.get(group.0 as usize)) else { continue };
                    let members = group.members(&program.mesh, Rank(rank));
                    // The duration counts from the arrival of the last member, which has the
                    // shortest call.
                    let times = (0..steps.len()).filter_map(|step| {
                        let of_member = |member: &Rank| ranks.get(member.0)?.get(step)?.busy.get(index).copied();
                        members.iter().filter_map(of_member).filter(|&busy| busy > 0).min()
                    });
                    exchanges.entry((exchange, members.len(), bytes.count())).or_default().extend(times);
                }
                _ => {}
            }
        }
    }
    let zero = Sample { median: Seconds::ZERO, p10: Seconds::ZERO, p90: Seconds::ZERO, count: 0 };
    let kernels = kernels.into_iter().filter_map(|((kernel, accumulate), times)| {
        Some(KernelSample { kernel, accumulate, precision: program.precision, time: sample(times)? })
    });
    let exchanges = exchanges.into_iter().filter_map(|((exchange, ranks, bytes), times)| {
        Some(ExchangeSample { exchange, reach: Reach::Node, ranks, bytes, time: sample(times)?, processor: Seconds::ZERO })
    });
    Profile {
        schema_version: foretell_units::SchemaVersion,
        device: machine.kind.clone(),
        machine: MachineIdentity {
            device: machine.device.clone(),
            system: "a trace of PyTorch's profiler".into(),
            devices: ranks.len(),
            cores: None,
        },
        backend: if machine.is_accelerator { "cuda" } else { "cpu" }.into(),
        transport: machine.transport.clone(),
        measured_at: machine.measured_at,
        instruction_overhead: sample(gaps).unwrap_or(zero),
        stream_handoff: zero,
        step_overhead: zero,
        launch: Seconds::ZERO,
        load_seconds_per_byte: Seconds::ZERO,
        communication_share: if machine.is_accelerator { 0.0 } else { 1.0 },
        communication_growth: None,
        interruption: Seconds::ZERO,
        framework: None,
        buffered_bytes: BUFFERED,
        reference: None,
        paces: vec![1.0],
        speeds: Vec::new(),
        input: None,
        storage: None,
        kernels: kernels.collect(),
        exchanges: exchanges.collect(),
    }
}

fn exchange(kind: Collective) -> Option<Exchange> {
    match kind {
        Collective::AllReduce => Some(Exchange::AllReduce),
        Collective::ReduceScatter => Some(Exchange::ReduceScatter),
        Collective::AllGather => Some(Exchange::AllGather),
        Collective::AllToAll | Collective::Shift => None,
    }
}

/// Median and percentiles of times in nanoseconds. `None` without times.
fn sample(mut times: Vec<u64>) -> Option<Sample> {
    times.sort_unstable();
    let at = |share: f64| Some(Seconds::new(times[quantile_place(times.len(), share)?] as f64 * 1e-9));
    Some(Sample { median: at(0.5)?, p10: at(0.1)?, p90: at(0.9)?, count: times.len() })
}
