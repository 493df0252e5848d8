//! Predicts a run's step time and memory with one representative rank per stage.
//!
//! A step may have thousands of micro-batches. All micro-batches have equal durations, so once the
//! pipeline is full, a schedule's times repeat with each further one. So a step is simulated with
//! few micro-batches, then with more, and the difference is extrapolated. The test
//! `many_micro_batches_take_what_few_predict` compares that with the complete step.

use crate::memory_figure::allocated;
use crate::refusal::Refusal;
use crate::run::Run;
use crate::traced_prediction::TracedPrediction;
use foretell_program::{Footprint, Layout, Plan, Program, Recompute, compile_training};
use foretell_simulator::gpu::StageMemory;
use foretell_simulator::{Breakdown, CostModel, simulate_representatives};
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, Seconds};

/// Predicted time and memory of an optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepPrediction {
    /// Step time.
    pub step: Seconds,
    /// 10th percentile of the step time.
    pub p10: Seconds,
    /// 90th percentile of the step time.
    pub p90: Seconds,
    /// Memory of the device of the fullest stage.
    pub memory: Footprint,
    /// Kernel time of the stage that ends last.
    pub compute: Seconds,
    /// Time of the model's FLOPs at the peak rate of all devices' data sheets. No step is shorter.
    pub least: Seconds,
    /// Memory as the framework's own code allocates it, if it was traced.
    pub traced: Option<TracedPrediction>,
}

/// A run's compiled Programs. Everything else depends only on durations, so a fit compiles each run
/// once and predicts it with many values.
#[derive(Clone, Debug)]
pub struct CompiledRun {
    /// One or two numbers of micro-batches, ascending, each with its Program.
    pub programs: Vec<(usize, Program)>,
    /// Micro-batches of the complete step.
    micro_batches: usize,
    /// Memory of each stage.
    pub memory: Vec<StageMemory>,
    /// Recomputation of the run. If it was not settled, it was chosen so that the memory fits.
    pub recompute: Recompute,
}

/// Predicted memory must exceed a device's memory by this factor to count as not fitting, which is
/// the precision of memory predictions.
const MEMORY_TOLERANCE: f64 = 1.15;

impl CompiledRun {
    /// Compiles a run. If its recomputation is not settled, chooses the least that fits into the
    /// device's memory.
    ///
    /// # Errors
    /// [`Refusal`] if the compiler cannot lay out the run.
    pub fn new(run: &Run) -> Result<Self, Refusal> {
        let first = &run.plan.layout.recompute;
        let capacity = Bytes::new((run.cluster.gpu.memory.value() * MEMORY_TOLERANCE) as u64);
        let mut compiled = Self::with_recompute(run, first)?;
        if run.recompute_is_settled {
            return Ok(compiled);
        }
        let more: &[Recompute] = match first {
            Recompute::None => &[run.stack.defaults.selective.clone(), Recompute::Full],
            Recompute::Selective | Recompute::AllBut(_) => &[Recompute::Full],
            _ => &[],
        };
        for recompute in more {
            if allocated(&compiled.memory(run)) <= capacity {
                break;
            }
            compiled = Self::with_recompute(run, recompute)?;
        }
        Ok(compiled)
    }

    fn with_recompute(run: &Run, recompute: &Recompute) -> Result<Self, Refusal> {
        let micro_batches = run.plan.micro_batches().map_err(|error| Refusal(one_line(&error)))?;
        let layout = &Layout { recompute: recompute.clone(), ..run.plan.layout.clone() };
        // Interleaved schedules take micro-batches in groups of one per stage.
        let period = layout.schedule.group_size(layout.pipeline);
        if !micro_batches.is_multiple_of(period) {
            return Err(Refusal(format!(
                "{micro_batches} micro-batches are not a multiple of the {} interleaved stages",
                layout.pipeline
            )));
        }
        let few = if layout.pipeline == 1 { 2 } else { (layout.pipeline + 1).next_multiple_of(period).max(2 * period) };
        let counts = if few + period < micro_batches { vec![few, few + period] } else { vec![micro_batches] };
        let mut programs = Vec::with_capacity(counts.len());
        let mut memory = Vec::new();
        for count in counts {
            let plan = Plan { layout: layout.clone(), global_batch: layout.samples_at_once() * count, ..run.plan.clone() };
            let mut program = compile_training(&run.model, "model", &plan).map_err(|error| Refusal(one_line(&error)))?;
            memory = program.lists.iter().map(|stage| StageMemory::of_workload(stage, plan.precision, &run.workload)).collect();
            // Durations do not depend on names, and depend on buffers only if routing is skewed.
            // Dropping both saves memory.
            for stage in program.lists.iter_mut().filter(|_| run.workload.routing.is_none()) {
                stage.buffers = Vec::new();
                stage.names = Vec::new();
                for instruction in &mut stage.instructions {
                    (instruction.reads, instruction.writes) = Default::default();
                }
            }
            programs.push((count, program));
        }
        Ok(Self { programs, micro_batches, memory, recompute: recompute.clone() })
    }

    /// Predicts the step with the costs of `run`, whose plan must be the compiled one.
    ///
    /// # Errors
    /// [`Refusal`] if the Program deadlocks.
    pub fn predict(&self, run: &Run) -> Result<StepPrediction, Refusal> {
        let clusters: Vec<_> = run.clusters().collect();
        let costs = CostModel::of_clusters(&clusters, &run.stack, run.format, run.workload.clone());
        let mut steps = Vec::with_capacity(self.programs.len());
        for (count, program) in &self.programs {
            let simulation = simulate_representatives(program, &costs, |stage| run.cluster_of_stage(program, stage));
            let simulation = simulation.map_err(|error| Refusal(one_line(&error)))?;
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
            _ => return Err(Refusal("the run has no Program".into())),
        };
        let [low, high] = run.stack.spread_on(run.clusters());
        Ok(StepPrediction {
            step,
            p10: step * low,
            p90: step * high,
            memory: self.memory(run),
            compute,
            least: self.least(run),
            traced: None,
        })
    }

    /// Returns the time of the model's FLOPs at the data sheet's peak of the fastest devices.
    fn least(&self, run: &Run) -> Seconds {
        let Some((few, program)) = self.programs.first() else { return Seconds::ZERO };
        let flops = program.model_flops.value() / *few as f64 * self.micro_batches as f64;
        let peak = run.clusters().map(|cluster| cluster.gpu.peak(run.format).value()).fold(1.0, f64::max);
        Seconds::new(flops / (peak * run.devices() as f64))
    }

    /// Returns the memory of the fullest stage's device under the run's stack.
    pub fn memory(&self, run: &Run) -> Footprint {
        let footprint = |stage: &StageMemory| stage.footprint(&run.stack, run.format, &run.workload);
        self.memory.iter().map(footprint).max_by_key(Footprint::total).unwrap_or_default()
    }
}

/// Predicts the step time and memory of a run.
///
/// # Errors
/// [`Refusal`] if the run cannot be compiled or simulated.
pub fn predict(run: &Run) -> Result<StepPrediction, Refusal> {
    CompiledRun::new(run)?.predict(run)
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
    fn many_micro_batches_take_what_few_predict() {
        // Devices, dp, tp, pp, vpp, mbs.
        for (layout, batch) in
            [("8,8,1,1,1,1", 96), ("8,2,2,2,1,1", 40), ("8,1,2,4,1,1", 24), ("4,1,1,4,2,1", 32), ("2,1,1,2,4,1", 24)]
        {
            let run = run(layout, batch);
            let compiled = CompiledRun::new(&run).expect("compiles");
            assert_eq!(compiled.programs.len(), 2, "{layout}: too few micro-batches to extrapolate");
            let few = compiled.predict(&run).expect("runs").step;
            let program = compile_training(&run.model, "model", &run.plan).expect("compiles");
            let all = CompiledRun { programs: vec![(compiled.micro_batches, program)], ..compiled };
            let all = all.predict(&run).expect("runs").step;
            assert!((few / all - 1.0).abs() < 2e-3, "{layout}: {few} beside {all}");
        }
    }

    #[test]
    fn unstated_recomputation_is_chosen_to_fit_the_memory() {
        let mut run = run("8,8,1,1,1,1", 16);
        run.recompute_is_settled = false;
        let unlimited = predict(&run).expect("runs");
        run.cluster.gpu.memory = Bytes::new((allocated(&unlimited.memory).value() * 0.7) as u64);
        let limited = predict(&run).expect("runs");
        assert!(
            limited.memory.total() < unlimited.memory.total() && limited.step > unlimited.step,
            "{limited:?} beside {unlimited:?}"
        );
        run.recompute_is_settled = true;
        assert_eq!(predict(&run).expect("runs").step, unlimited.step);
    }

    #[test]
    fn more_devices_take_less_time_and_less_memory_each() {
        let one = predict(&run("1,1,1,1,1,1", 16)).expect("runs");
        let eight = predict(&run("8,8,1,1,1,1", 16)).expect("runs");
        assert!(eight.step < one.step && eight.memory.total() < one.memory.total(), "{eight:?} beside {one:?}");
        assert!(one.p10 <= one.step && one.step <= one.p90);
    }
}
