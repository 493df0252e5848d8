//! A compiler of one model that lays out many plans of it, as a planner has: what they have in common is found once.

use super::{Compiled, Emission, Lowering, Places, Purpose, programs};
use crate::fusion::Fusions;
use crate::mesh::StageMesh;
use crate::plan::{ContextMethod, OperatorShares, Plan, PlanError};
use crate::program::Program;
use foretell_models::Model;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Operators of lowerings that are kept, all together, unless the compiler is given other room: some hundred MB.
const MOST_OPERATORS: usize = 100_000;

/// Compiles plans of one model. Graphs that are shared out alike are made once for all plans that differ only in their pipeline, schedule, recomputation,
/// buckets and the like; the Programs are those of [`super::compile`].
pub struct Compiler<'a> {
    model: Cow<'a, Model>,
    name: &'a str,
    /// Operators of lowerings that are kept.
    room: usize,
    /// The oldest first.
    known: Mutex<VecDeque<(Key, Cell)>>,
}

impl fmt::Debug for Compiler<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Compiler").field("name", &self.name).finish_non_exhaustive()
    }
}

type Cell = Arc<OnceLock<Result<Arc<Lowering>, PlanError>>>;

/// All of a plan that a lowering depends on.
#[derive(PartialEq)]
struct Key {
    mesh: StageMesh,
    vocabulary_parts: usize,
    purpose: Purpose,
    global_batch: usize,
    batch_norm_group: Option<usize>,
    sequence_parallel: bool,
    context_method: ContextMethod,
    expert_tensor: Option<usize>,
    operators: OperatorShares,
    fusions: Fusions,
    quantises: bool,
}

impl<'a> Compiler<'a> {
    /// A compiler of `model`, called `name`, that knows nothing yet.
    pub fn new(model: &'a Model, name: &'a str) -> Self {
        Self { model: Cow::Borrowed(model), name, room: MOST_OPERATORS, known: Mutex::default() }
    }

    /// The same of a model that is its own.
    pub fn owning(model: Model, name: &'a str) -> Self {
        Self { model: Cow::Owned(model), name, room: MOST_OPERATORS, known: Mutex::default() }
    }

    /// The same that keeps what it found of so many operators, all together, and of one plan at least: for whoever asks for plans that have much in
    /// common one after the other.
    #[must_use]
    pub fn with_room_for(self, operators: usize) -> Self {
        Self { room: operators, ..self }
    }

    /// A training step, and an evaluation.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn compile(&self, plan: &Plan) -> Result<Compiled, PlanError> {
        let [training, evaluation] =
            programs(self, plan, [Purpose::Training, Purpose::Evaluation], Emission::Once, Places::Planned)?;
        Ok(Compiled { training, evaluation })
    }

    /// The training step alone. Its lists may be fewer than those of [`Compiler::compile`], if some ranks do alike in training only.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn training(&self, plan: &Plan) -> Result<Program, PlanError> {
        let [training] = programs(self, plan, [Purpose::Training], Emission::Once, Places::Planned)?;
        Ok(training)
    }

    /// The evaluation alone.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn evaluation(&self, plan: &Plan) -> Result<Program, PlanError> {
        let [evaluation] = programs(self, plan, [Purpose::Evaluation], Emission::Once, Places::Planned)?;
        Ok(evaluation)
    }

    /// The training step without a memory plan: nothing has a place, and nothing waits for one. No simulation of the whole Program waits for less, so
    /// that bounds can be made of it; it cannot be executed.
    ///
    /// # Errors
    /// As [`super::compile`].
    pub fn unplaced(&self, plan: &Plan) -> Result<Program, PlanError> {
        let [training] = programs(self, plan, [Purpose::Training], Emission::Once, Places::None)?;
        Ok(training)
    }

    pub(super) fn lowering(
        &self,
        plan: &Plan,
        mesh: StageMesh,
        vocabulary_parts: usize,
        purpose: Purpose,
    ) -> Result<Arc<Lowering>, PlanError> {
        let key = Key {
            mesh: mesh.clone(),
            vocabulary_parts,
            purpose,
            global_batch: plan.global_batch,
            batch_norm_group: plan.batch_norm_group,
            sequence_parallel: plan.layout.sequence_parallel,
            context_method: plan.layout.context_method,
            expert_tensor: plan.layout.expert_tensor,
            operators: plan.layout.operators.clone(),
            fusions: Fusions::of(plan),
            quantises: plan.quantises(),
        };
        let cell = {
            let mut known = self.known();
            let found = known.iter().find(|(other, _)| *other == key).map(|(_, cell)| Arc::clone(cell));
            found.unwrap_or_else(|| {
                let cell = Cell::default();
                known.push_back((key, Arc::clone(&cell)));
                cell
            })
        };
        let lowering = cell.get_or_init(|| {
            let made = Lowering::new(&self.model, self.name, plan, mesh, vocabulary_parts, purpose)?;
            Ok(Arc::new(made))
        });
        self.forget_the_oldest();
        lowering.clone()
    }

    /// What is in use elsewhere stays there.
    fn forget_the_oldest(&self) {
        let operators = |cell: &Cell| cell.get().and_then(|made| made.as_ref().ok()).map_or(0, |made| made.graph.operators.len());
        let mut known = self.known();
        let mut all: usize = known.iter().map(|(_, cell)| operators(cell)).sum();
        while all > self.room
            && known.len() > 1
            && let Some((_, cell)) = known.pop_front()
        {
            all -= operators(&cell);
        }
    }

    fn known(&self) -> MutexGuard<'_, VecDeque<(Key, Cell)>> {
        // A panic elsewhere leaves the list as it was.
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Layout;

    #[test]
    fn without_room_what_was_found_is_forgotten_and_found_again() {
        let model = Model::named("gpt2").expect("in the zoo");
        let (all, none) = (Compiler::new(&model, "gpt2"), Compiler::new(&model, "gpt2").with_room_for(0));
        let plan = |tensor| Plan::new(Layout { tensor, ..Layout::default() }, 4);
        for tensor in [1, 2, 1, 2] {
            let [one, other] = [&all, &none].map(|compiler| compiler.unplaced(&plan(tensor)).expect("it divides the model"));
            assert_eq!(format!("{one:?}"), format!("{other:?}"));
        }
        assert_eq!((all.known().len(), none.known().len()), (2, 1));
    }
}
