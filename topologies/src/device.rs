//! Kinds of device: what one of them computes, holds and moves. Knows no cluster and no model.

use foretell_units::{Bytes, BytesPerSecond, DataType, FlopsPerSecond, Seconds, Watts};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What family of processor a device is, which decides the executor's backend and the host costs that the simulator assumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// Cores of a general-purpose processor.
    Cpu,
    /// A graphics processor used as an accelerator.
    Gpu,
    /// A tensor processing unit.
    Tpu,
}

/// PCIe 4 x16, one way: the usual slot of a server (`link_specs.csv`: 31 GB/s).
pub(crate) const DEFAULT_PCIE_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(31e9);

/// One core copying through host memory. An estimate; calibration measures it.
pub(crate) const DEFAULT_SHARED_MEMORY_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(10e9);

/// One kind of device, with its data-sheet figures.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceKind {
    /// Its name in the topology file.
    pub name: String,
    /// The library device it was made from, if any: what a profile or an efficiency table may know it by.
    pub base: Option<String>,
    /// The family of processor.
    pub architecture: Architecture,
    /// How much memory a rank on it may use.
    pub memory: Bytes,
    /// How fast that memory is read or written.
    pub memory_bandwidth: BytesPerSecond,
    /// The dense peak rate of each number format that it computes natively.
    pub peak: BTreeMap<DataType, FlopsPerSecond>,
    /// The power it draws at most.
    pub power: Option<Watts>,
    /// The power it draws while it does nothing, if the file says.
    pub idle_power: Option<Watts>,
    /// What all its links to other devices can send together, one way.
    pub link: Option<BytesPerSecond>,
    /// What it moves to its host's memory, or from it, one way, while the other devices of its node do, too; [`DeviceKind::host_rate`] where the
    /// file does not say.
    pub host_link: Option<BytesPerSecond>,
    /// How many processor cores make up one device, where it is a CPU. The lab gives a rank that many.
    pub cores: Option<usize>,
    /// The share of its cores' time that the lab lets a device have, if the file asks for less than all of it. The figures above are those
    /// of the whole device.
    pub cpu_quota: Option<f64>,
    /// Where the figures are from.
    pub source: Option<String>,
}

/// In what periods the lab gives a device its share of its cores' time: it runs until that is used up, and stands still until the next period begins.
///
/// The kernel hands out time in slices of 5 ms and looks at running processes at every tick (4 ms): with periods of 5 ms a quota of one half
/// was measured to give 0.42 of a core, with 10 ms 0.50.
pub const QUOTA_PERIOD: Seconds = Seconds::new(10e-3);

impl DeviceKind {
    /// How fast it is beside the device that its figures describe: its `cpu_quota`, or 1.
    pub fn speed(&self) -> f64 {
        self.cpu_quota.unwrap_or(1.0)
    }

    /// What it moves to its host's memory, or from it, one way: what the file says, or a slot of sixteen PCIe lanes of generation 4, the usual one
    /// of today's servers (`link_specs.csv`: 31 GB/s). A processor's memory is its host's: it reads every byte there and writes it again.
    pub fn host_rate(&self) -> BytesPerSecond {
        self.host_link.unwrap_or(match self.architecture {
            Architecture::Cpu => self.memory_bandwidth / 2.0,
            Architecture::Gpu | Architecture::Tpu => DEFAULT_PCIE_BANDWIDTH,
        })
    }

    /// The same with peaks, in every format, and memory so many times as fast.
    pub fn scaled(&self, peak: f64, memory_bandwidth: f64) -> Self {
        Self {
            peak: self.peak.iter().map(|(&format, &rate)| (format, rate * peak)).collect(),
            memory_bandwidth: self.memory_bandwidth * memory_bandwidth,
            ..self.clone()
        }
    }

    /// Whether the figures of two kinds describe the same device, whatever share of it each has.
    pub fn is_like(&self, other: &DeviceKind) -> bool {
        let whole = |kind: &DeviceKind| DeviceKind { name: String::new(), cpu_quota: None, source: None, ..kind.clone() };
        whole(self) == whole(other)
    }

    /// The dense peak rate at which products in `format` can be computed: the format's own figure, or that of the nearest wider
    /// format that the device has, since a narrow number can always be widened first (fp8 → bf16 or fp16 → fp32; tf32 → fp32).
    /// `None` for integers, and for fp64 where no figure is given.
    pub fn peak_rate(&self, format: DataType) -> Option<FlopsPerSecond> {
        let stand_ins: &[DataType] = match format {
            DataType::Fp8 => &[DataType::Fp8, DataType::Bf16, DataType::Fp16, DataType::Fp32],
            DataType::Bf16 => &[DataType::Bf16, DataType::Fp32],
            DataType::Fp16 => &[DataType::Fp16, DataType::Fp32],
            DataType::Tf32 => &[DataType::Tf32, DataType::Fp32],
            DataType::Fp32 => &[DataType::Fp32],
            DataType::Fp64 => &[DataType::Fp64],
            DataType::Int32 => &[],
        };
        stand_ins.iter().find_map(|stand_in| self.peak.get(stand_in).copied())
    }
}
