//! From lowerings to Programs: which ranks share an instruction list, then every list by itself.

use super::cache::LoweringCache;
use super::cuts::Cuts;
use super::emit::{Emission, Stage, StageEmitter};
use super::lowering::{Lowering, Lowerings, Purpose};
use super::messages::{self, Receive};
use super::reshard::{Crossings, ListRanks, list_ranks};
use super::state::StageState;
use super::wanted::Wanted;
use super::{dependencies, limits, unread, weave};
use crate::check::Unsound;
use crate::cycle::Cycle;
use crate::memory;
use crate::mesh::{Mesh, Rank};
use crate::pacing::Pacing;
use crate::plan::{Plan, PlanError};
use crate::program::{Operation, Program, StageProgram};
use crate::schedule::{StagePass, Task, WovenOrders};
use foretell_units::{Bytes, Flops};
use rayon::prelude::*;

/// The Programs of a run. All use one arena: persistent buffers lie at the same offsets in each.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// One training step. Where steps differ, the one that [`Self::cycle`] numbers 0.
    pub training: Program,
    /// The other steps that a run makes, in the order of their numbers in [`Self::cycle`], from 1.
    pub other_steps: Vec<Program>,
    /// Which of the step Programs each step runs.
    pub cycle: Cycle,
    /// The loss and the number of correct predictions of some micro-batches, without gradients.
    pub evaluation: Program,
    /// One checkpoint: every rank saves its part of the state, then writes it.
    pub saving: Program,
    /// The rules for workers that are not synchronised; `None` if all workers make each step
    /// together.
    pub pacing: Option<Pacing>,
    /// The Programs of a server for each worker, if workers are not synchronised. In each step of
    /// its worker, a session runs each of its Programs once.
    pub sessions: Vec<Session>,
}

/// The Programs of a server for one worker. Workers' lists in them are empty.
///
/// Sessions run side by side. So their Programs touch persistent buffers only, and the Programs
/// that touch buffers shared by all sessions take turns: [`Self::snapshot`], [`Self::add`] and
/// [`Self::update`].
#[derive(Clone, Debug)]
pub struct Session {
    /// Copies the latest version of the parameters, in the turn of a pull.
    pub snapshot: Program,
    /// Sends the copy to the worker.
    pub send: Program,
    /// Receives the worker's gradients.
    pub receive: Program,
    /// Adds the worker's gradients to those of others, in the turn of a push, if an update waits
    /// for several pushes. Otherwise it is empty.
    pub add: Program,
    /// Updates the parameters, which makes the next version. Runs in the turn of a push, or of the
    /// last push that an update waits for.
    pub update: Program,
}

impl Session {
    /// The Programs, in the order of their fields.
    fn programs(&self) -> [&Program; 5] {
        [&self.snapshot, &self.send, &self.receive, &self.add, &self.update]
    }
}

impl Compiled {
    /// The Programs of all steps, by number.
    pub fn step_programs(&self) -> Vec<&Program> {
        std::iter::once(&self.training).chain(&self.other_steps).collect()
    }

    /// Checks the Programs of all steps, of the evaluation and of sessions, as [`Program::check`]
    /// does.
    ///
    /// # Errors
    /// The first fault that is found.
    ///
    /// The messages of a [`Session`] have their other ends in a Program of a worker. So the lists
    /// of its Programs are checked by themselves only.
    pub fn check(&self) -> Result<(), Unsound> {
        self.step_programs().into_iter().chain([&self.evaluation]).try_for_each(Program::check)?;
        self.sessions.iter().flat_map(Session::programs).try_for_each(Program::check_lists)
    }

    /// The size of each stage's largest arena, over training and evaluation.
    pub fn arenas(&self) -> Vec<Bytes> {
        let both = self.training.arenas().into_iter().zip(self.evaluation.arenas());
        both.map(|(training, evaluation)| training.max(evaluation)).collect()
    }

    /// The size of each stage's largest host arena, over training and evaluation.
    pub fn host_arenas(&self) -> Vec<Bytes> {
        let both = self.training.host_arenas().into_iter().zip(self.evaluation.host_arenas());
        both.map(|(training, evaluation)| training.max(evaluation)).collect()
    }

    /// The size of a rank's host arena.
    pub fn host_arena_of(&self, rank: Rank) -> Bytes {
        self.training.list_of(rank).host_arena.max(self.evaluation.list_of(rank).host_arena)
    }

    /// The size of a rank's arena.
    pub fn arena_of(&self, rank: Rank) -> Bytes {
        self.training.list_of(rank).arena.max(self.evaluation.list_of(rank).arena)
    }
}

/// Whether buffers get offsets in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Offsets {
    Planned,
    None,
}

/// Returns `true` once the compilation has to stop. Called between instruction lists, from any
/// thread.
pub(super) type IsOver<'a> = &'a (dyn Fn() -> bool + Sync);

/// Compiles the wanted Programs, over one arena.
///
/// All have the training step's persistent buffers, except that logits alone need no gradients and
/// no optimizer state. If evaluation is among them, ranks share a list only if both training and
/// evaluation are equal for them.
///
/// # Errors
/// [`PlanError::Interrupted`] once `is_over` returns `true`.
pub(super) fn programs(
    cache: &LoweringCache<'_>,
    plan: &Plan,
    wanted: &[Wanted],
    emission: Emission,
    offsets: Offsets,
    is_over: IsOver<'_>,
) -> Result<Vec<Program>, PlanError> {
    plan.validate()?;
    // In normal form, plans whose layouts mean the same thing are equal.
    let plan = &plan.normalised();
    let mesh = plan.mesh()?;
    let of_state = if wanted.contains(&Wanted::Logits) { Purpose::Logits } else { Purpose::Training };
    let with_state = cache.lowerings(plan, &mesh, of_state)?;
    for lowering in with_state.iter() {
        limits::check(lowering, plan)?;
    }
    let cuts = Cuts::new(&with_state.any().graph, plan)?;
    let mut lowered = vec![(of_state, with_state)];
    if wanted.contains(&Wanted::Evaluation) {
        lowered.push((Purpose::Evaluation, cache.lowerings(plan, &mesh, Purpose::Evaluation)?));
    }
    let crossings =
        lowered.iter().map(|(_, lowerings)| Crossings::new(lowerings, &cuts, &mesh)).collect::<Result<Vec<_>, PlanError>>()?;
    let lists = list_ranks(&mesh, &crossings);
    let state = |list: &ListRanks| StageState::new(lowering_of(&lowered[0].1, list, &mesh), &cuts, list.stage, plan, &mesh);
    let states = lists.iter().map(state).collect::<Result<Vec<_>, PlanError>>()?;
    let compilation = Compilation { plan, mesh: &mesh, cuts: &cuts, lists: &lists, states: &states, emission, offsets, is_over };
    // The order in which each list of workers pushes its buckets, from the latest step Program.
    let mut pushed = Vec::new();
    let mut programs = Vec::with_capacity(wanted.len());
    for &wanted in wanted {
        let index = usize::from(lowered[0].0 != wanted.purpose());
        programs.push(compilation.program(&lowered[index].1, &crossings[index], wanted, &mut pushed)?);
    }
    share_arenas(&mut programs, wanted);
    Ok(programs)
}

/// Gives all steps of a list the arena of the largest: a run allocates it once.
fn share_arenas(programs: &mut [Program], wanted: &[Wanted]) {
    let mut steps: Vec<&mut Program> = programs
        .iter_mut()
        .zip(wanted)
        .filter(|(_, program)| program.purpose() == Purpose::Training)
        .map(|(program, _)| program)
        .collect();
    for list in 0..steps.first().map_or(0, |program| program.lists.len()) {
        let largest = |size: fn(&StageProgram) -> Bytes| {
            steps.iter().map(|program| size(&program.lists[list])).max().expect("invariant: there is a step")
        };
        let (arena, host) = (largest(|list| list.arena), largest(|list| list.host_arena));
        for program in &mut steps {
            (program.lists[list].arena, program.lists[list].host_arena) = (arena, host);
        }
    }
}

/// The lowering of the ranks that share a list.
fn lowering_of<'a>(lowerings: &'a Lowerings, list: &ListRanks, mesh: &Mesh) -> &'a Lowering {
    let first = list.ranks.first();
    first.map_or(lowerings.any(), |&rank| lowerings.of(mesh.stage(list.stage), mesh.coordinates(rank)))
}

/// The tasks of a list in a Program.
#[derive(Clone, Copy)]
enum Tasks<'a> {
    /// The passes of its stage, the messages that it receives before each of them, and the indices
    /// of those that are woven with the next one.
    Passes(&'a [Task], &'a [Vec<Receive>], &'a [usize]),
    /// The update of buckets, in the order in which workers push them.
    Serve(&'a [usize]),
    /// Nothing: only servers act in this Program.
    Nothing,
}

/// The inputs that all lists of a compilation share.
struct Compilation<'a> {
    plan: &'a Plan,
    mesh: &'a Mesh,
    cuts: &'a Cuts,
    lists: &'a [ListRanks],
    /// The persistent state of each list, in the order of `lists`.
    states: &'a [StageState],
    emission: Emission,
    offsets: Offsets,
    is_over: IsOver<'a>,
}

impl Compilation<'_> {
    fn program(
        &self,
        lowerings: &Lowerings,
        crossings: &Crossings,
        wanted: Wanted,
        pushed: &mut Vec<Vec<usize>>,
    ) -> Result<Program, PlanError> {
        let Compilation { plan, mesh, cuts, .. } = *self;
        let micro_batches = match wanted.purpose() {
            Purpose::Training => plan.micro_batches()?,
            Purpose::Evaluation | Purpose::Logits => evaluated_at_once(plan.micro_batches()?, cuts.stages),
        };
        let woven = match wanted.purpose() {
            Purpose::Training => plan.step_orders(micro_batches),
            Purpose::Evaluation | Purpose::Logits => {
                let mut orders = plan.layout.schedule.orders(cuts.stages, micro_batches, cuts.chunks);
                // Orders without a cyclic wait have none after passes are removed.
                orders.iter_mut().for_each(|order| order.retain(|task| task.pass == StagePass::Forward));
                WovenOrders::unpaired(orders)
            }
        };
        let receives = messages::receives(lowerings.any(), cuts, plan.layout.schedule, &woven);
        let compile_list = |(list, state): (&ListRanks, &StageState)| {
            if (self.is_over)() {
                return Err(PlanError::Interrupted);
            }
            let tasks = match wanted {
                Wanted::Serve(..) => Tasks::Nothing,
                _ => Tasks::Passes(&woven.orders[list.stage], &receives[list.stage], &woven.pairs[list.stage]),
            };
            Ok(self.list(lowering_of(lowerings, list, mesh), crossings, list, state, tasks, wanted))
        };
        // The stages of servers follow those of the model.
        let workers = self.lists.partition_point(|list| list.stage < cuts.stages);
        let (lists, states) = (&self.lists[..workers], &self.states[..workers]);
        // Lists are independent. Rayon may run other tasks of its pool inside these loops, so a
        // caller must hold no lock that such a task takes. Without offsets the caller is the
        // planner, which already compiles many Programs in parallel: a nested parallel loop here
        // could start another whole Program while it waits, and nest without bound.
        let mut compiled: Vec<(StageProgram, Vec<usize>)> = match self.offsets {
            Offsets::Planned => lists.par_iter().zip(states).map(compile_list).collect::<Result<_, PlanError>>()?,
            Offsets::None => lists.iter().zip(states).map(compile_list).collect::<Result<_, PlanError>>()?,
        };
        if matches!(wanted, Wanted::Step(_)) {
            *pushed = compiled.iter().map(|(_, pushed)| pushed.clone()).collect();
        }
        for (list, state) in self.lists.iter().zip(self.states).skip(workers) {
            let worker = lists.iter().position(|worker| worker.stage == list.stage - cuts.stages);
            let worker = worker.expect("invariant: servers serve a stage of workers");
            let none = Vec::new();
            let (worker, pushed) = (&states[worker], pushed.get(worker).unwrap_or(&none));
            let numbers: Vec<usize> = worker.trained_buckets().collect();
            // Servers have no frozen buckets, so they number the trained ones from 0.
            let pushed: Vec<usize> =
                pushed.iter().filter_map(|bucket| numbers.iter().position(|number| number == bucket)).collect();
            compiled.push(self.list(lowerings.any(), crossings, list, state, Tasks::Serve(&pushed), wanted));
        }
        let lists = compiled.into_iter().map(|(list, _)| list);
        let (flops, lists): (Vec<Flops>, Vec<StageProgram>) =
            lists.zip(self.lists).map(|(program, list)| (hardware_flops(&program) * list.ranks.len() as f64, program)).unzip();
        let mut list_of_rank = vec![0; mesh.world_size()];
        for (number, list) in (0..).zip(self.lists) {
            list.ranks.iter().for_each(|rank| list_of_rank[rank.0] = number);
        }
        let any = lowerings.any();
        let samples_at_once = plan.layout.samples_at_once();
        let samples = samples_at_once * micro_batches;
        let graph_flops: Flops = any.graph.model_flops() * (samples_at_once as f64 / any.mesh.samples_at_once() as f64);
        Ok(Program {
            mesh: mesh.clone(),
            precision: plan.storage(),
            format: plan.precision,
            hardware_flops: flops.into_iter().sum(),
            lists,
            list_of_rank,
            samples,
            predictions: samples * any.graph.predictions_per_sample,
            tokens: any.graph.tokens_per_sample.map(|tokens| tokens * samples),
            model_flops: graph_flops * micro_batches as f64,
        })
    }

    /// Compiles one list: emits it, removes unread copies, weaves passes, and adds dependencies and
    /// a memory plan. Also returns the buckets that it pushes to servers, in order.
    fn list(
        &self,
        lowering: &Lowering,
        crossings: &Crossings,
        list: &ListRanks,
        state: &StageState,
        tasks: Tasks<'_>,
        wanted: Wanted,
    ) -> (StageProgram, Vec<usize>) {
        let Compilation { plan, mesh, cuts, .. } = *self;
        let routes = crossings.routes(list.stage, &list.ranks);
        let stage = Stage::new(lowering, plan, mesh, cuts, list.stage, state, &routes);
        let mut emitter = StageEmitter::new(&stage);
        match tasks {
            Tasks::Passes(tasks, receives, _) => {
                if let Wanted::Step(Some(exchange)) = wanted {
                    emitter.begin_exchange(exchange);
                }
                emitter.tasks(tasks, receives, self.emission);
                if matches!(wanted, Wanted::Step(_)) {
                    emitter.update();
                }
            }
            Tasks::Serve(pushed) => emitter.serve(wanted, pushed),
            Tasks::Nothing => {}
        }
        let (mut program, pushed) = emitter.finish();
        unread::remove_unread_copies(&mut program);
        if let Tasks::Passes(.., pairs) = tasks {
            weave::weave(&mut program, pairs, &plan.overlap);
        }
        dependencies::connect(&mut program, &plan.overlap);
        if self.offsets == Offsets::Planned {
            memory::plan(&mut program);
        }
        dependencies::prune(&mut program);
        (program, pushed)
    }
}

/// The number of micro-batches of one run of an evaluation. A rank keeps the scores of all of them
/// until its end, so there are only as many as keep the stages busy at least four fifths of the
/// time.
fn evaluated_at_once(micro_batches: usize, stages: usize) -> usize {
    let enough = if stages == 1 { 1 } else { 4 * stages };
    micro_batches.min(enough)
}

/// The matrix-product FLOPs that one rank executes, counted as for model FLOPs (attention in full).
/// It exceeds the model FLOPs only by recomputation and by work that several ranks duplicate.
fn hardware_flops(list: &StageProgram) -> Flops {
    list.instructions
        .iter()
        .filter_map(|instruction| match &*instruction.operation {
            Operation::Compute { kernel, .. } => Some(kernel.model_flops()),
            _ => None,
        })
        .sum()
}
