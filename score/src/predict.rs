//! A run's step time and memory: the compiler's Program, simulated by one representative rank a stage.
//!
//! Steps have up to thousands of micro-batches, of which all but the first and the last few are alike: a step is simulated with few and with a
//! few more, and what one more takes is taken for the rest. Durations being the same in every micro-batch, a schedule's times repeat once
//! the pipeline is full, so this is exact from then on (`many_micro_batches_take_what_few_foretell`).

use crate::run::{Refusal, Run};
use foretell_program::{Footprint, Layout, Plan, Program, Recompute, Schedule, compile_training};
use foretell_simulator::gpu::StageMemory;
use foretell_simulator::{Breakdown, CostModel, simulate_representatives};
use foretell_units::{Bytes, Seconds};

/// A prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicted {
    /// Of an optimizer step.
    pub step: Seconds,
    /// Its 10th percentile.
    pub p10: Seconds,
    /// Its 90th.
    pub p90: Seconds,
    /// What the fullest stage's device holds.
    pub memory: Footprint,
    /// Time in kernels of the stage that ends last.
    pub compute: Seconds,
}

/// A run whose Programs are compiled: what is left depends on durations only.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Micro-batches and Program: one, or two of which the second has more.
    pub programs: Vec<(usize, Program)>,
    micro_batches: usize,
    /// What each stage holds.
    pub memory: Vec<StageMemory>,
}

/// How far beyond a device's memory what is foretold has to be so that it counts as more than there is: memory itself is foretold so well.
const BEYOND: f64 = 1.15;

/// Compiles what a prediction needs. A run that does not state what is computed again computes as little as fits into the device's memory, where
/// its stack does so.
///
/// # Errors
/// [`Refusal`] where the compiler cannot lay the run out.
pub fn prepare(run: &Run) -> Result<Prepared, Refusal> {
    let first = &run.plan.layout.recompute;
    let prepared = compile(run, first)?;
    let capacity = Bytes::new((run.cluster.gpu.memory.value() * BEYOND) as u64);
    if run.recompute_is_stated || allocated(&prepared.memory(run)) <= capacity {
        return Ok(prepared);
    }
    let more: &[Recompute] = match first {
        Recompute::None => &[run.stack.selective.clone(), Recompute::Full],
        Recompute::Selective | Recompute::AllBut(_) => &[Recompute::Full],
        _ => &[],
    };
    let mut prepared = prepared;
    for recompute in more {
        prepared = compile(run, recompute)?;
        if allocated(&prepared.memory(run)) <= capacity {
            break;
        }
    }
    Ok(prepared)
}

/// What the allocator gave out of what a device holds.
pub(crate) fn allocated(held: &Footprint) -> Bytes {
    let allocated = Footprint { unused: Bytes::ZERO, context: Bytes::ZERO, ..*held };
    allocated.total()
}

fn compile(run: &Run, recompute: &Recompute) -> Result<Prepared, Refusal> {
    let micro_batches = run.plan.micro_batches().map_err(|error| Refusal(error.to_string()))?;
    let layout = &Layout { recompute: recompute.clone(), ..run.plan.layout.clone() };
    let period = if layout.schedule == Schedule::Interleaved { layout.pipeline } else { 1 };
    if layout.schedule == Schedule::Interleaved && !micro_batches.is_multiple_of(layout.pipeline) {
        return Err(Refusal(format!(
            "{micro_batches} micro-batches are no multiple of the {} stages that interleave",
            layout.pipeline
        )));
    }
    let few = if layout.pipeline == 1 { 2 } else { (layout.pipeline + 1).next_multiple_of(period).max(2 * period) };
    let counts = if few + period < micro_batches { vec![few, few + period] } else { vec![micro_batches] };
    let mut programs = Vec::with_capacity(counts.len());
    let mut memory = Vec::new();
    for count in counts {
        let plan = Plan { layout: layout.clone(), global_batch: layout.samples_at_once() * count, ..run.plan.clone() };
        let mut program = compile_training(&run.model, "model", &plan).map_err(|error| Refusal(error.to_string()))?;
        memory = program.lists.iter().map(|stage| StageMemory::of(stage, plan.precision)).collect();
        for stage in &mut program.lists {
            // Durations do not depend on places in memory.
            stage.buffers = Vec::new();
            stage.names = Vec::new();
            for instruction in &mut stage.instructions {
                (instruction.reads, instruction.writes) = Default::default();
            }
        }
        programs.push((count, program));
    }
    Ok(Prepared { programs, micro_batches, memory })
}

impl Prepared {
    /// The prediction with the run's costs.
    ///
    /// # Errors
    /// [`Refusal`] where the Program deadlocks.
    pub fn predict(&self, run: &Run) -> Result<Predicted, Refusal> {
        let costs = CostModel::of_clusters(&run.clusters(), &run.stack, run.format, run.workload());
        let mut steps = Vec::with_capacity(self.programs.len());
        for (count, program) in &self.programs {
            let simulation = simulate_representatives(program, &costs, |stage| run.kind_of(program, stage));
            let simulation = simulation.map_err(|error| Refusal(error.to_string()))?;
            let Breakdown { compute, optimizer, .. } = simulation.breakdown;
            steps.push((*count, Seconds::from(simulation.step), compute + optimizer));
        }
        let (step, compute) = match steps.as_slice() {
            [(few, few_step, few_compute), (more, more_step, more_compute)] => {
                let each = 1.0 / (more - few) as f64;
                let rest = (self.micro_batches - few) as f64;
                (
                    *few_step + (*more_step - *few_step) * (each * rest),
                    *few_compute + (*more_compute - *few_compute) * (each * rest),
                )
            }
            [(_, step, compute)] => (*step, *compute),
            _ => return Err(Refusal("nothing was compiled".into())),
        };
        let [low, high] = run.stack.spread.map(|ratio| ratio.powf(run.widening()));
        Ok(Predicted { step, p10: step * low, p90: step * high, memory: self.memory(run), compute })
    }

    /// What the fullest stage's device holds, as the run's stack takes it.
    pub fn memory(&self, run: &Run) -> Footprint {
        let of_stage = |stage: &StageMemory| stage.footprint(&run.stack, run.format, run.trained);
        self.memory.iter().map(of_stage).max_by_key(Footprint::total).unwrap_or_default()
    }
}

/// Step time and memory of a run.
///
/// # Errors
/// [`Refusal`] where it cannot be simulated.
pub fn predict(run: &Run) -> Result<Predicted, Refusal> {
    prepare(run)?.predict(run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::read_rows;
    use foretell_simulator::gpu::Profiles;

    fn run(layout: &str, batch: usize) -> Run {
        let header =
            "row_id,table,model,layers,hidden,heads,vocab,seq,gpu,n_gpus,dp,tp,pp,vpp,mbs,gbs,zero,precision,framework,step_s";
        let text = format!("{header}\na,t,GPT,8,1024,16,50257,1024,A100-SXM4-80GB,{layout},{batch},1,bf16,Megatron-LM 1,1\n");
        let rows = read_rows(&text).expect("rows");
        Run::of(&rows[0], Profiles::library().expect("sound")).expect("a run")
    }

    #[test]
    fn many_micro_batches_take_what_few_foretell() {
        // Devices, dp, tp, pp, vpp, micro-batch.
        for (layout, batch) in
            [("8,8,1,1,1,1", 96), ("8,2,2,2,1,1", 40), ("8,1,2,4,1,1", 24), ("4,1,1,4,2,1", 32), ("2,1,1,2,4,1", 24)]
        {
            let run = run(layout, batch);
            let prepared = prepare(&run).expect("compiles");
            assert_eq!(prepared.programs.len(), 2, "{layout}: too few micro-batches to leave any out");
            let few = prepared.predict(&run).expect("runs").step;
            let program = compile_training(&run.model, "model", &run.plan).expect("compiles");
            let all = Prepared { programs: vec![(prepared.micro_batches, program)], ..prepared };
            let all = all.predict(&run).expect("runs").step;
            assert!((few / all - 1.0).abs() < 2e-3, "{layout}: {few} beside {all}");
        }
    }

    #[test]
    fn who_does_not_say_what_is_computed_again_computes_what_does_not_fit() {
        let mut run = run("8,8,1,1,1,1", 16);
        run.recompute_is_stated = false;
        let roomy = predict(&run).expect("runs");
        run.cluster.gpu.memory = Bytes::new((allocated(&roomy.memory).value() * 0.7) as u64);
        let narrow = predict(&run).expect("runs");
        assert!(narrow.memory.total() < roomy.memory.total() && narrow.step > roomy.step, "{narrow:?} beside {roomy:?}");
        run.recompute_is_stated = true;
        assert_eq!(predict(&run).expect("runs").step, roomy.step);
    }

    #[test]
    fn more_devices_of_a_kind_take_less_time_and_less_memory() {
        let one = predict(&run("1,1,1,1,1,1", 16)).expect("runs");
        let eight = predict(&run("8,8,1,1,1,1", 16)).expect("runs");
        assert!(eight.step < one.step && eight.memory.total() < one.memory.total(), "{eight:?} beside {one:?}");
        assert!(one.p10 <= one.step && one.step <= one.p90);
    }
}
