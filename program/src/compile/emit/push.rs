//! The format of pushes: how a worker encodes a bucket's gradients, and how a server decodes them.
//!
//! Compression rounds gradients. The worker keeps the rounding error and adds it to the next
//! gradients before compressing them (error feedback: Seide et al. 2014, Karimireddy et al. 2019).
//! So over many steps the sum of a worker's pushes follows the sum of its gradients.

use super::list::{Label, ListBuilder};
use crate::plan::Plan;
use crate::program::{BufferId, BufferRole, Phase};
use foretell_models::{Compression, Kernel};
use foretell_units::DataType;

/// The format of pushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Push {
    /// Single precision if `None`.
    format: Option<Compression>,
}

impl Push {
    pub(super) fn of(plan: &Plan) -> Self {
        Self { format: plan.mode.push_format() }
    }

    pub(super) fn is_compressed(self) -> bool {
        self.format.is_some()
    }

    /// The number of elements of a push of `elements` gradients, and their number format.
    pub(super) fn message(self, elements: usize) -> (usize, DataType) {
        self.format.map_or((elements, DataType::Fp32), |format| (format.bytes(elements), DataType::Int8))
    }

    /// Returns the message that carries `gradients`. It is compressed if the format is and there is
    /// a `residual`, which holds the rounding errors of earlier messages; else it is the gradients'
    /// buffer itself.
    pub(super) fn compress(
        self,
        list: &mut ListBuilder,
        name: &str,
        gradients: BufferId,
        residual: Option<BufferId>,
    ) -> BufferId {
        let (Some(format), Some(residual)) = (self.format, residual) else { return gradients };
        let elements = list.elements(gradients);
        let (size, data_type) = self.message(elements);
        let message = list.add_buffer(name, BufferRole::Workspace, vec![size], data_type);
        let kernel = Kernel::Compress { elements, parts: 1, format, feedback: true };
        list.compute(Label::of_step(name, Phase::Update), kernel, &[gradients], &[message, residual]);
        message
    }

    /// Decompresses a push into `gradients`. Does nothing for uncompressed pushes, which are
    /// gradients already.
    pub(super) fn decompress(self, list: &mut ListBuilder, name: &str, push: BufferId, gradients: BufferId) {
        let Some(format) = self.format else { return };
        let kernel = Kernel::Decompress { elements: list.elements(gradients), sources: 1, format };
        list.compute(Label::of_step(name, Phase::Update), kernel, &[push], &[gradients]);
    }
}
