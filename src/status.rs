//! `foretell status`: the utilisation of a Slurm cluster's nodes and jobs. It changes nothing
//! there.

use crate::failure::Failure;
use crate::output;
use crate::progress_of::{self, LastStep};
use crate::run_folder::{Predicted, RunFolder};
use crate::slurm::{self, SlurmJob};
use clap::Args;
use foretell_reports::{Column, table};
use foretell_topologies::SlurmNode;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;

/// Show the utilisation of each node and job of a Slurm cluster
///
/// The load of a node is the number of its CPUs that were busy over the last minute. Jobs that
/// Foretell submitted also show their last step, and its speed over the predicted one.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  foretell status\n  foretell status 1234")]
pub struct Arguments {
    /// Only this job
    job: Option<u64>,
}

/// A job, with its run's last step if Foretell submitted it.
struct Observed {
    job: SlurmJob,
    step: Option<LastStep>,
    /// Predicted over measured time of the last step.
    of_prediction: Option<f64>,
}

/// The document of `status`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct StatusAnswer {
    /// The nodes; empty if one job was asked for.
    nodes: Vec<NodeAnswer>,
    /// The jobs.
    jobs: Vec<SlurmJobAnswer>,
}

/// A node of a Slurm cluster.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Node")]
struct NodeAnswer {
    /// The node's name.
    node: String,
    /// Its states, such as `IDLE+DRAIN`.
    state: String,
    /// Its CPUs.
    cpus: usize,
    /// CPUs allocated to jobs.
    allocated_cpus: usize,
    /// The number of CPUs that were busy over the last minute.
    load: Option<f64>,
    /// The share of its CPUs that are busy.
    busy: Option<f64>,
    /// Its GPUs.
    gpus: Option<usize>,
    /// GPUs allocated to jobs.
    allocated_gpus: usize,
    /// Its memory.
    memory_bytes: u64,
    /// Memory allocated to jobs.
    allocated_memory_bytes: u64,
}

/// A job of a Slurm cluster. The last four fields are null unless Foretell submitted it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Job")]
struct SlurmJobAnswer {
    /// Its number.
    job: u64,
    /// The job's name.
    name: String,
    /// Its state, such as `RUNNING`.
    state: String,
    /// How long it has run, as Slurm writes it.
    time: String,
    /// The number of its nodes.
    nodes: usize,
    /// Its nodes, or why it waits.
    place: String,
    /// Its CPUs.
    cpus: usize,
    /// The folder that it was submitted in.
    folder: String,
    /// Its last step.
    step: Option<usize>,
    /// The loss of that step.
    loss: Option<f64>,
    /// Samples in a second.
    samples_per_second: Option<f64>,
    /// Predicted over measured time of the last step.
    of_predicted_speed: Option<f64>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let jobs: Vec<SlurmJob> = slurm::jobs(arguments.job)?;
    let jobs: Vec<Observed> = jobs.into_iter().filter(|job| arguments.job.is_some() || job.is_alive()).map(observe).collect();
    let nodes = if arguments.job.is_some() { Vec::new() } else { slurm::nodes()? };
    if json {
        return output::json(&StatusAnswer {
            nodes: nodes.iter().map(node_document).collect(),
            jobs: jobs.iter().map(job_document).collect(),
        });
    }
    if !nodes.is_empty() {
        output::line(&node_table(&nodes))?;
    }
    if jobs.is_empty() {
        return output::line("no jobs");
    }
    output::line(&job_table(&jobs))
}

fn observe(job: SlurmJob) -> Observed {
    let run = Path::new(&job.folder).join(format!("run-{}", job.id));
    let step = progress_of::last_step(&run);
    let predicted = step.and_then(|_| RunFolder::at(&run).read::<Predicted>("predicted.json").ok());
    let of_prediction = step.zip(predicted).filter(|(step, _)| step.seconds > 0.0);
    let of_prediction = of_prediction.map(|(step, predicted)| predicted.prediction.step_seconds.value() / step.seconds);
    Observed { job, step, of_prediction }
}

/// The share of a node's CPUs that are busy: at most 1, even if more processes than CPUs run.
fn busy(node: &SlurmNode) -> Option<f64> {
    node.load.map(|load| (load / node.cpus.1.max(1) as f64).min(1.0))
}

fn percent(share: Option<f64>) -> String {
    share.map_or("-".into(), |share| format!("{:.0}%", 100.0 * share))
}

fn node_table(nodes: &[SlurmNode]) -> String {
    let rows = nodes.iter().map(|node| {
        let gpus = node.gpus().map_or("-".into(), |gpus| format!("{}/{}", node.allocated_gpus(), gpus.count));
        let memory = format!("{:.0}%", 100.0 * node.memory.0 as f64 / node.memory.1.max(1) as f64);
        let cpus = format!("{}/{}", node.cpus.0, node.cpus.1);
        vec![node.name.clone(), node.state.to_lowercase(), cpus, percent(busy(node)), gpus, memory]
    });
    let numbers = ["CPUs of jobs", "busy", "GPUs of jobs", "memory of jobs"].map(Column::numbers);
    let columns = [&["node", "state"].map(Column::words)[..], &numbers].concat();
    table(&columns, &rows.collect::<Vec<_>>())
}

fn job_table(jobs: &[Observed]) -> String {
    let rows = jobs.iter().map(|observed| {
        let Observed { job, step, of_prediction } = observed;
        let step_of = |text: fn(&LastStep) -> String| step.as_ref().map_or("-".into(), text);
        vec![
            job.id.to_string(),
            job.name.clone(),
            job.state.to_lowercase(),
            job.time.clone(),
            job.place.clone(),
            job.cpus.to_string(),
            step_of(|step| step.step.to_string()),
            step_of(|step| format!("{:.1}", step.samples_per_second)),
            percent(*of_prediction),
        ]
    });
    let words = ["job", "name", "state", "time", "nodes"].map(Column::words);
    let numbers = ["CPUs", "step", "samples/s", "of predicted speed"].map(Column::numbers);
    table(&[&words[..], &numbers].concat(), &rows.collect::<Vec<_>>())
}

fn node_document(node: &SlurmNode) -> NodeAnswer {
    NodeAnswer {
        node: node.name.clone(),
        state: node.state.clone(),
        cpus: node.cpus.1,
        allocated_cpus: node.cpus.0,
        load: node.load,
        busy: busy(node),
        gpus: node.gpus().map(|gpus| gpus.count),
        allocated_gpus: node.allocated_gpus(),
        memory_bytes: node.memory.1 << 20,
        allocated_memory_bytes: node.memory.0 << 20,
    }
}

fn job_document(one: &Observed) -> SlurmJobAnswer {
    SlurmJobAnswer {
        job: one.job.id,
        name: one.job.name.clone(),
        state: one.job.state.clone(),
        time: one.job.time.clone(),
        nodes: one.job.nodes,
        place: one.job.place.clone(),
        cpus: one.job.cpus,
        folder: one.job.folder.clone(),
        step: one.step.map(|step| step.step),
        loss: one.step.map(|step| step.loss),
        samples_per_second: one.step.map(|step| step.samples_per_second),
        of_predicted_speed: one.of_prediction,
    }
}
