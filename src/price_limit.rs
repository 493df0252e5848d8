//! `--price-limit`: the devices that nodes within a price have. It must not know layouts.

use crate::failure::{Failure, code};
use foretell_topologies::Topology;
use foretell_units::Price;

/// Returns the devices of the first nodes that together cost at most so much per hour. It stops at
/// a node without a price.
pub fn affordable(topology: &Topology, limit: &Price) -> usize {
    let (mut price, mut devices) = (0.0, 0);
    for group in topology.node_groups() {
        let Some(each) = group.price_per_hour else { break };
        for _ in 0..group.count {
            price += each;
            if price > limit.amount {
                return devices;
            }
            devices += group.devices;
        }
    }
    devices
}

/// Refuses a limit in another currency than the topology's prices.
pub fn check_currency(topology: &Topology, limit: &Price) -> Result<(), Failure> {
    match (limit.currency.as_deref(), topology.currency()) {
        (Some(asked), Some(stated)) if asked != stated => {
            let what = format!("`--price-limit` is in `{asked}`, and the prices of `{}` are in `{stated}`", topology.name());
            Err(Failure::input(code::OPTION_VALUE, what).hint(format!("give the limit in `{stated}`")))
        }
        _ => Ok(()),
    }
}
