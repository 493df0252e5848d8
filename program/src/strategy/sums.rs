//! When sums of parts are made, and how what they make then lies.

use super::Chooser;
use crate::mesh::Axis;
use crate::placement::{Placement, Placements};
use foretell_models::{Operand, Operator, OperatorKind, Pass, Role, SEQUENCE, TensorId};

impl Chooser<'_> {
    /// An addition of partial sums is itself a partial sum: making one sum instead of two.
    pub(super) fn common_partial(&self, operator: &Operator) -> Option<Placements> {
        let mut all = operator.inputs.iter().map(|input| self.sharding.placements[input.tensor.0]);
        let first = all.next()?;
        (first.partial_axes().next().is_some() && all.all(|other| other == first)).then_some(first)
    }

    /// Partial sums of activations are made at once, and every rank has the whole then, or the shard that all readers are known to want; only
    /// where all who read them are additions of sums that lie alike do they wait. Sums over the batch wait for the end of the step.
    pub(super) fn settle(&self, tensor: TensorId, produced: Placements) -> Placements {
        if self.graph.tensor(tensor).role != Role::Activation {
            return produced;
        }
        let consumers = &self.consumers[tensor.0];
        let only_additions = !consumers.is_empty()
            && consumers.iter().all(|&id| self.graph.operators[id.0].kind == OperatorKind::Add)
            && consumers.iter().all(|&id| {
                let inputs = &self.graph.operators[id.0].inputs;
                inputs.iter().all(|input| input.tensor == tensor || self.will_be_produced(input.tensor) == produced)
            });
        if only_additions {
            return produced;
        }
        let maker = self.producers[tensor.0].map(|id| self.graph.operators[id.0].pass);
        produced.partial_axes().fold(produced, |settled, axis| {
            let wanted = match maker {
                Some(Pass::Forward) | None => self.sequence_shard(tensor, axis).or_else(|| self.asked_by_readers(tensor, axis)),
                Some(_) => self.wanted_by_all(tensor, axis),
            };
            // A part that another axis would cut into larger parts only later is not made.
            let wanted = wanted.filter(|&dimension| !settled.is_cut_finer(axis, dimension));
            settled.with(axis, wanted.map_or(Placement::Replicate, Placement::Shard))
        })
    }

    /// With sequence parallelism the dimension of a tensor that `tensor` cuts outside of products.
    fn sequence_shard(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        if !self.sequence_parallel || axis != Axis::Tensor {
            return None;
        }
        let parts = self.mesh.size(Axis::Tensor) * self.mesh.size(Axis::Context);
        let dimensions = &self.graph.tensor(tensor).dimensions;
        dimensions.iter().position(|one| one.name == SEQUENCE && one.extent.is_multiple_of(parts))
    }

    /// The dimension that all who read a tensor in the forward pass want to be cut along an axis, if the plan says so of every one of them.
    fn asked_by_readers(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        let readers = self.consumers[tensor.0].iter().map(|&id| (id, &self.graph.operators[id.0]));
        let mut wanted = readers.filter(|(_, operator)| operator.pass == Pass::Forward).map(|(id, operator)| {
            let chosen = self.asked[id.0].flatten().filter(|_| axis == Axis::Tensor)?;
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            input.axes.iter().position(|&walked| walked == Some(chosen))
        });
        let first = wanted.next()??;
        wanted.all(|other| other == Some(first)).then_some(first)
    }

    /// The dimension that all readers of a gradient want to be cut along an axis, if they agree. Of several gradients of one tensor that are to
    /// be added, where the plan asks for anything: as their sum is wanted.
    pub(super) fn wanted_by_all(&self, tensor: TensorId, axis: Axis) -> Option<usize> {
        let mut agreed = None;
        for &id in &self.consumers[tensor.0] {
            let operator = &self.graph.operators[id.0];
            let input = operator.inputs.iter().find(|input| input.tensor == tensor)?;
            let wanted = match operator.forward {
                Some(forward) => match self.sharding.strategies[forward.0].placements(input, Placement::Replicate).get(axis) {
                    Placement::Shard(dimension) => Some(dimension),
                    _ => None,
                },
                None => self.sequence_shard(tensor, axis).or_else(|| {
                    let total = operator.outputs.first().filter(|_| self.asks)?;
                    self.wanted_by_all(total.tensor, axis)
                }),
            };
            if wanted.is_none() || agreed.is_some_and(|dimension| wanted != Some(dimension)) {
                return None;
            }
            agreed = wanted;
        }
        agreed
    }

    /// How a tensor's maker leaves it or, when its turn has not come, will leave it: a gradient operator shares its forward operator's strategy. The
    /// sum of what several readers send back is a partial sum where all of these are; sums of sums go as deep as a model has layers.
    fn will_be_produced(&self, tensor: TensorId) -> Placements {
        let mut open = Vec::new();
        let mut known = self.known_of(tensor, &mut open);
        while let Some(sum) = open.last_mut() {
            if let Some(known) = known.take() {
                sum.agreed = match sum.agreed {
                    Agreed::Nothing => Agreed::On(known),
                    Agreed::On(placements) if placements == known => sum.agreed,
                    Agreed::On(_) | Agreed::Never => Agreed::Never,
                };
            }
            let next = if matches!(sum.agreed, Agreed::Never) { None } else { sum.parts.next() };
            let Some(part) = next else {
                known = Some(match sum.agreed {
                    Agreed::Nothing => Placements::default(),
                    Agreed::On(placements) => placements,
                    Agreed::Never => self.sharding.produced[sum.tensor.0],
                });
                open.pop();
                continue;
            };
            known = self.known_of(part.tensor, &mut open);
        }
        known.unwrap_or_default()
    }

    /// How a tensor will be left if it is no sum of gradients; else that sum is to be looked at.
    fn known_of<'a>(&'a self, tensor: TensorId, open: &mut Vec<OpenSum<'a>>) -> Option<Placements> {
        let maker = self.producers[tensor.0].map(|id| &self.graph.operators[id.0]);
        let forward = maker.and_then(|maker| maker.forward);
        match (maker, forward) {
            (Some(maker), Some(forward)) => {
                let output = maker.outputs.iter().find(|output| output.tensor == tensor);
                let strategy = &self.sharding.strategies[forward.0];
                Some(output.map(|output| strategy.placements(output, Placement::Partial)).unwrap_or_default())
            }
            (Some(maker), None) if maker.kind == OperatorKind::Add && maker.pass != Pass::Forward => {
                open.push(OpenSum { tensor, parts: maker.inputs.iter(), agreed: Agreed::Nothing });
                None
            }
            _ => Some(self.sharding.produced[tensor.0]),
        }
    }
}

/// A sum of gradients some of whose parts have been looked at.
struct OpenSum<'a> {
    tensor: TensorId,
    parts: std::slice::Iter<'a, Operand>,
    agreed: Agreed,
}

/// How the parts that were looked at are left.
#[derive(Clone, Copy)]
enum Agreed {
    Nothing,
    On(Placements),
    Never,
}
