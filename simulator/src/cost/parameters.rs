//! What a kind of device costs beside its kernels.

use super::estimate::Estimate;
use foretell_units::Seconds;

/// What a host waits for before it launches more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostWaits {
    /// Messages from other stages.
    pub for_messages: bool,
    /// The last kernel of a pass over a micro-batch.
    pub between_passes: bool,
}

/// What a kind of device costs beside its kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// Added to each kernel.
    pub instruction_overhead: Estimate,
    /// From finishing an instruction until one that waits for it on another stream begins. It
    /// delays only who has to wait for it.
    pub stream_handoff: Estimate,
    /// What the host takes to launch a kernel of a step that is not launched as one, where a
    /// calibration says so ([`Profile::launch`](foretell_program::Profile::launch)); what a
    /// software stack's launches take is in [`KernelCost::launch`](crate::KernelCost::launch).
    pub launch: Seconds,
    /// After a rank's last instruction.
    pub step_overhead: Estimate,
    /// After a rank's last instruction for each of its micro-batches.
    pub micro_batch_overhead: Seconds,
    /// What an exchange takes however small it is, beside the latency of its hops, where no sample
    /// says.
    pub exchange_overhead: Seconds,
    /// Reading one byte of samples.
    pub load_seconds_per_byte: Seconds,
    /// The share of the processor that communication and reading take while they run unhindered. Of
    /// communication that was measured, the sample's own share counts.
    pub communication_share: f64,
    /// The share of the processor that copies between its memory and the host's take: none where
    /// engines of their own make them.
    pub copy_share: f64,
    /// How fast communication grows beside a kernel where both want the processor; where that is
    /// not known as an operating system shares it, equal use until one needs no more.
    pub communication_growth: Option<f64>,
    /// What the host waits for before it launches more.
    pub host_waits: HostWaits,
    /// What an instruction of another stream takes of the processor beside what it does, where a
    /// kernel runs there. Nothing where streams take no processor from kernels.
    pub interruption: Seconds,
}

impl Parameters {
    /// The same on a device of so many times the speed.
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
