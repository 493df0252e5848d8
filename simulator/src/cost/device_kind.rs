//! The costs of one kind of device.

use super::communication::CommunicationTable;
use super::estimate::Estimate;
use super::kernel_table::KernelTable;
use super::parameters::Parameters;
use super::profiled_gpu::ProfiledGpu;
use super::roofline;
use crate::gpu::traced::MeasuredFramework;
use foretell_program::Profile;
use foretell_topologies::{Architecture, DeviceKind, LOCAL_DEVICE, Topology};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) struct KindCosts {
    pub(crate) kind: DeviceKind,
    /// The speed relative to the whole device that the samples describe: 0.5 if kernels take twice
    /// as long.
    pub(crate) speed: f64,
    pub(crate) parameters: Parameters,
    pub(crate) kernels: Option<KernelTable>,
    pub(crate) exchanges: Option<CommunicationTable>,
    /// The device scaled by a what-if question; `None` without a question.
    pub(crate) scaled_kind: Option<DeviceKind>,
    pub(crate) profiled_gpu: Option<ProfiledGpu>,
    /// The operators that a framework measured on this kind.
    pub(crate) framework: Option<Arc<MeasuredFramework>>,
    /// Values for the keys of the framework's operator tables that a plan does not state.
    pub(crate) framework_tables: Option<BTreeMap<String, String>>,
}

/// Returns true if a profile holds for a kind of device. One of these must be true:
///
/// - The profile names the kind.
/// - The profile names the library device on which the kind is based.
/// - The profile names a kind that differs only in its share of a core.
/// - The topology is a lab, whose CPU devices are cores of this machine, and the profile is of this
///   machine's cores.
pub(crate) fn is_of(profile: &Profile, kind: &DeviceKind, topology: &Topology) -> bool {
    let measured = || topology.device_kinds().iter().find(|kind| kind.name == profile.device);
    kind.name == profile.device
        || kind.base.as_ref() == Some(&profile.device)
        || measured().is_some_and(|measured| measured.is_like(kind))
        || (topology.is_lab() && kind.architecture == Architecture::Cpu && profile.device == LOCAL_DEVICE)
}

impl KindCosts {
    /// Returns true if a link connects the device to its host. A CPU's memory is the host's.
    pub(crate) fn has_host_link(&self) -> bool {
        self.kind.architecture != Architecture::Cpu
    }

    /// Returns the costs of a kind. A given `profile` must hold for the kind.
    pub(crate) fn new(kind: &DeviceKind, profile: Option<&Profile>) -> Self {
        let assumed = roofline::parameters(kind.architecture);
        let Some(profile) = profile else {
            let speed = kind.speed();
            return Self {
                kind: kind.clone(),
                speed,
                parameters: assumed.over(speed),
                kernels: None,
                exchanges: None,
                scaled_kind: None,
                profiled_gpu: None,
                framework: None,
                framework_tables: None,
            };
        };
        let measured = profile.speeds.iter().find(|speed| speed.device == kind.name && speed.speed > 0.0);
        let speed = measured.map_or(kind.speed(), |device| device.speed);
        let parameters = Parameters {
            instruction_overhead: Estimate::measured(&profile.instruction_overhead),
            stream_handoff: Estimate::measured(&profile.stream_handoff),
            launch: profile.launch,
            step_overhead: Estimate::measured(&profile.step_overhead),
            load_seconds_per_byte: profile.load_seconds_per_byte,
            communication_share: profile.communication_share.clamp(0.0, 1.0),
            copy_share: if kind.architecture == Architecture::Cpu { profile.communication_share.clamp(0.0, 1.0) } else { 0.0 },
            communication_growth: profile.communication_growth.filter(|growth| *growth > 0.0),
            interruption: profile.interruption,
            ..assumed
        };
        let kernels = KernelTable::new(&profile.kernels, kind);
        let exchanges = CommunicationTable::new(&profile.exchanges);
        Self {
            kind: kind.clone(),
            speed,
            parameters: parameters.over(speed),
            kernels: Some(kernels),
            exchanges,
            scaled_kind: None,
            profiled_gpu: None,
            framework: MeasuredFramework::of_profile(profile).map(Arc::new),
            framework_tables: None,
        }
    }
}
