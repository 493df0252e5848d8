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
use serde_json::json;
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

/// A job with the run that it makes, if Foretell submitted it.
struct Observed {
    job: SlurmJob,
    step: Option<LastStep>,
    /// Predicted over measured time of the last step.
    of_prediction: Option<f64>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let jobs: Vec<SlurmJob> = slurm::jobs(arguments.job)?;
    let jobs: Vec<Observed> = jobs.into_iter().filter(|job| arguments.job.is_some() || job.is_alive()).map(observe).collect();
    let nodes = if arguments.job.is_some() { Vec::new() } else { slurm::nodes()? };
    if json {
        return output::json(&json!({
            "nodes": nodes.iter().map(node_document).collect::<Vec<_>>(),
            "jobs": jobs.iter().map(job_document).collect::<Vec<_>>(),
        }));
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

/// The share of a node's CPUs that work. More processes than CPUs are no more than all of them.
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
    let rows = jobs.iter().map(|one| {
        let Observed { job, step, of_prediction } = one;
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

fn node_document(node: &SlurmNode) -> serde_json::Value {
    json!({
        "node": node.name, "state": node.state, "cpus": node.cpus.1, "allocated_cpus": node.cpus.0, "load": node.load, "busy": busy(node),
        "gpus": node.gpus().map(|gpus| gpus.count), "allocated_gpus": node.allocated_gpus(),
        "memory_bytes": node.memory.1 << 20, "allocated_memory_bytes": node.memory.0 << 20,
    })
}

fn job_document(one: &Observed) -> serde_json::Value {
    json!({
        "job": one.job.id, "name": one.job.name, "state": one.job.state, "time": one.job.time, "nodes": one.job.nodes, "place": one.job.place,
        "cpus": one.job.cpus, "folder": one.job.folder, "step": one.step.map(|step| step.step), "loss": one.step.map(|step| step.loss),
        "samples_per_second": one.step.map(|step| step.samples_per_second), "of_predicted_speed": one.of_prediction,
    })
}
