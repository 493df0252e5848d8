//! What the instructions of a row's stage take, the most first.

use foretell_program::{Axis, CollectiveAlgorithm, Operation, Rank};
use foretell_score::{Run, prepare, published};
use foretell_simulator::gpu::{GpuCosts, Profiles, Reachable};
use std::collections::BTreeMap;

/// Prints them.
pub fn print(profiles: &Profiles, row_id: &str, stage: usize) -> Result<(), Box<dyn std::error::Error>> {
    let row = published()?.into_iter().find(|row| row.row_id == row_id).ok_or("no such row")?;
    let run = Run::of(&row, profiles).map_err(|refusal| refusal.to_string())?;
    let prepared = prepare(&run).map_err(|refusal| refusal.to_string())?;
    let costs = GpuCosts { cluster: &run.cluster, stack: &run.stack, format: run.format, workload: run.workload() };
    let (count, program) = prepared.programs.first().ok_or("nothing is simulated")?;
    let stage = program.lists.get(stage).ok_or("no such stage")?;
    let mut totals: BTreeMap<String, (f64, f64, usize)> = BTreeMap::new();
    for instruction in &stage.instructions {
        let (name, time, host) = match &*instruction.operation {
            Operation::Compute { kernel, accumulate, .. } => {
                let time = costs.kernel_time(kernel, *accumulate, program.precision);
                (format!("{:?} {kernel:?}", instruction.phase), time.device.value(), time.host.value())
            }
            Operation::Collective { kind, group, bytes, role, .. } => {
                let place = &stage.groups[group.0 as usize];
                let rank = program.mesh.rank(program.mesh.coordinates(Rank(0)).with(Axis::Pipeline, stage.stage));
                let group = Reachable::of(place, &program.mesh, rank, &run.cluster);
                let time = costs.collective_time(*kind, *role, &group, bytes.value(), CollectiveAlgorithm::Automatic).value();
                (format!("{:?} {kind:?} {place} {bytes} {group:?}", instruction.phase), time, costs.exchange_launch().value())
            }
            other => (other.kind().to_string(), 0.0, 0.0),
        };
        let total = totals.entry(name).or_default();
        *total = (total.0 + time, total.1 + host, total.2 + 1);
    }
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by(|one, two| two.1.0.total_cmp(&one.1.0));
    let predicted = prepared.predict(&run).map_err(|refusal| refusal.to_string())?;
    println!(
        "{row_id} with {count} micro-batches; all {} take {}, measured {:?}",
        run.plan.micro_batches()?,
        predicted.step,
        row.step_seconds()
    );
    for stage in &prepared.memory {
        let held = stage.footprint(&run.stack, run.format, run.trained);
        println!(
            "   memory {stage:?}\n      {held:?} total {:?} GiB of {:?}",
            held.total().value() / 1073741824.0,
            row.number("mem_gib")
        );
    }
    let sum = totals.iter().map(|(_, (time, ..))| time).sum::<f64>();
    let busiest = predicted.compute / predicted.step;
    println!("   {sum:9.6} s in all; kernels are {busiest:.3} of the step on the busiest stage");
    for (name, (time, host, times)) in totals.iter().take(30) {
        println!("   {time:9.6} s, host {host:9.6} s {times:5} {}", name.chars().take(150).collect::<String>());
    }
    Ok(())
}
