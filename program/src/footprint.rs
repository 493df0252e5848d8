//! What a rank's arena, or a framework, holds when it holds the most, by what it is for.

use crate::program::{Buffer, BufferRole, MemoryKind, StageProgram};
use foretell_units::Bytes;
use std::collections::HashMap;

/// The bytes of an arena by what they are for, at the instruction at which most of it is in use; or of what a framework holds in its stead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Weights: those that the rank keeps, and those that it has gathered.
    pub parameters: Bytes,
    /// Gradients of weights.
    pub gradients: Bytes,
    /// Moments, velocities and single-precision copies of weights.
    pub optimizer_state: Bytes,
    /// What operators made for others, and samples.
    pub activations: Bytes,
    /// Room for communication and rearrangement, sums and running statistics.
    pub workspace: Bytes,
    /// What lies between them: alignment, and holes that nothing fitted; of a framework's allocator what it holds and does not use.
    pub unused: Bytes,
    /// What a framework has on the device beside what it allocates (CUDA's context, libraries' buffers); nothing of that is in an arena.
    pub context: Bytes,
}

impl Footprint {
    /// That of the ranks that run a list.
    pub fn of(list: &StageProgram) -> Self {
        let mut now = Self::default();
        let on_device = || list.buffers.iter().filter(|buffer| buffer.memory == MemoryKind::Device && buffer.parent.is_none());
        for buffer in on_device().filter(|buffer| buffer.persistent) {
            *now.part(buffer.role) += buffer.bytes;
        }
        let places = |buffer: &&Buffer| !buffer.persistent && buffer.lifetime.is_some();
        let mut starting: Vec<&Buffer> = on_device().filter(places).collect();
        let mut ending = starting.clone();
        let lifetime = |buffer: &Buffer| buffer.lifetime.map_or((0, 0), |(first, last)| (first.0, last.0));
        starting.sort_by_key(|buffer| lifetime(buffer).0);
        ending.sort_by_key(|buffer| lifetime(buffer).1);
        let mut ending = ending.into_iter().peekable();
        // Who has a place: a result that is made in place takes over that of its operand before this is over.
        let mut holders: HashMap<Bytes, &Buffer> = HashMap::new();
        let mut most = now;
        for buffer in starting.into_iter().filter(|buffer| buffer.bytes > Bytes::ZERO) {
            let first = lifetime(buffer).0;
            while let Some(over) = ending.next_if(|over| lifetime(over).1 < first) {
                if holders.get(&over.offset).is_some_and(|holder| std::ptr::eq(*holder, over)) {
                    holders.remove(&over.offset);
                    now.take(over);
                }
            }
            if let Some(before) = holders.insert(buffer.offset, buffer) {
                now.take(before);
            }
            *now.part(buffer.role) += buffer.bytes;
            if now.used() > most.used() {
                most = now;
            }
        }
        most.unused = Bytes::new(list.arena.count().saturating_sub(most.used().count()));
        most
    }

    /// The sum of all parts: the arena, or all that a device holds.
    pub fn total(&self) -> Bytes {
        self.used() + self.unused + self.context
    }

    /// The parts with their names, those without bytes left out.
    pub fn parts(&self) -> Vec<(&'static str, Bytes)> {
        let parts = [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer_state),
            ("activations", self.activations),
            ("workspace", self.workspace),
            ("unused", self.unused),
            ("context", self.context),
        ];
        parts.into_iter().filter(|(_, bytes)| *bytes > Bytes::ZERO).collect()
    }

    fn take(&mut self, buffer: &Buffer) {
        let part = self.part(buffer.role);
        *part = Bytes::new(part.count().saturating_sub(buffer.bytes.count()));
    }

    fn used(&self) -> Bytes {
        self.parameters + self.gradients + self.optimizer_state + self.activations + self.workspace
    }

    fn part(&mut self, role: BufferRole) -> &mut Bytes {
        match role {
            BufferRole::Parameter => &mut self.parameters,
            BufferRole::Gradient => &mut self.gradients,
            BufferRole::OptimizerState => &mut self.optimizer_state,
            BufferRole::Activation | BufferRole::Input => &mut self.activations,
            BufferRole::Sum | BufferRole::Running | BufferRole::Workspace => &mut self.workspace,
        }
    }
}
