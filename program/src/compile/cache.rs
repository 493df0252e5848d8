//! A cache of the lowerings of one model: plans that differ only in pipeline, schedule,
//! recomputation, buckets and the like share them.

use super::lowering::{Lowering, Lowerings, Purpose, Source, vocabulary_parts};
use crate::fusion::Fusions;
use crate::mesh::{Mesh, StageMesh};
use crate::plan::{ContextMethod, OperatorPatterns, Plan, PlanError, Training};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// Lowerings of a model, made when they are first asked for. The oldest are dropped beyond a limit.
pub(super) struct LoweringCache<'a> {
    source: Source<'a>,
    /// The most operators that all cached lowerings may have together.
    operator_limit: usize,
    /// The oldest entry first.
    entries: Mutex<VecDeque<(Key, Entry)>>,
}

/// A cached lowering, or the error that making it gave. Empty while a thread makes it.
type Entry = Arc<OnceLock<Result<Arc<Lowering>, PlanError>>>;

/// Everything in a plan that a lowering depends on.
#[derive(PartialEq)]
struct Key {
    mesh: StageMesh,
    vocabulary_parts: usize,
    purpose: Purpose,
    global_batch: usize,
    replicas: usize,
    samples_of_update: usize,
    batch_norm_group: Option<usize>,
    sequence_parallel: bool,
    context_method: ContextMethod,
    zigzag_ranks: usize,
    expert_tensor: Option<usize>,
    operators: OperatorPatterns,
    tiles: [Option<usize>; 2],
    fusions: Fusions,
    quantises: bool,
    /// The recipe. The graph depends on its frozen parameters and its loss only, but a caller's
    /// plans mostly share one recipe, so all of it is compared.
    training: Training,
}

impl<'a> LoweringCache<'a> {
    pub(super) fn new(source: Source<'a>, operator_limit: usize) -> Self {
        Self { source, operator_limit, entries: Mutex::default() }
    }

    pub(super) fn with_operator_limit(self, operator_limit: usize) -> Self {
        Self { operator_limit, ..self }
    }

    /// The name of the model.
    pub(super) fn name(&self) -> &str {
        self.source.name
    }

    /// The lowerings of all distinct stage meshes of a plan.
    pub(super) fn lowerings(&self, plan: &Plan, mesh: &Mesh, purpose: Purpose) -> Result<Lowerings, PlanError> {
        let vocabulary_parts = vocabulary_parts(plan, mesh);
        Lowerings::new(mesh, plan.layout.pipeline, |stage| self.lowering(plan, stage, vocabulary_parts, purpose))
    }

    fn lowering(
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
            replicas: plan.replicas(),
            samples_of_update: plan.samples_of_update(),
            batch_norm_group: plan.batch_norm_group,
            sequence_parallel: plan.layout.sequence_parallel,
            context_method: plan.layout.context_method,
            zigzag_ranks: plan.layout.zigzag_ranks(),
            expert_tensor: plan.layout.expert_tensor,
            operators: plan.layout.operators.clone(),
            tiles: [plan.layout.loss_chunk, plan.layout.mlp_chunk],
            fusions: Fusions::of(plan),
            quantises: plan.quantises(),
            training: plan.training.clone(),
        };
        let entry = {
            let mut entries = self.entries();
            let found = entries.iter().find(|(known, _)| *known == key).map(|(_, entry)| Arc::clone(entry));
            found.unwrap_or_else(|| {
                let entry = Entry::default();
                entries.push_back((key, Arc::clone(&entry)));
                entry
            })
        };
        // Other threads that want the same lowering wait here; the lock on the list is free.
        let lowering = entry.get_or_init(|| {
            let lowering = Lowering::new(&self.source, plan, mesh, vocabulary_parts, purpose)?;
            Ok(Arc::new(lowering))
        });
        self.drop_oldest();
        lowering.clone()
    }

    /// Drops the oldest entries until the limit holds, but never the last one. Lowerings that are
    /// in use elsewhere live on.
    fn drop_oldest(&self) {
        let operators =
            |entry: &Entry| entry.get().and_then(|made| made.as_ref().ok()).map_or(0, |made| made.graph.operators.len());
        let mut entries = self.entries();
        let mut total: usize = entries.iter().map(|(_, entry)| operators(entry)).sum();
        while total > self.operator_limit
            && entries.len() > 1
            && let Some((_, entry)) = entries.pop_front()
        {
            total -= operators(&entry);
        }
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<(Key, Entry)>> {
        // A panic in another thread leaves the list intact.
        self.entries.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries().len()
    }
}
