//! The footprint: the memory of a rank at its peak, by component.

use crate::program::{Buffer, BufferRole, MemoryKind, Program, StageProgram};
use foretell_units::Bytes;
use rustc_hash::FxHashMap;

/// The memory of a device by component, at the instruction at which most of it is in use: of our
/// arena, or of a framework's allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Parameters, both kept and gathered ones.
    pub parameters: Bytes,
    /// Gradients of parameters.
    pub gradients: Bytes,
    /// Moments, velocities and single-precision copies of parameters.
    pub optimizer_state: Bytes,
    /// Results of operators that other operators read, and samples.
    pub activations: Bytes,
    /// Buffers of communication and rearrangement, sums, and running statistics.
    pub workspace: Bytes,
    /// Memory that is allocated but not in use: alignment and fragmentation, or a framework's
    /// cached blocks.
    pub unused: Bytes,
    /// Memory of a framework outside its allocator, such as CUDA's context and libraries' buffers.
    /// Zero for an arena.
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
        let mut current = Self::default();
        let on_device = || list.buffers.iter().filter(|buffer| buffer.memory == MemoryKind::Device && buffer.parent.is_none());
        for buffer in on_device().filter(|buffer| buffer.persistent) {
            *current.component(buffer.role) += buffer.bytes;
        }
        // All other buffers, ordered by the first instruction of their lifetimes; and their
        // indices, ordered by the last.
        let temporary = on_device().filter(|buffer| !buffer.persistent && buffer.bytes > Bytes::ZERO);
        let mut starts: Vec<(u32, u32, &Buffer)> =
            temporary.filter_map(|buffer| buffer.lifetime.map(|(first, last)| (first.0, last.0, buffer))).collect();
        starts.sort_by_key(|&(first, ..)| first);
        let mut ends: Vec<(u32, u32)> = (0..).zip(&starts).map(|(index, &(_, last, _))| (last, index)).collect();
        ends.sort_unstable();
        let mut ends = ends.into_iter().peekable();
        // The buffer at each offset. A result that is computed in place takes the offset of its
        // operand before the operand's lifetime ends.
        let mut holders: FxHashMap<u64, u32> = FxHashMap::default();
        let mut peak = current;
        for (index, &(first, _, buffer)) in (0..).zip(&starts) {
            while let Some((_, ended)) = ends.next_if(|&(last, _)| last < first) {
                let offset = starts[ended as usize].2.offset.count();
                if holders.get(&offset) == Some(&ended) {
                    holders.remove(&offset);
                    current.subtract(starts[ended as usize].2);
                }
            }
            if let Some(overwritten) = holders.insert(buffer.offset.count(), index) {
                current.subtract(starts[overwritten as usize].2);
            }
            *current.component(buffer.role) += buffer.bytes;
            if current.used() > peak.used() {
                peak = current;
            }
        }
        peak.unused = Bytes::new(list.arena.count().saturating_sub(peak.used().count()));
        peak
    }

    /// The sum of all components.
    pub fn total(&self) -> Bytes {
        self.used() + self.unused + self.context
    }

    /// The components with their names. Components of zero bytes are left out.
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

    fn subtract(&mut self, buffer: &Buffer) {
        let component = self.component(buffer.role);
        *component = Bytes::new(component.count().saturating_sub(buffer.bytes.count()));
    }

    fn used(&self) -> Bytes {
        self.parameters + self.gradients + self.optimizer_state + self.activations + self.workspace
    }

    fn component(&mut self, role: BufferRole) -> &mut Bytes {
        match role {
            BufferRole::Parameter | BufferRole::ParameterCopy => &mut self.parameters,
            BufferRole::Gradient => &mut self.gradients,
            BufferRole::OptimizerState => &mut self.optimizer_state,
            BufferRole::Activation | BufferRole::Input => &mut self.activations,
            BufferRole::Sum | BufferRole::Running | BufferRole::Workspace => &mut self.workspace,
        }
    }
}
