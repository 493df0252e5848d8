//! A list of instructions as the interpreter runs it: stream by stream, cut into blocks.
//!
//! Streams run in order, so a rank's progress is one number a stream. Kernels that follow each other with nobody waiting for one in between, nor one
//! in between waiting for anybody, are one block, and one event.
//!
//! When a block has ended has to be known where a handoff may still be under way. So it is kept in a slot of the rank's, which a later
//! block takes over as soon as all who ask have asked ([`crate::certain`]).
//! It must not know time, and what instructions take.

use super::order::{InstructionFork, Order, Successor};
use crate::lowering::{Action, LoweredList};
use foretell_program::Phase;
use std::ops::Range;

/// What ranks that run one list have in common.
#[derive(Debug)]
pub(super) struct BlockList {
    /// Stream by stream.
    pub(super) blocks: Vec<Block>,
    /// The instructions stream by stream.
    order: Vec<u32>,
    /// Where each stream's blocks begin; one more than there are streams.
    pub(super) streams: Vec<u32>,
    waits: Vec<Wait>,
    /// What begins when each block has ended, whatever others do: see [`BlockList::follows`].
    follows: Vec<u32>,
    forks: Vec<BlockFork>,
    /// How many end times a rank keeps.
    pub(super) slots: u32,
    /// The block of each collective of each group; of each message to and from each peer.
    pub(super) collectives: Vec<Vec<u32>>,
    pub(super) sends: Vec<Vec<u32>>,
    pub(super) receives: Vec<Vec<u32>>,
}

/// Instructions that are run in one go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) action: Action,
    /// Its instructions: places in the order of streams.
    first: u32,
    count: u32,
    pub(super) stream: u16,
    pub(super) category: TimeCategory,
    first_wait: u32,
    wait_count: u32,
    /// Where its end is kept, or [`NO_SLOT`].
    pub(super) slot: u32,
    /// The streams in which someone waits for it, bit by bit: see [`BlockList::streams_of`].
    pub(super) wakes: u64,
}

/// What an instant counts as; of several things at once the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TimeCategory {
    Optimizer,
    Compute,
    Communication,
    Data,
}

/// A block of another stream that must have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) stream: u16,
    pub(super) block: u32,
    pub(super) slot: u32,
}

/// No block.
pub(super) const NO_BLOCK: u32 = u32::MAX;

/// From here on numbers of what follows are those of forks.
const FORKS: u32 = 1 << 31;

/// What begins when a block has ended, and nothing else does before that has.
#[derive(Clone, Copy, Debug)]
pub(super) enum NextBlock<'a> {
    Unknown,
    Block(u32),
    Fork(&'a BlockFork),
}

/// Two blocks that begin at the end of one, and the one that begins when both have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockFork {
    pub(super) branches: [u32; 2],
    pub(super) join: u32,
}

/// The bit of [`Block::wakes`] that stands for this stream and all after it.
const LAST_BIT: u16 = 63;

impl BlockList {
    /// The code of a list. Kernels are joined where `joins` says so.
    pub(super) fn new(
        list: &LoweredList,
        order: Order,
        joins: Joins,
        (slot_of, slots): (&[u32], u32),
        successor: impl Fn(&Order, u32) -> Successor,
    ) -> Self {
        let mut block_list = Self {
            order: Vec::new(),
            blocks: Vec::with_capacity(list.actions.len()),
            streams: vec![0],
            waits: Vec::with_capacity(order.before.len()),
            follows: Vec::new(),
            forks: Vec::new(),
            slots,
            collectives: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
        };
        let mut block_of = vec![0u32; list.actions.len()];
        for (stream, range) in order.streams.windows(2).enumerate() {
            // What the last of the block so far counts as, where kernels may still be joined to it.
            let mut open: Option<TimeCategory> = None;
            for (place, &instruction) in (range[0]..).zip(&order.by_stream[range[0] as usize..range[1] as usize]) {
                let (waits, consumers) = (order.waits(instruction), order.consumers(instruction));
                let category = category_of(list, instruction);
                let action = list.actions[instruction as usize];
                let is_kernel = joins == Joins::Kernels && matches!(action, Action::Compute);
                let is_joined = is_kernel && waits.is_empty() && open == Some(category);
                open = (is_kernel && consumers.is_empty()).then_some(category);
                let bit = |one: &u32| 1 << list.streams[*one as usize].min(LAST_BIT);
                let slot = slot_of[instruction as usize];
                let wakes = consumers.iter().map(bit).fold(0, |all, one| all | one);
                match block_list.blocks.last_mut().filter(|_| is_joined) {
                    // Only the last of a block has someone who waits for it.
                    Some(block) => (block.count, block.slot, block.wakes) = (block.count + 1, slot, wakes),
                    None => block_list.blocks.push(Block {
                        action,
                        first: place,
                        count: 1,
                        stream: stream as u16,
                        category,
                        first_wait: 0,
                        wait_count: waits.len() as u32,
                        slot,
                        wakes,
                    }),
                }
                block_of[instruction as usize] = block_list.blocks.len() as u32 - 1;
            }
            block_list.streams.push(block_list.blocks.len() as u32);
        }
        for block in &mut block_list.blocks {
            block.first_wait = block_list.waits.len() as u32;
            block_list.waits.extend(order.waits(order.by_stream[block.first as usize]).iter().map(|&before| Wait {
                stream: list.streams[before as usize],
                block: block_of[before as usize],
                slot: slot_of[before as usize],
            }));
        }
        block_list.follows.reserve(block_list.blocks.len());
        for block in &block_list.blocks {
            let last = order.by_stream[block.places().end - 1];
            let follows = match successor(&order, last) {
                Successor::One(next) => block_of[next as usize],
                Successor::Fork(fork) => fork_of(&fork, &block_of).map_or(NO_BLOCK, |fork| {
                    block_list.forks.push(fork);
                    FORKS + block_list.forks.len() as u32 - 1
                }),
                Successor::Unknown => NO_BLOCK,
            };
            block_list.follows.push(follows);
        }
        let blocks = |instructions: &Vec<u32>| instructions.iter().map(|&one| block_of[one as usize]).collect();
        block_list.collectives = list.collectives.iter().map(blocks).collect();
        block_list.sends = list.sends.iter().map(|messages| blocks(&messages.instructions)).collect();
        block_list.receives = list.receives.iter().map(|messages| blocks(&messages.instructions)).collect();
        block_list.order = order.by_stream;
        block_list
    }

    /// What a block waits for beside the one before it.
    pub(super) fn waits(&self, block: &Block) -> &[Wait] {
        &self.waits[block.first_wait as usize..(block.first_wait + block.wait_count) as usize]
    }

    /// What begins when a block has ended.
    pub(super) fn next(&self, block: u32) -> NextBlock<'_> {
        match self.follows[block as usize] {
            NO_BLOCK => NextBlock::Unknown,
            fork if fork >= FORKS => NextBlock::Fork(&self.forks[(fork - FORKS) as usize]),
            next => NextBlock::Block(next),
        }
    }

    /// A block's instructions.
    pub(super) fn instructions(&self, block: &Block) -> &[u32] {
        &self.order[block.places()]
    }

    pub(super) fn stream_count(&self) -> usize {
        self.streams.len() - 1
    }

    /// The streams of a mask such as [`Block::wakes`].
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

impl Block {
    /// Its instructions' places in the order of streams.
    pub(super) fn places(&self) -> Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// Whether kernels that follow each other are joined to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joins {
    Kernels,
    Nothing,
}

/// A fork of blocks, if each of its branches is one.
fn fork_of(fork: &InstructionFork, block_of: &[u32]) -> Option<BlockFork> {
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
