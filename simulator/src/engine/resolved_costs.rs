//! What every exchange of a run takes, found before it begins: each different one of a group or a channel once.

use crate::cost::{CommunicationCost, Quantile};
use crate::lowering::{Channel, Lowered, ProcessGroup};
use crate::network::{FairShare, Shape};
use foretell_units::{Picoseconds, Seconds};
use std::collections::BTreeSet;

/// The prices of all exchanges.
#[derive(Debug)]
pub(crate) struct ResolvedCosts<'a> {
    prices: Vec<ResolvedCost<'a>>,
    /// Where those of each group, then of each channel, begin.
    first: Vec<u32>,
    /// Processors that nobody can find full, whatever goes on there at once.
    roomy: Vec<bool>,
    /// Exchanges that no sample says anything of.
    pub(super) uncalibrated: BTreeSet<String>,
}

/// What an exchange takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResolvedCost<'a> {
    pub(crate) latency: Picoseconds,
    pub(crate) flow: Picoseconds,
    /// The same, not rounded.
    pub(super) flow_seconds: Seconds,
    /// Bytes that each of its flows carries, and a second of it when nothing hinders them.
    pub(super) bytes: f64,
    pub(super) pace: f64,
    pub(super) processor_share: Option<f64>,
    pub(super) shape: Option<&'a Shape>,
    /// Whether it can meet nobody, on a link or on a processor.
    pub(super) shares_nothing: bool,
    /// The rates of a kernel and of it on the processor of its one member, if it has one and loads no link; none where it takes nothing of that.
    pub(super) beside_kernel: Option<[f64; 2]>,
}

/// Whose an exchange is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Communicator<'a> {
    Group(&'a ProcessGroup),
    /// With its number among the channels.
    Channel(u32, &'a Channel),
}

/// The communicator of a number: groups come first, then channels.
pub(super) fn communicator<'a>(lowered: &'a Lowered<'a>, communicator: u32) -> Communicator<'a> {
    match lowered.groups.get(communicator as usize) {
        Some(group) => Communicator::Group(group),
        None => {
            let channel = communicator - lowered.groups.len() as u32;
            Communicator::Channel(channel, &lowered.channels[channel as usize])
        }
    }
}

impl<'a> ResolvedCosts<'a> {
    pub(crate) fn new(lowered: &'a Lowered<'a>, quantile: Quantile) -> Self {
        let mut uncalibrated = BTreeSet::new();
        let (mut prices, mut first) = (Vec::new(), Vec::with_capacity(lowered.groups.len() + lowered.channels.len() + 1));
        for group in &lowered.groups {
            first.push(prices.len() as u32);
            for which in 0..group.collectives.distinct().len() {
                let (cost, shape) = group.cost(lowered.costs, which, quantile);
                if !cost.source.is_calibrated() || group.is_stepped(which) {
                    let kind = group.collectives.distinct()[which].kind;
                    uncalibrated.insert(format!("{} of {} ranks", kind.name(), group.size));
                }
                prices.push(ResolvedCost::new(&cost, shape));
            }
        }
        for channel in &lowered.channels {
            first.push(prices.len() as u32);
            for which in 0..channel.bytes.distinct().len() {
                let cost = channel.cost(lowered.costs, which, quantile);
                if !cost.source.is_calibrated() {
                    uncalibrated.insert("send and receive".into());
                }
                prices.push(ResolvedCost::new(&cost, Some(&channel.shape)));
            }
        }
        first.push(prices.len() as u32);
        let mut all = Self { prices, first, roomy: Vec::new(), uncalibrated };
        all.find_room(lowered);
        all.find_rates(lowered);
        all
    }

    /// The price of an exchange of a communicator that is its `which`-th different one.
    pub(crate) fn of(&self, communicator: u32, which: u32) -> &ResolvedCost<'a> {
        &self.prices[(self.first[communicator as usize] + which) as usize]
    }

    /// What an exchange that takes `price` needs of a rank's processor: nothing of one that cannot be full.
    pub(super) fn processor_share(&self, lowered: &Lowered<'_>, price: &ResolvedCost<'_>, rank: u32) -> (u32, f64) {
        let own = &lowered.ranks[rank as usize];
        (own.processor, if self.is_roomy(lowered, rank) { 0.0 } else { share_of(lowered, price, own.kind) })
    }

    /// What of a processor of a kind of device an exchange takes in all while its data flow, however long that is.
    pub(crate) fn processor_time(lowered: &Lowered<'_>, price: &ResolvedCost<'_>, kind: usize) -> Picoseconds {
        (price.flow_seconds * share_of(lowered, price, kind)).into()
    }

    /// What communication that was not measured needs of a rank's processor: nothing of one that cannot be full.
    pub(super) fn communication_share(&self, lowered: &Lowered<'_>, rank: u32) -> (u32, f64) {
        let own = &lowered.ranks[rank as usize];
        (own.processor, if self.is_roomy(lowered, rank) { 0.0 } else { whole_share(lowered, own.kind) })
    }

    /// Whether nobody can find a rank's processor full.
    pub(super) fn is_roomy(&self, lowered: &Lowered<'_>, rank: u32) -> bool {
        self.roomy[lowered.ranks[rank as usize].processor as usize - lowered.first_processor()]
    }

    /// Finds the processors that cannot be full even if all groups and channels want them at once, each for one exchange at a time, and the
    /// exchanges that therefore share nothing.
    fn find_room(&mut self, lowered: &Lowered<'_>) {
        let first = lowered.first_processor();
        let mut wanted = vec![0.0; lowered.processors];
        for rank in &lowered.ranks {
            let wanted = &mut wanted[rank.processor as usize - first];
            let list = &lowered.lists[rank.list];
            let is_busy = list.uses_processor || list.communication_overlaps;
            let is_interrupted = lowered.costs.parameters(rank.kind).interruption > Seconds::ZERO;
            // Beside kernels it may stand still.
            if is_busy || is_interrupted || lowered.quota(rank).is_some() {
                *wanted += f64::INFINITY;
            }
            let channels = rank.sends.iter().chain(&rank.receives).map(|&channel| channel + lowered.groups.len() as u32);
            for communicator in rank.groups.iter().copied().chain(channels) {
                let shares = self.prices[self.range(communicator)].iter().map(|price| share_of(lowered, price, rank.kind));
                let is_stepped = lowered.groups.get(communicator as usize).is_some_and(|group| !group.hops.is_empty());
                let of_steps = if is_stepped { whole_share(lowered, rank.kind) } else { 0.0 };
                *wanted += shares.fold(of_steps, f64::max);
            }
        }
        self.roomy = wanted.iter().map(|&wanted| wanted <= 1.0).collect();
        for number in 0..self.first.len() as u32 - 1 {
            let is_roomy = |rank: u32| self.roomy[lowered.ranks[rank as usize].processor as usize - first];
            let are_roomy = match communicator(lowered, number) {
                Communicator::Group(group) => group.members.iter().all(|&(member, _)| is_roomy(member)),
                Communicator::Channel(_, channel) => is_roomy(channel.sender) && is_roomy(channel.receiver),
            };
            let range = self.range(number);
            for price in &mut self.prices[range] {
                price.shares_nothing = are_roomy && price.shape.is_none_or(|shape| shape.loads.is_empty());
            }
        }
    }

    /// Finds the rates of a kernel and an exchange that meet nobody else.
    fn find_rates(&mut self, lowered: &Lowered<'_>) {
        for (number, group) in (0..).zip(&lowered.groups) {
            let [(member, _)] = group.members.as_slice() else { continue };
            let kind = lowered.ranks[*member as usize].kind;
            for place in self.range(number) {
                let price = self.prices[place];
                let (_, share) = self.processor_share(lowered, &price, *member);
                if share > 0.0 && price.loads().is_empty() {
                    let mut processor = FairShare::new([1.0]);
                    let kernel = processor.add([(0, 1.0)], 1.0, 1.0);
                    let exchange = processor.add([(0, share)], 1.0, growth(lowered, Some(kind), share));
                    processor.solve(|_, _, _| {});
                    self.prices[place].beside_kernel = Some([kernel, exchange].map(|one| processor.rate(one)));
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
            pace: cost.bytes / cost.flow.value(),
            processor_share: cost.processor_share,
            shape,
            shares_nothing: false,
            beside_kernel: None,
        }
    }

    /// The links that its flows load, with the load for each byte that a flow carries.
    pub(super) fn loads(&self) -> &'a [(usize, f64)] {
        self.shape.map_or(&[], |shape| shape.loads.as_slice())
    }
}

/// How fast the flow of an exchange grows beside kernels on the processors that it takes so much of at the most; the kind is its first member's.
///
/// Processors are shared as an operating system shares them: equal use until one needs no more. So a flow that needs the share s grows 1/s
/// times as fast as a kernel. On a link flows of one share lose the same part of their own pace.
pub(super) fn growth(lowered: &Lowered<'_>, kind: Option<usize>, largest_share: f64) -> f64 {
    let own = kind.and_then(|kind| lowered.costs.parameters(kind).communication_growth);
    own.unwrap_or(if largest_share > 0.0 { 1.0 / largest_share } else { 1.0 })
}

/// The share of the processor of a device that an exchange takes.
fn share_of(lowered: &Lowered<'_>, price: &ResolvedCost<'_>, kind: usize) -> f64 {
    let whole = price.processor_share.unwrap_or(lowered.costs.parameters(kind).communication_share);
    (whole / lowered.costs.speed(kind)).min(1.0)
}

/// That of one whose share was not measured.
fn whole_share(lowered: &Lowered<'_>, kind: usize) -> f64 {
    (lowered.costs.parameters(kind).communication_share / lowered.costs.speed(kind)).min(1.0)
}
