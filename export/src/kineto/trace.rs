//! The text of a trace: its events, and its steps. It must not know Programs.

use super::KinetoError;
use super::calls::{Call, calls};
use super::event::Event;
use serde::Deserialize;
use serde_json::Value;

/// A trace of one rank.
#[derive(Clone, Debug)]
pub struct KinetoTrace {
    /// The rank, if the run was distributed.
    pub rank: Option<usize>,
    /// The ranks of the run, if it was distributed.
    pub world_size: Option<usize>,
    /// The backend of the communication: `gloo` or `nccl`.
    pub transport: Option<String>,
    /// The accelerator's name. `None` if operators ran on the CPU.
    pub device: Option<String>,
    /// The steps in order.
    pub steps: Vec<TraceStep>,
}

/// One step of a trace, in nanoseconds by the system's clock.
#[derive(Clone, Debug)]
pub struct TraceStep {
    /// The number that the profiler gave it.
    pub number: usize,
    /// The start.
    pub start: u64,
    /// The end.
    pub end: u64,
    /// The calls that started in the step, in order.
    pub(super) calls: Vec<Call>,
    /// Operators that belong to no call, each with its name and its own time in nanoseconds.
    pub(super) others: Vec<(String, u64)>,
}

#[derive(Deserialize)]
struct Document {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
    #[serde(default, rename = "baseTimeNanoseconds")]
    base: u64,
    #[serde(default, rename = "distributedInfo")]
    distributed: Option<Distributed>,
    #[serde(default, rename = "deviceProperties")]
    devices: Vec<Value>,
}

#[derive(Deserialize)]
struct Distributed {
    backend: Option<String>,
    rank: Option<usize>,
    world_size: Option<usize>,
}

impl KinetoTrace {
    /// Reads a trace.
    ///
    /// # Errors
    /// [`KinetoError`] if the text has another form, or its operators have no shapes.
    pub fn parse(text: &str) -> Result<Self, KinetoError> {
        let document: Document = serde_json::from_str(text).map_err(|error| KinetoError::Form { reason: error.to_string() })?;
        let events: Vec<Event> = document.events.into_iter().filter(|event| event.ph == "X").collect();
        if !events.iter().any(|event| event.cat == "cpu_op") {
            return Err(KinetoError::NoOperators);
        }
        if !events.iter().any(|event| event.args.get("Input Dims").is_some()) {
            return Err(KinetoError::NoShapes);
        }
        let found = calls(&events);
        let has_device = found.is_on_device;
        let mut steps = windows(&events);
        for call in found.calls {
            let step = steps.iter_mut().rev().find(|step| call.called_at >= step.start);
            if let Some(step) = step.filter(|step| call.called_at < step.end) {
                step.calls.push(call);
            }
        }
        steps.retain(|step| !step.calls.is_empty());
        for step in &mut steps {
            step.calls.sort_by_key(|call| (call.start, call.end));
        }
        if has_device {
            follow_the_device(&mut steps);
        }
        for (name, start, own) in found.others {
            if let Some(step) = steps.iter_mut().find(|step| (step.start..step.end).contains(&start)) {
                step.others.push((name, own));
            }
        }
        for step in &mut steps {
            step.shift(document.base);
        }
        let name = document.devices.first().and_then(|device| device["name"].as_str());
        let (backend, rank, world_size) =
            document.distributed.map_or((None, None, None), |group| (group.backend, group.rank, group.world_size));
        Ok(Self { rank, world_size, transport: backend, device: name.filter(|_| has_device).map(String::from), steps })
    }
}

impl TraceStep {
    fn shift(&mut self, base: u64) {
        self.start = self.start.saturating_add(base);
        self.end = self.end.saturating_add(base);
        for call in &mut self.calls {
            call.start = call.start.saturating_add(base);
            call.end = call.end.saturating_add(base);
        }
    }
}

/// The steps that the profiler marked. A trace without marks is one step.
fn windows(events: &[Event]) -> Vec<TraceStep> {
    let step = |number: usize, (start, end): (u64, u64)| TraceStep { number, start, end, calls: Vec::new(), others: Vec::new() };
    let marked = events.iter().filter(|event| event.cat == "user_annotation").filter_map(|event| {
        let number = event.name.strip_prefix("ProfilerStep#")?.parse().ok()?;
        Some(step(number, event.span()))
    });
    let mut steps: Vec<TraceStep> = marked.collect();
    if steps.is_empty() {
        let spans = events.iter().filter(|event| event.cat == "cpu_op" || event.cat == "kernel").map(Event::span);
        let whole = spans.reduce(|left, right| (left.0.min(right.0), left.1.max(right.1)));
        steps.extend(whole.map(|whole| step(0, whole)));
    }
    steps.sort_by_key(|step| step.start);
    steps
}

/// Replaces the steps' starts and ends by those of the device, which lags behind the host: a step
/// starts with its first kernel, and ends where the next step starts.
fn follow_the_device(steps: &mut [TraceStep]) {
    let first = |step: &TraceStep| step.calls.first().map_or(step.start, |call| call.start);
    let starts: Vec<u64> = steps.iter().map(first).collect();
    for (index, step) in steps.iter_mut().enumerate() {
        let last = step.calls.iter().map(|call| call.end).max().unwrap_or(step.end);
        step.start = starts.get(index).copied().unwrap_or(step.start);
        step.end = starts.get(index + 1).copied().unwrap_or(last).max(step.start);
    }
}
