//! Appending to a list: buffers, instructions, streams, groups. What is appended means nothing here.

use super::emit::StageEmitter;
use crate::mesh::Group;
use crate::program::{Buffer, BufferId, BufferRole, Few, GroupId, Instruction, MemoryKind, Operation, Phase, Stream, StreamId};
use foretell_units::{Bytes, DataType};
use std::sync::Arc;

impl StageEmitter<'_> {
    pub(super) fn buffer(
        &mut self,
        name: &str,
        role: BufferRole,
        shape: impl Into<Arc<[usize]>>,
        data_type: DataType,
    ) -> BufferId {
        let shape = shape.into();
        let bytes = data_type.size() * shape.iter().product::<usize>() as u64;
        self.program.buffers.push(Buffer {
            name: name.into(),
            role,
            shape,
            data_type,
            parent: None,
            memory: MemoryKind::Device,
            offset: Bytes::ZERO,
            bytes,
            persistent: false,
            lifetime: None,
            initial: None,
        });
        BufferId(self.program.buffers.len() as u32 - 1)
    }

    pub(super) fn persistent(&mut self, name: &str, role: BufferRole, shape: Vec<usize>, data_type: DataType) -> BufferId {
        let id = self.buffer(name, role, shape, data_type);
        self.program.buffers[id.0 as usize].persistent = true;
        id
    }

    /// A piece of `parent`, from element `offset` on. Its offset becomes that in the arena when the parent is placed.
    pub(super) fn piece(&mut self, name: &str, parent: BufferId, offset: usize, shape: Vec<usize>) -> BufferId {
        let (role, data_type) = (self.program.buffer(parent).role, self.program.buffer(parent).data_type);
        let (persistent, memory) = (self.program.buffer(parent).persistent, self.program.buffer(parent).memory);
        // A piece of a piece is one of the whole.
        let (root, before) = match self.program.buffer(parent).parent {
            Some(root) => (root, self.program.buffer(parent).offset),
            None => (parent, Bytes::ZERO),
        };
        let id = self.buffer(name, role, shape, data_type);
        let buffer = &mut self.program.buffers[id.0 as usize];
        (buffer.persistent, buffer.memory) = (persistent, memory);
        buffer.parent = Some(root);
        buffer.offset = before + data_type.size() * offset as u64;
        id
    }

    /// Appends an instruction; dependencies are found later.
    #[allow(clippy::too_many_arguments)] // It is the one place where an instruction's fields come together.
    pub(super) fn push(
        &mut self,
        name: &str,
        operation: Operation,
        stream: Stream,
        reads: Vec<BufferId>,
        writes: Vec<BufferId>,
        micro_batch: Option<usize>,
        phase: Phase,
    ) {
        let name = match self.names.get(name) {
            Some(&known) => known,
            None => {
                let index = self.program.names.len() as u32;
                self.program.names.push(name.into());
                self.names.insert(name.into(), index);
                index
            }
        };
        let stream = self.stream(stream);
        let micro_batch = micro_batch.map(|index| index as u32);
        self.program.instructions.push(Instruction {
            name,
            operation: Arc::new(operation),
            stream,
            after: Few::new(),
            reads: reads.into(),
            writes: writes.into(),
            micro_batch,
            phase,
        });
    }

    pub(super) fn stream(&mut self, stream: Stream) -> StreamId {
        let index = self.program.streams.iter().position(|known| *known == stream).unwrap_or_else(|| {
            self.program.streams.push(stream);
            self.program.streams.len() - 1
        });
        StreamId(index as u16)
    }

    pub(super) fn group(&mut self, group: Group) -> GroupId {
        let index = self.program.groups.iter().position(|known| *known == group).unwrap_or_else(|| {
            self.program.groups.push(group);
            self.program.groups.len() - 1
        });
        GroupId(index as u16)
    }
}
