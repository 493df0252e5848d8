//! Executes the operations of a stream other than compute, on memory of the host.

use super::stream_key::StreamKey;
use super::stream_numbers::{STREAM_COUNT, stream_number};
use crate::backend::Operand;
use crate::error::ExecutorError;
use crate::half::SixteenBits;
use crate::samples::Samples;
use crate::transport::{Channel, ElementType, Group, Transport};
use foretell_program::{Collective, Mesh, Operation, Rank};
use foretell_units::DataType;
use std::sync::Arc;

/// The means by which one stream executes its operations.
pub(super) enum StreamRunner {
    /// Loads this rank's samples: those after the first `samples_before` of a micro-batch. Images
    /// and features are stored in the 16-bit format `half`, or in single precision if it is `None`.
    Load { samples_before: usize, half: Option<SixteenBits> },
    /// Runs the collectives of a group.
    Group(Box<Group>),
    /// Sends to or receives from one peer.
    Peer(Channel),
    /// Copies between the device's memory and the host's.
    Copy,
}

impl StreamRunner {
    /// Opens the channels that the stream with this key needs. `groups` holds all groups of the
    /// run, in the same order on every rank.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] if there are more groups than transport streams, and errors
    /// of the transport.
    pub(super) fn open(
        key: &StreamKey,
        groups: &[foretell_program::Group],
        mesh: &Mesh,
        precision: DataType,
        rank: Rank,
        transport: &Arc<dyn Transport>,
    ) -> Result<Self, ExecutorError> {
        let coordinates = mesh.coordinates(rank);
        let number = || stream_number(key, groups, mesh, rank).expect("invariant: a stream with peers has a number");
        Ok(match key {
            StreamKey::Compute | StreamKey::Load => StreamRunner::Load {
                samples_before: mesh.stage_at(coordinates).samples_before(coordinates),
                half: SixteenBits::of(precision),
            },
            StreamKey::Group(group) => {
                let number = number();
                let members: Vec<usize> = group.members(mesh, rank).iter().map(|member| member.0).collect();
                if usize::from(number.0) >= STREAM_COUNT {
                    let what = format!("a layout with {} process groups", groups.len());
                    return Err(ExecutorError::Unsupported { what, hint: "use fewer mesh axes at a time".into() });
                }
                StreamRunner::Group(Box::new(Group::new(Arc::clone(transport), &members, number)?))
            }
            StreamKey::CopyTo(_) | StreamKey::Storage => StreamRunner::Copy,
            StreamKey::SendTo(peer) | StreamKey::ReceiveFrom(peer) => StreamRunner::Peer(transport.open(peer.0, number())?),
        })
    }

    /// Executes one operation.
    ///
    /// # Safety
    /// The operands are valid, and not in use elsewhere until this returns. A read and a write are
    /// either the same range or disjoint.
    pub(super) unsafe fn run(
        &mut self,
        operation: &Operation,
        reads: &[Operand],
        writes: &[Operand],
        samples: &Samples,
    ) -> Result<(), ExecutorError> {
        match (self, operation, reads, writes) {
            (
                StreamRunner::Load { samples_before, half },
                Operation::Load { input, first_sample, samples: count, order },
                _,
                [write],
            ) => {
                // SAFETY: the caller's promise.
                unsafe { samples.load(*input, *half, first_sample + *samples_before, *count, *order, write) }
            }
            (StreamRunner::Peer(channel), Operation::Send { .. }, [read], _) => {
                // SAFETY: the caller's promise.
                Ok(channel.send(unsafe { std::slice::from_raw_parts(read.pointer, read.bytes) })?)
            }
            (StreamRunner::Peer(channel), Operation::Receive { .. }, _, [write]) => {
                // SAFETY: the caller's promise.
                Ok(channel.receive(unsafe { std::slice::from_raw_parts_mut(write.pointer, write.bytes) })?)
            }
            (StreamRunner::Copy, Operation::Copy { .. }, [read], [write]) if read.bytes == write.bytes => {
                // SAFETY: the caller's promise. The two lie in different arenas.
                unsafe { std::ptr::copy_nonoverlapping(read.pointer, write.pointer, read.bytes) };
                Ok(())
            }
            (StreamRunner::Group(group), Operation::Collective { kind, data_type, .. }, [read], [write]) => {
                // SAFETY: the caller's promise. Only an all-reduce works in place, and it takes the
                // write alone.
                unsafe { run_collective(group, *kind, *data_type, read, write) }
            }
            _ => Err(ExecutorError::Unsupported {
                what: format!("`{}` on this stream", operation.kind()),
                hint: "this is a fault in the compiler: please report it".into(),
            }),
        }
    }
}

/// Runs one collective.
///
/// # Safety
/// As for [`StreamRunner::run`].
unsafe fn run_collective(
    group: &mut Group,
    kind: Collective,
    data_type: DataType,
    read: &Operand,
    write: &Operand,
) -> Result<(), ExecutorError> {
    // SAFETY: the caller's promise. Other streams may read the input at the same time.
    let input = || unsafe { std::slice::from_raw_parts(read.pointer, read.bytes) };
    // SAFETY: the caller's promise.
    let output = unsafe { std::slice::from_raw_parts_mut(write.pointer, write.bytes) };
    // Only a sum depends on the data type.
    let element = || match (SixteenBits::of(data_type), data_type) {
        (Some(half), _) => ElementType::SixteenBits(half),
        (None, DataType::Fp32 | DataType::Tf32) => ElementType::Fp32,
        (None, other) => unreachable!("invariant: no collective sums numbers in {other}"),
    };
    match kind {
        Collective::AllReduce => group.all_reduce(element(), output),
        Collective::ReduceScatter => group.reduce_scatter(element(), input(), output),
        Collective::AllGather => group.all_gather(input(), output),
        Collective::AllToAll => group.all_to_all(input(), output),
        Collective::Shift => group.shift(input(), output),
    }?;
    Ok(())
}
