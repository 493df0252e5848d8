//! What a stream other than compute works with: a process group, a channel to one peer, the data set, or
//! nothing but memory.

use super::stream_key::StreamKey;
use super::stream_numbers::{OUTSIDE_PROGRAMS, STREAM_COUNT, stream_number};
use crate::backend::Operand;
use crate::error::ExecutorError;
use crate::half::Half;
use crate::samples::Samples;
use crate::transport::{Channel, ElementType, Group, Transport};
use foretell_program::{Collective, Mesh, Operation, Rank};
use foretell_units::DataType;
use std::sync::Arc;

/// A stream's own end of the transport.
pub(crate) enum StreamRunner {
    Load { samples_before: usize, half: Option<Half> },
    Group(Box<Group>),
    Peer(Channel),
    Copy,
}

impl StreamRunner {
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
        let number = stream_number(key, groups, mesh, rank).unwrap_or(OUTSIDE_PROGRAMS);
        Ok(match key {
            StreamKey::Compute | StreamKey::Load => StreamRunner::Load {
                samples_before: mesh.stage_at(coordinates).samples_before(coordinates),
                half: Half::of(precision),
            },
            StreamKey::Group(group) => {
                let members: Vec<usize> = group.members(mesh, rank).iter().map(|member| member.0).collect();
                if usize::from(number.0) >= STREAM_COUNT {
                    let what = format!("a layout with {} process groups", groups.len());
                    return Err(ExecutorError::Unsupported { what, hint: "use fewer axes at a time".into() });
                }
                StreamRunner::Group(Box::new(Group::new(Arc::clone(transport), &members, number)?))
            }
            StreamKey::CopyTo(_) => StreamRunner::Copy,
            StreamKey::SendTo(peer) | StreamKey::ReceiveFrom(peer) => StreamRunner::Peer(transport.open(peer.0, number)?),
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
            (
                StreamRunner::Load { samples_before, half },
                Operation::Load { input, first_sample, samples: count },
                _,
                [write],
            ) => {
                // SAFETY: the caller gives this place to us alone.
                unsafe { samples.load(*input, *half, first_sample + *samples_before, *count, write) }
            }
            (StreamRunner::Peer(channel), Operation::Send { .. }, [read], _) => {
                // SAFETY: as above.
                Ok(channel.send(unsafe { std::slice::from_raw_parts(read.pointer, read.bytes) })?)
            }
            (StreamRunner::Peer(channel), Operation::Receive { .. }, _, [write]) => {
                // SAFETY: as above.
                Ok(channel.receive(unsafe { std::slice::from_raw_parts_mut(write.pointer, write.bytes) })?)
            }
            (StreamRunner::Copy, Operation::Copy { .. }, [read], [write]) if read.bytes == write.bytes => {
                // SAFETY: as above; the two lie in different memories.
                unsafe { std::ptr::copy_nonoverlapping(read.pointer, write.pointer, read.bytes) };
                Ok(())
            }
            (StreamRunner::Group(group), Operation::Collective { kind, data_type, .. }, [read], [write]) => {
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
/// As for [`StreamRunner::run`].
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
