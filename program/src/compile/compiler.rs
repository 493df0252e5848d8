//! The compiler of one model, for callers such as the planner that compile many plans of it.

use super::cache::LoweringCache;
use super::emit::Emission;
use super::lowering::Source;
use super::programs::{Compiled, IsOver, Offsets, Session, programs};
use super::saving::saving;
use super::wanted::{SessionPart, Wanted};
use crate::plan::{Plan, PlanError};
use crate::program::Program;
use foretell_models::Model;
use std::borrow::Cow;
use std::fmt;

/// The default limit on cached operators: some hundred megabytes of lowerings.
const DEFAULT_OPERATOR_LIMIT: usize = 100_000;

/// Compiles plans of one model.
///
/// Sharded graphs are cached for plans that differ only in pipeline, schedule, recomputation,
/// buckets and the like. The Programs are the same as those of [`super::compile`].
pub struct Compiler<'a> {
    cache: LoweringCache<'a>,
}

impl fmt::Debug for Compiler<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Compiler").field("name", &self.cache.name()).finish_non_exhaustive()
    }
}

impl<'a> Compiler<'a> {
    /// A compiler of `model`, with an empty cache. Error messages call the model `name`.
    pub fn new(model: &'a Model, name: &'a str) -> Self {
        Self { cache: LoweringCache::new(Source { model: Cow::Borrowed(model), name, blocks: None }, DEFAULT_OPERATOR_LIMIT) }
    }

    /// A compiler of some blocks of a model, given their indices in increasing order
    /// ([`Graph::with_blocks`](foretell_models::Graph::with_blocks)). Plans that it compiles must
    /// have the cuts of a model with this number of blocks.
    pub fn of_blocks(model: Cow<'a, Model>, name: &'a str, blocks: Vec<usize>) -> Self {
        Self { cache: LoweringCache::new(Source { model, name, blocks: Some(blocks) }, DEFAULT_OPERATOR_LIMIT) }
    }

    /// Sets the most operators that all cached graphs may have together. The graph of the latest
    /// plan always stays cached.
    #[must_use]
    pub fn with_operator_limit(self, operators: usize) -> Self {
        Self { cache: self.cache.with_operator_limit(operators) }
    }

    /// Compiles the training steps and the evaluation.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn compile(&self, plan: &Plan) -> Result<Compiled, PlanError> {
        self.all(plan, Emission::Once)
    }

    /// Compiles the training step alone. It may have fewer lists than in [`Compiler::compile`]:
    /// some ranks do the same in training but not in evaluation.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn training(&self, plan: &Plan) -> Result<Program, PlanError> {
        self.one(plan, first_step(plan), Offsets::Planned)
    }

    /// Compiles the training step as [`Compiler::training`] does, unless `is_over` returns `true`
    /// during it. The compiler calls it between instruction lists, from any thread.
    ///
    /// # Errors
    /// [`PlanError::Interrupted`] if `is_over` returned `true`, and as [`super::compile`].
    pub fn training_until(&self, plan: &Plan, is_over: &(dyn Fn() -> bool + Sync)) -> Result<Program, PlanError> {
        self.one_until(plan, first_step(plan), Offsets::Planned, is_over)
    }

    /// Compiles the evaluation alone.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn evaluation(&self, plan: &Plan) -> Result<Program, PlanError> {
        self.one(plan, Wanted::Evaluation, Offsets::Planned)
    }

    /// Compiles the forward pass up to the logits, which it leaves in a buffer named
    /// [`LOGITS`](foretell_models::LOGITS). There are no gradients and no optimizer state.
    ///
    /// # Errors
    /// As [`super::compile`], and if `tensor` shards the vocabulary.
    pub fn logits(&self, plan: &Plan) -> Result<Program, PlanError> {
        self.one(plan, Wanted::Logits, Offsets::Planned)
    }

    /// Compiles the training step without a memory plan: no buffer has an offset, and no
    /// instruction waits for memory to become free. Its simulated time is a lower bound on that of
    /// the Program with a memory plan. It cannot be executed.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn unplaced(&self, plan: &Plan) -> Result<Program, PlanError> {
        self.one(plan, first_step(plan), Offsets::None)
    }

    /// Compiles the training step as [`Compiler::unplaced`] does, unless `is_over` returns `true`
    /// during it.
    ///
    /// # Errors
    /// As [`Compiler::training_until`].
    pub fn unplaced_until(&self, plan: &Plan, is_over: &(dyn Fn() -> bool + Sync)) -> Result<Program, PlanError> {
        self.one_until(plan, first_step(plan), Offsets::None, is_over)
    }

    fn one(&self, plan: &Plan, wanted: Wanted, offsets: Offsets) -> Result<Program, PlanError> {
        self.one_until(plan, wanted, offsets, &|| false)
    }

    fn one_until(&self, plan: &Plan, wanted: Wanted, offsets: Offsets, is_over: IsOver<'_>) -> Result<Program, PlanError> {
        match programs(&self.cache, plan, &[wanted], Emission::Once, offsets, is_over)?.pop() {
            Some(program) => {
                if offsets == Offsets::Planned {
                    assert_sound_in_debug(&program);
                }
                Ok(program)
            }
            None => unreachable!("one Program was wanted"),
        }
    }

    /// All Programs of a run.
    pub(super) fn all(&self, plan: &Plan, emission: Emission) -> Result<Compiled, PlanError> {
        let cycle = plan.cycle();
        let pacing = plan.pacing();
        let steps = cycle.exchanges().into_iter().map(Wanted::Step);
        let workers = 0..pacing.map_or(0, |pacing| pacing.workers);
        let sessions = workers.flat_map(|worker| SessionPart::ALL.map(|part| Wanted::Serve(worker, part)));
        let wanted: Vec<Wanted> = std::iter::once(Wanted::Evaluation).chain(steps).chain(sessions).collect();
        let mut programs = programs(&self.cache, plan, &wanted, emission, Offsets::Planned, &|| false)?.into_iter();
        let (Some(evaluation), Some(training)) = (programs.next(), programs.next()) else {
            unreachable!("an evaluation and at least one step were wanted")
        };
        assert_sound_in_debug(&evaluation);
        assert_sound_in_debug(&training);
        let other_steps: Vec<Program> = programs.by_ref().take(cycle.program_count() - 1).collect();
        other_steps.iter().for_each(assert_sound_in_debug);
        let mut sessions = Vec::new();
        while let (Some(snapshot), Some(send), Some(receive), Some(add), Some(update)) =
            (programs.next(), programs.next(), programs.next(), programs.next(), programs.next())
        {
            sessions.push(Session { snapshot, send, receive, add, update });
        }
        let saving = saving(&training);
        Ok(Compiled { training, other_steps, cycle, evaluation, saving, pacing, sessions })
    }
}

/// Asserts that a Program with a memory plan is sound, in debug builds. For large Programs it
/// checks each list by itself only: checking ranks against each other takes time in proportion to
/// their number.
fn assert_sound_in_debug(program: &Program) {
    /// The most ranks for which the check across ranks takes moments.
    const FEW_RANKS: usize = 16;
    if cfg!(debug_assertions) {
        let is_small = program.mesh.world_size() <= FEW_RANKS;
        let checked = if is_small { program.check() } else { program.check_lists() };
        assert_eq!(checked, Ok(()), "the compiler makes sound Programs");
    }
}

/// The Program of a run's first step.
fn first_step(plan: &Plan) -> Wanted {
    Wanted::Step(plan.cycle().exchanges().first().copied().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Layout;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn a_compilation_ends_between_two_lists_when_it_is_over() {
        let model = Model::named("gpt2").expect("in the zoo");
        let compiler = Compiler::new(&model, "gpt2");
        let plan = Plan::new(Layout { pipeline: 4, ..Layout::default() }, 4);
        for lists in 0..=4 {
            let asked = AtomicUsize::new(0);
            let is_over = || asked.fetch_add(1, Ordering::Relaxed) >= lists;
            match compiler.unplaced_until(&plan, &is_over) {
                Ok(program) => assert_eq!((program.lists.len(), lists), (4, 4)),
                Err(error) => assert_eq!((error, lists < 4), (PlanError::Interrupted, true)),
            }
        }
        assert_eq!(compiler.training_until(&plan, &|| true).expect_err("it is over"), PlanError::Interrupted);
        let whole = compiler.training_until(&plan, &|| false).expect("it divides the model");
        assert_eq!(format!("{whole:?}"), format!("{:?}", compiler.training(&plan).expect("it divides the model")));
    }

    #[test]
    fn a_cache_limit_of_zero_keeps_one_lowering_and_changes_no_program() {
        let model = Model::named("gpt2").expect("in the zoo");
        let (unlimited, limited) = (Compiler::new(&model, "gpt2"), Compiler::new(&model, "gpt2").with_operator_limit(0));
        let plan = |tensor| Plan::new(Layout { tensor, ..Layout::default() }, 4);
        for tensor in [1, 2, 1, 2] {
            let [one, other] =
                [&unlimited, &limited].map(|compiler| compiler.unplaced(&plan(tensor)).expect("it divides the model"));
            assert_eq!(format!("{one:?}"), format!("{other:?}"));
        }
        assert_eq!((unlimited.cache.len(), limited.cache.len()), (2, 1));
    }
}
