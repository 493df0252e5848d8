//! Device kinds with their data-sheet figures. Knows no cluster and no model.

use foretell_units::{Bytes, BytesPerSecond, DataType, FlopsPerSecond, Seconds, Watts};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A device's family, which decides the executor's backend and the host overheads in the simulator.
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

/// PCIe 4 x16, one way: the usual slot of a server (`link_specs.csv`: 31 GB/s).
pub(crate) const DEFAULT_PCIE_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(31e9);

/// Share of a PCIe slot's rate that packet overhead leaves: 25 of 31.5 GB/s.
pub(crate) const LEFT_BY_THE_PROTOCOL: f64 = 0.8;

/// One core copying through host memory. An estimate; calibration measures it.
pub(crate) const DEFAULT_SHARED_MEMORY_BANDWIDTH: BytesPerSecond = BytesPerSecond::new(10e9);

/// One kind of device, with its data-sheet figures.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceKind {
    /// Name in the topology file.
    pub name: String,
    /// The library device that it is based on, if any. Profiles and efficiency tables know devices
    /// by this name.
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
    /// Share of its cores' time that the lab gives a device, from 0 to 1; `None` means all. The
    /// other figures describe the whole device.
    pub cpu_quota: Option<f64>,
    /// Source of the figures.
    pub source: Option<String>,
}

/// Period of a lab device's CPU quota. A device runs until its budget of the period is used up, and
/// stands still until the next period.
///
/// The kernel hands out time in slices of 5 ms and checks running processes every 4 ms. With
/// periods of 5 ms a quota of one half was measured to give 0.42 of a core, with 10 ms 0.50.
pub const QUOTA_PERIOD: Seconds = Seconds::new(10e-3);

impl DeviceKind {
    /// Speed relative to the whole device: its `cpu_quota`, or 1.
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

    /// Rate of PCIe between devices of the kind, one way: that of the slot less packet overhead, to
    /// a tenth of a GB/s.
    pub(crate) fn slot_rate(&self) -> BytesPerSecond {
        // A device whose host link is no PCIe slot (NVLink-C2C) has none that is slower.
        BytesPerSecond::new((self.host_rate().value() * LEFT_BY_THE_PROTOCOL / 1e8).round() * 1e8)
    }

    /// Returns the kind with its peaks (all formats) and its memory bandwidth multiplied by these
    /// factors.
    pub fn scaled(&self, peak: f64, memory_bandwidth: f64) -> Self {
        Self {
            peak: self.peak.iter().map(|(&format, &rate)| (format, rate * peak)).collect(),
            memory_bandwidth: self.memory_bandwidth * memory_bandwidth,
            ..self.clone()
        }
    }

    /// Whether two kinds describe the same device, apart from name and `cpu_quota`.
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
