//! Devices within a price. It must not know layouts.

use super::PlanJobError;
use foretell_topologies::Topology;
use foretell_units::Price;

/// Returns the devices of the first nodes that together cost at most `limit` per hour. It stops at
/// a node without a price.
pub(super) fn affordable(topology: &Topology, limit: &Price) -> usize {
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
pub(super) fn check_currency(topology: &Topology, limit: &Price) -> Result<(), PlanJobError> {
    match (limit.currency.as_deref(), topology.currency()) {
        (Some(asked), Some(stated)) if asked != stated => {
            let topology = topology.name().into();
            Err(PlanJobError::OtherCurrency { asked: asked.into(), topology, stated: stated.into() })
        }
        _ => Ok(()),
    }
}
