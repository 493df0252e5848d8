//! Measured spans. Each rank keeps those of its last steps and writes them to a file of its own;
//! [`read_timeline`] combines the files into one Timeline.

use crate::error::ExecutorError;
use crate::files::write_whole;
use crate::interpreter::RawSpan;
use crate::regular;
use foretell_program::{InstructionId, Origin, Rank, RankTimeline, Span, Timeline};
use foretell_units::{Picoseconds, SchemaVersion};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

/// The longest file of spans that is read: one of some 80 million.
const MOST_TIMELINE: u64 = 4 << 30;

/// The most spans that a rank keeps: some tens of megabytes of text.
const MOST_SPANS: usize = 1_000_000;
/// The most steps that a rank keeps: enough for stable medians.
const MOST_STEPS: usize = 64;

/// One step of one rank, in nanoseconds.
#[derive(Debug, Serialize, Deserialize)]
pub struct StepSpans {
    /// The step, counted from 0.
    pub step: usize,
    /// Start of the step, by a clock that all ranks share.
    pub start: u64,
    /// End of the step, by the same clock.
    pub end: u64,
    /// Start and end of each instruction, relative to the step's start.
    pub spans: Vec<(u64, u64)>,
}

/// The contents of a rank's file.
#[derive(Debug, Serialize, Deserialize)]
struct RankFile {
    #[serde(default)]
    schema_version: SchemaVersion,
    rank: Rank,
    /// The first step that the processes made. In it, caches and connections warm up.
    #[serde(default)]
    first: usize,
    steps: VecDeque<StepSpans>,
}

/// The spans of a rank's last steps.
pub(crate) struct SpanRecorder {
    first: usize,
    steps: VecDeque<StepSpans>,
    /// The most steps to keep. It differs between stages, because their lists differ in length.
    capacity: usize,
}

impl SpanRecorder {
    /// A recorder for a list of `instructions` instructions, in a run whose processes begin with
    /// step `first`.
    pub(crate) fn new(instructions: usize, first: usize) -> Self {
        Self { first, steps: VecDeque::new(), capacity: (MOST_SPANS / instructions.max(1)).clamp(1, MOST_STEPS) }
    }

    /// Adds a step. Drops the oldest one if there are too many.
    pub(crate) fn add(&mut self, step: usize, start: u64, end: u64, spans: Vec<RawSpan>) {
        if self.steps.len() == self.capacity {
            self.steps.pop_front();
        }
        let spans = spans.iter().map(|span| (span.start.saturating_sub(start), span.end.saturating_sub(start))).collect();
        self.steps.push_back(StepSpans { step, start, end, spans });
    }

    /// Writes the rank's file.
    pub(crate) fn write(self, path: &Path, rank: Rank) -> Result<(), ExecutorError> {
        write_whole(path, &timeline_file(rank, self.first, self.steps)?)
    }
}

/// The contents of a rank's file, as [`read_timeline`] reads it. The steps may also come from
/// another program's measurement. `first` is the first step that the processes made.
///
/// # Errors
/// [`ExecutorError::System`] if the steps cannot be written as JSON.
pub fn timeline_file(rank: Rank, first: usize, steps: VecDeque<StepSpans>) -> Result<Vec<u8>, ExecutorError> {
    serde_json::to_vec(&RankFile { schema_version: SchemaVersion, rank, first, steps })
        .map_err(|error| ExecutorError::system("write the timeline", error.into()))
}

/// Reads the spans that the ranks of a run wrote to `folder`.
///
/// An instruction starts and ends at the medians over the steps that all ranks kept, relative to
/// the moment when the last rank started the step. The first step of the processes is left out if
/// more than two are left.
///
/// # Errors
/// [`ExecutorError::System`] if a file is missing or malformed, or if no step is in all files.
pub fn read_timeline(folder: &Path, world_size: usize) -> Result<Timeline, ExecutorError> {
    let mut files = Vec::with_capacity(world_size);
    for rank in 0..world_size {
        let path = folder.join(format!("{rank}.json"));
        let doing = || format!("read the measured spans in `{}`", path.display());
        let text = regular::read(&path, MOST_TIMELINE).map_err(|error| ExecutorError::system(doing(), error))?;
        let file: RankFile = serde_json::from_slice(&text).map_err(|error| ExecutorError::system(doing(), error.into()))?;
        files.push(file);
    }
    let step_starts = step_starts(&files);
    if step_starts.is_empty() && world_size > 0 {
        let missing = std::io::Error::new(std::io::ErrorKind::InvalidData, "no step is in the files of all ranks");
        return Err(ExecutorError::system(format!("read the measured spans in `{}`", folder.display()), missing));
    }
    let ranks = files.iter().map(|file| Arc::new(median_rank(file, &step_starts))).collect();
    Ok(Timeline { origin: Origin::Measured, ranks })
}

/// For each step that all ranks kept, the time when the last rank started it.
fn step_starts(files: &[RankFile]) -> BTreeMap<usize, u64> {
    let mut starts: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for step in files.iter().flat_map(|file| &file.steps) {
        starts.entry(step.step).or_default().push(step.start);
    }
    starts.retain(|_, starts| starts.len() == files.len());
    if starts.len() > 2 {
        files.iter().for_each(|file| {
            starts.remove(&file.first);
        });
    }
    let last = |starts: Vec<u64>| starts.into_iter().max().expect("invariant: every rank has started the step");
    starts.into_iter().map(|(step, starts)| (step, last(starts))).collect()
}

/// The median spans of a rank, relative to `step_starts`.
fn median_rank(file: &RankFile, step_starts: &BTreeMap<usize, u64>) -> RankTimeline {
    let kept: Vec<(&StepSpans, u64)> =
        file.steps.iter().filter_map(|step| step_starts.get(&step.step).map(|&common_start| (step, common_start))).collect();
    let instructions = kept.iter().map(|(step, _)| step.spans.len()).min().unwrap_or(0);
    // Times before the last rank started the step become 0.
    let relative = |step: &StepSpans, common_start: u64, time: u64| (step.start + time).saturating_sub(common_start);
    let spans = (0..instructions)
        .map(|index| Span {
            instruction: InstructionId(index as u32),
            start: median(kept.iter().map(|(step, start)| relative(step, *start, step.spans[index].0))),
            end: median(kept.iter().map(|(step, start)| relative(step, *start, step.spans[index].1))),
        })
        .collect();
    RankTimeline { spans, end: median(kept.iter().map(|(step, start)| step.end.saturating_sub(*start))) }
}

/// The median of times in nanoseconds; 0 if there are none.
fn median(times: impl Iterator<Item = u64>) -> Picoseconds {
    Picoseconds(foretell_units::median(times, Ord::cmp).unwrap_or(0) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of 100 ns that starts `delay` ns after the full second `number`. Its one instruction
    /// runs from 10 to 20 ns.
    fn step(number: usize, delay: u64) -> StepSpans {
        let start = number as u64 * 1_000_000_000 + delay;
        StepSpans { step: number, start, end: start + 100, spans: vec![(10, 20)] }
    }

    fn write(folder: &Path, rank: usize, steps: std::ops::Range<usize>, delay: u64) {
        let first = steps.start;
        let recording = SpanRecorder { first, steps: steps.map(|number| step(number, delay)).collect(), capacity: MOST_STEPS };
        recording.write(&folder.join(format!("{rank}.json")), Rank(rank)).expect("a writable folder");
    }

    #[test]
    fn spans_are_relative_to_the_last_start_of_each_common_step() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), 0, 0..10, 0);
        write(folder.path(), 1, 6..10, 5);
        let timeline = read_timeline(folder.path(), 2).expect("two files");
        let times = |rank: usize| (timeline.ranks[rank].spans[0].start, timeline.ranks[rank].end);
        // Rank 1 starts last: the times of rank 0 count from there.
        assert_eq!(times(0), (Picoseconds(5_000), Picoseconds(95_000)));
        assert_eq!(times(1), (Picoseconds(10_000), Picoseconds(100_000)));
    }

    #[test]
    fn files_without_a_common_step_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), 0, 0..3, 0);
        write(folder.path(), 1, 3..6, 0);
        assert!(read_timeline(folder.path(), 2).is_err());
    }

    #[test]
    fn the_first_step_of_a_resumed_run_warms_up() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut recording = SpanRecorder::new(1, 7);
        for (number, start) in [(7, 0), (8, 30), (9, 10)] {
            recording.add(number, 0, 100, vec![RawSpan { start, end: 90 }]);
        }
        recording.write(&folder.path().join("0.json"), Rank(0)).expect("a writable folder");
        let timeline = read_timeline(folder.path(), 1).expect("a file");
        assert_eq!(timeline.ranks[0].spans[0].start, Picoseconds(30_000), "the median of 30 and 10 is the later");
    }

    #[test]
    fn a_recorder_keeps_the_last_steps() {
        let mut recording = SpanRecorder::new(MOST_SPANS / 2, 0);
        for number in 0..5 {
            recording.add(number, 0, 1, Vec::new());
        }
        assert_eq!(recording.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [3, 4]);
    }
}
