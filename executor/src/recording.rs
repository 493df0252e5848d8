//! A rank's measured spans: the last steps of a run, written as one file a rank and read back as one Timeline.

use crate::error::ExecutorError;
use crate::files::write_whole;
use crate::interpreter::RawSpan;
use foretell_program::{InstructionId, Origin, Rank, RankTimeline, Span, Timeline};
use foretell_units::Picoseconds;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

/// The most spans kept: some tens of megabytes of text.
const MOST_SPANS: usize = 1_000_000;
/// The most steps kept; enough for steady medians.
const MOST_STEPS: usize = 64;
/// The step that warms up.
const WARM_UP: usize = 0;

/// One step of one rank, in nanoseconds of the machine's clock.
#[derive(Debug, Serialize, Deserialize)]
struct StepSpans {
    /// Counted from 0. Ranks of different stages keep different numbers of steps.
    step: usize,
    start: u64,
    end: u64,
    /// Start and end of each instruction, from the step's start.
    spans: Vec<(u64, u64)>,
}

/// The steps of one rank.
#[derive(Debug, Serialize, Deserialize)]
struct RankFile {
    rank: Rank,
    steps: VecDeque<StepSpans>,
}

/// The last steps of this rank.
pub(crate) struct Recording {
    steps: VecDeque<StepSpans>,
    most: usize,
}

impl Recording {
    pub(crate) fn new(instructions: usize) -> Self {
        Self { steps: VecDeque::new(), most: (MOST_SPANS / instructions.max(1)).clamp(1, MOST_STEPS) }
    }

    pub(crate) fn add(&mut self, step: usize, start: u64, end: u64, spans: Vec<RawSpan>) {
        if self.steps.len() == self.most {
            self.steps.pop_front();
        }
        let spans = spans.iter().map(|span| (span.start.saturating_sub(start), span.end.saturating_sub(start))).collect();
        self.steps.push_back(StepSpans { step, start, end, spans });
    }

    pub(crate) fn write(self, path: &Path, rank: Rank) -> Result<(), ExecutorError> {
        let file = RankFile { rank, steps: self.steps };
        let text = serde_json::to_vec(&file).map_err(|error| ExecutorError::system("write the timeline", error.into()))?;
        write_whole(path, &text)
    }
}

/// Reads the spans that the ranks of a run wrote into `folder`: each instruction's median start and end over the steps that all ranks
/// kept, the run's first of which (its warm-up) is left out where there are others. A step begins when its last rank begins it.
///
/// # Errors
/// [`ExecutorError::System`] where a file is missing or is not such a file, or where no step is in all of them.
pub fn read_timeline(folder: &Path, world_size: usize) -> Result<Timeline, ExecutorError> {
    let mut files = Vec::with_capacity(world_size);
    for rank in 0..world_size {
        let path = folder.join(format!("{rank}.json"));
        let doing = || format!("read the measured spans in `{}`", path.display());
        let text = std::fs::read(&path).map_err(|error| ExecutorError::system(doing(), error))?;
        let file: RankFile = serde_json::from_slice(&text).map_err(|error| ExecutorError::system(doing(), error.into()))?;
        files.push(file);
    }
    let begins = begins(&files);
    if begins.is_empty() && world_size > 0 {
        let missing = std::io::Error::new(std::io::ErrorKind::InvalidData, "no step is in the files of all ranks");
        return Err(ExecutorError::system(format!("read the measured spans in `{}`", folder.display()), missing));
    }
    let ranks = files.iter().map(|file| Arc::new(median_rank(file, &begins))).collect();
    Ok(Timeline { origin: Origin::Measured, ranks })
}

/// When the last rank began each step that all of them kept, by the step's number.
fn begins(files: &[RankFile]) -> BTreeMap<usize, u64> {
    let mut starts: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for step in files.iter().flat_map(|file| &file.steps) {
        starts.entry(step.step).or_default().push(step.start);
    }
    starts.retain(|_, starts| starts.len() == files.len());
    if starts.len() > 2 {
        starts.remove(&WARM_UP);
    }
    starts.into_iter().map(|(step, starts)| (step, starts.into_iter().max().unwrap_or(0))).collect()
}

fn median_rank(file: &RankFile, begins: &BTreeMap<usize, u64>) -> RankTimeline {
    let kept: Vec<(&StepSpans, u64)> =
        file.steps.iter().filter_map(|step| begins.get(&step.step).map(|&begin| (step, begin))).collect();
    let instructions = kept.iter().map(|(step, _)| step.spans.len()).min().unwrap_or(0);
    // What ran before the last rank had begun ran at the beginning.
    let from_begin = |step: &StepSpans, begin: u64, time: u64| (step.start + time).saturating_sub(begin);
    let spans = (0..instructions)
        .map(|index| Span {
            instruction: InstructionId(index as u32),
            start: median(kept.iter().map(|(step, begin)| from_begin(step, *begin, step.spans[index].0))),
            end: median(kept.iter().map(|(step, begin)| from_begin(step, *begin, step.spans[index].1))),
        })
        .collect();
    RankTimeline { spans, end: median(kept.iter().map(|(step, begin)| step.end.saturating_sub(*begin))) }
}

/// The median of nanoseconds, as simulated time.
fn median(times: impl Iterator<Item = u64>) -> Picoseconds {
    let mut times: Vec<u64> = times.collect();
    times.sort_unstable();
    Picoseconds(times.get(times.len() / 2).copied().unwrap_or(0) * 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of 100 ns each second, `late` behind the second; its one instruction runs from 10 to 20 ns.
    fn step(number: usize, late: u64) -> StepSpans {
        let start = number as u64 * 1_000_000_000 + late;
        StepSpans { step: number, start, end: start + 100, spans: vec![(10, 20)] }
    }

    fn write(folder: &Path, rank: usize, steps: std::ops::Range<usize>, late: u64) {
        let recording = Recording { steps: steps.map(|number| step(number, late)).collect(), most: MOST_STEPS };
        recording.write(&folder.join(format!("{rank}.json")), Rank(rank)).expect("it is written");
    }

    #[test]
    fn ranks_that_kept_different_numbers_of_steps_are_compared_step_by_step() {
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), 0, 0..10, 0);
        write(folder.path(), 1, 6..10, 5);
        let timeline = read_timeline(folder.path(), 2).expect("both are read");
        let times = |rank: usize| (timeline.ranks[rank].spans[0].start, timeline.ranks[rank].end);
        // Rank 1 begins last: what rank 0 does counts from there.
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
    fn a_recording_keeps_the_last_steps() {
        let mut recording = Recording::new(MOST_SPANS / 2);
        for number in 0..5 {
            recording.add(number, 0, 1, Vec::new());
        }
        assert_eq!(recording.steps.iter().map(|step| step.step).collect::<Vec<_>>(), [3, 4]);
    }
}
