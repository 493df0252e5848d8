//! The bytes in use over a step, and the tensors in memory at the peak.
//!
//! Persistent buffers count throughout, others for their lifetime: from the start of the first
//! instruction that uses one to the end of the last. A buffer inside another one is not counted
//! again.

use foretell_program::{Buffer, BufferId, BufferRole, InstructionId, MemoryKind, RankTimeline, StageProgram};
use foretell_units::{Bytes, Picoseconds};
use std::collections::BTreeMap;

/// A temporary buffer with the time in which it is in use.
struct Stay<'a> {
    buffer: &'a Buffer,
    start: Picoseconds,
    end: Picoseconds,
}

/// The memory of a rank over its step.
pub(crate) struct Residency<'a> {
    persistent: Vec<&'a Buffer>,
    temporary: Vec<Stay<'a>>,
}

/// Buffers of one role that are in use together, and whose names differ at most in numbers, as of
/// layers or parts. A star replaces numbers that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holder {
    pub name: String,
    pub role: BufferRole,
    pub count: usize,
    pub bytes: Bytes,
}

impl<'a> Residency<'a> {
    /// Finds when each buffer of a list is in use. Buffers whose instructions have no span are left
    /// out.
    pub(crate) fn of(list: &'a StageProgram, timeline: &RankTimeline) -> Self {
        let mut lifetimes: BTreeMap<BufferId, (InstructionId, InstructionId)> = BTreeMap::new();
        for (index, buffer) in list.buffers.iter().enumerate() {
            let Some((first, last)) = buffer.lifetime else { continue };
            let whole = root(list, BufferId(index as u32));
            let lifetime = lifetimes.entry(whole).or_insert((first, last));
            *lifetime = (lifetime.0.min(first), lifetime.1.max(last));
        }
        let times: BTreeMap<InstructionId, (Picoseconds, Picoseconds)> =
            timeline.spans.iter().map(|span| (span.instruction, (span.start, span.end))).collect();
        let is_root = |buffer: &Buffer| buffer.parent.is_none() && buffer.memory == MemoryKind::Device;
        let roots = || list.buffers.iter().enumerate().filter(|(_, buffer)| is_root(buffer));
        let stay = |(index, buffer): (usize, &'a Buffer)| {
            let (first, last) = lifetimes.get(&BufferId(index as u32))?;
            let ((start, _), (_, end)) = (times.get(first)?, times.get(last)?);
            Some(Stay { buffer, start: *start, end: *end })
        };
        Self {
            persistent: roots().filter(|(_, buffer)| buffer.persistent).map(|(_, buffer)| buffer).collect(),
            temporary: roots().filter(|(_, buffer)| !buffer.persistent).filter_map(stay).collect(),
        }
    }

    /// For each change, its time and the bytes in use from then on.
    pub(crate) fn curve(&self) -> Vec<(Picoseconds, Bytes)> {
        let persistent: Bytes = self.persistent.iter().map(|buffer| buffer.bytes).sum();
        // Starts and ends at one instant make one change: the memory plan may give both buffers the
        // same offset.
        let mut changes: BTreeMap<Picoseconds, (u64, u64)> = BTreeMap::new();
        for stay in &self.temporary {
            changes.entry(stay.start).or_default().0 += stay.buffer.bytes.count();
            changes.entry(stay.end).or_default().1 += stay.buffer.bytes.count();
        }
        let mut live = persistent.count();
        let mut curve = vec![(Picoseconds::ZERO, persistent)];
        for (time, (begun, ended)) in changes {
            live = (live + begun).saturating_sub(ended);
            if time == Picoseconds::ZERO {
                curve.clear();
            }
            curve.push((time, Bytes::new(live)));
        }
        curve
    }

    /// The buffers in use right after `time`, by name and role, the largest first. Buffers of
    /// different layers are one holder, since a deep model has thousands of buffers.
    pub(crate) fn holders(&self, time: Picoseconds) -> Vec<Holder> {
        let live = self.temporary.iter().filter(|stay| stay.start <= time && time < stay.end).map(|stay| stay.buffer);
        let mut groups: BTreeMap<(String, BufferRole), Holder> = BTreeMap::new();
        for buffer in self.persistent.iter().copied().chain(live) {
            let numberless = without_numbers(&buffer.name);
            let group = groups.entry((numberless.clone(), buffer.role)).or_insert_with(|| Holder {
                name: buffer.name.to_string(),
                role: buffer.role,
                count: 0,
                bytes: Bytes::ZERO,
            });
            if *group.name != *buffer.name {
                group.name = numberless;
            }
            (group.count, group.bytes) = (group.count + 1, group.bytes + buffer.bytes);
        }
        let mut holders: Vec<Holder> = groups.into_values().collect();
        holders.sort_by(|holder, other| other.bytes.cmp(&holder.bytes).then_with(|| holder.name.cmp(&other.name)));
        holders
    }
}

/// A name in which each part that is a number is replaced by a star, as in `model.layers.*.mlp` and
/// `gradients *`.
fn without_numbers(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|digit| digit.is_ascii_digit());
    let parts = name.split_inclusive(['.', ' ']).map(|part| {
        let end = part.len() - part.trim_end_matches(['.', ' ']).len();
        let (number, separator) = part.split_at(part.len() - end);
        if is_number(number) { format!("*{separator}") } else { part.to_owned() }
    });
    parts.collect()
}

/// Returns the outermost buffer that contains a buffer.
fn root(list: &StageProgram, id: BufferId) -> BufferId {
    let mut id = id;
    // A chain of parents longer than the list of buffers would be a cycle.
    for _ in 0..list.buffers.len() {
        match list.buffers.get(id.0 as usize).and_then(|buffer| buffer.parent) {
            Some(parent) => id = parent,
            None => break,
        }
    }
    id
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn layers_of_one_kind_are_one_holder() {
        for (name, expected) in [
            ("model.layers.17.mlp.act", "model.layers.*.mlp.act"),
            ("gradients 85", "gradients *"),
            ("h.0.ln_1.weight", "h.*.ln_1.weight"),
            ("layer1.0", "layer1.*"),
            ("0", "*"),
            ("head", "head"),
            ("a..b. ", "a..b. "),
        ] {
            assert_eq!(without_numbers(name), expected);
        }
        let buffer = |name: &str, role| Buffer { name: name.into(), role, ..sample_buffer() };
        let [one, two, other, single] = [
            buffer("layers.0.act", BufferRole::Activation),
            buffer("layers.1.act", BufferRole::Activation),
            buffer("layers.1.act", BufferRole::Parameter),
            buffer("layers.1.norm", BufferRole::Activation),
        ];
        let residency = Residency { persistent: vec![&one, &two, &other, &single], temporary: vec![] };
        let holders = residency.holders(Picoseconds::ZERO);
        let found: Vec<_> = holders.iter().map(|holder| (holder.name.as_str(), holder.count, holder.role)).collect();
        assert_eq!(found[0], ("layers.*.act", 2, BufferRole::Activation));
        assert!(found.contains(&("layers.1.act", 1, BufferRole::Parameter)), "{found:?}");
        assert!(found.contains(&("layers.1.norm", 1, BufferRole::Activation)), "{found:?}");
    }

    /// A buffer of the sample.
    fn sample_buffer() -> Buffer {
        let (program, ..) = sample::pipeline();
        let buffer = program.lists[0].buffers.iter().find(|buffer| buffer.bytes > Bytes::ZERO);
        buffer.expect("the sample has buffers").clone()
    }

    #[test]
    fn the_holders_at_the_peak_add_up_to_it() {
        let (program, predicted, _) = sample::pipeline();
        for (list, timeline) in program.lists.iter().zip(&predicted.ranks) {
            let residency = Residency::of(list, timeline);
            let curve = residency.curve();
            let (time, peak) = curve.iter().copied().max_by_key(|(_, bytes)| *bytes).expect("a curve has a point");
            let held: Bytes = residency.holders(time).iter().map(|holder| holder.bytes).sum();
            assert_eq!(held, peak);
            assert!(peak > Bytes::ZERO && curve.len() > 2, "the sample uses temporary memory");
        }
    }
}
