//! Builds a node's [`NodeLink`] and [`Nics`] from a parsed file.

use crate::device::{Architecture, DEFAULT_PCIE_BANDWIDTH, DEFAULT_SHARED_MEMORY_BANDWIDTH, DeviceKind};
use crate::error::{Place, TopologyError, TopologyProblem};
use crate::node::{Nics, NodeLink, NodeLinkKind, PcieTree, Sockets};
use crate::spec::{LinkSpec, NicsSpec, ShortOrFull};
use crate::text::{At, Scalar};
use crate::wires::Wires;
use foretell_units::{BytesPerSecond, Seconds, suggest};

/// Default link between devices of a kind.
pub(super) fn default_link(kind: &DeviceKind) -> Option<NodeLink> {
    let (link, bandwidth) = match (kind.architecture, kind.link) {
        (Architecture::Cpu, _) => (NodeLinkKind::SharedMemory, DEFAULT_SHARED_MEMORY_BANDWIDTH),
        (Architecture::Gpu | Architecture::Tpu, Some(bandwidth)) => (NodeLinkKind::NvSwitch, bandwidth),
        (Architecture::Gpu | Architecture::Tpu, None) => (NodeLinkKind::Pcie, DEFAULT_PCIE_BANDWIDTH),
    };
    Some(NodeLink { kind: link, bandwidth, latency: link.default_latency(), tree: None })
}

/// Builds a node's link from its short form `KIND-RATE` or from a mapping.
pub(super) fn node_link(link: &At<ShortOrFull<LinkSpec>>, node: &str, device: &DeviceKind) -> Result<NodeLink, TopologyError> {
    let none = LinkSpec::default();
    let (kind, bandwidth, full) = match &link.value {
        ShortOrFull::Short(text) => {
            let kind = NodeLinkKind::ALL
                .into_iter()
                .find(|kind| text.strip_prefix(kind.name()).is_some_and(|rest| rest.is_empty() || rest.starts_with('-')));
            let kind = kind.ok_or_else(|| {
                unknown_link(text.trim_end_matches(|letter| letter != '-').trim_end_matches('-'), text, link.place)
            })?;
            let rate = text[kind.name().len()..].strip_prefix('-');
            (kind, rate.map(|rate| At { value: rate.into(), place: link.place }), &none)
        }
        ShortOrFull::Full(full) => {
            let kind = full.kind.as_ref().ok_or_else(|| {
                let hint = "write `kind: nvswitch`, `nvlink-mesh`, `pcie` or `shared-memory`".into();
                let owner = format!("the link of node `{node}`");
                TopologyError::at(link.place, TopologyProblem::Missing { owner, field: "kind", hint })
            })?;
            let found = NodeLinkKind::ALL.into_iter().find(|known| known.name() == kind.value);
            let found = found.ok_or_else(|| unknown_link(&kind.value, &kind.value, kind.place))?;
            (found, full.bandwidth.clone(), full)
        }
    };
    let bandwidth = match (bandwidth, kind, device.link) {
        (Some(bandwidth), _, _) => bandwidth.positive("link")?,
        (None, NodeLinkKind::Pcie, _) => DEFAULT_PCIE_BANDWIDTH,
        (None, NodeLinkKind::SharedMemory, _) => DEFAULT_SHARED_MEMORY_BANDWIDTH,
        (None, _, Some(own)) => own,
        (None, _, None) => {
            let hint = format!("say what one device sends, such as `{}-300GB/s`", kind.name());
            let owner = format!("the link of node `{node}`");
            return Err(TopologyError::at(link.place, TopologyProblem::Missing { owner, field: "bandwidth", hint }));
        }
    };
    let latency = full.latency.as_ref().map_or(Ok(kind.default_latency()), |latency| latency.quantity::<Seconds>("latency"))?;
    Ok(NodeLink { kind, bandwidth, latency, tree: pcie_tree(full, kind, bandwidth)? })
}

/// Builds the PCIe switches of a link, if it describes some. By default, an uplink is as fast as a
/// device's lanes.
fn pcie_tree(link: &LinkSpec, kind: NodeLinkKind, lanes: BytesPerSecond) -> Result<Option<PcieTree>, TopologyError> {
    let LinkSpec { devices_per_switch, uplink, switches_per_socket, socket_link, .. } = link;
    let refused = |value: &At<Scalar>, what: String, hint: &str| Err(TopologyError::invalid(value.place, what, hint));
    let of_tree = [
        ("devices_per_switch", devices_per_switch),
        ("uplink", uplink),
        ("switches_per_socket", switches_per_socket),
        ("socket_link", socket_link),
    ];
    for (field, value) in of_tree {
        if let Some(value) = value {
            if kind != NodeLinkKind::Pcie {
                let what = format!("a `{}` link has no `{field}`", kind.name());
                return refused(value, what, "leave it out, or write `kind: pcie`");
            }
            if devices_per_switch.is_none() {
                return refused(
                    value,
                    format!("`{field}` is of PCIe switches, and none are described"),
                    "say `devices_per_switch`",
                );
            }
        }
    }
    let Some(devices_per_switch) = devices_per_switch else { return Ok(None) };
    let sockets = match (switches_per_socket, socket_link) {
        (None, None) => None,
        (Some(switches), Some(link)) => {
            Some(Sockets { switches: switches.count("switches_per_socket")?, link: link.positive("socket_link")? })
        }
        (Some(switches), None) => {
            return refused(switches, "sockets need a `socket_link`".into(), "say what one sends to the others, one way");
        }
        (None, Some(link)) => {
            return refused(link, "a `socket_link` needs `switches_per_socket`".into(), "say how many switches a socket has");
        }
    };
    Ok(Some(PcieTree {
        devices_per_switch: devices_per_switch.count("devices_per_switch")?,
        uplink: uplink.as_ref().map_or(Ok(lanes), |uplink| uplink.positive("uplink"))?,
        sockets,
    }))
}

/// Largest number of links between two devices: more than any device has.
const MOST_WIRES: usize = 64;

/// Builds the wires of a node's link, if the file states them. Devices without a wire between them
/// use PCIe, at the rate `slot` unless the file states another.
pub(super) fn wires(
    link: &LinkSpec,
    kind: NodeLinkKind,
    devices: usize,
    slot: BytesPerSecond,
) -> Result<Option<Wires>, TopologyError> {
    let refused = |place, what: String, hint: &str| Err(TopologyError::invalid(place, what, hint));
    let Some(At { value: rows, place }) = &link.wires else {
        let what = "`unlinked` is of pairs without wires, and no `wires` are stated".into();
        return link.unlinked.as_ref().map_or(Ok(None), |rate| refused(rate.place, what, "leave it out"));
    };
    if kind != NodeLinkKind::NvLinkMesh {
        return refused(*place, format!("a `{}` link has no `wires`", kind.name()), "write `kind: nvlink-mesh`");
    }
    if rows.len() != devices || rows.iter().any(|row| row.len() != devices) {
        let what = format!("`wires` is not a table of {devices} rows and {devices} columns, one for each device");
        return refused(*place, what, "state the number of links between each two devices, and 0 on the diagonal");
    }
    let pairs = || (0..devices).flat_map(|row| (0..devices).map(move |column| (row, column)));
    if let Some((row, column)) = pairs().find(|&(row, column)| {
        rows[row][column] > MOST_WIRES || rows[row][column] != rows[column][row] || (row == column && rows[row][column] > 0)
    }) {
        let what = format!("`wires` from device {row} to {column}: {}", rows[row][column]);
        return refused(*place, what, "both directions have the same number, up to 64, and the diagonal is 0");
    }
    if rows.iter().flatten().all(|&wires| wires == 0) {
        return refused(*place, "`wires` has no link".into(), "write `kind: pcie`");
    }
    let unlinked = link.unlinked.as_ref().map_or(Ok(slot), |rate| rate.positive("unlinked"))?;
    Ok(Some(Wires { counts: rows.as_slice().into(), unlinked }))
}

fn unknown_link(kind: &str, written: &str, place: Option<Place>) -> TopologyError {
    let near = if kind.is_empty() { written } else { kind };
    let hint = suggest(near, NodeLinkKind::ALL.map(NodeLinkKind::name));
    TopologyError::at(place, TopologyProblem::UnknownName { what: "kind of link", name: near.into(), hint })
}

pub(super) fn network_interfaces(nics: &At<NicsSpec>, node: &str) -> Result<Nics, TopologyError> {
    let bandwidth = nics.value.bandwidth.as_ref().ok_or_else(|| {
        let hint = "say what one carries, such as `bandwidth: 25Gbit/s`".into();
        let owner = format!("`nics` of node `{node}`");
        TopologyError::at(nics.place, TopologyProblem::Missing { owner, field: "bandwidth", hint })
    })?;
    Ok(Nics {
        count: nics.value.count.as_ref().map_or(Ok(1), |count| count.count("nics.count"))?,
        bandwidth: bandwidth.positive("bandwidth")?,
    })
}
