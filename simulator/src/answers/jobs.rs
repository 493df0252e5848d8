//! Several jobs on one fabric: each Program on nodes of its own, all on the same links, which they share by max-min fairness.
//!
//! Every job makes one step, and all begin it at the same instant. A job whose step is shorter is gone for the rest of a longer one's: what is
//! foretold is how much a step is slowed by steps that run beside it, not how jobs that go on and on drift against each other.

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

/// A Program and where it runs.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// What it does.
    pub program: &'a Program,
    /// What that costs, on the devices of the same topology.
    pub costs: &'a CostModel,
    /// The node that has its first rank; the others follow device by device.
    pub first_node: NodeId,
}

/// Foretells one step of each job, all beside each other. Of a single job it is [`crate::simulate`] on other nodes than the first.
///
/// # Errors
/// [`SimulationError::SharedNode`] where two jobs would run on one node, and as [`crate::simulate`].
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

/// Every job has nodes of its own, and as many devices as ranks.
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
