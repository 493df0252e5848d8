//! Checks that the lists of all ranks run to their ends without message buffers. Streams run
//! independently. A message passes when both ranks have reached it, a collective when all members
//! have.

use super::Unsound;
use super::messages::peer_of;
use crate::mesh::Rank;
use crate::program::{Operation, Program, StageProgram, Stream};

/// How far every rank has come.
struct Progress<'a> {
    program: &'a Program,
    /// For each list and stream its instructions.
    streams: Vec<Vec<Vec<usize>>>,
    /// For each rank and stream, the index of its next instruction in that stream.
    next: Vec<Vec<usize>>,
    /// For each rank and instruction whether it has run.
    done: Vec<Vec<bool>>,
    /// For each rank and group of its list whether it is the group's first member, which runs the
    /// group's collectives for all.
    leads: Vec<Vec<bool>>,
}

pub(super) fn check(program: &Program) -> Result<(), Unsound> {
    let world = || (0..program.mesh.world_size()).map(Rank);
    let mut progress = Progress::new(program);
    let mut moves = true;
    while moves {
        moves = false;
        for rank in world() {
            moves |= progress.advance(rank);
        }
    }
    let stuck = world().find_map(|rank| Some((rank, progress.done[rank.0].iter().position(|done| !done)?)));
    match stuck {
        None => Ok(()),
        Some((rank, index)) => {
            let list = program.list_of(rank);
            Err(Unsound::Deadlock { rank, instruction: list.name_of(&list.instructions[index]).into() })
        }
    }
}

impl<'a> Progress<'a> {
    fn new(program: &'a Program) -> Self {
        let streams_of = |list: &StageProgram| {
            let mut streams = vec![Vec::new(); list.streams.len()];
            for (index, instruction) in list.instructions.iter().enumerate() {
                streams[instruction.stream.0 as usize].push(index);
            }
            streams
        };
        let world = || (0..program.mesh.world_size()).map(Rank);
        Self {
            program,
            streams: program.lists.iter().map(streams_of).collect(),
            next: world().map(|rank| vec![0; program.list_of(rank).streams.len()]).collect(),
            done: world().map(|rank| vec![false; program.list_of(rank).instructions.len()]).collect(),
            leads: world()
                .map(|rank| {
                    let groups = program.list_of(rank).groups.iter();
                    groups.map(|group| group.members(&program.mesh, rank).first() == Some(&rank)).collect()
                })
                .collect(),
        }
    }

    /// Runs every instruction of a rank that can run now. Returns `true` if there was one.
    fn advance(&mut self, rank: Rank) -> bool {
        let mut moved = false;
        for stream in 0..self.next[rank.0].len() {
            while let Some(id) = self.head(rank, stream) {
                let Some(partners) = self.partners(rank, id) else { break };
                for (rank, stream, id) in partners.into_iter().chain([(rank, stream, id)]) {
                    self.next[rank.0][stream] += 1;
                    self.done[rank.0][id] = true;
                }
                moved = true;
            }
        }
        moved
    }

    /// The next instruction of a stream, if all that it waits for has run.
    fn head(&self, rank: Rank, stream: usize) -> Option<usize> {
        let of_list = &self.streams[self.program.list_index(rank)];
        let &id = of_list[stream].get(self.next[rank.0][stream])?;
        let after = &self.program.list_of(rank).instructions[id].after;
        after.iter().all(|other| self.done[rank.0][other.0 as usize]).then_some(id)
    }

    /// The other participants of an instruction with their streams and instructions, if all have
    /// reached it.
    fn partners(&self, rank: Rank, id: usize) -> Option<Vec<(Rank, usize, usize)>> {
        let program = self.program;
        let operation = &program.list_of(rank).instructions[id].operation;
        let reached = |other: Rank, stream: usize| Some((other, stream, self.head(other, stream)?));
        if let Some((other, sends)) = peer_of(program, rank, operation) {
            let list = program.list_of(other);
            let is_back = |stream: &Stream| match stream {
                Stream::SendTo(peer) => !sends && list.peers[peer.0 as usize].of(&program.mesh, other) == rank,
                Stream::ReceiveFrom(peer) => sends && list.peers[peer.0 as usize].of(&program.mesh, other) == rank,
                _ => false,
            };
            return Some(vec![reached(other, list.streams.iter().position(is_back)?)?]);
        }
        let Operation::Collective { group, .. } = &**operation else { return Some(Vec::new()) };
        if !self.leads[rank.0][group.0 as usize] {
            return None;
        }
        let group = &program.list_of(rank).groups[group.0 as usize];
        let others = group.members(&program.mesh, rank).into_iter().filter(|&other| other != rank);
        others
            .map(|other| {
                let list = program.list_of(other);
                let is_same = |stream: &Stream| matches!(stream, Stream::Group(id) if list.groups[id.0 as usize] == *group);
                reached(other, list.streams.iter().position(is_same)?)
            })
            .collect()
    }
}
