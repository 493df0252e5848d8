//! The costs of a kind of device other than those of kernels.

use super::estimate::Estimate;
use foretell_units::Seconds;

/// The events that a host waits for before it launches more kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostWaits {
    /// True if it waits for messages from other stages.
    pub for_messages: bool,
    /// True if it waits for the last kernel of each pass.
    pub between_passes: bool,
}

/// The costs of a kind of device other than those of kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// The time added to each kernel.
    pub instruction_overhead: Estimate,
    /// The delay from the end of an instruction until a dependent instruction on another stream
    /// starts. It delays only the dependent instruction.
    pub stream_handoff: Estimate,
    /// The host time to launch a kernel, from a calibration, for steps that are not launched as a
    /// whole ([`Profile::launch`](foretell_program::Profile::launch)). The launch time under a
    /// software stack is in [`KernelCost::launch`](crate::KernelCost::launch).
    pub launch: Seconds,
    /// The time after a rank's last instruction.
    pub step_overhead: Estimate,
    /// Further time after a rank's last instruction, for each of its micro-batches.
    pub micro_batch_overhead: Seconds,
    /// The time of the smallest collective or message, without the latency of its hops, if no
    /// sample covers it.
    pub exchange_overhead: Seconds,
    /// Whether all-reduces may run as trees if their algorithm is left open. Our transport between
    /// CPUs has no trees.
    pub has_trees: bool,
    /// The time to read one byte of samples.
    pub load_seconds_per_byte: Seconds,
    /// The share of the processor that communication and reading take without contention. Measured
    /// communication uses the share in its own sample.
    pub communication_share: f64,
    /// The share of the processor that copies between device and host memory take. Zero if the
    /// device has copy engines.
    pub copy_share: f64,
    /// The rate of communication over that of a kernel on the same processor, each relative to
    /// running alone. `None` if an operating system divides the processor: each activity then gets
    /// an equal share, up to what it needs.
    pub communication_growth: Option<f64>,
    /// The events that the host waits for before it launches more kernels.
    pub host_waits: HostWaits,
    /// The processor time that an instruction of another stream takes from a running kernel, beyond
    /// its own work. Zero if streams take no processor time from kernels.
    pub interruption: Seconds,
}

impl Parameters {
    /// Returns the parameters of a device of relative speed `speed`.
    pub(crate) fn over(self, speed: f64) -> Self {
        Self {
            instruction_overhead: self.instruction_overhead.over(speed),
            stream_handoff: self.stream_handoff.over(speed),
            step_overhead: self.step_overhead.over(speed),
            load_seconds_per_byte: self.load_seconds_per_byte / speed,
            interruption: self.interruption / speed,
            ..self
        }
    }
}
