//! `foretell doctor`: reports what this machine has and what is missing.

use crate::failure::Failure;
use crate::output;
use clap::Args;
use foretell_executor::backend::{CudaError, DeviceDescription, Library, devices};
use foretell_executor::machine;
use foretell_executor::transport::Mpi;
use foretell_units::diagnostic::{Mistake, one_line};
use schemars::JsonSchema;
use serde::Serialize;

/// Report what this machine has (cores, vector units, memory, GPUs, libraries, rights) and what is
/// missing
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  foretell doctor")]
pub struct Arguments {}

/// One thing that was checked.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Finding {
    /// The thing.
    what: &'static str,
    /// Whether this machine has it.
    found: bool,
    /// Its version or size, or what is missing.
    detail: String,
}

/// Runs the command.
pub fn run(_arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let findings = findings();
    if json {
        return output::json_as_it_is(&findings);
    }
    for finding in findings {
        let mark = if finding.found { "ok  " } else { "none" };
        output::line(&format!("{mark}  {:<16} {}", finding.what, finding.detail))?;
    }
    Ok(())
}

fn findings() -> Vec<Finding> {
    let cores = machine::allowed_cores();
    let machine = machine::describe();
    let identity = machine::identity(machine::core_count());
    let memory =
        machine.memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap_or("unknown").trim().to_string();
    let flags = machine.processors.lines().find(|line| line.starts_with("flags")).unwrap_or_default().to_string();
    let vector = ["avx512f", "avx512_bf16", "amx_bf16", "avx2", "fma"]
        .into_iter()
        .filter(|flag| flags.split_whitespace().any(|word| word == *flag))
        .collect::<Vec<_>>();
    let gpus = devices();
    let mpi = Mpi::version();
    let missing = foretell_lab::missing();
    let missing_for_quotas = foretell_lab::missing_for_quotas();
    let finding = |what, found, detail: String| Finding { what, found, detail };
    let mut findings = vec![
        finding("CPU", !cores.is_empty(), format!("{} with {} usable cores, {}", identity.device, cores.len(), identity.system)),
        finding("memory", true, format!("{memory} available")),
        finding(
            "vector units",
            !vector.is_empty(),
            if vector.is_empty() { "none; portable loops are used".into() } else { vector.join(", ") },
        ),
        finding("NVIDIA GPUs", gpus.as_ref().is_ok_and(|gpus| !gpus.is_empty()), said_of(&gpus)),
    ];
    findings.extend(Library::ALL.map(library));
    findings.extend([
        finding(
            "MPI",
            mpi.is_ok(),
            match mpi {
                Ok(version) if command("mpirun") => format!("{version}: `mpirun` can start ranks with `--transport mpi`"),
                Ok(version) => format!("{version}, without an mpirun that starts ranks"),
                Err(error) => format!("not needed: {}", one_line(&error)),
            },
        ),
        finding(
            "rights for a lab",
            missing.is_empty(),
            match missing.is_empty() {
                true => "made and removed a namespace with a shaped link: `foretell lab` works here".into(),
                false => format!("labs cannot be made here: missing {}", missing.join(", ")),
            },
        ),
        finding(
            "device speeds",
            missing_for_quotas.is_none(),
            match missing_for_quotas {
                None => "made and removed a control group with a quota: a lab's devices can have a `cpu_quota`".into(),
                Some(missing) => format!("a lab's devices can have no `cpu_quota`: missing {missing}"),
            },
        ),
    ]);
    findings
}

/// Describes the GPUs that the driver lists.
fn said_of(gpus: &Result<Vec<DeviceDescription>, CudaError>) -> String {
    match gpus {
        Ok(gpus) if gpus.is_empty() => "the driver lists none".into(),
        Ok(gpus) => {
            let each = |gpu: &DeviceDescription| {
                let (major, minor) = gpu.capability;
                format!("{} ({:.0} GiB, sm_{major}{minor})", gpu.name, gpu.memory as f64 / f64::from(1 << 30))
            };
            gpus.iter().map(each).collect::<Vec<_>>().join(", ")
        }
        Err(error) => one_line(error),
    }
}

/// Checks one of NVIDIA's libraries by loading it as a run would.
fn library(library: Library) -> Finding {
    let what = match library {
        Library::Driver => "CUDA driver",
        Library::Nvrtc => "NVRTC",
        Library::CublasLt => "cuBLASLt",
        Library::Cudnn => "cuDNN",
        Library::Nccl => "NCCL",
    };
    // Without a driver nothing works on a GPU, and the driver's own line says so.
    let fault = Library::Driver.is_present().then(|| library.fault()).flatten();
    let detail = match (library.version(), &fault) {
        (Some(version), Some(fault)) => format!("{version}, but its parts cannot be used, and it is not ({fault})"),
        (Some(version), None) => {
            let file = library.file().map(|file| format!(" from {}", file.display())).unwrap_or_default();
            format!("{version}{file}: {}", library.purpose())
        }
        (None, _) => {
            let message = format!("{library} cannot be loaded; only needed for GPUs: {}", library.purpose());
            one_line(&Mistake::new(message, library.hint()))
        }
    };
    Finding { what, found: library.is_present() && fault.is_none(), detail }
}

/// Whether a program is on the path.
fn command(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}
