//! The input pipeline of a run on this machine, with costs that are measured on the run's own data.

use super::{Source, Waiting, costs, predict};
use crate::failure::Failure;
use crate::plan_file::LoadedPlan;
use foretell_executor::data::{Dataset, InputOptions};
use foretell_executor::{ExecutorError, input_costs, machine};
use foretell_simulator::PlanPrediction;
use foretell_topologies::{Architecture, Topology};

/// Predicts how long the steps of a run wait for samples; `None` if samples have no files of their
/// own. Measures costs that the plan does not state on the run's data.
pub fn waiting_for(
    loaded: &LoadedPlan,
    dataset: &Dataset,
    options: &InputOptions,
    predicted: &PlanPrediction,
) -> Result<Option<Waiting>, Failure> {
    // The plan may describe a pipeline, although this run's data has no files of samples.
    let Some(measured) = input_costs(dataset).map_err(ExecutorError::from)? else { return Ok(None) };
    let Some(costs) = costs(loaded, Some(measured)) else { return Ok(None) };
    let program = &predicted.compiled.training;
    let workers = dataset.workers(options, cores_per_rank(&loaded.topology, program.mesh.world_size()));
    let source = Source { costs, workers, prefetch: options.prefetch };
    Ok(predict(&source, &loaded.topology, program, &predicted.prediction))
}

/// The cores that each rank of a run has. Its kernels run on one of them, or on a GPU.
pub fn cores_per_rank(topology: &Topology, ranks: usize) -> usize {
    let is_cpu = topology.device_kinds().iter().all(|kind| kind.architecture == Architecture::Cpu);
    // The ranks of a cluster of GPUs are spread evenly over hosts like this one.
    let cores = if is_cpu { topology.device_count() } else { machine::allowed_cores().len() * topology.node_count() };
    cores / ranks.max(1)
}
