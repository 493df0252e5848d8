//! Times messages and collectives over the host's transport, and their CPU time.

use super::statistics::summarise;
use super::{GroupTurn, MAX_DURATIONS, MIN_DURATIONS, for_each_group};
use crate::clock;
use crate::error::ExecutorError;
use crate::job::{CalibrationJob, Report};
use crate::machine;
use crate::member::Member;
use crate::transport::Group;
use foretell_program::{Exchange, Sample};
use foretell_units::{Bytes, Seconds};

/// The most buffers that messages of one size are sent from in turn, and the most bytes of these
/// buffers together: more than a second-level cache holds.
const MAX_BUFFERS: u64 = 64;
const MAX_FOOTPRINT: u64 = 32 << 20;

/// Less interrupt time than this, in seconds, counts as none. A machine has some of it without any
/// communication, and its clock is coarse.
const MIN_INTERRUPT_TIME: f64 = 0.1;

/// The smallest size for which interrupts are counted: from here on most of them belong to the
/// data, and few to the broadcasts between rounds.
const MIN_BYTES_FOR_INTERRUPTS: Bytes = Bytes::new(64 << 10);

/// Rounds between two decisions on whether to continue. The decision's messages bring the
/// transport's data into the caches, which must not speed up the next round.
const ROUNDS: u8 = 8;

/// Times the communication of all groups and reports the samples. Returns the fraction of the CPU
/// that an all-reduce among all ranks takes.
///
/// The kernel handles packets in interrupts, which count for no thread. Their time is divided among
/// the communications by the bytes that these send.
pub(super) fn measure(member: &Member, job: &CalibrationJob, everyone: &mut Group) -> Result<f64, ExecutorError> {
    let mut timed: Vec<HostCommunicationSample> = Vec::new();
    // For large messages: the bytes that this rank sent, and the machine's interrupt time
    // meanwhile.
    let (mut sent, mut interrupted) = (0.0, 0.0);
    for_each_group(job, &member.transport, member.rank.0, everyone, |turn, group| {
        for &bytes in &turn.wanted.messages {
            for &exchange in &turn.wanted.exchanges {
                let interrupts_before = machine::interrupt_time();
                let (sample, cpu_time, rounds) = time_communication(group, exchange, bytes, job)?;
                let GroupTurn { index, is_everyone, .. } = turn;
                let one = HostCommunicationSample { group: index, is_everyone, exchange, bytes, sample, cpu_time };
                let is_idle = exchange == Exchange::SendReceive && group.position() > 1;
                if bytes >= MIN_BYTES_FOR_INTERRUPTS {
                    sent += if is_idle { 0.0 } else { one.bytes_sent(group.size()) * rounds as f64 };
                    interrupted += if group.position() == 0 { machine::interrupt_time() - interrupts_before } else { 0.0 };
                }
                // Only the first rank sees a whole round trip: the second one's last send ends
                // before the message arrives.
                if exchange != Exchange::SendReceive || group.position() == 0 {
                    timed.push(one);
                }
            }
        }
        Ok(())
    })?;
    let mut sum_over_ranks = |value: f64| -> Result<f64, ExecutorError> {
        let mut values = vec![0u8; size_of::<f64>() * member.world_size];
        everyone.all_gather(&value.to_ne_bytes(), &mut values)?;
        Ok(values.as_chunks().0.iter().map(|&value| f64::from_ne_bytes(value)).sum())
    };
    let (sent, interrupted) = (sum_over_ranks(sent)?, sum_over_ranks(interrupted)?);
    let interrupt_time_per_byte = if interrupted > MIN_INTERRUPT_TIME && sent > 0.0 { interrupted / sent } else { 0.0 };
    let mut share = 0.0;
    for one in timed {
        let ranks = job.groups[one.group].ranks.len();
        // A message costs the sender's and the receiver's CPU half of the interrupt time each.
        let part = if one.exchange == Exchange::SendReceive { 0.5 } else { 1.0 };
        let interrupts = Seconds::new(interrupt_time_per_byte * one.bytes_sent(ranks) * part);
        let processor = (one.cpu_time + interrupts).min(one.sample.median);
        // The value of the largest message remains: there the CPU copies and adds, and hardly
        // waits.
        if one.exchange == Exchange::AllReduce && one.is_everyone {
            share = (processor / one.sample.median).clamp(0.0, 1.0);
        }
        let HostCommunicationSample { group, exchange, bytes, sample, .. } = one;
        member.control.send(&Report::Exchange { group, exchange, bytes, sample, processor })?;
    }
    Ok(share)
}

/// The measurement of one kind of communication at one size in one group.
struct HostCommunicationSample {
    /// The group's index in the job.
    group: usize,
    is_everyone: bool,
    exchange: Exchange,
    bytes: Bytes,
    sample: Sample,
    /// The part of the duration for which the communicating thread had the CPU.
    cpu_time: Seconds,
}

impl HostCommunicationSample {
    /// The bytes that each of `ranks` ranks sends in one round.
    fn bytes_sent(&self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        self.bytes.value()
            * match self.exchange {
                Exchange::AllReduce => 2.0 * others,
                Exchange::ReduceScatter | Exchange::AllGather => others,
                Exchange::SendReceive => 1.0,
            }
    }
}

/// Times one kind of communication at one size, among all ranks of the group or for a message
/// between its first two. Returns the sample, the CPU time of the median, and the number of rounds.
///
/// The conditions are those of a step. Before the communication, ranks do other work that displaces
/// the caches, and the data was written as long ago as a step's reuse distance says. The wait for
/// the last rank is left out, because the simulator knows when each rank arrives.
fn time_communication(
    group: &mut Group,
    exchange: Exchange,
    bytes: Bytes,
    job: &CalibrationJob,
) -> Result<(Sample, Seconds, usize), ExecutorError> {
    let (ranks, time) = (group.size(), job.time_per_item.value());
    let elements = (bytes.count() as usize / 4).next_multiple_of(ranks);
    // Between writing a buffer and sending it, all other buffers are written and sent.
    let others = nearest_reuse_distance(&job.message_reuse_distances, bytes).count() / (2 * bytes.count()).max(1);
    let max_buffers = (MAX_FOOTPRINT / bytes.count().max(1)).clamp(1, MAX_BUFFERS);
    let mut buffers = vec![vec![1.0f32; elements]; (others + 1).min(max_buffers) as usize];
    let mut part = vec![1.0f32; elements / ranks];
    let mut other_work = OtherWork::new(job.bytes_between_communications);
    let mut starts = vec![0u8; size_of::<u64>() * ranks];
    let mut seconds = Vec::new();
    let mut cpu_seconds = 0.0;
    let mut spent = 0.0;
    let mut round = 0;
    // Half of a round trip is one message.
    let messages = if exchange == Exchange::SendReceive { 0.5 } else { 1.0 };
    let mut rounds = [1];
    group.barrier()?;
    while rounds[0] > 0 {
        for _ in 0..rounds[0] {
            other_work.run();
            // All-reduces would let the numbers grow without limit.
            let written = round % buffers.len();
            buffers[written].fill(1.0);
            let next = (round + 1) % buffers.len();
            let buffer = &mut buffers[next];
            let (start, cpu_start) = (clock::now(), clock::thread_cpu_time());
            match exchange {
                Exchange::AllReduce => group.all_reduce_f32(buffer)?,
                Exchange::ReduceScatter => group.reduce_scatter_f32(buffer, &mut part)?,
                Exchange::AllGather => group.all_gather_f32(&part, buffer)?,
                Exchange::SendReceive => round_trip(group, buffer)?,
            }
            let (end, cpu_time) = (clock::now(), clock::thread_cpu_time() - cpu_start);
            group.all_gather(&start.to_ne_bytes(), &mut starts)?;
            let last_start = starts.as_chunks().0.iter().map(|&start| u64::from_ne_bytes(start)).fold(start, u64::max);
            let duration = end.saturating_sub(last_start) as f64 * 1e-9 * messages;
            let is_warm_up = round <= 1;
            if !is_warm_up {
                seconds.push(duration);
                cpu_seconds += (cpu_time as f64 * 1e-9 * messages).min(duration);
            }
            spent += duration;
            round += 1;
        }
        // For very slow communication, three durations must do.
        let fewest = if spent > 20.0 * time { MIN_DURATIONS.min(3) } else { MIN_DURATIONS };
        let is_enough = seconds.len() >= fewest && (spent > time || seconds.len() >= MAX_DURATIONS);
        // The first rank decides for all. Slow communication goes round by round.
        rounds[0] = if is_enough {
            0
        } else if spent > time / 4.0 {
            1
        } else {
            ROUNDS
        };
        group.broadcast(0, &mut rounds)?;
    }
    let cpu_fraction = cpu_seconds / seconds.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let sample = summarise(seconds);
    Ok((sample, sample.median * cpu_fraction, round))
}

/// Stands in for the work of a rank between two communications, in its effect on the caches.
struct OtherWork(Vec<f32>);

impl OtherWork {
    /// Work that touches `bytes` bytes.
    fn new(bytes: Bytes) -> Self {
        Self(vec![0.0; bytes.count() as usize / size_of::<f32>()])
    }

    fn run(&mut self) {
        for number in std::hint::black_box(&mut self.0) {
            *number += 1.0;
        }
    }
}

/// The reuse distance of the message size whose ratio to `bytes` is nearest to 1; zero if `known`
/// is empty. `known` holds pairs of size and distance.
fn nearest_reuse_distance(known: &[(Bytes, Bytes)], bytes: Bytes) -> Bytes {
    let ratio = |other: &Bytes| (other.value().max(1.0) / bytes.value().max(1.0)).ln().abs();
    let nearest = known.iter().min_by(|(left, _), (right, _)| ratio(left).total_cmp(&ratio(right)));
    nearest.map_or(Bytes::ZERO, |&(_, distance)| distance)
}

/// Sends `values` from the first rank to the second and back. Other ranks do nothing.
fn round_trip(group: &mut Group, values: &mut [f32]) -> Result<(), ExecutorError> {
    // SAFETY: any bytes are valid `f32`s, and the slice covers exactly these.
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
