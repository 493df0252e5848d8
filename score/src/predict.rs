//! A run's step time and memory: the compiler's Program, simulated by one representative rank a stage.
//!
//! Steps have up to thousands of micro-batches, of which all but the first and the last few are alike: a step is simulated with few and with a
//! few more, and what one more takes is taken for the rest. Durations being the same in every micro-batch, a schedule's times repeat once
//! the pipeline is full, so this is exact from then on (`many_micro_batches_take_what_few_foretell`).

use crate::run::{Refusal, Run};
use foretell_models::Kernel;
use foretell_program::{
    Buffer, BufferRole, Instruction, Layout, Operation, Plan, Program, Recompute, Schedule, StageProgram, compile_training,
};
use foretell_simulator::gpu::{AttentionKind, ProductFormat, Trained};
use foretell_simulator::{Breakdown, CostModel, simulate_representatives};
use foretell_units::Seconds;
use std::collections::{BTreeMap, BTreeSet};

/// A prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct Predicted {
    /// Of an optimizer step.
    pub step: Seconds,
    /// Its 10th percentile.
    pub p10: Seconds,
    /// Its 90th.
    pub p90: Seconds,
    /// Bytes of the fullest stage's device.
    pub memory: f64,
    /// Time in kernels of the stage that ends last.
    pub compute: Seconds,
}

/// A run whose Programs are compiled: what is left depends on durations only.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Micro-batches and Program: one, or two of which the second has more.
    pub programs: Vec<(usize, Program)>,
    micro_batches: usize,
    memory: Vec<StageMemory>,
}

/// What a stage's buffers take, by what they are for.
#[derive(Clone, Copy, Debug, Default)]
struct StageMemory {
    parameter: f64,
    gradient: f64,
    optimizer: f64,
    activations: f64,
    /// The most elements of attention's scores that are kept at a time, by stacks that do not fuse attention.
    scores: f64,
    /// Logits of a micro-batch.
    logits: f64,
}

/// How far beyond a device's memory what is foretold has to be so that it counts as more than there is: memory itself is foretold so well.
const BEYOND: f64 = 1.15;

/// Compiles what a prediction needs. A run that does not state what is computed again computes as little as fits into the device's memory, where
/// its stack does so.
///
/// # Errors
/// [`Refusal`] where the compiler cannot lay the run out.
pub fn prepare(run: &Run) -> Result<Prepared, Refusal> {
    let first = run.plan.layout.recompute;
    let prepared = compile(run, first)?;
    let capacity = run.cluster.gpu.memory.value() * BEYOND;
    if run.recompute_is_stated || prepared.memory(run) <= capacity {
        return Ok(prepared);
    }
    let more: &[Recompute] = match first {
        Recompute::None => &[Recompute::Selective, Recompute::Full],
        Recompute::Selective => &[Recompute::Full],
        _ => &[],
    };
    let mut prepared = prepared;
    for &recompute in more {
        prepared = compile(run, recompute)?;
        if prepared.memory(run) <= capacity {
            break;
        }
    }
    Ok(prepared)
}

fn compile(run: &Run, recompute: Recompute) -> Result<Prepared, Refusal> {
    let micro_batches = run.plan.micro_batches().map_err(|error| Refusal(error.to_string()))?;
    let layout = &Layout { recompute, ..run.plan.layout.clone() };
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
        memory = program.lists.iter().map(|stage| memory_of(stage, &plan)).collect();
        for stage in &mut program.lists {
            // Durations do not depend on places in memory.
            stage.buffers = Vec::new();
            stage.names = Vec::new();
            for instruction in &mut stage.instructions {
                (instruction.reads, instruction.writes) = (Vec::new(), Vec::new());
            }
        }
        programs.push((count, program));
    }
    Ok(Prepared { programs, micro_batches, memory })
}

fn memory_of(stage: &StageProgram, plan: &Plan) -> StageMemory {
    let precision = plan.precision;
    let mut memory = StageMemory::default();
    for buffer in stage.buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none()) {
        let elements = buffer.bytes.value() / buffer.data_type.size().value();
        match buffer.role {
            BufferRole::Parameter => memory.parameter += elements,
            BufferRole::Gradient => memory.gradient += elements,
            // A master copy and two moments in mixed precision; without a master copy in single precision.
            BufferRole::OptimizerState => memory.optimizer += elements / if precision.size().count() < 4 { 3.0 } else { 2.0 },
            _ => {}
        }
    }
    let persistent = stage.buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none());
    memory.scores = kept_scores(stage);
    let logits = |instruction: &Instruction| match instruction.operation {
        Operation::Compute { kernel: Kernel::CrossEntropy { rows, classes }, .. }
        | Operation::Compute { kernel: Kernel::LogitStatistics { rows, classes, .. }, .. } => rows as f64 * classes as f64,
        _ => 0.0,
    };
    memory.logits = stage.instructions.iter().map(logits).fold(0.0, f64::max);
    memory.activations = stage.arena.value() - persistent.map(|buffer| buffer.bytes.value()).sum::<f64>();
    if plan.layout.zero < 3 {
        // Gathered once and kept for the step: whole parameters, which take the place of their shards.
        let is_gathered =
            |buffer: &&Buffer| buffer.role == BufferRole::Parameter && !buffer.persistent && buffer.parent.is_none();
        let gathered: f64 = stage.buffers.iter().filter(is_gathered).map(|buffer| buffer.bytes.value()).sum();
        memory.activations = (memory.activations - gathered).max(0.0);
        memory.parameter = memory.parameter.max(gathered / precision.size().value());
    }
    memory
}

/// The most elements of scores at a time between an attention and its gradient: of those that are computed again only what was computed last.
fn kept_scores(stage: &StageProgram) -> f64 {
    let mut kept: BTreeMap<(u32, Option<u32>), f64> = BTreeMap::new();
    // From the end: an attention whose gradient is still to come, and that is not computed again before it, keeps its scores.
    let mut awaited: BTreeSet<(u32, Option<u32>)> = BTreeSet::new();
    let mut keepers: Vec<bool> = vec![false; stage.instructions.len()];
    let key = |instruction: &Instruction| (instruction.name, instruction.micro_batch);
    for (index, instruction) in stage.instructions.iter().enumerate().rev() {
        match instruction.operation {
            Operation::Compute { kernel: Kernel::AttentionGradient(_), .. } => {
                awaited.insert(key(instruction));
            }
            Operation::Compute { kernel: Kernel::Attention(_), .. } => keepers[index] = awaited.remove(&key(instruction)),
            _ => {}
        }
    }
    let (mut sum, mut most) = (0.0f64, 0.0f64);
    for (instruction, keeps) in stage.instructions.iter().zip(keepers) {
        match instruction.operation {
            Operation::Compute { kernel: Kernel::Attention(sizes), .. } if keeps => {
                let scores = (sizes.batch * sizes.heads()) as f64 * sizes.queries as f64 * sizes.keys as f64;
                kept.insert(key(instruction), scores);
                sum += scores;
            }
            Operation::Compute { kernel: Kernel::AttentionGradient(_), .. } => {
                sum -= kept.remove(&key(instruction)).unwrap_or(0.0);
            }
            _ => {}
        }
        most = most.max(sum);
    }
    most
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

    /// Bytes of the fullest stage's device, as the run's stack takes them.
    pub fn memory(&self, run: &Run) -> f64 {
        let rules = &run.stack.memory;
        let single = run.plan.precision.size().count() >= 4;
        let trains = f64::from(u8::from(run.workload().trained == Trained::All));
        let of_stage = |stage: &StageMemory| {
            let optimizer = if single { 8.0 } else { rules.optimizer };
            let parameter = if single { 4.0 } else { rules.parameter };
            let gradient = match run.format {
                _ if single => 4.0,
                ProductFormat::Fp16 => rules.half_gradient.unwrap_or(rules.gradient),
                _ => rules.gradient,
            };
            let scores = if matches!(run.stack.attention, AttentionKind::Unfused { .. }) { rules.score } else { 0.0 };
            stage.logits * rules.logit
                + stage.scores * scores * run.plan.precision.size().value() / 2.0
                + stage.parameter * parameter
                + stage.gradient * gradient * trains
                + stage.optimizer * optimizer * trains
                + stage.activations * rules.activations
        };
        self.memory.iter().map(of_stage).fold(0.0, f64::max)
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
        run.cluster.gpu.memory = foretell_units::Bytes::new((roomy.memory * 0.7) as u64);
        let narrow = predict(&run).expect("runs");
        assert!(narrow.memory < roomy.memory && narrow.step > roomy.step, "{narrow:?} beside {roomy:?}");
        run.recompute_is_stated = true;
        assert_eq!(predict(&run).expect("runs").step, roomy.step);
    }

    #[test]
    fn more_devices_of_a_kind_take_less_time_and_less_memory() {
        let one = predict(&run("1,1,1,1,1,1", 16)).expect("runs");
        let eight = predict(&run("8,8,1,1,1,1", 16)).expect("runs");
        assert!(eight.step < one.step && eight.memory < one.memory, "{eight:?} beside {one:?}");
        assert!(one.p10 <= one.step && one.step <= one.p90);
    }
}
