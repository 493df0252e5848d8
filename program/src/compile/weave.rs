//! Weaving pairs of passes: their instructions alternate, so that kernels of one run while the
//! other waits for an exchange of tokens, or for another collective of activations.
//!
//! Each pass keeps its own order. The woven list takes instructions from one pass until that pass
//! waits for a collective it has issued, then from the other. Messages between stages frame the
//! pair: it begins with the receives of both passes and ends with the sends of both. So other
//! stages see a pair as one task, as [`super::messages`] assumes, and messages keep their order.
//!
//! Uses of a buffer keep their order if one of them writes: of gathered parameters, of eight-bit
//! copies that both passes read, of sums over micro-batches. If alternating would change that
//! order, the passes run one after the other. It must not know schedules: which passes may be woven
//! is decided earlier ([`crate::Schedule::woven_orders`]).

use crate::collective::CollectiveRole;
use crate::plan::Overlap;
use crate::program::{BufferId, Instruction, Operation, StageProgram};
use rustc_hash::FxHashMap;
use std::iter::Peekable;
use std::ops::Range;
use std::vec::IntoIter;

/// Weaves each pass of `pairs`, indices in [`StageProgram::passes`], with the pass after it.
pub(super) fn weave(program: &mut StageProgram, pairs: &[usize], overlap: &Overlap) {
    for &first in pairs {
        let Some([one, other]) = program.passes.get(first..first + 2) else { continue };
        let (one, other) = (one.instructions.clone(), other.instructions.clone());
        let region = one.start..other.end;
        let [alternating, consecutive] = orders(program, [one, other], overlap);
        // If alternating is invalid, run the passes one after the other, still with all receives
        // first and all sends last. If that is invalid too, leave the list as it is.
        let valid = [alternating, consecutive].into_iter().find(|order| keeps_uses_in_order(program, order));
        let Some(order) = valid else { continue };
        reorder(program, &region, &order);
        let middle = u32::midpoint(region.start, region.end);
        program.passes[first].instructions = region.start..middle;
        program.passes[first + 1].instructions = middle..region.end;
    }
}

/// Two new orders of the instructions of two passes: one alternates between the passes, the other
/// runs one pass after the other. Both begin with the receives and end with the sends.
fn orders(program: &StageProgram, passes: [Range<u32>; 2], overlap: &Overlap) -> [Vec<u32>; 2] {
    let operation = |index: u32| &*program.instructions[index as usize].operation;
    let is_receive = |&index: &u32| matches!(operation(index), Operation::Receive { .. });
    let is_send = |&index: &u32| matches!(operation(index), Operation::Send { .. });
    let all = || passes.iter().cloned().flatten();
    let framed = |middle: Vec<u32>| -> Vec<u32> { all().filter(is_receive).chain(middle).chain(all().filter(is_send)).collect() };
    let bodies = passes.clone().map(|pass| pass.filter(|index| !is_receive(index) && !is_send(index)).collect::<Vec<u32>>());
    let consecutive = bodies.concat();
    [framed(alternate(program, bodies, overlap)), framed(consecutive)]
}

/// The instructions of a pass that are not yet placed, and the collectives that it waits for.
struct Lane {
    left: Peekable<IntoIter<u32>>,
    /// The buffers of collectives that the pass has issued since the other pass last ran.
    awaited: Vec<BufferId>,
}

/// Takes instructions from one pass until it waits, then from the other.
fn alternate(program: &StageProgram, passes: [Vec<u32>; 2], overlap: &Overlap) -> Vec<u32> {
    let mut order = Vec::with_capacity(passes.iter().map(Vec::len).sum());
    let mut lanes = passes.map(|left| Lane { left: left.into_iter().peekable(), awaited: Vec::new() });
    loop {
        let [own, other] = &mut lanes;
        let other_has_ended = other.left.peek().is_none();
        let waits = |index: &u32| {
            let one = &program.instructions[*index as usize];
            one.reads.iter().chain(&one.writes).any(|&buffer| own.awaited.contains(&root(program, buffer)))
        };
        let has_turn = own.left.peek().is_some_and(|next| other_has_ended || !waits(next));
        match own.left.next_if(|_| has_turn) {
            Some(next) => {
                let instruction = &program.instructions[next as usize];
                if is_awaited(instruction, overlap) {
                    own.awaited.extend(instruction.writes.iter().map(|&buffer| root(program, buffer)));
                }
                order.push(next);
            }
            None if other_has_ended => return order,
            None => {
                own.awaited.clear();
                lanes.swap(0, 1);
            }
        }
    }
}

/// Whether an instruction is a collective that the next kernels of its pass wait for, and kernels
/// of other passes do not.
fn is_awaited(instruction: &Instruction, overlap: &Overlap) -> bool {
    let Operation::Collective { role, .. } = *instruction.operation else { return false };
    let is_of_activations = matches!(role, CollectiveRole::Tensor | CollectiveRole::Context | CollectiveRole::Expert);
    is_of_activations && overlap.allows(&instruction.operation)
}

/// Whether `order` keeps the list's order of two uses of one buffer, unless both only read it.
fn keeps_uses_in_order(program: &StageProgram, order: &[u32]) -> bool {
    // By buffer: the last instructions of the list that read and write it, among those so far.
    let mut last_uses: FxHashMap<BufferId, [Option<u32>; 2]> = FxHashMap::default();
    order.iter().all(|&index| {
        let instruction = &program.instructions[index as usize];
        let mut keeps = true;
        for &buffer in &instruction.reads {
            let [read, write] = last_uses.entry(root(program, buffer)).or_default();
            keeps &= write.is_none_or(|last| last <= index);
            *read = Some(index).max(*read);
        }
        for &buffer in &instruction.writes {
            let [read, write] = last_uses.entry(root(program, buffer)).or_default();
            keeps &= read.is_none_or(|last| last <= index) && write.is_none_or(|last| last <= index);
            *write = Some(index).max(*write);
        }
        keeps
    })
}

/// The buffer that has memory: the parent of a view, else the buffer itself.
fn root(program: &StageProgram, buffer: BufferId) -> BufferId {
    program.buffer(buffer).parent.unwrap_or(buffer)
}

/// Puts the instructions of a region into a new order. No instruction refers to another yet.
fn reorder(program: &mut StageProgram, region: &Range<u32>, order: &[u32]) {
    let region = region.start as usize..region.end as usize;
    debug_assert_eq!(region.len(), order.len(), "every instruction of the region has a place");
    let reordered: Vec<Instruction> = order.iter().map(|&index| program.instructions[index as usize].clone()).collect();
    drop(program.instructions.splice(region, reordered));
}
