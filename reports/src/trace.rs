//! Traces for Perfetto and `chrome://tracing`, in the Trace Event Format (Google, "Trace Event
//! Format", 2016).
//!
//! Each timeline of each rank is a process, so that a rank's prediction and measurement are
//! neighbours. Each stream is a thread. Events are ordered by rank, timeline and instruction, so
//! the same timelines make the same bytes.

use crate::error::ReportError;
use foretell_program::{Instruction, Operation, Origin, Peer, PeerId, Program, Rank, Span, StageProgram, Stream, Timeline};
use foretell_units::{Bytes, DataType, Picoseconds};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write;

/// Writes timelines of a Program as one trace, of all ranks. Ignores spans of instructions that the
/// Program does not have.
///
/// # Errors
/// [`ReportError::Write`] if the writer fails.
pub fn write_trace(program: &Program, timelines: &[&Timeline], writer: impl Write) -> Result<(), ReportError> {
    let ranks: Vec<Rank> = (0..program.mesh.world_size()).map(Rank).collect();
    write_trace_of(program, timelines, &ranks, writer)
}

/// Returns the first rank of each set of ranks that run the same list at the same times.
pub fn differing_ranks(program: &Program, timelines: &[&Timeline]) -> Vec<Rank> {
    let mut differing: Vec<Rank> = Vec::new();
    let mut by_end: BTreeMap<(usize, Vec<Option<Picoseconds>>), Vec<Rank>> = BTreeMap::new();
    for rank in (0..program.mesh.world_size()).map(Rank) {
        let ends = timelines.iter().map(|timeline| timeline.rank(rank).map(|step| step.end)).collect();
        let alike = by_end.entry((program.list_index(rank), ends)).or_default();
        // Ranks that a simulation folds have the same span objects, so most comparisons end at
        // once.
        let is_equal = |other: &Rank| {
            timelines.iter().all(|timeline| match (timeline.rank(rank), timeline.rank(*other)) {
                (Some(one), Some(other)) => std::ptr::eq(one, other) || one == other,
                (one, other) => one.is_none() == other.is_none(),
            })
        };
        if !alike.iter().any(is_equal) {
            alike.push(rank);
            differing.push(rank);
        }
    }
    differing
}

/// As [`write_trace`], for some ranks.
///
/// # Errors
/// [`ReportError::Write`] if the writer fails.
pub fn write_trace_of(
    program: &Program,
    timelines: &[&Timeline],
    ranks: &[Rank],
    mut writer: impl Write,
) -> Result<(), ReportError> {
    writer.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut separator = "\n";
    let mut write = |event: Value| -> Result<(), ReportError> {
        write!(writer, "{separator}{event}")?;
        separator = ",\n";
        Ok(())
    };
    for &rank in ranks.iter().filter(|rank| rank.0 < program.mesh.world_size()) {
        let stage = program.list_of(rank);
        for (position, timeline) in timelines.iter().enumerate() {
            let Some(spans) = timeline.rank(rank) else { continue };
            let process = rank.0 * timelines.len() + position;
            write(metadata("process_name", process, 0, json!({"name": format!("{rank} {}", origin_name(timeline.origin))})))?;
            write(metadata("process_sort_index", process, 0, json!({"sort_index": process})))?;
            for (thread, stream) in stage.streams.iter().enumerate() {
                write(metadata("thread_name", process, thread, json!({"name": stream_name(stage, stream)})))?;
                write(metadata("thread_sort_index", process, thread, json!({"sort_index": thread})))?;
            }
            for span in &spans.spans {
                if let Some(instruction) = stage.instructions.get(span.instruction.0 as usize) {
                    write(event(program.precision, stage, instruction, span, process))?;
                }
            }
        }
    }
    writer.write_all(b"\n]}\n")?;
    writer.flush()?;
    Ok(())
}

/// Returns a timeline's name in reports.
pub(crate) const fn origin_name(origin: Origin) -> &'static str {
    match origin {
        Origin::Predicted => "predicted",
        Origin::Measured => "measured",
    }
}

/// Returns a stream's name in reports. A group's stream is named by its axes.
pub(crate) fn stream_name(stage: &StageProgram, stream: &Stream) -> String {
    match stream {
        Stream::Group(id) => stage.groups.get(id.0 as usize).map_or_else(|| stream.to_string(), |group| format!("group {group}")),
        Stream::SendTo(peer) => format!("to {}", peer_name(stage, *peer)),
        Stream::ReceiveFrom(peer) => format!("from {}", peer_name(stage, *peer)),
        other => other.to_string(),
    }
}

/// Returns a peer's name: its stage, and its number if the rank has several peers in that stage.
fn peer_name(list: &StageProgram, peer: PeerId) -> String {
    match list.peers.get(peer.0 as usize) {
        Some(Peer { stage, ranks: None }) => format!("stage {stage}"),
        Some(Peer { stage, ranks: Some(_) }) => format!("stage {stage}, peer {}", peer.0),
        None => format!("peer {}", peer.0),
    }
}

fn metadata(name: &str, process: usize, thread: usize, arguments: Value) -> Value {
    json!({"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments})
}

fn event(precision: DataType, stage: &StageProgram, instruction: &Instruction, span: &Span, process: usize) -> Value {
    let name = stage.name_of(instruction);
    json!({
        "ph": "X",
        "name": format!("{} {name}", instruction.operation.kind()),
        "cat": instruction.phase,
        "pid": process,
        "tid": instruction.stream.0,
        "ts": microseconds(span.start),
        "dur": microseconds(span.duration()),
        "args": {
            "instruction": span.instruction,
            "micro_batch": instruction.micro_batch,
            "phase": instruction.phase,
            "bytes": bytes(precision, stage, instruction).map(Bytes::count),
        },
    })
}

/// The bytes that an instruction moves: over a network, between memories, to storage, from the data
/// set, or between a device's memory and its cores.
fn bytes(precision: DataType, stage: &StageProgram, instruction: &Instruction) -> Option<Bytes> {
    match &*instruction.operation {
        Operation::Compute { kernel, .. } => Some(kernel.bytes(precision)),
        Operation::Traced { bytes, .. }
        | Operation::Collective { bytes, .. }
        | Operation::Send { bytes, .. }
        | Operation::Receive { bytes, .. }
        | Operation::Copy { bytes, .. }
        | Operation::Save { bytes, .. }
        | Operation::Write { bytes } => Some(*bytes),
        Operation::Load { .. } => {
            instruction.writes.first().and_then(|id| stage.buffers.get(id.0 as usize)).map(|buffer| buffer.bytes)
        }
    }
}

fn microseconds(time: Picoseconds) -> f64 {
    time.0 as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn a_trace_has_as_many_events_as_spans_and_is_the_same_every_time() {
        let (program, predicted, measured) = sample::pipeline();
        let trace = || {
            let mut bytes = Vec::new();
            write_trace(&program, &[&predicted, &measured], &mut bytes).expect("a vector takes everything");
            bytes
        };
        assert_eq!(trace(), trace());
        let document: Value = serde_json::from_slice(&trace()).expect("valid JSON");
        let events = document["traceEvents"].as_array().expect("a list");
        let complete = events.iter().filter(|event| event["ph"] == "X").count();
        let spans: usize = [&predicted, &measured].iter().flat_map(|timeline| &timeline.ranks).map(|rank| rank.spans.len()).sum();
        assert_eq!(complete, spans);
        let names: Vec<&str> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        assert!(names.contains(&"rank 0 predicted") && names.contains(&"rank 0 measured") && names.contains(&"group data"));
    }

    #[test]
    fn an_event_says_what_it_is() {
        let (program, predicted, _) = sample::pipeline();
        let mut bytes = Vec::new();
        write_trace(&program, &[&predicted], &mut bytes).expect("a vector takes everything");
        let document: Value = serde_json::from_slice(&bytes).expect("valid JSON");
        let events = document["traceEvents"].as_array().expect("a list");
        let reduce = events.iter().find(|event| event["name"] == "all_reduce gradients").expect("the gradients' all-reduce");
        assert_eq!(reduce["cat"], "update");
        assert_eq!(reduce["args"]["bytes"], 4 << 20);
        assert!(reduce["dur"].as_f64().is_some_and(|duration| duration > 0.0));
    }

    #[test]
    fn no_timelines_and_foreign_spans_still_make_a_trace() {
        let (program, mut predicted, _) = sample::pipeline();
        std::sync::Arc::make_mut(&mut predicted.ranks[0]).spans[0].instruction.0 = 9999;
        for timelines in [vec![], vec![&predicted]] {
            let mut bytes = Vec::new();
            write_trace(&program, &timelines, &mut bytes).expect("a vector takes everything");
            assert!(serde_json::from_slice::<Value>(&bytes).is_ok());
        }
    }
    #[test]
    fn ranks_that_do_the_same_stand_for_each_other() {
        let (program, predicted, measured) = sample::pipeline();
        let all: Vec<Rank> = (0..program.mesh.world_size()).map(Rank).collect();
        let differing = differing_ranks(&program, &[&predicted, &measured]);
        assert!(differing.contains(&Rank(0)) && differing.len() <= all.len());
        for rank in all {
            let stands = |other: &&Rank| {
                program.list_index(rank) == program.list_index(**other)
                    && predicted.rank(rank) == predicted.rank(**other)
                    && measured.rank(rank) == measured.rank(**other)
            };
            assert_eq!(differing.iter().filter(stands).count(), 1, "{rank}");
        }
        let mut bytes = Vec::new();
        write_trace_of(&program, &[&predicted], &[Rank(1)], &mut bytes).expect("a vector takes everything");
        let document: Value = serde_json::from_slice(&bytes).expect("valid JSON");
        let events = document["traceEvents"].as_array().expect("a list");
        assert!(events.iter().all(|event| event["pid"] == 1) && !events.is_empty());
    }
}
