//! The cost of a checkpoint: how long a step waits while ranks copy their state, and how long it
//! takes until the checkpoint is on storage, while later steps run.
//!
//! Ranks write to one storage, which is never idle while a rank has something to write. So the time
//! at which everything is written does not depend on how storage divides its rate among ranks. This
//! file knows instructions that save and write, and no layout.

use crate::cost::CostModel;
use foretell_program::{Operation, Program, Rank};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{Bytes, BytesPerSecond, Picoseconds, Seconds};

/// The cost of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CheckpointCost {
    /// The time for which the next step waits.
    pub wait: Seconds,
    /// The time from the end of the step before the checkpoint until the checkpoint is on storage;
    /// `None` if the rate of storage is not known.
    pub written: Option<Seconds>,
    /// The size of all ranks' parts together.
    pub bytes: Bytes,
}

/// Predicts the cost of a checkpoint from the Program that saves. Rank r runs on device r modulo
/// the number of devices, as in a simulation.
///
/// The rate of storage comes from the calibration, or else from the topology.
pub fn checkpoint_cost(saving: &Program, topology: &Topology, costs: &CostModel) -> CheckpointCost {
    let devices = topology.device_count().max(1);
    // Ranks that share a device copy one after the other.
    let mut busy = vec![Seconds::ZERO; devices.min(saving.mesh.world_size())];
    let mut parts = Vec::with_capacity(saving.mesh.world_size());
    for rank in 0..saving.mesh.world_size() {
        let device = rank % devices;
        let kind = topology.kind_index(DeviceId(device));
        let mut written = Bytes::ZERO;
        for instruction in &saving.list_of(Rank(rank)).instructions {
            match *instruction.operation {
                Operation::Save { bytes, .. } => busy[device] += costs.save_time(kind, bytes).median,
                Operation::Write { bytes } => written += bytes,
                _ => {}
            }
        }
        parts.push((Picoseconds::from(busy[device]), written));
    }
    let latency = costs.storage.map_or(Seconds::ZERO, |storage| storage.latency);
    let rate = costs.storage_rate(topology);
    CheckpointCost {
        wait: busy.into_iter().fold(Seconds::ZERO, Seconds::max),
        written: rate.map(|rate| latency + end_of_writes(&mut parts, rate)),
        bytes: parts.iter().map(|&(_, bytes)| bytes).sum(),
    }
}

/// The time at which storage has written all `parts`, each given by its arrival and size.
fn end_of_writes(parts: &mut [(Picoseconds, Bytes)], rate: BytesPerSecond) -> Seconds {
    parts.sort_unstable_by_key(|&(arrival, _)| arrival);
    parts.iter().fold(Seconds::ZERO, |end, &(arrival, bytes)| end.max(arrival.into()) + bytes / rate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::Model;
    use foretell_program::{Layout, Plan, StorageCosts, compile};

    #[test]
    fn storage_is_idle_only_while_no_rank_has_anything_to_write() {
        let at = |seconds: f64| Picoseconds::from(Seconds::new(seconds));
        let parts =
            |times: [f64; 3]| [(at(times[0]), Bytes::new(10)), (at(times[1]), Bytes::new(20)), (at(times[2]), Bytes::new(30))];
        let end = |times| end_of_writes(&mut parts(times), BytesPerSecond::new(10.0)).value();
        assert!((end([0.0, 0.0, 0.0]) - 6.0).abs() < 1e-9);
        assert!((end([2.0, 0.5, 0.0]) - 6.0).abs() < 1e-9);
        // Idle from 1 s to 5 s.
        assert!((end([0.0, 5.0, 5.5]) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_checkpoint_of_more_ranks_waits_less_and_is_written_at_one_rate() {
        let model: Model =
            serde_json::from_str(r#"{"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "sequence": 8}"#)
                .expect("a model");
        let topology = Topology::library("dgx-a100-80g").expect("in the library");
        let mut costs = CostModel::new(None, &topology);
        costs.storage =
            Some(StorageCosts { save: BytesPerSecond::new(1e10), write: BytesPerSecond::new(1e9), latency: Seconds::new(0.01) });
        let cost = |data, zero| {
            let plan = Plan::new(Layout { data, zero, ..Layout::default() }, 8);
            let compiled = compile(&model, "tiny", &plan).expect("the plan compiles");
            checkpoint_cost(&compiled.saving, &topology, &costs)
        };
        let (one, eight, sharded) = (cost(1, 0), cost(8, 0), cost(8, 1));
        assert!(one.wait > eight.wait && eight.wait > Seconds::ZERO, "{one:?} {eight:?}");
        for other in [eight, sharded] {
            // Parts are rounded up to whole elements.
            let more = other.bytes.count() as f64 / one.bytes.count() as f64 - 1.0;
            assert!((0.0..0.03).contains(&more), "{one:?} {other:?}");
        }
        let written = one.written.expect("the rate is known").value();
        let expected = one.wait.value() + one.bytes.value() / 1e9 + 0.01;
        assert!((written - expected).abs() < 1e-9, "{written} {expected}");
        let unknown = CostModel::new(None, &topology);
        let plan = Plan::new(Layout::default(), 8);
        let compiled = compile(&model, "tiny", &plan).expect("the plan compiles");
        assert_eq!(
            topology.storage_bandwidth().is_some(),
            checkpoint_cost(&compiled.saving, &topology, &unknown).written.is_some()
        );
    }
}
