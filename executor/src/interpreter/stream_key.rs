//! Identifies a rank's streams by their purpose, the same in all its Programs.

use foretell_program::{Group, GroupId, MemoryKind, PeerId, Program, Rank, Stream};
use std::fmt;

/// The purpose of a stream. Training and evaluation share the streams with equal keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamKey {
    /// Kernels.
    Compute,
    /// Loading of samples.
    Load,
    /// Collectives of a group.
    Group(Group),
    /// Messages to a rank.
    SendTo(Rank),
    /// Messages from a rank.
    ReceiveFrom(Rank),
    /// Copies to this memory from the other one.
    CopyTo(MemoryKind),
    /// Writes to storage.
    Storage,
}

impl StreamKey {
    /// The key of a stream in the list of `rank`.
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
            Stream::Storage => StreamKey::Storage,
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
            StreamKey::Storage => formatter.write_str("storage"),
        }
    }
}

/// The streams of a rank over all its Programs, each once. The compute stream is the first.
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
