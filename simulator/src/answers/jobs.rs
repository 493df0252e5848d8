//! Several jobs on one cluster. Each Program has its own nodes, but all share the same links by
//! max-min fairness.
//!
//! All jobs start one step at the same time. Once a shorter step has ended, its links are free for
//! the rest of longer ones. So the result shows how much concurrent steps slow each other, and not
//! how repeating jobs drift against each other.

use super::simulation::{Simulation, run_each};
use crate::cost::{CostModel, Quantile};
use crate::engine::{Runnable, Scenario};
use crate::equivalence::{Folding, fold};
use crate::error::SimulationError;
use crate::lowering::{Draft, JobOffset, Lowered, Oversubscription, Threads};
use crate::network::Collectives;
use foretell_program::Program;
use foretell_topologies::{NodeId, Topology};
use std::collections::BTreeMap;

/// A Program and the nodes it runs on.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// The Program.
    pub program: &'a Program,
    /// Its costs, on the devices of the shared topology.
    pub costs: &'a CostModel,
    /// The node of its first rank. The other ranks follow on consecutive devices.
    pub first_node: NodeId,
}

/// Predicts one step of each job, with all jobs running at once. With a single job it equals
/// [`crate::simulate`] starting at `first_node`.
///
/// # Errors
/// [`SimulationError::SharedNode`] if two jobs would run on one node, and as [`crate::simulate`].
pub fn simulate_jobs(
    jobs: &[Job<'_>],
    topology: &Topology,
    quantile: Quantile,
    folding: Folding,
) -> Result<Vec<Simulation>, SimulationError> {
    let Some((first, others)) = jobs.split_first() else { return Ok(Vec::new()) };
    check_nodes(jobs, topology)?;
    let costs = others.iter().fold(first.costs.clone(), |costs, job| costs.and(job.costs));
    let mut first_kind = 0;
    let mut all: Option<Lowered<'_>> = None;
    for job in jobs {
        let offset = JobOffset { first_device: topology.devices_of(job.first_node).start, first_kind };
        first_kind += job.costs.kind_count();
        let draft = Draft::new(job.program, topology, &costs, Oversubscription::Refused, offset, Threads::All)?;
        let lowered = draft.lower(None, Collectives::Flow)?;
        all = Some(match all {
            None => lowered,
            Some(before) => before.merge(lowered),
        });
    }
    let Some(all) = all else { return Ok(Vec::new()) };
    let all = all.with_resources_numbered(topology);
    let all = if folding == Folding::On { fold(all, &[]) } else { all };
    let worlds: Vec<usize> = jobs.iter().map(|job| job.program.mesh.world_size()).collect();
    run_each(&Runnable::new(all), &Scenario { quantile, ..Scenario::default() }, &worlds)
}

/// Checks that no two jobs share a node and that every job has a device for each rank.
fn check_nodes(jobs: &[Job<'_>], topology: &Topology) -> Result<(), SimulationError> {
    let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
    for (number, job) in jobs.iter().enumerate() {
        let ranks = job.program.mesh.world_size();
        let nodes = topology.node_count();
        let first_device =
            if job.first_node.0 < nodes { topology.devices_of(job.first_node).start } else { topology.device_count() };
        let devices = topology.device_count() - first_device;
        if ranks > devices {
            return Err(SimulationError::TooFewDevices { ranks, devices, topology: topology.name().into() });
        }
        for node in job.first_node.0..nodes {
            if topology.devices_of(NodeId(node)).start >= first_device + ranks {
                break;
            }
            if let Some(other) = taken.insert(node, number) {
                return Err(SimulationError::SharedNode { jobs: [other, number], node: topology.node_name(NodeId(node)) });
            }
        }
    }
    Ok(())
}
