//! `foretell simulate --beside`: other jobs on the same fabric, and how much the jobs slow each
//! other's steps.

use crate::failure::{Failure, code};
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict;
use foretell_program::{Compiled, Profile};
use foretell_reports::{Column, table};
use foretell_simulator::{CostModel, Folding, Job, Quantile, simulate_jobs};
use foretell_topologies::{NodeId, Topology};
use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;

/// A job with its predicted steps.
pub struct JobSteps {
    plan: String,
    first_node: String,
    nodes: usize,
    ranks: usize,
    alone: Seconds,
    beside: Seconds,
}

/// A job that is loaded and compiled.
struct Prepared {
    plan: String,
    compiled: Compiled,
    costs: CostModel,
    first_node: NodeId,
    nodes: usize,
}

/// Predicts the steps of a plan and of `others`, each given as `PLAN` or `PLAN@NODE`, on the first
/// plan's topology. A job without a node starts after the nodes of the job before it.
pub fn predict(
    loaded: &LoadedPlan,
    others: &[String],
    profile: Option<&Profile>,
    folding: Folding,
) -> Result<Vec<JobSteps>, Failure> {
    let topology = &loaded.topology;
    let mut jobs: Vec<Prepared> = vec![prepare(loaded, topology, profile, NodeId(0))?];
    for other in others {
        let (path, node) = match other.rsplit_once('@') {
            Some((path, node)) => (path, Some(node)),
            None => (other.as_str(), None),
        };
        let next = jobs.last().map_or(0, |job| job.first_node.0 + job.nodes);
        let first_node = node.map_or(Ok(NodeId(next)), |node| named_node(topology, node))?;
        jobs.push(prepare(&PlanFile::load(Path::new(path))?, topology, profile, first_node)?);
    }
    let placed: Vec<Job<'_>> =
        jobs.iter().map(|job| Job { program: &job.compiled.training, costs: &job.costs, first_node: job.first_node }).collect();
    let together = simulate_jobs(&placed, topology, Quantile::Median, folding)?;
    let mut steps = Vec::with_capacity(jobs.len());
    for ((prepared, job), beside) in jobs.iter().zip(&placed).zip(together) {
        let alone = simulate_jobs(std::slice::from_ref(job), topology, Quantile::Median, folding)?;
        steps.push(JobSteps {
            plan: prepared.plan.clone(),
            first_node: topology.node_name(prepared.first_node),
            nodes: prepared.nodes,
            ranks: prepared.compiled.training.mesh.world_size(),
            alone: alone.first().map_or(Seconds::ZERO, |simulation| simulation.step.into()),
            beside: beside.step.into(),
        });
    }
    Ok(steps)
}

fn prepare(loaded: &LoadedPlan, topology: &Topology, profile: Option<&Profile>, first_node: NodeId) -> Result<Prepared, Failure> {
    loaded.require_equal_steps("the prediction of several jobs")?;
    let plan = loaded.path.display().to_string();
    let compiled = loaded.compile()?;
    let ranks = compiled.training.mesh.world_size();
    let (mut nodes, mut devices) = (0, 0);
    while devices < ranks && first_node.0 + nodes < topology.node_count() {
        devices += topology.devices_of(NodeId(first_node.0 + nodes)).len();
        nodes += 1;
    }
    if devices < ranks {
        let hint = "use more `nodes`, or start it on an earlier one with `--beside plan.yaml@NODE`";
        return Err(Failure::input(
            code::TOO_FEW_DEVICES,
            format!(
                "the layout has {ranks} ranks, but from node {} on `{}` has {devices} devices",
                first_node.0,
                topology.name()
            ),
        )
        .hint(hint)
        .in_file(&loaded.path));
    }
    let costs = predict::costs(profile, topology, &loaded.plan, &loaded.model.model)?;
    Ok(Prepared { plan, compiled, costs, first_node, nodes })
}

/// Finds a node by name or number.
fn named_node(topology: &Topology, text: &str) -> Result<NodeId, Failure> {
    let nodes = topology.node_count();
    let by_number = text.parse().ok().filter(|&number: &usize| number < nodes);
    let found = by_number.or_else(|| (0..nodes).find(|&node| topology.node_name(NodeId(node)) == text));
    found.map(NodeId).ok_or_else(|| {
        let last = topology.node_name(NodeId(nodes.saturating_sub(1)));
        let hint = format!("nodes are numbered from 0 to {}; the last one is called `{last}`", nodes.saturating_sub(1));
        Failure::input(code::UNKNOWN_NAME, format!("`{}` has no node `{text}`", topology.name())).hint(hint)
    })
}

/// Formats the answer as a table.
pub fn listing(jobs: &[JobSteps], topology: &Topology) -> String {
    let rows: Vec<Vec<String>> = jobs
        .iter()
        .map(|job| {
            vec![
                job.plan.clone(),
                job.ranks.to_string(),
                format!("{} from `{}`", job.nodes, job.first_node),
                job.alone.to_string(),
                job.beside.to_string(),
                format!("{:.1} %", (job.ratio() - 1.0) * 100.0),
            ]
        })
        .collect();
    let columns = [
        Column::words("job"),
        Column::numbers("ranks"),
        Column::words("nodes"),
        Column::numbers("step alone"),
        Column::numbers("beside the others"),
        Column::numbers("longer by"),
    ];
    format!("One step of each job, started at once on `{}`:\n{}", topology.name(), table(&columns, &rows))
}

/// The answer as JSON.
pub fn document(jobs: &[JobSteps]) -> Vec<JobBesideAnswer> {
    let jobs = jobs.iter().map(|job| JobBesideAnswer {
        plan: job.plan.clone(),
        first_node: job.first_node.clone(),
        nodes: job.nodes,
        ranks: job.ranks,
        step_seconds_alone: job.alone.value(),
        step_seconds: job.beside.value(),
        ratio: job.ratio(),
    });
    jobs.collect()
}

/// A job that runs beside others.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "JobBeside")]
pub struct JobBesideAnswer {
    /// Its plan.
    plan: String,
    /// Its first node.
    first_node: String,
    /// Its nodes.
    nodes: usize,
    /// Its ranks.
    ranks: usize,
    /// Its step alone.
    step_seconds_alone: f64,
    /// Its step beside the others.
    step_seconds: f64,
    /// The step beside the others over the step alone.
    ratio: f64,
}

impl JobSteps {
    /// The step beside the other jobs over the step alone.
    fn ratio(&self) -> f64 {
        if self.alone > Seconds::ZERO { self.beside / self.alone } else { 1.0 }
    }
}
