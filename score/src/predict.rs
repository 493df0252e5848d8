//! A run's step time and memory: the compiler's Program, simulated by one representative rank a stage.
//!
//! Steps have up to thousands of micro-batches, of which all but the first and the last few are alike: a step is simulated with few and with a
//! few more, and what one more takes is taken for the rest. Durations being the same in every micro-batch, a schedule's times repeat once
//! the pipeline is full, so this is exact from then on (`many_micro_batches_take_what_few_foretell`).

use crate::run::{Refusal, Run};
use foretell_program::{BufferRole, Plan, Program, Schedule, compile_training};
use foretell_simulator::gpu::GpuCosts;
use foretell_simulator::simulate_folded;
use foretell_units::{DataType, Seconds};

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
    /// Time in kernels of the busiest stage.
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
}

/// Compiles what a prediction needs.
///
/// # Errors
/// [`Refusal`] where the compiler cannot lay the run out.
pub fn prepare(run: &Run) -> Result<Prepared, Refusal> {
    let micro_batches = run.plan.micro_batches().map_err(|error| Refusal(error.to_string()))?;
    let layout = &run.plan.layout;
    let period = if layout.schedule == Schedule::Interleaved { layout.pipeline } else { 1 };
    if layout.schedule == Schedule::Interleaved && !micro_batches.is_multiple_of(layout.pipeline) {
        return Err(Refusal(format!("{micro_batches} micro-batches are no multiple of the {} stages that interleave", layout.pipeline)));
    }
    let few = if layout.pipeline == 1 { 2 } else { (layout.pipeline + 1).next_multiple_of(period).max(2 * period) };
    let counts = if few + period < micro_batches { vec![few, few + period] } else { vec![micro_batches] };
    let mut programs = Vec::with_capacity(counts.len());
    let mut memory = Vec::new();
    for count in counts {
        let plan = Plan { global_batch: layout.samples_at_once() * count, ..run.plan.clone() };
        let mut program = compile_training(&run.model, "model", &plan).map_err(|error| Refusal(error.to_string()))?;
        memory = program.stages.iter().map(|stage| memory_of(stage, plan.precision)).collect();
        for stage in &mut program.stages {
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

fn memory_of(stage: &foretell_program::StageProgram, precision: DataType) -> StageMemory {
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
    memory.activations = stage.arena.value() - persistent.map(|buffer| buffer.bytes.value()).sum::<f64>();
    memory
}

impl Prepared {
    /// The prediction with the run's costs.
    ///
    /// # Errors
    /// [`Refusal`] where the Program deadlocks.
    pub fn predict(&self, run: &Run) -> Result<Predicted, Refusal> {
        let costs = GpuCosts { cluster: &run.cluster, stack: &run.stack, format: run.format };
        let mut steps = Vec::with_capacity(self.programs.len());
        for (count, program) in &self.programs {
            let step = simulate_folded(program, &costs).map_err(|error| Refusal(error.to_string()))?;
            let compute = step.compute.iter().copied().fold(Seconds::ZERO, Seconds::max);
            steps.push((*count, step.step, compute));
        }
        let (step, compute) = match steps.as_slice() {
            [(few, few_step, few_compute), (more, more_step, more_compute)] => {
                let each = 1.0 / (more - few) as f64;
                let rest = (self.micro_batches - few) as f64;
                (*few_step + (*more_step - *few_step) * (each * rest), *few_compute + (*more_compute - *few_compute) * (each * rest))
            }
            [(_, step, compute)] => (*step, *compute),
            _ => return Err(Refusal("nothing was compiled".into())),
        };
        let step = step + run.stack.step_overhead + run.stack.micro_batch_overhead * self.micro_batches as f64;
        let [low, high] = run.stack.spread;
        Ok(Predicted { step, p10: step * low, p90: step * high, memory: self.memory(run), compute })
    }

    fn memory(&self, run: &Run) -> f64 {
        let rules = &run.stack.memory;
        let single = run.plan.precision.size().count() >= 4;
        let of_stage = |stage: &StageMemory| {
            let optimizer = if single { 8.0 } else { rules.optimizer };
            let parameter = if single { 4.0 } else { rules.parameter };
            let gradient = if single { 4.0 } else { rules.gradient };
            stage.parameter * parameter + stage.gradient * gradient + stage.optimizer * optimizer + stage.activations * rules.activations
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
