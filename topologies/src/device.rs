//! Device kinds with their data-sheet figures. This module must not know clusters or models.

use foretell_units::{Bytes, BytesPerSecond, DataType, FlopsPerSecond, Seconds, Watts};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A device's family. It determines the executor's backend and the host overheads in the simulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// CPU cores.
    Cpu,
    /// A GPU.
    Gpu,
    /// A tensor processing unit.
    Tpu,
}

/// Rate of PCIe 4 x16, one way: the usual slot of a server (`link_specs.csv`: 31 GB/s).
pub(crate) const DEFAULT_PCIE_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(31e9);

/// Share of a PCIe slot's rate that packet overhead leaves: 25 of 31.5 GB/s.
pub(crate) const LEFT_BY_THE_PROTOCOL: f64 = 0.8;

/// Rate of one core copying through host memory. An estimate, which calibration replaces.
pub(crate) const DEFAULT_SHARED_MEMORY_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(10e9);

/// One kind of device, with its data-sheet figures.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceKind {
    /// Name in the topology file.
    pub name: String,
    /// The library device that it is based on, if any. Profiles and efficiency tables use this
    /// name.
    pub base: Option<String>,
    /// Family of the device.
    pub architecture: Architecture,
    /// Memory that a rank may use.
    pub memory: Bytes,
    /// Rate at which that memory is read or written.
    pub memory_bandwidth: BytesPerSecond,
    /// Dense peak rate of each natively supported number format.
    pub peak: BTreeMap<DataType, FlopsPerSecond>,
    /// Maximum power.
    pub power: Option<Watts>,
    /// Idle power, if stated.
    pub idle_power: Option<Watts>,
    /// Total rate of its links to other devices, one way.
    pub link: Option<BytesPerSecond>,
    /// Rate of copies to or from its host's memory, one way, while all devices of the node copy.
    /// [`DeviceKind::host_rate`] has the default.
    pub host_link: Option<BytesPerSecond>,
    /// Cores per device, if it is a CPU. The lab gives a rank that many.
    pub cores: Option<usize>,
    /// Share of its cores' time that the lab gives a device, from 0 to 1. `None` means all of it.
    /// The other figures describe the device without a quota.
    pub cpu_quota: Option<f64>,
    /// Source of the figures.
    pub source: Option<String>,
}

/// Period of a lab device's CPU quota. A device runs until its budget for the period is used up,
/// and is then stopped until the next period.
///
/// The Linux kernel assigns time in slices of 5 ms and checks running processes every 4 ms.
/// Measured with a quota of one half: periods of 5 ms give 0.42 of a core, periods of 10 ms give
/// 0.50.
pub const QUOTA_PERIOD: Seconds = Seconds::new(10e-3);

impl DeviceKind {
    /// Speed relative to the device without a quota: its `cpu_quota`, or 1.
    pub fn speed(&self) -> f64 {
        self.cpu_quota.unwrap_or(1.0)
    }

    /// Rate of copies to or from host memory, one way: as stated, or that of PCIe 4 x16
    /// (`link_specs.csv`: 31 GB/s). A CPU's memory is its host's, so a copy there reads and writes
    /// every byte.
    pub fn host_rate(&self) -> BytesPerSecond {
        self.host_link.unwrap_or(match self.architecture {
            Architecture::Cpu => self.memory_bandwidth / 2.0,
            Architecture::Gpu | Architecture::Tpu => DEFAULT_PCIE_BANDWIDTH,
        })
    }

    /// Rate of PCIe between devices of the kind, one way: the slot's rate without packet overhead,
    /// rounded to 0.1 GB/s.
    pub(crate) fn slot_rate(&self) -> BytesPerSecond {
        // If the host link is no PCIe slot (NVLink-C2C), the device has no slower slot beside it.
        BytesPerSecond::new((self.host_rate().value() * LEFT_BY_THE_PROTOCOL / 1e8).round() * 1e8)
    }

    /// Returns the kind with the peaks of all formats multiplied by `peak`, and the memory
    /// bandwidth by `memory_bandwidth`.
    pub fn scaled(&self, peak: f64, memory_bandwidth: f64) -> Self {
        Self {
            peak: self.peak.iter().map(|(&format, &rate)| (format, rate * peak)).collect(),
            memory_bandwidth: self.memory_bandwidth * memory_bandwidth,
            ..self.clone()
        }
    }

    /// Whether two kinds describe the same device, ignoring name, source and `cpu_quota`.
    pub fn is_like(&self, other: &DeviceKind) -> bool {
        let whole = |kind: &DeviceKind| DeviceKind { name: String::new(), cpu_quota: None, source: None, ..kind.clone() };
        whole(self) == whole(other)
    }

    /// Dense peak rate of products in `format`: the format's own figure, or that of the nearest
    /// wider format, since a narrow number can be widened first (fp8 → bf16 or fp16 → fp32; tf32 →
    /// fp32). `None` for integers, and for fp64 without a figure.
    pub fn peak_rate(&self, format: DataType) -> Option<FlopsPerSecond> {
        let stand_ins: &[DataType] = match format {
            DataType::Fp8 => &[DataType::Fp8, DataType::Bf16, DataType::Fp16, DataType::Fp32],
            DataType::Bf16 => &[DataType::Bf16, DataType::Fp32],
            DataType::Fp16 => &[DataType::Fp16, DataType::Fp32],
            DataType::Tf32 => &[DataType::Tf32, DataType::Fp32],
            DataType::Fp32 => &[DataType::Fp32],
            DataType::Fp64 => &[DataType::Fp64],
            DataType::Int8 | DataType::Int32 => &[],
        };
        stand_ins.iter().find_map(|stand_in| self.peak.get(stand_in).copied())
    }
}
