//! A list of instructions as the interpreter runs it: stream by stream, cut into blocks.
//!
//! Streams run in order, so a rank's progress is one number a stream. Kernels that follow each other with nobody waiting for one in between, nor one
//! in between waiting for anybody, are one block, and one event.
//!
//! When a block has ended has to be known where a handoff may still be under way. So it is kept in a slot of the rank's, which a later
//! block takes over as soon as all who ask have asked ([`crate::certain`]).
//! It must not know time, and what instructions take.

use crate::certain::{self, Certain, Follow};
use crate::lists::{LoweredList, Step};
use foretell_program::{Phase, StageProgram};
use std::ops::Range;

/// What ranks that run one list have in common.
#[derive(Debug)]
pub(crate) struct Code {
    /// Stream by stream.
    pub(crate) blocks: Vec<Block>,
    /// The instructions stream by stream.
    order: Vec<u32>,
    /// Where each stream's blocks begin; one more than there are streams.
    pub(crate) streams: Vec<u32>,
    waits: Vec<Wait>,
    /// What begins when each block has ended, whatever others do: see [`Code::follows`].
    follows: Vec<u32>,
    forks: Vec<Fork>,
    /// How many end times a rank keeps.
    pub(crate) slots: u32,
    /// The block of each collective of each group; of each message to and from each peer.
    pub(crate) collectives: Vec<Vec<u32>>,
    pub(crate) sends: Vec<Vec<u32>>,
    pub(crate) receives: Vec<Vec<u32>>,
    /// Whether it computes, loads or copies anything.
    pub(crate) uses_processor: bool,
    /// Whether exchanges of one group, or with one peer, stand in several streams, so that they may go on at once.
    pub(crate) exchanges_overlap: bool,
}

/// Instructions that are run in one go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) step: Step,
    /// Its instructions: places in the order of streams.
    first: u32,
    count: u32,
    pub(crate) stream: u16,
    pub(crate) counts_as: Use,
    first_wait: u32,
    wait_count: u32,
    /// Where its end is kept, or [`NO_SLOT`].
    pub(crate) slot: u32,
    /// The streams in which someone waits for it, bit by bit: see [`Code::streams_of`].
    pub(crate) wakes: u64,
}

/// What an instant counts as; of several things at once the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Use {
    Optimizer,
    Compute,
    Communication,
    Data,
}

/// A block of another stream that must have ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) stream: u16,
    pub(crate) block: u32,
    pub(crate) slot: u32,
}

/// Of a block whose end nobody asks for.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// No block.
pub(crate) const NO_BLOCK: u32 = u32::MAX;

/// From here on numbers of what follows are those of forks.
const FORKS: u32 = 1 << 31;

/// What begins when a block has ended, and nothing else does before that has.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Follows<'a> {
    Nothing,
    Block(u32),
    Fork(&'a Fork),
}

/// Two blocks that begin at the end of one, and the one that begins when both have ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fork {
    pub(crate) branches: [u32; 2],
    pub(crate) join: u32,
}

/// The bit of [`Block::wakes`] that stands for this stream and all after it.
const LAST_BIT: u16 = 63;

impl Code {
    /// The code of a list. Kernels are joined where `joins` says so.
    pub(crate) fn new(list: &StageProgram, lowered: &LoweredList, joins: Joins) -> Self {
        let order = Order::new(list, lowered);
        let mut code = Self {
            order: Vec::new(),
            blocks: Vec::with_capacity(list.instructions.len()),
            streams: vec![0],
            waits: Vec::with_capacity(order.before.len()),
            follows: Vec::new(),
            forks: Vec::new(),
            slots: 0,
            collectives: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
            uses_processor: lowered.steps.iter().any(|step| matches!(step, Step::Compute | Step::Load | Step::Copy)),
            exchanges_overlap: false,
        };
        let certain = Certain::new(lowered, &order);
        let slot_of = &certain.slot_of;
        code.slots = certain.slots;
        let mut block_of = vec![0u32; list.instructions.len()];
        for (stream, range) in order.streams.windows(2).enumerate() {
            // What the last of the block so far counts as, where kernels may still be joined to it.
            let mut open: Option<Use> = None;
            for (place, &instruction) in (range[0]..).zip(&order.by_stream[range[0] as usize..range[1] as usize]) {
                let (waits, consumers) = (order.waits(instruction), order.consumers(instruction));
                let counts_as = use_of(lowered, instruction);
                let step = lowered.steps[instruction as usize];
                let is_kernel = joins == Joins::Kernels && matches!(step, Step::Compute);
                let is_joined = is_kernel && waits.is_empty() && open == Some(counts_as);
                open = (is_kernel && consumers.is_empty()).then_some(counts_as);
                let bit = |one: &u32| 1 << lowered.streams[*one as usize].min(LAST_BIT);
                let slot = slot_of[instruction as usize];
                let wakes = consumers.iter().map(bit).fold(0, |all, one| all | one);
                match code.blocks.last_mut().filter(|_| is_joined) {
                    // Only the last of a block has someone who waits for it.
                    Some(block) => (block.count, block.slot, block.wakes) = (block.count + 1, slot, wakes),
                    None => code.blocks.push(Block {
                        step,
                        first: place,
                        count: 1,
                        stream: stream as u16,
                        counts_as,
                        first_wait: 0,
                        wait_count: waits.len() as u32,
                        slot,
                        wakes,
                    }),
                }
                block_of[instruction as usize] = code.blocks.len() as u32 - 1;
            }
            code.streams.push(code.blocks.len() as u32);
        }
        for block in &mut code.blocks {
            block.first_wait = code.waits.len() as u32;
            code.waits.extend(order.waits(order.by_stream[block.first as usize]).iter().map(|&before| Wait {
                stream: lowered.streams[before as usize],
                block: block_of[before as usize],
                slot: slot_of[before as usize],
            }));
        }
        code.follows.reserve(code.blocks.len());
        for block in &code.blocks {
            let last = order.by_stream[block.places().end - 1];
            let follows = match certain.follows(lowered, &order, last) {
                Follow::One(next) => block_of[next as usize],
                Follow::Fork(fork) => fork_of(&fork, &block_of).map_or(NO_BLOCK, |fork| {
                    code.forks.push(fork);
                    FORKS + code.forks.len() as u32 - 1
                }),
                Follow::Unknown => NO_BLOCK,
            };
            code.follows.push(follows);
        }
        let blocks = |instructions: &Vec<u32>| instructions.iter().map(|&one| block_of[one as usize]).collect();
        code.collectives = lowered.collectives.iter().map(blocks).collect();
        code.sends = lowered.sends.iter().map(|messages| blocks(&messages.instructions)).collect();
        code.receives = lowered.receives.iter().map(|messages| blocks(&messages.instructions)).collect();
        let stream = |block: &u32| code.blocks[*block as usize].stream;
        let overlap = |blocks: &Vec<u32>| blocks.windows(2).any(|pair| stream(&pair[0]) != stream(&pair[1]));
        code.exchanges_overlap = code.collectives.iter().chain(&code.sends).chain(&code.receives).any(overlap);
        code.order = order.by_stream;
        code
    }

    /// What a block waits for beside the one before it.
    pub(crate) fn waits(&self, block: &Block) -> &[Wait] {
        &self.waits[block.first_wait as usize..(block.first_wait + block.wait_count) as usize]
    }

    /// What begins when a block has ended.
    pub(crate) fn follows(&self, block: u32) -> Follows<'_> {
        match self.follows[block as usize] {
            NO_BLOCK => Follows::Nothing,
            fork if fork >= FORKS => Follows::Fork(&self.forks[(fork - FORKS) as usize]),
            next => Follows::Block(next),
        }
    }

    /// A block's instructions.
    pub(crate) fn instructions(&self, block: &Block) -> &[u32] {
        &self.order[block.places()]
    }

    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len() - 1
    }

    /// The streams of a mask such as [`Block::wakes`].
    pub(crate) fn streams_of(&self, mut mask: u64) -> impl Iterator<Item = u16> + use<> {
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
    pub(crate) fn places(&self) -> Range<usize> {
        self.first as usize..(self.first + self.count) as usize
    }
}

/// Whether kernels that follow each other are joined to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joins {
    Kernels,
    Nothing,
}

/// What of a list is in each stream, and who waits for whom across streams.
pub(crate) struct Order {
    /// The instructions stream by stream, and where those of each begin; one more than there are streams.
    by_stream: Vec<u32>,
    streams: Vec<u32>,
    /// An instruction's place among these.
    pub(crate) place: Vec<u32>,
    /// Of each instruction in turn those of other streams that it waits for, and where they begin; one more than there are instructions.
    before: Vec<u32>,
    before_offsets: Vec<u32>,
    /// Of each instruction in turn those of other streams that wait for it, and where they begin.
    after: Vec<u32>,
    after_offsets: Vec<u32>,
}

impl Order {
    pub(crate) fn new(list: &StageProgram, lowered: &LoweredList) -> Self {
        let count = list.instructions.len();
        let mut streams = vec![0u32; list.streams.len() + 1];
        lowered.streams.iter().for_each(|&stream| streams[stream as usize + 1] += 1);
        for stream in 0..list.streams.len() {
            streams[stream + 1] += streams[stream];
        }
        let mut next = streams.clone();
        let mut order = Self {
            by_stream: vec![0; count],
            streams,
            place: Vec::with_capacity(count),
            before: Vec::with_capacity(count),
            before_offsets: Vec::with_capacity(count + 1),
            after: Vec::new(),
            after_offsets: vec![0; count + 1],
        };
        order.before_offsets.push(0);
        for (index, instruction) in (0..).zip(&list.instructions) {
            let own_stream = lowered.streams[index as usize];
            let place = &mut next[own_stream as usize];
            order.by_stream[*place as usize] = index;
            order.place.push(*place);
            *place += 1;
            let first = order.before.len();
            for before in instruction.after.iter().map(|one| one.0) {
                let is_elsewhere = lowered.streams[before as usize] != own_stream;
                if is_elsewhere && !order.before[first..].contains(&before) {
                    order.before.push(before);
                    order.after_offsets[before as usize + 1] += 1;
                }
            }
            order.before_offsets.push(order.before.len() as u32);
        }
        order.turn_around();
        order
    }

    /// From whom each waits for to who waits for each.
    fn turn_around(&mut self) {
        for index in 1..self.after_offsets.len() {
            self.after_offsets[index] += self.after_offsets[index - 1];
        }
        let mut next = self.after_offsets.clone();
        self.after = vec![0; self.before.len()];
        for (instruction, range) in (0..).zip(self.before_offsets.windows(2)) {
            for &before in &self.before[range[0] as usize..range[1] as usize] {
                let next = &mut next[before as usize];
                self.after[*next as usize] = instruction;
                *next += 1;
            }
        }
    }

    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len() - 1
    }

    /// Whether an instruction is the last of its stream.
    pub(crate) fn is_last(&self, instruction: u32, stream: u16) -> bool {
        self.place[instruction as usize] + 1 == self.streams[stream as usize + 1]
    }

    pub(crate) fn waits(&self, instruction: u32) -> &[u32] {
        let offsets = &self.before_offsets[instruction as usize..instruction as usize + 2];
        &self.before[offsets[0] as usize..offsets[1] as usize]
    }

    pub(crate) fn consumers(&self, instruction: u32) -> &[u32] {
        let offsets = &self.after_offsets[instruction as usize..instruction as usize + 2];
        &self.after[offsets[0] as usize..offsets[1] as usize]
    }
}

/// A fork of blocks, if each of its branches is one.
fn fork_of(fork: &certain::Fork, block_of: &[u32]) -> Option<Fork> {
    let are_blocks = fork.branches.iter().all(|&(first, last)| block_of[first as usize] == block_of[last as usize]);
    are_blocks
        .then(|| Fork { branches: fork.branches.map(|(first, _)| block_of[first as usize]), join: block_of[fork.join as usize] })
}

fn use_of(lowered: &LoweredList, instruction: u32) -> Use {
    let index = instruction as usize;
    match lowered.steps[index] {
        Step::Compute if lowered.phases[index] == Phase::Update => Use::Optimizer,
        Step::Compute => Use::Compute,
        Step::Load => Use::Data,
        Step::Collective { .. } | Step::Send { .. } | Step::Receive { .. } | Step::Copy => Use::Communication,
    }
}
