//! Parameters and gradients that ZeRO shards: gathered before they are needed, scattered as soon as they are complete; and the buckets' reduction
//! beside the backward pass.

use super::emit::StageEmitter;
use crate::mesh::{Axis, Group};
use crate::program::{BufferId, BufferRole, Collective, Phase};
use crate::schedule::{StagePass, Task};
use foretell_models::{Kernel, OperatorId, Role, TensorId};
use foretell_units::DataType;
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// A run of operators of one block, and the buckets of the parameters that they read.
pub(super) struct Run {
    /// Its first operator, within its task's.
    pub(super) start: usize,
    pub(super) buckets: BTreeSet<usize>,
}

/// The gradients of a bucket and a micro-batch before they are sharded.
pub(super) struct OpenGradients {
    pub(super) root: BufferId,
    /// By the gradient's name.
    pub(super) pieces: FxHashMap<String, BufferId>,
    /// Writers still to come.
    pub(super) writers_left: usize,
}

impl StageEmitter<'_> {
    /// Where parameters are kept in shards: a task's operators by block, and the buckets that each needs. Else nothing.
    pub(super) fn runs(&mut self, task: &Task) -> Rc<[Run]> {
        if !self.state.shards_parameters {
            return Rc::from([]);
        }
        let pass = (task.chunk, task.pass);
        if let Some(known) = self.runs.get(&pass) {
            return Rc::clone(known);
        }
        let found: Rc<[Run]> = self.find_runs(task).into();
        self.runs.insert(pass, Rc::clone(&found));
        found
    }

    fn find_runs(&self, task: &Task) -> Vec<Run> {
        let graph = &self.lowering.graph;
        let buckets_read = |id: OperatorId| {
            let parameters = graph.operators[id.0].inputs.iter().map(|input| match graph.tensor(input.tensor).role {
                // It is made of that, at the latest here.
                Role::OfParameter(parameter) => &graph.tensor(parameter).name,
                _ => &graph.tensor(input.tensor).name,
            });
            parameters.filter_map(|name| self.state.bucket_of_parameter(name)).filter(|&one| self.state.buckets[one].shards > 1)
        };
        let mut runs: Vec<Run> = Vec::new();
        let mut block = None;
        for (position, &id) in self.operators_of(task).iter().enumerate() {
            let here = graph.operators[id.0].block;
            if block != Some(here) {
                block = Some(here);
                // What is computed again for the backward pass reads parameters, too.
                let again = if task.pass == StagePass::Forward { None } else { self.needed_again.get(here) };
                let buckets = again.into_iter().flatten().flat_map(|&id| buckets_read(id)).collect();
                runs.push(Run { start: position, buckets });
            }
            if let Some(run) = runs.last_mut() {
                run.buckets.extend(buckets_read(id));
            }
        }
        runs
    }

    /// Before a run of operators: gathers its parameters if they are not there, drops (with ZeRO 3) those that neither it nor the next needs, and
    /// begins to gather those of the next, so that they come while this run computes.
    pub(super) fn gather_ahead(&mut self, rest: &[Run], next_task: &[Run], phase: Phase) {
        let Some(run) = rest.first() else { return };
        let next = rest.get(1).or_else(|| next_task.first()).map(|next| next.buckets.clone()).unwrap_or_default();
        let drops = self.state.drops_parameters;
        if drops {
            let is_near = |bucket: usize| run.buckets.contains(&bucket) || next.contains(&bucket);
            self.gathered.retain(|&bucket, _| is_near(bucket));
            let buckets = &self.state.buckets;
            self.forget_of_parameters(|bucket| buckets[bucket].shards > 1 && !is_near(bucket));
        }
        for bucket in run.buckets.iter().chain(&next) {
            if !self.gathered.contains_key(bucket) {
                self.gather(*bucket, phase);
            }
        }
    }

    pub(super) fn gather(&mut self, index: usize, phase: Phase) {
        let bucket = &self.state.buckets[index];
        let name = format!("parameters {index}");
        let root = self.buffer(&name, BufferRole::Parameter, vec![bucket.elements], self.state.precision);
        let shard = self.buckets[index].parameters;
        self.exchange(&name, Collective::AllGather, Group::along(Axis::Shard), shard, root, phase);
        let mut pieces = FxHashMap::default();
        for member in &bucket.members {
            pieces.insert(member.name.clone(), self.piece(&member.name, root, member.offset, member.shape.clone()));
        }
        self.gathered.insert(index, pieces);
    }

    /// Where a sum over micro-batches is made: kept, or opened for this micro-batch where gradients are sharded.
    pub(super) fn sum_buffer(&mut self, tensor: TensorId, micro_batch: usize) -> Option<BufferId> {
        let lowering = self.lowering;
        let name = &lowering.graph.tensor(tensor).name;
        match self.state.bucket_of_gradient(tensor).filter(|&index| self.shards_gradients(index)) {
            Some(index) => {
                if !self.open_gradients.contains_key(&(index, micro_batch)) {
                    let opened = self.open_gradients(index);
                    self.open_gradients.insert((index, micro_batch), opened);
                }
                self.open_gradients.get(&(index, micro_batch)).and_then(|open| open.pieces.get(name)).copied()
            }
            None => self.kept.get(name).copied(),
        }
    }

    pub(super) fn shards_gradients(&self, bucket: usize) -> bool {
        self.state.shards_gradients && self.state.buckets[bucket].shards > 1
    }

    /// Room for a bucket's gradients of one micro-batch. What lies between parameters is zero, since it is summed with the rest.
    pub(super) fn open_gradients(&mut self, index: usize) -> OpenGradients {
        let bucket = &self.state.buckets[index];
        let name = format!("gradients {index}");
        let root = self.buffer(&name, BufferRole::Gradient, vec![bucket.elements], DataType::Fp32);
        for (start, elements) in bucket.gaps() {
            let gap = self.piece(&name, root, start, vec![elements]);
            self.compute(&name, Kernel::Zero { elements }, vec![], vec![gap], Phase::Backward);
        }
        let mut pieces = FxHashMap::default();
        for member in &bucket.members {
            let gradient = format!("{}.gradient", member.name);
            let piece = self.piece(&gradient, root, member.offset, member.shape.clone());
            pieces.insert(gradient, piece);
        }
        OpenGradients { root, pieces, writers_left: bucket.writers }
    }

    /// Counts what a task adds to buckets none of which it completes.
    pub(super) fn count_writers(&mut self, task: &Task) {
        let pass = (task.chunk, task.pass);
        if !self.writers.contains_key(&pass) {
            let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
            for id in self.operators_of(task) {
                for bucket in self.state.buckets_written(&self.lowering.graph.operators[id.0]) {
                    *counts.entry(bucket).or_default() += 1;
                }
            }
            self.writers.insert(pass, counts.into_iter().collect());
        }
        for &(bucket, count) in self.writers.get(&pass).into_iter().flat_map(|counts| counts.iter()) {
            self.writers_left[bucket] -= count;
        }
    }

    /// After an operator: reduces the buckets whose last gradient it was.
    pub(super) fn reduce_complete_buckets(&mut self, id: OperatorId, micro_batch: usize) {
        for index in self.state.buckets_written(&self.lowering.graph.operators[id.0]) {
            self.writers_left[index] -= 1;
            let is_last = self.writers_left[index] == 0;
            if self.shards_gradients(index) {
                let Some(open) = self.open_gradients.get_mut(&(index, micro_batch)) else { continue };
                open.writers_left -= 1;
                if open.writers_left == 0 {
                    let root = open.root;
                    self.open_gradients.remove(&(index, micro_batch));
                    self.shard_gradients(index, root);
                }
            }
            match is_last {
                true if self.plan.overlap.gradients => self.reduce(index),
                // Nothing is gained where kernels would wait for it: the other stages get their gradients first.
                true => self.put_off.push(index),
                false => {}
            }
        }
    }
}
