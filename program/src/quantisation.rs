//! Quantisation: giving matrix products eight-bit operands. A compiler pass after sharding and
//! fusion.
//!
//! It changes the linear layers of a model's repeated blocks, except for the routers of experts.
//! These layers then read eight-bit copies of their operands: E4M3 for activations and weights,
//! E5M2 for gradients (Micikevicius et al. 2022). New operators make the copies. Attention, norms,
//! experts, convolutions, the embedding and the head stay as they are, as in NVIDIA's Transformer
//! Engine.
//!
//! Each rank scales its part of a tensor by a power of two, chosen from the largest element in that
//! part (current scaling). Ranks need not agree on the factor: a power of two changes no mantissa,
//! so all layouts round equally, except for numbers too small for the format.
//!
//! Hopper's eight-bit tensor cores need the dimension that a product sums over to be contiguous in
//! both operands. So a copy is written straight, transposed, or both in one pass. Copies of a
//! weight are the same for all micro-batches and made once in a step ([`Role::OfParameter`]). A
//! later pass removes copies that no instruction reads (`compile/unread.rs`).

use crate::placement::{Placement, Placements};
use crate::plan::PlanError;
use crate::strategy::{OperatorSource, Sharding};
use foretell_models::{
    Dimension, EXPERTS, EightBits, Extent, Graph, Kernel, Loop, LoopId, Operand, Operator, OperatorId, Pass, Role, Storage,
    Tensor, TensorId, WeightLayout,
};

/// A product is quantised only if its numbers of inputs and outputs are multiples of this. Rows of
/// operands then start at multiples of 16 bytes, as tensor cores need. The check is on the whole
/// layer: if a rank's shard, or the rows that a weight's gradient sums over, are no multiple, the
/// device widens the operands to sixteen bits.
const GRANULE: usize = 16;

/// Gives the products of a graph's repeated blocks eight-bit operands.
///
/// # Errors
/// [`PlanError::Invalid`] if the model has no product that can have them.
pub(crate) fn quantise(graph: Graph, sharding: Sharding) -> Result<(Graph, Sharding), PlanError> {
    let products: Vec<Product> =
        (0..graph.operators.len()).filter_map(|index| Product::find(&graph, OperatorId(index))).collect();
    if products.is_empty() {
        return Err(PlanError::Invalid {
            field: "precision",
            reason: format!("`{}` repeats no linear layer whose inputs and outputs are multiples of {GRANULE}", graph.name),
            hint: "use `precision: bf16`".into(),
        });
    }
    let mut pass =
        Quantisation { added: vec![Vec::new(); graph.operators.len()], known: Vec::new(), placed: Vec::new(), graph, sharding };
    for product in &products {
        pass.product(product);
    }
    Ok(pass.finish())
}

/// A product, and its gradients if the graph has them.
struct Product {
    forward: OperatorId,
    input_gradient: Option<OperatorId>,
    weight_gradient: Option<OperatorId>,
    layout: WeightLayout,
}

impl Product {
    fn find(graph: &Graph, forward: OperatorId) -> Option<Self> {
        let operator = &graph.operators[forward.0];
        let Kernel::Matmul { weight: layout, .. } = operator.kind else { return None };
        let is_trained = matches!(graph.tensor(operator.inputs.get(1)?.tensor).role, Role::Parameter(_));
        let size = |role: Extent| {
            operator.loops.iter().filter(|dimension| dimension.role == role).map(|dimension| dimension.extent).product::<usize>()
        };
        let fits = [Extent::Columns, Extent::Contracted].into_iter().all(|role| size(role).is_multiple_of(GRANULE));
        // The choice of experts depends on small differences, so routers are not quantised.
        let routes = operator.loops.iter().any(|dimension| dimension.role == Extent::Columns && dimension.name == EXPERTS);
        if !is_trained || !fits || routes || !graph.blocks[operator.block].recomputable {
            return None;
        }
        let gradient = |is_wanted: fn(&Kernel) -> bool| {
            let after = graph.operators.iter().enumerate().skip(forward.0);
            after
                .filter(|(_, later)| later.forward == Some(forward) && is_wanted(&later.kind))
                .map(|(index, _)| OperatorId(index))
                .next()
        };
        Some(Self {
            forward,
            input_gradient: gradient(|kind| matches!(kind, Kernel::MatmulInputGradient { .. })),
            weight_gradient: gradient(|kind| matches!(kind, Kernel::MatmulWeightGradient { .. })),
            layout,
        })
    }
}

/// The eight-bit copies of a tensor.
#[derive(Clone, Copy)]
struct Copies {
    factor: TensorId,
    straight: TensorId,
    transposed: TensorId,
}

/// The identity of a quantisation: products with equal keys share the copies.
#[derive(Clone, Copy, PartialEq)]
struct QuantisationKey {
    tensor: TensorId,
    placements: Placements,
    block: usize,
    pass: Pass,
    format: EightBits,
    /// The number of leading dimensions that are the rows of the matrix.
    rows: usize,
    straight: bool,
    transposed: bool,
}

/// The copies that a product needs of an operand.
struct WantedCopies<'a> {
    operand: &'a Operand,
    format: EightBits,
    straight: bool,
    transposed: bool,
}

/// A graph under quantisation.
struct Quantisation {
    graph: Graph,
    sharding: Sharding,
    /// By operator: the new operators just before it, with the placements of their operands.
    added: Vec<Vec<(Operator, Placements)>>,
    /// The quantisations so far, each with its copies and the operator before which it is added.
    known: Vec<(QuantisationKey, Copies, OperatorId)>,
    /// The placements of each new tensor.
    placed: Vec<Placements>,
}

impl Quantisation {
    /// Quantises the operands of a product and of its gradients.
    fn product(&mut self, product: &Product) {
        let Product { forward, input_gradient, weight_gradient, layout } = *product;
        let operator = self.graph.operators[forward.0].clone();
        let [x, w] = [0, 1].map(|index: usize| operator.inputs[index].clone());
        let rows = |operand: &Operand, roles: &[Extent]| {
            let is_row = |axis: &&Option<LoopId>| axis.is_some_and(|walked| roles.contains(&operator.loops[walked.0].role));
            operand.axes.iter().take_while(is_row).count()
        };
        let x_rows = rows(&x, &[Extent::Rows]);
        let w_rows = match layout {
            WeightLayout::OutIn => rows(&w, &[Extent::Columns]),
            WeightLayout::InOut => rows(&w, &[Extent::Contracted]),
        };
        // Tensor ids must not depend on the mesh, so all tensors that any mesh may need are added.
        let x_copies = self.copies(x.tensor, x_rows);
        let x_copies_for_gradient = self.copies(x.tensor, x_rows);
        let w_copies = self.copies(w.tensor, w_rows);
        let upstream = input_gradient.or(weight_gradient).map(|id| self.graph.operators[id.0].inputs[0].clone());
        let dy_copies = upstream.as_ref().map(|dy| (dy, self.copies(dy.tensor, x_rows)));

        // An input that is gathered for the product is gathered again for the weight's gradient,
        // since shards take less memory in between.
        let is_kept = self.sharding.settled(x.tensor) == self.sharding.wanted(forward, &x);
        let keeps_transposed = is_kept && weight_gradient.is_some();
        let wanted = WantedCopies { operand: &x, format: EightBits::E4M3, straight: true, transposed: keeps_transposed };
        let x_copies = self.quantise(forward, forward, &wanted, x_rows, x_copies);
        let straight_forward = layout == WeightLayout::OutIn;
        let wanted = WantedCopies {
            operand: &w,
            format: EightBits::E4M3,
            straight: straight_forward || input_gradient.is_some(),
            transposed: !straight_forward || input_gradient.is_some(),
        };
        let w_copies = self.quantise(forward, forward, &wanted, w_rows, w_copies);
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
        if let Kernel::Matmul { rows, columns, contracted, bias, activation, .. } = changed.kind {
            changed.kind = Kernel::EightBitMatmul { rows, columns, contracted, bias, activation };
        }
        let operands = [copy_of(&x, &x_copies, x_rows, true), copy_of(&w, &w_copies, w_rows, straight_forward)];
        changed.inputs = with(operands, [&x_copies, &w_copies], &operator.inputs[2..]);

        let (Some((dy, dy_copies)), Some(first)) = (dy_copies, input_gradient.or(weight_gradient)) else { return };
        let wanted = WantedCopies {
            operand: dy,
            format: EightBits::E5M2,
            straight: input_gradient.is_some(),
            transposed: weight_gradient.is_some(),
        };
        let dy_copies = self.quantise(first, first, &wanted, x_rows, dy_copies);
        if let Some(id) = input_gradient {
            let operands = [copy_of(dy, &dy_copies, x_rows, true), copy_of(&w, &w_copies, w_rows, !straight_forward)];
            let changed = &mut self.graph.operators[id.0];
            if let Kernel::MatmulInputGradient { rows, columns, contracted, gelu, .. } = changed.kind {
                changed.kind = Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu };
            }
            changed.inputs = with(operands, [&dy_copies, &w_copies], &changed.inputs[2..]);
        }
        if let Some(id) = weight_gradient {
            let x_copies = if is_kept {
                x_copies
            } else {
                let wanted = WantedCopies { operand: &x, format: EightBits::E4M3, straight: false, transposed: true };
                self.quantise(id, forward, &wanted, x_rows, x_copies_for_gradient)
            };
            let operands = [copy_of(dy, &dy_copies, x_rows, false), copy_of(&x, &x_copies, x_rows, false)];
            let changed = &mut self.graph.operators[id.0];
            if let Kernel::MatmulWeightGradient { rows, columns, contracted, weight, .. } = changed.kind {
                changed.kind = Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight };
            }
            changed.inputs = with(operands, [&dy_copies, &x_copies], &[]);
        }
    }

    /// Adds the tensors for the copies of a tensor whose first `rows` dimensions are the rows of
    /// the matrix.
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

    /// The copies of an operand in the placements in which `reader` reads it. Adds the operator
    /// that makes them before `position`, unless an equal operator is there.
    fn quantise(
        &mut self,
        position: OperatorId,
        reader: OperatorId,
        wanted: &WantedCopies<'_>,
        rows: usize,
        copies: Copies,
    ) -> Copies {
        let WantedCopies { operand, format, straight, transposed } = *wanted;
        let tensor = operand.tensor;
        let placements = self.sharding.wanted(reader, operand);
        let Operator { name, block, pass, .. } = self.graph.operators[position.0].clone();
        let key = QuantisationKey { tensor, placements, block, pass, format, rows, straight, transposed };
        if let Some((_, made, before)) = self.known.iter_mut().find(|(known, ..)| *known == key) {
            // Products are visited in the order of the forward pass, so their gradients are visited
            // from the last to the first: an earlier reader of the same copies may come later in
            // this loop.
            if position < *before {
                let factor = made.factor;
                let makes_it = |(operator, _): &(Operator, Placements)| {
                    operator.outputs.first().is_some_and(|output| output.tensor == factor)
                };
                let old = std::mem::replace(before, position);
                let (moved, stays) = std::mem::take(&mut self.added[old.0]).into_iter().partition(makes_it);
                (self.added[old.0], self.added[position.0]) =
                    (stays, [std::mem::take(&mut self.added[position.0]), moved].concat());
            }
            return *made;
        }
        self.known.push((key, copies, position));
        let dimensions = &self.graph.tensor(tensor).dimensions;
        let role = |index: usize| if index < rows { Extent::Rows } else { Extent::Columns };
        let one_loop = |(index, dimension): (usize, &Dimension)| Loop {
            name: dimension.name,
            extent: dimension.extent,
            role: role(index),
            shardable: true,
        };
        let loops: Vec<Loop> = dimensions.iter().enumerate().map(one_loop).collect();
        let axes: Vec<Option<LoopId>> = (0..loops.len()).map(|index| Some(LoopId(index))).collect();
        let mut outputs = vec![Operand { tensor: copies.factor, axes: vec![None] }];
        let first = self.graph.tensors.len() - self.placed.len();
        if straight {
            self.placed[copies.straight.0 - first] = placements;
            outputs.push(Operand { tensor: copies.straight, axes: axes.clone() });
        }
        if transposed {
            self.placed[copies.transposed.0 - first] = transposed_placements(placements, axes.len(), rows);
            outputs.push(Operand { tensor: copies.transposed, axes: rotated(&axes, rows) });
        }
        let kind = Kernel::Quantise { rows: 0, columns: 0, format, straight, transposed };
        let inputs = vec![Operand { tensor, axes }];
        self.added[position.0].push((Operator { name, kind, loops, inputs, outputs, block, pass, forward: None }, placements));
        copies
    }

    /// Inserts the new operators into the graph.
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

/// The dimensions of the transposed matrix, if the first `rows` dimensions are its rows.
fn rotated<T: Clone>(dimensions: &[T], rows: usize) -> Vec<T> {
    let (rows, columns) = dimensions.split_at(rows);
    [columns, rows].concat()
}

/// The placements of the transposed matrix.
fn transposed_placements(placements: Placements, dimensions: usize, rows: usize) -> Placements {
    placements.sharded_axes().fold(placements, |transposed, axis| match placements.get(axis) {
        Placement::Shard(dimension) => transposed.with(axis, Placement::Shard((dimension + dimensions - rows) % dimensions)),
        _ => transposed,
    })
}
