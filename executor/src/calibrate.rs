//! A calibration from the launcher's side: starts a rank on each core, collects what they time, makes the profile.

use crate::backend_kind::BackendKind;
use crate::error::ExecutorError;
use crate::job::{CalibrationJob, Job, Overheads, Report};
use crate::launcher::{LaunchOptions, Ranks, TransportKind};
use crate::machine;
use crate::transport::SegmentShape;
use foretell_program::{Exchange, ExchangeSample, KernelSample, MachineIdentity, Profile, RelativeSpeed, Sample};
use foretell_units::{Bytes, Seconds};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Quantiles of the devices' paces that a profile keeps.
const PACES: usize = 16;

/// What the sockets of a lab's hosts hold between a sender and its receiver, at least.
const LAB_SOCKET_BYTES: u64 = 512 << 10;

/// Times the kernels of `job` on `devices` cores of this machine at once, and their transport; `device` is the kind that the topology calls them.
/// `progress` is told the share that is done, from 0 to 1.
///
/// # Errors
/// [`ExecutorError`]: a rank died, or a kernel refused its sizes.
pub fn calibrate(
    job: &CalibrationJob,
    devices: usize,
    device: &str,
    options: &LaunchOptions,
    progress: &mut dyn FnMut(f64),
) -> Result<Profile, ExecutorError> {
    let mut ranks = Ranks::start(devices, &Job::Calibrate(Box::new(job.clone())), options)?;
    let mut kernels: BTreeMap<usize, Vec<Sample>> = BTreeMap::new();
    let mut exchanges: BTreeMap<(usize, Exchange, u64), Vec<(Sample, Seconds)>> = BTreeMap::new();
    let mut speeds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut overheads: Vec<Overheads> = Vec::new();
    let mut paces: Vec<f64> = Vec::new();
    let mut running = devices;
    while running > 0 {
        let (rank, report) = ranks.next()?;
        match report {
            Report::Progress(share) => progress(share),
            Report::Kernel { index, sample } => kernels.entry(index).or_default().push(sample),
            Report::Paces(found) => paces.extend(found),
            Report::Speed(speed) => {
                if let Some(device) = job.devices.get(rank) {
                    speeds.entry(device.kind.clone()).or_default().push(speed);
                }
            }
            Report::Exchange { group, exchange, bytes, sample, processor } => {
                exchanges.entry((group, exchange, bytes.count())).or_default().push((sample, processor));
            }
            Report::Overheads(measured) => overheads.push(measured),
            Report::Finished { .. } => running -= 1,
            _ => {}
        }
    }
    ranks.finish()?;
    let kernels = kernels.iter().filter_map(|(&index, samples)| {
        let &(kernel, accumulate) = job.kernels.get(index)?;
        Some(KernelSample { kernel, accumulate, precision: job.precision, time: together(samples) })
    });
    let exchanges = exchanges.iter().filter_map(|(&(group, exchange, bytes), measured)| {
        let group = job.groups.get(group)?;
        let samples: Vec<Sample> = measured.iter().map(|(sample, _)| *sample).collect();
        let processor = measured.iter().map(|(_, processor)| *processor).sum::<Seconds>() / measured.len() as f64;
        let ranks = if exchange == Exchange::SendReceive { 2 } else { group.ranks.len() };
        Some(ExchangeSample { exchange, reach: group.reach, ranks, bytes, time: together(&samples), processor })
    });
    let each = |part: fn(&Overheads) -> Sample| together(&overheads.iter().map(part).collect::<Vec<_>>());
    let mean = |part: fn(&Overheads) -> f64| overheads.iter().map(part).sum::<f64>() / overheads.len().max(1) as f64;
    let cores = (!options.slots.is_empty()).then(|| machine::core_count().min(devices));
    let slow_kinds = speeds
        .iter()
        .map(|(kind, speeds)| RelativeSpeed { device: kind.clone(), speed: speeds.iter().sum::<f64>() / speeds.len() as f64 });
    Ok(Profile {
        device: device.into(),
        machine: MachineIdentity { cores, ..identity(devices, options) },
        backend: options.backend.name().into(),
        transport: if options.backend.is_direct(devices) {
            "nccl"
        } else if options.transport == TransportKind::Tcp || cores.is_some() {
            "tcp"
        } else {
            "shared_memory"
        }
        .into(),
        measured_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        instruction_overhead: each(|overheads| overheads.instruction),
        stream_handoff: each(|overheads| overheads.handoff),
        step_overhead: each(|overheads| overheads.step),
        launch: Seconds::new(mean(|overheads| overheads.launch.value())),
        load_seconds_per_byte: Seconds::new(mean(|overheads| overheads.load_seconds_per_byte.value())),
        communication_share: mean(|overheads| overheads.communication_share),
        communication_growth: {
            let known: Vec<f64> = overheads.iter().filter_map(|overheads| overheads.communication_growth).collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        },
        // There and back again.
        interruption: each(|overheads| overheads.handoff).median * 2.0,
        buffered_bytes: match (options.transport, options.slots.is_empty()) {
            (_, false) => LAB_SOCKET_BYTES,
            (TransportKind::Tcp, true) => 0,
            (TransportKind::SharedMemory, true) => SegmentShape::DEFAULT_RING_BYTES as u64,
        },
        paces: quantiles(paces),
        speeds: slow_kinds.collect(),
        kernels: kernels.collect(),
        exchanges: exchanges.collect(),
    })
}

/// The machine that was measured; of GPUs their name is the device's.
fn identity(devices: usize, options: &LaunchOptions) -> MachineIdentity {
    let identity = machine::identity(devices);
    match (options.backend, crate::backend::devices()) {
        (BackendKind::Cuda { .. }, Ok(gpus)) => {
            MachineIdentity { device: gpus.into_iter().next().map_or(identity.device, |gpu| gpu.name), ..identity }
        }
        _ => identity,
    }
}

/// The quantiles of paces at equal steps of probability.
fn quantiles(mut paces: Vec<f64>) -> Vec<f64> {
    paces.retain(|pace| pace.is_finite());
    paces.sort_by(f64::total_cmp);
    let at = |step: usize| paces.get((2 * step + 1) * paces.len() / (2 * PACES)).copied();
    (0..PACES).filter_map(at).collect()
}

/// What several ranks measured of the same thing: the mean of their medians, and the whole of their spread.
fn together(samples: &[Sample]) -> Sample {
    let median = samples.iter().map(|sample| sample.median).sum::<Seconds>() / samples.len().max(1) as f64;
    let p10 = samples.iter().map(|sample| sample.p10).fold(median, Seconds::min);
    let p90 = samples.iter().map(|sample| sample.p90).fold(median, Seconds::max);
    Sample { median, p10, p90, count: samples.iter().map(|sample| sample.count).sum() }
}

/// The sizes of messages that a calibration times: from 1 KiB to 64 MiB.
pub fn message_sizes() -> Vec<Bytes> {
    (0..=8).map(|power| Bytes::new(1 << (10 + 2 * power))).collect()
}
