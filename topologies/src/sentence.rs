//! Topologies from a few words: `8xh100`, `4xrtx-4090`, `16x8xa100-80g@200Gbit/s`. The devices come
//! from the library. Whatever the words leave open comes from the library's cluster of the same
//! devices, and a note says so.

use crate::device::{Architecture, DeviceKind};
use crate::error::{TopologyError, TopologyProblem};
use crate::topology::Topology;
use foretell_units::suggest;
use std::collections::BTreeSet;

/// A topology from a few words.
#[derive(Debug, Clone, PartialEq)]
pub struct SaidTopology {
    /// The topology.
    pub topology: Topology,
    /// What was assumed because the words leave it open, one sentence each.
    pub notes: Vec<String>,
}

/// The parsed words.
struct Said<'a> {
    nodes: usize,
    devices: usize,
    device: &'a str,
    /// Rate of one NIC, if stated.
    rate: Option<&'a str>,
}

/// Devices that are assumed if several match a name, the most common first.
const USUAL: [&str; 6] = ["h100-sxm-80g", "a100-sxm-80g", "v100-sxm-32g", "v100-sxm-16g", "rtx-4090", "l40s"];

/// Largest number of nodes, and of devices of a node.
const MOST: usize = 1 << 20;

impl Topology {
    /// Makes a topology from `DEVICESxKIND` or `NODESxDEVICESxKIND`, optionally followed by
    /// `@RATE`, the rate of one NIC per device. A device's name without numbers is one device.
    /// Returns `None` if the text has another form.
    ///
    /// # Errors
    /// [`TopologyError`] if the library has no such device, or if there are several nodes and the
    /// rate of their NICs is unknown.
    pub fn said(text: &str) -> Option<Result<SaidTopology, TopologyError>> {
        let said = Said::parse(text).or_else(|| {
            (text.len() > 1 && find(text, &mut Vec::new()).is_ok()).then_some(Said {
                nodes: 1,
                devices: 1,
                device: text,
                rate: None,
            })
        })?;
        Some(said.build(text))
    }
}

impl<'a> Said<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (devices, rate) = text.split_once('@').map_or((text, None), |(devices, rate)| (devices, Some(rate.trim())));
        let (first, rest) = counted(devices)?;
        let (nodes, devices, device) = match counted(rest) {
            Some((second, device)) => (first, second, device),
            None => (1, first, rest),
        };
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | ' ');
        // `4090` is the name of a device, but `8` is not.
        let begins_as_name =
            || device.starts_with(|first: char| first.is_ascii_alphabetic()) || find(device, &mut Vec::new()).is_ok();
        let is_sound = !device.is_empty() && device.chars().all(is_name) && begins_as_name();
        (is_sound && (1..=MOST).contains(&nodes) && (1..=MOST).contains(&devices)).then_some(Self {
            nodes,
            devices,
            device,
            rate,
        })
    }

    fn build(&self, text: &str) -> Result<SaidTopology, TopologyError> {
        let mut notes = Vec::new();
        let kind = find(self.device, &mut notes)?;
        let base = library_cluster(&kind.name)?;
        // A variant of a device for another market comes in the same nodes.
        let networked = match (&base, RELATIVES.iter().find(|(name, _)| *name == kind.name)) {
            (None, Some((_, relative))) => library_cluster(relative)?,
            _ => base.clone(),
        };
        let nics = match (self.rate, &networked) {
            (Some(rate), _) => Some((self.devices, rate.to_owned())),
            (None, Some(base)) => {
                let nics = base.node_groups().first().and_then(|group| Some((group.nics?, group.devices)));
                nics.map(|(nics, devices)| {
                    // As many NICs per device as in the library's cluster.
                    let count = (nics.count * self.devices).div_ceil(devices.max(1)).max(1);
                    (count, format!("{}Gbit/s", nics.bandwidth.value() * 8e-9))
                })
            }
            (None, None) => None,
        };
        // A single node has NICs, too: `--nodes` may later ask for more nodes.
        if self.nodes > 1 {
            match (&nics, self.rate) {
                (None, _) => {
                    let name = text.to_owned();
                    let hint = format!("say the rate of one NIC a device, such as `{text}@100Gbit/s`");
                    return Err(TopologyProblem::UnknownName { what: "rate between nodes, in the topology", name, hint }.into());
                }
                (Some((count, rate)), None) => {
                    let source = networked.as_ref().map_or("", |base| &base.name);
                    notes.push(format!("`{text}`: {count} NICs of {rate} a node, as in `{source}`; `{text}@RATE` says another"));
                }
                (Some((count, rate)), Some(_)) if *count > 1 => notes.push(format!(
                    "`{text}`: each of the {count} devices of a node has a NIC of {rate}; a node with one NIC is written into a file, \
                     with `nics: {{count: 1, bandwidth: {rate}}}`"
                )),
                (Some(_), Some(_)) => {}
            }
        }
        let nics = nics.map_or(String::new(), |(count, rate)| format!(", nics: {{count: {count}, bandwidth: {rate}}}"));
        let link = base.as_ref().and_then(|base| link_of(base, self.devices)).unwrap_or_default();
        let network = if self.nodes > 1 { "network: {kind: switch, latency: 5us}\n" } else { "" };
        let yaml = format!(
            "name: '{text}'\nnodes:\n  - {{name: node, count: {}, devices: {{kind: {}, count: {}}}{link}{nics}}}\n{network}",
            self.nodes, kind.name, self.devices
        );
        Ok(SaidTopology { topology: Topology::from_yaml(&yaml, text)?, notes })
    }
}

/// Returns the number at the start of `text`, and the text after the `x` that follows it.
fn counted(text: &str) -> Option<(usize, &str)> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|letter: char| letter.is_ascii_digit()).len();
    let (number, rest) = text.split_at_checked(digits)?;
    // `8xh100`, `8 x h100` or `8 h100`.
    let rest = match rest.trim_start().strip_prefix(['x', 'X', '*', '×']) {
        Some(rest) => rest,
        None => rest.strip_prefix(' ').filter(|rest| rest.trim_start().starts_with(|first: char| first.is_ascii_alphabetic()))?,
    };
    Some((number.parse().ok()?, rest.trim()))
}

/// Devices for which the library has no cluster, each with a device that comes in the same nodes.
const RELATIVES: [(&str, &str); 2] = [("a800-sxm-80g", "a100-sxm-80g"), ("h800-sxm-80g", "h100-sxm-80g")];

/// The library's cluster whose nodes all have this kind of device, if there is one.
fn library_cluster(kind: &str) -> Result<Option<Topology>, TopologyError> {
    for name in Topology::library_names() {
        let topology = Topology::library(name)?;
        if topology.device_kinds().iter().any(|known| known.name == kind) && topology.node_groups().len() == 1 {
            return Ok(Some(topology));
        }
    }
    Ok(None)
}

/// The link of a node in the library's cluster. `None` if the node has a single device or no link,
/// or if the link is a tree of PCIe switches.
fn link_of(base: &Topology, devices: usize) -> Option<String> {
    let group = base.node_groups().first()?;
    let link = group.link.filter(|link| link.tree.is_none())?;
    // In a mesh, a smaller node has fewer links per device.
    let share = match link.kind {
        crate::node::NodeLinkKind::NvLinkMesh => {
            ((devices.saturating_sub(1)) as f64 / (group.devices.saturating_sub(1)).max(1) as f64).clamp(0.0, 1.0)
        }
        _ => 1.0,
    };
    (devices > 1).then(|| format!(", link: {}-{}GB/s", link.kind.name(), link.bandwidth.value() * share * 1e-9))
}

/// Finds the library's device whose name has all parts of `name`.
fn find(name: &str, notes: &mut Vec<String>) -> Result<DeviceKind, TopologyError> {
    let normal = name.to_ascii_lowercase().replace(['_', ' '], "-");
    let plain = normal.strip_prefix("nvidia-").or_else(|| normal.strip_prefix("amd-")).unwrap_or(&normal);
    if let Some(kind) = DeviceKind::library(plain)? {
        return Ok(kind);
    }
    let parts: Vec<String> = plain.split('-').filter(|part| !part.is_empty()).map(|part| part.replace("gb", "g")).collect();
    let parts: Vec<&str> =
        if plain.starts_with("gb") { plain.split('-').collect() } else { parts.iter().map(String::as_str).collect() };
    // `rtx4090` and `4090` are `rtx-4090`, `a6000` is `rtx-a6000`.
    let joined =
        |known: &str| known.replace('-', "").trim_start_matches("rtx") == plain.replace('-', "").trim_start_matches("rtx");
    let has_all = |known: &str| parts.iter().all(|part| known.split('-').any(|other| other == *part));
    let mut found: Vec<&str> = DeviceKind::library_names()?.filter(|known| has_all(known) || joined(known)).collect();
    found.sort_by_key(|known| {
        let rank = USUAL.iter().position(|usual| usual == known).unwrap_or(USUAL.len());
        (rank, !known.contains("-sxm-"), known.split('-').count())
    });
    let Some(first) = found.first() else {
        let names: BTreeSet<&str> = DeviceKind::library_names()?.collect();
        // `h100` says as much as one of its full names.
        let short = names.iter().filter_map(|known| known.split('-').next().filter(|first| first.contains(char::is_numeric)));
        let mut hint = suggest(plain, short.chain(names.iter().copied()).collect::<BTreeSet<_>>());
        if Topology::library_names().any(|known| known == plain) {
            hint = format!("`{plain}` is a whole topology: use `--topology {plain}`, and `--nodes` for their number");
        }
        return Err(TopologyProblem::UnknownName { what: "library device", name: name.into(), hint }.into());
    };
    if found.len() > 1 {
        let others = found.iter().skip(1).copied().collect::<Vec<_>>().join(", ");
        notes.push(format!("`{name}` is taken as `{first}`; others: {others}"));
    }
    let kind = DeviceKind::library(first)?.filter(|kind| kind.architecture != Architecture::Cpu);
    kind.ok_or_else(|| TopologyProblem::UnknownName { what: "library device", name: name.into(), hint: String::new() }.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

    use super::*;
    use foretell_units::diagnostic::one_line;

    fn said(text: &str) -> SaidTopology {
        Topology::said(text).unwrap().unwrap()
    }

    #[test]
    fn a_few_words_are_a_topology() {
        let cases = [
            ("8xh100", 1, 8, "h100-sxm-80g", 450.0, None),
            ("4xrtx-4090", 1, 4, "rtx-4090", 31.0, None),
            ("4xRTX4090", 1, 4, "rtx-4090", 31.0, None),
            ("16x8xa100-80g@200Gbit/s", 16, 8, "a100-sxm-80g", 300.0, Some((8, 200.0))),
            ("2x8xa100-40gb", 2, 8, "a100-sxm-40g", 300.0, Some((8, 200.0))),
            ("2 x 8 x H100", 2, 8, "h100-sxm-80g", 450.0, Some((8, 400.0))),
            ("4xmi300x", 1, 4, "mi300x", 192.0, None),
            ("1xl4", 1, 1, "l4", 0.0, None),
            ("8 h100", 1, 8, "h100-sxm-80g", 450.0, None),
            ("h100", 1, 1, "h100-sxm-80g", 0.0, None),
            ("RTX 4090", 1, 1, "rtx-4090", 0.0, None),
            ("2x4090", 1, 2, "rtx-4090", 31.0, None),
        ];
        for (text, nodes, devices, kind, link, nics) in cases {
            let SaidTopology { topology, .. } = said(text);
            let group = &topology.node_groups()[0];
            assert_eq!((group.count, group.devices), (nodes, devices), "{text}");
            assert_eq!(topology.device_kinds()[group.kind].name, kind, "{text}");
            let rate = group.link.filter(|_| devices > 1).map_or(0.0, |link| (link.bandwidth.value() * 1e-9).round());
            assert_eq!(rate, link, "{text}");
            let said = group.nics.map(|nics| (nics.count, (nics.bandwidth.value() * 8e-9).round()));
            assert!(nodes == 1 || said == nics, "{text}: {said:?}");
            topology.validate().unwrap();
        }
        let two = said("8xh100").topology.with_nodes(2).unwrap();
        two.validate().unwrap();
        assert!(said("8xh100").notes.iter().any(|note| note.contains("h100-pcie-80g")));
    }

    #[test]
    fn other_texts_are_none_or_say_what_they_lack() {
        for text in ["dgx-h100", "8x", "x8", "h1000", "0xh100", "8x../h100", ""] {
            assert!(Topology::said(text).is_none(), "{text}");
        }
        let error = one_line(&Topology::said("8xh1000").unwrap().unwrap_err());
        assert!(error.contains("h1000") && error.contains("hint: "), "{error}");
        let error = one_line(&Topology::said("8xh101").unwrap().unwrap_err());
        assert!(error.contains("did you mean `h100`?"), "{error}");
        let error = one_line(&Topology::said("2x8xt4").unwrap().unwrap_err());
        assert!(error.contains("2x8xt4@100Gbit/s"), "{error}");
    }
}
