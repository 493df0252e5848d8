//! Compares a predicted with a measured Timeline: which instructions made the step longer or
//! shorter than predicted, and why.
//!
//! [`attribute`](crate::attribute) splits both timelines into the same kinds of pieces, so the
//! difference of the steps is exactly the sum of the pieces' differences.
//!
//! The kinds of time on a rank:
//! - `compute: KERNEL`: the compute stream runs that kernel;
//! - `communication: KIND`, `load` and `copy: KIND`: the compute stream is idle because the next
//!   kernel needs data that is being moved;
//! - `bubble`: the compute stream is idle because another rank has not arrived at a collective, a
//!   message or the end of the step;
//! - `host`: the compute stream is idle and none of these explains it.
//!
//! It must not know layouts: everything follows from the instructions and their spans.

use crate::attribute::{Communications, Piece, Reason, active_time, attribute};
use foretell_program::{InstructionId, Operation, Program, Rank, StageProgram, Timeline};
use foretell_units::{Picoseconds, Seconds};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt;

/// The most rows in [`Comparison::worst`].
const MOST_WORST: usize = 10;

/// The comparison of two timelines of one Program.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Comparison {
    /// The predicted step.
    #[serde(rename = "predicted_step_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub predicted_step: Seconds,
    /// The measured step.
    #[serde(rename = "measured_step_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub measured_step: Seconds,
    /// Predicted over measured, less one; 0 if nothing was measured.
    pub error: f64,
    /// The rank that [`Comparison::by_kind`] describes: the one whose measured step ended last.
    pub rank: Rank,
    /// The reported rank's step by kind of time. Each time column adds up to its step, and the
    /// shares add up to the error.
    pub by_kind: Vec<KindRow>,
    /// The instructions with the largest differences over all ranks, largest first.
    pub worst: Vec<WorstRow>,
}

/// All time of one kind on the reported rank.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct KindRow {
    /// `compute: KERNEL`, `communication: KIND`, `load`, `copy: KIND`, `bubble` or `host`.
    pub kind: String,
    /// Predicted time.
    #[serde(rename = "predicted_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub predicted: Seconds,
    /// Measured time.
    #[serde(rename = "measured_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub measured: Seconds,
    /// Predicted less measured, over the measured step.
    pub error_share: f64,
    /// Number of instructions of this kind; for `bubble` and `host` the number of measured pieces.
    pub count: usize,
}

/// One instruction's contribution to the step, predicted and measured, as the mean over the ranks
/// that run its list. Hidden communication contributes nothing.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct WorstRow {
    /// The rank on which the difference is largest.
    pub rank: Rank,
    /// The instruction; `None` for time after a rank's last one.
    pub instruction: Option<InstructionId>,
    /// The name of its operator or tensor.
    pub name: String,
    /// As in [`KindRow::kind`].
    pub kind: String,
    /// The micro-batch that it works on, if it belongs to one.
    pub micro_batch: Option<u32>,
    /// Predicted contribution.
    #[serde(rename = "predicted_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub predicted: Seconds,
    /// Measured contribution.
    #[serde(rename = "measured_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub measured: Seconds,
    /// Predicted less measured.
    #[serde(rename = "difference_seconds", serialize_with = "number")]
    #[schemars(with = "f64")]
    pub difference: Seconds,
    /// Why they differ.
    #[schemars(with = "String")]
    pub cause: Cause,
}

/// Why an instruction took longer or shorter than predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A kernel took longer.
    KernelSlower,
    /// A kernel took less time.
    KernelFaster,
    /// Communication took longer, counted from the arrival of the last participant.
    CommunicationSlower,
    /// Communication took less time.
    CommunicationFaster,
    /// Reading samples took longer.
    LoadSlower,
    /// Reading samples took less time.
    LoadFaster,
    /// Communication or loading took about as long as predicted, but kernels hid less of it.
    LessHidden,
    /// Communication or loading took about as long as predicted, but kernels hid more of it.
    MoreHidden,
    /// Another rank arrived later.
    WaitedForPeer,
    /// Another rank arrived earlier.
    WaitedLess,
    /// More time passed in which nothing ran and no rank was awaited.
    HostGap,
    /// Less time passed in which nothing ran and no rank was awaited.
    ShorterHostGap,
}

impl Cause {
    /// The cause in words.
    pub const fn phrase(self) -> &'static str {
        match self {
            Cause::KernelSlower => "kernel slower than its calibration",
            Cause::KernelFaster => "kernel faster than its calibration",
            Cause::CommunicationSlower => "communication slower than its calibration",
            Cause::CommunicationFaster => "communication faster than its calibration",
            Cause::LoadSlower => "loading slower than its calibration",
            Cause::LoadFaster => "loading faster than its calibration",
            Cause::LessHidden => "less hidden behind kernels",
            Cause::MoreHidden => "more hidden behind kernels",
            Cause::WaitedForPeer => "waited for a peer",
            Cause::WaitedLess => "waited less for a peer",
            Cause::HostGap => "host gap",
            Cause::ShorterHostGap => "shorter host gap",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.phrase())
    }
}

impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.phrase())
    }
}

/// Compares two timelines of a Program by rank and instruction. Ignores ranks that only one of them
/// has. An instruction that is missing in one of them counts there as zero.
///
/// Each rank's clock starts with its step. So waiting and communication are separated only as well
/// as the ranks' starts agree.
pub fn compare(program: &Program, predicted: &Timeline, measured: &Timeline) -> Comparison {
    let communications = Communications::of(program);
    let ranks = predicted.ranks.len().min(measured.ranks.len()).min(program.mesh.world_size());
    let last = (0..ranks).max_by_key(|&rank| (measured.ranks.get(rank).map(|rank| rank.end), std::cmp::Reverse(rank)));
    let reported = Rank(last.unwrap_or(0));

    let split = |timeline, rank| attribute(program, &communications, timeline, rank);
    let mut totals: BTreeMap<Key, Total> = BTreeMap::new();
    let mut by_kind = Vec::new();
    let mut ranks_of_list = vec![0; program.lists.len()];
    for rank in (0..ranks).map(Rank) {
        let pieces = (split(predicted, rank), split(measured, rank));
        if rank == reported {
            by_kind = kinds(program.list_of(rank), &pieces.0, &pieces.1, measured.step());
        }
        if let Some(count) = ranks_of_list.get_mut(program.list_index(rank)) {
            *count += 1;
        }
        for (key, sides) in by_instruction(program.list_index(rank), &pieces.0, &pieces.1) {
            let total = totals.entry(key).or_insert_with(|| Total::at(rank));
            total.add(rank, sides);
            if let (_, Some(id), Reason::Work) = key {
                total.active.predicted += active_time(program, &communications, predicted, rank, id);
                total.active.measured += active_time(program, &communications, measured, rank, id);
            }
        }
    }
    let (predicted_step, measured_step) = (Seconds::from(predicted.step()), Seconds::from(measured.step()));
    let error = if measured_step > Seconds::ZERO { predicted_step / measured_step - 1.0 } else { 0.0 };
    Comparison { predicted_step, measured_step, error, rank: reported, by_kind, worst: worst(program, &ranks_of_list, &totals) }
}

/// Predicted and measured time.
#[derive(Clone, Copy, Debug, Default)]
struct Sides {
    predicted: Picoseconds,
    measured: Picoseconds,
}

impl Sides {
    fn difference(self) -> Seconds {
        Seconds::from(self.predicted) - Seconds::from(self.measured)
    }

    fn magnitude(self) -> Picoseconds {
        Picoseconds(self.predicted.0.abs_diff(self.measured.0))
    }
}

fn kinds(stage: &StageProgram, predicted: &[Piece], measured: &[Piece], step: Picoseconds) -> Vec<KindRow> {
    // Every kind in the rank's list has a row, even if its time is completely hidden.
    let mut rows: BTreeMap<String, (Sides, usize)> = BTreeMap::new();
    for instruction in &stage.instructions {
        rows.entry(kind_of(&instruction.operation)).or_default().1 += 1;
    }
    for piece in predicted {
        rows.entry(kind(stage, piece.instruction, piece.reason)).or_default().0.predicted += piece.duration;
    }
    for piece in measured {
        let row = rows.entry(kind(stage, piece.instruction, piece.reason)).or_default();
        row.0.measured += piece.duration;
        row.1 += usize::from(piece.reason != Reason::Work);
    }
    let step = Seconds::from(step);
    let mut rows: Vec<KindRow> = rows
        .into_iter()
        .map(|(kind, (sides, count))| KindRow {
            kind,
            predicted: sides.predicted.into(),
            measured: sides.measured.into(),
            error_share: if step > Seconds::ZERO { sides.difference() / step } else { 0.0 },
            count,
        })
        .collect();
    rows.sort_by(|row, other| other.measured.value().total_cmp(&row.measured.value()).then_with(|| row.kind.cmp(&other.kind)));
    rows
}

/// Identifies a row of [`Comparison::worst`]: a list, its instruction, and the reason.
type Key = (usize, Option<InstructionId>, Reason);

fn by_instruction(list: usize, predicted: &[Piece], measured: &[Piece]) -> BTreeMap<Key, Sides> {
    let mut result: BTreeMap<Key, Sides> = BTreeMap::new();
    let key = |piece: &Piece| (list, piece.instruction, piece.reason);
    for piece in predicted {
        result.entry(key(piece)).or_default().predicted += piece.duration;
    }
    for piece in measured {
        result.entry(key(piece)).or_default().measured += piece.duration;
    }
    result
}

/// A row's sum over the ranks of its list.
struct Total {
    /// Contribution to the steps.
    sum: Sides,
    /// Duration of the instruction itself, hidden or not.
    active: Sides,
    worst_rank: Rank,
    worst: Picoseconds,
}

impl Total {
    fn at(rank: Rank) -> Self {
        Self { sum: Sides::default(), active: Sides::default(), worst_rank: rank, worst: Picoseconds::ZERO }
    }

    fn add(&mut self, rank: Rank, sides: Sides) {
        self.sum.predicted += sides.predicted;
        self.sum.measured += sides.measured;
        if sides.magnitude() > self.worst {
            (self.worst, self.worst_rank) = (sides.magnitude(), rank);
        }
    }
}

fn worst(program: &Program, ranks_of_list: &[usize], totals: &BTreeMap<Key, Total>) -> Vec<WorstRow> {
    let mut ordered: Vec<(&Key, &Total)> = totals.iter().filter(|(_, total)| total.sum.magnitude() > Picoseconds::ZERO).collect();
    ordered.sort_by_key(|(key, total)| (std::cmp::Reverse(total.sum.magnitude()), **key));
    let row = |(&(list, instruction, reason), total): (&Key, &Total)| {
        let ranks = ranks_of_list.get(list).copied().unwrap_or(1).max(1) as f64;
        let stage = program.lists.get(list)?;
        let what = instruction.and_then(|id| stage.instructions.get(id.0 as usize));
        let mean = |time: Picoseconds| Seconds::from(time) / ranks;
        let name = match what {
            Some(what) => stage.name_of(what).to_owned(),
            None => "end of the step".to_owned(),
        };
        Some(WorstRow {
            rank: total.worst_rank,
            instruction,
            name,
            kind: kind(stage, instruction, reason),
            micro_batch: what.and_then(|what| what.micro_batch),
            predicted: mean(total.sum.predicted),
            measured: mean(total.sum.measured),
            difference: total.sum.difference() / ranks,
            cause: cause(what.map(|what| &*what.operation), reason, total),
        })
    };
    ordered.into_iter().filter_map(row).take(MOST_WORST).collect()
}

fn kind(stage: &StageProgram, instruction: Option<InstructionId>, reason: Reason) -> String {
    let operation = instruction.and_then(|id| stage.instructions.get(id.0 as usize)).map(|instruction| &*instruction.operation);
    match (reason, operation) {
        (Reason::Work, Some(operation)) => kind_of(operation),
        (Reason::Wait, _) => "bubble".to_owned(),
        (Reason::Host, _) | (Reason::Work, None) => "host".to_owned(),
    }
}

fn kind_of(operation: &Operation) -> String {
    match operation {
        Operation::Compute { .. } | Operation::Traced { .. } => format!("compute: {}", operation.kind()),
        Operation::Collective { .. } | Operation::Send { .. } | Operation::Receive { .. } => {
            format!("communication: {}", operation.kind())
        }
        Operation::Load { .. } => "load".to_owned(),
        Operation::Copy { .. } | Operation::Save { .. } | Operation::Write { .. } => format!("copy: {}", operation.kind()),
    }
}

fn cause(operation: Option<&Operation>, reason: Reason, total: &Total) -> Cause {
    let Total { sum, active, .. } = total;
    // The instruction's own duration is the cause if it explains at least half of the difference,
    // in the same direction.
    let slower = sum.measured > sum.predicted;
    let by_itself = (active.measured > active.predicted) == slower && active.magnitude().0.saturating_mul(2) >= sum.magnitude().0;
    let (when_slower, when_faster) = match (reason, operation) {
        (Reason::Wait, _) => (Cause::WaitedForPeer, Cause::WaitedLess),
        (Reason::Host, _) | (Reason::Work, None) => (Cause::HostGap, Cause::ShorterHostGap),
        (Reason::Work, Some(Operation::Compute { .. })) => (Cause::KernelSlower, Cause::KernelFaster),
        (Reason::Work, Some(_)) if !by_itself => (Cause::LessHidden, Cause::MoreHidden),
        (Reason::Work, Some(Operation::Load { .. })) => (Cause::LoadSlower, Cause::LoadFaster),
        (Reason::Work, Some(_)) => (Cause::CommunicationSlower, Cause::CommunicationFaster),
    };
    if slower { when_slower } else { when_faster }
}

/// JSON documents have plain numbers in SI units; files that people write have `12ms`.
pub(crate) fn number<S: Serializer>(duration: &Seconds, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.value())
}

#[cfg(test)]
mod tests;
