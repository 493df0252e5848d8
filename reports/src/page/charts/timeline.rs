//! The timeline of a page: for each rank a row that shows how its step was spent, and a row for
//! each stream. It must not know layouts: everything follows from the instructions and their spans.

use crate::activity::Activity;
use crate::attribute::{Communications, Piece, Reason, attribute};
use crate::shown::shown_ranks;
use crate::trace::{origin_name, stream_name};
use foretell_program::{Instruction, InstructionId, Operation, Program, Rank, StageProgram, Timeline};
use foretell_units::{Picoseconds, Seconds};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

/// The most ranks of a chart.
const MOST_RANKS: usize = 16;
/// The most spans of a chart: about 3 MB of text, which browsers draw at once.
const MOST_SPANS: usize = 120_000;
/// A merged chart first distinguishes times that differ by the step divided by this number. If that
/// leaves too many spans, the number is halved.
const FINEST_SHARE: u64 = 65_536;

/// The document.
#[derive(Clone, Debug, Serialize)]
pub struct TimelineChart {
    /// The name and the step in seconds of each timeline.
    steps: Vec<(&'static str, f64)>,
    /// Names of [`Span::kind`].
    kinds: Vec<&'static str>,
    /// Names of [`Span::name`].
    names: Vec<String>,
    rows: Vec<Row>,
    /// What the chart leaves out.
    note: String,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    rank: usize,
    stage: usize,
    origin: &'static str,
    /// The stream; `None` for the row that shows how the step was spent.
    stream: Option<String>,
    #[serde(serialize_with = "flat")]
    spans: Vec<Span>,
}

/// A span in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Span {
    start: u64,
    end: u64,
    kind: usize,
    name: usize,
    micro_batch: Option<u32>,
}

/// What a rank's time was spent on. The first six are [`Activity::ALL`].
const KINDS: [&str; 9] =
    ["forward", "backward", "recompute", "update", "communication", "load", "exposed communication", "bubble", "host"];
const EXPOSED: usize = 6;
const BUBBLE: usize = 7;
const HOST: usize = 8;

impl TimelineChart {
    pub(super) fn of(program: &Program, timelines: &[&Timeline]) -> Self {
        let known = timelines.iter().map(|timeline| timeline.ranks.len()).max().unwrap_or(0).min(program.mesh.world_size());
        let shown = shown_ranks(program, known, MOST_RANKS);
        let communications = Communications::of(program);
        let mut names = Names::default();
        let mut rows = Vec::new();
        for &rank in &shown {
            for timeline in timelines {
                rows.push(spent(program, &communications, timeline, rank, &mut names));
            }
            rows.extend(streams(program, timelines, rank, &mut names));
        }
        rows.retain(|row| !row.spans.is_empty());
        let mut notes = Vec::new();
        if shown.len() < known {
            notes.push(format!("{} of {known} ranks: the first of each stage", shown.len()));
        }
        let longest = timelines.iter().map(|timeline| nanoseconds(timeline.step())).max().unwrap_or(0);
        notes.extend(coarsened(&mut rows, longest, &mut names));
        Self {
            steps: timelines
                .iter()
                .map(|timeline| (origin_name(timeline.origin), Seconds::from(timeline.step()).value()))
                .collect(),
            kinds: KINDS.to_vec(),
            names: names.list,
            rows,
            note: notes.join("; "),
        }
    }
}

/// Names, each kept once.
#[derive(Default)]
struct Names {
    list: Vec<String>,
    places: BTreeMap<String, usize>,
}

impl Names {
    fn place(&mut self, name: &str) -> usize {
        if let Some(&place) = self.places.get(name) {
            return place;
        }
        self.places.insert(name.to_owned(), self.list.len());
        self.list.push(name.to_owned());
        self.list.len() - 1
    }

    fn of(&mut self, list: &StageProgram, instruction: &Instruction) -> usize {
        let name = list.name_of(instruction);
        self.place(&format!("{} {name}", instruction.operation.kind()))
    }
}

/// The row of a rank that shows how its step was spent: kernels, and the reasons why none ran.
fn spent(program: &Program, communications: &Communications, timeline: &Timeline, rank: Rank, names: &mut Names) -> Row {
    let list = program.list_of(rank);
    let mut pieces = attribute(program, communications, timeline, rank);
    pieces.sort_by_key(|piece| piece.start);
    let span = |piece: &Piece| {
        let instruction = piece.instruction.and_then(|id| list.instructions.get(id.0 as usize));
        let kind = match (piece.reason, instruction) {
            (Reason::Wait, _) => BUBBLE,
            (Reason::Host, _) | (Reason::Work, None) => HOST,
            (Reason::Work, Some(instruction)) => match &*instruction.operation {
                Operation::Compute { .. } | Operation::Load { .. } => kind_of(instruction),
                _ => EXPOSED,
            },
        };
        Span {
            start: nanoseconds(piece.start),
            end: nanoseconds(Picoseconds(piece.start.0.saturating_add(piece.duration.0))),
            kind,
            name: match instruction {
                Some(instruction) => names.of(list, instruction),
                None => names.place("end of the step"),
            },
            micro_batch: instruction.and_then(|instruction| instruction.micro_batch),
        }
    };
    let spans = pieces.iter().map(span).collect();
    Row { rank: rank.0, stage: list.stage, origin: origin_name(timeline.origin), stream: None, spans }
}

/// The rows of a rank's streams. Each stream's prediction is right above its measurement.
fn streams(program: &Program, timelines: &[&Timeline], rank: Rank, names: &mut Names) -> Vec<Row> {
    let list = program.list_of(rank);
    let mut rows = Vec::new();
    for (index, stream) in list.streams.iter().enumerate() {
        for timeline in timelines {
            let Some(own) = timeline.rank(rank) else { continue };
            let of_stream = |id: InstructionId| {
                list.instructions.get(id.0 as usize).filter(|instruction| instruction.stream.0 as usize == index)
            };
            let mut spans: Vec<Span> = own
                .spans
                .iter()
                .filter_map(|span| {
                    let instruction = of_stream(span.instruction)?;
                    Some(Span {
                        start: nanoseconds(span.start),
                        end: nanoseconds(span.end),
                        kind: kind_of(instruction),
                        name: names.of(list, instruction),
                        micro_batch: instruction.micro_batch,
                    })
                })
                .collect();
            spans.sort_by_key(|span| (span.start, span.end));
            let (origin, stream) = (origin_name(timeline.origin), Some(stream_name(list, stream)));
            rows.push(Row { rank: rank.0, stage: list.stage, origin, stream, spans });
        }
    }
    rows
}

fn kind_of(instruction: &Instruction) -> usize {
    let activity = Activity::of(instruction);
    Activity::ALL.iter().position(|listed| *listed == activity).unwrap_or(HOST)
}

/// Rounds down: half a nanosecond is invisible, and ends then equal the starts that follow.
fn nanoseconds(time: Picoseconds) -> u64 {
    time.0 / 1000
}

/// Merges neighbours until at most [`MOST_SPANS`] are left. Returns a sentence if it merged any.
fn coarsened(rows: &mut [Row], step: u64, names: &mut Names) -> Option<String> {
    let count = |rows: &[Row]| rows.iter().map(|row| row.spans.len()).sum::<usize>();
    let mut share = FINEST_SHARE;
    if count(rows) <= MOST_SPANS {
        return None;
    }
    let several = names.place("several instructions");
    let mut detail = 0;
    while count(rows) > MOST_SPANS && share > 0 {
        detail = (step / share).max(1);
        for row in rows.iter_mut() {
            row.spans = merged(&row.spans, detail, several);
        }
        share /= 2;
    }
    Some(format!("neighbours of one kind closer than {} are merged", Seconds::new(detail as f64 * 1e-9)))
}

/// Joins each span with the previous one if both have the same kind and are at most `detail` apart.
/// Drops a span of another kind that is shorter than `detail` and ends less than `detail` after the
/// previous one.
fn merged(spans: &[Span], detail: u64, several: usize) -> Vec<Span> {
    let mut result: Vec<Span> = Vec::new();
    for &span in spans {
        match result.last_mut() {
            Some(last) if last.kind == span.kind && span.start <= last.end.saturating_add(detail) => {
                last.end = last.end.max(span.end);
                last.name = if last.name == span.name { last.name } else { several };
                last.micro_batch = last.micro_batch.filter(|_| last.micro_batch == span.micro_batch);
            }
            Some(last) if span.end < last.end.saturating_add(detail) && span.end - span.start.min(span.end) < detail => {}
            _ => result.push(span),
        }
    }
    result
}

/// Spans as one list of numbers. Each span has five: the time since the end of the previous one
/// (negative if they overlap), its duration, kind, name, and micro-batch plus 1 (0 if it belongs to
/// none).
fn flat<S: Serializer>(spans: &[Span], serializer: S) -> Result<S::Ok, S::Error> {
    let mut before = 0i64;
    let numbers = spans.iter().flat_map(|span| {
        let (start, end) = (span.start as i64, span.end as i64);
        let gap = start - before;
        before = end;
        let micro_batch = span.micro_batch.map_or(0, |number| i64::from(number) + 1);
        [gap, end - start, span.kind as i64, span.name as i64, micro_batch]
    });
    serializer.collect_seq(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn kinds_begin_with_the_activities() {
        let names: Vec<&str> = Activity::ALL.iter().map(|activity| activity.name()).collect();
        assert_eq!(names, KINDS[..Activity::ALL.len()]);
    }

    #[test]
    fn the_pieces_of_a_rank_fill_its_step_without_overlap() {
        let (program, predicted, measured) = sample::pipeline();
        let chart = TimelineChart::of(&program, &[&predicted, &measured]);
        let spent: Vec<&Row> = chart.rows.iter().filter(|row| row.stream.is_none()).collect();
        assert_eq!(spent.len(), 8, "four ranks, predicted and measured");
        for row in spent {
            let step = if row.origin == "predicted" { predicted.step() } else { measured.step() };
            let mut clock = 0;
            for span in &row.spans {
                assert_eq!(span.start, clock, "rank {} {}", row.rank, row.origin);
                clock = span.end;
            }
            assert_eq!(clock, nanoseconds(step));
        }
        let kinds = |kind: usize| chart.rows.iter().flat_map(|row| &row.spans).any(|span| span.kind == kind);
        assert!(kinds(BUBBLE) && kinds(EXPOSED), "the sample has a bubble and exposed communication");
    }

    #[test]
    fn merging_bounds_the_spans_and_keeps_the_ends() {
        let span =
            |start: u64| Span { start, end: start + 1, kind: (start % 3) as usize / 2, name: start as usize, micro_batch: None };
        let spans: Vec<Span> = (0..400_000).map(span).collect();
        let row = |spans| Row { rank: 0, stage: 0, origin: "predicted", stream: None, spans };
        let mut rows = [row(spans)];
        let mut names = Names::default();
        let note = coarsened(&mut rows, 400_000, &mut names).expect("too many spans");
        assert!(note.contains("merged") && rows[0].spans.len() <= MOST_SPANS);
        assert!(rows[0].spans.first().is_some_and(|first| first.start == 0));
        assert!(rows[0].spans.last().is_some_and(|last| last.end > 399_000));
    }
}
