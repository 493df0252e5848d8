//! A rank's measured spans: the last steps of a run, written as one file a rank and read back as one Timeline.

use crate::error::ExecutorError;
use crate::files::write_whole;
use crate::interpreter::RawSpan;
use foretell_program::{InstructionId, Origin, Rank, RankTimeline, Span, Timeline};
use foretell_units::Picoseconds;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::Path;

/// The most spans kept: some tens of megabytes of text.
const MOST_SPANS: usize = 1_000_000;
/// The most steps kept; enough for steady medians.
const MOST_STEPS: usize = 64;

/// One step of one rank, in nanoseconds of the machine's clock.
#[derive(Debug, Serialize, Deserialize)]
struct StepSpans {
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

    pub(crate) fn add(&mut self, start: u64, end: u64, spans: Vec<RawSpan>) {
        if self.steps.len() == self.most {
            self.steps.pop_front();
        }
        let spans = spans.iter().map(|span| (span.start.saturating_sub(start), span.end.saturating_sub(start))).collect();
        self.steps.push_back(StepSpans { start, end, spans });
    }

    pub(crate) fn write(self, path: &Path, rank: Rank) -> Result<(), ExecutorError> {
        let file = RankFile { rank, steps: self.steps };
        let text = serde_json::to_vec(&file).map_err(|error| ExecutorError::system("write the timeline", error.into()))?;
        write_whole(path, &text)
    }
}

/// Reads the spans that the ranks of a run wrote into `folder`: each instruction's median start and end over the steps kept, the first of
/// which (a run's warm-up) is left out where there are others. A step begins when its last rank begins it.
///
/// # Errors
/// [`ExecutorError::System`] where a file is missing or is not such a file.
pub fn read_timeline(folder: &Path, world_size: usize) -> Result<Timeline, ExecutorError> {
    let mut files = Vec::with_capacity(world_size);
    for rank in 0..world_size {
        let path = folder.join(format!("{rank}.json"));
        let doing = || format!("read the measured spans in `{}`", path.display());
        let text = std::fs::read(&path).map_err(|error| ExecutorError::system(doing(), error))?;
        let file: RankFile = serde_json::from_slice(&text).map_err(|error| ExecutorError::system(doing(), error.into()))?;
        files.push(file);
    }
    let steps = files.iter().map(|file| file.steps.len()).min().unwrap_or(0);
    let skipped = usize::from(steps > 2);
    let begins: Vec<u64> = (0..steps)
        .map(|step| files.iter().filter_map(|file| file.steps.get(step)).map(|step| step.start).max().unwrap_or(0))
        .collect();
    let ranks = files.iter().map(|file| median_rank(file, &begins, skipped)).collect();
    Ok(Timeline { origin: Origin::Measured, ranks })
}

fn median_rank(file: &RankFile, begins: &[u64], skipped: usize) -> RankTimeline {
    let kept: Vec<(&StepSpans, u64)> = file.steps.iter().zip(begins.iter().copied()).skip(skipped).collect();
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
