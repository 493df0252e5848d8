//! Soundness of a Program: no race, no deadlock without message buffers, matching sends and
//! receives, and no two live buffers in the same memory.
#![allow(clippy::unwrap_used)]

use foretell_program::{BufferId, MemoryKind, Operation, Program, Rank, StageProgram, Stream};

pub fn assert_sound(program: &Program) {
    assert_sends_meet_receives(program);
    assert_no_deadlock(program);
    for list in &program.lists {
        assert_reads_what_was_written(list);
        assert_no_race(list);
        assert_copies_go_over(list);
    }
}

/// The vector clock of each instruction: for every stream, the end of its instructions that have
/// finished before the instruction starts.
fn clocks(stage: &StageProgram) -> Vec<Vec<u32>> {
    let mut known = vec![vec![0u32; stage.streams.len()]; stage.streams.len()];
    let mut clocks = Vec::new();
    for (index, instruction) in stage.instructions.iter().enumerate() {
        let stream = instruction.stream.0 as usize;
        for id in &instruction.after {
            assert!((id.0 as usize) < index, "instruction {index} waits for a later one");
            let theirs: &Vec<u32> = &clocks[id.0 as usize];
            let other = stage.instructions[id.0 as usize].stream.0 as usize;
            for (mine, &their) in known[stream].iter_mut().zip(theirs) {
                *mine = (*mine).max(their);
            }
            known[stream][other] = known[stream][other].max(id.0 + 1);
        }
        clocks.push(known[stream].clone());
        known[stream][stream] = index as u32 + 1;
    }
    clocks
}

fn root(stage: &StageProgram, id: BufferId) -> BufferId {
    stage.buffer(id).parent.unwrap_or(id)
}

/// Asserts that any two accesses of the same memory are ordered, if one of them is a write.
fn assert_no_race(stage: &StageProgram) {
    let clocks = clocks(stage);
    let mut accesses: Vec<(u64, u64, usize, bool, MemoryKind)> = Vec::new();
    for (index, instruction) in stage.instructions.iter().enumerate() {
        for (list, writes) in [(&instruction.reads, false), (&instruction.writes, true)] {
            for &id in list {
                let buffer = stage.buffer(id);
                let (start, end) = (buffer.offset.count(), buffer.offset.count() + buffer.bytes.count());
                let arena = if buffer.memory == MemoryKind::Host { stage.host_arena } else { stage.arena };
                assert!(end <= arena.count(), "{} lies outside the arena", buffer.name);
                let whole = stage.buffer(root(stage, id));
                assert!(start >= whole.offset.count() && end <= whole.offset.count() + whole.bytes.count());
                assert_eq!(buffer.memory, whole.memory);
                accesses.push((start, end, index, writes, buffer.memory));
            }
        }
    }
    for (position, first) in accesses.iter().enumerate() {
        for second in &accesses[position + 1..] {
            let overlap = first.4 == second.4 && first.0 < second.1 && second.0 < first.1;
            if !overlap || !(first.3 || second.3) || first.2 == second.2 {
                continue;
            }
            let stream = stage.instructions[first.2].stream;
            let ordered = stage.instructions[second.2].stream == stream || clocks[second.2][stream.0 as usize] > first.2 as u32;
            assert!(ordered, "instructions {} and {} of stage {} race", first.2, second.2, stage.stage);
        }
    }
}

/// Asserts that every buffer that is read was written before, and that no other buffer overwrote it
/// in between. Runs the list over a memory of buffer ids.
fn assert_reads_what_was_written(stage: &StageProgram) {
    let mut memory: Vec<(u64, u64, BufferId)> = stage
        .buffers
        .iter()
        .enumerate()
        .filter(|(_, buffer)| buffer.persistent && buffer.parent.is_none())
        .map(|(index, buffer)| (buffer.offset.count(), buffer.offset.count() + buffer.bytes.count(), BufferId(index as u32)))
        .collect();
    for (index, instruction) in stage.instructions.iter().enumerate() {
        for &id in &instruction.reads {
            let id = root(stage, id);
            assert!(
                memory.iter().any(|&(.., held)| held == id),
                "instruction {index} reads {}, which is not there",
                stage.buffer(id).name
            );
        }
        for &id in &instruction.writes {
            let id = root(stage, id);
            let (start, end) =
                (stage.buffer(id).offset.count(), stage.buffer(id).offset.count() + stage.buffer(id).bytes.count());
            let elsewhere = |held: BufferId| stage.buffer(held).memory != stage.buffer(id).memory;
            memory.retain(|&(from, until, held)| held == id || elsewhere(held) || from >= end || until <= start);
            if !memory.iter().any(|&(.., held)| held == id) {
                memory.push((start, end, id));
            }
        }
    }
}

/// Asserts that kernels and communication touch only the device's memory, and that every copy moves
/// a whole buffer to the other memory, on the stream of its direction.
fn assert_copies_go_over(stage: &StageProgram) {
    for instruction in &stage.instructions {
        let touched = instruction.reads.iter().chain(&instruction.writes).map(|&id| stage.buffer(id));
        match *instruction.operation {
            Operation::Copy { to, bytes } => {
                let (read, write) = (stage.buffer(instruction.reads[0]), stage.buffer(instruction.writes[0]));
                assert_eq!((read.bytes, write.bytes, write.memory), (bytes, bytes, to));
                assert_ne!(read.memory, write.memory);
                assert_eq!(stage.streams[instruction.stream.0 as usize], Stream::CopyTo(to));
            }
            _ => assert!(touched.into_iter().all(|buffer| buffer.memory == MemoryKind::Device)),
        }
    }
}

/// The peer of a send or receive of `rank`, and whether it is a send.
fn peer_of(program: &Program, rank: Rank, operation: &Operation) -> Option<(Rank, bool)> {
    let (peer, sends) = match operation {
        Operation::Send { peer, .. } => (peer, true),
        Operation::Receive { peer, .. } => (peer, false),
        _ => return None,
    };
    Some((program.list_of(rank).peers[peer.0 as usize].of(&program.mesh, rank), sends))
}

/// Asserts that the n-th send from a rank to another matches the n-th receive there, in shape and
/// name.
fn assert_sends_meet_receives(program: &Program) {
    let messages = |rank: Rank, other: Rank, sending: bool| -> Vec<_> {
        let list = program.list_of(rank);
        let own = list.instructions.iter().filter(|one| peer_of(program, rank, &one.operation) == Some((other, sending)));
        let buffer = |id: BufferId| list.buffer(id).shape.clone();
        own.map(|one| (list.name_of(one), one.micro_batch, buffer(*one.reads.first().or(one.writes.first()).unwrap()))).collect()
    };
    for from in (0..program.mesh.world_size()).map(Rank) {
        for to in (0..program.mesh.world_size()).map(Rank) {
            assert_eq!(messages(from, to, true), messages(to, from, false), "from {from} to {to}");
        }
    }
}

/// Asserts that the lists of all ranks run to their ends without message buffers. Streams run
/// independently. A message passes when both ranks have reached it, a collective when all members
/// have.
fn assert_no_deadlock(program: &Program) {
    let world: Vec<Rank> = (0..program.mesh.world_size()).map(Rank).collect();
    let streams_of = |list: &StageProgram| -> Vec<Vec<usize>> {
        let of =
            |stream: usize| (0..list.instructions.len()).filter(move |&one| list.instructions[one].stream.0 as usize == stream);
        (0..list.streams.len()).map(|stream| of(stream).collect()).collect()
    };
    let streams: Vec<Vec<Vec<usize>>> = program.lists.iter().map(streams_of).collect();
    let of = |rank: Rank| &streams[program.list_index(rank)];
    let mut next: Vec<Vec<usize>> = world.iter().map(|&rank| vec![0; of(rank).len()]).collect();
    let mut done: Vec<Vec<bool>> = world.iter().map(|&rank| vec![false; program.list_of(rank).instructions.len()]).collect();
    // The next instruction of a stream, if all of its dependencies are done.
    let head = |next: &[Vec<usize>], done: &[Vec<bool>], rank: Rank, stream: usize| {
        let &id = of(rank)[stream].get(next[rank.0][stream])?;
        let after = &program.list_of(rank).instructions[id].after;
        after.iter().all(|other| done[rank.0][other.0 as usize]).then_some(id)
    };
    // The other participants of an operation and their streams; `None` if one of them has no such
    // stream.
    let partners = |rank: Rank, operation: &Operation| -> Option<Vec<(Rank, usize)>> {
        if let Some((other, sends)) = peer_of(program, rank, operation) {
            let list = program.list_of(other);
            let back = list.streams.iter().position(|stream| match stream {
                Stream::SendTo(peer) => !sends && list.peers[peer.0 as usize].of(&program.mesh, other) == rank,
                Stream::ReceiveFrom(peer) => sends && list.peers[peer.0 as usize].of(&program.mesh, other) == rank,
                _ => false,
            });
            return Some(vec![(other, back?)]);
        }
        let Operation::Collective { group, .. } = operation else { return Some(Vec::new()) };
        let group = &program.list_of(rank).groups[group.0 as usize];
        let others = group.members(&program.mesh, rank).into_iter().filter(|&other| other != rank);
        others
            .map(|other| {
                let list = program.list_of(other);
                let same = |stream: &Stream| matches!(stream, Stream::Group(id) if list.groups[id.0 as usize] == *group);
                Some((other, list.streams.iter().position(same)?))
            })
            .collect()
    };
    loop {
        let mut progress = false;
        for &rank in &world {
            for stream in 0..of(rank).len() {
                while let Some(id) = head(&next, &done, rank, stream) {
                    let others = partners(rank, &program.list_of(rank).instructions[id].operation);
                    let heads: Option<Vec<(Rank, usize, usize)>> = others.and_then(|others| {
                        others
                            .into_iter()
                            .map(|(other, stream)| Some((other, stream, head(&next, &done, other, stream)?)))
                            .collect()
                    });
                    let Some(heads) = heads else { break };
                    for (rank, stream, id) in heads.into_iter().chain([(rank, stream, id)]) {
                        next[rank.0][stream] += 1;
                        done[rank.0][id] = true;
                    }
                    progress = true;
                }
            }
        }
        if !progress {
            break;
        }
    }
    for &rank in &world {
        let list = program.list_of(rank);
        let all = list.instructions.iter().zip(&done[rank.0]);
        let stuck: Vec<&str> = all.filter(|(_, done)| !**done).map(|(one, _)| list.name_of(one)).collect();
        assert!(stuck.is_empty(), "deadlock: {rank} never runs {} instructions, first {}", stuck.len(), stuck[0]);
    }
}
