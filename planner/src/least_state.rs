//! Whether anything can fit at all: what is kept of all parameters from step to step lies on some device each, however it is shared out.
//!
//! It knows no layouts, and so costs nothing where a model is so large that even the short models by which layouts are bounded are.

use crate::answer::{PlannerError, first_device};
use crate::bounds::Bounds;
use foretell_program::Offload;
use foretell_units::Bytes;

impl Bounds<'_> {
    /// That nothing fits, if that follows from what is kept of all parameters alone.
    pub(crate) fn refusal_by_state(&self) -> Option<PlannerError> {
        let base = &self.request.base.layout;
        let offload = self.request.fixed.offload.unwrap_or(base.offload);
        let may_lie_on_hosts = self.offloading.open.contains(&Offload::Optimizer) || offload.is_of_optimizer();
        let of_each = self.offloading.bytes_of_each_parameter(may_lie_on_hosts);
        let all = self.parameters as f64 * of_each * self.share_of_arena();
        // In devices that have as much memory as that with the least.
        let devices = self.devices.least_memories(self.request.devices);
        let (needed, limit) = (all / devices.max(1.0), self.memory_limit);
        (needed > limit.value()).then(|| {
            let what =
                if may_lie_on_hosts { "parameters and gradients" } else { "parameters, gradients and the optimizer's state" };
            let hint = format!(
                "{what} alone are {}: use more devices than {}, or a smaller model",
                Bytes::new(all as u64),
                self.request.devices
            );
            PlannerError::OutOfMemory {
                needed: Bytes::new(needed.ceil() as u64),
                device: first_device(self.request),
                limit,
                hint,
            }
        })
    }
}
