//! How long kernels take on a processor, where they stand in a step: whole passages of steps are run without the other ranks, and each kernel
//! finds in the caches what the ones before it left there.

use super::LEARNING_RATE;
use super::statistics::{Durations, Measurements};
use crate::arena::Arenas;
use crate::backend::{CpuBackend, Hyperparameters};
use crate::clock;
use crate::data::{DataSource, Dataset, Split};
use crate::error::ExecutorError;
use crate::hyperparameters::hyperparameters;
use crate::initialise::initialise;
use crate::interpreter::SoloInterpreter;
use crate::job::{CalibrationJob, TimedStep};
use crate::member::Member;
use crate::samples::Samples;
use crate::transport::Group;
use foretell_models::{Graph, GraphOptions, Kernel};
use foretell_program::{Program, Rank, Sample, StageProgram, compile};
use foretell_units::{Bytes, Seconds};
use std::collections::BTreeMap;
use std::sync::Arc;

/// How often a passage is run and timed in one pass over all, after it was run once.
const RUNS: usize = 3;

/// Before a kernel that is timed those run that touch so many bytes: more than what a core has of caches to itself.
const LEAD: usize = 8 << 20;

/// All passages of a calibration as one rank runs them.
pub(super) struct CpuKernelTimer {
    /// None where this rank has nothing to do while others have.
    passages: Vec<Option<PreparedStep>>,
    /// By what is timed: which of the job's kernels it is.
    kernels: Vec<usize>,
    backend: CpuBackend,
    clock: fn() -> u64,
    arenas: Arenas,
}

/// A passage, ready to be run.
struct PreparedStep {
    interpreter: SoloInterpreter,
    program: Program,
    rank: Rank,
    graph: Graph,
    samples: Samples,
    hyperparameters: Hyperparameters,
    /// The instructions that are run; of those that are timed, which of all that are timed.
    instructions: Vec<(u32, Option<usize>)>,
}

impl CpuKernelTimer {
    /// `clock` is what durations are differences of: the time of a device that is not always running is the processor's. How cores are shared is
    /// not in the samples; the simulator has ranks share them.
    pub(super) fn new(member: &Member, job: &CalibrationJob, clock: fn() -> u64) -> Result<Self, ExecutorError> {
        let mut programs = Vec::new();
        for passage in &job.timed_steps {
            let program = compile(&passage.model, &passage.name, &passage.plan)?.training;
            programs.extend(ranks_of(&program, member).into_iter().map(|rank| (passage, program.clone(), rank)));
        }
        let lists = || programs.iter().filter_map(|(_, program, rank)| Some(program.list_of((*rank)?)));
        let largest = |size: fn(&StageProgram) -> Bytes| lists().map(size).fold(Bytes::new(1), Bytes::max);
        // One after the other they have the same memory.
        let arenas = Arenas::new(largest(|list| list.arena), largest(|list| list.host_arena), None)?;
        let numbers: BTreeMap<(Kernel, bool), usize> =
            job.kernels.iter().enumerate().map(|(index, &kernel)| (kernel, index)).collect();
        let mut kernels = Vec::new();
        let mut passages = Vec::new();
        for (passage, program, rank) in programs {
            passages.push(match rank {
                Some(rank) => PreparedStep::new((passage, LEAD), (program, rank), &arenas, &numbers, &mut kernels)?,
                None => None,
            });
        }
        Ok(Self { passages, kernels, backend: CpuBackend::new(), clock, arenas })
    }

    /// What is timed.
    pub(super) fn count(&self) -> usize {
        self.kernels.len()
    }

    /// Runs all passages; ranks begin each together.
    pub(super) fn run(&mut self, everyone: &mut Group, measurements: &mut Measurements) -> Result<(), ExecutorError> {
        for passage in &mut self.passages {
            let Some(passage) = passage else {
                (0..=RUNS).try_for_each(|_| everyone.barrier())?;
                continue;
            };
            passage.initialise(&self.arenas)?;
            let places: Vec<usize> = passage.instructions.iter().filter_map(|(_, place)| *place).collect();
            let mut timed: Vec<Durations> =
                places.iter().map(|_| Durations { seconds: Vec::with_capacity(RUNS), elapsed: 0.0 }).collect();
            for run in 0..=RUNS {
                everyone.barrier()?;
                let mut number = 0;
                for &(instruction, place) in &passage.instructions {
                    let (wall, start) = (clock::now(), (self.clock)());
                    passage.interpreter.run(instruction, &mut self.backend, (&passage.hyperparameters, &passage.samples))?;
                    if place.is_some() {
                        let (end, wall_end) = ((self.clock)(), clock::now());
                        // The first run warms up.
                        if run > 0 {
                            timed[number].seconds.push((end - start) as f64 * 1e-9);
                            timed[number].elapsed += (wall_end - wall) as f64 * 1e-9;
                        }
                        number += 1;
                    }
                }
            }
            for (place, timed) in places.into_iter().zip(timed) {
                measurements.add(place, timed);
            }
        }
        Ok(())
    }

    /// The job's kernels that were timed: of each the mean over the places where it stands.
    pub(super) fn samples(&self, measurements: &Measurements) -> Vec<(usize, Sample)> {
        let mut places: BTreeMap<usize, Vec<Sample>> = BTreeMap::new();
        for (&kernel, sample) in self.kernels.iter().zip(measurements.samples()) {
            places.entry(kernel).or_default().push(sample);
        }
        let mean =
            |samples: &[Sample], part: fn(&Sample) -> Seconds| samples.iter().map(part).sum::<Seconds>() / samples.len() as f64;
        let together = |samples: Vec<Sample>| Sample {
            median: mean(&samples, |sample| sample.median),
            p10: mean(&samples, |sample| sample.p10),
            p90: mean(&samples, |sample| sample.p90),
            count: samples.iter().map(|sample| sample.count).sum(),
        };
        places.into_iter().map(|(kernel, samples)| (kernel, together(samples))).collect()
    }
}

/// The ranks of a Program that this one stands in for, by turns that all have: itself where there are as many, else every so-many-eth that is
/// the first with its list.
fn ranks_of(program: &Program, member: &Member) -> Vec<Option<Rank>> {
    let (size, here) = (program.mesh.world_size(), member.world_size.max(1));
    if size <= here {
        return vec![Some(Rank(member.rank.0 % size.max(1)))];
    }
    let first = |list: usize| (0..size).map(Rank).find(|&rank| program.list_index(rank) == list);
    (0..program.lists.len().div_ceil(here)).map(|turn| first(turn * here + member.rank.0)).collect()
}

impl PreparedStep {
    /// Nothing where none of the list's kernels is timed. What is timed is added to `kernels`; before each of them those run that touch `lead`
    /// bytes, and those that make its indices.
    fn new(
        (passage, lead): (&TimedStep, usize),
        (program, rank): (Program, Rank),
        arenas: &Arenas,
        numbers: &BTreeMap<(Kernel, bool), usize>,
        kernels: &mut Vec<usize>,
    ) -> Result<Option<Self>, ExecutorError> {
        let Some(timed) = passage.timed.get(program.list_index(rank)).filter(|timed| !timed.is_empty()) else { return Ok(None) };
        let interpreter = SoloInterpreter::new(&program, rank, arenas)?;
        let mut runs = vec![false; interpreter.len()];
        let mut places = vec![None; interpreter.len()];
        for &instruction in timed.iter().filter(|&&instruction| (instruction as usize) < interpreter.len()) {
            let Some((kernel, accumulate)) = interpreter.kernel(instruction) else { continue };
            let Some(&number) = numbers.get(&(kernel.without_constants(), accumulate)) else { continue };
            places[instruction as usize] = Some(kernels.len());
            kernels.push(number);
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
            let makers = if runs[instruction] { interpreter.writers_of_integer_reads(instruction as u32) } else { Vec::new() };
            for maker in makers {
                runs[maker as usize] = true;
            }
        }
        let (model, plan) = (&passage.model, &passage.plan);
        let shape = model.sample();
        let dataset = Arc::new(Dataset::open(&DataSource::default_for(&shape), &shape, 0)?);
        let length = dataset.len(Split::Training).max(1);
        let samples =
            Samples { dataset, split: Split::Training, indices: (0..plan.global_batch).map(|sample| sample % length).collect() };
        let graph = model.graph(&passage.name, &GraphOptions::ONE).map_err(foretell_program::PlanError::from)?;
        let hyperparameters = Hyperparameters { learning_rate: LEARNING_RATE, ..hyperparameters(plan, 0, 0) };
        let instructions = (0..interpreter.len())
            .filter(|&one| runs[one])
            .map(|instruction| (instruction as u32, places[instruction]))
            .collect();
        Ok(Some(Self { interpreter, program, rank, graph, samples, hyperparameters, instructions }))
    }

    fn initialise(&self, arenas: &Arenas) -> Result<(), ExecutorError> {
        let mesh = &self.program.mesh;
        let coordinates = mesh.coordinates(self.rank);
        initialise(self.program.list_of(self.rank), &self.graph, mesh.stage_at(coordinates), coordinates, arenas, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use foretell_models::{CapacityFactor, DropoutRate, Model, Stem};
    use foretell_program::{Layout, Operation, Plan};

    fn models() -> [Model; 4] {
        let gpt = Model::Gpt {
            layers: 1,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 64,
            sequence: 8,
            tied_embeddings: true,
            dropout: DropoutRate::TENTH,
            attention_dropout: DropoutRate::NONE,
        };
        let moe = Model::Moe {
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
        };
        let resnet = Model::Resnet { depth: 18, stem: Stem::Imagenet, image: 32, channels: 3, classes: 4, width: 4 };
        [Model::Mlp { widths: vec![64, 8, 8, 10] }, resnet, gpt, moe]
    }

    /// Runs a part of one rank's list in which one kernel is timed, in memory full of what is no index; the kernels that ran.
    fn run_around(model: &Model, program: &Program, plan: &Plan, rank: Rank, instruction: u32) -> usize {
        let list = program.list_index(rank);
        let mut timed = vec![Vec::new(); program.lists.len()];
        timed[list] = vec![instruction];
        let passage = TimedStep { model: model.clone(), name: "m".into(), plan: plan.clone(), timed };
        let size = program.lists[list].arena;
        let arenas = Arenas::new(size, program.lists[list].host_arena, None).expect("memory");
        let place = arenas.device.at(Bytes::ZERO, size).expect("all of it");
        // SAFETY: the place is the whole arena.
        unsafe { place.write_bytes(0x81, size.count() as usize) };
        let Operation::Compute { kernel, accumulate, group } = *program.lists[list].instructions[instruction as usize].operation
        else {
            return 0;
        };
        let parts = if group.is_some() { kernel.parts() } else { 1 };
        let numbers = (0..parts).map(|part| ((kernel.for_member(part).without_constants(), accumulate), part)).collect();
        let mut kernels = Vec::new();
        let prepared =
            PreparedStep::new((&passage, 0), (program.clone(), rank), &arenas, &numbers, &mut kernels).expect("it fits");
        let mut prepared = prepared.expect("the instruction is timed");
        assert_eq!(kernels.len(), 1, "one kernel is timed");
        prepared.initialise(&arenas).expect("parameters");
        for &(one, _) in &prepared.instructions.clone() {
            let told = (&prepared.hyperparameters, &prepared.samples);
            prepared.interpreter.run(one, &mut CpuBackend::new(), told).expect("it runs without what came before");
        }
        prepared.instructions.len()
    }

    #[test]
    fn every_kernel_can_be_timed_without_what_runs_far_before_it() {
        for model in models() {
            for (data, tensor, pipeline) in [(2, 1, 1), (1, 2, 1), (1, 1, 2)] {
                let layout = Layout { data, tensor, pipeline, micro_batch: 2, ..Layout::default() };
                let plan = Plan::new(layout, 4);
                let Ok(compiled) = compile(&model, "m", &plan) else { continue };
                let program = compiled.training;
                for rank in [Rank(0), Rank(1)] {
                    let count = program.list_of(rank).instructions.len();
                    let most = (0..count).map(|one| run_around(&model, &program, &plan, rank, one as u32)).max();
                    assert!(most < Some(count), "not the whole list runs for one kernel");
                }
            }
        }
    }
}
