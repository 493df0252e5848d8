//! The buffers of a list whose rows are the tokens that a rank's experts receive. Their use grows
//! with the tokens of the rank. It must not know costs.

use foretell_models::Kernel;
use foretell_program::{BufferId, Instruction, Operation, StageProgram};
use std::collections::BTreeMap;

/// The buffers with the rows of experts.
pub(crate) struct ExpertRows<'a> {
    list: &'a StageProgram,
    /// For each such buffer, the number of the rank's experts.
    experts: BTreeMap<BufferId, usize>,
}

impl<'a> ExpertRows<'a> {
    /// Finds the buffers: those that the products of experts read and write, apart from weights.
    pub(crate) fn of(list: &'a StageProgram) -> Self {
        let mut found = Self { list, experts: BTreeMap::new() };
        for instruction in &list.instructions {
            let Operation::Compute { kernel, .. } = *instruction.operation else { continue };
            let (experts, reads, writes) = match kernel {
                // The second operand of these products is the weight.
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

    /// Returns the number of experts whose rows a buffer holds. `None` if it holds no rows of
    /// experts.
    pub(crate) fn in_buffer(&self, buffer: BufferId) -> Option<usize> {
        self.experts.get(&self.whole(buffer)).copied()
    }

    /// Returns the number of experts whose rows an instruction reads or writes. `None` if there are
    /// no such rows, or if the instruction is a product of experts.
    pub(crate) fn beside_products(&self, instruction: &Instruction) -> Option<usize> {
        let Operation::Compute { kernel, .. } = *instruction.operation else { return None };
        let is_product = matches!(
            kernel,
            Kernel::ExpertMatmul { .. } | Kernel::ExpertMatmulInputGradient { .. } | Kernel::ExpertMatmulWeightGradient { .. }
        );
        let mut operands = instruction.reads.iter().chain(&*instruction.writes);
        if is_product { None } else { operands.find_map(|&buffer| self.in_buffer(buffer)) }
    }

    /// Returns the parent of a view, or the buffer itself if it is no view.
    fn whole(&self, buffer: BufferId) -> BufferId {
        self.list.buffers.get(buffer.0 as usize).and_then(|buffer| buffer.parent).unwrap_or(buffer)
    }
}
