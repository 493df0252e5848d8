//! Profiles of devices: the data sheet, and the share of it that kernels reach.

use super::defaults::{indexed_elements, one};
use super::format::ProductFormat;
use foretell_topologies::DeviceKind;
use foretell_units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Profile of a device.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuProfile {
    /// Group of devices with the same architecture. A fit assumes that they deviate similarly from
    /// their priors.
    pub generation: String,
    /// Number of streaming multiprocessors, or compute units.
    pub multiprocessors: f64,
    /// Dense peak by format. The profile's file states only formats that no data type of a plan
    /// has; see [`Self::take_data_sheet`] for the others.
    #[serde(default)]
    peak: BTreeMap<ProductFormat, FlopsPerSecond>,
    /// Size of the memory, from the data sheet.
    #[serde(skip)]
    pub memory: Bytes,
    /// Memory bandwidth, from the data sheet.
    #[serde(skip)]
    pub memory_bandwidth: BytesPerSecond,
    /// Rate of copies to or from the host, one way, while all devices of a node copy; from the data
    /// sheet.
    #[serde(skip)]
    pub host_rate: BytesPerSecond,
    /// Share of the memory bandwidth that streaming kernels reach.
    pub memory_efficiency: f64,
    /// Bytes of an operand that the last-level cache still holds from the previous kernel.
    pub cache: Bytes,
    /// Rate of the last-level cache over that of the memory.
    pub cache_speed: f64,
    /// Share of the peak that large products reach in sustained runs, by format.
    pub(super) product: BTreeMap<ProductFormat, f64>,
    /// See [`Tiling::product_ramp`]; for products on tensor cores.
    product_ramp: f64,
    /// See [`Tiling::small_tile`]; for products on tensor cores.
    small_tile: f64,
    /// See [`Tiling::quantisation`]; for products on tensor cores.
    pub(super) quantisation: f64,
    /// Tiling of products in single precision, if it differs from that on tensor cores.
    #[serde(default)]
    single: Option<Tiling>,
    /// Shares of the peak that fused attention reaches, forward and backward, with long sequences
    /// and heads of 128 features. The peak is that of the products' format, or of bf16 if that
    /// format is narrower than bf16.
    pub attention: [f64; 2],
    /// Relative efficiency of attention kernels written for Ampere (FlashAttention-2, Triton):
    /// their rate as a fraction of `attention` on this device, over the same fraction on Ampere.
    #[serde(default = "one")]
    pub ampere_attention: f64,
    /// Elements per second that one multiprocessor writes in a kernel that computes the address of
    /// each element. Such a kernel takes this time or the memory's time, whichever is longer.
    #[serde(default = "indexed_elements")]
    pub indexed_elements: f64,
    /// Device time of the smallest kernel, from the end of the previous kernel.
    pub launch: Seconds,
    /// Name of the usual link between the devices of a node.
    pub link: String,
    /// Usual network rate of a node, per device.
    pub network_rate: BytesPerSecond,
    /// Source of the figures.
    pub source: String,
    /// True if the efficiencies are taken from a related device, because no kernels and too few
    /// runs were measured on this one.
    #[serde(default)]
    pub estimated: bool,
    /// True if fewer than three published runs on the device were fitted. Its kernels may have been
    /// measured nevertheless.
    #[serde(skip)]
    pub unseen: bool,
    /// 10th and 90th percentile of a measurement over its prediction, on a device without fitted
    /// runs.
    #[serde(skip)]
    pub spread: Option<[f64; 2]>,
}

/// Losses of matrix products that are cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiling {
    /// Fixed cost of a tile, as a number of additional elements of the contracted dimension.
    pub product_ramp: f64,
    /// Exponent with which a tile's efficiency falls with its area.
    pub small_tile: f64,
    /// Share of an incomplete wave that is lost: 0 loses nothing, 1 the whole idle part.
    pub quantisation: f64,
}

impl GpuProfile {
    /// Returns the tiling losses of products in a format.
    pub fn tiling(&self, format: ProductFormat) -> Tiling {
        let Self { product_ramp, small_tile, quantisation, .. } = *self;
        let on_tensor_cores = Tiling { product_ramp, small_tile, quantisation };
        if format == ProductFormat::Fp32 { self.single.unwrap_or(on_tensor_cores) } else { on_tensor_cores }
    }

    /// Returns the dense peak of products in a format, or in the nearest wider one that the device
    /// has.
    pub fn peak(&self, format: ProductFormat) -> FlopsPerSecond {
        widened(&self.peak, format).expect("invariant: every profile has the peak of single precision")
    }

    /// Returns the share of the peak that large products in a format reach, or in the nearest wider
    /// format with a figure.
    pub fn product_efficiency(&self, format: ProductFormat) -> f64 {
        widened(&self.product, format).expect("invariant: every profile has the efficiency of single precision")
    }

    /// Overwrites the peaks, memory size, memory bandwidth and host rate with those of a data
    /// sheet: first the device library's, later that of the topology's device.
    pub(crate) fn take_data_sheet(&mut self, kind: &DeviceKind) {
        for (&precision, &peak) in &kind.peak {
            self.peak.insert(ProductFormat::of(precision), peak);
        }
        self.memory = kind.memory;
        self.memory_bandwidth = kind.memory_bandwidth;
        self.host_rate = kind.host_rate();
    }

    /// Multiplies the peaks of all formats and the memory bandwidth.
    pub(crate) fn scale(&mut self, peak: f64, memory_bandwidth: f64) {
        self.peak.values_mut().for_each(|rate| *rate = *rate * peak);
        self.memory_bandwidth = self.memory_bandwidth * memory_bandwidth;
    }
}

/// Returns the figure of a format, or of the nearest wider one that has a figure.
fn widened<T: Copy>(figures: &BTreeMap<ProductFormat, T>, format: ProductFormat) -> Option<T> {
    std::iter::successors(Some(format), |format| format.wider()).find_map(|format| figures.get(&format).copied())
}
