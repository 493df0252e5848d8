//! `foretell export`: writes a plan's step in other tools' formats.

use crate::failure::Failure;
use crate::inputs;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict::{self, PredictedPlan};
use clap::{Args, ValueEnum};
use foretell_export::{AstraSim, Chakra};
use foretell_program::{Profile, Rank};
use foretell_reports::write_trace;
use foretell_simulator::CostModel;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Write a plan's step for other tools
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  foretell export --plan plan.yaml --to chakra -o traces      (MLCommons Chakra traces, and what ASTRA-sim wants beside them)
  foretell export --plan plan.yaml --to perfetto -o trace.json")]
pub struct Arguments {
    /// The plan
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// The format
    #[arg(long, value_enum)]
    to: Target,
    /// Measured costs, from `foretell calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Output: a folder for `chakra`, a file for `perfetto`
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
    /// Let ranks share devices, to check a layout without timing it
    #[arg(long)]
    oversubscribe: bool,
}

/// Formats that can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Target {
    /// MLCommons Chakra execution traces, and the files with which ASTRA-sim 2 runs them
    Chakra,
    /// One trace for Perfetto or Chrome
    Perfetto,
    #[value(hide = true)]
    Megatron,
    #[value(hide = true)]
    Torchtitan,
    #[value(hide = true)]
    Deepspeed,
    #[value(hide = true)]
    Accelerate,
    #[value(hide = true)]
    Slurm,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    if !matches!(arguments.to, Target::Chakra | Target::Perfetto) {
        let name = arguments.to.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
        let hint = "this version writes `chakra` and `perfetto`";
        return Err(Failure::Undone(format!("plans cannot be exported to `{name}` yet; hint: {hint}")));
    }
    let loaded = PlanFile::load(&arguments.plan)?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let predicted = predict::predict(&loaded, profile.as_ref(), arguments.oversubscribe)?;
    predict::print_caveats(&loaded.topology, &predicted.prediction, predicted.compiled.training.mesh.world_size());
    match arguments.to {
        Target::Chakra => chakra(&predicted, &loaded, profile.as_ref(), &arguments.output, json),
        _ => perfetto(&predicted, &arguments.output, json),
    }
}

fn perfetto(predicted: &PredictedPlan, path: &Path, json: bool) -> Result<(), Failure> {
    let mut text = Vec::new();
    write_trace(&predicted.compiled.training, &[&predicted.simulation.timeline], &mut text)?;
    output::write(path, &text)?;
    if json {
        return output::json(&json!({"trace": path}));
    }
    output::line(&format!("the trace is in {}; open it at ui.perfetto.dev", path.display()))
}

fn chakra(
    predicted: &PredictedPlan,
    loaded: &LoadedPlan,
    profile: Option<&Profile>,
    folder: &Path,
    json: bool,
) -> Result<(), Failure> {
    let program = &predicted.compiled.training;
    let ranks = program.mesh.world_size();
    let chakra = Chakra::new(program, &predicted.simulation.timeline)?;
    let name = &loaded.model.name;
    let mut bytes = 0;
    for rank in (0..ranks).map(Rank) {
        let trace = chakra.trace(rank)?;
        bytes += trace.len();
        output::write(&folder.join(format!("{name}.{}.et", rank.0)), &trace)?;
    }
    output::write(&folder.join("communicators.json"), chakra.communicators().as_bytes())?;
    // Share of a link's rate that long messages reach, by nccl-tests or the profile. A stack's own
    // costs have no single rate.
    let links = CostModel::new(profile, &loaded.topology).links;
    let astra_sim = AstraSim::new(&loaded.topology, ranks, &|class| links.of(class));
    match &astra_sim {
        Ok(files) => {
            for (file, text) in [
                ("network.yml", &files.network),
                ("system.json", &files.system),
                ("remote_memory.json", &files.remote_memory),
                ("logical_topology.json", &files.logical_topology),
            ] {
                output::write(&folder.join(file), text.as_bytes())?;
            }
        }
        // The traces are complete without these files.
        Err(error) => output::note(&format!("no network for ASTRA-sim: {error}")),
    }
    let at = folder.display();
    let command = format!(
        "AstraSim_Analytical_Congestion_Aware --workload-configuration={at}/{name} --comm-group-configuration={at}/communicators.json \
         --system-configuration={at}/system.json --network-configuration={at}/network.yml \
         --remote-memory-configuration={at}/remote_memory.json"
    );
    if json {
        let command = astra_sim.is_ok().then_some(command);
        return output::json(&json!({"folder": folder, "traces": ranks, "bytes": bytes, "astra_sim": command}));
    }
    output::line(&format!("{ranks} traces ({bytes} bytes) are in {at}: {name}.RANK.et"))?;
    if astra_sim.is_ok() {
        output::line(&format!("ASTRA-sim 2 runs them with:\n{command}"))?;
    }
    Ok(())
}
