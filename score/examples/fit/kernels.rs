//! Prints what a stage of a row holds in memory and how long its instructions take.

use foretell_program::{Axis, CollectiveAlgorithm, Operation, Rank};
use foretell_score::{CompiledRun, Run, published};
use foretell_simulator::gpu::{GpuCosts, NodeSpread, Profiles};
use std::collections::BTreeMap;

/// Prints the memory of all stages of a row and the slowest instructions of one stage.
pub fn print(profiles: &Profiles, row_id: &str, stage: usize) -> Result<(), Box<dyn std::error::Error>> {
    let row = published()?.into_iter().find(|row| row.row_id == row_id).ok_or("there is no such row")?;
    let run = Run::of(&row, profiles).map_err(|refusal| refusal.to_string())?;
    let compiled = CompiledRun::new(&run).map_err(|refusal| refusal.to_string())?;
    let costs = GpuCosts { cluster: &run.cluster, stack: &run.stack, format: run.format, workload: run.workload.clone() };
    let (count, program) = compiled.programs.first().ok_or("the run has no Program")?;
    let stage = program.lists.get(stage).ok_or("there is no such stage")?;
    // By description: seconds on the device, seconds on the host, number of instructions.
    let mut totals: BTreeMap<String, (f64, f64, usize)> = BTreeMap::new();
    for instruction in &stage.instructions {
        let (name, time, host) = match &*instruction.operation {
            Operation::Compute { kernel, accumulate, .. } => {
                let time = costs.kernel_time(kernel, *accumulate, program.precision);
                (format!("{:?} {kernel:?}", instruction.phase), time.device.value(), time.host.value())
            }
            Operation::Collective { kind, group, bytes, role, .. } => {
                let axes = &stage.groups[group.0 as usize];
                let rank = program.mesh.rank(program.mesh.coordinates(Rank(0)).with(Axis::Pipeline, stage.stage));
                let group = NodeSpread::of(axes, &program.mesh, rank, &run.cluster);
                let time = costs.collective_time(*kind, *role, &group, bytes.value(), CollectiveAlgorithm::Automatic).value();
                (format!("{:?} {kind:?} {axes} {bytes} {group:?}", instruction.phase), time, costs.communication_launch().value())
            }
            other => (other.kind().to_string(), 0.0, 0.0),
        };
        let total = totals.entry(name).or_default();
        *total = (total.0 + time, total.1 + host, total.2 + 1);
    }
    let mut totals: Vec<_> = totals.into_iter().collect();
    totals.sort_by(|total, other| other.1.0.total_cmp(&total.1.0));
    let prediction = compiled.predict(&run).map_err(|refusal| refusal.to_string())?;
    println!(
        "{row_id} with {count} micro-batches; all {} take {}, measured {:?}",
        run.plan.micro_batches()?,
        prediction.step,
        row.step_seconds()
    );
    for stage in &compiled.memory {
        let footprint = stage.footprint(&run.stack, run.format, &run.workload);
        println!(
            "   memory {stage:?}\n      {footprint:?} total {:?} GiB of {:?}",
            footprint.total().value() / 1073741824.0,
            row.number("mem_gib")
        );
    }
    let sum = totals.iter().map(|(_, (time, ..))| time).sum::<f64>();
    let share = prediction.compute / prediction.step;
    println!("   {sum:9.6} s in all; kernels take {share:.3} of the step on the stage that ends last");
    for (name, (time, host, count)) in totals.iter().take(30) {
        println!("   {time:9.6} s, host {host:9.6} s {count:5} {}", name.chars().take(150).collect::<String>());
    }
    Ok(())
}
