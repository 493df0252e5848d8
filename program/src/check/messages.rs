//! Checks that the n-th send from a rank to another is the n-th receive there, in shape and name.

use super::Unsound;
use crate::mesh::Rank;
use crate::program::{Operation, Program};
use std::collections::BTreeMap;

/// A message: its name, micro-batch and shape.
type Message<'a> = (&'a str, Option<u32>, &'a [usize]);

/// The peer of a send or receive of `rank`, and whether it is a send.
pub(super) fn peer_of(program: &Program, rank: Rank, operation: &Operation) -> Option<(Rank, bool)> {
    let (peer, sends) = match operation {
        Operation::Send { peer, .. } => (peer, true),
        Operation::Receive { peer, .. } => (peer, false),
        _ => return None,
    };
    Some((program.list_of(rank).peers[peer.0 as usize].of(&program.mesh, rank), sends))
}

pub(super) fn check(program: &Program) -> Result<(), Unsound> {
    // Sent and received messages of each pair of ranks, in order.
    let mut messages: BTreeMap<(Rank, Rank), [Vec<Message<'_>>; 2]> = BTreeMap::new();
    for rank in (0..program.mesh.world_size()).map(Rank) {
        let list = program.list_of(rank);
        for instruction in &list.instructions {
            let Some((peer, sends)) = peer_of(program, rank, &instruction.operation) else { continue };
            let buffer = if sends { instruction.reads.first() } else { instruction.writes.first() };
            let pair = if sends { (rank, peer) } else { (peer, rank) };
            let Some(&buffer) = buffer else {
                return Err(Unsound::Unmatched { from: pair.0, to: pair.1, message: 0 });
            };
            let shape = &*list.buffer(buffer).shape;
            let of_pair = messages.entry(pair).or_default();
            of_pair[usize::from(!sends)].push((list.name_of(instruction), instruction.micro_batch, shape));
        }
    }
    for ((from, to), [sent, received]) in messages {
        if sent != received {
            let same = sent.iter().zip(&received).take_while(|(sent, received)| sent == received);
            return Err(Unsound::Unmatched { from, to, message: same.count() });
        }
    }
    Ok(())
}
