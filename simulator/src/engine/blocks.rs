//! Cuts an instruction list into the blocks that the interpreter runs, stream by stream.
//!
//! A stream runs in order, so a rank's progress is one number per stream. Consecutive kernels of a
//! stream form one block, which takes one event, if other streams depend on the last kernel only,
//! and only the first kernel depends on other streams.
//!
//! The end time of a block is needed until all of its dependents have started. It is kept in one of
//! the rank's slots, which a later block reuses once every dependent has read it (see
//! `fast_path::ForcedOrder`).
//!
//! Nothing here depends on durations.

use super::order::{InstructionFork, InstructionOrder, Successor};
use crate::lowering::{Action, LoweredList};
use foretell_program::Phase;
use std::ops::Range;

/// The blocks of one instruction list, shared by all ranks that run it.
#[derive(Debug)]
pub(super) struct BlockList {
    /// The blocks, stream by stream.
    pub(super) blocks: Vec<StreamBlock>,
    /// The instructions, stream by stream.
    order: Vec<u32>,
    /// Where each stream's blocks begin; one entry more than there are streams.
    pub(super) streams: Vec<u32>,
    dependencies: Vec<BlockDependency>,
    /// For each block its forced successor: a block; a fork, whose number is at least [`FORKS`]; or
    /// [`NO_BLOCK`].
    successors: Vec<u32>,
    forks: Vec<BlockFork>,
    /// Number of end times that a rank keeps.
    pub(super) slots: u32,
    /// For each group, the block of each collective.
    pub(super) collectives: Vec<Vec<u32>>,
    /// For each peer, the block of each message.
    pub(super) sends: Vec<Vec<u32>>,
    pub(super) receives: Vec<Vec<u32>>,
}

/// Consecutive instructions of one stream with no dependencies in between.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamBlock {
    pub(super) action: Action,
    /// The first of its instructions in [`BlockList::order`].
    first: u32,
    count: u32,
    pub(super) stream: u16,
    pub(super) category: TimeCategory,
    first_dependency: u32,
    dependency_count: u32,
    /// The slot of its end time, or `NO_SLOT`.
    pub(super) slot: u32,
    /// A bit for each stream that has a dependent: see [`BlockList::streams_of`].
    pub(super) dependent_streams: u64,
}

/// The category that a rank's time counts in. If several apply at one instant, the first in this
/// order counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TimeCategory {
    Optimizer,
    Compute,
    Communication,
    Data,
}

/// A block of another stream that must have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockDependency {
    pub(super) stream: u16,
    pub(super) block: u32,
    /// The slot of its end time.
    pub(super) slot: u32,
}

/// Marks a block without a forced successor.
const NO_BLOCK: u32 = u32::MAX;

/// Numbers of forks in [`BlockList::successors`] begin here.
const FORKS: u32 = 1 << 31;

/// The forced successor of a block: the block or blocks that begin when it ends, whatever the
/// durations.
#[derive(Clone, Copy, Debug)]
pub(super) enum NextBlock<'a> {
    Unknown,
    StreamBlock(u32),
    Fork(&'a BlockFork),
}

/// Two blocks that begin when one ends, and the block that begins when both have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockFork {
    pub(super) branches: [u32; 2],
    pub(super) join: u32,
}

/// The bit of [`StreamBlock::dependent_streams`] that stands for this stream and all later ones.
const LAST_BIT: u16 = 63;

/// Whether consecutive kernels are joined into one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joins {
    Kernels,
    Nothing,
}

impl BlockList {
    /// Cuts `list` into blocks. `slot_of` has the slot of each instruction, and `slots` is the
    /// number of slots. `successor` returns the forced successor of an instruction.
    pub(super) fn new(
        list: &LoweredList,
        order: InstructionOrder,
        joins: Joins,
        (slot_of, slots): (&[u32], u32),
        successor: impl Fn(&InstructionOrder, u32) -> Successor,
    ) -> Self {
        let mut block_list = Self {
            order: Vec::new(),
            blocks: Vec::with_capacity(list.actions.len()),
            streams: vec![0],
            dependencies: Vec::with_capacity(order.dependencies.len()),
            successors: Vec::new(),
            forks: Vec::new(),
            slots,
            collectives: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        let block_of = block_list.join_instructions(list, &order, joins, slot_of);
        for block in &mut block_list.blocks {
            block.first_dependency = block_list.dependencies.len() as u32;
            let dependencies = order.dependencies(order.by_stream[block.first as usize]).iter();
            block_list.dependencies.extend(dependencies.map(|&dependency| BlockDependency {
                stream: list.streams[dependency as usize],
                block: block_of[dependency as usize],
                slot: slot_of[dependency as usize],
            }));
        }
        block_list.successors.reserve(block_list.blocks.len());
        for block in &block_list.blocks {
            let last = order.by_stream[block.range().end - 1];
            let successor = match successor(&order, last) {
                Successor::One(next) => block_of[next as usize],
                Successor::Fork(fork) => block_fork(&fork, &block_of).map_or(NO_BLOCK, |fork| {
                    block_list.forks.push(fork);
                    FORKS + block_list.forks.len() as u32 - 1
                }),
                Successor::Unknown => NO_BLOCK,
            };
            block_list.successors.push(successor);
        }
        let blocks = |instructions: &Vec<u32>| instructions.iter().map(|&instruction| block_of[instruction as usize]).collect();
        block_list.collectives = list.collectives.iter().map(blocks).collect();
        block_list.sends = list.sends.iter().map(|messages| blocks(&messages.instructions)).collect();
        block_list.receives = list.receives.iter().map(|messages| blocks(&messages.instructions)).collect();
        block_list.order = order.by_stream;
        block_list
    }

    /// Adds the blocks of all streams, without their dependencies. Returns the block of each
    /// instruction.
    fn join_instructions(&mut self, list: &LoweredList, order: &InstructionOrder, joins: Joins, slot_of: &[u32]) -> Vec<u32> {
        let mut block_of = vec![0u32; list.actions.len()];
        for (stream, range) in order.streams.windows(2).enumerate() {
            // The category of the last block, if another kernel may still be joined to it.
            let mut open: Option<TimeCategory> = None;
            for (position, &instruction) in (range[0]..).zip(&order.by_stream[range[0] as usize..range[1] as usize]) {
                let (dependencies, dependents) = (order.dependencies(instruction), order.dependents(instruction));
                let category = category_of(list, instruction);
                let action = list.actions[instruction as usize];
                let is_kernel = joins == Joins::Kernels && matches!(action, Action::Compute);
                let joins_last = is_kernel && dependencies.is_empty() && open == Some(category);
                open = (is_kernel && dependents.is_empty()).then_some(category);
                let bit = |dependent: &u32| 1 << list.streams[*dependent as usize].min(LAST_BIT);
                let slot = slot_of[instruction as usize];
                let dependent_streams = dependents.iter().map(bit).fold(0, |all, dependent| all | dependent);
                match self.blocks.last_mut().filter(|_| joins_last) {
                    // Only the last instruction of a block has dependents.
                    Some(block) => {
                        (block.count, block.slot, block.dependent_streams) = (block.count + 1, slot, dependent_streams);
                    }
                    None => self.blocks.push(StreamBlock {
                        action,
                        first: position,
                        count: 1,
                        stream: stream as u16,
                        category,
                        first_dependency: 0,
                        dependency_count: dependencies.len() as u32,
                        slot,
                        dependent_streams,
                    }),
                }
                block_of[instruction as usize] = self.blocks.len() as u32 - 1;
            }
            self.streams.push(self.blocks.len() as u32);
        }
        block_of
    }

    /// The blocks of other streams that a block depends on.
    pub(super) fn dependencies(&self, block: &StreamBlock) -> &[BlockDependency] {
        &self.dependencies[block.first_dependency as usize..(block.first_dependency + block.dependency_count) as usize]
    }

    /// The forced successor of a block.
    pub(super) fn next(&self, block: u32) -> NextBlock<'_> {
        match self.successors[block as usize] {
            NO_BLOCK => NextBlock::Unknown,
            fork if fork >= FORKS => NextBlock::Fork(&self.forks[(fork - FORKS) as usize]),
            next => NextBlock::StreamBlock(next),
        }
    }

    /// The instructions of a block.
    pub(super) fn instructions(&self, block: &StreamBlock) -> &[u32] {
        &self.order[block.range()]
    }

    pub(super) fn stream_count(&self) -> usize {
        self.streams.len() - 1
    }

    /// The streams of a mask such as [`StreamBlock::dependent_streams`].
    pub(super) fn streams_of(&self, mut mask: u64) -> impl Iterator<Item = u16> + use<> {
        let last = if mask >> LAST_BIT & 1 == 1 { self.stream_count() as u16 } else { 0 };
        mask &= !(1 << LAST_BIT);
        let first = std::iter::from_fn(move || {
            let stream = mask.trailing_zeros() as u16;
            mask &= mask.wrapping_sub(1);
            (stream < LAST_BIT).then_some(stream)
        });
        first.chain(LAST_BIT..last)
    }
}

impl StreamBlock {
    /// The range of its instructions in [`BlockList::order`].
    pub(super) fn range(&self) -> Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// A fork of blocks, if each branch is a single block.
fn block_fork(fork: &InstructionFork, block_of: &[u32]) -> Option<BlockFork> {
    let are_blocks = fork.branches.iter().all(|&(first, last)| block_of[first as usize] == block_of[last as usize]);
    are_blocks.then(|| BlockFork {
        branches: fork.branches.map(|(first, _)| block_of[first as usize]),
        join: block_of[fork.join as usize],
    })
}

fn category_of(list: &LoweredList, instruction: u32) -> TimeCategory {
    let index = instruction as usize;
    match list.actions[index] {
        Action::Compute if list.phases[index] == Phase::Update => TimeCategory::Optimizer,
        Action::Compute => TimeCategory::Compute,
        Action::Load => TimeCategory::Data,
        Action::Collective { .. } | Action::Send { .. } | Action::Receive { .. } | Action::Copy => TimeCategory::Communication,
    }
}
