//! Calibration on the launcher's side: starts the ranks, collects their samples and makes a
//! profile. The ranks' side is `calibration.rs`.

use crate::backend_kind::BackendKind;
use crate::error::ExecutorError;
use crate::job::{CalibrationJob, Job, Overheads, Report};
use crate::launcher::{LaunchOptions, News, Ranks};
use crate::machine;
use crate::transport::{SegmentShape, TransportKind};
use foretell_program::{Exchange, ExchangeSample, KernelSample, MachineIdentity, Profile, RelativeSpeed, Sample};
use foretell_units::{Bytes, Seconds, middles};
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Number of quantiles of the partial devices' paces in a profile.
const PACE_QUANTILES: usize = 16;

/// Bytes that the sockets of a lab's hosts buffer, at least, between a sender and its receiver.
const LAB_SOCKET_BYTES: u64 = 512 << 10;

/// Times the kernels and the communication of `job` on `devices` devices of this machine at once.
/// `device` is the topology's name for their kind. `progress` is called with the fraction that is
/// done, from 0 to 1.
///
/// # Errors
/// [`ExecutorError`] if a rank died, or a kernel refused its sizes.
pub fn calibrate(
    job: &CalibrationJob,
    devices: usize,
    device: &str,
    options: &LaunchOptions,
    progress: &mut dyn FnMut(f64),
) -> Result<Profile, ExecutorError> {
    let mut ranks = Ranks::start(devices, &Job::Calibrate(Box::new(job.clone())), options)?;
    let mut measurements = RankMeasurements::default();
    let mut running = devices;
    while running > 0 {
        // Ranks of a calibration cannot leave, so only their reports matter.
        let News::Report(rank, report) = ranks.next()? else { continue };
        match report {
            Report::Progress(fraction) => progress(fraction),
            Report::Finished { .. } => running -= 1,
            report => measurements.add(job, rank, report)?,
        }
    }
    ranks.finish()?;
    Ok(measurements.profile(job, devices, device, options))
}

/// The measurements of all ranks.
#[derive(Default)]
struct RankMeasurements {
    /// By the kernel's index in the job, one sample per rank.
    kernels: BTreeMap<usize, Vec<Sample>>,
    /// By group, kind and bytes, the duration and the device's busy time, one pair per rank.
    exchanges: BTreeMap<(usize, Exchange, u64), Vec<(Sample, Seconds)>>,
    /// By kind of device, the fraction of a core's time that each partial device got.
    speeds: BTreeMap<String, Vec<f64>>,
    /// One per rank.
    overheads: Vec<Overheads>,
    paces: Vec<f64>,
    /// The reference kernel, one per rank.
    references: Vec<Sample>,
}

impl RankMeasurements {
    fn add(&mut self, job: &CalibrationJob, rank: usize, report: Report) -> Result<(), ExecutorError> {
        match report {
            Report::Kernel { index, sample } => self.kernels.entry(index).or_default().push(sample),
            Report::Paces(measured) => self.paces.extend(measured),
            Report::Speed(speed) => {
                if let Some(device) = job.devices.get(rank) {
                    self.speeds.entry(device.kind.clone()).or_default().push(speed);
                }
            }
            Report::Exchange { group, exchange, bytes, sample, processor } => {
                self.exchanges.entry((group, exchange, bytes.count())).or_default().push((sample, processor));
            }
            Report::Reference(sample) => self.references.push(sample),
            Report::Overheads(measured) => self.overheads.push(measured),
            Report::Steps(_)
            | Report::Evaluation(_)
            | Report::Scores(_)
            | Report::CheckpointWritten { .. }
            | Report::CheckpointPart { .. }
            | Report::Turns { .. } => {
                return Err(ExecutorError::unexpected_report("a report of training while it calibrates", rank));
            }
            // A signal stops a calibration at once, so it needs no agreement on a last step.
            Report::Held { .. } => {}
            Report::Progress(_)
            | Report::Finished { .. }
            | Report::AskedToStop { .. }
            | Report::Starved(_)
            | Report::Sent { .. }
            | Report::Failed { .. } => unreachable!("invariant: the launcher's loop takes these"),
        }
        Ok(())
    }

    fn profile(self, job: &CalibrationJob, devices: usize, device: &str, options: &LaunchOptions) -> Profile {
        let kernels = self.kernels.iter().filter_map(|(&index, samples)| {
            let &(kernel, accumulate) = job.kernels.get(index)?;
            Some(KernelSample { kernel, accumulate, precision: job.precision, time: combine(samples) })
        });
        let exchanges = self.exchanges.iter().filter_map(|(&(group, exchange, bytes), measured)| {
            let group = job.groups.get(group)?;
            let samples: Vec<Sample> = measured.iter().map(|(sample, _)| *sample).collect();
            let processor = measured.iter().map(|(_, processor)| *processor).sum::<Seconds>() / measured.len() as f64;
            let ranks = if exchange == Exchange::SendReceive { 2 } else { group.ranks.len() };
            Some(ExchangeSample { exchange, reach: group.reach, ranks, bytes, time: combine(&samples), processor })
        });
        let overheads = &self.overheads;
        let combined = |part: fn(&Overheads) -> Sample| combine(&overheads.iter().map(part).collect::<Vec<_>>());
        let mean = |part: fn(&Overheads) -> f64| overheads.iter().map(part).sum::<f64>() / overheads.len().max(1) as f64;
        let growths: Vec<f64> = overheads.iter().filter_map(|overheads| overheads.communication_growth).collect();
        let speeds = self.speeds.iter().map(|(kind, speeds)| RelativeSpeed {
            device: kind.clone(),
            speed: speeds.iter().sum::<f64>() / speeds.len() as f64,
        });
        // Only a lab assigns slots to ranks.
        let is_lab = !options.slots.is_empty();
        let cores = is_lab.then(|| machine::core_count().min(devices));
        let transport = if options.backend.is_direct(devices) {
            "nccl"
        } else if options.transport == TransportKind::Tcp || is_lab {
            "tcp"
        } else if options.transport == TransportKind::Mpi {
            "mpi"
        } else {
            "shared_memory"
        };
        Profile {
            schema_version: foretell_units::SchemaVersion,
            device: device.into(),
            // The caller measures input: it knows the data set.
            input: None,
            storage: None,
            machine: MachineIdentity { cores, ..identity(devices, options) },
            backend: options.backend.name().into(),
            transport: transport.into(),
            measured_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            instruction_overhead: combined(|overheads| overheads.instruction),
            stream_handoff: combined(|overheads| overheads.handoff),
            step_overhead: combined(|overheads| overheads.step),
            launch: Seconds::new(mean(|overheads| overheads.launch.value())),
            load_seconds_per_byte: Seconds::new(mean(|overheads| overheads.load_seconds_per_byte.value())),
            communication_share: mean(|overheads| overheads.communication_share),
            communication_growth: (!growths.is_empty()).then(|| growths.iter().sum::<f64>() / growths.len() as f64),
            // The core goes to the other stream's thread and back.
            interruption: combined(|overheads| overheads.handoff).median * 2.0,
            framework: None,
            buffered_bytes: match (options.transport, is_lab) {
                (_, true) => LAB_SOCKET_BYTES,
                (TransportKind::Tcp | TransportKind::Mpi, false) => 0,
                (TransportKind::SharedMemory, false) => SegmentShape::DEFAULT_RING_BYTES as u64,
            },
            reference: (!self.references.is_empty()).then(|| combine(&self.references)),
            paces: quantiles(self.paces),
            speeds: speeds.collect(),
            kernels: kernels.collect(),
            exchanges: exchanges.collect(),
        }
    }
}

/// The identity of the measured machine. With GPUs, the device is the GPU.
fn identity(devices: usize, options: &LaunchOptions) -> MachineIdentity {
    let identity = machine::identity(devices);
    match (options.backend, crate::backend::devices()) {
        (BackendKind::Cuda { .. }, Ok(gpus)) => {
            MachineIdentity { device: gpus.into_iter().next().map_or(identity.device, |gpu| gpu.name), ..identity }
        }
        _ => identity,
    }
}

/// Quantiles of the paces, at equal steps of probability.
fn quantiles(mut paces: Vec<f64>) -> Vec<f64> {
    paces.retain(|pace| pace.is_finite());
    paces.sort_by(f64::total_cmp);
    middles(&paces, PACE_QUANTILES)
}

/// Combines the samples of several ranks: the mean of their medians, and their widest spread.
fn combine(samples: &[Sample]) -> Sample {
    let median = samples.iter().map(|sample| sample.median).sum::<Seconds>() / samples.len().max(1) as f64;
    let p10 = samples.iter().map(|sample| sample.p10).fold(median, Seconds::min);
    let p90 = samples.iter().map(|sample| sample.p90).fold(median, Seconds::max);
    Sample { median, p10, p90, count: samples.iter().map(|sample| sample.count).sum() }
}

/// The message sizes that a calibration times: 1 KiB to 64 MiB, by factors of 4.
pub fn message_sizes() -> Vec<Bytes> {
    (0..=8).map(|power| Bytes::new(1 << (10 + 2 * power))).collect()
}
