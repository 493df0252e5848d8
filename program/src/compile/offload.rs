//! State that is offloaded to the host's memory: the optimizer's, which only the update of its bucket needs.
//!
//! The device has room for the state of a few buckets. Round these, the state of one bucket comes in while another is updated and a third
//! goes out, each direction on a stream of its own. Nothing here waits for anything: that a room is free follows from who uses it.

use super::emit::StageEmitter;
use super::keep::BucketBuffers;
use crate::program::{BufferId, BufferRole, MemoryKind, Operation, Phase, Stream};
use foretell_units::DataType;

/// Buckets whose state has room on the device: one comes in, one is updated, one goes out.
const ROOMS: usize = 3;

/// Rooms on the device for the state of the buckets that are updated now.
pub(super) struct Rooms {
    rooms: Vec<BufferId>,
    /// By bucket, so far: the places of its states in its room.
    pub(super) places: Vec<Vec<BufferId>>,
}

impl StageEmitter<'_> {
    /// In which memory the optimizer's state of buckets is kept.
    pub(super) fn state_memory(&self) -> MemoryKind {
        if self.plan.layout.offload.is_of_optimizer() { MemoryKind::Host } else { MemoryKind::Device }
    }

    /// Room for states that are offloaded, as large as the largest of the buckets that use it, with the first of them under way; `None` where
    /// nothing is offloaded.
    pub(super) fn rooms_of_states(&mut self) -> Option<Rooms> {
        let is_offloaded = |state: &BufferId| self.program.buffer(*state).memory == MemoryKind::Host;
        if !self.buckets.iter().flat_map(|bucket| &bucket.states).any(is_offloaded) {
            return None;
        }
        let elements = |bucket: &BucketBuffers| bucket.states.iter().map(|&state| self.elements_of(state)).sum::<usize>();
        let largest = |room: usize| self.buckets.iter().skip(room).step_by(ROOMS).map(elements).max().unwrap_or(0);
        let sizes: Vec<usize> = (0..ROOMS.min(self.buckets.len())).map(largest).collect();
        let room = |size: usize| self.buffer("optimizer state", BufferRole::OptimizerState, vec![size], DataType::Fp32);
        let mut rooms = Rooms { rooms: sizes.into_iter().map(room).collect(), places: Vec::new() };
        for bucket in 0..rooms.rooms.len() {
            self.bring_in(&mut rooms, bucket);
        }
        Some(rooms)
    }

    /// After a bucket's update: takes its state out, and brings in that of the next for which there is room then.
    pub(super) fn take_out(&mut self, rooms: &mut Rooms, bucket: usize) {
        let states = self.buckets[bucket].states.clone();
        for (&device, host) in rooms.places[bucket].iter().zip(states) {
            self.copy_over(&format!("optimizer state {bucket}"), device, host, None, Phase::Update);
        }
        let next = bucket + rooms.rooms.len();
        if next < self.buckets.len() {
            self.bring_in(rooms, next);
        }
    }

    fn bring_in(&mut self, rooms: &mut Rooms, bucket: usize) {
        let room = rooms.rooms[bucket % rooms.rooms.len()];
        let name = format!("optimizer state {bucket}");
        let mut places = Vec::new();
        let mut offset = 0;
        for state in self.buckets[bucket].states.clone() {
            let elements = self.elements_of(state);
            let place = self.piece(&name, room, offset, vec![elements]);
            self.copy_over(&name, state, place, None, Phase::Update);
            places.push(place);
            offset += elements;
        }
        rooms.places.push(places);
    }

    /// Copies all of a buffer from one memory to the other.
    pub(super) fn copy_over(&mut self, name: &str, from: BufferId, to: BufferId, micro_batch: Option<usize>, phase: Phase) {
        let target = self.program.buffer(to);
        let (memory, bytes) = (target.memory, target.bytes);
        let operation = Operation::Copy { to: memory, bytes };
        self.push(name, operation, Stream::CopyTo(memory), vec![from], vec![to], micro_batch, phase);
    }

    fn elements_of(&self, buffer: BufferId) -> usize {
        self.program.buffer(buffer).shape.iter().product()
    }
}
