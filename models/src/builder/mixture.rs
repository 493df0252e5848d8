//! Mixtures of experts: the router, dispatch of tokens to slots of experts and back, and the
//! products of experts.
//!
//! Every expert has the same number of slots for each sample, divided evenly over the sample's
//! positions. A rank with a shard of the batch or of the sequence thus fills that shard of every
//! expert's slots. Moving them to the ranks that have the experts is a change of placement: from
//! shards of slots to shards of experts.

use super::{GraphBuilder, dimension, operand, shardable, walk};
use crate::graph::{BATCH, Dimension, Extent, Initialisation, Loop, LoopId, Parameter, Role, SEQUENCE, TensorId};
use crate::kernel::{Kernel, Mixture, WeightLayout};
use crate::storage::Storage;

/// Sizes of a mixture.
#[derive(Clone, Copy)]
pub(crate) struct MixtureShape {
    pub(crate) experts: usize,
    /// Experts that a token is sent to.
    pub(crate) top: usize,
    /// Slots of an expert for each sample.
    pub(crate) slots_per_sample: usize,
}

impl MixtureShape {
    /// The mixture of an operator, with the slots for one sample.
    fn unsized_mixture(&self) -> Mixture {
        Mixture { tokens: 0, experts: 0, capacity: self.slots_per_sample, top: self.top, hidden: 0 }
    }
}

/// The slots that tokens were sent to.
#[derive(Clone, Copy)]
pub(crate) struct Routing {
    gates: TensorId,
    choices: TensorId,
    places: TensorId,
}

impl GraphBuilder {
    /// Adds one product an expert of `x` `[experts, batch, slots, contracted]` with `weight`
    /// `[experts, columns, contracted]`.
    pub(crate) fn expert_matmul(&mut self, name: &str, x: TensorId, weight: TensorId) -> TensorId {
        let [x_dimensions, weight_dimensions] = [self.dimensions(x), self.dimensions(weight)];
        let loops = vec![
            shardable(&x_dimensions[0], Extent::Experts),
            shardable(&x_dimensions[1], Extent::Rows),
            shardable(&x_dimensions[2], Extent::Rows),
            shardable(&weight_dimensions[1], Extent::Columns),
            shardable(&x_dimensions[3], Extent::Contracted),
        ];
        let [experts, batch, slots, columns, contracted] = [0, 1, 2, 3, 4].map(|index| Some(LoopId(index)));
        let dimensions = vec![x_dimensions[0], x_dimensions[1], x_dimensions[2], weight_dimensions[1]];
        let y = self.activation(name, dimensions, Storage::Precision);
        self.operator(
            name,
            Kernel::ExpertMatmul { experts: 0, rows: 0, columns: 0, contracted: 0 },
            loops,
            vec![operand(x, vec![experts, batch, slots, contracted]), operand(weight, vec![experts, columns, contracted])],
            vec![operand(y, vec![experts, batch, slots, columns])],
        );
        y
    }

    /// Adds the `bias` `[experts, columns]` of each expert to its product `y` `[experts, batch,
    /// slots, columns]`. The kernel's arithmetic and traffic are those of a bias over all experts'
    /// columns. No backend has a kernel for it with the experts outermost.
    pub(crate) fn expert_bias(&mut self, name: &str, y: TensorId, bias: TensorId) -> TensorId {
        let dimensions = self.dimensions(y);
        let roles = [Extent::Columns, Extent::Rows, Extent::Rows, Extent::Columns];
        let loops = dimensions.iter().zip(roles).map(|(dimension, role)| shardable(dimension, role)).collect();
        let all = walk(0, dimensions.len());
        let sum = self.activation(name, dimensions, Storage::Precision);
        let inputs = vec![operand(y, all.clone()), operand(bias, vec![all[0], all[3]])];
        self.operator(name, Kernel::BiasAdd { rows: 0, columns: 0 }, loops, inputs, vec![operand(sum, all)]);
        sum
    }

    /// Adds the weights of one matrix of all experts, stacked in one parameter. In the public form
    /// each expert has its own, `{module}.{expert}.{matrix}.weight`.
    pub(crate) fn expert_parameter(
        &mut self,
        module: &str,
        matrix: &str,
        [experts, columns, contracted]: [Dimension; 3],
        initialisation: Initialisation,
    ) -> TensorId {
        let parameter = Parameter {
            initialisation,
            permutation: vec![0, 1, 2],
            shape: vec![experts.extent, columns.extent, contracted.extent],
            parts: (0..experts.extent).map(|expert| format!("{module}.{expert}.{matrix}.weight")).collect(),
        };
        let dimensions = vec![experts, columns, contracted];
        self.tensor(format!("{module}.{matrix}.weight"), Role::Parameter(parameter), dimensions, Storage::Precision)
    }

    /// Adds the choice of experts for x `[batch, sequence, hidden]` by the router's `weight`
    /// `[experts, hidden]` and its `bias` `[experts]`, if it has one, and the dispatch of tokens to
    /// slots. Returns the slots `[experts, batch, slots, hidden]`.
    pub(crate) fn dispatch(
        &mut self,
        module: &str,
        x: TensorId,
        weight: TensorId,
        bias: Option<TensorId>,
        shape: &MixtureShape,
    ) -> (TensorId, Routing) {
        let MixtureShape { experts, top, slots_per_sample } = *shape;
        let logits = self.matmul(&format!("{module}.gate"), x, weight, 1, WeightLayout::OutIn);
        let whole = |dimension: &mut Loop| dimension.shardable = false;
        // The router compares all experts for each token, so the logits must not be sharded along
        // the experts.
        if let Some(product) = self.graph.operators.last_mut() {
            product.loops.iter_mut().filter(|dimension| dimension.role == Extent::Columns).for_each(whole);
        }
        let logits = match bias {
            Some(bias) => {
                let logits = self.bias_add(&format!("{module}.gate.bias"), logits, bias);
                if let Some(sum) = self.graph.operators.last_mut() {
                    sum.loops.iter_mut().filter(|dimension| dimension.role == Extent::Columns).for_each(whole);
                }
                logits
            }
            None => logits,
        };
        let [batch, sequence, hidden] = {
            let dimensions = self.dimensions(x);
            [dimensions[0], dimensions[1], dimensions[2]]
        };
        let expert_dimension = dimension("experts", experts);
        let choice_dimensions = vec![batch, sequence, dimension("top", top)];

        let loops = vec![
            shardable(&batch, Extent::Rows),
            shardable(&sequence, Extent::Rows),
            Loop { shardable: false, ..shardable(&expert_dimension, Extent::Experts) },
        ];
        let choice_axes = vec![Some(LoopId(0)), Some(LoopId(1)), None];
        let gates = self.activation(&format!("{module}.gates"), choice_dimensions.clone(), Storage::Precision);
        let choices = self.activation(&format!("{module}.choices"), choice_dimensions.clone(), Storage::Integer);
        self.operator(
            &format!("{module}.route"),
            Kernel::Route { tokens: 0, experts: 0, top },
            loops,
            vec![operand(logits, walk(0, 3))],
            vec![operand(gates, choice_axes.clone()), operand(choices, choice_axes.clone())],
        );

        // Slots are sharded as the sequence is.
        let slots = dimension(SEQUENCE, slots_per_sample);
        let slots = vec![expert_dimension, batch, slots, hidden];
        let dispatched = self.activation(&format!("{module}.dispatch"), slots, Storage::Precision);
        let places = self.activation(&format!("{module}.places"), choice_dimensions, Storage::Integer);
        let dropped = self.sum("dropped");
        let kind = Kernel::Dispatch(shape.unsized_mixture());
        self.operator(
            &format!("{module}.dispatch"),
            kind,
            routing_loops(batch, sequence, expert_dimension, hidden),
            vec![operand(x, TOKEN_AXES.to_vec()), operand(choices, choice_axes.clone())],
            vec![operand(dispatched, SLOT_AXES.to_vec()), operand(places, choice_axes), operand(dropped, Vec::new())],
        );
        (dispatched, Routing { gates, choices, places })
    }

    /// Adds the return of the experts' `rows` `[experts, batch, slots, hidden]` to their tokens,
    /// weighted by the gates.
    pub(crate) fn combine(
        &mut self,
        module: &str,
        rows: TensorId,
        routing: &Routing,
        sequence: usize,
        shape: &MixtureShape,
    ) -> TensorId {
        let dimensions = self.dimensions(rows);
        let [batch, sequence] = [dimension(BATCH, self.graph.batch), dimension("sequence", sequence)];
        let name = format!("{module}.combine");
        let y = self.activation(&name, vec![batch, sequence, dimensions[3]], Storage::Precision);
        let choice_axes = vec![Some(LoopId(0)), Some(LoopId(1)), None];
        let by_choice = |tensor| operand(tensor, choice_axes.clone());
        self.operator(
            &name,
            Kernel::Combine(shape.unsized_mixture()),
            routing_loops(batch, sequence, dimensions[0], dimensions[3]),
            vec![
                operand(rows, SLOT_AXES.to_vec()),
                by_choice(routing.gates),
                by_choice(routing.choices),
                by_choice(routing.places),
            ],
            vec![operand(y, TOKEN_AXES.to_vec())],
        );
        y
    }
}

/// The loops of a dispatch that walk the dimensions of tokens.
const TOKEN_AXES: [Option<LoopId>; 3] = [Some(LoopId(0)), Some(LoopId(1)), Some(LoopId(3))];

/// The loops of a dispatch that walk the dimensions of slots. Slots are sharded as the batch and
/// the sequence are.
const SLOT_AXES: [Option<LoopId>; 4] = [Some(LoopId(2)), Some(LoopId(0)), Some(LoopId(1)), Some(LoopId(3))];

/// Returns the loops of a dispatch and of its return. Tokens may be sharded: each rank fills slots
/// of all experts in the order of its own tokens.
fn routing_loops(batch: Dimension, sequence: Dimension, experts: Dimension, hidden: Dimension) -> Vec<Loop> {
    let whole = |dimension: &Dimension, role| Loop { shardable: false, ..shardable(dimension, role) };
    vec![
        shardable(&batch, Extent::Rows),
        shardable(&sequence, Extent::Positions),
        whole(&experts, Extent::Experts),
        whole(&hidden, Extent::Features),
    ]
}
