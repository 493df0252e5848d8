//! The part of an instruction list that is equal for all ranks that run it: the action of each
//! instruction, and which instructions share an operation.
//!
//! Nothing here depends on devices, or on which ranks communicate.

use crate::error::SimulationError;
use foretell_program::{Operation, PeerId, Phase, StageProgram};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// What an instruction does, as the interpreter sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// A kernel.
    Compute,
    /// Reads samples.
    Load,
    /// Copies between the memories of the device and its host.
    Copy,
    /// The collective number `nth` of a group of the list.
    Collective { group: u32, nth: u32 },
    /// The message number `nth` to a peer; `peer` is an index into [`LoweredList::sends`].
    Send { peer: u32, nth: u32 },
    /// The message number `nth` from a peer; `peer` is an index into [`LoweredList::receives`].
    Receive { peer: u32, nth: u32 },
}

/// A lowered instruction list. Vectors are indexed by instruction unless stated otherwise.
#[derive(Debug)]
pub(crate) struct LoweredList {
    pub(crate) actions: Vec<Action>,
    /// The stream of each instruction.
    pub(crate) streams: Vec<u16>,
    pub(crate) phases: Vec<Phase>,
    pub(crate) operations: DistinctOperations,
    /// For each group, the instructions that are its collectives, in order.
    pub(crate) collectives: Vec<Vec<u32>>,
    /// For each peer that the list sends to, its messages in order.
    pub(crate) sends: Vec<Messages>,
    /// For each peer that the list receives from, its messages in order.
    pub(crate) receives: Vec<Messages>,
    /// Number of micro-batches.
    pub(crate) micro_batches: u32,
    /// Whether any instruction computes, loads or copies.
    pub(crate) uses_processor: bool,
    /// Whether collectives of one group, or messages to or from one peer, are in several streams,
    /// so that two of them may run at the same time.
    pub(crate) communication_overlaps: bool,
}

/// The messages to or from one peer.
#[derive(Clone, Debug)]
pub(crate) struct Messages {
    pub(crate) peer: PeerId,
    pub(crate) instructions: Vec<u32>,
}

/// The distinct operations of a list. Instructions that share one [`Arc`] share an operation, so
/// that derived values are computed once. Equal operations in different [`Arc`]s count as
/// different, and so do any two loads.
#[derive(Debug, Default)]
pub(crate) struct DistinctOperations {
    /// For each instruction, the index of its operation.
    pub(crate) of_instruction: Vec<u32>,
    /// For each operation, the first instruction that has it.
    pub(crate) first_instruction: Vec<u32>,
}

/// Numbers the distinct operations of a list.
#[derive(Default)]
struct OperationIndex {
    operations: DistinctOperations,
    /// The index of the operation at each address. The map is never iterated, so its order does not
    /// matter.
    known: FxHashMap<usize, u32>,
    /// For each operation, its address, and the operation that followed it last time. Mostly the
    /// same one follows again.
    addresses: Vec<(usize, u32)>,
    /// The operation of the latest instruction.
    last: u32,
}

impl OperationIndex {
    fn add(&mut self, instruction: u32, operation: &Arc<Operation>) {
        // A load's duration also depends on its buffers, so each load gets a unique address.
        let is_load = matches!(**operation, Operation::Load { .. });
        let address = if is_load { usize::MAX - instruction as usize } else { Arc::as_ptr(operation) as usize };
        let guess = self.addresses.get(self.last as usize).map_or(0, |&(_, after)| after);
        let number = match self.addresses.get(guess as usize) {
            Some(&(known, _)) if known == address => guess,
            _ => {
                let next = self.addresses.len() as u32;
                let number = *self.known.entry(address).or_insert(next);
                if number == next {
                    self.addresses.push((address, 0));
                    self.operations.first_instruction.push(instruction);
                }
                if let Some((_, after)) = self.addresses.get_mut(self.last as usize) {
                    *after = number;
                }
                number
            }
        };
        self.last = number;
        self.operations.of_instruction.push(number);
    }
}

impl LoweredList {
    /// Reads a list of a Program.
    ///
    /// # Errors
    /// [`SimulationError::Malformed`] if an instruction names a stream, instruction, group or peer
    /// that the list does not have.
    pub(crate) fn new(source: &StageProgram) -> Result<Self, SimulationError> {
        let count = source.instructions.len();
        let malformed =
            |instruction: usize, reason: String| SimulationError::Malformed { stage: source.stage, instruction, reason };
        let mut index_of_operations = OperationIndex::default();
        index_of_operations.operations.of_instruction.reserve(count);
        let mut list = Self {
            actions: Vec::with_capacity(count),
            streams: Vec::with_capacity(count),
            phases: Vec::with_capacity(count),
            operations: DistinctOperations::default(),
            collectives: vec![Vec::new(); source.groups.len()],
            sends: Vec::new(),
            receives: Vec::new(),
            micro_batches: 0,
            uses_processor: false,
            communication_overlaps: false,
        };
        for (index, instruction) in source.instructions.iter().enumerate() {
            if instruction.stream.0 as usize >= source.streams.len() {
                return Err(malformed(index, format!("the list has no stream {}", instruction.stream.0)));
            }
            if let Some(before) = instruction.after.iter().find(|before| before.0 as usize >= count) {
                return Err(malformed(index, format!("it depends on instruction {}, which the list does not have", before.0)));
            }
            let action = list.action(source, index).map_err(|reason| malformed(index, reason))?;
            list.actions.push(action);
            list.streams.push(instruction.stream.0);
            list.phases.push(instruction.phase);
            list.micro_batches = list.micro_batches.max(instruction.micro_batch.map_or(0, |number| number + 1));
            index_of_operations.add(index as u32, &instruction.operation);
        }
        list.operations = index_of_operations.operations;
        list.uses_processor = list.actions.iter().any(|action| matches!(action, Action::Compute | Action::Load | Action::Copy));
        let messages = list.sends.iter().chain(&list.receives).map(|messages| &messages.instructions);
        let is_in_several_streams = |instructions: &Vec<u32>| {
            instructions.windows(2).any(|pair| list.streams[pair[0] as usize] != list.streams[pair[1] as usize])
        };
        list.communication_overlaps = list.collectives.iter().chain(messages).any(is_in_several_streams);
        Ok(list)
    }

    /// The action of the next instruction. Adds the instruction to its group or peer.
    fn action(&mut self, source: &StageProgram, index: usize) -> Result<Action, String> {
        let check = |peer: PeerId| match source.peers.get(peer.0 as usize) {
            Some(_) => Ok(peer),
            None => Err(format!("the list has no peer {}", peer.0)),
        };
        Ok(match *source.instructions[index].operation {
            Operation::Compute { .. } | Operation::Traced { .. } => Action::Compute,
            Operation::Load { .. } => Action::Load,
            Operation::Copy { .. } | Operation::Save { .. } | Operation::Write { .. } => Action::Copy,
            Operation::Collective { group, .. } => {
                let collectives = self.collectives.get_mut(group.0 as usize);
                let collectives = collectives.ok_or_else(|| format!("the list has no group {}", group.0))?;
                collectives.push(index as u32);
                Action::Collective { group: u32::from(group.0), nth: collectives.len() as u32 - 1 }
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

/// Adds a message to its peer's messages. Returns the index of the peer and of the message.
fn add_message(known: &mut Vec<Messages>, peer: PeerId, instruction: usize) -> (u32, u32) {
    let index = known.iter().position(|messages| messages.peer == peer).unwrap_or_else(|| {
        known.push(Messages { peer, instructions: Vec::new() });
        known.len() - 1
    });
    let messages = &mut known[index].instructions;
    messages.push(instruction as u32);
    (index as u32, messages.len() as u32 - 1)
}
