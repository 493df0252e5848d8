//! How long exchanges from GPU to GPU take, and what they and kernels take from each other while both run: by events on streams of their own, as in
//! a step. Knows the seam to the device and the ranks' groups, no Programs.

use super::gpu_kernels::{GpuKernelTimer, KernelRows};
use super::statistics::summarise;
use super::{FEWEST, MOST, each_group};
use crate::arena::{Arena, Arenas};
use crate::backend::cuda::{
    CommunicationKind, CommunicatorHandle, CudaError, DeviceAddress, DeviceRange, Driver, StreamHandle, StreamTimer,
};
use crate::backend::cuda::{CommunicatorId, DeviceCommunication};
use crate::error::ExecutorError;
use crate::job::{CalibrationJob, Report};
use crate::transport::{Group, Transport};
use foretell_models::Kernel;
use foretell_program::{Exchange, Sample, Slowdown};
use foretell_units::{Bytes, DataType, Seconds};
use std::sync::Arc;

/// Exchanges between two events, after one that brings the ranks together: so many that what the events cost does not count.
const IN_A_ROW: usize = 8;
/// Kernels between two events where exchanges run beside them.
const KERNELS_IN_A_ROW: usize = 16;
/// How much longer than what is timed goes on what it is timed beside.
const COVER: f64 = 3.0;
/// What fails where an exchange does.
const EXCHANGING: &str = "timing an exchange";
/// At most so many kernels or exchanges are queued beside what is timed.
const MOST_BESIDE: u32 = 2048;
/// No row is shorter, in seconds: an event's time has half a microsecond.
const LEAST_TIME: f64 = 1e-9;
/// Where what is written begins, behind what is read: at a multiple of these bytes.
const PLACES: u64 = 4 << 10;
/// Bytes of a number that is exchanged.
const WIDTH: u64 = 4;
/// The size of the exchange that runs beside kernels: a bucket of gradients, about.
const BESIDE_KERNELS: Bytes = Bytes::new(64 << 20);

/// What was measured of one kind of exchange, of one size, in one group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Durations {
    /// The number of the group.
    pub(super) group: usize,
    pub(super) exchange: Exchange,
    pub(super) bytes: Bytes,
    pub(super) sample: Sample,
}

impl Durations {
    /// What is said of it. What it keeps of the GPU is known while data flow, and not during a latency, which is most of a short exchange's time:
    /// so it is the profile's one share for all of them that says it.
    pub(super) fn report(self) -> Report {
        let Self { group, exchange, bytes, sample } = self;
        Report::Exchange { group, exchange, bytes, sample, processor: Seconds::ZERO }
    }
}

/// Times the exchanges of all groups of a job that this rank is in, one group after the other, and what they and kernels do to each other.
pub(super) fn measure(
    driver: &Arc<dyn Driver>,
    transport: &Arc<dyn Transport>,
    rank: usize,
    job: &CalibrationJob,
    everyone: &mut Group,
) -> Result<(Vec<Durations>, Option<Slowdown>), ExecutorError> {
    let longest = job.groups.iter().flat_map(|group| &group.messages).copied().fold(Bytes::new(4096), Bytes::max);
    let bench = CommunicationTimer::new(driver, longest, everyone.size())?;
    let mut timed = Vec::new();
    let mut of_everyone = None;
    each_group(job, transport, rank, everyone, |turn, group| {
        let whole = bench.join(group, group.size())?;
        let pair = match turn.wanted.exchanges.contains(&Exchange::SendReceive) {
            true => bench.join(group, 2)?,
            false => None,
        };
        for &bytes in &turn.wanted.messages {
            for &exchange in &turn.wanted.exchanges {
                let communicator = if exchange == Exchange::SendReceive { pair } else { whole };
                let sample = bench.time(group, communicator, exchange, bytes, job.time_per_item)?;
                timed.extend(sample.map(|sample| Durations { group: turn.number, exchange, bytes, sample }));
            }
        }
        of_everyone = of_everyone.or(whole.filter(|_| turn.is_everyone));
        Ok(())
    })?;
    let largest = job.kernels.iter().max_by(|(one, _), (two, _)| one.flops().value().total_cmp(&two.flops().value()));
    // All ranks are in the group of all, or there is none.
    let slowdown = match (largest, of_everyone) {
        (Some((kernel, accumulate)), Some(communicator)) => {
            Some(bench.beside(job, everyone, communicator, (kernel, *accumulate))?)
        }
        _ => None,
    };
    Ok((timed, slowdown))
}

/// Of an exchange that each of so many ranks has an equal part of, in whole numbers: bytes of a part, rounded up.
fn part_of(bytes: Bytes, ranks: usize) -> u64 {
    bytes.count().div_ceil(WIDTH * ranks as u64) * WIDTH
}

/// Bytes that hold exchanges of up to so many bytes among up to so many ranks, rounded up as they are.
fn room_for(longest: Bytes, ranks: usize) -> Bytes {
    Bytes::new((longest.count() + WIDTH * ranks as u64).next_multiple_of(PLACES))
}

/// GpuStreams exchanges on a stream of its own, between two events.
struct CommunicationTimer {
    driver: Arc<dyn Driver>,
    /// What is read, and behind it what is written.
    arena: Arena,
    /// How long each of the two is.
    room: Bytes,
    /// The longest exchange that is asked for.
    longest: Bytes,
    stream: StreamHandle,
    span: StreamTimer,
}

impl CommunicationTimer {
    /// For exchanges of so many ranks at most.
    fn new(driver: &Arc<dyn Driver>, longest: Bytes, ranks: usize) -> Result<Self, ExecutorError> {
        let room = room_for(longest, ranks);
        Ok(Self {
            driver: Arc::clone(driver),
            arena: Arenas::new(room + room, Bytes::ZERO, Some(driver))?.device,
            room,
            longest,
            stream: driver.create_stream()?,
            span: StreamTimer::new(driver)?,
        })
    }

    /// A communicator of a group's first `size` ranks; none for the others.
    fn join(&self, group: &mut Group, size: usize) -> Result<Option<CommunicatorHandle>, ExecutorError> {
        let collectives = self.driver.collectives().ok_or(CudaError::Aborted)?;
        let mut identity: CommunicatorId = [0; 128];
        if group.position() == 0 {
            identity = collectives.new_communicator_id()?;
        }
        group.broadcast(0, &mut identity)?;
        let position = group.position();
        Ok((position < size).then(|| collectives.join(&identity, size, position)).transpose()?)
    }

    /// Times one kind of exchange of one size; nothing for who has no part in it. The ranks come to each row at once, and an exchange before it has them
    /// wait for who is last: that is no part of what is timed.
    fn time(
        &self,
        group: &mut Group,
        communicator: Option<CommunicatorHandle>,
        exchange: Exchange,
        bytes: Bytes,
        patience: Seconds,
    ) -> Result<Option<Sample>, ExecutorError> {
        let (mut seconds, mut spent) = (Vec::new(), 0.0);
        let mut go_on = [1];
        while go_on[0] != 0 {
            group.barrier()?;
            if let Some(communicator) = communicator {
                let wanted = self.exchange(group, exchange, bytes)?;
                self.queue(communicator, &wanted, IN_A_ROW)?;
                let row = self.span.seconds()?;
                seconds.push(row / IN_A_ROW as f64);
                spent += row;
            }
            // The first rank decides for all.
            let enough = seconds.len() > MOST || (seconds.len() > FEWEST && spent > patience.value());
            go_on[0] = u8::from(!enough);
            group.broadcast(0, &mut go_on)?;
        }
        // The first one warms up.
        Ok((seconds.len() > 1).then(|| summarise(seconds.split_off(1))))
    }

    /// An exchange from this rank's side.
    fn exchange(&self, group: &Group, exchange: Exchange, bytes: Bytes) -> Result<DeviceCommunication, CudaError> {
        let ranks = group.size() as u64;
        let part = part_of(bytes, group.size());
        let none = || CudaError::Call { action: EXCHANGING, reason: "there is no room for it".into() };
        let piece = |start: Bytes, bytes: u64| {
            let place = self.arena.at(start, Bytes::new(bytes)).ok_or_else(none)?;
            Ok::<_, CudaError>(Some(DeviceRange { address: DeviceAddress::from_pointer(place), bytes: bytes as usize }))
        };
        let (here, there) = (|bytes| piece(Bytes::ZERO, bytes), |bytes| piece(self.room, bytes));
        let (kind, read, write) = match (exchange, group.position()) {
            (Exchange::AllReduce, _) => (CommunicationKind::AllReduce, here(part * ranks)?, here(part * ranks)?),
            (Exchange::ReduceScatter, _) => (CommunicationKind::ReduceScatter, here(part * ranks)?, there(part)?),
            (Exchange::AllGather, _) => (CommunicationKind::AllGather, here(part)?, there(part * ranks)?),
            (Exchange::SendReceive, 0) => (CommunicationKind::Send, here(bytes.count())?, None),
            (Exchange::SendReceive, _) => (CommunicationKind::Receive, None, there(bytes.count())?),
        };
        Ok(DeviceCommunication { kind, read, write, data_type: DataType::Fp32 })
    }

    /// GpuStreams so many, after one more that comes before the first event.
    fn queue(&self, communicator: CommunicatorHandle, exchange: &DeviceCommunication, count: usize) -> Result<(), ExecutorError> {
        let collectives = self.driver.collectives().ok_or(CudaError::Aborted)?;
        for number in 0..=count {
            // SAFETY: the pieces lie in the arena, which nobody else has.
            unsafe { collectives.communicate(communicator, exchange, self.stream) }?;
            if number == 0 {
                self.span.begin(self.stream)?;
            }
        }
        Ok(self.span.end(self.stream)?)
    }

    /// Kernels beside exchanges that outlast them, and the other communication round, against each alone. All ranks do the same at once.
    fn beside(
        &self,
        job: &CalibrationJob,
        everyone: &mut Group,
        communicator: CommunicatorHandle,
        (kernel, accumulate): (&Kernel, bool),
    ) -> Result<Slowdown, ExecutorError> {
        let bytes = self.longest.min(BESIDE_KERNELS);
        let wanted = self.exchange(everyone, Exchange::AllReduce, bytes)?;
        let mut bench =
            GpuKernelTimer::on(&self.driver, &CalibrationJob { kernels: vec![(*kernel, accumulate)], ..job.clone() })?;
        bench.in_rows(kernel, accumulate, |rows| {
            let mut both = Overlap { exchanges: self, rows, everyone, communicator, wanted };
            let [kernel, _] = both.median(KERNELS_IN_A_ROW, 0, First::Kernels)?;
            let [_, exchange] = both.median(0, IN_A_ROW, First::Exchanges)?;
            let covering = |of: f64, count: usize, by: f64| (COVER * of * count as f64 / by.max(LEAST_TIME)).ceil() as u32;
            let mut counts = [covering(kernel, KERNELS_IN_A_ROW, exchange), covering(exchange, IN_A_ROW, kernel)];
            // All queue as many: as the first rank has it.
            for count in &mut counts {
                let mut told = count.to_le_bytes();
                both.everyone.broadcast(0, &mut told)?;
                *count = u32::from_le_bytes(told).clamp(IN_A_ROW as u32, MOST_BESIDE);
            }
            let [kernel_beside, _] = both.median(KERNELS_IN_A_ROW, counts[0] as usize, First::Exchanges)?;
            let [_, exchange_beside] = both.median(counts[1] as usize, IN_A_ROW, First::Kernels)?;
            let longer = |beside: f64, alone: f64| (beside / alone.max(LEAST_TIME) - 1.0).max(0.0);
            Ok(Slowdown { kernel: longer(kernel_beside, kernel), exchange: longer(exchange_beside, exchange) })
        })
    }
}

/// What is queued first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Kernels,
    Exchanges,
}

/// KernelRows of kernels and of exchanges that run beside each other.
struct Overlap<'a, 'b> {
    exchanges: &'a CommunicationTimer,
    rows: &'a mut KernelRows<'b>,
    everyone: &'a mut Group,
    communicator: CommunicatorHandle,
    wanted: DeviceCommunication,
}

impl Overlap<'_, '_> {
    /// Seconds of one of so many kernels, and of one of so many exchanges: the medians of some rounds. Of none it is nothing.
    fn median(&mut self, kernels: usize, exchanges: usize, first: First) -> Result<[f64; 2], ExecutorError> {
        let mut rounds = [Vec::new(), Vec::new()];
        // The first one warms up.
        for round in 0..=FEWEST {
            let found = self.round(kernels, exchanges, first)?;
            if round > 0 {
                rounds.iter_mut().zip(found).for_each(|(all, one)| all.push(one));
            }
        }
        Ok(rounds.map(|all| summarise(all).median.value()))
    }

    fn round(&mut self, kernels: usize, exchanges: usize, first: First) -> Result<[f64; 2], ExecutorError> {
        self.everyone.barrier()?;
        for next in [first, if first == First::Kernels { First::Exchanges } else { First::Kernels }] {
            match next {
                First::Kernels if kernels > 0 => self.rows.queue(kernels)?,
                First::Exchanges if exchanges > 0 => self.exchanges.queue(self.communicator, &self.wanted, exchanges)?,
                _ => {}
            }
        }
        let kernel = if kernels > 0 { self.rows.seconds()? / kernels as f64 } else { 0.0 };
        let exchange = if exchanges > 0 { self.exchanges.span.seconds()? / exchanges as f64 } else { 0.0 };
        Ok([kernel, exchange])
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
            // The first does not divide by three.
            messages: vec![Bytes::new(1 << 10), Bytes::new(6 << 10)],
        };
        CalibrationJob {
            kernels: vec![(product(4), false), (product(16), false), (Kernel::Relu { elements: 64 }, false)],
            timed_steps: Vec::new(),
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
    fn every_exchange_of_every_group_is_timed_by_those_who_have_a_part_in_it_and_beside_the_largest_kernel() {
        let devices: Vec<Arc<TestDevice>> = (0..RANKS).filter_map(|_| TestDevice::direct()).collect();
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
            measure(&driver, &transport, rank, &job(), &mut everyone).expect("it is measured")
        };
        let found: Vec<(Vec<Durations>, Option<Slowdown>)> = std::thread::scope(|scope| {
            let running: Vec<_> = (0..RANKS).map(|number| scope.spawn(move || rank(number))).collect();
            running.into_iter().map(|rank| rank.join().expect("the rank ends")).collect()
        });
        let who = |group, exchange| -> Vec<usize> {
            let has = |rank: &usize| found[*rank].0.iter().any(|one| one.group == group && one.exchange == exchange);
            (0..RANKS).filter(has).collect()
        };
        assert_eq!(who(0, Exchange::AllReduce), [0, 1, 2]);
        assert_eq!(who(0, Exchange::SendReceive), [0, 1]);
        assert_eq!((who(1, Exchange::AllGather), who(1, Exchange::SendReceive)), (vec![0, 2], vec![0, 2]));
        assert_eq!(found[0].0.len(), 16, "two groups, four kinds, two sizes");
        for (timed, slowdown) in &found {
            // The device says a microsecond of everything.
            assert!(timed.iter().all(|one| (one.sample.median.value() * IN_A_ROW as f64 - 1e-6).abs() < 1e-9), "{timed:?}");
            assert!(slowdown.is_some());
            // Of no exchange a share of its own is said: a share of the whole time would count latency.
            let of_its_own = |one: &Durations| !matches!(one.report(), Report::Exchange { processor: Seconds::ZERO, .. });
            assert!(!timed.iter().any(of_its_own), "{timed:?}");
        }
        for device in &devices {
            let told = device.take_calls();
            let exchanging = told.iter().filter_map(|told| match told {
                DriverCall::Communicate { stream, .. } => Some(*stream),
                _ => None,
            });
            let exchanging: Vec<StreamHandle> = exchanging.collect();
            let multiplying: Vec<_> = told
                .iter()
                .filter_map(|told| match told {
                    DriverCall::Multiply { product, stream } => Some((product.columns, *stream)),
                    _ => None,
                })
                .collect();
            assert!(!exchanging.is_empty() && !multiplying.is_empty());
            assert!(
                multiplying.iter().all(|(columns, stream)| *columns == 16 && *stream != exchanging[0]),
                "the largest, elsewhere"
            );
        }
    }

    #[test]
    fn there_is_room_for_what_is_rounded_up_among_any_number_of_ranks() {
        for (ranks, bytes) in (2..5000).flat_map(|ranks| [1, 1000, 4096].map(|bytes| (ranks, Bytes::new(bytes)))) {
            assert!(part_of(bytes, ranks) * ranks as u64 <= room_for(bytes, ranks).count(), "{bytes} among {ranks}");
        }
    }
}
