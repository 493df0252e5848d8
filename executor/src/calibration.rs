//! Calibration on a rank's side: times the executor's own kernels, communication and interpreter.
//! The launcher's side is `calibrate.rs`.
//!
//! All ranks time the same thing at the same moment, so that they share the memory's bandwidth as
//! in a training run.

mod cpu_kernels;
mod gpu_communication;
mod gpu_kernels;
mod host_communication;
mod input;
mod overheads;
mod statistics;
mod storage;

pub use input::input_costs;
pub use storage::storage_costs;

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
use foretell_models::{InputKind, Kernel, Model, SampleShape};
use foretell_units::{Bytes, Seconds};
use gpu_kernels::GpuKernelTimer;
use statistics::{Measurements, summarise};
use std::sync::Arc;

/// The least and the most durations of one item.
const MIN_DURATIONS: usize = 5;
const MAX_DURATIONS: usize = 400;
/// The least and the most passes over all kernels.
const MIN_PASSES: usize = 6;
const MAX_PASSES: usize = 500;
/// So small that timed optimizers do not change the parameters.
const LEARNING_RATE: f32 = 1e-6;

/// Runs a calibration as one of its ranks.
pub(crate) fn measure(member: &Member, job: &CalibrationJob) -> Result<(), ExecutorError> {
    let all_ranks: Vec<usize> = (0..member.world_size).collect();
    let mut everyone = Group::new(Arc::clone(&member.transport), &all_ranks, OUTSIDE_PROGRAMS)?;
    let partial = job.devices.get(member.rank.0).filter(|device| device.is_partial());
    let cpu_fraction = time_kernels(member, job, partial, &mut everyone)?;
    let direct = member.device.as_ref().filter(|driver| driver.collectives().is_some());
    let (communication_share, communication_growth) = match direct {
        Some(driver) => time_gpu_communication(member, driver, job, &mut everyone)?,
        None => (host_communication::measure(member, job, &mut everyone)?, None),
    };
    everyone.barrier()?;
    let mut overheads = overheads::measure(member, job.bytes_between_communications)?;
    overheads.communication_share = communication_share;
    overheads.communication_growth = communication_growth;
    if let Some(device) = partial {
        overheads.scale_to_whole_core(cpu_fraction.min(device.speed));
    }
    if let Some(model) = &job.model {
        overheads.load_seconds_per_byte = time_loading(model)?;
    }
    everyone.barrier()?;
    member.control.send(&Report::Overheads(overheads))?;
    member.control.send(&Report::Finished { arena: Bytes::ZERO })?;
    Ok(())
}

/// Times all kernels, pass after pass, and reports the samples. Returns the fraction of the time
/// for which this rank had its device.
fn time_kernels(
    member: &Member,
    job: &CalibrationJob,
    partial: Option<&CalibratedDevice>,
    everyone: &mut Group,
) -> Result<f64, ExecutorError> {
    let mut gpu = member.device.as_ref().map(|driver| GpuKernelTimer::new(driver, job)).transpose()?;
    let clock = if partial.is_some() { clock::thread_cpu_time } else { clock::now };
    let mut cpu = if gpu.is_none() { Some(CpuKernelTimer::new(member, job, clock)?) } else { None };
    let mut measurements = Measurements::new(cpu.as_ref().map_or(job.kernels.len(), CpuKernelTimer::items));
    let started = clock::now();
    let mut passes = 0;
    let mut more = !job.kernels.is_empty();
    while more {
        if let Some(cpu) = &mut cpu {
            cpu.run_pass(everyone, &mut measurements)?;
        }
        if let Some(gpu) = &mut gpu {
            for (index, (kernel, accumulate)) in job.kernels.iter().enumerate() {
                everyone.barrier()?;
                let reuse_distances = job.reuse_distances.get(index).map_or(&[][..], Vec::as_slice);
                let time = job.time_per_item / MIN_PASSES as f64;
                measurements.add(index, gpu.time(kernel, *accumulate, reuse_distances, time)?);
            }
        }
        passes += 1;
        let pass_fraction = passes as f64 / MIN_PASSES as f64;
        let time_fraction = (clock::now() - started) as f64 * 1e-9 / job.least_duration.value().max(1e-3);
        member.control.send(&Report::Progress(pass_fraction.min(time_fraction).min(1.0)))?;
        more = first_ranks_choice(everyone, passes < MAX_PASSES && (pass_fraction < 1.0 || time_fraction < 1.0))?;
    }
    if let Some(sample) = cpu.as_ref().and_then(CpuKernelTimer::reference) {
        member.control.send(&Report::Reference(sample))?;
    }
    let samples = match cpu {
        Some(cpu) => cpu.samples(&measurements),
        None => measurements.samples().into_iter().enumerate().collect(),
    };
    for (index, sample) in samples {
        member.control.send(&Report::Kernel { index, sample })?;
    }
    member.control.send(&Report::Paces(measurements.paces()))?;
    if partial.is_some_and(|device| device.speed < 1.0 && device.ranks_on_core == 1) && !job.kernels.is_empty() {
        member.control.send(&Report::Speed(measurements.device_fraction()))?;
    }
    Ok(measurements.device_fraction())
}

/// Times communication between GPUs and reports the samples. Returns the fraction of the GPU that
/// communication takes and its growth beside a kernel, if they were measured.
fn time_gpu_communication(
    member: &Member,
    driver: &Arc<dyn Driver>,
    job: &CalibrationJob,
    everyone: &mut Group,
) -> Result<(f64, Option<f64>), ExecutorError> {
    let (timed, slowdown) = gpu_communication::measure(driver, &member.transport, member.rank.0, job, everyone)?;
    let (share, growth) = slowdown.map_or((0.0, None), |slowdown| {
        let (share, growth) = slowdown.share_and_growth();
        (share, Some(growth))
    });
    for one in timed {
        member.control.send(&one.report())?;
    }
    Ok((share, growth))
}

/// The error of a kernel that runs outside of a Program.
fn kernel_error(kernel: &Kernel, source: BackendError) -> ExecutorError {
    ExecutorError::Kernel { instruction: 0, name: kernel.name().into(), source }
}

/// A group of the job, while its communication is timed.
#[derive(Clone, Copy, Debug)]
struct GroupTurn<'a> {
    /// The group's index in the job.
    index: usize,
    wanted: &'a CalibratedGroup,
    /// Whether all ranks are in the group.
    is_everyone: bool,
}

/// Calls `body` for each group of the job that this rank is in. The groups take turns: while one is
/// timed, all other ranks wait.
fn for_each_group(
    job: &CalibrationJob,
    transport: &Arc<dyn Transport>,
    rank: usize,
    everyone: &mut Group,
    mut body: impl FnMut(GroupTurn<'_>, &mut Group) -> Result<(), ExecutorError>,
) -> Result<(), ExecutorError> {
    for (index, wanted) in job.groups.iter().enumerate() {
        everyone.barrier()?;
        if wanted.ranks.len() < 2 || !wanted.ranks.contains(&rank) {
            continue;
        }
        let is_everyone = wanted.ranks.len() == everyone.size();
        // A pair of ranks has one channel per stream, so each group needs its own stream. They are
        // taken from the last one down; the group of all ranks has one already.
        let mut own = match is_everyone {
            true => None,
            false => Some(Group::new(Arc::clone(transport), &wanted.ranks, StreamNumber((STREAM_COUNT - index) as u16))?),
        };
        body(GroupTurn { index, wanted, is_everyone }, own.as_mut().unwrap_or(&mut *everyone))?;
    }
    Ok(everyone.barrier()?)
}

/// Broadcasts the first rank's choice, so that all ranks make the same one.
fn first_ranks_choice(group: &mut Group, mine: bool) -> Result<bool, ExecutorError> {
    let mut choice = [u8::from(mine)];
    group.broadcast(0, &mut choice)?;
    Ok(choice[0] != 0)
}

/// The time to prepare samples of a model, in seconds per byte.
fn time_loading(model: &Model) -> Result<Seconds, ExecutorError> {
    let shape = model.sample();
    let dataset = Arc::new(Dataset::open(&DataSource::default_for(&shape), &shape, 0)?);
    let count = 64.min(dataset.len(Split::Training));
    let kind = match shape {
        SampleShape::Pair { .. } => InputKind::SourceTokens,
        _ if shape.tokens().is_some() => InputKind::Tokens,
        _ => InputKind::Features,
    };
    let bytes = Bytes::new((count * dataset.sample_size() * 4) as u64);
    let arena = Arena::new(bytes)?;
    let operand = Operand {
        pointer: arena.at(Bytes::ZERO, bytes).expect("invariant: the arena is as long"),
        bytes: bytes.count() as usize,
    };
    let samples = Samples::new(dataset, Split::Training, 0, (0..count).collect());
    let mut seconds = Vec::new();
    for _ in 0..MIN_DURATIONS {
        let start = clock::now();
        // SAFETY: the operand is the whole arena, which nothing else uses.
        unsafe { samples.load(kind, None, 0, count, None, &operand) }?;
        seconds.push((clock::now() - start) as f64 * 1e-9);
    }
    Ok(summarise(seconds).median / bytes.value())
}
