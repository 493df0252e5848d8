//! The costs of one kind of device.

use super::communication::CommunicationTable;
use super::estimate::Estimate;
use super::kernel_table::KernelTable;
use super::parameters::Parameters;
use super::profiled_gpu::ProfiledGpu;
use super::roofline;
use foretell_program::Profile;
use foretell_topologies::{Architecture, DeviceKind, LOCAL_DEVICE, Topology};

#[derive(Clone, Debug)]
pub(crate) struct KindCosts {
    pub(crate) kind: DeviceKind,
    /// How fast it is beside a whole device of its figures, of which the samples are.
    pub(crate) speed: f64,
    pub(crate) parameters: Parameters,
    pub(crate) kernels: Option<KernelTable>,
    pub(crate) exchanges: Option<CommunicationTable>,
    /// The device that a what-if question is about.
    pub(crate) scaled_kind: Option<DeviceKind>,
    pub(crate) profiled_gpu: Option<ProfiledGpu>,
}

/// Whether a profile was measured on a kind of device: on that very kind, on the library's device
/// that it was made from, on one that is alike but for the share that it has of a core, or, for a
/// lab's devices, on this machine's cores, of which they are made.
pub(crate) fn is_of(profile: &Profile, kind: &DeviceKind, topology: &Topology) -> bool {
    let measured = || topology.device_kinds().iter().find(|one| one.name == profile.device);
    kind.name == profile.device
        || kind.base.as_ref() == Some(&profile.device)
        || measured().is_some_and(|measured| measured.is_like(kind))
        || (topology.is_lab() && kind.architecture == Architecture::Cpu && profile.device == LOCAL_DEVICE)
}

impl KindCosts {
    /// Whether a link joins it to its host; a processor's memory is the host's.
    pub(crate) fn has_host_link(&self) -> bool {
        self.kind.architecture != Architecture::Cpu
    }

    /// The costs of a kind, for which the profile holds if there is one.
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
            };
        };
        let measured = profile.speeds.iter().find(|one| one.device == kind.name && one.speed > 0.0);
        let speed = measured.map_or(kind.speed(), |one| one.speed);
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
        }
    }
}
