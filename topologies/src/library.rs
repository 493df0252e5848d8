//! The library of well-known clusters and devices: the YAML files in `library/`, compiled in.

use crate::error::{TopologyError, TopologyProblem};
use crate::spec::{self, DeviceSpec, TopologySpec};
use crate::text::At;
use foretell_units::suggest;
use std::collections::BTreeMap;

/// Name, file and text of each topology, in listing order.
const TOPOLOGIES: [(&str, &str, &str); 31] = [
    ("dgx-v100", "library/dgx-v100.yaml", include_str!("../library/dgx-v100.yaml")),
    ("dgx-a100-80g", "library/dgx-a100-80g.yaml", include_str!("../library/dgx-a100-80g.yaml")),
    ("dgx-h100", "library/dgx-h100.yaml", include_str!("../library/dgx-h100.yaml")),
    ("hgx-h200", "library/hgx-h200.yaml", include_str!("../library/hgx-h200.yaml")),
    ("dgx-h100-rails", "library/dgx-h100-rails.yaml", include_str!("../library/dgx-h100-rails.yaml")),
    ("pcie-l40s", "library/pcie-l40s.yaml", include_str!("../library/pcie-l40s.yaml")),
    ("tpu-v4", "library/tpu-v4.yaml", include_str!("../library/tpu-v4.yaml")),
    ("dgx-b200", "library/dgx-b200.yaml", include_str!("../library/dgx-b200.yaml")),
    ("gb200-nvl72", "library/gb200-nvl72.yaml", include_str!("../library/gb200-nvl72.yaml")),
    ("gb300-nvl72", "library/gb300-nvl72.yaml", include_str!("../library/gb300-nvl72.yaml")),
    ("hgx-h20", "library/hgx-h20.yaml", include_str!("../library/hgx-h20.yaml")),
    ("mi300x-8", "library/mi300x-8.yaml", include_str!("../library/mi300x-8.yaml")),
    ("mi325x-8", "library/mi325x-8.yaml", include_str!("../library/mi325x-8.yaml")),
    ("tpu-v5e", "library/tpu-v5e.yaml", include_str!("../library/tpu-v5e.yaml")),
    ("tpu-v5p", "library/tpu-v5p.yaml", include_str!("../library/tpu-v5p.yaml")),
    ("tpu-v6e", "library/tpu-v6e.yaml", include_str!("../library/tpu-v6e.yaml")),
    ("rtx4090-8", "library/rtx4090-8.yaml", include_str!("../library/rtx4090-8.yaml")),
    ("gtx1080ti-2", "library/gtx1080ti-2.yaml", include_str!("../library/gtx1080ti-2.yaml")),
    ("l4-8", "library/l4-8.yaml", include_str!("../library/l4-8.yaml")),
    ("grand-teton", "library/grand-teton.yaml", include_str!("../library/grand-teton.yaml")),
    ("perlmutter", "library/perlmutter.yaml", include_str!("../library/perlmutter.yaml")),
    ("aws-p4d", "library/aws-p4d.yaml", include_str!("../library/aws-p4d.yaml")),
    ("aws-p5", "library/aws-p5.yaml", include_str!("../library/aws-p5.yaml")),
    ("gcp-a3-mega", "library/gcp-a3-mega.yaml", include_str!("../library/gcp-a3-mega.yaml")),
    ("azure-nd-h100", "library/azure-nd-h100.yaml", include_str!("../library/azure-nd-h100.yaml")),
    ("dragonfly-a100", "library/dragonfly-a100.yaml", include_str!("../library/dragonfly-a100.yaml")),
    ("fat-tree-1024", "library/fat-tree-1024.yaml", include_str!("../library/fat-tree-1024.yaml")),
    ("cpu-pair", "library/cpu-pair.yaml", include_str!("../library/cpu-pair.yaml")),
    ("lab-2x1g", "library/lab-2x1g.yaml", include_str!("../library/lab-2x1g.yaml")),
    ("lab-4x1g-200m", "library/lab-4x1g-200m.yaml", include_str!("../library/lab-4x1g-200m.yaml")),
    ("lab-hetero", "library/lab-hetero.yaml", include_str!("../library/lab-hetero.yaml")),
];

pub(crate) const DEVICES: &str = include_str!("../library/devices.yaml");

pub(crate) fn topology_names() -> impl Iterator<Item = &'static str> {
    TOPOLOGIES.iter().map(|(name, _, _)| *name)
}

/// Returns the file name and the text of a library topology.
pub(crate) fn topology_text(name: &str) -> Result<(&'static str, &'static str), TopologyError> {
    entry(name).map(|(_, file, text)| (*file, *text))
}

/// Parses a library topology, to serve as a base.
pub(crate) fn topology_spec(name: &str) -> Result<TopologySpec, TopologyError> {
    let (_, file, text) = entry(name)?;
    spec::read(text).map_err(|error| error.in_file(file, text))
}

fn entry(name: &str) -> Result<&'static (&'static str, &'static str, &'static str), TopologyError> {
    TOPOLOGIES.iter().find(|(known, _, _)| *known == name).ok_or_else(|| {
        let hint = suggest(name, topology_names());
        TopologyProblem::UnknownName { what: "topology", name: name.into(), hint }.into()
    })
}

/// Reads the specifications of the library's device kinds, by name.
pub(crate) fn device_specs() -> Result<BTreeMap<String, At<DeviceSpec>>, TopologyError> {
    spec::read(DEVICES).map(|spec| spec.devices).map_err(|error| error.in_file(DEVICES_FILE, DEVICES))
}

/// The device kinds' file, for messages.
pub(crate) const DEVICES_FILE: &str = "library/devices.yaml";
