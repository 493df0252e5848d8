//! The cost model: how long one thing takes when nothing hinders it. It answers from a profile where something alike was measured; for GPUs
//! that nobody here has timed, from what was fitted on runs that others published ([`crate::gpu`]); else from the data sheet; and says
//! which of the three it did.
//!
//! It must not know Programs: it is asked about a kernel or a message, never about a layout or a schedule.

use crate::exchange::{Cost, ExchangeTable};
use crate::gpu::{Cluster, ProductFormat, ProfileError, Profiles, StackKind, Workload};
use crate::graphics::Graphics;
use crate::kernels::KernelTable;
use crate::roofline;
use crate::simulation::Quantile;
use crate::uncertainty::Uncertainty;
use crate::what_if::CostScale;
use foretell_models::Kernel;
use foretell_program::{Exchange, Phase, Profile, Reach, Sample};
use foretell_topologies::{Architecture, DeviceKind, LOCAL_DEVICE, LinkClass, Topology};
use foretell_units::{Bytes, DataType, FlopsPerSecond, Seconds};

/// Where an estimate comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// This very thing was measured.
    Measured,
    /// Things like it were measured.
    Interpolated,
    /// Only things quite unlike it in size were measured: outside the calibrated domain.
    Extrapolated,
    /// Whole runs on such a device, with such a software stack, were.
    Fitted,
    /// A data sheet and a stated efficiency.
    Roofline,
}

impl Source {
    /// Whether the answer lies within what was measured.
    pub fn is_calibrated(self) -> bool {
        matches!(self, Source::Measured | Source::Interpolated | Source::Fitted)
    }
}

/// A duration with its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The median.
    pub median: Seconds,
    /// The 10th percentile.
    pub p10: Seconds,
    /// The 90th percentile.
    pub p90: Seconds,
    /// Where it comes from.
    pub source: Source,
}

impl Estimate {
    /// The duration at a quantile.
    pub fn at(&self, quantile: Quantile) -> Seconds {
        match quantile {
            Quantile::P10 => self.p10,
            Quantile::Median => self.median,
            Quantile::P90 => self.p90,
        }
    }

    /// A data sheet's answer, with the spread that data sheets have.
    pub(crate) fn assumed(median: Seconds) -> Self {
        Self { median, p10: median / roofline::SPREAD, p90: median * roofline::SPREAD, source: Source::Roofline }
    }

    /// So many times as long.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { median: self.median * factor, p10: self.p10 * factor, p90: self.p90 * factor, ..self }
    }

    /// One without a spread of its own.
    pub(crate) fn steady(median: Seconds, source: Source) -> Self {
        Self { median, p10: median, p90: median, source }
    }

    /// The same on a device of so many times the speed.
    fn over(self, speed: f64) -> Self {
        Self { median: self.median / speed, p10: self.p10 / speed, p90: self.p90 / speed, ..self }
    }

    /// Each quantile changed; the second argument is what a data sheet's spread makes of a duration at it.
    fn changed(self, change: impl Fn(Seconds, f64) -> Seconds) -> Self {
        Self {
            median: change(self.median, 1.0),
            p10: change(self.p10, 1.0 / roofline::SPREAD),
            p90: change(self.p90, roofline::SPREAD),
            ..self
        }
    }

    pub(crate) fn measured(sample: &Sample) -> Self {
        Self { median: sample.median, p10: sample.p10, p90: sample.p90, source: Source::Measured }
    }
}

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
    /// From finishing an instruction until one that waits for it on another stream begins. It delays only who has to wait for it.
    pub stream_handoff: Estimate,
    /// What the host takes to launch a kernel of a step that is not launched as one, where a calibration says so ([`Profile::launch`]); what a software
    /// stack's launches take is in [`KernelCost::launch`].
    pub launch: Seconds,
    /// After a rank's last instruction.
    pub step_overhead: Estimate,
    /// After a rank's last instruction for each of its micro-batches.
    pub micro_batch_overhead: Seconds,
    /// What an exchange takes however small it is, beside the latency of its hops, where no sample says.
    pub exchange_overhead: Seconds,
    /// Reading one byte of samples.
    pub load_seconds_per_byte: Seconds,
    /// The share of the processor that communication and reading take while they run unhindered. Of communication that was
    /// measured, the sample's own share counts.
    pub communication_share: f64,
    /// The share of the processor that copies between its memory and the host's take: none where engines of their own make them.
    pub copy_share: f64,
    /// How fast communication grows beside a kernel where both want the processor; where that is not known as an operating system shares it,
    /// equal use until one needs no more.
    pub communication_growth: Option<f64>,
    /// What the host waits for before it launches more.
    pub host_waits: HostWaits,
    /// What an instruction of another stream takes of the processor beside what it does, where a kernel runs there. Nothing where streams
    /// take no processor from kernels.
    pub interruption: Seconds,
}

/// What exchanges get of a link's stated rate, where no sample says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkEfficiency {
    /// A device's ports. Default 0.8: nccl-tests' bus bandwidth is 235 of 300 GB/s on a DGX A100, 360 of 450 on an H100.
    pub device: f64,
    /// The memory of a host. Default 1: the stated rate is already that of copies.
    pub host_memory: f64,
    /// A network interface. Default 0.92: 23 of 25 GB/s of an HDR port, and 0.94 for TCP's frames on Ethernet.
    pub nic: f64,
    /// A switch's uplinks. Default 0.92, since what passes them are the same frames.
    pub switch: f64,
}

impl Default for LinkEfficiency {
    fn default() -> Self {
        Self { device: 0.8, host_memory: 1.0, nic: 0.92, switch: 0.92 }
    }
}

impl LinkEfficiency {
    /// Every link gives what it states.
    pub const IDEAL: Self = Self { device: 1.0, host_memory: 1.0, nic: 1.0, switch: 1.0 };

    /// What a profile's largest message made of each class of link, where one crossed it; the default for the others. The route's slowest
    /// link of the class is the one that bounded it.
    fn measured(profile: &Profile, topology: &Topology) -> Self {
        let efficiency = |reach, class| {
            let messages = profile.exchanges.iter().filter(|one| one.exchange == Exchange::SendReceive && one.reach == reach);
            let largest = messages.max_by_key(|message| message.bytes)?;
            let rates = topology.links().iter().filter(|link| link.class == class).map(|link| link.bandwidth.value());
            let slowest = rates.fold(f64::INFINITY, f64::min);
            let rate = largest.bytes as f64 / largest.time.median.value();
            // Below half of the rate something else was the bound: a processor, or a narrower link.
            Some(rate / slowest).filter(|share| (0.5..=1.0).contains(share))
        };
        let assumed = Self::default();
        Self {
            nic: efficiency(Reach::Switch, LinkClass::Nic).unwrap_or(assumed.nic),
            switch: efficiency(Reach::Fabric, LinkClass::Switch).unwrap_or(assumed.switch),
            ..assumed
        }
    }

    /// That of a link of a class.
    pub fn of(&self, class: LinkClass) -> f64 {
        match class {
            LinkClass::Device => self.device,
            LinkClass::HostMemory => self.host_memory,
            LinkClass::Nic => self.nic,
            LinkClass::Switch => self.switch,
        }
    }
}

/// What setting up a copy takes, however small it is: an estimate for want of a measurement, as it is of the order of a small copy over PCIe.
const COPY_LATENCY: Seconds = Seconds::new(10e-6);

/// What copies get of a slot's stated rate: large pinned copies reach 25 of 31 GB/s in PCIe 4 x16; an estimate for others.
const HOST_LINK_EFFICIENCY: f64 = 0.8;

/// How long things take on the devices of one topology.
#[derive(Clone, Debug)]
pub struct CostModel {
    kinds: Vec<KindCosts>,
    /// What exchanges get of the links that were not measured.
    pub links: LinkEfficiency,
    /// Bytes that a sender may be ahead of its receiver; messages of more than that wait for it. None without a profile of some kind.
    pub buffered: Bytes,
    /// How much slower than its costs say a device is over time: quantiles at equal steps of probability (see [`Profile::paces`]). None is
    /// below 1: costs are those of a device at its best, and a lower bound made of them has to stay one.
    pub paces: Vec<f64>,
    /// Cores that a lab's devices share in turn, where the profile was measured in one: device n is on core n modulo this.
    pub cores: Option<usize>,
    /// How far off step times that are made of these costs may be for what no cost says.
    pub uncertainty: Uncertainty,
    /// What a what-if question makes of all that.
    scale: CostScale,
    /// The 10th and 90th percentile of a step over its prediction, where that is known of such runs as a whole.
    pub step_spread: Option<[f64; 2]>,
}

#[derive(Clone, Debug)]
struct KindCosts {
    kind: DeviceKind,
    /// How fast it is beside a whole device of its figures, of which the samples are.
    speed: f64,
    parameters: Parameters,
    kernels: Option<KernelTable>,
    exchanges: Option<ExchangeTable>,
    /// The device that a what-if question is about.
    scaled_kind: Option<DeviceKind>,
    graphics: Option<Graphics>,
}

/// What a kernel takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelCost {
    /// On the device.
    pub time: Estimate,
    /// On the host, which launches kernels one after the other, ahead of the device where it can.
    pub launch: Seconds,
}

impl CostModel {
    /// A model of the topology's kinds of device. The profile is believed for the kind that it names, or that was made from the
    /// library device that it names; the data sheet for all others. Where it is of no kind of device here, nothing of it counts.
    pub fn new(profile: Option<&Profile>, topology: &Topology) -> Self {
        let kinds = topology.device_kinds();
        let profile = profile.filter(|profile| kinds.iter().any(|kind| is_of(profile, kind, topology)));
        let buffered = profile.map_or(Bytes::ZERO, |profile| Bytes::new(profile.buffered_bytes));
        let paces = profile.map(|profile| {
            let paces = profile.paces.iter().copied().filter(|pace| pace.is_finite());
            paces.map(|pace| pace.max(1.0)).collect()
        });
        Self {
            kinds: kinds
                .iter()
                .map(|kind| KindCosts::new(kind, profile.filter(|profile| is_of(profile, kind, topology))))
                .collect(),
            links: profile.map_or_else(LinkEfficiency::default, |profile| LinkEfficiency::measured(profile, topology)),
            buffered,
            paces: paces.unwrap_or_default(),
            cores: profile.filter(|_| topology.is_lab()).and_then(|profile| profile.machine.cores),
            uncertainty: Uncertainty::MEASURED,
            scale: CostScale::NONE,
            step_spread: None,
        }
    }

    /// The same with what is known of a software stack on those kinds of device that are in the profiles of GPUs and were not calibrated.
    ///
    /// # Errors
    /// [`ProfileError::Unknown`] where there is no such stack.
    pub fn with_stack(mut self, topology: &Topology, stack: &str, precision: DataType) -> Result<Self, ProfileError> {
        let profiles = Profiles::library()?;
        let stack = profiles.stack(stack)?;
        let clusters: Vec<_> = (0..self.kinds.len()).map(|kind| Graphics::cluster(profiles, topology, kind)).collect();
        let format = ProductFormat::of(precision);
        for (costs, cluster) in self.kinds.iter_mut().zip(clusters) {
            if let Some(cluster) = cluster.filter(|_| costs.kernels.is_none()) {
                costs.graphics = Some(Graphics::new(cluster, stack.clone(), format, Workload::default()));
            }
        }
        self.take_from_graphics();
        Ok(self)
    }

    /// A model of kinds of GPU under a software stack, of which everything is said: kind n is that of the n-th cluster.
    pub fn of_clusters(clusters: &[&Cluster], stack: &StackKind, format: ProductFormat, workload: Workload) -> Self {
        let kinds = clusters.iter().map(|&cluster| KindCosts {
            kind: Graphics::device_kind(cluster),
            speed: 1.0,
            parameters: roofline::parameters(Architecture::Gpu),
            kernels: None,
            exchanges: None,
            scaled_kind: None,
            graphics: Some(Graphics::new(cluster.clone(), stack.clone(), format, workload)),
        });
        let mut costs = Self {
            kinds: kinds.collect(),
            links: LinkEfficiency::IDEAL,
            buffered: Bytes::ZERO,
            paces: Vec::new(),
            cores: None,
            uncertainty: Uncertainty::NONE,
            scale: CostScale::NONE,
            step_spread: None,
        };
        costs.take_from_graphics();
        costs
    }

    /// What else follows from the stack.
    fn take_from_graphics(&mut self) {
        for costs in &mut self.kinds {
            if let Some(graphics) = &costs.graphics {
                costs.parameters = graphics.parameters();
            }
        }
        if let Some(graphics) = self.kinds.iter().find_map(|costs| costs.graphics.as_ref()) {
            self.links = graphics.link_efficiency();
            self.step_spread = Some(graphics.stack.spread);
            // Sends are put into NCCL's buffers, and frameworks post receives before they need them.
            self.buffered = Bytes::new(u64::MAX / 2);
        }
    }

    /// How long a kernel takes alone on a device of a kind (an index into [`Topology::device_kinds`]).
    pub fn kernel_time(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> Estimate {
        self.kernel_cost(kernel, accumulate, precision, kind).time
    }

    /// The same, and what its launch takes of the host.
    pub fn kernel_cost(&self, kernel: &Kernel, accumulate: bool, precision: DataType, kind: usize) -> KernelCost {
        let costs = &self.kinds[kind];
        if let Some(graphics) = &costs.graphics {
            let KernelCost { time, launch } = graphics.kernel_cost(kernel, accumulate, precision);
            return KernelCost { time: time.over(self.scale.speed), launch };
        }
        let whole = costs
            .kernels
            .as_ref()
            .and_then(|table| table.estimate(kernel, accumulate, precision, &costs.kind))
            .unwrap_or_else(|| Estimate::assumed(roofline::kernel_time(kernel, accumulate, precision, &costs.kind)));
        let scaled = match &costs.scaled_kind {
            None => whole,
            Some(scaled) => {
                let launch = roofline::launch(costs.kind.architecture);
                let alone = |kind| roofline::kernel_time(kernel, accumulate, precision, kind) - launch;
                let before = alone(&costs.kind);
                let ratio = if before > Seconds::ZERO { alone(scaled) / before } else { 1.0 } / self.scale.speed;
                // What was measured has no launch that could be told apart; its overhead is among the parameters.
                let launch = if whole.source == Source::Roofline { launch } else { Seconds::ZERO };
                whole.changed(|time, spread| (time - launch * spread) * ratio + launch * (spread * self.scale.launch))
            }
        };
        KernelCost { time: scaled.over(costs.speed), launch: Seconds::ZERO }
    }

    /// Answers for other devices and links from here on.
    pub(crate) fn rescale(&mut self, scale: CostScale) {
        self.scale = scale;
        for costs in &mut self.kinds {
            costs.scaled_kind = Some(costs.kind.scaled(scale.peak, scale.memory_bandwidth));
            if let Some(graphics) = &mut costs.graphics {
                graphics.rescale(&scale);
            }
        }
    }

    /// What an exchange takes over the links that are asked about, from what was measured over those that there are.
    pub(crate) fn rescaled(&self, cost: Cost, reach: Reach) -> Cost {
        let links = &self.scale.links;
        let (bandwidth, latency) = match reach {
            Reach::Node => (links.intra_node_bandwidth, links.intra_node_latency),
            _ => (links.inter_node_bandwidth, links.inter_node_latency),
        };
        Cost { latency: cost.latency * latency, flow: cost.flow / bandwidth, ..cost }
    }

    /// What a launch in a phase takes of the host over what it takes in the forward pass.
    pub fn launch_share(&self, kind: usize, phase: Phase) -> f64 {
        self.kinds[kind].graphics.as_ref().map_or(1.0, |graphics| graphics.launch_share(phase))
    }

    /// How long a device of a kind takes to copy so much to its host's memory, or from it: with the rate that exchanges get of what its link states
    /// where the device has such a link, and on top of `COPY_LATENCY`.
    pub fn copy_time(&self, kind: usize, bytes: Bytes) -> Estimate {
        let latency = if self.kinds[kind].has_host_link() { COPY_LATENCY } else { Seconds::ZERO };
        Estimate::assumed(self.copy_seconds_per_byte(kind) * bytes.value() + latency)
    }

    /// What each byte of it takes.
    pub fn copy_seconds_per_byte(&self, kind: usize) -> Seconds {
        let costs = &self.kinds[kind];
        let (share, speed) = if costs.has_host_link() { (HOST_LINK_EFFICIENCY, 1.0) } else { (1.0, costs.speed) };
        Seconds::new(1.0 / (costs.kind.host_rate().value() * share * speed))
    }

    /// What the launch of a collective or a message takes of the host.
    pub fn exchange_launch(&self, kind: usize) -> Seconds {
        self.kinds[kind].graphics.as_ref().map_or(Seconds::ZERO, Graphics::exchange_launch)
    }

    /// The rate that no product of matrices passes on a kind of device, by its number among the topology's; nothing where the profiles of GPUs do not
    /// say what products take there.
    pub fn fastest_products(&self, kind: usize) -> Option<FlopsPerSecond> {
        let rate = self.kinds.get(kind)?.graphics.as_ref()?.fastest_products();
        Some(rate * self.scale.speed)
    }

    /// A kind that is known by the profiles of GPUs.
    /// Whether the profiles of GPUs say what collectives take on devices of a kind, by its number among the topology's.
    pub fn knows_collectives(&self, kind: usize) -> bool {
        kind < self.kind_count() && self.graphics(kind).is_some()
    }

    /// Whether ranks on a kind of device that share out a sequence have as much of it to do as each other ([`StackKind::balances_parts`]).
    pub(crate) fn balances_parts(&self, kind: usize) -> bool {
        self.graphics(kind).is_some_and(|graphics| graphics.stack.balances_parts)
    }

    pub(crate) fn graphics(&self, kind: usize) -> Option<&Graphics> {
        self.kinds[kind].graphics.as_ref()
    }

    /// How fast a kind of device is beside a whole device of its figures.
    pub(crate) fn speed(&self, kind: usize) -> f64 {
        self.kinds[kind].speed
    }

    /// The same of a kind that has a share of its processor's time: it goes at a whole device's speed until its budget of a period is used up.
    pub(crate) fn quota(&self, kind: usize) -> Option<f64> {
        let costs = &self.kinds[kind];
        costs.kind.cpu_quota.filter(|&share| share < 1.0).map(|_| costs.speed).filter(|&speed| speed > 0.0 && speed < 1.0)
    }

    /// What a kind of device costs beside its kernels.
    pub fn parameters(&self, kind: usize) -> &Parameters {
        &self.kinds[kind].parameters
    }

    /// The same, to change: for what-if questions, and for what a calibration found out otherwise.
    pub fn parameters_mut(&mut self, kind: usize) -> &mut Parameters {
        &mut self.kinds[kind].parameters
    }

    /// Its kinds of device and after them those of another: of a job beside, which may have another stack. What is the same for all kinds is
    /// this one's, but that links give what they give the more efficient of the two.
    pub(crate) fn and(mut self, other: &CostModel) -> Self {
        self.kinds.extend(other.kinds.iter().cloned());
        let (own, theirs) = (self.links, other.links);
        self.links = LinkEfficiency {
            device: own.device.max(theirs.device),
            host_memory: own.host_memory.max(theirs.host_memory),
            nic: own.nic.max(theirs.nic),
            switch: own.switch.max(theirs.switch),
        };
        self
    }

    /// How many kinds of device it knows.
    pub fn kind_count(&self) -> usize {
        self.kinds.len()
    }

    /// The exchanges that were measured on devices of a kind.
    pub(crate) fn exchanges(&self, kind: usize) -> Option<&ExchangeTable> {
        self.kinds[kind].exchanges.as_ref()
    }

    /// The name of a kind.
    pub(crate) fn kind_name(&self, kind: usize) -> &str {
        &self.kinds[kind].kind.name
    }
}

/// Whether a profile was measured on a kind of device: on that very kind, on the library's device that it was made from, on one that is
/// alike but for the share that it has of a core, or, for a lab's devices, on this machine's cores, of which they are made.
fn is_of(profile: &Profile, kind: &DeviceKind, topology: &Topology) -> bool {
    let measured = || topology.device_kinds().iter().find(|one| one.name == profile.device);
    kind.name == profile.device
        || kind.base.as_ref() == Some(&profile.device)
        || measured().is_some_and(|measured| measured.is_like(kind))
        || (topology.is_lab() && kind.architecture == Architecture::Cpu && profile.device == LOCAL_DEVICE)
}

impl KindCosts {
    /// Whether a link joins it to its host; a processor's memory is the host's.
    fn has_host_link(&self) -> bool {
        self.kind.architecture != Architecture::Cpu
    }

    /// The costs of a kind, for which the profile holds if there is one.
    fn new(kind: &DeviceKind, profile: Option<&Profile>) -> Self {
        let assumed = roofline::parameters(kind.architecture);
        let Some(profile) = profile else {
            let speed = kind.speed();
            return Self {
                kind: kind.clone(),
                speed,
                parameters: assumed.over(speed),
                kernels: None,
                exchanges: None,
                scaled_kind: None,
                graphics: None,
            };
        };
        let measured = profile.speeds.iter().find(|one| one.device == kind.name && one.speed > 0.0);
        let speed = measured.map_or(kind.speed(), |one| one.speed);
        let parameters = Parameters {
            instruction_overhead: Estimate::measured(&profile.instruction_overhead),
            stream_handoff: Estimate::measured(&profile.stream_handoff),
            launch: profile.launch,
            step_overhead: Estimate::measured(&profile.step_overhead),
            load_seconds_per_byte: profile.load_seconds_per_byte,
            communication_share: profile.communication_share.clamp(0.0, 1.0),
            copy_share: if kind.architecture == Architecture::Cpu { profile.communication_share.clamp(0.0, 1.0) } else { 0.0 },
            communication_growth: profile.communication_growth.filter(|growth| *growth > 0.0),
            interruption: profile.interruption,
            ..assumed
        };
        let kernels = KernelTable::new(&profile.kernels, kind);
        let exchanges = ExchangeTable::new(&profile.exchanges);
        Self {
            kind: kind.clone(),
            speed,
            parameters: parameters.over(speed),
            kernels: Some(kernels),
            exchanges,
            scaled_kind: None,
            graphics: None,
        }
    }
}

impl Parameters {
    /// The same on a device of so many times the speed.
    fn over(self, speed: f64) -> Self {
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
