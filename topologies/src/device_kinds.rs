//! Builds device kinds from a file's figures. Figures that it leaves out come from the library
//! device that it names as base, if any.

use crate::device::{Architecture, DeviceKind};
use crate::error::{TopologyError, TopologyProblem};
use crate::library;
use crate::spec::DeviceSpec;
use crate::text::{At, Scalar};
use foretell_units::suggest;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The library's device kinds, read once.
static KINDS: LazyLock<Result<BTreeMap<String, DeviceKind>, TopologyError>> = LazyLock::new(|| {
    let mut notes = Vec::new();
    let kinds = library::device_specs()?.into_iter().map(|(name, spec)| {
        let kind =
            device_kind(&name, &spec, &mut notes).map_err(|error| error.in_file(library::DEVICES_FILE, library::DEVICES))?;
        Ok((name.clone(), DeviceKind { base: Some(name), ..kind }))
    });
    kinds.collect()
});

impl DeviceKind {
    /// Returns the library's device kind of that name, if it has one.
    ///
    /// # Errors
    /// [`TopologyError`] if the library is malformed. A test excludes this.
    pub fn library(name: &str) -> Result<Option<Self>, TopologyError> {
        of_library(name)
    }

    /// Names of the library's device kinds, sorted.
    ///
    /// # Errors
    /// As [`DeviceKind::library`].
    pub fn library_names() -> Result<impl Iterator<Item = &'static str>, TopologyError> {
        library_names()
    }
}

/// Returns the library's device kind of that name, if it has one.
pub(crate) fn of_library(name: &str) -> Result<Option<DeviceKind>, TopologyError> {
    KINDS.as_ref().map(|kinds| kinds.get(name).cloned()).map_err(Clone::clone)
}

/// Names of the library's device kinds.
pub(crate) fn library_names() -> Result<impl Iterator<Item = &'static str>, TopologyError> {
    KINDS.as_ref().map(|kinds| kinds.keys().map(String::as_str)).map_err(Clone::clone)
}

/// Builds a device kind. Figures that it leaves out come from its base. Library devices have no
/// base.
pub(crate) fn device_kind(name: &str, spec: &At<DeviceSpec>, notes: &mut Vec<String>) -> Result<DeviceKind, TopologyError> {
    let At { value: spec, place } = spec;
    let base = match &spec.base {
        None => None,
        Some(base) => Some(of_library(&base.value)?.ok_or_else(|| {
            let hint = library_names().map_or_else(|_| String::new(), |names| suggest(&base.value, names));
            let problem = TopologyProblem::UnknownName { what: "library device", name: base.value.clone(), hint };
            TopologyError::at(base.place, problem)
        })?),
    };
    let missing = |field, example: &str| {
        let hint = format!("write `{field}: {example}`, or build on a library device with `base`");
        TopologyError::at(*place, TopologyProblem::Missing { owner: format!("device `{name}`"), field, hint })
    };
    let own = |base: &DeviceKind| {
        let same = spec.memory.is_none()
            && spec.memory_bandwidth.is_none()
            && spec.peak.is_empty()
            && spec.power.is_none()
            && spec.link.is_none()
            && spec.host_link.is_none();
        base.source.as_ref().map(|source| if same { source.clone() } else { format!("{source}; changed in the topology file") })
    };

    let mut peak = base.as_ref().map(|base| base.peak.clone()).unwrap_or_default();
    for (format, rate) in &spec.peak {
        peak.insert(*format, rate.positive(&format!("peak.{format}"))?);
    }
    if peak.is_empty() {
        return Err(missing("peak", "{fp32: 15.7TFLOP/s}"));
    }
    let memory = spec.memory.as_ref().map(|memory| memory.positive("memory")).transpose()?;
    let memory_bandwidth = spec.memory_bandwidth.as_ref().map(|rate| rate.positive("memory_bandwidth")).transpose()?;
    let architecture = spec.architecture.or(base.as_ref().map(|base| base.architecture)).unwrap_or_else(|| {
        let (assumed, name_of_it) = if spec.cores.is_some() { (Architecture::Cpu, "cpu") } else { (Architecture::Gpu, "gpu") };
        notes.push(format!("device `{name}`: taken for a {name_of_it}, since the file does not say its `architecture`"));
        assumed
    });
    Ok(DeviceKind {
        name: name.to_owned(),
        base: base.as_ref().map(|base| base.name.clone()),
        architecture,
        memory: memory.or(base.as_ref().map(|base| base.memory)).ok_or_else(|| missing("memory", "32GiB"))?,
        memory_bandwidth: memory_bandwidth
            .or(base.as_ref().map(|base| base.memory_bandwidth))
            .ok_or_else(|| missing("memory_bandwidth", "900GB/s"))?,
        peak,
        power: spec
            .power
            .as_ref()
            .map(|power| power.positive("power"))
            .transpose()?
            .or(base.as_ref().and_then(|base| base.power)),
        idle_power: spec
            .idle_power
            .as_ref()
            .map(|power| power.quantity("idle_power"))
            .transpose()?
            .or(base.as_ref().and_then(|base| base.idle_power)),
        link: spec.link.as_ref().map(|link| link.positive("link")).transpose()?.or(base.as_ref().and_then(|base| base.link)),
        host_link: spec
            .host_link
            .as_ref()
            .map(|link| link.positive("host_link"))
            .transpose()?
            .or(base.as_ref().and_then(|base| base.host_link)),
        cores: spec.cores.as_ref().map(|cores| cores.count("cores")).transpose()?.or(base.as_ref().and_then(|base| base.cores)),
        cpu_quota: spec.cpu_quota.as_ref().map(cpu_quota).transpose()?.or(base.as_ref().and_then(|base| base.cpu_quota)),
        source: spec.source.clone().or(base.as_ref().and_then(own)),
    })
}

/// Reads a CPU quota, a share of a core's time: above 0, at most 1.
fn cpu_quota(quota: &At<Scalar>) -> Result<f64, TopologyError> {
    let share = quota.number("cpu_quota", 0.0)?;
    if share > 0.0 && share <= 1.0 {
        return Ok(share);
    }
    let what = format!("`cpu_quota: {share}` is no share of a core's time");
    Err(TopologyError::invalid(quota.place, what, "write a number above 0 and up to 1, such as `cpu_quota: 0.5`"))
}
