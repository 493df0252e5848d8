//! Times kernels on a CPU inside the steps in which they occur.
//!
//! A step runs on one rank without the others, so each kernel finds in the caches what the kernels
//! before it left there. Only the timed kernels and the instructions around them run.

use super::LEARNING_RATE;
use super::statistics::{Durations, Measurements};
use crate::arena::Arenas;
use crate::backend::{CpuBackend, Hyperparameters};
use crate::checkpoint::StateSource;
use crate::clock;
use crate::data::{DataSource, Dataset, Split};
use crate::error::ExecutorError;
use crate::hyperparameters::hyperparameters;
use crate::initialise::initialise;
use crate::interpreter::SoloInterpreter;
use crate::job::{CalibrationJob, TimedPlan};
use crate::member::Member;
use crate::reference::ReferenceKernel;
use crate::samples::Samples;
use crate::state::RankState;
use crate::transport::Group;
use foretell_models::{Graph, GraphOptions, Kernel};
use foretell_program::{Program, Rank, RunLength, Sample, StageProgram, compile};
use foretell_units::{Bytes, Seconds};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The length of the run whose step is timed. The learning rate is [`LEARNING_RATE`] anyway.
const ONE_STEP: RunLength = RunLength { steps: 1, steps_per_epoch: 1 };

/// Timed runs of a step in one pass. One more run before them warms up.
const RUNS: usize = 3;

/// Before a timed kernel, instructions run that touch at least this many bytes: more than the
/// caches that a core has to itself.
const LEAD_BYTES: usize = 8 << 20;

/// All steps of a calibration, as one rank runs them. An item of the measurements is one timed
/// instruction of one step.
pub(super) struct CpuKernelTimer {
    /// `None`: this rank waits while others run a step.
    steps: Vec<Option<PreparedStep>>,
    /// Per item, the index of its kernel in the job.
    kernels: Vec<usize>,
    backend: CpuBackend,
    clock: fn() -> u64,
    arenas: Arenas,
    reference: ReferenceKernel,
    /// The reference kernel's durations: one item.
    reference_times: Measurements,
}

/// A step in which kernels are timed.
#[derive(Clone, Copy)]
struct Step<'a> {
    plan: &'a TimedPlan,
    /// Per list, the instructions to time.
    timed: &'a [Vec<u32>],
}

/// A step, ready to run.
struct PreparedStep {
    interpreter: SoloInterpreter,
    program: Program,
    rank: Rank,
    graph: Graph,
    samples: Samples,
    hyperparameters: Hyperparameters,
    /// The instructions to run, each with its item if it is timed.
    instructions: Vec<(u32, Option<usize>)>,
}

impl CpuKernelTimer {
    /// `clock` measures the durations, in nanoseconds: CPU time on a device that does not run all
    /// the time. Samples do not include the sharing of cores, which the simulator models.
    pub(super) fn new(member: &Member, job: &CalibrationJob, clock: fn() -> u64) -> Result<Self, ExecutorError> {
        let mut programs = Vec::new();
        for plan in &job.timed_plans {
            let compiled = compile(&plan.model, &plan.name, &plan.plan)?;
            for (program, timed) in compiled.step_programs().into_iter().zip(&plan.timed) {
                if timed.iter().any(|list| !list.is_empty()) {
                    let turns = ranks_to_run(program, member).into_iter();
                    programs.extend(turns.map(|rank| (Step { plan, timed }, program.clone(), rank)));
                }
            }
        }
        let lists = || programs.iter().filter_map(|(_, program, rank)| Some(program.list_of((*rank)?)));
        let largest = |size: fn(&StageProgram) -> Bytes| lists().map(size).fold(Bytes::new(1), Bytes::max);
        // All steps use the same memory, one after the other.
        let arenas = Arenas::new(largest(|list| list.arena), largest(|list| list.host_arena), None)?;
        let indices: BTreeMap<(Kernel, bool), usize> =
            job.kernels.iter().enumerate().map(|(index, &kernel)| (kernel, index)).collect();
        let mut kernels = Vec::new();
        let mut steps = Vec::new();
        for (step, program, rank) in programs {
            steps.push(match rank {
                Some(rank) => PreparedStep::new((step, LEAD_BYTES), (program, rank), &arenas, &indices, &mut kernels)?,
                None => None,
            });
        }
        let (reference, reference_times) = (ReferenceKernel::new(), Measurements::new(1));
        Ok(Self { steps, kernels, backend: CpuBackend::new(), clock, arenas, reference, reference_times })
    }

    /// The number of items.
    pub(super) fn items(&self) -> usize {
        self.kernels.len()
    }

    /// Runs all steps; all ranks start each run together.
    pub(super) fn run_pass(&mut self, everyone: &mut Group, measurements: &mut Measurements) -> Result<(), ExecutorError> {
        let mut references = Durations { seconds: Vec::new(), elapsed: 0.0 };
        for step in &mut self.steps {
            let Some(step) = step else {
                (0..=RUNS).try_for_each(|_| everyone.barrier())?;
                continue;
            };
            step.initialise(&self.arenas)?;
            let items: Vec<usize> = step.instructions.iter().filter_map(|(_, item)| *item).collect();
            let mut durations: Vec<Durations> =
                items.iter().map(|_| Durations { seconds: Vec::with_capacity(RUNS), elapsed: 0.0 }).collect();
            for run in 0..=RUNS {
                everyone.barrier()?;
                let reference = self.reference.time()?;
                references.seconds.push(reference.processor as f64 * 1e-9);
                references.elapsed += reference.wall as f64 * 1e-9;
                let mut position = 0;
                for &(instruction, item) in &step.instructions {
                    let (wall_start, start) = (clock::now(), (self.clock)());
                    step.interpreter.run(instruction, &mut self.backend, (&step.hyperparameters, &step.samples))?;
                    if item.is_some() {
                        let (end, wall_end) = ((self.clock)(), clock::now());
                        let is_warm_up = run == 0;
                        if !is_warm_up {
                            durations[position].seconds.push((end - start) as f64 * 1e-9);
                            durations[position].elapsed += (wall_end - wall_start) as f64 * 1e-9;
                        }
                        position += 1;
                    }
                }
            }
            for (item, durations) in items.into_iter().zip(durations) {
                measurements.add(item, durations);
            }
        }
        if !references.seconds.is_empty() {
            self.reference_times.add(0, references);
        }
        Ok(())
    }

    /// Sample of the reference kernel's durations by the timer's clock; `None` if it was not timed.
    /// Its median is taken over all passes, unlike that of other items, which is their usual best:
    /// a run is compared with what was usual.
    pub(super) fn reference(&self) -> Option<Sample> {
        if self.reference_times.is_empty() { None } else { self.reference_times.usual_samples().into_iter().next() }
    }

    /// The timed kernels by their index in the job, each with the mean of its items' samples.
    pub(super) fn samples(&self, measurements: &Measurements) -> Vec<(usize, Sample)> {
        let mut samples: BTreeMap<usize, Vec<Sample>> = BTreeMap::new();
        for (&kernel, sample) in self.kernels.iter().zip(measurements.samples()) {
            samples.entry(kernel).or_default().push(sample);
        }
        let mean =
            |samples: &[Sample], part: fn(&Sample) -> Seconds| samples.iter().map(part).sum::<Seconds>() / samples.len() as f64;
        let combine = |samples: Vec<Sample>| Sample {
            median: mean(&samples, |sample| sample.median),
            p10: mean(&samples, |sample| sample.p10),
            p90: mean(&samples, |sample| sample.p90),
            count: samples.iter().map(|sample| sample.count).sum(),
        };
        samples.into_iter().map(|(kernel, samples)| (kernel, combine(samples))).collect()
    }
}

/// The Program's ranks that this rank runs, one per turn (`None`: it waits). All ranks have the
/// same number of turns.
///
/// If the Program has no more ranks than the calibration, each rank runs one of them in one turn.
/// Otherwise only the first rank of each list runs: in turn `t`, rank `r` takes list
/// `t * world_size + r`, if there is one.
fn ranks_to_run(program: &Program, member: &Member) -> Vec<Option<Rank>> {
    let (size, available) = (program.mesh.world_size(), member.world_size.max(1));
    if size <= available {
        return vec![Some(Rank(member.rank.0 % size.max(1)))];
    }
    let first_rank_of = |list: usize| (0..size).map(Rank).find(|&rank| program.list_index(rank) == list);
    (0..program.lists.len().div_ceil(available)).map(|turn| first_rank_of(turn * available + member.rank.0)).collect()
}

impl PreparedStep {
    /// Prepares the list of a rank; `None` if it has no timed kernel. Adds an item to `kernels` for
    /// each timed instruction, with the kernel's index from `indices`.
    ///
    /// Before each timed kernel, it runs instructions that touch at least `lead` bytes, and those
    /// that write the indices which these instructions read.
    fn new(
        (step, lead): (Step<'_>, usize),
        (program, rank): (Program, Rank),
        arenas: &Arenas,
        indices: &BTreeMap<(Kernel, bool), usize>,
        kernels: &mut Vec<usize>,
    ) -> Result<Option<Self>, ExecutorError> {
        let Some(timed) = step.timed.get(program.list_index(rank)).filter(|timed| !timed.is_empty()) else { return Ok(None) };
        let interpreter = SoloInterpreter::new(&program, rank, arenas)?;
        let mut runs = vec![false; interpreter.len()];
        let mut items = vec![None; interpreter.len()];
        for &instruction in timed.iter().filter(|&&instruction| (instruction as usize) < interpreter.len()) {
            let Some((kernel, accumulate)) = interpreter.kernel(instruction) else { continue };
            let Some(&index) = indices.get(&(kernel.without_constants(), accumulate)) else { continue };
            items[instruction as usize] = Some(kernels.len());
            kernels.push(index);
            let mut touched = 0;
            for before in (0..=instruction).rev() {
                runs[before as usize] = true;
                if before < instruction {
                    touched += interpreter.bytes_touched(before);
                }
                if touched >= lead {
                    break;
                }
            }
        }
        for instruction in (0..interpreter.len()).rev() {
            let writers = if runs[instruction] { interpreter.writers_of_integer_reads(instruction as u32) } else { Vec::new() };
            for writer in writers {
                runs[writer as usize] = true;
            }
        }
        let TimedPlan { model, name, plan, .. } = step.plan;
        let shape = model.sample();
        let dataset = Arc::new(Dataset::open(&DataSource::default_for(&shape), &shape, 0)?);
        let length = dataset.len(Split::Training).max(1);
        let samples = Samples::new(dataset, Split::Training, 0, (0..plan.global_batch).map(|sample| sample % length).collect());
        let graph = plan.training.graph(model, name, &GraphOptions::ONE)?;
        let hyperparameters = Hyperparameters { learning_rate: LEARNING_RATE, ..hyperparameters(plan, 0, 0, ONE_STEP) };
        let instructions = (0..interpreter.len())
            .filter(|&index| runs[index])
            .map(|instruction| (instruction as u32, items[instruction]))
            .collect();
        Ok(Some(Self { interpreter, program, rank, graph, samples, hyperparameters, instructions }))
    }

    /// Fills the parameters.
    fn initialise(&self, arenas: &Arenas) -> Result<(), ExecutorError> {
        initialise(&RankState::new(&self.program, &self.graph, self.rank), arenas, &StateSource::fresh(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{CapacityFactor, DropoutRate, Gpt, Mlp, Model, Moe, Resnet, Stem};
    use foretell_program::{Layout, Operation, Plan};

    fn models() -> [Model; 4] {
        let gpt = Model::Gpt(Gpt {
            layers: 1,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 64,
            sequence: 8,
            tied_embeddings: true,
            dropout: DropoutRate::TENTH,
            attention_dropout: DropoutRate::NONE,
        });
        let moe = Model::Moe(Moe {
            layers: 1,
            hidden: 16,
            heads: 4,
            kv_heads: None,
            head_dimension: None,
            query_rank: None,
            key_value_rank: None,
            ffn: 16,
            dense_ffn: None,
            shared_ffn: None,
            dense_layers: 0,
            vocab: 64,
            sequence: 8,
            experts: 4,
            top_k: 2,
            moe_every: 1,
            capacity_factor: CapacityFactor::default(),
            rope_theta: 10_000,
            tied_embeddings: false,
        });
        let resnet = Model::Resnet(Resnet { depth: 18, stem: Stem::Imagenet, image: 32, channels: 3, classes: 4, width: 4 });
        [Model::Mlp(Mlp { widths: vec![64, 8, 8, 10] }), resnet, gpt, moe]
    }

    /// Runs the part of one rank's list that is needed to time one kernel. The memory holds numbers
    /// that are not valid indices. Returns the number of instructions that ran.
    fn run_around(model: &Model, program: &Program, plan: &Plan, rank: Rank, instruction: u32) -> usize {
        let list = program.list_index(rank);
        let mut timed = vec![Vec::new(); program.lists.len()];
        timed[list] = vec![instruction];
        let timed_plan = TimedPlan { model: model.clone(), name: "m".into(), plan: plan.clone(), timed: Vec::new() };
        let step = Step { plan: &timed_plan, timed: &timed };
        let size = program.lists[list].arena;
        let arenas = Arenas::new(size, program.lists[list].host_arena, None).expect("memory");
        let start = arenas.device.at(Bytes::ZERO, size).expect("the whole arena");
        // SAFETY: the range is the whole arena.
        unsafe { start.write_bytes(0x81, size.count() as usize) };
        let Operation::Compute { kernel, accumulate, group } = *program.lists[list].instructions[instruction as usize].operation
        else {
            return 0;
        };
        let parts = if group.is_some() { kernel.parts() } else { 1 };
        let indices = (0..parts).map(|part| ((kernel.for_member(part).without_constants(), accumulate), part)).collect();
        let mut kernels = Vec::new();
        let prepared = PreparedStep::new((step, 0), (program.clone(), rank), &arenas, &indices, &mut kernels).expect("it fits");
        let mut prepared = prepared.expect("a timed instruction");
        assert_eq!(kernels.len(), 1);
        prepared.initialise(&arenas).expect("parameters");
        for &(one, _) in &prepared.instructions.clone() {
            let inputs = (&prepared.hyperparameters, &prepared.samples);
            prepared.interpreter.run(one, &mut CpuBackend::new(), inputs).expect("valid indices");
        }
        prepared.instructions.len()
    }

    #[test]
    fn every_kernel_runs_without_most_of_the_instructions_before_it() {
        for model in models() {
            for (data, tensor, pipeline) in [(2, 1, 1), (1, 2, 1), (1, 1, 2)] {
                let layout = Layout { data, tensor, pipeline, micro_batch: 2, ..Layout::default() };
                let plan = Plan::new(layout, 4);
                let Ok(compiled) = compile(&model, "m", &plan) else { continue };
                let program = compiled.training;
                for rank in [Rank(0), Rank(1)] {
                    let count = program.list_of(rank).instructions.len();
                    let most = (0..count).map(|index| run_around(&model, &program, &plan, rank, index as u32)).max();
                    assert!(most < Some(count), "the whole list runs for one kernel");
                }
            }
        }
    }
}
