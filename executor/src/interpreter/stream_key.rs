//! The streams of a rank, identified by what they are for.

use foretell_program::{Group, GroupId, MemoryKind, PeerId, Program, Rank, Stream};
use std::fmt;

/// A stream of either Program, by what it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamKey {
    Compute,
    Load,
    Group(Group),
    SendTo(Rank),
    ReceiveFrom(Rank),
    CopyTo(MemoryKind),
}

impl StreamKey {
    pub(super) fn of(program: &Program, rank: Rank, stream: &Stream) -> Self {
        let list = program.list_of(rank);
        let peer = |PeerId(index): &PeerId| list.peers[*index as usize].of(&program.mesh, rank);
        match stream {
            Stream::Compute => StreamKey::Compute,
            Stream::Load => StreamKey::Load,
            Stream::Group(GroupId(index)) => StreamKey::Group(list.groups[*index as usize].clone()),
            Stream::SendTo(id) => StreamKey::SendTo(peer(id)),
            Stream::ReceiveFrom(id) => StreamKey::ReceiveFrom(peer(id)),
            Stream::CopyTo(memory) => StreamKey::CopyTo(*memory),
        }
    }
}

impl fmt::Display for StreamKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StreamKey::Compute => formatter.write_str("compute"),
            StreamKey::Load => formatter.write_str("load"),
            StreamKey::Group(group) => write!(formatter, "`{group}` group's"),
            StreamKey::SendTo(Rank(rank)) => write!(formatter, "to-rank-{rank}"),
            StreamKey::ReceiveFrom(Rank(rank)) => write!(formatter, "from-rank-{rank}"),
            StreamKey::CopyTo(memory) => write!(formatter, "to-{}", memory.name()),
        }
    }
}

/// The streams of a rank's lists, each once; the compute stream first.
pub(super) fn stream_keys(programs: &[&Program], rank: Rank) -> Vec<StreamKey> {
    let mut keys = vec![StreamKey::Compute];
    for program in programs {
        for stream in &program.list_of(rank).streams {
            let key = StreamKey::of(program, rank, stream);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }
    keys
}
