//! This machine as a topology: its CPU cores, or the GPUs that NVML lists.

use crate::failure::{Failure, code};
use foretell_executor::machine;
use foretell_executor::nvml::{self, GpuFacts};
use foretell_topologies::{Discovered, DiscoveredGpu, ImportError, ImportOptions, Topology, discover, from_discovered};

/// Makes the topology of this machine's CPU cores.
pub fn local() -> Result<Topology, Failure> {
    let machine = machine::describe();
    Ok(discover(&machine.processors, &machine.memory, &machine.cores))
}

/// Makes the topology of this machine's GPUs from NVML.
pub fn local_gpus(name: &str) -> Result<Topology, Failure> {
    let gpus = nvml::gpus().map_err(Failure::of_input)?;
    if gpus.is_empty() {
        return Err(Failure::input(code::GPU, "NVIDIA's driver lists no GPU").hint("use `local`, this machine's CPU cores"));
    }
    let gpu = |gpu: GpuFacts| DiscoveredGpu {
        name: gpu.name,
        pci_device: gpu.pci_device,
        pcie: gpu.pcie,
        links: gpu.links,
        links_into_switches: gpu.links_into_switches,
        link_generation: gpu.link_generation,
    };
    let found = Discovered { gpus: gpus.into_iter().map(gpu).collect(), port_rates: nvml::port_rates() };
    let options = ImportOptions { name: name.into(), ..ImportOptions::default() };
    let text = from_discovered(&found, &options).map_err(|error| match error {
        ImportError::UnknownDevice { why, known } => {
            let hint = format!("write a topology file with the device's figures, or with a `base` among {known}");
            Failure::input(code::GPU, format!("the library does not have this GPU{why}")).hint(hint)
        }
        error => Failure::of_input(error),
    })?;
    Ok(Topology::from_yaml(&text, name)?)
}

/// The name of this machine's processor.
pub fn processor() -> String {
    machine::identity(1).device
}
