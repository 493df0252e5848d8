//! The profile: what a calibration measured on the described devices. The executor writes it, the cost model reads it; so the type
//! stands here, where both see it. It holds samples, not opinions: each with its spread and its number of repeats.

use foretell_models::Kernel;
use foretell_units::{DataType, Seconds};
use serde::{Deserialize, Serialize};

/// Measured durations of one thing, after outliers were discarded: those beyond three scaled median absolute deviations
/// (Leys et al. 2013).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The median.
    pub median: Seconds,
    /// The 10th percentile.
    pub p10: Seconds,
    /// The 90th percentile.
    pub p90: Seconds,
    /// How many durations were kept.
    pub count: usize,
}

/// A kernel's sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelSample {
    /// Which kernel, with its sizes.
    pub kernel: Kernel,
    /// Whether it added to what was there.
    #[serde(default)]
    pub accumulate: bool,
    /// The number format.
    pub precision: DataType,
    /// How long it took when the device was at its usual best (the fifth of its durations that were shortest), with as many ranks at work on
    /// the machine as it has devices. How often and how much it is slower is in [`Profile::paces`].
    pub time: Sample,
}

/// What a transport sample timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// Every member gets the sum.
    AllReduce,
    /// Every member gets its part of the sum.
    ReduceScatter,
    /// Every member gets everyone's part.
    AllGather,
    /// One member sends, another receives.
    SendReceive,
}

/// How far apart the members of an exchange are: the farthest that one of its messages goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// All are on one node.
    #[default]
    Node,
    /// From node to node, under one switch.
    Switch,
    /// From switch to switch.
    Fabric,
}

/// A transport's sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExchangeSample {
    /// What was timed.
    pub exchange: Exchange,
    /// How far apart these ranks are.
    #[serde(default)]
    pub reach: Reach,
    /// Among how many ranks.
    pub ranks: usize,
    /// How much: the whole tensor in bytes.
    pub bytes: u64,
    /// How long it took, by those who took part at once; handing it over to a stream is not in it. Of a message: one way.
    pub time: Sample,
    /// How long the communication kept the rank's own processor busy, latency included. Zero where that is not known of each exchange, as of GPUs:
    /// there [`Profile::communication_share`] is its share of the device while data flow.
    pub processor: Seconds,
}

/// Which machine a profile is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineIdentity {
    /// The processor's or accelerator's name.
    pub device: String,
    /// The operating system and its version.
    pub system: String,
    /// Devices that worked at the same time while it was measured.
    pub devices: usize,
    /// The cores that these devices shared in turn, device n on core n modulo this, where it was a lab.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
}

/// How fast a kind of device was beside the one that was measured, while both had work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RelativeSpeed {
    /// The kind.
    pub device: String,
    /// 0.5 where it takes twice as long.
    pub speed: f64,
}

/// How much longer a kernel and an exchange on one device take beside each other than alone, as parts of the time alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slowdown {
    /// The kernel: 0.2 where it takes 1.2 times as long.
    pub kernel: f64,
    /// The exchange.
    pub exchange: f64,
}

impl Slowdown {
    /// [`Profile::communication_share`] and [`Profile::communication_growth`] that say the same: two fluids that share one device, of which the exchange
    /// wants the share `s` and grows `g` times as fast as the kernel, take `1 + s g` and `(1 + s g) / g` times as long as alone. Nobody wants more than
    /// the whole device: both together take no longer than one after the other, which is where the product of the two slowdowns is one.
    pub fn share_and_growth(self) -> (f64, f64) {
        let growth = (1.0 + self.kernel) / (1.0 + self.exchange);
        ((self.kernel / growth).min(1.0), growth)
    }
}

/// What a calibration measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The device kind of the topology that it is for.
    pub device: String,
    /// The machine that was measured.
    pub machine: MachineIdentity,
    /// The backend: `cpu` or `cuda`.
    pub backend: String,
    /// The transport: `shared_memory`, `tcp` or `nccl`.
    pub transport: String,
    /// When, in seconds since 1970.
    pub measured_at: u64,
    /// What the interpreter adds to each instruction beyond its kernel.
    pub instruction_overhead: Sample,
    /// From finishing an instruction until one that waits for it on another stream begins.
    pub stream_handoff: Sample,
    /// What a step without instructions takes: setting the streams going and waiting for them. What the run does between steps (reporting,
    /// recording) is not in it.
    pub step_overhead: Sample,
    /// What an accelerator's host takes to launch a kernel where the step is not launched as one: that of a rank that exchanges with others or copies
    /// ([`StageProgram::is_alone`](crate::StageProgram::is_alone)). The host launches ahead of the device, which waits only where it has caught up. None where
    /// the processor that launches kernels runs them, and in profiles of before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub launch: Seconds,
    /// Reading one byte of prepared samples.
    pub load_seconds_per_byte: Seconds,
    /// The share of a device's processor that communication takes while it runs: 1 where both run on the same core, 0 where it
    /// is another's work.
    pub communication_share: f64,
    /// How fast communication grows beside a kernel, where both run on one device ([`Slowdown::share_and_growth`]). Nothing where an operating system
    /// shares a processor out to both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communication_growth: Option<f64>,
    /// What an instruction of another stream takes of the processor while a kernel runs on it, beside what it does: going over to the
    /// stream's thread and back.
    #[serde(default)]
    pub interruption: Seconds,
    /// Bytes that a sender may be ahead of its receiver: what the transport keeps.
    pub buffered_bytes: u64,
    /// How much slower than its kernels' samples say a device is over time, because others use the machine too: quantiles at equal steps of
    /// probability, from ratios taken over the whole calibration. `[1]` on a machine of one's own.
    pub paces: Vec<f64>,
    /// Devices that have only a share of a core's time, as fast as they really were. The samples are of a whole core.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speeds: Vec<RelativeSpeed>,
    /// Kernels.
    pub kernels: Vec<KernelSample>,
    /// Communication.
    pub exchanges: Vec<ExchangeSample>,
}

fn is_zero(seconds: &Seconds) -> bool {
    *seconds == Seconds::ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_slowed_more_than_by_taking_turns_is_said_to_take_turns() {
        // By as much as the other takes alone, and by more than that.
        for (kernel, exchange) in [(2.0, 0.5), (3.0, 1.0)] {
            let (share, growth) = Slowdown { kernel, exchange }.share_and_growth();
            assert!((share - 1.0).abs() < 1e-12);
            let (of_kernel, of_exchange) = (share * growth, (1.0 + share * growth) / growth - 1.0);
            assert!((of_kernel * of_exchange - 1.0).abs() < 1e-12);
            // Who of the two is slowed how much more stays as it was measured.
            assert!(((1.0 + of_kernel) / (1.0 + of_exchange) - (1.0 + kernel) / (1.0 + exchange)).abs() < 1e-12);
        }
    }
}
