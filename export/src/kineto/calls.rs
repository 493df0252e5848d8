//! Calls: the outermost operators of known work, with their phase, and the time that they took on
//! the host or, if there is one, on the device. Knows no Programs.

use super::event::Event;
use super::operators::{Work, exchange_of, work_of};
use serde_json::Value;
use std::collections::BTreeMap;

/// The part of the step that a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    Forward,
    Backward,
    Update,
}

/// A call of an operator, in nanoseconds.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) name: String,
    pub(super) work: Work,
    pub(super) part: Part,
    /// When the host called it.
    pub(super) called_at: u64,
    pub(super) start: u64,
    pub(super) end: u64,
    /// The time in which it ran: less than from start to end if its kernels have gaps.
    pub(super) busy: u64,
}

/// The calls found in a trace.
pub(super) struct Calls {
    pub(super) calls: Vec<Call>,
    /// Operators of unknown work: name, start, and the time outside of the operators that they
    /// called.
    pub(super) others: Vec<(String, u64, u64)>,
    /// Whether the work ran on a device.
    pub(super) is_on_device: bool,
}

/// An operator that has not ended yet.
struct Open {
    name: String,
    start: u64,
    end: u64,
    part: Part,
    /// The call that the operator is, or is part of.
    call: Option<usize>,
    /// Time of the operators that it called.
    explained: u64,
}

/// Finds the calls.
pub(super) fn calls(events: &[Event]) -> Calls {
    let mut host: Vec<&Event> =
        events.iter().filter(|event| matches!(event.cat.as_str(), "cpu_op" | "user_annotation")).collect();
    let thread = |event: &Event| (event.pid.to_string(), event.tid.to_string());
    host.sort_by_cached_key(|event| {
        let (start, end) = event.span();
        (thread(event), start, std::cmp::Reverse(end))
    });
    let mut found = Calls { calls: Vec::new(), others: Vec::new(), is_on_device: false };
    let mut by_id: BTreeMap<u64, (Option<usize>, Part)> = BTreeMap::new();
    let mut open: Vec<Open> = Vec::new();
    let mut current = None;
    for event in host {
        let (start, end) = event.span();
        if current.as_ref() != Some(&thread(event)) {
            current = Some(thread(event));
            close(&mut open, u64::MAX, &mut found.others);
        }
        close(&mut open, start, &mut found.others);
        if event.name.starts_with("ProfilerStep#") {
            continue;
        }
        let parent = open.last();
        let part = part_of(&event.name).or(parent.map(|parent| parent.part)).unwrap_or(Part::Forward);
        let dimensions = event.args.get("Input Dims").unwrap_or(&Value::Null);
        let call = parent.and_then(|parent| parent.call).or_else(|| {
            let work = work_of(&event.name, dimensions)?;
            let name = event.name.clone();
            found.calls.push(Call { name, work, part, called_at: start, start, end, busy: end - start });
            Some(found.calls.len() - 1)
        });
        if let Some(id) = external_id(event) {
            by_id.insert(id, (call, part));
        }
        open.push(Open { name: event.name.clone(), start, end, part, call, explained: 0 });
    }
    close(&mut open, u64::MAX, &mut found.others);
    on_device(events, &by_id, found)
}

/// Removes the operators that have ended by `time` from `open`.
fn close(open: &mut Vec<Open>, time: u64, others: &mut Vec<(String, u64, u64)>) {
    while let Some(done) = open.pop_if(|last| last.end <= time) {
        let length = done.end - done.start;
        if let Some(parent) = open.last_mut() {
            parent.explained = parent.explained.saturating_add(length);
        }
        if done.call.is_none() {
            others.push((done.name, done.start, length.saturating_sub(done.explained)));
        }
    }
}

/// The part that an operator begins. `None` if its part is that of the operator that called it.
fn part_of(name: &str) -> Option<Part> {
    if name.starts_with("autograd::engine::evaluate_function") {
        return Some(Part::Backward);
    }
    (name.starts_with("Optimizer.") || name.contains("clip_grad")).then_some(Part::Update)
}

fn external_id(event: &Event) -> Option<u64> {
    event.args.get("External id").and_then(Value::as_u64)
}

/// Replaces the calls' times by those of their kernels on the device, if any ran there.
fn on_device(events: &[Event], by_id: &BTreeMap<u64, (Option<usize>, Part)>, found: Calls) -> Calls {
    let kernels: Vec<&Event> = events.iter().filter(|event| event.cat == "kernel" || event.cat == "gpu_memcpy").collect();
    if kernels.is_empty() {
        return found;
    }
    let mut timed: Vec<Option<Call>> = vec![None; found.calls.len()];
    let mut calls = Vec::new();
    let mut others = Vec::new();
    for kernel in kernels {
        let (start, end) = kernel.span();
        let (call, part) = external_id(kernel).and_then(|id| by_id.get(&id)).copied().unwrap_or((None, Part::Forward));
        let busy = end - start;
        match call.and_then(|call| timed.get_mut(call).zip(found.calls.get(call))) {
            Some((place, call)) => {
                let timed = place.get_or_insert_with(|| Call { start, end, busy: 0, ..call.clone() });
                (timed.start, timed.end) = (timed.start.min(start), timed.end.max(end));
                timed.busy = timed.busy.saturating_add(busy);
            }
            None => match exchange_of(&kernel.name).filter(|_| kernel.name.starts_with("nccl")) {
                Some(exchange) => {
                    let (name, work) = (kernel.name.clone(), Work::Exchange(exchange));
                    calls.push(Call { name, work, part, called_at: start, start, end, busy });
                }
                None => others.push((kernel.name.clone(), start, busy)),
            },
        }
    }
    calls.extend(timed.into_iter().flatten());
    Calls { calls, others, is_on_device: true }
}
