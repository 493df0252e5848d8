//! How long messages and collectives take, and how much of the processor.

use super::statistics::summarise;
use super::{FEWEST, MOST, Turn, each_group};
use crate::clock;
use crate::error::ExecutorError;
use crate::job::{CalibrationJob, Report};
use crate::machine;
use crate::member::Member;
use crate::transport::Group;
use foretell_program::{Exchange, Sample};
use foretell_units::{Bytes, Seconds};

/// The most places from which messages of one size are sent by turns, and the most bytes that these take: beyond any second-level cache.
const MOST_PLACES: u64 = 64;
const MOST_FOOTPRINT: u64 = 32 << 20;

/// Times the exchanges of all groups, one group after the other while all others wait. Returns the share of the processor that an all-reduce
/// takes among all ranks.
///
/// The network's work for packets is done in interrupts, which are in no thread's time: its share goes to each exchange by the bytes that are sent.
pub(super) fn time_exchanges(member: &Member, job: &CalibrationJob, everyone: &mut Group) -> Result<f64, ExecutorError> {
    let mut share = 0.0;
    let mut timed: Vec<TimedCommunication> = Vec::new();
    // Of long messages: how many bytes were sent, and what the machine spent in interrupts meanwhile.
    let (mut sent, mut interrupted) = (0.0, 0.0);
    each_group(job, &member.transport, member.rank.0, everyone, |turn, group| {
        for &bytes in &turn.wanted.messages {
            for &exchange in &turn.wanted.exchanges {
                let before = machine::interrupt_time();
                let (sample, processor, rounds) = time_exchange(group, exchange, bytes, job)?;
                let Turn { number, is_everyone, .. } = turn;
                let one = TimedCommunication { group: number, is_everyone, exchange, bytes, sample, processor };
                let is_idle = exchange == Exchange::SendReceive && group.position() > 1;
                if bytes >= LONG {
                    sent += if is_idle { 0.0 } else { one.sent(group.size()) * rounds as f64 };
                    interrupted += if group.position() == 0 { machine::interrupt_time() - before } else { 0.0 };
                }
                // Of there and back only who sees both communication knows how long it took: the second rank's last send is done when it is on its communication.
                if exchange != Exchange::SendReceive || group.position() == 0 {
                    timed.push(one);
                }
            }
        }
        Ok(())
    })?;
    let mut sum = |one: f64| -> Result<f64, ExecutorError> {
        let mut all = vec![0u8; size_of::<f64>() * member.world_size];
        everyone.all_gather(&one.to_ne_bytes(), &mut all)?;
        Ok(all.as_chunks().0.iter().map(|&one| f64::from_ne_bytes(one)).sum())
    };
    let (sent, interrupted) = (sum(sent)?, sum(interrupted)?);
    let each_byte = if interrupted > LEAST_INTERRUPT_TIME && sent > 0.0 { interrupted / sent } else { 0.0 };
    for one in timed {
        let ranks = job.groups[one.group].ranks.len();
        // A message has two ranks' processors; what it sends the one, it brings the other.
        let halves = if one.exchange == Exchange::SendReceive { 0.5 } else { 1.0 };
        let processor = (one.processor + Seconds::new(each_byte * one.sent(ranks) * halves)).min(one.sample.median);
        // Of the longest messages: there the processor copies and adds, and hardly waits.
        if one.exchange == Exchange::AllReduce && one.is_everyone {
            share = (processor / one.sample.median).clamp(0.0, 1.0);
        }
        let TimedCommunication { group, exchange, bytes, sample, .. } = one;
        member.control.send(&Report::Exchange { group, exchange, bytes, sample, processor })?;
    }
    Ok(share)
}

/// Less time in interrupts than this, in seconds, is what a machine has of it whatever is sent; or no more than its clock can tell.
const LEAST_INTERRUPT_TIME: f64 = 0.1;

/// Messages of which interrupts are counted: there those of the data are most, and not those of who asks whether there are enough.
const LONG: Bytes = Bytes::new(64 << 10);

/// An exchange that was timed.
struct TimedCommunication {
    group: usize,
    is_everyone: bool,
    exchange: Exchange,
    bytes: Bytes,
    sample: Sample,
    /// Of the processor's time what the thread had that exchanged.
    processor: Seconds,
}

impl TimedCommunication {
    /// The bytes that each of so many ranks sends in one round.
    fn sent(&self, ranks: usize) -> f64 {
        let others = (ranks - 1) as f64 / ranks as f64;
        self.bytes.value()
            * match self.exchange {
                Exchange::AllReduce => 2.0 * others,
                Exchange::ReduceScatter | Exchange::AllGather => others,
                Exchange::SendReceive => 1.0,
            }
    }
}

/// Rounds of an exchange between which nobody asks whether there are enough: what asking takes with it into the caches is not to help.
const ROUNDS: u8 = 8;

/// Times one kind of exchange of one size among all ranks; for send and receive between the first two. As in a step, ranks come to it from
/// other work that has taken the caches, not from a barrier, and what they send was written as long before as a step writes it. Waiting for
/// who comes last is no part of it: the simulator knows when each rank comes. Returns also the processor's time, and the number of rounds.
fn time_exchange(
    group: &mut Group,
    exchange: Exchange,
    bytes: Bytes,
    job: &CalibrationJob,
) -> Result<(Sample, Seconds, usize), ExecutorError> {
    let (ranks, patience) = (group.size(), job.time_per_item.value());
    let elements = (bytes.count() as usize / 4).next_multiple_of(ranks);
    // Between writing a place and sending it all others are written and sent.
    let between = nearest_reuse(&job.message_reuse_distances, bytes).count() / (2 * bytes.count()).max(1);
    let most = (MOST_FOOTPRINT / bytes.count().max(1)).clamp(1, MOST_PLACES);
    let mut places = vec![vec![1.0f32; elements]; (between + 1).min(most) as usize];
    let mut part = vec![1.0f32; elements / ranks];
    let mut other_work = OtherWork::of(job.bytes_between_communications);
    let mut starts = vec![0u8; size_of::<u64>() * ranks];
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
            other_work.run();
            places[written].fill(1.0);
            let next = (round + 1) % places.len();
            let whole = &mut places[next];
            let (start, busy) = (clock::now(), clock::thread_cpu_time());
            match exchange {
                Exchange::AllReduce => group.all_reduce_f32(whole)?,
                Exchange::ReduceScatter => group.reduce_scatter_f32(whole, &mut part)?,
                Exchange::AllGather => group.all_gather_f32(&part, whole)?,
                Exchange::SendReceive => there_and_back(group, whole)?,
            }
            let halves = if exchange == Exchange::SendReceive { 0.5 } else { 1.0 };
            let (end, busy) = (clock::now(), clock::thread_cpu_time() - busy);
            group.all_gather(&start.to_ne_bytes(), &mut starts)?;
            let began = starts.as_chunks().0.iter().map(|&start| u64::from_ne_bytes(start)).fold(start, u64::max);
            let duration = end.saturating_sub(began) as f64 * 1e-9 * halves;
            // The first ones warm up.
            if round > 1 {
                seconds.push(duration);
                processor += (busy as f64 * 1e-9 * halves).min(duration);
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
    Ok((sample, sample.median * share, round))
}

/// What a rank does between two exchanges, as far as the caches see it.
struct OtherWork(Vec<f32>);

impl OtherWork {
    /// Touches so many bytes.
    fn of(bytes: Bytes) -> Self {
        Self(vec![0.0; bytes.count() as usize / size_of::<f32>()])
    }

    fn run(&mut self) {
        for number in std::hint::black_box(&mut self.0) {
            *number += 1.0;
        }
    }
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
