//! Times communication between GPUs, and how much communication and kernels slow each other down.
//!
//! As in a step, both run on GPU streams of their own, and events time them. Knows no Programs.

use super::gpu_kernels::{GpuKernelTimer, RepeatedKernel};
use super::statistics::summarise;
use super::{MAX_DURATIONS, MIN_DURATIONS, for_each_group};
use crate::arena::{Arena, Arenas};
use crate::backend::cuda::{
    CommunicationKind, CommunicatorHandle, CommunicatorId, CudaError, DeviceAddress, DeviceCommunication, DeviceRange, Driver,
    StreamHandle, StreamTimer,
};
use crate::error::ExecutorError;
use crate::job::{CalibrationJob, Report};
use crate::transport::{Group, Transport};
use foretell_models::Kernel;
use foretell_program::{Exchange, Sample, Slowdown};
use foretell_units::{Bytes, DataType, Seconds};
use std::sync::Arc;

/// Communications between two events: enough that the cost of the events is negligible.
const COMMUNICATIONS_PER_ROW: usize = 8;
/// Kernels between two events when they run beside communication.
const KERNELS_PER_ROW: usize = 16;
/// Factor by which the concurrent work outlasts the timed work.
const COVER_FACTOR: f64 = 3.0;
/// The most kernels or communications that are queued as concurrent work.
const MAX_CONCURRENT: u32 = 2048;
/// The least duration to divide by, in seconds. Events have a resolution of half a microsecond.
const MIN_SECONDS: f64 = 1e-9;
/// The alignment of the written range behind the read range.
const ALIGNMENT: u64 = 4 << 10;
/// Bytes of an element.
const ELEMENT_BYTES: u64 = 4;
/// The size of the all-reduce that runs beside kernels: about a bucket of gradients.
const CONCURRENT_BYTES: Bytes = Bytes::new(64 << 20);

/// The measurement of one kind of communication at one size in one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct GpuCommunicationSample {
    /// The group's index in the job.
    group: usize,
    exchange: Exchange,
    bytes: Bytes,
    sample: Sample,
}

impl GpuCommunicationSample {
    /// The report to the launcher. The time that communication takes from the GPU is not reported
    /// per sample. It is known for the transfer, but not for the latency, which is most of a short
    /// communication. The profile has one fraction for all of them instead.
    pub(super) fn report(self) -> Report {
        let Self { group, exchange, bytes, sample } = self;
        Report::Exchange { group, exchange, bytes, sample, processor: Seconds::ZERO }
    }
}

/// Times the communication of all groups of a job that this rank is in. Then measures how much an
/// all-reduce among all ranks and the job's largest kernel slow each other down; `None` if the job
/// has no kernel or no group of all ranks.
pub(super) fn measure(
    driver: &Arc<dyn Driver>,
    transport: &Arc<dyn Transport>,
    rank: usize,
    job: &CalibrationJob,
    everyone: &mut Group,
) -> Result<(Vec<GpuCommunicationSample>, Option<Slowdown>), ExecutorError> {
    let longest = job.groups.iter().flat_map(|group| &group.messages).copied().fold(Bytes::new(4096), Bytes::max);
    let timer = CommunicationTimer::new(driver, longest, everyone.size())?;
    let mut timed = Vec::new();
    let mut all_ranks = None;
    for_each_group(job, transport, rank, everyone, |turn, group| {
        let whole = timer.join(group, group.size())?;
        let pair = match turn.wanted.exchanges.contains(&Exchange::SendReceive) {
            true => timer.join(group, 2)?,
            false => None,
        };
        for &bytes in &turn.wanted.messages {
            for &exchange in &turn.wanted.exchanges {
                let communicator = if exchange == Exchange::SendReceive { pair } else { whole };
                let sample = timer.time(group, communicator, exchange, bytes, job.time_per_item)?;
                timed.extend(sample.map(|sample| GpuCommunicationSample { group: turn.index, exchange, bytes, sample }));
            }
        }
        all_ranks = all_ranks.or(whole.filter(|_| turn.is_everyone));
        Ok(())
    })?;
    let largest = job.kernels.iter().max_by(|(kernel, _), (other, _)| kernel.flops().value().total_cmp(&other.flops().value()));
    // Either every rank has joined the communicator of all ranks, or none has.
    let slowdown = match (largest, all_ranks) {
        (Some((kernel, accumulate)), Some(communicator)) => {
            Some(timer.slowdown(job, everyone, communicator, (kernel, *accumulate))?)
        }
        _ => None,
    };
    Ok((timed, slowdown))
}

/// The bytes of one of `ranks` equal parts of `bytes`, rounded up to whole elements.
fn part_bytes(bytes: Bytes, ranks: usize) -> u64 {
    bytes.count().div_ceil(ELEMENT_BYTES * ranks as u64) * ELEMENT_BYTES
}

/// The bytes of a buffer for any communication of up to `longest` bytes among up to `ranks` ranks,
/// with the rounding of [`part_bytes`].
fn capacity_for(longest: Bytes, ranks: usize) -> Bytes {
    Bytes::new((longest.count() + ELEMENT_BYTES * ranks as u64).next_multiple_of(ALIGNMENT))
}

/// Queues communication on a stream of its own and times it.
struct CommunicationTimer {
    driver: Arc<dyn Driver>,
    /// The range that is read, and behind it the one that is written.
    arena: Arena,
    /// The size of each range.
    capacity: Bytes,
    /// The largest communication of the job.
    longest: Bytes,
    stream: StreamHandle,
    timer: StreamTimer,
}

impl CommunicationTimer {
    /// A timer for communication of up to `longest` bytes among up to `ranks` ranks.
    fn new(driver: &Arc<dyn Driver>, longest: Bytes, ranks: usize) -> Result<Self, ExecutorError> {
        let capacity = capacity_for(longest, ranks);
        Ok(Self {
            driver: Arc::clone(driver),
            arena: Arenas::new(capacity + capacity, Bytes::ZERO, Some(driver))?.device,
            capacity,
            longest,
            stream: driver.create_stream()?,
            timer: StreamTimer::new(driver)?,
        })
    }

    /// Joins a communicator of a group's first `size` ranks; `None` on the others.
    fn join(&self, group: &mut Group, size: usize) -> Result<Option<CommunicatorHandle>, ExecutorError> {
        let collectives = self.driver.collectives().ok_or(CudaError::Aborted)?;
        let mut id: CommunicatorId = [0; 128];
        if group.position() == 0 {
            id = collectives.new_communicator_id()?;
        }
        group.broadcast(0, &mut id)?;
        let position = group.position();
        Ok((position < size).then(|| collectives.join(&id, size, position)).transpose()?)
    }

    /// Times one kind of communication at one size; `None` if this rank takes no part in it. The
    /// wait for the last rank is left out: all ranks start a row together, after one communication
    /// that is not timed.
    fn time(
        &self,
        group: &mut Group,
        communicator: Option<CommunicatorHandle>,
        exchange: Exchange,
        bytes: Bytes,
        time: Seconds,
    ) -> Result<Option<Sample>, ExecutorError> {
        let (mut seconds, mut spent) = (Vec::new(), 0.0);
        let mut more = [1];
        while more[0] != 0 {
            group.barrier()?;
            if let Some(communicator) = communicator {
                let communication = self.communication(group, exchange, bytes)?;
                self.enqueue(communicator, &communication, COMMUNICATIONS_PER_ROW)?;
                let row = self.timer.seconds()?;
                seconds.push(row / COMMUNICATIONS_PER_ROW as f64);
                spent += row;
            }
            // The first rank decides for all.
            let is_enough = seconds.len() > MAX_DURATIONS || (seconds.len() > MIN_DURATIONS && spent > time.value());
            more[0] = u8::from(!is_enough);
            group.broadcast(0, &mut more)?;
        }
        // The first row warms up.
        Ok((seconds.len() > 1).then(|| summarise(seconds.split_off(1))))
    }

    /// This rank's side of a communication.
    fn communication(&self, group: &Group, exchange: Exchange, bytes: Bytes) -> Result<DeviceCommunication, CudaError> {
        let ranks = group.size() as u64;
        let part = part_bytes(bytes, group.size());
        let too_large = || CudaError::Call { action: "timing communication", reason: "its buffer is too small".into() };
        let range = |start: Bytes, bytes: u64| {
            let place = self.arena.at(start, Bytes::new(bytes)).ok_or_else(too_large)?;
            Ok::<_, CudaError>(Some(DeviceRange { address: DeviceAddress::from_pointer(place), bytes: bytes as usize }))
        };
        let (input, output) = (|bytes| range(Bytes::ZERO, bytes), |bytes| range(self.capacity, bytes));
        let (kind, read, write) = match (exchange, group.position()) {
            (Exchange::AllReduce, _) => (CommunicationKind::AllReduce, input(part * ranks)?, input(part * ranks)?),
            (Exchange::ReduceScatter, _) => (CommunicationKind::ReduceScatter, input(part * ranks)?, output(part)?),
            (Exchange::AllGather, _) => (CommunicationKind::AllGather, input(part)?, output(part * ranks)?),
            (Exchange::SendReceive, 0) => (CommunicationKind::Send, input(bytes.count())?, None),
            (Exchange::SendReceive, _) => (CommunicationKind::Receive, None, output(bytes.count())?),
        };
        Ok(DeviceCommunication { kind, read, write, data_type: DataType::Fp32 })
    }

    /// Queues `count` communications between two events, after one more before the first event.
    fn enqueue(
        &self,
        communicator: CommunicatorHandle,
        communication: &DeviceCommunication,
        count: usize,
    ) -> Result<(), ExecutorError> {
        let collectives = self.driver.collectives().ok_or(CudaError::Aborted)?;
        for number in 0..=count {
            // SAFETY: the ranges lie in the arena, which nothing else uses.
            unsafe { collectives.communicate(communicator, communication, self.stream) }?;
            if number == 0 {
                self.timer.begin(self.stream)?;
            }
        }
        Ok(self.timer.end(self.stream)?)
    }

    /// Measures how much a kernel is slowed down by an all-reduce that outlasts it, and an
    /// all-reduce by kernels that outlast it. All ranks do the same at once.
    fn slowdown(
        &self,
        job: &CalibrationJob,
        everyone: &mut Group,
        communicator: CommunicatorHandle,
        (kernel, accumulate): (&Kernel, bool),
    ) -> Result<Slowdown, ExecutorError> {
        let bytes = self.longest.min(CONCURRENT_BYTES);
        let communication = self.communication(everyone, Exchange::AllReduce, bytes)?;
        let kernel_job = CalibrationJob { kernels: vec![(*kernel, accumulate)], ..job.clone() };
        let mut kernels = GpuKernelTimer::new(&self.driver, &kernel_job)?;
        kernels.with_repeated(kernel, accumulate, |kernel| {
            let mut overlap = Overlap { timer: self, kernel, everyone, communicator, communication };
            let [kernel_alone, _] = overlap.median_seconds(KERNELS_PER_ROW, 0, QueuedFirst::Kernels)?;
            let [_, communication_alone] = overlap.median_seconds(0, COMMUNICATIONS_PER_ROW, QueuedFirst::Communications)?;
            // The number of repetitions, of `other` seconds each, that outlast a row of the timed
            // item.
            let outlasting =
                |timed: f64, row: usize, other: f64| (COVER_FACTOR * timed * row as f64 / other.max(MIN_SECONDS)).ceil() as u32;
            let mut communications = outlasting(kernel_alone, KERNELS_PER_ROW, communication_alone);
            let mut kernels = outlasting(communication_alone, COMMUNICATIONS_PER_ROW, kernel_alone);
            // All ranks queue as many as the first one.
            for count in [&mut communications, &mut kernels] {
                let mut bytes = count.to_le_bytes();
                overlap.everyone.broadcast(0, &mut bytes)?;
                *count = u32::from_le_bytes(bytes).clamp(COMMUNICATIONS_PER_ROW as u32, MAX_CONCURRENT);
            }
            let [kernel_beside, _] =
                overlap.median_seconds(KERNELS_PER_ROW, communications as usize, QueuedFirst::Communications)?;
            let [_, communication_beside] =
                overlap.median_seconds(kernels as usize, COMMUNICATIONS_PER_ROW, QueuedFirst::Kernels)?;
            let increase = |beside: f64, alone: f64| (beside / alone.max(MIN_SECONDS) - 1.0).max(0.0);
            Ok(Slowdown {
                kernel: increase(kernel_beside, kernel_alone),
                exchange: increase(communication_beside, communication_alone),
            })
        })
    }
}

/// The work that is queued first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueuedFirst {
    Kernels,
    Communications,
}

/// Kernels and communications that run at the same time.
struct Overlap<'a, 'b> {
    timer: &'a CommunicationTimer,
    kernel: &'a mut RepeatedKernel<'b>,
    everyone: &'a mut Group,
    communicator: CommunicatorHandle,
    communication: DeviceCommunication,
}

impl Overlap<'_, '_> {
    /// The seconds per kernel and per communication when this many of each run together: medians
    /// over several rounds. Zero if there are none.
    fn median_seconds(&mut self, kernels: usize, communications: usize, first: QueuedFirst) -> Result<[f64; 2], ExecutorError> {
        let mut rounds = [Vec::new(), Vec::new()];
        for round in 0..=MIN_DURATIONS {
            let seconds = self.round(kernels, communications, first)?;
            let is_warm_up = round == 0;
            if !is_warm_up {
                rounds.iter_mut().zip(seconds).for_each(|(all, round)| all.push(round));
            }
        }
        Ok(rounds.map(|all| summarise(all).median.value()))
    }

    fn round(&mut self, kernels: usize, communications: usize, first: QueuedFirst) -> Result<[f64; 2], ExecutorError> {
        self.everyone.barrier()?;
        let order = match first {
            QueuedFirst::Kernels => [QueuedFirst::Kernels, QueuedFirst::Communications],
            QueuedFirst::Communications => [QueuedFirst::Communications, QueuedFirst::Kernels],
        };
        for next in order {
            match next {
                QueuedFirst::Kernels if kernels > 0 => self.kernel.enqueue(kernels)?,
                QueuedFirst::Communications if communications > 0 => {
                    self.timer.enqueue(self.communicator, &self.communication, communications)?;
                }
                _ => {}
            }
        }
        let kernel = if kernels > 0 { self.kernel.seconds()? / kernels as f64 } else { 0.0 };
        let communication = if communications > 0 { self.timer.timer.seconds()? / communications as f64 } else { 0.0 };
        Ok([kernel, communication])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::tests::device::{DriverCall, TestDevice};
    use crate::interpreter::{OUTSIDE_PROGRAMS, STREAM_COUNT};
    use crate::job::CalibratedGroup;
    use crate::transport::{Segment, SegmentShape, SharedMemory, WaitPolicy};
    use foretell_models::{Activation, WeightLayout};
    use foretell_program::Reach;

    const RANKS: usize = 3;

    fn job() -> CalibrationJob {
        let product = |columns| Kernel::Matmul {
            rows: 8,
            columns,
            contracted: 8,
            weight: WeightLayout::OutIn,
            bias: false,
            activation: Activation::None,
        };
        let all = vec![Exchange::AllReduce, Exchange::ReduceScatter, Exchange::AllGather, Exchange::SendReceive];
        let group = |ranks: Vec<usize>| CalibratedGroup {
            ranks,
            reach: Reach::Node,
            exchanges: all.clone(),
            // The first size is not a multiple of three elements.
            messages: vec![Bytes::new(1 << 10), Bytes::new(6 << 10)],
        };
        CalibrationJob {
            kernels: vec![(product(4), false), (product(16), false), (Kernel::Relu { elements: 64 }, false)],
            timed_plans: Vec::new(),
            reuse_distances: Vec::new(),
            message_reuse_distances: Vec::new(),
            bytes_between_communications: Bytes::ZERO,
            precision: DataType::Fp32,
            footprint: Bytes::new(1 << 12),
            groups: vec![group((0..RANKS).collect()), group(vec![0, 2])],
            devices: Vec::new(),
            time_per_item: Seconds::new(1e-5),
            least_duration: Seconds::ZERO,
            model: None,
        }
    }

    #[test]
    fn groups_are_timed_on_their_ranks_and_beside_the_largest_kernel() {
        let devices: Vec<Arc<TestDevice>> = (0..RANKS).filter_map(|_| TestDevice::with_collectives()).collect();
        if devices.len() < RANKS {
            return;
        }
        let segment = Segment::create(&SegmentShape::new((0..RANKS).collect(), STREAM_COUNT)).expect("shared memory");
        let rank = |rank: usize| {
            let transport = SharedMemory::attach(&segment, rank, RANKS, WaitPolicy::default()).expect("the rank attaches");
            let transport: Arc<dyn Transport> = Arc::new(transport);
            let everyone: Vec<usize> = (0..RANKS).collect();
            let mut everyone = Group::new(Arc::clone(&transport), &everyone, OUTSIDE_PROGRAMS).expect("a group");
            let driver: Arc<dyn Driver> = Arc::clone(&devices[rank]) as Arc<dyn Driver>;
            measure(&driver, &transport, rank, &job(), &mut everyone).expect("the measurement succeeds")
        };
        let results: Vec<(Vec<GpuCommunicationSample>, Option<Slowdown>)> = std::thread::scope(|scope| {
            let running: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
            running.into_iter().map(|rank| rank.join().expect("the rank ends")).collect()
        });
        let ranks_with = |group, exchange| -> Vec<usize> {
            let has = |rank: &usize| results[*rank].0.iter().any(|row| row.group == group && row.exchange == exchange);
            (0..RANKS).filter(has).collect()
        };
        assert_eq!(ranks_with(0, Exchange::AllReduce), [0, 1, 2]);
        assert_eq!(ranks_with(0, Exchange::SendReceive), [0, 1]);
        assert_eq!((ranks_with(1, Exchange::AllGather), ranks_with(1, Exchange::SendReceive)), (vec![0, 2], vec![0, 2]));
        assert_eq!(results[0].0.len(), 16, "two groups, four kinds, two sizes");
        for (timed, slowdown) in &results {
            // On the test device a microsecond passes between any two events.
            let row = |sample: &GpuCommunicationSample| sample.sample.median.value() * COMMUNICATIONS_PER_ROW as f64;
            assert!(timed.iter().all(|timed| (row(timed) - 1e-6).abs() < 1e-9), "{timed:?}");
            assert!(slowdown.is_some());
            let reports_busy_time =
                |sample: &GpuCommunicationSample| !matches!(sample.report(), Report::Exchange { processor: Seconds::ZERO, .. });
            assert!(!timed.iter().any(reports_busy_time), "{timed:?}");
        }
        for device in &devices {
            let calls = device.take_calls();
            let communication_stream = calls.iter().find_map(|call| match call {
                DriverCall::Communicate { stream, .. } => Some(*stream),
                _ => None,
            });
            let products: Vec<_> = calls
                .iter()
                .filter_map(|call| match call {
                    DriverCall::Multiply { product, stream } => Some((product.columns, *stream)),
                    _ => None,
                })
                .collect();
            assert!(communication_stream.is_some() && !products.is_empty());
            // The largest product, on a stream of its own.
            assert!(products.iter().all(|&(columns, stream)| columns == 16 && Some(stream) != communication_stream));
        }
    }

    #[test]
    fn rounded_parts_fit_the_capacity_for_any_number_of_ranks() {
        for (ranks, bytes) in (2..5000).flat_map(|ranks| [1, 1000, 4096].map(|bytes| (ranks, Bytes::new(bytes)))) {
            assert!(part_bytes(bytes, ranks) * ranks as u64 <= capacity_for(bytes, ranks).count(), "{bytes} among {ranks}");
        }
    }
}
