//! A list of instructions as the interpreter runs it: cut into blocks, with no more waiting than is needed.
//!
//! Streams run in order, so a rank's progress is one number a stream, and an instruction has to wait for at most one of each other stream: the
//! last. Of these only those are kept that do not follow from others. Kernels that follow each other with nobody waiting for one in between, nor
//! one in between waiting for anybody, are one block, and one event.
//!
//! When a block has ended has to be known where a handoff may still be under way. So it is kept in a slot of the rank's, which a later
//! block takes over as soon as all who ask have asked.
//! It must not know time, and what instructions take.

use crate::lowering::{LoweredList, Step};
use foretell_program::{Phase, StageProgram};
use std::collections::VecDeque;
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
    /// How many end times a rank keeps.
    pub(crate) slots: u32,
    /// The block of each collective of each group; of each message to and from each peer.
    pub(crate) collectives: Vec<Vec<u32>>,
    pub(crate) sends: Vec<Vec<u32>>,
    pub(crate) receives: Vec<Vec<u32>>,
    /// Whether it computes or loads anything.
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

/// The bit of [`Block::wakes`] that stands for this stream and all after it.
const LAST_BIT: u16 = 63;

impl Code {
    /// The code of a list. Kernels are joined where `joins` says so.
    pub(crate) fn new(list: &StageProgram, lowered: &LoweredList, joins: Joins) -> Self {
        let order = Order::new(list);
        let waits = Waits::new(list, &order);
        let mut code = Self {
            order: Vec::with_capacity(list.instructions.len()),
            blocks: Vec::with_capacity(list.instructions.len()),
            streams: vec![0],
            waits: Vec::with_capacity(waits.before.len()),
            slots: 0,
            collectives: Vec::new(),
            sends: Vec::new(),
            receives: Vec::new(),
            uses_processor: lowered.steps.iter().any(|step| matches!(step, Step::Compute | Step::Load)),
            exchanges_overlap: false,
        };
        let slot_of = slots(list, &order, &waits, &mut code.slots);
        let mut block_of = vec![0u32; list.instructions.len()];
        for (stream, instructions) in order.of_stream.iter().enumerate() {
            let mut previous: Option<u32> = None;
            for &instruction in instructions {
                let counts_as = use_of(list, lowered, instruction);
                let step = lowered.steps[instruction as usize];
                let is_joined = previous.replace(instruction).is_some_and(|before| {
                    joins == Joins::Kernels
                        && matches!((lowered.steps[before as usize], step), (Step::Compute, Step::Compute))
                        && waits.consumers(before).is_empty()
                        && waits.of(instruction).is_empty()
                        && use_of(list, lowered, before) == counts_as
                });
                let bit = |one: &u32| 1 << list.instructions[*one as usize].stream.0.min(LAST_BIT);
                match code.blocks.last_mut().filter(|_| is_joined) {
                    Some(block) => block.count += 1,
                    None => code.blocks.push(Block {
                        step,
                        first: code.order.len() as u32,
                        count: 1,
                        stream: stream as u16,
                        counts_as,
                        first_wait: 0,
                        wait_count: waits.of(instruction).len() as u32,
                        slot: NO_SLOT,
                        wakes: 0,
                    }),
                }
                // Only the last of a block has someone who waits for it.
                if let Some(block) = code.blocks.last_mut() {
                    block.slot = slot_of[instruction as usize];
                    block.wakes = waits.consumers(instruction).iter().map(bit).fold(0, |all, one| all | one);
                }
                block_of[instruction as usize] = code.blocks.len() as u32 - 1;
                code.order.push(instruction);
            }
            code.streams.push(code.blocks.len() as u32);
        }
        for block in &mut code.blocks {
            block.first_wait = code.waits.len() as u32;
            code.waits.extend(waits.of(code.order[block.first as usize]).iter().map(|&before| Wait {
                stream: list.instructions[before as usize].stream.0,
                block: block_of[before as usize],
                slot: slot_of[before as usize],
            }));
        }
        let blocks = |instructions: &Vec<u32>| instructions.iter().map(|&one| block_of[one as usize]).collect();
        code.collectives = lowered.collectives.iter().map(blocks).collect();
        code.sends = lowered.sends.iter().map(|messages| blocks(&messages.instructions)).collect();
        code.receives = lowered.receives.iter().map(|messages| blocks(&messages.instructions)).collect();
        let stream = |block: &u32| code.blocks[*block as usize].stream;
        let overlap = |blocks: &Vec<u32>| blocks.windows(2).any(|pair| stream(&pair[0]) != stream(&pair[1]));
        code.exchanges_overlap = code.collectives.iter().chain(&code.sends).chain(&code.receives).any(overlap);
        code
    }

    /// What a block waits for beside the one before it.
    pub(crate) fn waits(&self, block: &Block) -> &[Wait] {
        &self.waits[block.first_wait as usize..(block.first_wait + block.wait_count) as usize]
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

/// What of a list is in each stream, and what has happened before what.
struct Order {
    of_stream: Vec<Vec<u32>>,
    /// An instruction's place in its stream.
    place: Vec<u32>,
    /// For each instruction and stream, how many of the stream have ended before it ends, itself included (a vector clock; Fidge 1988).
    clocks: Vec<u32>,
}

impl Order {
    fn new(list: &StageProgram) -> Self {
        let (streams, count) = (list.streams.len(), list.instructions.len());
        let mut of_stream: Vec<Vec<u32>> = vec![Vec::new(); streams];
        let mut place = Vec::with_capacity(count);
        for (index, instruction) in (0..).zip(&list.instructions) {
            let stream = &mut of_stream[instruction.stream.0 as usize];
            place.push(stream.len() as u32);
            stream.push(index);
        }
        let mut order = Self { of_stream, place, clocks: vec![0; count * streams] };
        for (index, instruction) in list.instructions.iter().enumerate() {
            let stream = instruction.stream.0 as usize;
            let before = order.previous(list, index);
            for other in before.into_iter().chain(instruction.after.iter().map(|one| one.0 as usize)) {
                order.join(list, index, other);
            }
            order.clocks[index * streams + stream] = order.place[index] + 1;
        }
        order
    }

    /// The instruction before another in its stream.
    fn previous(&self, list: &StageProgram, index: usize) -> Option<usize> {
        let place = (self.place[index] as usize).checked_sub(1)?;
        Some(self.of_stream[list.instructions[index].stream.0 as usize][place] as usize)
    }

    /// Takes into an instruction's clock that another has ended before.
    fn join(&mut self, list: &StageProgram, index: usize, other: usize) {
        let streams = self.of_stream.len();
        let stream = list.instructions[other].stream.0 as usize;
        // Of one that comes later in the list nothing is known but itself.
        self.clocks[index * streams + stream] = self.clocks[index * streams + stream].max(self.place[other] + 1);
        for stream in 0..if other < index { streams } else { 0 } {
            let known = self.clocks[other * streams + stream];
            let own = &mut self.clocks[index * streams + stream];
            *own = (*own).max(known);
        }
    }

    /// Whether one has surely ended before another ends.
    fn is_before(&self, list: &StageProgram, one: usize, other: usize) -> bool {
        let stream = list.instructions[one].stream.0 as usize;
        self.clocks[other * self.of_stream.len() + stream] > self.place[one]
    }
}

/// Who waits for whom across streams, less for those who have ended anyway when the others have.
struct Waits {
    /// Of each instruction in turn those that it waits for.
    before: Vec<u32>,
    /// Where each instruction's begin; one more than there are instructions.
    offsets: Vec<u32>,
    /// Of each instruction in turn those that wait for it, and where they begin.
    after: Vec<u32>,
    after_offsets: Vec<u32>,
}

impl Waits {
    fn new(list: &StageProgram, order: &Order) -> Self {
        let count = list.instructions.len();
        let mut waits = Self { before: Vec::new(), offsets: vec![0], after: Vec::new(), after_offsets: vec![0; count + 1] };
        for (index, instruction) in list.instructions.iter().enumerate() {
            let first = waits.before.len();
            let previous = order.previous(list, index);
            let elsewhere = || {
                let others = instruction.after.iter().map(|one| one.0 as usize);
                others.filter(|&other| list.instructions[other].stream != instruction.stream)
            };
            for other in elsewhere() {
                // A handoff lies on every way from stream to stream, so what comes by another way comes no earlier.
                let follows = |from: usize| from != other && from < index && order.is_before(list, other, from);
                let is_known = waits.before[first..].contains(&(other as u32));
                if !is_known && !previous.is_some_and(follows) && !elsewhere().any(follows) {
                    waits.before.push(other as u32);
                    waits.after_offsets[other + 1] += 1;
                }
            }
            waits.offsets.push(waits.before.len() as u32);
        }
        for index in 0..count {
            waits.after_offsets[index + 1] += waits.after_offsets[index];
        }
        waits.after = vec![0; waits.before.len()];
        let mut next = waits.after_offsets.clone();
        for instruction in 0..count as u32 {
            for place in waits.range(instruction) {
                let next = &mut next[waits.before[place] as usize];
                waits.after[*next as usize] = instruction;
                *next += 1;
            }
        }
        waits
    }

    fn range(&self, instruction: u32) -> Range<usize> {
        self.offsets[instruction as usize] as usize..self.offsets[instruction as usize + 1] as usize
    }

    fn of(&self, instruction: u32) -> &[u32] {
        &self.before[self.range(instruction)]
    }

    fn consumers(&self, instruction: u32) -> &[u32] {
        let offsets = &self.after_offsets[instruction as usize..instruction as usize + 2];
        &self.after[offsets[0] as usize..offsets[1] as usize]
    }
}

/// Gives each instruction that someone waits for a slot for its end. One of a stream takes over that of an earlier one of the stream when
/// all who waited for that have ended before.
fn slots(list: &StageProgram, order: &Order, waits: &Waits, count: &mut u32) -> Vec<u32> {
    /// How many of a stream's oldest slots are looked at.
    const LOOKED_AT: usize = 4;
    let mut slot_of = vec![NO_SLOT; list.instructions.len()];
    let mut taken: Vec<VecDeque<u32>> = vec![VecDeque::new(); order.of_stream.len()];
    for (index, instruction) in list.instructions.iter().enumerate() {
        if waits.consumers(index as u32).is_empty() {
            continue;
        }
        let stream = &mut taken[instruction.stream.0 as usize];
        let is_free = |&holder: &u32| {
            let has_asked = |&one: &u32| (one as usize) < index && order.is_before(list, one as usize, index);
            waits.consumers(holder).iter().all(has_asked)
        };
        let free = stream.iter().take(LOOKED_AT).position(is_free).and_then(|place| stream.remove(place));
        slot_of[index] = free.map_or_else(
            || {
                *count += 1;
                *count - 1
            },
            |holder| slot_of[holder as usize],
        );
        stream.push_back(index as u32);
    }
    slot_of
}

fn use_of(list: &StageProgram, lowered: &LoweredList, instruction: u32) -> Use {
    let index = instruction as usize;
    match lowered.steps[index] {
        Step::Compute if list.instructions[index].phase == Phase::Update => Use::Optimizer,
        Step::Compute => Use::Compute,
        Step::Load => Use::Data,
        Step::Collective { .. } | Step::Send { .. } | Step::Receive { .. } => Use::Communication,
    }
}
