//! A refusal of models whose persistent state alone exceeds the memory of all devices.
//!
//! However parameters are sharded, each is on at least one device, and so are the gradient and the
//! optimizer state of each trained one. So the check needs no layout. It costs nothing even for
//! models so large that compiling their truncated models takes long.

use super::context::Bounds;
use crate::error::PlannerError;
use foretell_program::Offload;
use foretell_units::Bytes;

impl Bounds<'_> {
    /// Returns an error if parameters, gradients and optimizer state alone exceed the memory of all
    /// devices.
    pub(crate) fn refusal_by_model_state(&self) -> Option<PlannerError> {
        let request = self.request;
        let offload = request.fixed.offload.unwrap_or(request.base.layout.offload);
        let state_may_be_on_hosts = self.space.offloads.contains(&Offload::Optimizer) || offload.is_of_optimizer();
        let bytes = self.hosts.bytes_of_state(self.parameters, self.trained, state_may_be_on_hosts);
        // Per device, as if each had the smallest memory limit.
        let devices = self.kinds.total_memory_in_smallest(request.devices);
        let (needed, limit) = (bytes / devices.max(1.0) + self.fixed_memory(), self.memory_limit);
        (needed > limit.value()).then(|| {
            let state = if state_may_be_on_hosts {
                "parameters and gradients"
            } else {
                "parameters, gradients and the optimizer's state"
            };
            let hint = format!(
                "{state} alone are {}: use more devices than {}, or a smaller model",
                Bytes::new(bytes as u64),
                request.devices
            );
            PlannerError::out_of_memory(request, Bytes::new(needed.ceil() as u64), limit, hint)
        })
    }
}
