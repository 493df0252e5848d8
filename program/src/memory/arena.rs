//! The allocator of an arena, by best fit: the smallest hole that is large enough, the first of
//! equally large ones, or the end of the arena.
//!
//! The arena is a chain of adjacent blocks, each in use or free. Adjacent free blocks form a hole
//! but stay separate blocks: each remembers its last users, and an allocation waits only for the
//! users of the blocks that it covers. The first and last block of a hole refer to each other
//! (boundary tags; Knuth, The Art of Computer Programming, volume 1, section 2.5), so that freeing
//! a block needs no search.

use super::{Users, remember};

/// The index of a block. Indices of removed blocks are reused.
pub(super) type BlockId = u32;

/// No block.
pub(super) const NO_BLOCK: BlockId = BlockId::MAX;

/// The arena: a chain of blocks, and its holes.
#[derive(Debug)]
pub(super) struct Arena {
    blocks: Vec<ArenaBlock>,
    /// Indices of removed blocks.
    unused: Vec<BlockId>,
    last: BlockId,
    /// The end of the chain, in bytes.
    end: u64,
    /// The length, start and first block of each hole, sorted.
    holes: Vec<(u64, u64, BlockId)>,
}

#[derive(Debug)]
struct ArenaBlock {
    start: u64,
    length: u64,
    before: BlockId,
    after: BlockId,
    is_free: bool,
    /// The last block of the hole that this one starts, or the first block of the hole that it
    /// ends.
    other_end: BlockId,
    /// The last users, if the block is free.
    users: Users,
}

impl Arena {
    /// An arena without blocks that starts at `start`.
    pub(super) fn new(start: u64) -> Self {
        Self { blocks: Vec::new(), unused: Vec::new(), last: NO_BLOCK, end: start, holes: Vec::new() }
    }

    /// The end of all memory that was ever in use.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Allocates a block, and adds the last users of its memory to `users`. Returns the block and
    /// its start.
    pub(super) fn allocate(&mut self, length: u64, users: &mut Users) -> (BlockId, u64) {
        let fitting = self.holes.partition_point(|&(hole, ..)| hole < length);
        let first = if fitting < self.holes.len() {
            self.holes.remove(fitting).2
        } else if self.last != NO_BLOCK && self.block(self.last).is_free {
            // Extends the hole at the end of the arena.
            let first = self.block(self.last).other_end;
            self.remove_hole(first);
            let missing = length - (self.end - self.block(first).start);
            self.end += missing;
            let last = self.last;
            self.block_mut(last).length += missing;
            first
        } else {
            let block = ArenaBlock {
                start: self.end,
                length,
                before: self.last,
                after: NO_BLOCK,
                is_free: false,
                other_end: NO_BLOCK,
                users: Users::new(),
            };
            self.end += length;
            let id = self.add(block);
            self.last = id;
            return (id, self.block(id).start);
        };
        self.cut(first, length, users)
    }

    /// Allocates the start of the hole that starts with block `first`. The hole is no longer in
    /// `holes`.
    fn cut(&mut self, first: BlockId, length: u64, users: &mut Users) -> (BlockId, u64) {
        let start = self.block(first).start;
        let hole_end = self.block(first).other_end;
        let end = start + length;
        // Merges all blocks that the allocation covers entirely into the first.
        let mut at = first;
        let mut covered = start;
        loop {
            let block = self.block(at);
            for &(stream, id) in &block.users {
                remember(users, stream, id);
            }
            let (block_end, after) = (block.start + block.length, block.after);
            if block_end > end {
                break;
            }
            covered = block_end;
            if at != first {
                self.remove_block(at);
            }
            if covered == end || at == hole_end {
                break;
            }
            at = after;
        }
        if covered < end {
            // Splits the last block: the rest keeps its users.
            let users_of_rest = self.block(at).users.clone();
            let (after, block_end) = (self.block(at).after, self.block(at).start + self.block(at).length);
            let rest = if at == first {
                let rest = ArenaBlock {
                    start: end,
                    length: block_end - end,
                    before: first,
                    after,
                    is_free: true,
                    other_end: NO_BLOCK,
                    users: users_of_rest,
                };
                let id = self.add(rest);
                self.block_mut(first).after = id;
                if after == NO_BLOCK {
                    self.last = id;
                } else {
                    self.block_mut(after).before = id;
                }
                id
            } else {
                let rest = self.block_mut(at);
                (rest.start, rest.length) = (end, block_end - end);
                at
            };
            let hole_end = if at == hole_end { rest } else { hole_end };
            self.make_hole(rest, hole_end);
        } else if at != hole_end {
            let rest = self.block(first).after;
            self.make_hole(rest, hole_end);
        }
        let taken = self.block_mut(first);
        taken.length = length;
        taken.is_free = false;
        taken.users.clear();
        (first, start)
    }

    /// Frees a block that was used by `users`.
    pub(super) fn free(&mut self, id: BlockId, users: Users) {
        let block = self.block_mut(id);
        block.is_free = true;
        block.users = users;
        let (before, after) = (block.before, block.after);
        let (mut first, mut last) = (id, id);
        if before != NO_BLOCK && self.block(before).is_free {
            first = self.block(before).other_end;
            self.remove_hole(first);
        }
        if after != NO_BLOCK && self.block(after).is_free {
            last = self.block(after).other_end;
            self.remove_hole(after);
        }
        self.make_hole(first, last);
    }

    fn make_hole(&mut self, first: BlockId, last: BlockId) {
        let (start, end) = (self.block(first).start, self.block(last).start + self.block(last).length);
        self.block_mut(first).other_end = last;
        self.block_mut(last).other_end = first;
        let key = (end - start, start);
        let place = self.holes.partition_point(|&(length, start, _)| (length, start) < key);
        self.holes.insert(place, (key.0, key.1, first));
    }

    /// Removes the hole that starts with block `first` from the list of holes.
    fn remove_hole(&mut self, first: BlockId) {
        let start = self.block(first).start;
        let last = self.block(self.block(first).other_end);
        let key = (last.start + last.length - start, start);
        let place = self.holes.partition_point(|&(length, start, _)| (length, start) < key);
        self.holes.remove(place);
    }

    fn add(&mut self, block: ArenaBlock) -> BlockId {
        let before = block.before;
        let id = match self.unused.pop() {
            Some(id) => {
                self.blocks[id as usize] = block;
                id
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() as BlockId - 1
            }
        };
        if before != NO_BLOCK {
            self.block_mut(before).after = id;
        }
        id
    }

    /// Removes a block from the chain. The block before it covers its memory. It is never the
    /// first.
    fn remove_block(&mut self, id: BlockId) {
        let (before, after) = (self.block(id).before, self.block(id).after);
        self.block_mut(before).after = after;
        if after == NO_BLOCK {
            self.last = before;
        } else {
            self.block_mut(after).before = before;
        }
        self.unused.push(id);
    }

    fn block(&self, id: BlockId) -> &ArenaBlock {
        &self.blocks[id as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut ArenaBlock {
        &mut self.blocks[id as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ALIGNMENT, Users, remember};
    use super::*;
    use crate::program::{InstructionId, StreamId};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// The same allocator with a state for every single unit of memory.
    #[derive(Default)]
    struct Oracle {
        /// Whether each unit is free, and its last users.
        units: Vec<(bool, Users)>,
    }

    impl Oracle {
        fn take(&mut self, length: usize, users: &mut Users) -> usize {
            let mut holes: Vec<(usize, usize)> = Vec::new();
            for (at, (is_free, _)) in self.units.iter().enumerate().filter(|(_, (is_free, _))| *is_free) {
                match holes.last_mut() {
                    Some((length, start)) if *start + *length == at && *is_free => *length += 1,
                    _ => holes.push((1, at)),
                }
            }
            let at_end = holes.last().filter(|(length, start)| start + length == self.units.len()).map(|&(_, start)| start);
            let best = holes.iter().filter(|(hole, _)| *hole >= length).min().map(|&(_, start)| start);
            let start = best.or(at_end).unwrap_or(self.units.len());
            self.units.resize_with(self.units.len().max(start + length), Default::default);
            for (is_free, own) in &mut self.units[start..start + length] {
                *is_free = false;
                std::mem::take(own).into_iter().for_each(|(stream, id)| remember(users, stream, id));
            }
            start
        }
    }

    proptest! {
        #[test]
        fn the_arena_agrees_with_an_oracle_of_single_units(
            steps in proptest::collection::vec((any::<bool>(), 1usize..9, any::<prop::sample::Index>()), 1..120),
        ) {
            let (mut arena, mut oracle) = (Arena::new(0), Oracle::default());
            let mut taken: Vec<(BlockId, usize, usize)> = Vec::new();
            for (number, (takes, length, which)) in steps.into_iter().enumerate() {
                if takes || taken.is_empty() {
                    let (mut users, mut expected) = (Users::new(), Users::new());
                    let (block, start) = arena.allocate(length as u64 * ALIGNMENT, &mut users);
                    let expected_start = oracle.take(length, &mut expected);
                    prop_assert_eq!(start, expected_start as u64 * ALIGNMENT);
                    let sorted = |users: Users| users.into_iter().collect::<BTreeMap<_, _>>();
                    prop_assert_eq!(sorted(users), sorted(expected));
                    taken.push((block, expected_start, length));
                } else {
                    let (block, start, length) = taken.swap_remove(which.index(taken.len()));
                    let users: Users = [(StreamId(number as u16 % 3), InstructionId(number as u32))].into_iter().collect();
                    arena.free(block, users.clone());
                    oracle.units[start..start + length].fill((true, users));
                }
                prop_assert_eq!(arena.end(), oracle.units.len() as u64 * ALIGNMENT);
            }
        }
    }
}
