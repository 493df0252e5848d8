//! What a stream other than compute works with: a process group, a channel to one peer, the data set, or
//! nothing but memory.

use crate::backend::Operand;
use crate::error::ExecutorError;
use crate::half::Half;
use crate::interpreter::StreamKey;
use crate::samples::Samples;
use crate::transport::{Channel, ElementType, Group, StreamNumber, Transport};
use foretell_program::{Collective, Mesh, Operation, Rank};
use foretell_units::DataType;
use std::sync::Arc;

/// A stream's own end of the transport.
pub(crate) enum Line {
    Load { samples_before: usize, half: Option<Half> },
    Group(Box<Group>),
    Peer(Channel),
    Copy,
}

/// Numbers of the transport's streams that a run uses.
pub(crate) const STREAM_COUNT: usize = 32;
const TO_LATER_STAGES: StreamNumber = StreamNumber(0);
const TO_EARLIER_STAGES: StreamNumber = StreamNumber(1);
/// For what is not part of a Program: barriers, calibration.
pub(crate) const OWN_STREAM: StreamNumber = StreamNumber(2);
const FIRST_GROUP: usize = 3;

/// The transport's number of the stream of a key. `groups` are all groups of the run, in the order that every rank has them. None of what has
/// no peers.
pub(crate) fn stream_number(
    key: &StreamKey,
    groups: &[foretell_program::Group],
    mesh: &Mesh,
    rank: Rank,
) -> Option<StreamNumber> {
    let number = |from: Rank, to: Rank| if mesh.stage_of(from) < mesh.stage_of(to) { TO_LATER_STAGES } else { TO_EARLIER_STAGES };
    match key {
        StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) => None,
        // No two groups share a stream, whichever ranks are in both.
        StreamKey::Group(group) => {
            let position = groups.iter().position(|one| one == group).unwrap_or(groups.len());
            Some(StreamNumber((FIRST_GROUP + position) as u16))
        }
        StreamKey::SendTo(peer) => Some(number(rank, *peer)),
        StreamKey::ReceiveFrom(peer) => Some(number(*peer, rank)),
    }
}

impl Line {
    /// Opens what the stream of a key needs. `groups` are all groups of the run, in the order that every rank has them.
    pub(crate) fn open(
        key: &StreamKey,
        groups: &[foretell_program::Group],
        mesh: &Mesh,
        precision: DataType,
        rank: Rank,
        transport: &Arc<dyn Transport>,
    ) -> Result<Self, ExecutorError> {
        let coordinates = mesh.coordinates(rank);
        let number = stream_number(key, groups, mesh, rank).unwrap_or(OWN_STREAM);
        Ok(match key {
            StreamKey::Compute | StreamKey::Load => {
                Line::Load { samples_before: mesh.stage_at(coordinates).samples_before(coordinates), half: Half::of(precision) }
            }
            StreamKey::Group(group) => {
                let members: Vec<usize> = group.members(mesh, rank).iter().map(|member| member.0).collect();
                if usize::from(number.0) >= STREAM_COUNT {
                    let what = format!("a layout with {} process groups", groups.len());
                    return Err(ExecutorError::Unsupported { what, hint: "use fewer axes at a time".into() });
                }
                Line::Group(Box::new(Group::new(Arc::clone(transport), &members, number)?))
            }
            StreamKey::CopyTo(_) => Line::Copy,
            StreamKey::SendTo(peer) | StreamKey::ReceiveFrom(peer) => Line::Peer(transport.open(peer.0, number)?),
        })
    }

    /// Does one instruction.
    ///
    /// # Safety
    /// The operands are valid and nobody else's until this returns; a read and a write are either the same place or apart.
    pub(crate) unsafe fn run(
        &mut self,
        operation: &Operation,
        reads: &[Operand],
        writes: &[Operand],
        samples: &Samples,
    ) -> Result<(), ExecutorError> {
        match (self, operation, reads, writes) {
            (Line::Load { samples_before, half }, Operation::Load { input, first_sample, samples: count }, _, [write]) => {
                // SAFETY: the caller gives this place to us alone.
                unsafe { samples.load(*input, *half, first_sample + *samples_before, *count, write) }
            }
            (Line::Peer(channel), Operation::Send { .. }, [read], _) => {
                // SAFETY: as above.
                Ok(channel.send(unsafe { std::slice::from_raw_parts(read.pointer, read.bytes) })?)
            }
            (Line::Peer(channel), Operation::Receive { .. }, _, [write]) => {
                // SAFETY: as above.
                Ok(channel.receive(unsafe { std::slice::from_raw_parts_mut(write.pointer, write.bytes) })?)
            }
            (Line::Copy, Operation::Copy { .. }, [read], [write]) if read.bytes == write.bytes => {
                // SAFETY: as above; the two lie in different memories.
                unsafe { std::ptr::copy_nonoverlapping(read.pointer, write.pointer, read.bytes) };
                Ok(())
            }
            (Line::Group(group), Operation::Collective { kind, data_type, .. }, [read], [write]) => {
                // SAFETY: as above; all-reduce is the only collective in place, and uses the one slice.
                unsafe { collective(group, *kind, *data_type, read, write) }
            }
            _ => Err(ExecutorError::Unsupported {
                what: format!("`{}` on this stream", operation.kind()),
                hint: "this is a fault in the compiler: please report it".into(),
            }),
        }
    }
}

/// # Safety
/// As for [`Line::run`].
unsafe fn collective(
    group: &mut Group,
    kind: Collective,
    data_type: DataType,
    read: &Operand,
    write: &Operand,
) -> Result<(), ExecutorError> {
    // SAFETY: the caller's promise.
    let bytes = |operand: &Operand| unsafe { std::slice::from_raw_parts_mut(operand.pointer, operand.bytes) };
    let number = Half::of(data_type).map_or(ElementType::Fp32, ElementType::Half);
    match kind {
        Collective::AllReduce => group.all_reduce(number, bytes(write)),
        Collective::ReduceScatter => group.reduce_scatter(number, bytes(read), bytes(write)),
        Collective::AllGather => group.all_gather(bytes(read), bytes(write)),
        Collective::AllToAll => group.all_to_all(bytes(read), bytes(write)),
        Collective::Shift => group.shift(bytes(read), bytes(write)),
    }?;
    Ok(())
}
