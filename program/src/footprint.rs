//! What a rank's arena, or a framework, holds when it holds the most, by what it is for.

use crate::program::{Buffer, BufferRole, MemoryKind, Program, StageProgram};
use foretell_units::Bytes;
use rustc_hash::FxHashMap;

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
    /// The footprint of each stage's largest arena.
    pub fn of_stages(program: &Program) -> Vec<Self> {
        let largest = |stage| program.lists.iter().filter(|list| list.stage == stage).max_by_key(|list| list.arena);
        (0..program.mesh.stage_count()).map(|stage| largest(stage).map_or_else(Self::default, Self::of)).collect()
    }

    /// The footprint of the ranks that run a list.
    pub fn of(list: &StageProgram) -> Self {
        let mut now = Self::default();
        let on_device = || list.buffers.iter().filter(|buffer| buffer.memory == MemoryKind::Device && buffer.parent.is_none());
        for buffer in on_device().filter(|buffer| buffer.persistent) {
            *now.part(buffer.role) += buffer.bytes;
        }
        // Who is in use from which instruction to which, by the first of them; and the same by the last.
        let in_use = on_device().filter(|buffer| !buffer.persistent && buffer.bytes > Bytes::ZERO);
        let mut starting: Vec<(u32, u32, &Buffer)> =
            in_use.filter_map(|buffer| buffer.lifetime.map(|(first, last)| (first.0, last.0, buffer))).collect();
        starting.sort_by_key(|&(first, ..)| first);
        let mut ending: Vec<(u32, u32)> = (0..).zip(&starting).map(|(place, &(_, last, _))| (last, place)).collect();
        ending.sort_unstable();
        let mut ending = ending.into_iter().peekable();
        // Who has a place: a result that is made in place takes over that of its operand before this is over.
        let mut holders: FxHashMap<u64, u32> = FxHashMap::default();
        let mut most = now;
        for (place, &(first, _, buffer)) in (0..).zip(&starting) {
            while let Some((_, over)) = ending.next_if(|&(last, _)| last < first) {
                let offset = starting[over as usize].2.offset.count();
                if holders.get(&offset) == Some(&over) {
                    holders.remove(&offset);
                    now.take(starting[over as usize].2);
                }
            }
            if let Some(before) = holders.insert(buffer.offset.count(), place) {
                now.take(starting[before as usize].2);
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
            BufferRole::Parameter | BufferRole::ParameterCopy => &mut self.parameters,
            BufferRole::Gradient => &mut self.gradients,
            BufferRole::OptimizerState => &mut self.optimizer_state,
            BufferRole::Activation | BufferRole::Input => &mut self.activations,
            BufferRole::Sum | BufferRole::Running | BufferRole::Workspace => &mut self.workspace,
        }
    }
}
