//! The profile files: devices, links and software stacks, read once from what is compiled in.

use super::format::ProductFormat;
use super::stack::StackKind;
use foretell_topologies::DeviceKind;
use foretell_units::{Bytes, BytesPerSecond, FlopsPerSecond, Seconds};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use thiserror::Error;

const DEVICES: &str = include_str!("profiles/devices.yaml");
const LINKS: &str = include_str!("profiles/links.yaml");
const STACKS: &str = include_str!("profiles/stacks.yaml");
const FITTED: &str = include_str!("profiles/fitted.yaml");

/// What plans may call a stack, and the profile that holds for it.
const ALIASES: [(&str, &str); 3] = [("fsdp2", "torchtitan"), ("megatron-lm", "megatron-core"), ("deepspeed", "deepspeed-3d")];

fn one() -> f64 {
    1.0
}

/// Why the profiles do not say what was asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProfileError {
    /// A file is not sound.
    #[error("profile `{file}`: {reason}")]
    Unreadable {
        /// Which file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such entry.
    #[error("no {what} profile is called `{name}`")]
    Unknown {
        /// `device`, `link` or `stack`.
        what: &'static str,
        /// What was asked for.
        name: String,
    },
}

/// A device: its data sheet, and what of it kernels reach.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuKind {
    /// Of devices that are built alike.
    pub generation: String,
    /// Streaming multiprocessors (or compute units).
    pub multiprocessors: f64,
    /// The dense peak of each format.
    peak: BTreeMap<ProductFormat, FlopsPerSecond>,
    /// How much memory there is.
    pub memory: Bytes,
    /// The data sheet's memory bandwidth.
    pub memory_bandwidth: BytesPerSecond,
    /// The share of it that streaming kernels reach.
    pub memory_efficiency: f64,
    /// Bytes of an operand that the last level of cache still has from the kernel before.
    pub cache: Bytes,
    /// How many times faster than memory it is.
    pub cache_speed: f64,
    /// The share of the peak that large products reach in sustained runs, by format; a wider format's where there is none.
    pub(super) product: BTreeMap<ProductFormat, f64>,
    /// What a tile costs beside its work, as that many more of the contracted dimension.
    pub product_ramp: f64,
    /// How fast efficiency falls with the tile's area: its power.
    pub small_tile: f64,
    /// How much of a wave that is not full is lost.
    pub quantisation: f64,
    /// The same three of products in single precision, where their kernels are other than the tensor cores'.
    #[serde(default)]
    single: Option<Tiling>,
    /// The share of the sixteen-bit peak that fused attention reaches forward and backward, for long sequences and heads of 128.
    pub attention: [f64; 2],
    /// What the smallest kernel takes on the device, from the end of the one before it.
    pub launch: Seconds,
    /// The link between devices of a node, where the run does not say another.
    pub link: String,
    /// What a device's node has of the network for each device, where the run does not say.
    pub network_rate: BytesPerSecond,
    /// Where the figures are from.
    pub source: String,
    /// Whether kernels on it were measured, or the efficiencies are taken from a kin.
    #[serde(default)]
    pub estimated: bool,
}

/// What products lose by being cut into tiles.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiling {
    /// What a tile costs beside its work, as that many more of the contracted dimension.
    pub product_ramp: f64,
    /// How fast efficiency falls with the tile's area: its power.
    pub small_tile: f64,
    /// How much of a wave that is not full is lost.
    pub quantisation: f64,
}

impl GpuKind {
    /// What products in a format lose by being cut into tiles.
    pub fn tiling(&self, format: ProductFormat) -> Tiling {
        let Self { product_ramp, small_tile, quantisation, .. } = *self;
        let of_tensor_cores = Tiling { product_ramp, small_tile, quantisation };
        if format == ProductFormat::Fp32 { self.single.unwrap_or(of_tensor_cores) } else { of_tensor_cores }
    }

    /// The dense peak of products in a format, or of the nearest wider one that the device has.
    pub fn peak(&self, format: ProductFormat) -> FlopsPerSecond {
        let mut format = Some(format);
        while let Some(one) = format {
            if let Some(&peak) = self.peak.get(&one) {
                return peak;
            }
            format = one.wider();
        }
        FlopsPerSecond::new(1.0)
    }

    /// Takes over what a topology states of a device: it may be changed there.
    pub(crate) fn take_data_sheet(&mut self, kind: &DeviceKind) {
        for (&precision, &peak) in &kind.peak {
            self.peak.insert(ProductFormat::of(precision), peak);
        }
        self.memory = kind.memory;
        self.memory_bandwidth = kind.memory_bandwidth;
    }

    /// Peaks, in every format, and memory so many times as fast.
    pub(crate) fn scale(&mut self, peak: f64, memory_bandwidth: f64) {
        self.peak.values_mut().for_each(|rate| *rate = *rate * peak);
        self.memory_bandwidth = self.memory_bandwidth * memory_bandwidth;
    }

    /// The share of [`GpuKind::peak`] that large products reach.
    pub fn product_efficiency(&self, format: ProductFormat) -> f64 {
        let mut format = Some(format);
        while let Some(one) = format {
            if let Some(&share) = self.product.get(&one) {
                return share;
            }
            format = one.wider();
        }
        0.7
    }
}

/// What joins the devices of a node.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkKind {
    /// Bus bandwidth (as nccl-tests define it) of a long ring over so many members; between two entries the smaller counts.
    pub ring: BTreeMap<usize, BytesPerSecond>,
    /// Bus bandwidth of an all-reduce in the switch (NVLS), where it has that, among all devices of a node.
    #[serde(default)]
    pub in_switch: Option<BytesPerSecond>,
    /// What one device sends to one other.
    pub point_to_point: BytesPerSecond,
    /// What one device sends to all others at once.
    pub all_to_all: BytesPerSecond,
    /// Devices that it joins, where those are more than share a host.
    #[serde(default)]
    pub domain: Option<usize>,
    /// From the call to the first byte of a collective, beyond NCCL's own figures.
    pub launch: Seconds,
    /// The share of NCCL's latency constants that applies.
    #[serde(default = "one")]
    pub latency_scale: f64,
    /// Where the figures are from.
    pub source: String,
}

impl LinkKind {
    /// The same wires, so many times as many.
    pub(crate) fn scale(&mut self, times: f64) {
        let rates = self.ring.values_mut().chain(&mut self.in_switch).chain([&mut self.point_to_point, &mut self.all_to_all]);
        rates.for_each(|rate| *rate = *rate * times);
    }
}

/// What joins the nodes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The share of the data sheet's rate that long messages reach.
    pub efficiency: f64,
    /// The share of NCCL's network latency constants that applies.
    pub latency_scale: f64,
    /// How many times as long a hop takes as on InfiniBand.
    #[serde(default = "one")]
    pub hop: f64,
    /// Where the figures are from.
    pub source: String,
}

impl Network {
    /// A hop's latency over NCCL's constant.
    pub fn latency(&self) -> f64 {
        self.latency_scale * self.hop
    }
}

/// A network that differs from the usual one by what a hop takes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkKind {
    hop: f64,
    source: String,
}

/// Devices, links and a network.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The device's name in the profiles.
    pub device: String,
    /// The device.
    pub gpu: GpuKind,
    /// What joins the devices of a node.
    pub link: LinkKind,
    /// What joins nodes.
    pub network: Network,
    /// Devices that the link joins.
    pub devices_per_node: usize,
    /// What a node sends to others, one way, by the data sheet.
    pub node_rate: BytesPerSecond,
}

/// What a fit found.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fitted {
    stacks: BTreeMap<String, FittedStack>,
    devices: BTreeMap<String, FittedDevice>,
    network: BTreeMap<String, f64>,
    /// The 10th and 90th percentile of measured over predicted of sources that are left out whole.
    #[serde(default)]
    unseen: Option<[f64; 2]>,
}

/// What a fit found of a device.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FittedDevice {
    /// Measured runs that it was fitted on.
    rows: usize,
    values: BTreeMap<String, f64>,
}

/// Runs that a device or a stack was fitted on at least, so that it does not count as assumed.
const FITTED_ROWS: usize = 3;

/// What a fit found of a stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FittedStack {
    /// Measured runs that it was fitted on.
    rows: usize,
    values: BTreeMap<String, f64>,
    spread: [f64; 2],
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksFile {
    links: BTreeMap<String, LinkKind>,
    network: Network,
    networks: BTreeMap<String, NetworkKind>,
}

/// All profiles.
#[derive(Clone, Debug)]
pub struct Profiles {
    devices: BTreeMap<String, GpuKind>,
    links: BTreeMap<String, LinkKind>,
    network: Network,
    networks: BTreeMap<String, NetworkKind>,
    stacks: BTreeMap<String, StackKind>,
    /// The 10th and 90th percentile of a measurement over its prediction under a stack that nothing was fitted on.
    pub unseen: [f64; 2],
}

static LIBRARY: LazyLock<Result<Profiles, ProfileError>> = LazyLock::new(|| Profiles::read(DEVICES, LINKS, STACKS, FITTED));

impl Profiles {
    /// What is compiled in.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`], which a test excludes.
    pub fn library() -> Result<&'static Self, ProfileError> {
        LIBRARY.as_ref().map_err(Clone::clone)
    }

    /// Reads the four files: what is known or assumed of devices, links and stacks, and what a fit found in place of that.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`] with the place.
    pub fn read(devices: &str, links: &str, stacks: &str, fitted: &str) -> Result<Self, ProfileError> {
        let LinksFile { links, network, networks } = parsed("links.yaml", links)?;
        let mut profiles = Self {
            devices: parsed("devices.yaml", devices)?,
            links,
            network,
            networks,
            stacks: parsed("stacks.yaml", stacks)?,
            unseen: [0.7, 1.4],
        };
        profiles.apply(&parsed("fitted.yaml", fitted)?)?;
        Ok(profiles)
    }

    fn apply(&mut self, fitted: &Fitted) -> Result<(), ProfileError> {
        let unknown = |what: &str| ProfileError::Unreadable { file: "fitted.yaml", reason: format!("no profile has {what}") };
        for (name, found) in &fitted.stacks {
            let stack = self.stacks.get_mut(name).ok_or_else(|| unknown(&format!("the stack {name}")))?;
            for (value, number) in &found.values {
                if !stack.set_value(value, *number) {
                    return Err(unknown(&format!("the value {value} of the stack {name}")));
                }
            }
            stack.spread = found.spread;
            stack.estimated = found.rows < FITTED_ROWS;
        }
        for (name, FittedDevice { rows, values }) in &fitted.devices {
            let device = self.devices.get_mut(name).ok_or_else(|| unknown(&format!("the device {name}")))?;
            for (value, number) in values {
                if !device.set_value(value, *number) {
                    return Err(unknown(&format!("the value {value} of the device {name}")));
                }
            }
            device.estimated &= *rows < FITTED_ROWS;
        }
        if let Some(unseen) = fitted.unseen {
            self.unseen = unseen;
            self.stacks.values_mut().filter(|stack| stack.estimated).for_each(|stack| stack.spread = unseen);
        }
        for (value, number) in &fitted.network {
            match value.as_str() {
                "efficiency" => self.network.efficiency = *number,
                "latency_scale" => self.network.latency_scale = *number,
                _ => return Err(unknown(&format!("the value {value} of the network"))),
            }
        }
        Ok(())
    }

    /// A device.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn gpu(&self, name: &str) -> Result<&GpuKind, ProfileError> {
        find(&self.devices, "device", name)
    }

    /// A link.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn link(&self, name: &str) -> Result<&LinkKind, ProfileError> {
        find(&self.links, "link", name)
    }

    /// A network by its name.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn network(&self, name: &str) -> Result<Network, ProfileError> {
        let NetworkKind { hop, source } = find(&self.networks, "network", name)?.clone();
        Ok(Network { hop, source, ..self.network.clone() })
    }

    /// A stack, by its name or by the one that users know it by.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn stack(&self, name: &str) -> Result<&StackKind, ProfileError> {
        let known = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |&(_, known)| known);
        find(&self.stacks, "stack", known)
    }

    /// Whether there is a stack of that very name, which is no other's.
    pub fn is_stack(&self, name: &str) -> bool {
        self.stacks.contains_key(name)
    }

    /// The names of the devices.
    pub fn gpu_names(&self) -> impl Iterator<Item = &str> {
        self.devices.keys().map(String::as_str)
    }

    /// The names of the stacks.
    pub fn stack_names(&self) -> impl Iterator<Item = &str> {
        self.stacks.keys().map(String::as_str).chain(ALIASES.map(|(alias, _)| alias))
    }

    /// A cluster of `devices` devices in nodes of `devices_per_node`; link and rate of a node are the device's and the network's own where left out.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn cluster(
        &self,
        device: &str,
        link: Option<&str>,
        devices_per_node: usize,
        devices: usize,
        node_rate: Option<BytesPerSecond>,
    ) -> Result<Cluster, ProfileError> {
        let gpu = self.gpu(device)?.clone();
        let link = self.link(link.unwrap_or(&gpu.link))?.clone();
        let network = self.network.clone();
        let node_rate = node_rate.unwrap_or(gpu.network_rate * devices_per_node.max(1) as f64);
        // Jobs that need several domains take a power of two of each, so that no group of theirs straddles two.
        let hosts = match link.domain {
            Some(domain) if devices > domain => 1 << domain.ilog2(),
            Some(_) => devices.max(devices_per_node),
            None => devices_per_node,
        };
        let hosts = hosts.max(1);
        // All hosts of a domain send side by side.
        let node_rate = node_rate * (hosts as f64 / devices_per_node.max(1) as f64);
        Ok(Cluster { device: device.into(), gpu, link, network, devices_per_node: hosts, node_rate })
    }
}

fn parsed<T: for<'a> Deserialize<'a>>(file: &'static str, text: &str) -> Result<T, ProfileError> {
    serde_saphyr::from_str(text).map_err(|error| ProfileError::Unreadable { file, reason: error.to_string() })
}

fn find<'a, T>(entries: &'a BTreeMap<String, T>, what: &'static str, name: &str) -> Result<&'a T, ProfileError> {
    entries.get(name).ok_or_else(|| ProfileError::Unknown { what, name: name.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_sound() {
        let profiles = Profiles::library().expect("readable");
        for (name, gpu) in &profiles.devices {
            assert!(profiles.links.contains_key(&gpu.link), "{name}'s link {}", gpu.link);
            assert!(gpu.multiprocessors > 0.0 && gpu.quantisation <= 1.0, "{name}");
            assert!(gpu.product.values().all(|share| (0.05..=1.0).contains(share)), "{name}");
        }
        for (name, stack) in &profiles.stacks {
            assert!(stack.spread[0] <= 1.0 && stack.spread[1] >= 1.0, "{name}");
            assert!(stack.product.keys().all(|device| profiles.devices.contains_key(device)), "{name}");
            if let Some(first) = &stack.variant_of {
                let first = &profiles.stacks[first];
                assert!(first.family == stack.family && first.variant_of.is_none(), "{name}");
            }
        }
    }

    #[test]
    fn what_is_unknown_is_named() {
        let profiles = Profiles::library().expect("readable");
        let error = profiles.gpu("abacus").expect_err("unknown");
        assert_eq!(error.to_string(), "no device profile is called `abacus`");
    }
}
