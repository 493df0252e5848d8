//! The library: well-known clusters and devices, as the YAML files in `library/`, which are part of the binary.

use crate::assemble;
use crate::device::DeviceKind;
use crate::error::{TopologyError, TopologyProblem};
use crate::spec::{self, TopologySpec};
use crate::text::suggest;
use crate::topology::Topology;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Name, file and text of each topology, in the order in which they are listed.
const TOPOLOGIES: [(&str, &str, &str); 13] = [
    ("dgx-v100", "library/dgx-v100.yaml", include_str!("../library/dgx-v100.yaml")),
    ("dgx-a100-80g", "library/dgx-a100-80g.yaml", include_str!("../library/dgx-a100-80g.yaml")),
    ("dgx-h100", "library/dgx-h100.yaml", include_str!("../library/dgx-h100.yaml")),
    ("hgx-h200", "library/hgx-h200.yaml", include_str!("../library/hgx-h200.yaml")),
    ("dgx-h100-rails", "library/dgx-h100-rails.yaml", include_str!("../library/dgx-h100-rails.yaml")),
    ("pcie-l40s", "library/pcie-l40s.yaml", include_str!("../library/pcie-l40s.yaml")),
    ("tpu-v4", "library/tpu-v4.yaml", include_str!("../library/tpu-v4.yaml")),
    ("dragonfly-a100", "library/dragonfly-a100.yaml", include_str!("../library/dragonfly-a100.yaml")),
    ("fat-tree-1024", "library/fat-tree-1024.yaml", include_str!("../library/fat-tree-1024.yaml")),
    ("cpu-pair", "library/cpu-pair.yaml", include_str!("../library/cpu-pair.yaml")),
    ("lab-2x1g", "library/lab-2x1g.yaml", include_str!("../library/lab-2x1g.yaml")),
    ("lab-4x1g-200m", "library/lab-4x1g-200m.yaml", include_str!("../library/lab-4x1g-200m.yaml")),
    ("lab-hetero", "library/lab-hetero.yaml", include_str!("../library/lab-hetero.yaml")),
];

const DEVICES_FILE: &str = "library/devices.yaml";
const DEVICES: &str = include_str!("../library/devices.yaml");

/// The devices, read once.
static KINDS: LazyLock<Result<BTreeMap<String, DeviceKind>, TopologyError>> = LazyLock::new(|| {
    let read = || -> Result<BTreeMap<String, DeviceKind>, TopologyError> {
        let mut notes = Vec::new();
        let devices = spec::read(DEVICES)?.devices;
        devices
            .into_iter()
            .map(|(name, spec)| {
                let kind = assemble::device_kind(&name, &spec, &mut notes)?;
                Ok((name.clone(), DeviceKind { base: Some(name), ..kind }))
            })
            .collect()
    };
    read().map_err(|error| error.in_file(DEVICES_FILE))
});

pub(crate) fn topology_names() -> impl Iterator<Item = &'static str> {
    TOPOLOGIES.iter().map(|(name, _, _)| *name)
}

pub(crate) fn topology(name: &str) -> Result<Topology, TopologyError> {
    let (_, file, text) = entry(name)?;
    Topology::from_yaml(text, file)
}

/// The description of a library topology, to build on.
pub(crate) fn topology_spec(name: &str) -> Result<TopologySpec, TopologyError> {
    let (_, file, text) = entry(name)?;
    spec::read(text).map_err(|error| error.in_file(file))
}

fn entry(name: &str) -> Result<&'static (&'static str, &'static str, &'static str), TopologyError> {
    TOPOLOGIES.iter().find(|(known, _, _)| *known == name).ok_or_else(|| {
        let hint = suggest(name, topology_names());
        TopologyProblem::UnknownName { what: "topology", name: name.into(), hint }.into()
    })
}

/// The library's device of that name, if it has one.
pub(crate) fn device_kind(name: &str) -> Result<Option<DeviceKind>, TopologyError> {
    KINDS.as_ref().map(|kinds| kinds.get(name).cloned()).map_err(Clone::clone)
}

/// The names of the library's devices.
pub(crate) fn device_names() -> Result<impl Iterator<Item = &'static str>, TopologyError> {
    KINDS.as_ref().map(|kinds| kinds.keys().map(String::as_str)).map_err(Clone::clone)
}
