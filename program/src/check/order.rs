//! Which instructions of a list have finished when another starts, by vector clocks (Mattern 1989,
//! "Virtual Time and Global States of Distributed Systems"), one entry a stream.

use super::Unsound;
use crate::program::StageProgram;

/// The order of a list's instructions in time.
pub(super) struct HappensBefore {
    /// For each instruction and stream: the end of those instructions of the stream that have
    /// finished before the instruction starts.
    clocks: Vec<Vec<u32>>,
    /// The stream of each instruction.
    streams: Vec<usize>,
}

impl HappensBefore {
    pub(super) fn of(list: &StageProgram) -> Result<Self, Unsound> {
        let mut known = vec![vec![0_u32; list.streams.len()]; list.streams.len()];
        let mut order = Self { clocks: Vec::new(), streams: Vec::new() };
        for (index, instruction) in list.instructions.iter().enumerate() {
            let stream = instruction.stream.0 as usize;
            for id in &instruction.after {
                let before = id.0 as usize;
                if before >= index {
                    return Err(Unsound::WaitsForLater { stage: list.stage, instruction: list.name_of(instruction).into() });
                }
                for (mine, &their) in known[stream].iter_mut().zip(&order.clocks[before]) {
                    *mine = (*mine).max(their);
                }
                let of_before = &mut known[stream][order.streams[before]];
                *of_before = (*of_before).max(id.0 + 1);
            }
            order.clocks.push(known[stream].clone());
            order.streams.push(stream);
            known[stream][stream] = index as u32 + 1;
        }
        Ok(order)
    }

    /// Whether one instruction has finished when a later one of the list starts.
    pub(super) fn is_before(&self, first: usize, second: usize) -> bool {
        let stream = self.streams[first];
        self.streams[second] == stream || self.clocks[second][stream] > first as u32
    }

    /// The stream of an instruction.
    pub(super) fn stream(&self, instruction: usize) -> usize {
        self.streams[instruction]
    }
}
