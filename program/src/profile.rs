//! The profile: the measurements of a calibration. The executor writes it and the simulator reads
//! it, and neither may import the other, so the type is in this crate. A profile has samples with
//! their spread and count, and no fits.

mod framework;

pub use framework::{FrameworkProfile, MovesSample, OperatorSample};

use foretell_models::Kernel;
use foretell_units::diagnostic::Mistake;
use foretell_units::{Bytes, BytesPerSecond, DataType, SchemaVersion, Seconds};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

/// Repeated measurements of one duration. Outliers beyond three scaled median absolute deviations
/// are discarded (Leys et al. 2013).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The median; for kernels, the 20th percentile over passes of each pass's median.
    pub median: Seconds,
    /// The 10th percentile.
    pub p10: Seconds,
    /// The 90th percentile.
    pub p90: Seconds,
    /// The number of measurements that were kept.
    pub count: usize,
}

/// The measured duration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelSample {
    /// The kernel, with its sizes.
    #[schemars(schema_with = "kernel_schema")]
    #[serde(deserialize_with = "countable")]
    pub kernel: Kernel,
    /// Whether it added to the buffers that it wrote.
    #[serde(default)]
    pub accumulate: bool,
    /// The number format.
    pub precision: DataType,
    /// The duration at the device's usual best: the 20th percentile over passes, with as many ranks
    /// at work as the machine has devices. [`Profile::paces`] has the slowdowns over time.
    pub time: Sample,
}

/// The schema of a kernel: an object with one field. Kernels with all their sizes would be too long
/// for a schema of profiles.
fn kernel_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "minProperties": 1, "maxProperties": 1})
}

/// Reads a kernel, and refuses one whose elements cannot be counted.
fn countable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Kernel, D::Error> {
    let kernel = Kernel::deserialize(deserializer)?;
    if kernel.is_countable() {
        return Ok(kernel);
    }
    let message = "a kernel of `kernels` has sizes that no device holds";
    Err(Mistake::new(message, "remove the kernel, or measure again with `foretell calibrate`").into_serde())
}

/// The kind of communication that a transport sample measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// An all-reduce.
    AllReduce,
    /// A reduce-scatter.
    ReduceScatter,
    /// An all-gather.
    AllGather,
    /// A message from one rank to another.
    SendReceive,
}

/// The farthest distance between two ranks that communicate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// Within a node.
    #[default]
    Node,
    /// Between nodes at one switch.
    Switch,
    /// Between nodes at different switches.
    Fabric,
}

/// The measured duration of a collective or a message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExchangeSample {
    /// The kind of communication.
    pub exchange: Exchange,
    /// The distance between the ranks.
    #[serde(default)]
    pub reach: Reach,
    /// The number of ranks.
    pub ranks: usize,
    /// The size of the whole tensor in bytes.
    pub bytes: u64,
    /// The duration once all ranks take part, without the hand-over to a stream; one way for a
    /// message.
    pub time: Sample,
    /// The time for which the communication kept the rank's own processor busy, latency included.
    /// Zero if it was not measured, as on GPUs: [`Profile::communication_share`] then is the share
    /// of the device that communication takes while data flow.
    pub processor: Seconds,
}

/// The machine of a profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineIdentity {
    /// The name of the CPU or accelerator.
    pub device: String,
    /// The operating system and its version.
    pub system: String,
    /// The number of devices that worked at the same time during the calibration.
    pub devices: usize,
    /// If emulated hosts (`foretell lab`) shared the machine: the number of cores; device n ran on
    /// core n modulo it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<usize>,
}

/// The speed of a kind of device, relative to the device whose kernels were timed, with both kinds
/// busy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RelativeSpeed {
    /// The kind of device.
    pub device: String,
    /// The relative speed: 0.5 if kernels take twice as long.
    pub speed: f64,
}

/// The slowdown of a kernel and of communication that run on one device at the same time, as
/// fractions of their durations alone.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slowdown {
    /// The slowdown of the kernel: 0.2 if it takes 1.2 times as long.
    pub kernel: f64,
    /// The slowdown of the communication.
    pub exchange: f64,
}

impl Slowdown {
    /// The values of [`Profile::communication_share`] and [`Profile::communication_growth`] that
    /// express this slowdown.
    /// The model: a kernel and communication are fluids that share one device. Communication uses
    /// the share `s` of the device, and gets `g` times the kernel's relative rate. The kernel then
    /// takes `1 + s g` times its time alone, the communication `(1 + s g) / g` times. `s` is at
    /// most 1: the two overlapped never take longer than one after the other (at `s = 1` the
    /// slowdowns `g` and `1 / g` multiply to 1).
    pub fn share_and_growth(self) -> (f64, f64) {
        let growth = (1.0 + self.kernel) / (1.0 + self.exchange);
        ((self.kernel / growth).min(1.0), growth)
    }
}

/// The costs of reading the samples of a data set from storage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InputCosts {
    /// The size of a sample in storage, on average.
    pub bytes_per_sample: Bytes,
    /// The time for one worker to read a cached sample, decode it and augment it.
    pub decode: Seconds,
    /// The rate at which several threads together read the data set's files, with the page cache as
    /// calibration found it.
    pub read: BytesPerSecond,
}

/// The costs of writing checkpoints into a folder, with all ranks of a machine at work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StorageCosts {
    /// The rate at which each rank copies its part of the state out of the arena.
    pub save: BytesPerSecond,
    /// The rate at which all ranks together bring a checkpoint to storage: writing, syncing, and
    /// reading back for checksums.
    pub write: BytesPerSecond,
    /// The part of the time of a checkpoint that does not depend on its size.
    pub latency: Seconds,
}

/// The measurements of a calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// The version of the file's form.
    #[serde(default)]
    pub schema_version: SchemaVersion,
    /// The kind of device in the topology that the profile is for.
    pub device: String,
    /// The machine that was measured.
    pub machine: MachineIdentity,
    /// The backend: `cpu` or `cuda`.
    pub backend: String,
    /// The transport: `shared_memory`, `tcp` or `nccl`.
    pub transport: String,
    /// The time of the calibration, in seconds since 1970.
    pub measured_at: u64,
    /// The interpreter's overhead for each instruction, beyond its kernel.
    pub instruction_overhead: Sample,
    /// The delay from the end of an instruction to the start of one on another stream that waits
    /// for it.
    pub stream_handoff: Sample,
    /// The duration of a step without instructions: starting the streams and waiting for them. The
    /// run's work between steps, such as reporting, is not included.
    pub step_overhead: Sample,
    /// The time that an accelerator's host takes to launch a kernel, if the step is not launched as
    /// a whole ([`StageProgram::is_alone`](crate::StageProgram::is_alone)). The host launches ahead
    /// of the device, so the device waits only if it has caught up. Zero if the processor that
    /// launches kernels also runs them, and in profiles that do not state it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub launch: Seconds,
    /// The time to read one byte of prepared samples.
    pub load_seconds_per_byte: Seconds,
    /// The share of a device that communication takes while it runs: 1 if both run on the same
    /// core, 0 if other hardware does it.
    pub communication_share: f64,
    /// The rate of communication over that of a kernel, each relative to running alone, when both
    /// share a device (`g` in [`Slowdown::share_and_growth`]). `None` if an operating system
    /// divides a processor between them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub communication_growth: Option<f64>,
    /// The processor time that an instruction of another stream costs a running kernel, in addition
    /// to the instruction's own work: the switch to the stream's thread and back.
    #[serde(default)]
    pub interruption: Seconds,
    /// The number of bytes that a sender may be ahead of its receiver: the transport's buffer.
    pub buffered_bytes: u64,
    /// The device's slowdown over time against the kernel samples, caused by other users of the
    /// machine: evenly spaced quantiles of the ratio over the calibration. `[1]` on an otherwise
    /// idle machine.
    pub paces: Vec<f64>,
    /// The processor time of the reference kernel, a fixed product: the median over all passes. A
    /// run times it too. A difference means that the machine's pace changed, not that the model is
    /// wrong. `None` on GPUs, and in profiles that do not state it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Sample>,
    /// The measured speeds of devices that have only a share of a core's time. The kernel samples
    /// are of a whole core.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub speeds: Vec<RelativeSpeed>,
    /// The costs of reading samples from storage; `None` if the samples are in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<InputCosts>,
    /// The costs of writing checkpoints; `None` if they were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageCosts>,
    /// The operators of a framework other than our own, and how long they take. `kernels` is empty
    /// then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub framework: Option<FrameworkProfile>,
    /// The samples of kernels.
    pub kernels: Vec<KernelSample>,
    /// The samples of collectives and messages.
    pub exchanges: Vec<ExchangeSample>,
}

fn is_zero(seconds: &Seconds) -> bool {
    *seconds == Seconds::ZERO
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_whose_elements_cannot_be_counted_is_refused() {
        let time = r#"{"median": "1ms", "p10": "1ms", "p90": "1ms", "count": 9}"#;
        let sample = |rows: u64| {
            let kernel = format!(r#"{{"cross_entropy": {{"rows": {rows}, "classes": 10}}}}"#);
            serde_json::from_str::<KernelSample>(&format!(r#"{{"kernel": {kernel}, "precision": "fp32", "time": {time}}}"#))
        };
        assert!(sample(64).is_ok());
        let error = sample(u64::MAX).expect_err("no device holds it").to_string();
        let mistake = Mistake::recorded(&error).expect("it has a hint");
        assert!(mistake.hint.contains("foretell calibrate"), "{mistake}");
    }

    #[test]
    fn slowdowns_beyond_running_in_turn_are_capped_at_running_in_turn() {
        // Exactly the slowdown of running in turn, and more.
        for (kernel, exchange) in [(2.0, 0.5), (3.0, 1.0)] {
            let (share, growth) = Slowdown { kernel, exchange }.share_and_growth();
            assert!((share - 1.0).abs() < 1e-12);
            let (of_kernel, of_exchange) = (share * growth, (1.0 + share * growth) / growth - 1.0);
            assert!((of_kernel * of_exchange - 1.0).abs() < 1e-12);
            // The ratio of the two slowed durations stays as measured.
            assert!(((1.0 + of_kernel) / (1.0 + of_exchange) - (1.0 + kernel) / (1.0 + exchange)).abs() < 1e-12);
        }
    }
}
