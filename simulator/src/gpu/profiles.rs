//! The library of profiles, read from the compiled-in YAML files. It must not know what a constant
//! means: the types that it deserialises into do.

use super::cluster::{Cluster, ClusterPaces};
use super::defaults::one;
use super::device::GpuProfile;
use super::fitted::{FITTED_ROWS, Fitted};
use super::link::{LinkProfile, NetworkProfile};
use super::stack::{StackLimits, StackProfile};
use foretell_program::Stack;
use foretell_topologies::DeviceKind;
use foretell_units::{BytesPerSecond, DataType};
use miette::Diagnostic;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use thiserror::Error;

const DEVICES: &str = include_str!("profiles/devices.yaml");
const LINKS: &str = include_str!("profiles/links.yaml");
const STACKS: &str = concat!(
    include_str!("profiles/stacks/megatron-deepspeed.yaml"),
    include_str!("profiles/stacks/megatron-core.yaml"),
    include_str!("profiles/stacks/pytorch.yaml"),
    include_str!("profiles/stacks/jax.yaml"),
    include_str!("profiles/stacks/deep-learning-examples.yaml"),
    include_str!("profiles/stacks/foretell.yaml"),
);
const FITTED: &str = include_str!("profiles/fitted.yaml");

/// Names that plans may use for a stack, each with the name of its profile.
const ALIASES: [(&str, &str); 6] = [
    ("fsdp2", "torchtitan"),
    ("megatron-lm", "megatron-core"),
    ("deepspeed", "deepspeed-3d"),
    ("axolotl", "hf-trainer"),
    ("llama-factory", "hf-trainer"),
    ("accelerate", "hf-trainer"),
];

/// Largest ratio between the peaks, or the memory bandwidths, of two devices that count as similar.
/// An assumption.
const SIMILAR: f64 = 2.5;

/// Interval of a measurement over its prediction under stacks without fitted runs, unless
/// `fitted.yaml` has one. An assumption.
const UNSEEN: [f64; 2] = [0.7, 1.4];

/// An error in the profiles or in a request for one.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
pub enum ProfileError {
    /// A profile file is malformed.
    #[error("profile `{file}`: {reason}")]
    #[diagnostic(code(profile::unreadable))]
    Unreadable {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// No profile has the requested name.
    #[error("no {kind} profile is called `{name}`")]
    #[diagnostic(code(profile::unknown))]
    Unknown {
        /// `device`, `link`, `network` or `stack`.
        kind: &'static str,
        /// The requested name.
        name: String,
    },
}

/// Contents of `profiles/links.yaml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinksFile {
    links: BTreeMap<String, LinkProfile>,
    network: NetworkProfile,
    networks: BTreeMap<String, NetworkVariant>,
}

/// What a transport changes about the usual network.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkVariant {
    #[serde(default = "one")]
    hop: f64,
    #[serde(default = "one")]
    share: f64,
    #[serde(default)]
    most: Option<BytesPerSecond>,
    source: String,
}

/// All profiles of devices, links, networks and software stacks.
#[derive(Clone, Debug)]
pub struct Profiles {
    devices: BTreeMap<String, GpuProfile>,
    links: BTreeMap<String, LinkProfile>,
    network: NetworkProfile,
    networks: BTreeMap<String, NetworkVariant>,
    stacks: BTreeMap<String, StackProfile>,
    /// 10th and 90th percentile of a measurement over its prediction, under a stack without fitted
    /// runs.
    pub unseen: [f64; 2],
    /// 10th and 90th percentile of a measurement over its prediction, on a device without fitted
    /// runs. `None` if unknown.
    pub unseen_device: Option<[f64; 2]>,
    /// Number of values that measured runs determined.
    fitted_values: usize,
}

static LIBRARY: LazyLock<Result<Profiles, ProfileError>> = LazyLock::new(|| Profiles::read(DEVICES, LINKS, STACKS, FITTED));

impl Profiles {
    /// Returns the profiles that are compiled in.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`] if a file is malformed. A test excludes this.
    pub fn library() -> Result<&'static Self, ProfileError> {
        LIBRARY.as_ref().map_err(Clone::clone)
    }

    /// Returns the compiled-in profiles without fitted values.
    ///
    /// # Errors
    /// As [`Profiles::library`].
    pub fn priors() -> Result<Self, ProfileError> {
        Self::with_fitted("stacks: {}\ndevices: {}\nnetwork: {}\n")
    }

    /// Returns the compiled-in profiles with the values of another `fitted.yaml`.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`], with the position in the text.
    pub fn with_fitted(fitted: &str) -> Result<Self, ProfileError> {
        Self::read(DEVICES, LINKS, STACKS, fitted)
    }

    /// Returns the number of values that measured runs determined. Stacks share most of them.
    pub fn fitted_values(&self) -> usize {
        self.fitted_values
    }

    /// Returns a value of the network by name, or `None` if no value has that name.
    pub fn network_value(&self, name: &str) -> Option<f64> {
        self.network.value(name)
    }

    /// Reads the texts of the profile files. `devices`, `links` and `stacks` have the priors, and
    /// `fitted` has the values that replace some of them.
    ///
    /// # Errors
    /// [`ProfileError::Unreadable`], with the position in the file.
    pub fn read(devices: &str, links: &str, stacks: &str, fitted: &str) -> Result<Self, ProfileError> {
        let LinksFile { links, network, networks } = parse("links.yaml", links)?;
        let stacks: BTreeMap<String, StackProfile> = parse("stacks", stacks)?;
        for (name, stack) in &stacks {
            if let Some(key) = stack.unknown_key() {
                let reason = format!("the stack `{name}` has the unknown key `{key}`");
                return Err(ProfileError::Unreadable { file: "stacks", reason });
            }
        }
        let mut devices: BTreeMap<String, GpuProfile> = parse("devices.yaml", devices)?;
        for (name, device) in &mut devices {
            let malformed = |reason| ProfileError::Unreadable { file: "devices.yaml", reason };
            let sheet = DeviceKind::library(name).map_err(|error| malformed(error.to_string()))?;
            let sheet = sheet.ok_or_else(|| malformed(format!("the device library has no `{name}`")))?;
            device.take_data_sheet(&sheet);
        }
        let mut profiles =
            Self { devices, links, network, networks, stacks, unseen: UNSEEN, unseen_device: None, fitted_values: 0 };
        profiles.apply(&parse("fitted.yaml", fitted)?)?;
        Ok(profiles)
    }

    fn apply(&mut self, fitted: &Fitted) -> Result<(), ProfileError> {
        let unknown = |what: &str| ProfileError::Unreadable { file: "fitted.yaml", reason: format!("no profile has {what}") };
        for (name, found) in &fitted.stacks {
            let stack = self.stacks.get_mut(name).ok_or_else(|| unknown(&format!("the stack `{name}`")))?;
            for (value, number) in &found.values {
                if !stack.set_value(value, *number) {
                    return Err(unknown(&format!("the value `{value}` of the stack `{name}`")));
                }
            }
            stack.spread = found.spread;
            stack.estimated = found.rows < FITTED_ROWS;
        }
        self.devices.values_mut().for_each(|device| device.unseen = true);
        for (name, rows) in &fitted.devices {
            let device = self.devices.get_mut(name).ok_or_else(|| unknown(&format!("the device `{name}`")))?;
            device.unseen = *rows < FITTED_ROWS;
            device.estimated &= device.unseen;
        }
        if let Some(unseen) = fitted.unseen {
            self.unseen = unseen;
            self.stacks.values_mut().filter(|stack| stack.estimated).for_each(|stack| stack.spread = unseen);
        }
        for (value, number) in &fitted.network {
            if !self.network.set_value(value, *number) {
                return Err(unknown(&format!("the value `{value}` of the network")));
            }
        }
        self.fitted_values = fitted.free_values;
        self.unseen_device = fitted.unseen_device;
        // Devices without fitted runs have the interval measured on left-out devices or, if that is
        // unknown, the one measured on left-out sources.
        let spread = self.unseen_device.or(fitted.unseen);
        self.devices.values_mut().filter(|device| device.unseen).for_each(|device| device.spread = spread);
        Ok(())
    }

    /// Returns the profile of a device.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn gpu(&self, name: &str) -> Result<&GpuProfile, ProfileError> {
        find(&self.devices, "device", name)
    }

    /// Returns the name of the device profile most like `kind`: of the profiles of the same
    /// architecture whose efficiencies are not estimated, the one nearest in peak half-precision
    /// rate and memory bandwidth. `None` for CPUs, and if no device is within a factor of `SIMILAR`
    /// in both.
    pub fn similar_gpu(&self, kind: &DeviceKind) -> Option<&str> {
        let peak = |kind: &DeviceKind| {
            let rates = [DataType::Bf16, DataType::Fp16].into_iter().filter_map(|format| kind.peak_rate(format));
            rates.reduce(|left, right| if right > left { right } else { left })
        };
        let own_peak = peak(kind)?;
        let distance = |name: &str| {
            let other = DeviceKind::library(name).ok()??;
            let ratios = [own_peak / peak(&other)?, kind.memory_bandwidth / other.memory_bandwidth].map(|ratio| ratio.ln().abs());
            let is_similar = other.architecture == kind.architecture && ratios.iter().all(|ratio| *ratio < SIMILAR.ln());
            is_similar.then(|| ratios.iter().sum::<f64>())
        };
        let measured = self.devices.iter().filter(|(_, gpu)| !gpu.estimated);
        let candidates = measured.filter_map(|(name, _)| Some((name.as_str(), distance(name)?)));
        candidates.min_by(|candidate, other| candidate.1.total_cmp(&other.1)).map(|(name, _)| name)
    }

    /// Returns the name of the profile that an alias stands for. `None` if the name is no alias.
    pub fn alias(&self, name: &str) -> Option<&'static str> {
        ALIASES.iter().find(|(alias, _)| *alias == name).map(|&(_, known)| known)
    }

    /// Returns the profile of a link.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn link(&self, name: &str) -> Result<&LinkProfile, ProfileError> {
        find(&self.links, "link", name)
    }

    /// Returns the profile of a network by its transport.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn network(&self, name: &str) -> Result<NetworkProfile, ProfileError> {
        let NetworkVariant { hop, share, most, source } = find(&self.networks, "network", name)?.clone();
        let NetworkProfile { efficiency, latency_scale, .. } = self.network;
        Ok(NetworkProfile { efficiency: efficiency * share, latency_scale, hop, most, source })
    }

    /// Returns the profile of a stack by its name or by an alias.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`].
    pub fn stack(&self, name: &str) -> Result<&StackProfile, ProfileError> {
        find(&self.stacks, "stack", self.alias(name).unwrap_or(name))
    }

    /// Returns whether a name is that of a stack's profile, not an alias.
    pub fn is_stack(&self, name: &str) -> bool {
        self.stacks.contains_key(name)
    }

    /// Returns the names of the devices.
    pub fn gpu_names(&self) -> impl Iterator<Item = &str> {
        self.devices.keys().map(String::as_str)
    }

    /// Returns the names of the stacks and their aliases.
    pub fn stack_names(&self) -> impl Iterator<Item = &str> {
        self.stacks.keys().map(String::as_str).chain(ALIASES.map(|(alias, _)| alias))
    }

    /// Returns a cluster of `devices` devices in nodes of `devices_per_node`. If `link` or
    /// `node_rate` is `None`, the device's usual value applies.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`] if the device or the link has no profile.
    pub fn cluster(
        &self,
        device: &str,
        link: Option<&str>,
        devices_per_node: usize,
        devices: usize,
        node_rate: Option<BytesPerSecond>,
    ) -> Result<Cluster, ProfileError> {
        let gpu = self.gpu(device)?.clone();
        // The device's usual link may be a special case of the requested link, as `pcie4-host` is
        // of `pcie4`.
        let link = self.link(link.filter(|link| !gpu.link.starts_with(*link)).unwrap_or(&gpu.link))?.clone();
        let network = self.network.clone();
        let node_rate = node_rate.unwrap_or(gpu.network_rate * devices_per_node.max(1) as f64);
        let joined = match link.domain {
            // Jobs in several domains use a power of two of devices in each, so that no group
            // straddles two domains.
            Some(domain) if devices > domain => 1 << domain.ilog2(),
            Some(_) => devices.max(devices_per_node),
            None => devices_per_node,
        };
        let joined = joined.max(1);
        // All hosts of a domain send at the same time.
        let node_rate = node_rate * (joined as f64 / devices_per_node.max(1) as f64);
        Ok(Cluster { device: device.into(), gpu, link, network, devices_per_node: joined, node_rate, paces: ClusterPaces::USUAL })
    }
}

fn parse<T: for<'a> Deserialize<'a>>(file: &'static str, text: &str) -> Result<T, ProfileError> {
    serde_saphyr::from_str(text).map_err(|error| ProfileError::Unreadable { file, reason: error.to_string() })
}

fn find<'a, T>(entries: &'a BTreeMap<String, T>, kind: &'static str, name: &str) -> Result<&'a T, ProfileError> {
    entries.get(name).ok_or_else(|| ProfileError::Unknown { kind, name: name.into() })
}

impl StackLimits {
    /// The limits of a stack. `None` for our own executor, and for stacks whose limits are unknown.
    pub fn of(stack: &Stack) -> Option<&'static Self> {
        Profiles::library().ok()?.stack(stack.name()).ok()?.limits.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::ProductFormat;
    use foretell_program::Schedule;
    use foretell_topologies::{Architecture, Transport};

    fn limits(stack: &str) -> &'static StackLimits {
        StackLimits::of(&Stack::new(stack)).expect("the stack has limits")
    }

    #[test]
    fn frameworks_that_shard_key_heads_divide_them() {
        assert!(["megatron-core", "torchtitan"].map(|stack| limits(stack).divides_key_heads).iter().all(|&divides| divides));
        assert!(!limits("ddp").divides_key_heads);
    }

    #[test]
    fn no_framework_of_nvidia_has_zero_bubble_schedules() {
        for stack in ["megatron-core", "nemo-2024", "megatron-bridge", "mlperf-nemo"] {
            assert!(limits(stack).has(Schedule::Interleaved) && !limits(stack).has(Schedule::ZeroBubbleH1));
        }
        assert!(limits("torchtitan").has(Schedule::ZeroBubbleV) && !limits("fsdp2").has(Schedule::ZeroBubbleH1));
        assert!(!limits("megatron-deepspeed").has(Schedule::Interleaved));
        assert!(limits("maxtext-tpu").has(Schedule::Gpipe) && !limits("maxtext").has(Schedule::OneForwardOneBackward));
    }

    #[test]
    fn limits_are_not_those_of_the_stack_that_figures_begin_with() {
        for stack in ["foretell", "internevo", "mlperf-adapters", "paxml", "paxml-2023", "pytorch-eager", "mlperf-bert"] {
            assert_eq!(StackLimits::of(&Stack::new(stack)), None, "{stack}");
        }
        for stack in ["hf-trainer", "trl", "torchtune", "axolotl", "mosaicml-composer", "nemo-automodel", "fsdp"] {
            assert!(!limits(stack).splits_models && limits(stack).shards_state, "{stack}");
        }
        assert!(!limits("hf-deepspeed-4.48").splits_models && limits("deepspeed-3d").splits_models);
        assert!(!limits("nanogpt-compiled").shards_state && !limits("ddp").shards_state);
    }

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
            assert!(stack.products.product.keys().all(|device| profiles.devices.contains_key(device)), "{name}");
            if let Some(base) = &stack.variant_of {
                let base = &profiles.stacks[base];
                assert!(base.family == stack.family && base.variant_of.is_none(), "{name}");
            }
        }
    }

    #[test]
    fn no_device_exceeds_its_best_measured_shape() {
        let profiles = Profiles::library().expect("readable");
        // The share of peak of the best shape of a product in bf16: mamf_matmul.csv
        // (stas00/ml-engineering).
        let measured = [
            ("a100-sxm-80g", 0.869),
            ("a100-pcie-80g", 0.811),
            ("h100-sxm-80g", 0.803),
            ("gh200-96g", 0.838),
            ("b200-sxm-180g", 0.776),
            ("b300-sxm-288g", 0.786),
            ("gb200", 0.729),
            ("mi300x", 0.514),
            ("mi325x", 0.604),
            ("mi355x", 0.680),
        ];
        for (name, best) in measured {
            let share = profiles.gpu(name).expect("known").product[&ProductFormat::of(DataType::Bf16)];
            assert!(share < best, "{name}: a share of {share}, but the best shape reaches {best}");
        }
    }

    #[test]
    fn every_accelerator_of_the_device_library_has_a_profile() {
        let profiles = Profiles::library().expect("readable");
        for name in DeviceKind::library_names().expect("sound") {
            let kind = DeviceKind::library(name).expect("sound").expect("listed");
            if kind.architecture == Architecture::Cpu {
                continue;
            }
            let gpu = profiles.gpu(name).expect("a profile");
            assert_eq!((gpu.memory, gpu.memory_bandwidth), (kind.memory, kind.memory_bandwidth), "{name}");
            for (&format, &peak) in &kind.peak {
                assert!(gpu.peak(ProductFormat::of(format)) >= peak, "{name} {format}");
            }
        }
    }

    #[test]
    fn every_transport_of_a_topology_has_a_network() {
        let profiles = Profiles::library().expect("readable");
        let networks = Transport::ALL.map(|transport| profiles.network(transport.name()).expect("a profile"));
        assert!(networks.iter().all(|network| network.efficiency <= networks[0].efficiency && network.hop >= 1.0));
    }

    #[test]
    fn sockets_do_not_reach_the_rate_of_fast_ports() {
        let profiles = Profiles::library().expect("readable");
        let mut cluster = profiles.cluster("gh200-96g", None, 4, 8, Some(BytesPerSecond::new(100e9))).expect("known");
        let by_rdma = cluster.reached_node_rate();
        cluster.network = profiles.network("tcp").expect("known");
        // Measured on two such nodes: 122.6 GB/s of bus bandwidth by libfabric, 6.0 by TCP.
        assert!(cluster.reached_node_rate() / by_rdma < 0.1);
        cluster.node_rate = BytesPerSecond::new(1.25e9);
        assert!(cluster.reached_node_rate() / cluster.node_rate > 0.7);
    }

    #[test]
    fn an_unknown_profile_is_named_in_the_error() {
        let profiles = Profiles::library().expect("readable");
        let error = profiles.gpu("abacus").expect_err("unknown");
        assert_eq!(error.to_string(), "no device profile is called `abacus`");
    }

    #[test]
    fn an_unknown_key_of_a_stack_is_refused() {
        let stacks = STACKS.replace("\nddp:\n", "\nddp:\n  hair: long\n");
        let fitted = "stacks: {}\ndevices: {}\nnetwork: {}\n";
        let error = Profiles::read(DEVICES, LINKS, &stacks, fitted).expect_err("unknown key");
        assert!(error.to_string().contains("`ddp` has the unknown key `hair`"), "{error}");
    }
}
