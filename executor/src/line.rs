//! What a stream other than compute works with: a process group, a channel to one peer, or the data set.

use crate::backend::Operand;
use crate::error::ExecutorError;
use crate::half::Half;
use crate::interpreter::StreamKey;
use crate::samples::Samples;
use crate::transport::{Channel, Group, Number, Reduction, StreamNumber, Transport};
use foretell_program::{Axis, Collective, Mesh, Operation, Rank};
use foretell_units::DataType;
use std::sync::Arc;

/// A stream's own end of the transport.
pub(crate) enum Line {
    Load { batch_part: usize, half: Option<Half> },
    Group(Box<Group>),
    Peer(Channel),
}

/// Numbers of the transport's streams that a run uses.
pub(crate) const STREAM_COUNT: usize = 32;
const TO_LATER_STAGES: StreamNumber = StreamNumber(0);
const TO_EARLIER_STAGES: StreamNumber = StreamNumber(1);
/// For what is not part of a Program: barriers, calibration.
pub(crate) const OWN_STREAM: StreamNumber = StreamNumber(2);
const FIRST_GROUP: usize = 3;

/// The transport's number of the stream of a key, on a rank of stage `my_stage`. `groups` are all groups of the run, in the order that every
/// rank has them. None of what has no peers.
pub(crate) fn stream_number(key: &StreamKey, groups: &[foretell_program::Group], my_stage: usize) -> Option<StreamNumber> {
    let number = |from: usize, to: usize| if from < to { TO_LATER_STAGES } else { TO_EARLIER_STAGES };
    match key {
        StreamKey::Compute | StreamKey::Load => None,
        // No two groups share a stream, whichever ranks are in both.
        StreamKey::Group(group) => {
            let position = groups.iter().position(|one| one == group).unwrap_or(groups.len());
            Some(StreamNumber((FIRST_GROUP + position) as u16))
        }
        StreamKey::SendTo(stage) => Some(number(my_stage, *stage)),
        StreamKey::ReceiveFrom(stage) => Some(number(*stage, my_stage)),
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
        let my_stage = coordinates.along(Axis::Pipeline);
        let peer = |stage: usize| mesh.rank(coordinates.with(Axis::Pipeline, stage)).0;
        let number = stream_number(key, groups, my_stage).unwrap_or(OWN_STREAM);
        Ok(match key {
            StreamKey::Compute | StreamKey::Load => {
                Line::Load { batch_part: mesh.batch_part(coordinates), half: Half::of(precision) }
            }
            StreamKey::Group(group) => {
                let members: Vec<usize> = group.members(mesh, rank).iter().map(|member| member.0).collect();
                if usize::from(number.0) >= STREAM_COUNT {
                    let what = format!("a layout with {} process groups", groups.len());
                    return Err(ExecutorError::Unsupported { what, hint: "use fewer axes at a time".into() });
                }
                Line::Group(Box::new(Group::new(Arc::clone(transport), &members, number)?))
            }
            StreamKey::SendTo(stage) | StreamKey::ReceiveFrom(stage) => Line::Peer(transport.open(peer(*stage), number)?),
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
            (Line::Load { batch_part, half }, Operation::Load { input, first_sample, samples: count }, _, [write]) => {
                // SAFETY: the caller gives this place to us alone.
                unsafe { samples.load(*input, *half, first_sample + *batch_part * count, *count, write) }
            }
            (Line::Peer(channel), Operation::Send { .. }, [read], _) => {
                // SAFETY: as above.
                Ok(channel.send(unsafe { std::slice::from_raw_parts(read.pointer, read.bytes) })?)
            }
            (Line::Peer(channel), Operation::Receive { .. }, _, [write]) => {
                // SAFETY: as above.
                Ok(channel.receive(unsafe { std::slice::from_raw_parts_mut(write.pointer, write.bytes) })?)
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
    let number = Half::of(data_type).map_or(Number::Fp32, Number::Half);
    match kind {
        Collective::AllReduce => group.all_reduce(number, Reduction::Sum, bytes(write)),
        Collective::ReduceScatter => group.reduce_scatter(number, bytes(read), bytes(write)),
        Collective::AllGather => group.all_gather(bytes(read), bytes(write)),
        Collective::AllToAll => group.all_to_all(bytes(read), bytes(write)),
        Collective::Shift => group.shift(bytes(read), bytes(write)),
    }?;
    Ok(())
}
