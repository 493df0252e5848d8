//! The ways by which a stream on a GPU reaches other ranks: from GPU to GPU, or through pinned memory of the host and the transport.

use super::playlist::Playlist;
use super::queues::{Pinned, Queues};
use super::{Step, StreamKey};
use crate::backend::Operand;
use crate::backend::cuda::{
    CommunicationKind, CommunicatorHandle, CommunicatorId, CudaError, DeviceAddress, DeviceCommunication, DeviceRange,
};
use crate::error::ExecutorError;
use crate::line::Line;
use foretell_program::{Collective, Group, Operation, Rank};
use foretell_units::DataType;

/// How a stream reaches other ranks.
pub(super) enum Way {
    /// Through the host.
    Staged(Staged),
    /// From GPU to GPU.
    Direct(CommunicatorHandle),
}

/// A way for each line, by slot. Communicators are joined in an order that all ranks have, groups before pairs: nobody waits for one that waits for him.
pub(super) fn connect(
    queues: &Queues,
    keys: &[StreamKey],
    groups: &[Group],
    rank: Rank,
    lines: &mut [Option<Line>],
) -> Result<Vec<Way>, ExecutorError> {
    let mut ways: Vec<Way> = keys.iter().map(|_| Way::Staged(Staged::default())).collect();
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|&slot| match &keys[slot] {
        StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) => (0, 0, 0),
        StreamKey::Group(group) => (1, groups.iter().position(|one| one == group).unwrap_or(groups.len()), 0),
        StreamKey::SendTo(peer) => (2, rank.0, peer.0),
        StreamKey::ReceiveFrom(peer) => (2, peer.0, rank.0),
    });
    let Some(collectives) = queues.driver.collectives() else { return Ok(ways) };
    for slot in order {
        let mut identity: CommunicatorId = [0; 128];
        let (size, position) = match (&keys[slot], &mut lines[slot]) {
            (StreamKey::Group(_), Some(Line::Group(group))) => {
                if group.position() == 0 {
                    identity = collectives.new_communicator_id()?;
                }
                group.broadcast(0, &mut identity)?;
                (group.size(), group.position())
            }
            (StreamKey::SendTo(_), Some(Line::Peer(channel))) => {
                identity = collectives.new_communicator_id()?;
                channel.send(&identity)?;
                (2, 0)
            }
            (StreamKey::ReceiveFrom(_), Some(Line::Peer(channel))) => {
                channel.receive(&mut identity)?;
                (2, 1)
            }
            _ => continue,
        };
        ways[slot] = Way::Direct(collectives.join(&identity, size, position)?);
    }
    Ok(ways)
}

impl Way {
    /// Queues one instruction, or does it and queues what is left of it.
    pub(super) fn exchange(
        &mut self,
        queues: &Queues,
        playlist: &Playlist,
        slot: usize,
        line: &mut Line,
        step: &Step,
        id: u32,
    ) -> Result<(), ExecutorError> {
        let communicator = match self {
            Way::Staged(staged) => return staged.exchange(queues, playlist, slot, line, step, id),
            Way::Direct(communicator) => *communicator,
        };
        let collectives = queues.driver.collectives().ok_or(CudaError::Aborted)?;
        let operands = &playlist.operands[id as usize];
        let piece =
            |operand: &Operand| DeviceRange { address: DeviceAddress::from_pointer(operand.pointer), bytes: operand.bytes };
        let (kind, data_type) = match &*playlist.stage.instructions[id as usize].operation {
            Operation::Collective { kind, data_type, .. } => (CommunicationKind::of(*kind), *data_type),
            Operation::Send { .. } => (CommunicationKind::Send, DataType::Fp32),
            _ => (CommunicationKind::Receive, DataType::Fp32),
        };
        let (read, write) = (operands.reads.first().map(piece), operands.writes.first().map(piece));
        // SAFETY: the operands are this instruction's alone until it is done: the stream waits for what it depends on.
        Ok(unsafe {
            collectives.communicate(communicator, &DeviceCommunication { kind, read, write, data_type }, queues.streams[slot])
        }?)
    }
}

impl CommunicationKind {
    fn of(kind: Collective) -> Self {
        match kind {
            Collective::AllReduce => CommunicationKind::AllReduce,
            Collective::ReduceScatter => CommunicationKind::ReduceScatter,
            Collective::AllGather => CommunicationKind::AllGather,
            Collective::AllToAll => CommunicationKind::AllToAll,
            Collective::Shift => CommunicationKind::Shift,
        }
    }
}

/// Pinned memory through which a stream reaches other ranks: from the GPU to it, through the transport, and to the GPU again.
#[derive(Default)]
pub(super) struct Staged {
    read: Option<Pinned>,
    write: Option<Pinned>,
}

impl Staged {
    fn exchange(
        &mut self,
        queues: &Queues,
        playlist: &Playlist,
        slot: usize,
        line: &mut Line,
        step: &Step,
        id: u32,
    ) -> Result<(), ExecutorError> {
        let (driver, stream) = (&queues.driver, queues.streams[slot]);
        let operation = &*playlist.stage.instructions[id as usize].operation;
        let operands = &playlist.operands[id as usize];
        let grown = |place: &mut Option<Pinned>, operand: Option<&Operand>| {
            let Some(operand) = operand else { return Ok(None) };
            if place.as_ref().is_none_or(|pinned| pinned.bytes < operand.bytes) {
                // The last copy from what there is may not be done.
                driver.synchronize(stream)?;
                *place = Some(Pinned::new(driver, operand.bytes)?);
            }
            Ok::<_, ExecutorError>(place.as_ref().map(|pinned| (pinned.operand(operand.bytes), *operand)))
        };
        let read = grown(&mut self.read, operands.reads.first())?;
        let write = grown(&mut self.write, operands.writes.first())?;
        // An all-reduce works in place: on what it writes.
        let in_place = matches!(operation, Operation::Collective { kind: Collective::AllReduce, .. });
        let given = if in_place { write } else { read };
        if let Some((host, device)) = given {
            let from = DeviceAddress::from_pointer(device.pointer);
            // SAFETY: the operand is this instruction's alone, and the pinned memory this stream's, until it is done.
            unsafe { driver.copy_out(host.pointer, from, host.bytes, stream) }?;
        }
        // Whatever the copy waits for is waited for here, and the copy to the GPU of the instruction before.
        driver.synchronize(stream)?;
        let host = |one: Option<(Operand, Operand)>| one.map(|(host, _)| host);
        let (reads, writes) = (host(read).into_iter().collect::<Vec<_>>(), host(write).into_iter().collect::<Vec<_>>());
        // SAFETY: the pinned memory is this stream's alone.
        unsafe { line.run(operation, &reads, &writes, &step.samples) }?;
        if let Some((host, device)) = write {
            let to = DeviceAddress::from_pointer(device.pointer);
            // SAFETY: as above.
            unsafe { driver.copy_in(to, host.pointer, host.bytes, stream) }?;
        }
        Ok(())
    }
}
