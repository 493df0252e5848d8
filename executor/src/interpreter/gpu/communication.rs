//! The communication by which a stream on a GPU reaches other ranks: from GPU to GPU, or through pinned memory of the host and the transport.

use super::streams::{GpuStreams, Pinned};
use crate::backend::Operand;
use crate::backend::cuda::{
    CommunicationKind, CommunicatorHandle, CommunicatorId, CudaError, DeviceAddress, DeviceCommunication, DeviceRange,
};
use crate::error::ExecutorError;
use crate::interpreter::StepRequest;
use crate::interpreter::prepared_program::PreparedProgram;
use crate::interpreter::stream_key::StreamKey;
use crate::interpreter::stream_runner::StreamRunner;
use foretell_program::{Collective, Group, Operation, Rank};
use foretell_units::DataType;

/// How a stream reaches other ranks.
pub(in crate::interpreter) enum GpuCommunication {
    /// Through the host.
    HostStaging(HostStaging),
    /// From GPU to GPU.
    Direct(CommunicatorHandle),
}

/// A communication for each runner, by slot. Communicators are joined in an order that all ranks have, groups before pairs: nobody waits for one that waits for him.
pub(in crate::interpreter) fn connect(
    gpu_streams: &GpuStreams,
    keys: &[StreamKey],
    groups: &[Group],
    rank: Rank,
    runners: &mut [Option<StreamRunner>],
) -> Result<Vec<GpuCommunication>, ExecutorError> {
    let mut communication: Vec<GpuCommunication> =
        keys.iter().map(|_| GpuCommunication::HostStaging(HostStaging::default())).collect();
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|&slot| match &keys[slot] {
        StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) => (0, 0, 0),
        StreamKey::Group(group) => (1, groups.iter().position(|one| one == group).unwrap_or(groups.len()), 0),
        StreamKey::SendTo(peer) => (2, rank.0, peer.0),
        StreamKey::ReceiveFrom(peer) => (2, peer.0, rank.0),
    });
    let Some(collectives) = gpu_streams.driver.collectives() else { return Ok(communication) };
    for slot in order {
        let mut identity: CommunicatorId = [0; 128];
        let (size, position) = match (&keys[slot], &mut runners[slot]) {
            (StreamKey::Group(_), Some(StreamRunner::Group(group))) => {
                if group.position() == 0 {
                    identity = collectives.new_communicator_id()?;
                }
                group.broadcast(0, &mut identity)?;
                (group.size(), group.position())
            }
            (StreamKey::SendTo(_), Some(StreamRunner::Peer(channel))) => {
                identity = collectives.new_communicator_id()?;
                channel.send(&identity)?;
                (2, 0)
            }
            (StreamKey::ReceiveFrom(_), Some(StreamRunner::Peer(channel))) => {
                channel.receive(&mut identity)?;
                (2, 1)
            }
            _ => continue,
        };
        communication[slot] = GpuCommunication::Direct(collectives.join(&identity, size, position)?);
    }
    Ok(communication)
}

impl GpuCommunication {
    /// GpuStreams one instruction, or does it and gpu_streams what is left of it.
    pub(in crate::interpreter) fn exchange(
        &mut self,
        gpu_streams: &GpuStreams,
        prepared: &PreparedProgram,
        slot: usize,
        runner: &mut StreamRunner,
        step: &StepRequest,
        id: u32,
    ) -> Result<(), ExecutorError> {
        let communicator = match self {
            GpuCommunication::HostStaging(staged) => return staged.exchange(gpu_streams, prepared, slot, runner, step, id),
            GpuCommunication::Direct(communicator) => *communicator,
        };
        let collectives = gpu_streams.driver.collectives().ok_or(CudaError::Aborted)?;
        let operands = &prepared.operands[id as usize];
        let piece =
            |operand: &Operand| DeviceRange { address: DeviceAddress::from_pointer(operand.pointer), bytes: operand.bytes };
        let (kind, data_type) = match &*prepared.stage.instructions[id as usize].operation {
            Operation::Collective { kind, data_type, .. } => (CommunicationKind::of(*kind), *data_type),
            Operation::Send { .. } => (CommunicationKind::Send, DataType::Fp32),
            _ => (CommunicationKind::Receive, DataType::Fp32),
        };
        let (read, write) = (operands.reads.first().map(piece), operands.writes.first().map(piece));
        // SAFETY: the operands are this instruction's alone until it is done: the stream waits for what it depends on.
        Ok(unsafe {
            collectives.communicate(
                communicator,
                &DeviceCommunication { kind, read, write, data_type },
                gpu_streams.streams[slot],
            )
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
pub(in crate::interpreter) struct HostStaging {
    read: Option<Pinned>,
    write: Option<Pinned>,
}

impl HostStaging {
    fn exchange(
        &mut self,
        gpu_streams: &GpuStreams,
        prepared: &PreparedProgram,
        slot: usize,
        runner: &mut StreamRunner,
        step: &StepRequest,
        id: u32,
    ) -> Result<(), ExecutorError> {
        let (driver, stream) = (&gpu_streams.driver, gpu_streams.streams[slot]);
        let operation = &*prepared.stage.instructions[id as usize].operation;
        let operands = &prepared.operands[id as usize];
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
        unsafe { runner.run(operation, &reads, &writes, &step.samples) }?;
        if let Some((host, device)) = write {
            let to = DeviceAddress::from_pointer(device.pointer);
            // SAFETY: as above.
            unsafe { driver.copy_in(to, host.pointer, host.bytes, stream) }?;
        }
        Ok(())
    }
}
