//! Partial sums: when they are reduced, and the placements afterwards.

use super::Sharding;
use super::requests::Requests;
use super::rules::Rules;
use crate::mesh::Axis;
use crate::placement::{Placement, Placements};
use foretell_models::{Kernel, LoopId, Operand, Operator, Pass, Role, SEQUENCE, TensorId};

/// The rules for partial sums, given the choices so far.
pub(super) struct Sums<'a> {
    pub(super) rules: &'a Rules<'a>,
    pub(super) requests: &'a Requests,
    pub(super) sharding: &'a Sharding,
}

impl<'a> Sums<'a> {
    /// The placements of an addition whose inputs are all the same kind of partial sum. Its output
    /// is then such a partial sum as well, and needs one reduction instead of several.
    pub(super) fn common_partial_sum(&self, operator: &Operator) -> Option<Placements> {
        let mut inputs = operator.inputs.iter().map(|input| self.sharding.settled[input.tensor.0]);
        let first = inputs.next()?;
        (first.is_partial() && inputs.all(|other| other == first)).then_some(first)
    }

    /// The placements of a tensor after the reductions that follow its producer.
    ///
    /// Partial sums of activations are reduced at once: to the whole tensor, or to the shard that
    /// all readers are known to read. They stay partial only if all readers are additions of
    /// equally placed sums. Sums over the batch stay partial until the end of the step.
    pub(super) fn settled(&self, tensor: TensorId, produced: Placements) -> Placements {
        let Rules { graph, consumers, producers, .. } = self.rules;
        if graph.tensor(tensor).role != Role::Activation {
            return produced;
        }
        let readers = || consumers[tensor.0].iter().map(|&id| &graph.operators[id.0]);
        let adds_equal_sums = |operator: &Operator| {
            let has_placements = |input: &Operand| input.tensor == tensor || self.expected(input.tensor) == produced;
            operator.inputs.iter().all(has_placements)
        };
        let has_only_additions = !consumers[tensor.0].is_empty()
            && readers().all(|operator| matches!(operator.kind, Kernel::Add { .. }))
            && readers().all(adds_equal_sums);
        if has_only_additions {
            return produced;
        }
        let pass = producers[tensor.0].map(|id| graph.operators[id.0].pass);
        produced.partial_axes().fold(produced, |settled, axis| {
            let wanted = match pass {
                Some(Pass::Forward) | None => {
                    self.sequence_dimension(tensor, axis).or_else(|| self.requested_by_readers(tensor, axis))
                }
                Some(_) => self.wanted_by_all(tensor, axis),
            };
            // A shard is not made if an axis with smaller parts already shards the dimension.
            let wanted = wanted.filter(|&dimension| !settled.is_cut_finer(axis, dimension));
            settled.with(axis, wanted.map_or(Placement::Replicate, Placement::Shard))
        })
    }

    /// With sequence parallelism, the dimension of a tensor that `tensor` shards outside of
    /// products.
    fn sequence_dimension(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        if !self.rules.sequence_parallel || axis != Axis::Tensor {
            return None;
        }
        let parts = self.rules.sequence_parts();
        let dimensions = &self.rules.graph.tensor(tensor).dimensions;
        dimensions.iter().position(|dimension| dimension.name == SEQUENCE && dimension.extent.is_multiple_of(parts))
    }

    /// The dimension of a tensor that all forward readers read sharded over `tensor`, if the plan
    /// has requests for all of them.
    fn requested_by_readers(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        let readers = self.rules.consumers[tensor.0].iter().map(|&id| (id, &self.rules.graph.operators[id.0]));
        let mut wanted = readers.filter(|(_, operator)| operator.pass == Pass::Forward).map(|(id, operator)| {
            let chosen = self.requests.of(id).flatten().filter(|_| axis == Axis::Tensor)?;
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            input.axes.iter().position(|&walked| walked == Some(chosen))
        });
        let first = wanted.next()??;
        wanted.all(|other| other == Some(first)).then_some(first)
    }

    /// The loop along `tensor` for a sum of gradients, if the plan has requests: the loop along
    /// which all readers of the sum read it sharded.
    pub(super) fn loop_of_gradient_sum(&self, operator: &Operator) -> Option<LoopId> {
        let is_sum = operator.pass != Pass::Forward && operator.forward.is_none() && self.requests.any;
        let sum = operator.outputs.first().filter(|_| is_sum)?;
        let dimension = self.wanted_by_all(sum.tensor, Axis::Tensor)?;
        sum.axes.get(dimension).copied().flatten()
    }

    /// The dimension along which all readers read a gradient sharded over an axis, if they agree.
    /// With requests, a reader that adds gradients counts as the readers of its sum.
    fn wanted_by_all(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        let mut agreed = None;
        for &id in &self.rules.consumers[tensor.0] {
            let operator = &self.rules.graph.operators[id.0];
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            let wanted = match operator.forward {
                Some(forward) => match self.sharding.strategies[forward.0].placements(input, Placement::Replicate).get(axis) {
                    Placement::Shard(dimension) => Some(dimension),
                    _ => None,
                },
                None => self.sequence_dimension(tensor, axis).or_else(|| {
                    let sum = operator.outputs.first().filter(|_| self.requests.any)?;
                    self.wanted_by_all(sum.tensor, axis)
                }),
            };
            if wanted.is_none() || agreed.is_some_and(|dimension| wanted != Some(dimension)) {
                return None;
            }
            agreed = wanted;
        }
        agreed
    }

    /// The placements in which a tensor's producer leaves it, or will leave it. A gradient operator
    /// has the strategy of its forward operator. A sum of gradients is a partial sum if all its
    /// terms are.
    ///
    /// Sums of sums nest as deep as a model has layers, so this uses an explicit stack instead of
    /// recursion.
    fn expected(&self, tensor: TensorId) -> Placements {
        let mut open = Vec::new();
        let mut known = self.expected_or_open(tensor, &mut open);
        while let Some(sum) = open.last_mut() {
            if let Some(known) = known.take() {
                sum.agreement = match sum.agreement {
                    Agreement::Open => Agreement::On(known),
                    Agreement::On(placements) if placements == known => sum.agreement,
                    Agreement::On(_) | Agreement::None => Agreement::None,
                };
            }
            let next = if matches!(sum.agreement, Agreement::None) { None } else { sum.terms.next() };
            let Some(term) = next else {
                known = Some(match sum.agreement {
                    Agreement::Open => Placements::default(),
                    Agreement::On(placements) => placements,
                    Agreement::None => self.sharding.produced[sum.tensor.0],
                });
                open.pop();
                continue;
            };
            known = self.expected_or_open(term.tensor, &mut open);
        }
        known.expect("invariant: no sum is open any more")
    }

    /// The expected placements of a tensor, or `None` after pushing it to `open` if it is a sum of
    /// gradients.
    fn expected_or_open(&self, tensor: TensorId, open: &mut Vec<OpenSum<'a>>) -> Option<Placements> {
        let producer = self.rules.producers[tensor.0].map(|id| &self.rules.graph.operators[id.0]);
        let forward = producer.and_then(|producer| producer.forward);
        match (producer, forward) {
            (Some(producer), Some(forward)) => {
                let output = producer.outputs.iter().find(|output| output.tensor == tensor);
                let strategy = &self.sharding.strategies[forward.0];
                let output = output.expect("invariant: a tensor is among its producer's results");
                Some(strategy.placements(output, Placement::Partial))
            }
            (Some(producer), None) if matches!(producer.kind, Kernel::Add { .. }) && producer.pass != Pass::Forward => {
                open.push(OpenSum { tensor, terms: producer.inputs.iter(), agreement: Agreement::Open });
                None
            }
            _ => Some(self.sharding.produced[tensor.0]),
        }
    }
}

/// A sum of gradients, some of whose terms have been visited.
struct OpenSum<'a> {
    tensor: TensorId,
    /// The terms that have not been visited yet.
    terms: std::slice::Iter<'a, Operand>,
    agreement: Agreement,
}

/// Whether the terms of a sum that were looked at have equal placements.
#[derive(Clone, Copy)]
enum Agreement {
    /// No term was looked at.
    Open,
    /// All have these placements.
    On(Placements),
    /// They differ.
    None,
}
