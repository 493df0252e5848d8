//! Calibration, a rank's side: times the executor's own kernels, transport and interpreter on this machine.
//!
//! All ranks time the same thing at the same moment, so that they share memory's bandwidth as they do in a run.

mod cpu_kernels;
mod gpu_communication;
mod gpu_kernels;
mod host_communication;
mod overheads;
mod statistics;

use crate::arena::Arena;
use crate::backend::cuda::Driver;
use crate::backend::{BackendError, Operand};
use crate::clock;
use crate::data::{DataSource, Dataset, Split};
use crate::error::ExecutorError;
use crate::interpreter::{OUTSIDE_PROGRAMS, STREAM_COUNT};
use crate::job::{CalibratedDevice, CalibratedGroup, CalibrationJob, Report};
use crate::member::Member;
use crate::samples::Samples;
use crate::transport::{Group, StreamNumber, Transport};
use cpu_kernels::CpuKernelTimer;
use foretell_models::{InputKind, Kernel, Model};
use foretell_units::{Bytes, Seconds};
use gpu_kernels::GpuKernelTimer;
use statistics::{Measurements, summarise};
use std::sync::Arc;

/// Durations of one thing are taken at least and at most so often.
const FEWEST: usize = 5;
const MOST: usize = 400;
/// How often the calibration goes through all kernels at least, and at most.
const PASSES: usize = 6;
const MOST_PASSES: usize = 500;
/// So small that nothing that is timed is learnt.
const LEARNING_RATE: f32 = 1e-6;

/// Does a calibration as one of its ranks.
pub(crate) fn measure(member: &Member, job: &CalibrationJob) -> Result<(), ExecutorError> {
    let everyone: Vec<usize> = (0..member.world_size).collect();
    let mut group = Group::new(Arc::clone(&member.transport), &everyone, OUTSIDE_PROGRAMS)?;
    let partial = job.devices.get(member.rank.0).filter(|device| device.is_partial());
    let processor_share = time_kernels(member, job, partial, &mut group)?;
    let direct = member.device.as_ref().filter(|driver| driver.collectives().is_some());
    let (communication_share, communication_growth) = match direct {
        Some(driver) => time_direct_exchanges(member, driver, job, &mut group)?,
        None => (host_communication::time_exchanges(member, job, &mut group)?, None),
    };
    group.barrier()?;
    let mut measured = overheads::measure(member, job.bytes_between_communications)?;
    measured.communication_share = communication_share;
    measured.communication_growth = communication_growth;
    if let Some(device) = partial {
        measured.at_speed(processor_share.min(device.speed));
    }
    if let Some(model) = &job.model {
        measured.load_seconds_per_byte = time_loading(model)?;
    }
    group.barrier()?;
    member.control.send(&Report::Overheads(measured))?;
    member.control.send(&Report::Finished { arena: Bytes::ZERO })?;
    Ok(())
}

/// Times all kernels, pass after pass. Returns the share of the time for which this rank had its processor.
fn time_kernels(
    member: &Member,
    job: &CalibrationJob,
    partial: Option<&CalibratedDevice>,
    group: &mut Group,
) -> Result<f64, ExecutorError> {
    let mut bench = GpuKernelTimer::new(member, job)?;
    let clock = if partial.is_some() { clock::thread_cpu_time } else { clock::now };
    let mut passages = if bench.is_none() { Some(CpuKernelTimer::new(member, job, clock)?) } else { None };
    let mut measurements = Measurements::new(passages.as_ref().map_or(job.kernels.len(), CpuKernelTimer::count));
    let started = clock::now();
    let mut passes = 0;
    let mut go_on = !job.kernels.is_empty();
    while go_on {
        if let Some(passages) = &mut passages {
            passages.run(group, &mut measurements)?;
        }
        if let Some(bench) = &mut bench {
            for (index, (kernel, accumulate)) in job.kernels.iter().enumerate() {
                group.barrier()?;
                let reuse = job.reuse_distances.get(index).map_or(&[][..], Vec::as_slice);
                measurements.add(index, bench.time(kernel, *accumulate, reuse, job.time_per_item / PASSES as f64)?);
            }
        }
        passes += 1;
        let share = passes as f64 / PASSES as f64;
        let elapsed = (clock::now() - started) as f64 * 1e-9 / job.least_duration.value().max(1e-3);
        member.control.send(&Report::Progress(share.min(elapsed).min(1.0)))?;
        go_on = agree(group, passes < MOST_PASSES && (share < 1.0 || elapsed < 1.0))?;
    }
    let samples = passages
        .map_or_else(|| measurements.samples().into_iter().enumerate().collect(), |passages| passages.samples(&measurements));
    for (index, sample) in samples {
        member.control.send(&Report::Kernel { index, sample })?;
    }
    member.control.send(&Report::Paces(measurements.paces()))?;
    if partial.is_some_and(|device| device.speed < 1.0 && device.ranks_on_core == 1) && !job.kernels.is_empty() {
        member.control.send(&Report::Speed(measurements.share()))?;
    }
    Ok(measurements.share())
}

/// Times the exchanges from GPU to GPU. Returns the share of the GPU that they take beside kernels, and how fast they grow there, if that was measured.
fn time_direct_exchanges(
    member: &Member,
    driver: &Arc<dyn Driver>,
    job: &CalibrationJob,
    group: &mut Group,
) -> Result<(f64, Option<f64>), ExecutorError> {
    let (timed, slowdown) = gpu_communication::measure(driver, &member.transport, member.rank.0, job, group)?;
    let (share, growth) = slowdown.map_or((0.0, None), |slowdown| {
        let (share, growth) = slowdown.share_and_growth();
        (share, Some(growth))
    });
    for one in timed {
        member.control.send(&one.report())?;
    }
    Ok((share, growth))
}

/// The error of a kernel that is run by itself.
fn kernel_error(kernel: &Kernel, source: BackendError) -> ExecutorError {
    ExecutorError::Kernel { instruction: 0, name: kernel.name().into(), source }
}

/// A group of a calibration's whose turn it is.
#[derive(Clone, Copy, Debug)]
struct Turn<'a> {
    number: usize,
    wanted: &'a CalibratedGroup,
    /// Whether all ranks are in it.
    is_everyone: bool,
}

/// Has `body` time the groups of a job that this rank is in, one group after the other while all others wait.
fn each_group(
    job: &CalibrationJob,
    transport: &Arc<dyn Transport>,
    rank: usize,
    everyone: &mut Group,
    mut body: impl FnMut(Turn<'_>, &mut Group) -> Result<(), ExecutorError>,
) -> Result<(), ExecutorError> {
    for (number, wanted) in job.groups.iter().enumerate() {
        everyone.barrier()?;
        if wanted.ranks.len() < 2 || !wanted.ranks.contains(&rank) {
            continue;
        }
        let is_everyone = wanted.ranks.len() == everyone.size();
        // A pair of ranks has one channel on each stream, so each group takes one of its own, from the last down.
        let mut own = match is_everyone {
            true => None,
            false => Some(Group::new(Arc::clone(transport), &wanted.ranks, StreamNumber((STREAM_COUNT - number) as u16))?),
        };
        body(Turn { number, wanted, is_everyone }, own.as_mut().unwrap_or(&mut *everyone))?;
    }
    Ok(everyone.barrier()?)
}

/// Everyone goes on, or everyone stops: the first rank decides.
fn agree(group: &mut Group, mine: bool) -> Result<bool, ExecutorError> {
    let mut decision = [u8::from(mine)];
    group.broadcast(0, &mut decision)?;
    Ok(decision[0] != 0)
}

/// Seconds a byte of prepared samples.
fn time_loading(model: &Model) -> Result<Seconds, ExecutorError> {
    let shape = model.sample();
    let dataset = Arc::new(Dataset::open(&DataSource::default_for(&shape), &shape, 0)?);
    let count = 64.min(dataset.len(Split::Training));
    let kind = match shape {
        foretell_models::SampleShape::Pair { .. } => InputKind::SourceTokens,
        _ if shape.tokens().is_some() => InputKind::Tokens,
        _ => InputKind::Features,
    };
    let bytes = Bytes::new((count * dataset.sample_size() * 4) as u64);
    let arena = Arena::new(bytes)?;
    let operand =
        Operand { pointer: arena.at(Bytes::ZERO, bytes).unwrap_or(std::ptr::null_mut()), bytes: bytes.count() as usize };
    let samples = Samples { indices: (0..count).collect(), dataset, split: Split::Training };
    let mut seconds = Vec::new();
    for _ in 0..FEWEST {
        let start = clock::now();
        // SAFETY: the operand is the whole arena, which nobody else has.
        unsafe { samples.load(kind, None, 0, count, &operand) }?;
        seconds.push((clock::now() - start) as f64 * 1e-9);
    }
    Ok(summarise(seconds).median / bytes.value())
}
