//! Calibration, a rank's side: times the executor's own kernels, transport and interpreter on this machine.
//!
//! All ranks time the same thing at the same moment, so that they share memory's bandwidth as they do in a run. A kernel's operands are
//! spread over about as many bytes as a step touches: one timed over and over on the same few bytes would find them in the cache.

use crate::arena::Arena;
use crate::backend::cuda::{CudaTimer, DeviceAddress};
use crate::backend::{Backend, CpuBackend, Hyperparameters, KernelCall, Operand, operand_bytes, operand_types};
use crate::clock;
use crate::data::{DataSource, Dataset, Split};
use crate::error::ExecutorError;
use crate::half::Half;
use crate::job::{CalibratedDevice, CalibrationJob, Report};
use crate::line::{OWN_STREAM, STREAM_COUNT};
use crate::overheads;
use crate::rank::Member;
use crate::samples::Samples;
use crate::transport::{Group, StreamNumber};
use foretell_models::{InputKind, Kernel, Model};
use foretell_program::{Exchange, Sample};
use foretell_units::{Bytes, DataType, Seconds};
use statrs::statistics::{Data, OrderStatistics};
use std::sync::Arc;

/// Durations of one thing are taken at least and at most so often.
const FEWEST: usize = 5;
const MOST: usize = 400;
/// How often the calibration goes through all kernels at least, and at most.
const PASSES: usize = 6;
const MOST_PASSES: usize = 500;
/// Kernel time over which a device's pace is taken: shorter than its changes, longer than most steps' noise.
const WINDOW: f64 = 0.05;
/// The most sets of operands that a kernel takes turns on.
const MOST_SETS: u64 = 64;
/// The most bytes that a kernel's operands are spread over: beyond any second-level cache.
const MOST_FOOTPRINT: u64 = 32 << 20;
/// The same on a GPU: beyond its second-level cache of tens of megabytes.
const MOST_GPU_FOOTPRINT: u64 = 256 << 20;
/// Bytes of an operand in a GPU's memory that are made before they are repeated.
const FILLED: usize = 4 << 20;
/// How many sets further the next turn is: a prime beyond the most sets, so that all have their turn.
const STRIDE: usize = 67;

/// Does a calibration as one of its ranks.
pub(crate) fn measure(member: &Member, job: &CalibrationJob) -> Result<(), ExecutorError> {
    let everyone: Vec<usize> = (0..member.world_size).collect();
    let mut group = Group::new(Arc::clone(&member.transport), &everyone, OWN_STREAM)?;
    let mut bench = KernelBench::new(member, job, job.devices.get(member.rank.0).is_some_and(CalibratedDevice::is_partial))?;
    let partial = job.devices.get(member.rank.0).filter(|device| device.is_partial());
    let mut watch = Watch::new(job.kernels.len());
    let started = clock::now();
    let mut go_on = true;
    while go_on {
        for (index, (kernel, accumulate)) in job.kernels.iter().enumerate() {
            group.barrier()?;
            let reuse = job.reuse.get(index).map_or(&[][..], Vec::as_slice);
            watch.add(index, bench.time(kernel, *accumulate, reuse, job.patience / PASSES as f64)?);
        }
        let share = watch.passes() as f64 / PASSES as f64;
        let elapsed = (clock::now() - started) as f64 * 1e-9 / job.duration.value().max(1e-3);
        member.control.send(&Report::Progress(share.min(elapsed).min(1.0)))?;
        go_on = agree(&mut group, !job.kernels.is_empty() && watch.passes() < MOST_PASSES && (share < 1.0 || elapsed < 1.0))?;
    }
    for (index, sample) in watch.samples().into_iter().enumerate() {
        member.control.send(&Report::Kernel { index, sample })?;
    }
    member.control.send(&Report::Paces(watch.paces()))?;
    if partial.is_some_and(|device| device.speed < 1.0 && device.sharers == 1) && !job.kernels.is_empty() {
        member.control.send(&Report::Speed(watch.share()))?;
    }
    drop(bench);
    let share = time_exchanges(member, job, &mut group)?;
    group.barrier()?;
    let mut measured = overheads::measure(member)?;
    measured.communication_share = share;
    if let Some(device) = partial {
        measured.at_speed(watch.share().min(device.speed));
    }
    if let Some(model) = &job.model {
        measured.load_seconds_per_byte = time_loading(model)?;
    }
    group.barrier()?;
    member.control.send(&Report::Overheads(measured))?;
    member.control.send(&Report::Finished { arena: Bytes::ZERO })?;
    Ok(())
}

/// Times the exchanges of all groups, one group after the other while all others wait. Returns the share of the processor that an all-reduce
/// takes among all ranks.
fn time_exchanges(member: &Member, job: &CalibrationJob, everyone: &mut Group) -> Result<f64, ExecutorError> {
    let mut share = 0.0;
    for (number, wanted) in job.groups.iter().enumerate() {
        everyone.barrier()?;
        if wanted.ranks.len() < 2 || !wanted.ranks.contains(&member.rank.0) {
            continue;
        }
        let is_everyone = wanted.ranks.len() == member.world_size;
        // A pair of ranks has one channel on each stream, so each group takes one of its own, from the last down.
        let mut own = match is_everyone {
            true => None,
            false => {
                Some(Group::new(Arc::clone(&member.transport), &wanted.ranks, StreamNumber((STREAM_COUNT - number) as u16))?)
            }
        };
        let group = own.as_mut().unwrap_or(&mut *everyone);
        for &bytes in &wanted.messages {
            for &exchange in &wanted.exchanges {
                let (sample, processor) = time_exchange(group, exchange, bytes, job)?;
                // Of the longest messages: there the processor copies and adds, and hardly waits.
                if exchange == Exchange::AllReduce && is_everyone {
                    share = (processor / sample.median).clamp(0.0, 1.0);
                }
                // Of there and back only who sees both ways knows how long it took: the second rank's last send is done when it is on its way.
                if exchange != Exchange::SendReceive || group.position() == 0 {
                    member.control.send(&Report::Exchange { group: number, exchange, bytes, sample, processor })?;
                }
            }
        }
    }
    everyone.barrier()?;
    Ok(share)
}

/// What was timed so far, in the order in which it was.
///
/// On a machine that others use too a device changes its pace for a second at a time. So a kernel's sample is of its usual best over passes
/// that lie some time apart, and how much slower the device was from window to window is kept beside it.
struct Watch {
    /// By kernel: one sample a pass.
    samples: Vec<Vec<Sample>>,
    /// One a kernel and pass.
    visits: Vec<Visit>,
}

/// A kernel that was timed for a while.
struct Visit {
    kernel: usize,
    median: f64,
    /// The sum of its durations, and what passed by the clock on the wall.
    spent: f64,
    elapsed: f64,
}

impl Watch {
    fn new(kernels: usize) -> Self {
        Self { samples: vec![Vec::new(); kernels], visits: Vec::new() }
    }

    fn add(&mut self, kernel: usize, Timed { seconds, elapsed }: Timed) {
        let spent: f64 = seconds.iter().sum();
        let sample = summarise(seconds);
        self.visits.push(Visit { kernel, median: sample.median.value(), spent, elapsed });
        self.samples[kernel].push(sample);
    }

    /// The share of the time for which it had the processor.
    fn share(&self) -> f64 {
        let sum = |part: fn(&Visit) -> f64| self.visits.iter().map(part).sum::<f64>();
        let (spent, elapsed) = (sum(|visit| visit.spent), sum(|visit| visit.elapsed));
        if elapsed > 0.0 { (spent / elapsed).clamp(0.01, 1.0) } else { 1.0 }
    }

    /// How often all kernels have been timed.
    fn passes(&self) -> usize {
        self.samples.last().map_or(0, Vec::len)
    }

    /// The duration of a kernel that a fifth of its passes were below.
    fn best(&self, kernel: usize) -> f64 {
        let medians: Vec<f64> = self.samples[kernel].iter().map(|sample| sample.median.value()).collect();
        Data::new(medians).quantile(0.2).max(f64::MIN_POSITIVE)
    }

    /// Each kernel's sample at its usual best; its spread is that within a pass.
    fn samples(&self) -> Vec<Sample> {
        let all = self.samples.iter().enumerate();
        all.map(|(kernel, passes)| {
            let best = self.best(kernel);
            let spread = |part: fn(&Sample) -> Seconds| {
                let ratios = passes.iter().map(|sample| part(sample) / sample.median).filter(|ratio| ratio.is_finite());
                Seconds::new(best * Data::new(ratios.collect::<Vec<_>>()).median())
            };
            let median = Seconds::new(best);
            Sample {
                median,
                p10: spread(|sample| sample.p10).min(median),
                p90: spread(|sample| sample.p90).max(median),
                count: passes.iter().map(|sample| sample.count).sum(),
            }
        })
        .collect()
    }

    /// Durations over those of the usual best, in windows of [`WINDOW`] of kernel time.
    fn paces(&self) -> Vec<f64> {
        let best: Vec<f64> = (0..self.samples.len()).map(|kernel| self.best(kernel)).collect();
        let mut paces = Vec::new();
        let (mut spent, mut usual) = (0.0, 0.0);
        for visit in &self.visits {
            spent += visit.spent;
            usual += visit.spent * best[visit.kernel] / visit.median.max(f64::MIN_POSITIVE);
            if spent >= WINDOW {
                paces.push(spent / usual);
                (spent, usual) = (0.0, 0.0);
            }
        }
        paces
    }
}

/// Everyone goes on, or everyone stops: the first rank decides.
fn agree(group: &mut Group, mine: bool) -> Result<bool, ExecutorError> {
    let mut decision = [u8::from(mine)];
    group.broadcast(0, &mut decision)?;
    Ok(decision[0] != 0)
}

/// What is left of durations once those beyond three scaled median absolute deviations are gone (Leys et al. 2013).
pub(crate) fn summarise(mut seconds: Vec<f64>) -> Sample {
    let median = Data::new(seconds.clone()).median();
    let deviations: Vec<f64> = seconds.iter().map(|second| (second - median).abs()).collect();
    // 1.4826 makes the median absolute deviation of normal noise its standard deviation. A timer's resolution is always allowed.
    let allowed = (3.0 * 1.4826 * Data::new(deviations).median()).max(50e-9);
    seconds.retain(|second| (second - median).abs() <= allowed);
    let count = seconds.len();
    let mut kept = Data::new(seconds);
    Sample {
        median: Seconds::new(kept.median()),
        p10: Seconds::new(kept.quantile(0.1)),
        p90: Seconds::new(kept.quantile(0.9)),
        count,
    }
}

/// Durations of a kernel, and the time in which they were taken.
struct Timed {
    seconds: Vec<f64>,
    elapsed: f64,
}

/// Times kernels on sets of operands of their own.
struct KernelBench {
    /// What the durations are differences of: the time of a device that is not always running is the processor's. How cores are shared is not
    /// in the samples; the simulator has ranks share them.
    clock: fn() -> u64,
    processor: Processor,
    arena: Arena,
    footprint: u64,
    precision: DataType,
}

/// What runs the kernels that are timed.
enum Processor {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaTimer>),
}

/// The operands of a call, set by set.
struct OperandSets {
    sets: Vec<(Vec<Operand>, Vec<Operand>)>,
}

impl KernelBench {
    fn new(member: &Member, job: &CalibrationJob, is_partial: bool) -> Result<Self, ExecutorError> {
        let largest = job.kernels.iter().map(|(kernel, _)| set_bytes(kernel, job.precision)).max().unwrap_or(0);
        let most = if member.device.is_some() { MOST_GPU_FOOTPRINT } else { MOST_FOOTPRINT };
        let footprint = job.footprint.count().min(most);
        let arena = member.arena(Bytes::new(largest.max(footprint) + largest))?;
        let clock = if is_partial { clock::thread_processor_time } else { clock::now };
        let processor = match arena.driver() {
            Some(driver) => Processor::Cuda(Box::new(CudaTimer::new(driver)?)),
            None => Processor::Cpu(Box::default()),
        };
        Ok(Self { clock, processor, arena, footprint, precision: job.precision })
    }

    fn time(&mut self, kernel: &Kernel, accumulate: bool, reuse: &[Bytes], patience: Seconds) -> Result<Timed, ExecutorError> {
        let sets = self.operand_sets(kernel, reuse)?;
        let hyperparameters = Hyperparameters { learning_rate: 1e-6, momentum: 0.9, ..Hyperparameters::default() };
        let backend = match &mut self.processor {
            Processor::Cpu(backend) => backend,
            Processor::Cuda(timer) => {
                let (hyperparameters, precision) = (&hyperparameters, self.precision);
                let calls: Vec<KernelCall<'_>> = sets
                    .sets
                    .iter()
                    .map(|(reads, writes)| KernelCall {
                        kernel,
                        reads,
                        writes,
                        accumulate,
                        hyperparameters,
                        group_index: 0,
                        samples_before: 0,
                        precision,
                    })
                    .collect();
                let started = clock::now();
                // SAFETY: every operand is a place of its own in the arena, but where the kernel may work in place.
                let seconds = unsafe { timer.time(&calls, patience, FEWEST..MOST) }?;
                return Ok(Timed { seconds, elapsed: (clock::now() - started) as f64 * 1e-9 });
            }
        };
        let mut seconds = Vec::new();
        let mut spent = 0.0;
        let mut round = 0usize;
        let mut counted_from = None;
        while seconds.len() < FEWEST || (spent < patience.value() && seconds.len() < MOST) {
            let turn = round % sets.sets.len().max(1);
            let Some((reads, writes)) = sets.sets.get(turn) else { break };
            let (hyperparameters, precision) = (&hyperparameters, self.precision);
            let call =
                KernelCall { kernel, reads, writes, accumulate, hyperparameters, group_index: 0, samples_before: 0, precision };
            // The first round over the sets warms up.
            if round == sets.sets.len().min(8) {
                counted_from = Some(clock::now());
            }
            let start = (self.clock)();
            // SAFETY: every operand is a place of its own in the arena, but where the kernel may work in place.
            unsafe { backend.run(&call) }.map_err(|source| ExecutorError::Kernel {
                instruction: 0,
                name: kernel.name().into(),
                source,
            })?;
            let duration = ((self.clock)() - start) as f64 * 1e-9;
            if counted_from.is_some() {
                seconds.push(duration);
            }
            spent += duration;
            round += 1;
        }
        let elapsed = counted_from.map_or(0.0, |from| (clock::now() - from) as f64 * 1e-9);
        Ok(Timed { seconds, elapsed })
    }

    /// Gives each operand as many places as it takes to come back to one after `reuse` bytes, and fills them with numbers that are usual. Where
    /// nothing is said of the reuse, as many as fill the footprint.
    fn operand_sets(&mut self, kernel: &Kernel, reuse: &[Bytes]) -> Result<OperandSets, ExecutorError> {
        let bytes = operand_bytes(kernel, self.precision);
        let types = operand_types(kernel, self.precision);
        let one = set_bytes(kernel, self.precision).max(1);
        let most = (self.footprint / one).clamp(1, MOST_SETS);
        let mut offset = 0;
        let mut places = |index: usize, size: &Bytes, data_type: DataType, below: Option<usize>| {
            let count = reuse.get(index).map_or(most, |distance| (distance.count() / one).clamp(1, most));
            let mut place = || {
                let start = offset;
                offset += size.count().next_multiple_of(if self.arena.driver().is_some() { 256 } else { 64 });
                let pointer = self.arena.at(Bytes::new(start), *size).unwrap_or(std::ptr::null_mut());
                let operand = Operand { pointer, bytes: size.count() as usize };
                fill_in(&self.processor, &operand, data_type, below)?;
                Ok(operand)
            };
            (0..count).map(|_| place()).collect::<Result<Vec<Operand>, ExecutorError>>()
        };
        let side = bytes.reads.iter().zip(&types.reads).enumerate();
        let reads: Vec<Vec<Operand>> = side
            .map(|(index, (size, &data_type))| places(index, size, data_type, integers_of(kernel, index)))
            .collect::<Result<_, _>>()?;
        let side = bytes.writes.iter().zip(&types.writes).enumerate();
        let mut writes: Vec<Vec<Operand>> = side
            .map(|(index, (size, &data_type))| places(reads.len() + index, size, data_type, None))
            .collect::<Result<_, _>>()?;
        if let (Some(index), Some(write)) = (foretell_program::in_place_input(kernel), writes.first_mut()) {
            write.clone_from(&reads[index]);
        }
        let rounds = reads.iter().chain(&writes).map(Vec::len).max().unwrap_or(1);
        // Not in the order in which they lie: that would be fetched ahead.
        let turn = |round: usize, places: &Vec<Operand>| places[round.wrapping_mul(STRIDE) % places.len()];
        let set = |round: usize| {
            let side = |operands: &[Vec<Operand>]| operands.iter().map(|places| turn(round, places)).collect();
            (side(&reads), side(&writes))
        };
        Ok(OperandSets { sets: (0..rounds).map(set).collect() })
    }
}

/// The bytes of one set of a kernel's operands.
fn set_bytes(kernel: &Kernel, precision: DataType) -> u64 {
    let bytes = operand_bytes(kernel, precision);
    bytes.reads.iter().chain(&bytes.writes).map(|size| size.count().next_multiple_of(256)).sum()
}

/// What bounds the integers in a kernel's read, if they are integers.
fn integers_of(kernel: &Kernel, read: usize) -> Option<usize> {
    match (kernel, read) {
        (Kernel::Embedding { vocabulary, parts, .. }, 0) | (Kernel::EmbeddingWeightGradient { vocabulary, parts, .. }, 1) => {
            Some(vocabulary * parts)
        }
        (Kernel::LogitStatistics { classes, parts, .. } | Kernel::CrossEntropyGradient { classes, parts, .. }, 1) => {
            Some(classes * parts)
        }
        (Kernel::CrossEntropy { classes, .. }, 1) => Some(*classes),
        (Kernel::MaxPoolGradient(window), 1) => Some(window.input_elements()),
        (Kernel::RouteGradient { experts, .. }, 2) => Some(*experts),
        (Kernel::Dispatch(sizes) | Kernel::DispatchGradient(sizes), 1) => Some(sizes.experts),
        (Kernel::DispatchGradient(sizes), 2) => Some(sizes.capacity),
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 2) => {
            Some(sizes.experts)
        }
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 3) => {
            Some(sizes.capacity)
        }
        _ => None,
    }
}

/// Fills an operand, in a GPU's memory through the host's.
fn fill_in(processor: &Processor, operand: &Operand, data_type: DataType, below: Option<usize>) -> Result<(), ExecutorError> {
    let Processor::Cuda(timer) = processor else {
        fill(operand, data_type, below);
        return Ok(());
    };
    // The same numbers again and again: what a kernel does with them takes as long, and the host makes them slowly.
    let length = operand.bytes.min(FILLED);
    let mut words = vec![0_u32; length.div_ceil(4)];
    fill(&Operand { pointer: words.as_mut_ptr().cast(), bytes: length }, data_type, below);
    for start in (0..operand.bytes).step_by(FILLED) {
        let place = DeviceAddress::of(operand.pointer).after(start);
        // SAFETY: the place lies in the operand, which lies in the arena, and the words are as long.
        unsafe { timer.copy_in(place, words.as_ptr().cast(), length.min(operand.bytes - start)) }?;
    }
    Ok(())
}

/// Fills an operand with positive numbers around a half, or with integers below a bound, spread about.
fn fill(operand: &Operand, data_type: DataType, below: Option<usize>) {
    // Weyl's sequence: spread evenly, the same on every run.
    let spread = |index: usize| (index as u32).wrapping_mul(2_654_435_769);
    let number = |index: usize| spread(index) as f32 / u32::MAX as f32;
    let half = Half::of(data_type);
    for index in 0..operand.bytes / data_type.size().count() as usize {
        if let Some(half) = half {
            // SAFETY: the operand lies in the arena and is aligned; `index` is below its length.
            unsafe { operand.pointer.cast::<u16>().add(index).write(half.nearest(number(index))) };
            continue;
        }
        let bits = match below {
            Some(below) => ((u64::from(spread(index)) * below as u64) >> 32) as u32,
            None => number(index).to_bits(),
        };
        // SAFETY: as above.
        unsafe { operand.pointer.cast::<u32>().add(index).write(bits) };
    }
}

/// Rounds of an exchange between which nobody asks whether there are enough: what asking takes with it into the caches is not to help.
const ROUNDS: u8 = 8;

/// Times one kind of exchange of one size among all ranks; for send and receive between the first two. As in a step, ranks come to it from
/// other work, not from a barrier, and what they send was written as long before as a step writes it.
fn time_exchange(
    group: &mut Group,
    exchange: Exchange,
    bytes: Bytes,
    job: &CalibrationJob,
) -> Result<(Sample, Seconds), ExecutorError> {
    let (ranks, patience) = (group.size(), job.patience.value());
    let elements = (bytes.count() as usize / 4).next_multiple_of(ranks);
    // Between writing a place and sending it all others are written and sent.
    let between = nearest_reuse(&job.message_reuse, bytes).count() / (2 * bytes.count()).max(1);
    let most = (MOST_FOOTPRINT / bytes.count().max(1)).clamp(1, MOST_SETS);
    let mut places = vec![vec![1.0f32; elements]; (between + 1).min(most) as usize];
    let mut part = vec![1.0f32; elements / ranks];
    let mut seconds = Vec::new();
    let mut processor = 0.0;
    let mut spent = 0.0;
    let mut round = 0;
    let mut rounds = [1];
    group.barrier()?;
    while rounds[0] > 0 {
        for _ in 0..rounds[0] {
            // Numbers must not grow without end.
            let written = round % places.len();
            places[written].fill(1.0);
            let next = (round + 1) % places.len();
            let whole = &mut places[next];
            let (start, busy) = (clock::now(), clock::thread_processor_time());
            match exchange {
                Exchange::AllReduce => group.all_reduce_f32(whole)?,
                Exchange::ReduceScatter => group.reduce_scatter_f32(whole, &mut part)?,
                Exchange::AllGather => group.all_gather_f32(&part, whole)?,
                Exchange::SendReceive => there_and_back(group, whole)?,
            }
            let halves = if exchange == Exchange::SendReceive { 0.5 } else { 1.0 };
            let duration = (clock::now() - start) as f64 * 1e-9 * halves;
            // The first ones warm up.
            if round > 1 {
                seconds.push(duration);
                processor += (clock::thread_processor_time() - busy) as f64 * 1e-9 * halves;
            }
            spent += duration;
            round += 1;
        }
        // Of what takes very long a few must do.
        let fewest = if spent > 20.0 * patience { FEWEST.min(3) } else { FEWEST };
        let enough = seconds.len() >= fewest && (spent > patience || seconds.len() >= MOST);
        // The first rank decides for all. What is slow goes round by round.
        rounds[0] = if enough {
            0
        } else if spent > patience / 4.0 {
            1
        } else {
            ROUNDS
        };
        group.broadcast(0, &mut rounds)?;
    }
    let share = processor / seconds.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let sample = summarise(seconds);
    Ok((sample, sample.median * share))
}

/// What is said of the reuse of a message, or of the one nearest to it by ratio.
fn nearest_reuse(known: &[(Bytes, Bytes)], bytes: Bytes) -> Bytes {
    let ratio = |other: &Bytes| (other.value().max(1.0) / bytes.value().max(1.0)).ln().abs();
    let nearest = known.iter().min_by(|(one, _), (two, _)| ratio(one).total_cmp(&ratio(two)));
    nearest.map_or(Bytes::ZERO, |&(_, distance)| distance)
}

fn there_and_back(group: &mut Group, values: &mut [f32]) -> Result<(), ExecutorError> {
    // SAFETY: any bytes are `f32`s, and the slice covers just them.
    let bytes = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), values.len() * 4) };
    match group.position() {
        0 => {
            group.send(1, bytes)?;
            group.receive(1, bytes)?;
        }
        1 => {
            group.receive(0, bytes)?;
            group.send(0, bytes)?;
        }
        _ => {}
    }
    Ok(())
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
