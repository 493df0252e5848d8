//! Links that an exchange can leave busy: a shaper or a port lets the first of a message pass at once, so an exchange that is alone may take less
//! than its links' rates say, and whoever comes next pays for that.
//!
//! It must not know when exchanges happen.

use super::Lowered;
use super::communicators::CostKey;
use crate::cost::Quantile;
use crate::network;
use foretell_topologies::Topology;
use foretell_units::Seconds;
use rustc_hash::FxHashMap;

/// Debts of less than this share of the exchange are rounding.
const SLIGHT: f64 = 1e-9;

/// How much longer a link is busy with an exchange than that takes, where each flow of it carries so many bytes and the link `load` for each of them.
pub(crate) fn backlog(load: f64, bytes: f64, capacity: f64, flow: Seconds) -> Option<Seconds> {
    let owed = Seconds::new(load * bytes / capacity - flow.value());
    (owed > flow * SLIGHT).then_some(owed)
}

/// Of each link whether some exchange can leave it busy when that ends, as only those of a network can be left.
pub(crate) fn links_with_backlog(lowered: &Lowered<'_>, topology: &Topology) -> Vec<bool> {
    let Lowered { ranks, groups, channels, costs, .. } = lowered;
    let are_paid = (0..costs.kind_count()).any(|kind| costs.exchanges(kind).is_some() || costs.profiled_gpu(kind).is_some());
    let mut found = vec![false; topology.links().len()];
    if !are_paid {
        return found;
    }
    let mut add = |loads: &[(usize, f64)], pace: f64| {
        for &(link, load) in loads {
            let capacity = network::capacity(topology, &costs.links, link);
            if !found[link] && network::has_queue(topology, link) && backlog(load, 1.0, capacity, Seconds::new(pace)).is_some() {
                found[link] = true;
            }
        }
    };
    // What exchanges take is asked once of those that take the same. Only looked up.
    let mut known: FxHashMap<CostKey, [f64; 4]> = FxHashMap::default();
    for group in groups {
        let paces = *known.entry(CostKey::of_group(ranks, group)).or_insert_with(|| {
            let shapes = group.shapes();
            let mut paces = [f64::INFINITY; 4];
            for (which, quantile) in (0..group.collectives.distinct().len()).flat_map(each_quantile) {
                let (cost, shape) = group.cost(costs, which, quantile);
                for (own, pace) in shapes.iter().zip(&mut paces) {
                    let is_it = own.zip(shape).is_some_and(|(own, shape)| std::ptr::eq(own, shape));
                    if is_it && cost.bytes > 0.0 {
                        *pace = pace.min(cost.flow.value() / cost.bytes);
                    }
                }
            }
            paces
        });
        for (shape, pace) in group.shapes().into_iter().zip(paces) {
            add(shape.map_or(&[], |shape| &shape.loads), pace);
        }
    }
    let mut known: FxHashMap<CostKey, f64> = FxHashMap::default();
    for channel in channels {
        let pace = *known.entry(CostKey::of_channel(ranks, channel)).or_insert_with(|| {
            let exchanges = (0..channel.bytes.distinct().len()).flat_map(each_quantile);
            let costs = exchanges.map(|(which, quantile)| channel.cost(costs, which, quantile));
            costs.filter(|cost| cost.bytes > 0.0).map(|cost| cost.flow.value() / cost.bytes).fold(f64::INFINITY, f64::min)
        });
        add(&channel.shape.loads, pace);
    }
    found
}

fn each_quantile(which: usize) -> impl Iterator<Item = (usize, Quantile)> {
    [Quantile::P10, Quantile::Median, Quantile::P90].into_iter().map(move |quantile| (which, quantile))
}
