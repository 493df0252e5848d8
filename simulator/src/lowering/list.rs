//! A list of instructions as far as it is the same for all who run it: what each instruction is to the interpreter, and which do the same.
//!
//! It must not know devices, nor who meets whom.

use crate::error::SimulationError;
use foretell_program::{Operation, PeerId, Phase, StageProgram};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// What a list's instruction is to the interpreter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// Work for the processor.
    Compute,
    /// Samples to read.
    Load,
    /// Bytes to copy from one memory of the device to the other.
    Copy,
    /// The `nth` collective of a group of the list.
    Collective { group: u32, nth: u32 },
    /// The `nth` message to the list's `peer`-th receiver.
    Send { peer: u32, nth: u32 },
    /// The `nth` message from the list's `peer`-th sender.
    Receive { peer: u32, nth: u32 },
}

/// The instructions of a list.
#[derive(Debug)]
pub(crate) struct LoweredList {
    pub(crate) actions: Vec<Action>,
    /// The stream of each, and the part of the step.
    pub(crate) streams: Vec<u16>,
    pub(crate) phases: Vec<Phase>,
    /// Which of them do the same.
    pub(crate) operations: DistinctOperations,
    /// The collectives of each group, in order.
    pub(crate) collectives: Vec<Vec<u32>>,
    /// Messages to and from peers, in order.
    pub(crate) sends: Vec<Messages>,
    pub(crate) receives: Vec<Messages>,
    /// How many micro-batches it has.
    pub(crate) micro_batches: u32,
    /// Whether it computes, loads or copies anything.
    pub(crate) uses_processor: bool,
    /// Whether exchanges of one group, or with one peer, stand in several streams, so that they may go on at once.
    pub(crate) communication_overlaps: bool,
}

/// The messages to or from one peer.
#[derive(Clone, Debug)]
pub(crate) struct Messages {
    pub(crate) peer: PeerId,
    pub(crate) instructions: Vec<u32>,
}

/// Instructions that share an operation, so that whatever follows from it is found once. Two that do the same without sharing it count as two, and so
/// do any two that read samples.
#[derive(Debug, Default)]
pub(crate) struct DistinctOperations {
    /// Of each instruction, which of the different operations it has.
    pub(crate) of_instruction: Vec<u32>,
    /// The first instruction with each of them.
    pub(crate) first_instruction: Vec<u32>,
}

/// Finds out which instructions share an operation.
#[derive(Default)]
struct Sharing {
    operations: DistinctOperations,
    /// By where the operation lies. Only looked up.
    known: FxHashMap<usize, u32>,
    /// Where each lies, and which came after it the last time: mostly it does so again.
    places: Vec<(usize, u32)>,
    last: u32,
}

impl Sharing {
    fn add(&mut self, instruction: u32, operation: &Arc<Operation>) {
        // What is read depends on the buffers, too.
        let is_load = matches!(**operation, Operation::Load { .. });
        let place = if is_load { usize::MAX - instruction as usize } else { Arc::as_ptr(operation) as usize };
        let guess = self.places.get(self.last as usize).map_or(0, |&(_, after)| after);
        let which = match self.places.get(guess as usize) {
            Some(&(known, _)) if known == place => guess,
            _ => {
                let next = self.places.len() as u32;
                let which = *self.known.entry(place).or_insert(next);
                if which == next {
                    self.places.push((place, 0));
                    self.operations.first_instruction.push(instruction);
                }
                if let Some((_, after)) = self.places.get_mut(self.last as usize) {
                    *after = which;
                }
                which
            }
        };
        self.last = which;
        self.operations.of_instruction.push(which);
    }
}

impl LoweredList {
    pub(crate) fn new(stage: &StageProgram) -> Result<Self, SimulationError> {
        let count = stage.instructions.len();
        let malformed =
            |instruction: usize, reason: String| SimulationError::Malformed { stage: stage.stage, instruction, reason };
        let mut sharing = Sharing::default();
        sharing.operations.of_instruction.reserve(count);
        let mut lowered = Self {
            actions: Vec::with_capacity(count),
            streams: Vec::with_capacity(count),
            phases: Vec::with_capacity(count),
            operations: DistinctOperations::default(),
            collectives: vec![Vec::new(); stage.groups.len()],
            sends: Vec::new(),
            receives: Vec::new(),
            micro_batches: 0,
            uses_processor: false,
            communication_overlaps: false,
        };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            if instruction.stream.0 as usize >= stage.streams.len() {
                return Err(malformed(index, format!("there is no stream {}", instruction.stream.0)));
            }
            if let Some(before) = instruction.after.iter().find(|before| before.0 as usize >= count) {
                return Err(malformed(index, format!("it waits for instruction {}, which there is not", before.0)));
            }
            let action = lowered.action(stage, index).map_err(|reason| malformed(index, reason))?;
            lowered.actions.push(action);
            lowered.streams.push(instruction.stream.0);
            lowered.phases.push(instruction.phase);
            lowered.micro_batches = lowered.micro_batches.max(instruction.micro_batch.map_or(0, |one| one + 1));
            sharing.add(index as u32, &instruction.operation);
        }
        lowered.operations = sharing.operations;
        lowered.uses_processor =
            lowered.actions.iter().any(|action| matches!(action, Action::Compute | Action::Load | Action::Copy));
        let messages = lowered.sends.iter().chain(&lowered.receives).map(|messages| &messages.instructions);
        let is_in_several_streams = |instructions: &Vec<u32>| {
            instructions.windows(2).any(|pair| lowered.streams[pair[0] as usize] != lowered.streams[pair[1] as usize])
        };
        lowered.communication_overlaps = lowered.collectives.iter().chain(messages).any(is_in_several_streams);
        Ok(lowered)
    }

    fn action(&mut self, list: &StageProgram, index: usize) -> Result<Action, String> {
        let check = |peer: PeerId| match list.peers.get(peer.0 as usize) {
            Some(_) => Ok(peer),
            None => Err(format!("there is no peer {}", peer.0)),
        };
        Ok(match *list.instructions[index].operation {
            Operation::Compute { .. } => Action::Compute,
            Operation::Load { .. } => Action::Load,
            Operation::Copy { .. } => Action::Copy,
            Operation::Collective { group, .. } => {
                let list = self.collectives.get_mut(group.0 as usize).ok_or_else(|| format!("there is no group {}", group.0))?;
                list.push(index as u32);
                Action::Collective { group: u32::from(group.0), nth: list.len() as u32 - 1 }
            }
            Operation::Send { peer, .. } => {
                let (peer, nth) = add_message(&mut self.sends, check(peer)?, index);
                Action::Send { peer, nth }
            }
            Operation::Receive { peer, .. } => {
                let (peer, nth) = add_message(&mut self.receives, check(peer)?, index);
                Action::Receive { peer, nth }
            }
        })
    }
}

fn add_message(known: &mut Vec<Messages>, peer: PeerId, instruction: usize) -> (u32, u32) {
    let position = known.iter().position(|messages| messages.peer == peer).unwrap_or_else(|| {
        known.push(Messages { peer, instructions: Vec::new() });
        known.len() - 1
    });
    let list = &mut known[position].instructions;
    list.push(instruction as u32);
    (position as u32, list.len() as u32 - 1)
}
