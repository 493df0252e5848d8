//! Links that stay busy after a communication has ended. A traffic shaper or a port lets the first
//! bytes of a message pass at once. So a measured communication may take less time than its links'
//! rates allow. The next message on the link then waits for the difference, the backlog.
//!
//! Nothing here depends on when communication happens.

use super::Lowered;
use super::communicators::CostKey;
use crate::cost::Quantile;
use crate::network;
use foretell_topologies::Topology;
use foretell_units::Seconds;
use rustc_hash::FxHashMap;

/// A backlog of less than this share of the flow time is rounding.
const ROUNDING: f64 = 1e-9;

/// Returns how much longer a link is busy than a communication's `flow` takes. `None` if it is not.
/// Each flow carries `bytes`, each of which puts `load` bytes on the link. `capacity` is in bytes
/// per second.
pub(crate) fn backlog(load: f64, bytes: f64, capacity: f64, flow: Seconds) -> Option<Seconds> {
    let backlog = Seconds::new(load * bytes / capacity - flow.value());
    (backlog > flow * ROUNDING).then_some(backlog)
}

/// For each link of the topology, whether some communication can leave a backlog on it.
pub(super) fn links_with_backlog(lowered: &Lowered<'_>, topology: &Topology) -> Vec<bool> {
    let Lowered { ranks, groups, channels, costs, .. } = lowered;
    // Costs by the links' data sheets never imply more than the links' rates.
    let may_be_faster = (0..costs.kind_count()).any(|kind| costs.exchanges(kind).is_some() || costs.profiled_gpu(kind).is_some());
    let mut found = vec![false; topology.links().len()];
    if !may_be_faster {
        return found;
    }
    let mut add = |loads: &[(usize, f64)], seconds_per_byte: f64| {
        for &(link, load) in loads {
            let capacity = network::capacity(topology, &costs.links, link);
            let leaves_backlog = || backlog(load, 1.0, capacity, Seconds::new(seconds_per_byte)).is_some();
            if !found[link] && network::has_queue(topology, link) && leaves_backlog() {
                found[link] = true;
            }
        }
    };
    // Costs are computed once for each key. The maps are never iterated, so their order does not
    // matter.
    let mut known: FxHashMap<CostKey, [f64; 4]> = FxHashMap::default();
    for group in groups {
        let fastest = *known.entry(CostKey::of_group(ranks, group)).or_insert_with(|| {
            let shapes = group.shapes();
            let mut fastest = [f64::INFINITY; 4];
            for (distinct, quantile) in (0..group.collectives.distinct().len()).flat_map(at_each_quantile) {
                let (cost, shape) = group.cost(costs, distinct, quantile);
                for (own, fastest) in shapes.iter().zip(&mut fastest) {
                    let is_used = own.zip(shape).is_some_and(|(own, shape)| std::ptr::eq(own, shape));
                    if is_used && cost.bytes > 0.0 {
                        *fastest = fastest.min(cost.flow.value() / cost.bytes);
                    }
                }
            }
            fastest
        });
        for (shape, fastest) in group.shapes().into_iter().zip(fastest) {
            add(shape.map_or(&[], |shape| &shape.loads), fastest);
        }
    }
    let mut known: FxHashMap<CostKey, f64> = FxHashMap::default();
    for channel in channels {
        let fastest = *known.entry(CostKey::of_channel(ranks, channel)).or_insert_with(|| {
            let messages = (0..channel.bytes.distinct().len()).flat_map(at_each_quantile);
            let costs = messages.map(|(distinct, quantile)| channel.cost(costs, distinct, quantile));
            costs.filter(|cost| cost.bytes > 0.0).map(|cost| cost.flow.value() / cost.bytes).fold(f64::INFINITY, f64::min)
        });
        add(&channel.shape.loads, fastest);
    }
    found
}

fn at_each_quantile(distinct: usize) -> impl Iterator<Item = (usize, Quantile)> {
    [Quantile::P10, Quantile::Median, Quantile::P90].into_iter().map(move |quantile| (distinct, quantile))
}
