//! Communication of a stream on a GPU: directly between GPUs, or through pinned host memory and the
//! transport.

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

/// The path by which a stream reaches other ranks.
pub(in crate::interpreter) enum GpuCommunication {
    /// Through the host.
    Staged(HostStaging),
    /// From GPU to GPU.
    Direct(CommunicatorHandle),
}

/// Connects every stream, in the order of `keys`. Streams without peers get staging that they do
/// not use.
///
/// Joining a communicator waits for its other ranks. All ranks join in the same order, groups
/// before pairs, so that no two wait for each other.
pub(in crate::interpreter) fn connect(
    gpu_streams: &GpuStreams,
    keys: &[StreamKey],
    groups: &[Group],
    rank: Rank,
    runners: &mut [Option<StreamRunner>],
) -> Result<Vec<GpuCommunication>, ExecutorError> {
    let mut communications: Vec<GpuCommunication> =
        keys.iter().map(|_| GpuCommunication::Staged(HostStaging::default())).collect();
    let Some(collectives) = gpu_streams.driver.collectives() else { return Ok(communications) };
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|&stream| match &keys[stream] {
        StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) | StreamKey::Storage => (0, 0, 0),
        StreamKey::Group(group) => {
            (1, groups.iter().position(|known| known == group).expect("invariant: the run knows its groups"), 0)
        }
        StreamKey::SendTo(peer) => (2, rank.0, peer.0),
        StreamKey::ReceiveFrom(peer) => (2, peer.0, rank.0),
    });
    for stream in order {
        let mut id: CommunicatorId = [0; 128];
        let (size, position) = match (&keys[stream], &mut runners[stream]) {
            (StreamKey::Group(_), Some(StreamRunner::Group(group))) => {
                if group.position() == 0 {
                    id = collectives.new_communicator_id()?;
                }
                group.broadcast(0, &mut id)?;
                (group.size(), group.position())
            }
            (StreamKey::SendTo(_), Some(StreamRunner::Peer(channel))) => {
                id = collectives.new_communicator_id()?;
                channel.send(&id)?;
                (2, 0)
            }
            (StreamKey::ReceiveFrom(_), Some(StreamRunner::Peer(channel))) => {
                channel.receive(&mut id)?;
                (2, 1)
            }
            (StreamKey::Compute | StreamKey::Load | StreamKey::CopyTo(_) | StreamKey::Storage, _) => continue,
            (key, _) => unreachable!("the runner of stream {stream} is not that of {key:?}"),
        };
        communications[stream] = GpuCommunication::Direct(collectives.join(&id, size, position)?);
    }
    Ok(communications)
}

impl GpuCommunication {
    /// Queues one collective or message. Through the host, it waits until the transport has done it
    /// and queues only the copy of the result.
    pub(super) fn communicate(
        &mut self,
        gpu_streams: &GpuStreams,
        prepared: &PreparedProgram,
        stream: usize,
        runner: &mut StreamRunner,
        step: &StepRequest,
        id: u32,
    ) -> Result<(), ExecutorError> {
        let communicator = match self {
            GpuCommunication::Staged(staging) => {
                return staging.communicate(gpu_streams, prepared, stream, runner, step, id);
            }
            GpuCommunication::Direct(communicator) => *communicator,
        };
        let collectives = gpu_streams.driver.collectives().ok_or(CudaError::Aborted)?;
        let operands = &prepared.operands[id as usize];
        let range =
            |operand: &Operand| DeviceRange { address: DeviceAddress::from_pointer(operand.pointer), bytes: operand.bytes };
        // Only a sum depends on the data type.
        let (kind, data_type) = match prepared.operation(id) {
            Operation::Collective { kind, data_type, .. } => (kind_of(*kind), *data_type),
            Operation::Send { .. } => (CommunicationKind::Send, DataType::Fp32),
            Operation::Receive { .. } => (CommunicationKind::Receive, DataType::Fp32),
            other => unreachable!("invariant: a stream of communication has no `{}`", other.kind()),
        };
        let (read, write) = (operands.reads.first().map(range), operands.writes.first().map(range));
        let communication = DeviceCommunication { kind, read, write, data_type };
        // SAFETY: the stream waits for the dependencies, so nothing else accesses the writes until
        // the instruction is done.
        Ok(unsafe { collectives.communicate(communicator, &communication, gpu_streams.streams[stream]) }?)
    }
}

fn kind_of(collective: Collective) -> CommunicationKind {
    match collective {
        Collective::AllReduce => CommunicationKind::AllReduce,
        Collective::ReduceScatter => CommunicationKind::ReduceScatter,
        Collective::AllGather => CommunicationKind::AllGather,
        Collective::AllToAll => CommunicationKind::AllToAll,
        Collective::Shift => CommunicationKind::Shift,
    }
}

/// Pinned host memory of one stream. Data goes from the GPU to it, through the transport, and back
/// to the GPU.
#[derive(Default)]
pub(in crate::interpreter) struct HostStaging {
    read: Option<Pinned>,
    write: Option<Pinned>,
}

impl HostStaging {
    fn communicate(
        &mut self,
        gpu_streams: &GpuStreams,
        prepared: &PreparedProgram,
        stream: usize,
        runner: &mut StreamRunner,
        step: &StepRequest,
        id: u32,
    ) -> Result<(), ExecutorError> {
        let (driver, stream) = (&gpu_streams.driver, gpu_streams.streams[stream]);
        let operation = prepared.operation(id);
        let operands = &prepared.operands[id as usize];
        // Pairs a device operand with staging memory of its size.
        let staged = |staging: &mut Option<Pinned>, operand: Option<&Operand>| {
            let Some(operand) = operand else { return Ok(None) };
            if staging.as_ref().is_none_or(|pinned| pinned.bytes < operand.bytes) {
                // The last copy from the old memory may not be done.
                driver.synchronize(stream)?;
                *staging = Some(Pinned::new(driver, operand.bytes)?);
            }
            Ok::<_, ExecutorError>(staging.as_ref().map(|pinned| (pinned.operand(operand.bytes), *operand)))
        };
        let read = staged(&mut self.read, operands.reads.first())?;
        let write = staged(&mut self.write, operands.writes.first())?;
        // An all-reduce works in place, on its write.
        let in_place = matches!(operation, Operation::Collective { kind: Collective::AllReduce, .. });
        if let Some((host, device)) = if in_place { write } else { read } {
            let from = DeviceAddress::from_pointer(device.pointer);
            // SAFETY: the operand belongs to this instruction until it is done, and the pinned
            // memory to this stream.
            unsafe { driver.copy_out(host.pointer, from, host.bytes, stream) }?;
        }
        // Waits for the dependencies, this copy, and the last instruction's copy to the GPU.
        driver.synchronize(stream)?;
        let host_operand = |pair: Option<(Operand, Operand)>| pair.map(|(host, _)| host).into_iter().collect::<Vec<_>>();
        let (reads, writes) = (host_operand(read), host_operand(write));
        // SAFETY: the pinned memory belongs to this stream.
        unsafe { runner.run(operation, &reads, &writes, &step.samples) }?;
        if let Some((host, device)) = write {
            let to = DeviceAddress::from_pointer(device.pointer);
            // SAFETY: as for the first copy.
            unsafe { driver.copy_in(to, host.pointer, host.bytes, stream) }?;
        }
        Ok(())
    }
}
