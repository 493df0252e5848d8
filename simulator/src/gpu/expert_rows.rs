//! The buffers of a list that hold the rows which a rank's experts receive: what grows with the
//! tokens of the rank. It must not know costs.

use foretell_models::Kernel;
use foretell_program::{BufferId, Instruction, Operation, StageProgram};
use std::collections::BTreeMap;

/// Buffers with the rows of experts.
pub(crate) struct ExpertRows<'a> {
    list: &'a StageProgram,
    /// For each such buffer, the experts of the rank.
    experts: BTreeMap<BufferId, usize>,
}

impl<'a> ExpertRows<'a> {
    /// Finds what the products of experts read and write besides weights.
    pub(crate) fn of(list: &'a StageProgram) -> Self {
        let mut found = Self { list, experts: BTreeMap::new() };
        for instruction in &list.instructions {
            let Operation::Compute { kernel, .. } = *instruction.operation else { continue };
            let (experts, reads, writes) = match kernel {
                // The second operand is the weight.
                Kernel::ExpertMatmul { experts, .. } | Kernel::ExpertMatmulInputGradient { experts, .. } => (experts, 1, 1),
                Kernel::ExpertMatmulWeightGradient { experts, .. } => (experts, 2, 0),
                _ => continue,
            };
            for &buffer in instruction.reads.iter().take(reads).chain(instruction.writes.iter().take(writes)) {
                found.experts.insert(found.whole(buffer), experts);
            }
        }
        found
    }

    /// Returns the experts whose rows a buffer holds. `None` if it holds something else.
    pub(crate) fn in_buffer(&self, buffer: BufferId) -> Option<usize> {
        self.experts.get(&self.whole(buffer)).copied()
    }

    /// Returns the experts whose rows an instruction reads or writes, other than the products of
    /// experts do.
    pub(crate) fn beside_products(&self, instruction: &Instruction) -> Option<usize> {
        let Operation::Compute { kernel, .. } = *instruction.operation else { return None };
        let is_product = matches!(
            kernel,
            Kernel::ExpertMatmul { .. } | Kernel::ExpertMatmulInputGradient { .. } | Kernel::ExpertMatmulWeightGradient { .. }
        );
        let mut operands = instruction.reads.iter().chain(&*instruction.writes);
        if is_product { None } else { operands.find_map(|&buffer| self.in_buffer(buffer)) }
    }

    /// Returns the buffer that another is a view of, or the other itself.
    fn whole(&self, buffer: BufferId) -> BufferId {
        self.list.buffers.get(buffer.0 as usize).and_then(|buffer| buffer.parent).unwrap_or(buffer)
    }
}
