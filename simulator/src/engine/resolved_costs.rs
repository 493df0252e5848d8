//! The costs of all communication of a run, resolved at one quantile before the run begins. Each
//! distinct collective of a group and each distinct message of a channel is resolved once.

use crate::cost::{CommunicationCost, CostModel, Quantile};
use crate::lowering::{Channel, Lowered, ProcessGroup};
use crate::network::{FairShare, Shape};
use foretell_units::{Picoseconds, Seconds};
use std::collections::BTreeSet;

/// The costs of all communication.
#[derive(Debug)]
pub(crate) struct ResolvedCosts<'a> {
    costs: Vec<ResolvedCost<'a>>,
    /// The start of each group's costs in `costs`, then of each channel's, and the end of the last
    /// one's.
    first: Vec<u32>,
    /// For each processor, whether it can never saturate, even if all its communication runs at the
    /// same time.
    never_saturate: Vec<bool>,
    /// Communication that no sample covers.
    pub(super) uncalibrated: BTreeSet<String>,
}

/// The cost of one collective or message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResolvedCost<'a> {
    /// Time until data flow.
    pub(crate) latency: Picoseconds,
    /// Time that data flow without contention.
    pub(crate) flow: Picoseconds,
    /// `flow`, not rounded.
    pub(super) flow_seconds: Seconds,
    /// Bytes that each of its flows carries.
    pub(crate) bytes: f64,
    /// The rate of each of its flows without contention.
    pub(super) bytes_per_second: f64,
    /// The share of a member's processor that it needs while data flow. `None` if it was not
    /// measured.
    pub(super) processor_share: Option<f64>,
    pub(super) shape: Option<&'a Shape>,
    /// Whether it loads no link and no processor that can saturate.
    pub(super) is_uncontended: bool,
    /// The rates of a kernel and of this collective while both run on one processor. `None` if the
    /// group has several simulated members, if the collective loads links, or if it needs no
    /// processor.
    pub(super) rates_beside_kernel: Option<[f64; 2]>,
}

/// A group or a channel.
#[derive(Clone, Copy, Debug)]
pub(super) enum Communicator<'a> {
    Group(&'a ProcessGroup),
    /// The channel, and its index among the channels.
    Channel(u32, &'a Channel),
}

/// The communicator number `number`: groups come first, then channels.
pub(super) fn communicator<'a>(lowered: &'a Lowered<'a>, number: u32) -> Communicator<'a> {
    match lowered.groups.get(number as usize) {
        Some(group) => Communicator::Group(group),
        None => {
            let channel = number - lowered.groups.len() as u32;
            Communicator::Channel(channel, &lowered.channels[channel as usize])
        }
    }
}

impl<'a> ResolvedCosts<'a> {
    pub(crate) fn new(lowered: &'a Lowered<'a>, quantile: Quantile) -> Self {
        let mut uncalibrated = BTreeSet::new();
        let (mut costs, mut first) = (Vec::new(), Vec::with_capacity(lowered.groups.len() + lowered.channels.len() + 1));
        for group in &lowered.groups {
            first.push(costs.len() as u32);
            for index in 0..group.collectives.distinct().len() {
                let (cost, shape) = group.cost(lowered.costs, index, quantile);
                if !cost.source.is_calibrated() || group.is_stepped(index) {
                    let kind = group.collectives.distinct()[index].kind;
                    uncalibrated.insert(format!("{} of {} ranks", kind.name(), group.size));
                }
                costs.push(ResolvedCost::new(&cost, shape));
            }
        }
        for channel in &lowered.channels {
            first.push(costs.len() as u32);
            for index in 0..channel.bytes.distinct().len() {
                let cost = channel.cost(lowered.costs, index, quantile);
                if !cost.source.is_calibrated() {
                    uncalibrated.insert("send and receive".into());
                }
                costs.push(ResolvedCost::new(&cost, Some(&channel.shape)));
            }
        }
        first.push(costs.len() as u32);
        let mut resolved = Self { costs, first, never_saturate: Vec::new(), uncalibrated };
        resolved.find_contention(lowered);
        resolved.find_rates_beside_kernels(lowered);
        resolved
    }

    /// The cost of the distinct collective or message `index` of a communicator.
    pub(crate) fn of(&self, communicator: u32, index: u32) -> &ResolvedCost<'a> {
        &self.costs[(self.first[communicator as usize] + index) as usize]
    }

    /// A rank's processor, and the share of it that communication with this cost needs: zero if
    /// the processor can never saturate.
    pub(crate) fn processor_share(&self, lowered: &Lowered<'_>, cost: &ResolvedCost<'_>, rank: u32) -> (u32, f64) {
        let own = &lowered.ranks[rank as usize];
        (own.processor, if self.never_saturates(lowered, rank) { 0.0 } else { share_of(lowered, cost, own.kind) })
    }

    /// A rank's processor, and the share of it that a kernel needs: 1, or 0 if the processor can
    /// never saturate.
    pub(crate) fn processor(&self, lowered: &Lowered<'_>, rank: u32) -> (u32, f64) {
        let never = self.never_saturates(lowered, rank);
        (lowered.ranks[rank as usize].processor, if never { 0.0 } else { 1.0 })
    }

    /// Processor time that communication with this cost takes on a device of this kind, independent
    /// of contention.
    pub(crate) fn processor_time(lowered: &Lowered<'_>, cost: &ResolvedCost<'_>, kind: usize) -> Picoseconds {
        (cost.flow_seconds * share_of(lowered, cost, kind)).into()
    }

    /// A rank's processor, and the share of it that communication needs if that share was not
    /// measured. The share is zero if the processor can never saturate.
    pub(super) fn communication_share(&self, lowered: &Lowered<'_>, rank: u32) -> (u32, f64) {
        let own = &lowered.ranks[rank as usize];
        (own.processor, if self.never_saturates(lowered, rank) { 0.0 } else { unmeasured_share(lowered, own.kind) })
    }

    /// Whether a rank's processor can never saturate.
    pub(super) fn never_saturates(&self, lowered: &Lowered<'_>, rank: u32) -> bool {
        self.never_saturate[lowered.ranks[rank as usize].processor as usize - lowered.first_processor()]
    }

    /// Finds the processors that cannot saturate even if all their groups and channels communicate
    /// at the same time (each runs one communication at a time). Then marks as uncontended the
    /// communication that loads only such processors and no link.
    fn find_contention(&mut self, lowered: &Lowered<'_>) {
        let first = lowered.first_processor();
        let mut demands = vec![0.0; lowered.processors];
        for rank in &lowered.ranks {
            let demand = &mut demands[rank.processor as usize - first];
            let list = &lowered.lists[rank.list];
            let is_busy = list.uses_processor || list.communication_overlaps;
            let is_interrupted = lowered.costs.parameters(rank.kind).interruption > Seconds::ZERO;
            // A quota may stop the device.
            if is_busy || is_interrupted || lowered.quota(rank).is_some() {
                *demand += f64::INFINITY;
            }
            let channels = rank.sends.iter().chain(&rank.receives).map(|&channel| channel + lowered.groups.len() as u32);
            for communicator in rank.groups.iter().copied().chain(channels) {
                let shares = self.costs[self.range(communicator)].iter().map(|cost| share_of(lowered, cost, rank.kind));
                let is_stepped = lowered.groups.get(communicator as usize).is_some_and(|group| !group.hops.is_empty());
                let share_of_steps = if is_stepped { unmeasured_share(lowered, rank.kind) } else { 0.0 };
                *demand += shares.fold(share_of_steps, f64::max);
            }
        }
        self.never_saturate = demands.iter().map(|&demand| demand <= 1.0).collect();
        for number in 0..self.first.len() as u32 - 1 {
            let never_saturates = |rank: u32| self.never_saturates(lowered, rank);
            let none_saturates = match communicator(lowered, number) {
                Communicator::Group(group) => group.members.iter().all(|&(member, _)| never_saturates(member)),
                Communicator::Channel(_, channel) => never_saturates(channel.sender) && never_saturates(channel.receiver),
            };
            let range = self.range(number);
            for cost in &mut self.costs[range] {
                cost.is_uncontended = none_saturates && cost.shape.is_none_or(|shape| shape.loads.is_empty());
            }
        }
    }

    /// Computes the rates of a kernel and a collective that share a processor with nothing else.
    fn find_rates_beside_kernels(&mut self, lowered: &Lowered<'_>) {
        for (number, group) in (0..).zip(&lowered.groups) {
            let [(member, _)] = group.members.as_slice() else { continue };
            let kind = lowered.ranks[*member as usize].kind;
            for index in self.range(number) {
                let cost = self.costs[index];
                let (_, share) = self.processor_share(lowered, &cost, *member);
                if share > 0.0 && cost.loads().is_empty() {
                    let mut processor = FairShare::new([1.0]);
                    let kernel = processor.add([(0, 1.0)], 1.0, 1.0);
                    let collective = processor.add([(0, share)], 1.0, growth(lowered, Some(kind), share));
                    processor.solve(|_, _, _| {});
                    self.costs[index].rates_beside_kernel = Some([kernel, collective].map(|share| processor.rate(share)));
                }
            }
        }
    }

    fn range(&self, communicator: u32) -> std::ops::Range<usize> {
        self.first[communicator as usize] as usize..self.first[communicator as usize + 1] as usize
    }
}

impl<'a> ResolvedCost<'a> {
    fn new(cost: &CommunicationCost, shape: Option<&'a Shape>) -> Self {
        Self {
            latency: cost.latency.into(),
            flow: cost.flow.into(),
            flow_seconds: cost.flow,
            bytes: cost.bytes,
            bytes_per_second: cost.bytes / cost.flow.value(),
            processor_share: cost.processor_share,
            shape,
            is_uncontended: false,
            rates_beside_kernel: None,
        }
    }

    /// The links that its flows load, each with the bytes that cross it for each byte of a flow.
    pub(super) fn loads(&self) -> &'a [(usize, f64)] {
        self.shape.map_or(&[], |shape| shape.loads.as_slice())
    }
}

/// The weight of a communication's flow, relative to a kernel of weight 1, where activities share a
/// processor. `kind` is the kind of its first member's device, `largest_share` the largest share of
/// a processor that the flow needs.
///
/// An operating system gives all activities equal shares until an activity needs no more. So the
/// rate of a flow that needs the share `s` grows `1 / s` times as fast as that of a kernel. On a
/// link, flows with the same share lose the same fraction of their rate.
pub(crate) fn growth(lowered: &Lowered<'_>, kind: Option<usize>, largest_share: f64) -> f64 {
    let own = kind.and_then(|kind| lowered.costs.parameters(kind).communication_growth);
    own.unwrap_or(if largest_share > 0.0 { 1.0 / largest_share } else { 1.0 })
}

/// The share of a device's processor that communication with this cost needs.
fn share_of(lowered: &Lowered<'_>, cost: &ResolvedCost<'_>, kind: usize) -> f64 {
    processor_share(lowered.costs, cost.processor_share, kind)
}

/// The share of a device's processor that communication needs if that share was not measured.
fn unmeasured_share(lowered: &Lowered<'_>, kind: usize) -> f64 {
    processor_share(lowered.costs, None, kind)
}

/// The share of a device's processor that communication needs. `measured` is the measured share on
/// a device of speed 1; if `None`, the device's default applies.
pub(crate) fn processor_share(costs: &CostModel, measured: Option<f64>, kind: usize) -> f64 {
    let of_whole_device = measured.unwrap_or(costs.parameters(kind).communication_share);
    (of_whole_device / costs.speed(kind)).min(1.0)
}
