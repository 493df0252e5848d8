//! `foretell export`: writes a plan's step in other tools' formats, and the plan as a job of
//! another framework or of Slurm.

use crate::choices::usual_precision;
use crate::failure::{Failure, code};
use crate::inputs;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile, usual_bucket, usual_overlap};
use crate::predict;
use crate::trace_file::{self, TraceRanks};
use clap::{Args, ValueEnum};
use foretell_export::{AstraSim, Chakra, Framework, Job, JobFiles, Surroundings, change_file, export_job};
use foretell_program::{Layout, Plan, Profile, Rank};
use foretell_simulator::CostModel;
use foretell_simulator::PlanPrediction;
use foretell_units::diagnostic::one_line;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Write a plan as another framework's job, or its step for other tools
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  foretell export --plan plan.yaml --to chakra -o traces      (MLCommons Chakra traces, and what ASTRA-sim wants beside them)
  foretell export --plan plan.yaml --to perfetto -o trace.json
  foretell export --plan plan.yaml --to megatron -o job; cd job; bash run.sh
  foretell export --plan plan.yaml --to axolotl --into their.yaml -o changed      (the difference is printed)")]
pub struct Arguments {
    /// The plan
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// The format
    #[arg(long, value_enum)]
    to: Target,
    /// The framework's file that the plan was imported from: its settings change where it has
    /// them, and the rest of it stays. Output: a folder for the changed file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["profile", "oversubscribe"])]
    into: Option<PathBuf>,
    /// Measured costs, from `foretell calibrate`, for chakra and perfetto
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Output: a file for `perfetto`, a folder for all others
    #[arg(short, long, value_name = "PATH")]
    output: PathBuf,
    /// Let ranks share devices, to check a layout without timing it, for chakra and perfetto
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
    /// Arguments of Megatron-LM's `pretrain_gpt.py`
    Megatron,
    /// torchtitan's settings
    Torchtitan,
    /// DeepSpeed's configuration
    Deepspeed,
    /// Hugging Face Accelerate's configuration, with a Trainer's arguments
    Accelerate,
    /// TRL's settings of `trl sft`
    Trl,
    /// Axolotl's configuration
    Axolotl,
    /// LLaMA-Factory's configuration
    LlamaFactory,
    /// A recipe of torchtune
    Torchtune,
    /// A batch script that runs Foretell on Slurm
    Slurm,
}

impl Target {
    /// The framework whose job the target is. `None` for formats of a step.
    fn framework(self) -> Option<Framework> {
        match self {
            Target::Megatron => Some(Framework::Megatron),
            Target::Torchtitan => Some(Framework::Torchtitan),
            Target::Deepspeed => Some(Framework::Deepspeed),
            Target::Accelerate => Some(Framework::Accelerate),
            Target::Trl => Some(Framework::Trl),
            Target::Axolotl => Some(Framework::Axolotl),
            Target::LlamaFactory => Some(Framework::LlamaFactory),
            Target::Torchtune => Some(Framework::Torchtune),
            Target::Slurm => Some(Framework::Slurm),
            Target::Chakra | Target::Perfetto => None,
        }
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let loaded = PlanFile::load(&arguments.plan)?;
    if !matches!(arguments.to, Target::Slurm | Target::Perfetto) {
        loaded.require_equal_steps("a plan in another tool's format")?;
    }
    arguments.refuse_options_of_steps()?;
    if let Some(original) = &arguments.into {
        let Some(framework) = arguments.to.framework() else {
            let message = "a step's trace goes back to no file of settings";
            return Err(Failure::input(code::OPTION_VALUE, message).hint("leave out `--into`"));
        };
        return changed(&loaded, framework, original, &arguments.output, json);
    }
    if let Some(framework) = arguments.to.framework() {
        return job(&loaded, framework, &arguments.output, json);
    }
    let profile = inputs::profile(arguments.profile.as_deref())?;
    let predicted = predict::predict(&loaded, profile.as_ref(), arguments.oversubscribe)?;
    predict::print_caveats(
        &loaded.topology,
        &predicted.prediction,
        predicted.compiled.training.mesh.world_size(),
        &predicted.remarks,
    );
    match arguments.to {
        Target::Chakra => chakra(&predicted, &loaded, profile.as_ref(), &arguments.output, json),
        Target::Perfetto => perfetto(&predicted, &arguments.output, json),
        _ => unreachable!("invariant: a framework's job was written before"),
    }
}

impl Arguments {
    /// Refuses options about a step's prediction for formats that have none.
    fn refuse_options_of_steps(&self) -> Result<(), Failure> {
        let stated = [("--profile", self.profile.is_some()), ("--oversubscribe", self.oversubscribe)];
        match stated.into_iter().find(|(_, is_stated)| *is_stated && self.to.framework().is_some()) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("`{name}` is about a step, and a job of a framework has no prediction");
                Err(Failure::input(code::OPTION_VALUE, message).hint("leave it out, or use `--to chakra` or `--to perfetto`"))
            }
        }
    }
}

/// The document of `export` of a framework's job.
#[derive(Debug, Serialize, JsonSchema)]
pub struct JobAnswer {
    /// The folder that was written.
    folder: PathBuf,
    /// The files in it.
    files: Vec<String>,
    /// The command that runs the job.
    command: String,
    /// The release that the files are for.
    version: String,
    /// How the job differs from the plan that was asked for.
    differences: Vec<String>,
    /// The plan that the job expresses.
    plan: PlanFile,
}

/// The document of `export --to perfetto`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TraceAnswer {
    /// The trace.
    trace: PathBuf,
}

/// The document of `export --to chakra`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ChakraAnswer {
    /// The folder that was written.
    folder: PathBuf,
    /// The number of traces: one for each rank.
    traces: usize,
    /// The size of all traces together.
    bytes: usize,
    /// The command that runs them in ASTRA-sim; null if it cannot express the network.
    astra_sim: Option<String>,
}

/// Writes a plan as a framework's job, and prints the folder.
fn job(loaded: &LoadedPlan, framework: Framework, folder: &Path, json: bool) -> Result<(), Failure> {
    let (exported, plan) = write_job(loaded, framework, folder)?;
    let files: Vec<&str> = exported.files.iter().map(|(name, _)| name.as_str()).chain(["plan.yaml"]).collect();
    if json {
        return output::json(&JobAnswer {
            folder: folder.into(),
            files: files.into_iter().map(String::from).collect(),
            command: exported.command,
            version: exported.version.to_string(),
            differences: exported.differences,
            plan,
        });
    }
    output::line(&format!("{} in {}, for {}", files.join(", "), folder.display(), exported.version))?;
    output::line(&format!("run it with: cd {}; {}", folder.display(), exported.command))
}

/// The document of `export --into`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ChangedAnswer {
    /// The changed file.
    file: PathBuf,
    /// Removed and added lines, with `-` and `+` before them.
    changes: Vec<String>,
    /// How the job differs from the plan that was asked for.
    differences: Vec<String>,
}

/// Writes a plan into the file that its job was imported from, and prints the difference.
fn changed(loaded: &LoadedPlan, framework: Framework, original: &Path, folder: &Path, json: bool) -> Result<(), Failure> {
    let text = inputs::read(original)?;
    let beside = original.parent().unwrap_or(Path::new("."));
    let read_beside = |name: &str| inputs::read_beside(beside, Path::new(name)).and_then(Result::ok);
    let topology = &loaded.topology;
    let surroundings = Surroundings {
        launch_file: None,
        ranks: topology.device_count(),
        devices_per_node: topology.device_count() / topology.node_count().max(1),
        device: topology.device_kinds().first().map_or("h100-sxm-80g", |kind| kind.name.as_str()),
        precision: usual_precision(topology),
        micro_batch: None,
        sequence: None,
        vocab: None,
        tool: None,
        file: &read_beside,
    };
    let plan = without_usual_bucket(&loaded.plan, framework);
    let changed = change_file(&job_of(loaded, &plan), framework, &text, surroundings)
        .map_err(|error| Failure::of_input(error).in_file(original))?;
    let name = original.file_name().ok_or_else(|| Failure::input(code::OPTION_VALUE, "`--into` names no file"))?;
    let file = folder.join(name);
    output::write(&file, changed.text.as_bytes())?;
    for difference in &changed.job.differences {
        output::note(&format!("not the plan that was asked for: {difference}"));
    }
    if json {
        let (changes, differences) = (changed.difference, changed.job.differences);
        return output::json(&ChangedAnswer { file, changes, differences });
    }
    for line in &changed.difference {
        output::line(line)?;
    }
    let what = if changed.difference.is_empty() { "states the plan as it is" } else { "has these changes" };
    output::line(&format!("{} {what}", file.display()))
}

fn job_of<'a>(loaded: &'a LoadedPlan, plan: &'a Plan) -> Job<'a> {
    let topology = &loaded.topology;
    let devices_per_node = topology.device_count() / topology.node_count().max(1);
    Job { name: &loaded.model.name, model: &loaded.model.model, plan, devices_per_node }
}

/// The plan without its stack's usual bucket, if the framework chooses the bucket itself.
fn without_usual_bucket(plan: &Plan, framework: Framework) -> Plan {
    let own = Layout::default().bucket;
    let mut plan = plan.clone();
    if framework.chooses_bucket() && plan.layout.bucket == usual_bucket(&plan.stack, own) {
        plan.layout.bucket = own;
    }
    plan
}

/// Writes a plan as a framework's job, together with the plan that the job expresses.
pub fn write_job(loaded: &LoadedPlan, framework: Framework, folder: &Path) -> Result<(JobFiles, PlanFile), Failure> {
    let exported = exported(loaded, framework)?;
    for (name, text) in &exported.files {
        output::write(&folder.join(name), text.as_bytes())?;
    }
    let plan = expressed(loaded, framework, &exported, folder)?;
    output::write(&folder.join("plan.yaml"), plan.to_yaml()?.as_bytes())?;
    for difference in &exported.differences {
        output::note(&format!("not the plan that was asked for: {difference}"));
    }
    Ok((exported, plan))
}

/// Whether a folder has the plan of another job, which [`write_job`] would replace. The file that
/// the plan was read from does not count.
pub fn has_other_plan(loaded: &LoadedPlan, framework: Framework, folder: &Path) -> Result<bool, Failure> {
    let kept = folder.join("plan.yaml");
    let is_the_source = matches!((kept.canonicalize(), loaded.path.canonicalize()), (Ok(one), Ok(other)) if one == other);
    if is_the_source || !kept.exists() {
        return Ok(false);
    }
    let plan = expressed(loaded, framework, &exported(loaded, framework)?, folder)?;
    Ok(inputs::read(&kept)? != plan.to_yaml()?)
}

fn exported(loaded: &LoadedPlan, framework: Framework) -> Result<JobFiles, Failure> {
    export_job(&job_of(loaded, &without_usual_bucket(&loaded.plan, framework)), framework)
        .map_err(|error| Failure::of_input(error).in_file(&loaded.path))
}

/// The plan that a job expresses, as a file for `folder`, which must exist.
fn expressed(loaded: &LoadedPlan, framework: Framework, exported: &JobFiles, folder: &Path) -> Result<PlanFile, Failure> {
    let overlap = match framework {
        Framework::Slurm => exported.plan.overlap,
        _ => usual_overlap(&exported.plan.stack).unwrap_or_default(),
    };
    let mut expressed = Plan { overlap, ..exported.plan.clone() };
    if framework.chooses_bucket() && expressed.layout.bucket == Layout::default().bucket {
        expressed.layout.bucket = usual_bucket(&expressed.stack, expressed.layout.bucket);
    }
    let mut plan = PlanFile::new(loaded.file.model.clone(), loaded.file.topology.clone(), loaded.file.nodes, &expressed);
    plan.first_nodes.clone_from(&loaded.file.first_nodes);
    plan.input.clone_from(&loaded.file.input);
    plan.relative_to(loaded.path.parent().unwrap_or(Path::new(".")), folder)?;
    Ok(plan)
}

fn perfetto(predicted: &PlanPrediction, path: &Path, json: bool) -> Result<(), Failure> {
    let timelines = [&predicted.timeline];
    trace_file::write(path, predicted.program(), &timelines, &TraceRanks::Differing)?;
    if json {
        return output::json(&TraceAnswer { trace: path.into() });
    }
    output::line(&format!("the trace is in {}; open it at ui.perfetto.dev", path.display()))
}

fn chakra(
    predicted: &PlanPrediction,
    loaded: &LoadedPlan,
    profile: Option<&Profile>,
    folder: &Path,
    json: bool,
) -> Result<(), Failure> {
    let program = predicted.program();
    let ranks = program.mesh.world_size();
    let chakra = Chakra::new(program, &predicted.timeline)?;
    let name = &loaded.model.name;
    let mut bytes = 0;
    let bar = output::progress(ranks, "traces");
    for rank in (0..ranks).map(Rank) {
        bar.inc(1);
        let trace = chakra.trace(rank)?;
        bytes += trace.len();
        output::write(&folder.join(format!("{name}.{}.et", rank.0)), &trace)?;
    }
    bar.finish_and_clear();
    output::write(&folder.join("communicators.json"), chakra.communicators().as_bytes())?;
    // ASTRA-sim accepts one efficiency per class of link. It comes from the profile, or else from
    // the assumed defaults.
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
        // The traces can be used without these files.
        Err(error) => output::note(&format!("no network for ASTRA-sim: {}", one_line(error))),
    }
    let at = folder.display();
    let command = format!(
        "AstraSim_Analytical_Congestion_Aware --workload-configuration={at}/{name} --comm-group-configuration={at}/communicators.json \
         --system-configuration={at}/system.json --network-configuration={at}/network.yml \
         --remote-memory-configuration={at}/remote_memory.json"
    );
    if json {
        let command = astra_sim.is_ok().then_some(command);
        return output::json(&ChakraAnswer { folder: folder.into(), traces: ranks, bytes, astra_sim: command });
    }
    output::line(&format!("{ranks} traces ({bytes} bytes) are in {at}: {name}.RANK.et"))?;
    if astra_sim.is_ok() {
        output::line(&format!("ASTRA-sim 2 runs them with:\n{command}"))?;
    }
    Ok(())
}
