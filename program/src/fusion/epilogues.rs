//! Epilogues of matrix products, in the same pass over their results: adding a bias, applying an
//! activation, the gradient of a GELU, the gradient of a bias.
//!
//! A product whose result is a partial sum has no epilogue, since the sum must be reduced first.
//! Nor has a product whose result must be converted to other placements for the next operator.

use super::{Fusion, Fusions};
use foretell_models::{Activation, Extent, Kernel, LoopId, Operand, Operator, OperatorId, Pass, TensorId};

impl Fusion<'_> {
    pub(super) fn epilogues(&mut self, fusions: Fusions) {
        for index in 0..self.graph.operators.len() {
            let id = OperatorId(index);
            match self.graph.operators[index].kind {
                Kernel::Matmul { .. } => self.bias_and_activation(id, fusions),
                Kernel::GeluGradient { .. } if fusions.gradients => self.gradient_through_gelu(id),
                Kernel::BiasGradient { .. } if fusions.bias_gradients => self.bias_gradient(id),
                _ => {}
            }
        }
    }

    /// Merges a bias, and a ReLU or a GELU after it. The argument of the GELU becomes a second
    /// output if another operator reads it.
    fn bias_and_activation(&mut self, id: OperatorId, fusions: Fusions) {
        let graph = self.graph;
        let mut result = graph.operators[id.0].outputs[0].clone();
        if self.sharding.produced(result.tensor).is_partial() {
            return;
        }
        let mut added = None;
        if let [bias_id] = self.consumers[result.tensor.0][..]
            && let Some(parameter) = self.bias_of(id, bias_id, result.tensor)
        {
            added = Some(parameter);
            self.dropped[bias_id.0] = true;
            result.tensor = graph.operators[bias_id.0].outputs[0].tensor;
        }
        let mut argument = None;
        let activation = match self.activation_of(id, result.tensor, fusions) {
            Some((next, Kernel::Relu { .. })) if added.is_some() => {
                self.dropped[next.0] = true;
                result.tensor = graph.operators[next.0].outputs[0].tensor;
                Activation::Relu
            }
            Some((next, Kernel::Gelu { .. })) => {
                let activated = Operand { tensor: graph.operators[next.0].outputs[0].tensor, ..result.clone() };
                let is_argument_read = self.consumers[result.tensor.0].len() > 1;
                argument = Some(std::mem::replace(&mut result, activated)).filter(|_| is_argument_read);
                self.dropped[next.0] = true;
                if is_argument_read { Activation::GeluKept } else { Activation::Gelu }
            }
            _ => Activation::None,
        };
        let operator = &mut self.fused.operators[id.0];
        if let Kernel::Matmul { bias, activation: merged, .. } = &mut operator.kind {
            (*bias, *merged) = (added.is_some(), activation);
        }
        operator.inputs.extend(added);
        operator.outputs = std::iter::once(result).chain(argument).collect();
    }

    /// The bias that an operator adds to a product's result, along the loops of the product's
    /// columns.
    fn bias_of(&self, id: OperatorId, bias_id: OperatorId, product: TensorId) -> Option<Operand> {
        let [operator, bias] = [id, bias_id].map(|id| &self.graph.operators[id.0]);
        let parameter = bias.inputs.get(1).filter(|_| matches!(bias.kind, Kernel::BiasAdd { .. }))?;
        let columns = columns_of(operator, &operator.outputs[0], parameter.axes.len())?;
        let fits = self.are_in_one_pass(id, bias_id) && self.needs_no_conversion(product, bias_id);
        fits.then_some(Operand { tensor: parameter.tensor, axes: columns })
    }

    /// The activation to merge into a product: the only forward reader of its result. For a GELU,
    /// gradients may read the result too.
    fn activation_of(&self, id: OperatorId, result: TensorId, fusions: Fusions) -> Option<(OperatorId, Kernel)> {
        let kind = |id: OperatorId| self.graph.operators[id.0].kind;
        let readers = &self.consumers[result.0];
        let forward = |&&id: &&OperatorId| self.graph.operators[id.0].pass == Pass::Forward;
        let mut of_forward = readers.iter().filter(forward);
        let (Some(&next), None) = (of_forward.next(), of_forward.next()) else { return None };
        let is_wanted = match kind(next) {
            Kernel::Relu { .. } => readers.len() == 1,
            Kernel::Gelu { .. } => fusions.gelu,
            _ => false,
        };
        (is_wanted && self.are_in_one_pass(id, next) && self.needs_no_conversion(result, next)).then(|| (next, kind(next)))
    }

    /// Merges a GELU's gradient into the product that computes the gradient of the GELU's result.
    fn gradient_through_gelu(&mut self, id: OperatorId) {
        let [upstream, argument] = &self.graph.operators[id.0].inputs[..] else { return };
        let Some(product_id) = self.producers[upstream.tensor.0] else { return };
        let product = &self.graph.operators[product_id.0];
        let [made] = &product.outputs[..] else { return };
        let is_product = matches!(product.kind, Kernel::MatmulInputGradient { .. });
        let is_direct = self.consumers[upstream.tensor.0][..] == [id] && self.needs_no_conversion(upstream.tensor, id);
        let argument = Operand { tensor: argument.tensor, axes: made.axes.clone() };
        let result = Operand { tensor: self.graph.operators[id.0].outputs[0].tensor, axes: made.axes.clone() };
        let have_equal_placements = self.sharding.wanted(product_id, &argument)
            == self.sharding.wanted(id, &self.graph.operators[id.0].inputs[1])
            && self.sharding.output_placements(product_id, &result) == self.sharding.produced(result.tensor);
        if is_product && is_direct && have_equal_placements && self.are_in_one_pass(id, product_id) {
            let product = &mut self.fused.operators[product_id.0];
            if let Kernel::MatmulInputGradient { gelu, .. } = &mut product.kind {
                *gelu = true;
            }
            product.inputs.push(argument);
            product.outputs = vec![result];
            self.dropped[id.0] = true;
        }
    }

    /// Merges a bias's gradient into the product that computes the weight's gradient from the same
    /// tensor. Both must be written once in each micro-batch: a kernel accumulates into all of its
    /// outputs or into none.
    fn bias_gradient(&mut self, id: OperatorId) {
        let ([upstream], [gradient]) = (&self.graph.operators[id.0].inputs[..], &self.graph.operators[id.0].outputs[..]) else {
            return;
        };
        let is_of_weight = |&&reader: &&OperatorId| {
            // A product has at most one bias gradient. (The two biases of a recurrent cell have the
            // same gradient.)
            let has_none = self.fused.operators[reader.0].outputs.len() == 1;
            let kind = self.graph.operators[reader.0].kind;
            has_none && matches!(kind, Kernel::MatmulWeightGradient { .. }) && self.are_in_one_pass(id, reader)
        };
        let Some(&product_id) = self.consumers[upstream.tensor.0].iter().find(is_of_weight) else { return };
        let product = &self.graph.operators[product_id.0];
        let ([read, _], [weight]) = (&product.inputs[..], &product.outputs[..]) else { return };
        let Some(columns) = columns_of(product, read, gradient.axes.len()) else { return };
        let gradient = Operand { tensor: gradient.tensor, axes: columns };
        let is_written_once = |tensor: TensorId| {
            self.graph.operators.iter().flat_map(|operator| &operator.outputs).filter(|output| output.tensor == tensor).count()
                == 1
        };
        let have_equal_placements = read.tensor == upstream.tensor
            && self.sharding.wanted(product_id, read) == self.sharding.wanted(id, upstream)
            && self.sharding.output_placements(product_id, &gradient) == self.sharding.produced(gradient.tensor);
        if have_equal_placements && is_written_once(weight.tensor) && is_written_once(gradient.tensor) {
            let product = &mut self.fused.operators[product_id.0];
            if let Kernel::MatmulWeightGradient { bias, .. } = &mut product.kind {
                *bias = true;
            }
            product.outputs.push(gradient);
            self.dropped[id.0] = true;
        }
    }
}

/// The loops of an operand's last `count` dimensions, if a product has that many loops over
/// columns.
fn columns_of(product: &Operator, operand: &Operand, count: usize) -> Option<Vec<Option<LoopId>>> {
    let columns = product.loops.iter().filter(|dimension| dimension.role == Extent::Columns).count();
    let first = operand.axes.len().checked_sub(count)?;
    (columns == count).then(|| operand.axes[first..].to_vec())
}
