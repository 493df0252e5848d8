//! Operands of eight bits: a compiler pass over a graph that is shared out and fused. The products of the blocks that a model repeats, its
//! stack's linear layers but for the routers of its experts, read copies of what they read before, E4M3 of activations and weights and E5M2 of gradients (Micikevicius et al.
//! 2022), made by operators of their own. All else stays as it is: attention, norms, experts, convolutions, the embedding and the head, as
//! in NVIDIA's Transformer Engine.
//!
//! Each rank scales what it has of a tensor by a power of two, from the largest element that is there (current scaling). No rank asks
//! another: a power of two changes no number's mantissa, so but for numbers too small for the format a layout rounds as another does. What
//! products sum over must lie together in both operands (Hopper's tensor cores take nothing else of eight bits), so tensors are written as
//! they lie, transposed, or both in one pass. Copies of a weight are the same for all micro-batches, and made once a step
//! ([`Role::OfParameter`]). Which of them is not read in a list's order of passes is not known here: the compiler leaves it out afterwards.

use crate::placement::{Placement, Placements};
use crate::plan::PlanError;
use crate::strategy::{OperatorSource, Sharding};
use foretell_models::{
    Dimension, EXPERTS, EightBits, Extent, Graph, Loop, LoopId, Operand, Operator, OperatorId, OperatorKind, Pass, Role, Storage,
    Tensor, TensorId, WeightLayout,
};

/// What sizes of products are multiples of: rows of operands then begin at multiples of sixteen bytes, which tensor cores want. Looked at are a
/// layer's whole inputs and outputs; a rank's share of them, and the rows that a weight's gradient sums over, may be others, and then
/// devices make sixteen bits of the operands again.
const GRANULE: usize = 16;

/// Gives the products of a stack operands of eight bits.
///
/// # Errors
/// [`PlanError::Invalid`] where the model has no product that takes them.
pub(crate) fn quantise(graph: Graph, sharding: Sharding) -> Result<(Graph, Sharding), PlanError> {
    let products: Vec<Product> =
        (0..graph.operators.len()).filter_map(|index| Product::find(&graph, OperatorId(index))).collect();
    if products.is_empty() {
        return Err(PlanError::Invalid {
            field: "precision",
            reason: format!(
                "`{}` repeats no linear layer of at least {GRANULE} inputs and outputs in multiples of that",
                graph.name
            ),
            hint: "use `precision: bf16`".into(),
        });
    }
    let mut pass =
        Quantisation { added: vec![Vec::new(); graph.operators.len()], made: Vec::new(), placed: Vec::new(), graph, sharding };
    for product in &products {
        pass.product(product);
    }
    Ok(pass.finish())
}

/// A product and its gradients, where the graph has them.
struct Product {
    forward: OperatorId,
    input_gradient: Option<OperatorId>,
    weight_gradient: Option<OperatorId>,
    layout: WeightLayout,
}

impl Product {
    fn find(graph: &Graph, forward: OperatorId) -> Option<Self> {
        let operator = &graph.operators[forward.0];
        let OperatorKind::Matmul { weight: layout, .. } = operator.kind else { return None };
        let is_trained = matches!(graph.tensor(operator.inputs.get(1)?.tensor).role, Role::Parameter(_));
        let size = |role: Extent| operator.loops.iter().filter(|one| one.role == role).map(|one| one.extent).product::<usize>();
        let fits = [Extent::Columns, Extent::Contracted].into_iter().all(|role| size(role).is_multiple_of(GRANULE));
        // Which expert a token goes to turns on small differences.
        let routes = operator.loops.iter().any(|one| one.role == Extent::Columns && one.name == EXPERTS);
        if !is_trained || !fits || routes || !graph.blocks[operator.block].recomputable {
            return None;
        }
        let gradient = |is_wanted: fn(&OperatorKind) -> bool| {
            let after = graph.operators.iter().enumerate().skip(forward.0);
            after
                .filter(|(_, one)| one.forward == Some(forward) && is_wanted(&one.kind))
                .map(|(index, _)| OperatorId(index))
                .next()
        };
        Some(Self {
            forward,
            input_gradient: gradient(|kind| matches!(kind, OperatorKind::MatmulInputGradient(_))),
            weight_gradient: gradient(|kind| matches!(kind, OperatorKind::MatmulWeightGradient(_))),
            layout,
        })
    }
}

/// A tensor's copies in eight bits.
#[derive(Clone, Copy)]
struct Copies {
    factor: TensorId,
    straight: TensorId,
    transposed: TensorId,
}

/// Which copies of which tensor, as found where: what several products share is made once.
#[derive(Clone, Copy, PartialEq)]
struct Made {
    tensor: TensorId,
    placements: Placements,
    block: usize,
    pass: Pass,
    format: EightBits,
    /// Dimensions that are rows.
    rows: usize,
    straight: bool,
    transposed: bool,
}

/// What is asked for.
struct Wanted<'a> {
    operand: &'a Operand,
    format: EightBits,
    straight: bool,
    transposed: bool,
}

/// A graph that is being changed.
struct Quantisation {
    graph: Graph,
    sharding: Sharding,
    /// Before each operator, the operators that are added there.
    added: Vec<Vec<(Operator, Placements)>>,
    /// Each with the operator before which it is made.
    made: Vec<(Made, Copies, OperatorId)>,
    /// How each tensor that is added lies.
    placed: Vec<Placements>,
}

impl Quantisation {
    fn product(&mut self, product: &Product) {
        let Product { forward, input_gradient, weight_gradient, layout } = *product;
        let operator = self.graph.operators[forward.0].clone();
        let [x, w] = [0, 1].map(|index: usize| operator.inputs[index].clone());
        let rows = |operand: &Operand, roles: &[Extent]| {
            let is_row = |axis: &&Option<LoopId>| axis.is_some_and(|one| roles.contains(&operator.loops[one.0].role));
            operand.axes.iter().take_while(is_row).count()
        };
        let x_rows = rows(&x, &[Extent::Rows]);
        let w_rows = match layout {
            WeightLayout::OutIn => rows(&w, &[Extent::Columns]),
            WeightLayout::InOut => rows(&w, &[Extent::Contracted]),
        };
        // Tensors are numbered alike whatever the mesh is, so all that there may be are added.
        let of_x = self.copies(x.tensor, x_rows);
        let of_x_again = self.copies(x.tensor, x_rows);
        let of_w = self.copies(w.tensor, w_rows);
        let upstream = input_gradient.or(weight_gradient).map(|id| self.graph.operators[id.0].inputs[0].clone());
        let of_dy = upstream.as_ref().map(|dy| (dy, self.copies(dy.tensor, x_rows)));

        // What must be gathered for the product is gathered again for the weight's gradient: the parts that ranks keep are smaller.
        let is_kept = self.sharding.settled(x.tensor) == self.sharding.wanted(forward, &x);
        let keeps_transposed = is_kept && weight_gradient.is_some();
        let wanted = Wanted { operand: &x, format: EightBits::E4M3, straight: true, transposed: keeps_transposed };
        let of_x = self.make(forward, forward, &wanted, x_rows, of_x);
        let straight_forward = layout == WeightLayout::OutIn;
        let wanted = Wanted {
            operand: &w,
            format: EightBits::E4M3,
            straight: straight_forward || input_gradient.is_some(),
            transposed: !straight_forward || input_gradient.is_some(),
        };
        let of_w = self.make(forward, forward, &wanted, w_rows, of_w);
        let copy_of = |operand: &Operand, copies: &Copies, split: usize, is_straight: bool| {
            if is_straight {
                Operand { tensor: copies.straight, axes: operand.axes.clone() }
            } else {
                Operand { tensor: copies.transposed, axes: rotated(&operand.axes, split) }
            }
        };
        let factor = |copies: &Copies| Operand { tensor: copies.factor, axes: vec![None] };
        let with = |operands: [Operand; 2], of: [&Copies; 2], rest: &[Operand]| -> Vec<Operand> {
            operands.into_iter().chain(of.map(factor)).chain(rest.iter().cloned()).collect()
        };
        let changed = &mut self.graph.operators[forward.0];
        if let OperatorKind::Matmul { activation, .. } = changed.kind {
            changed.kind = OperatorKind::EightBitMatmul { activation };
        }
        let operands = [copy_of(&x, &of_x, x_rows, true), copy_of(&w, &of_w, w_rows, straight_forward)];
        changed.inputs = with(operands, [&of_x, &of_w], &operator.inputs[2..]);

        let (Some((dy, of_dy)), Some(first)) = (of_dy, input_gradient.or(weight_gradient)) else { return };
        let wanted = Wanted {
            operand: dy,
            format: EightBits::E5M2,
            straight: input_gradient.is_some(),
            transposed: weight_gradient.is_some(),
        };
        let of_dy = self.make(first, first, &wanted, x_rows, of_dy);
        if let Some(id) = input_gradient {
            let operands = [copy_of(dy, &of_dy, x_rows, true), copy_of(&w, &of_w, w_rows, !straight_forward)];
            let changed = &mut self.graph.operators[id.0];
            changed.kind = OperatorKind::EightBitMatmulInputGradient;
            changed.inputs = with(operands, [&of_dy, &of_w], &changed.inputs[2..]);
        }
        if let Some(id) = weight_gradient {
            let of_x = if is_kept {
                of_x
            } else {
                let wanted = Wanted { operand: &x, format: EightBits::E4M3, straight: false, transposed: true };
                self.make(id, forward, &wanted, x_rows, of_x_again)
            };
            let operands = [copy_of(dy, &of_dy, x_rows, false), copy_of(&x, &of_x, x_rows, false)];
            let changed = &mut self.graph.operators[id.0];
            changed.kind = OperatorKind::EightBitMatmulWeightGradient(layout);
            changed.inputs = with(operands, [&of_dy, &of_x], &[]);
        }
    }

    /// New tensors for a tensor's copies, of which the first dimensions are the rows.
    fn copies(&mut self, tensor: TensorId, rows: usize) -> Copies {
        let Tensor { name, role, dimensions, .. } = self.graph.tensor(tensor).clone();
        let role = match role {
            Role::Parameter(_) => Role::OfParameter(tensor),
            _ => Role::Activation,
        };
        let mut push = |what: &str, dimensions: Vec<Dimension>, storage| {
            self.graph.tensors.push(Tensor { name: format!("{name}.{what}"), role: role.clone(), dimensions, storage });
            self.placed.push(Placements::default());
            TensorId(self.graph.tensors.len() - 1)
        };
        Copies {
            factor: push("factor", vec![Dimension { name: "factor", extent: 1 }], Storage::Single),
            transposed: push("transposed", rotated(&dimensions, rows), Storage::Eight),
            straight: push("quantised", dimensions, Storage::Eight),
        }
    }

    /// Adds the operator that makes copies before `place`, of what `reader` reads as it wants it, if there is none that does.
    fn make(&mut self, place: OperatorId, reader: OperatorId, wanted: &Wanted<'_>, rows: usize, copies: Copies) -> Copies {
        let Wanted { operand, format, straight, transposed } = *wanted;
        let tensor = operand.tensor;
        let placements = self.sharding.wanted(reader, operand);
        let Operator { name, block, pass, .. } = self.graph.operators[place.0].clone();
        let made = Made { tensor, placements, block, pass, format, rows, straight, transposed };
        if let Some((_, known, before)) = self.made.iter_mut().find(|(known, ..)| *known == made) {
            // Gradients come in the other order than what they are gradients of.
            if place < *before {
                let factor = known.factor;
                let is_it =
                    |(operator, _): &(Operator, Placements)| operator.outputs.first().is_some_and(|one| one.tensor == factor);
                let there = std::mem::replace(before, place);
                let (moved, stays) = std::mem::take(&mut self.added[there.0]).into_iter().partition(is_it);
                (self.added[there.0], self.added[place.0]) = (stays, [std::mem::take(&mut self.added[place.0]), moved].concat());
            }
            return *known;
        }
        self.made.push((made, copies, place));
        let dimensions = &self.graph.tensor(tensor).dimensions;
        let role = |index: usize| if index < rows { Extent::Rows } else { Extent::Columns };
        let one_loop =
            |(index, one): (usize, &Dimension)| Loop { name: one.name, extent: one.extent, role: role(index), shardable: true };
        let loops: Vec<Loop> = dimensions.iter().enumerate().map(one_loop).collect();
        let axes: Vec<Option<LoopId>> = (0..loops.len()).map(|index| Some(LoopId(index))).collect();
        let mut outputs = vec![Operand { tensor: copies.factor, axes: vec![None] }];
        let first = self.graph.tensors.len() - self.placed.len();
        if straight {
            self.placed[copies.straight.0 - first] = placements;
            outputs.push(Operand { tensor: copies.straight, axes: axes.clone() });
        }
        if transposed {
            self.placed[copies.transposed.0 - first] = turned(placements, axes.len(), rows);
            outputs.push(Operand { tensor: copies.transposed, axes: rotated(&axes, rows) });
        }
        let kind = OperatorKind::Quantise { format, straight, transposed };
        let inputs = vec![Operand { tensor, axes }];
        self.added[place.0].push((Operator { name, kind, loops, inputs, outputs, block, pass, forward: None }, placements));
        copies
    }

    /// Puts the new operators in their places.
    fn finish(self) -> (Graph, Sharding) {
        let Self { mut graph, sharding, added, placed, .. } = self;
        let mut sources = Vec::new();
        let mut operators = Vec::new();
        let mut renumbered = Vec::with_capacity(graph.operators.len());
        for (index, (operator, before)) in graph.operators.into_iter().zip(added).enumerate() {
            for (new, placements) in before {
                operators.push(new);
                sources.push(OperatorSource::Added(placements));
            }
            renumbered.push(OperatorId(operators.len()));
            operators.push(operator);
            sources.push(OperatorSource::Original(OperatorId(index)));
        }
        for operator in &mut operators {
            operator.forward = operator.forward.map(|forward| renumbered[forward.0]);
        }
        graph.operators = operators;
        (graph, sharding.with(&sources, &placed))
    }
}

/// The dimensions of a matrix whose rows are the first `rows` of them, transposed.
fn rotated<T: Clone>(dimensions: &[T], rows: usize) -> Vec<T> {
    let (rows, columns) = dimensions.split_at(rows);
    [columns, rows].concat()
}

/// How that matrix lies when it is transposed.
fn turned(placements: Placements, dimensions: usize, rows: usize) -> Placements {
    placements.sharded_axes().fold(placements, |turned, axis| match placements.get(axis) {
        Placement::Shard(dimension) => turned.with(axis, Placement::Shard((dimension + dimensions - rows) % dimensions)),
        _ => turned,
    })
}
