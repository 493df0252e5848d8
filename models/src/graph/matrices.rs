//! The matrices of a model's hidden layers, which optimizers of matrices treat in their own way.

use super::loops::Extent;
use super::operator::Operator;
use super::{Graph, Role, TensorId};
use crate::kernel::Kernel;
use std::collections::{BTreeMap, BTreeSet};

/// How a parameter's dimensions form matrices. The first dimensions after those that count the
/// matrices form the rows, and the others the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HiddenMatrix {
    /// The number of first dimensions that count matrices: 1 for stacked experts, else 0.
    pub count_dimensions: usize,
    /// The number of dimensions that form the rows.
    pub row_dimensions: usize,
}

impl HiddenMatrix {
    /// The number of matrices, and the rows and columns of each, of a parameter of this shape.
    pub fn sizes(&self, shape: &[usize]) -> [usize; 3] {
        let (counts, matrix) = shape.split_at(self.count_dimensions);
        let (rows, columns) = matrix.split_at(self.row_dimensions);
        [counts, rows, columns].map(|extents| extents.iter().product())
    }
}

impl Graph {
    /// The weights of matrix products, except projections to the logits of a loss. A table of
    /// embeddings that is also such a projection is excluded too.
    pub fn hidden_matrices(&self) -> BTreeMap<TensorId, HiddenMatrix> {
        let mut predictions = BTreeSet::new();
        // In reverse order, a loss comes before the operators that make its logits.
        for operator in self.operators.iter().rev() {
            let is_bias = matches!(operator.kind, Kernel::BiasAdd { .. }) && predictions.contains(&operator.outputs[0].tensor);
            if is_bias || operator.makes_loss() {
                predictions.insert(operator.inputs[0].tensor);
            }
        }
        let is_hidden = |operator: &&Operator| !predictions.contains(&operator.outputs[0].tensor);
        self.operators.iter().filter(is_hidden).filter_map(|operator| self.hidden_matrix(operator)).collect()
    }

    fn hidden_matrix(&self, operator: &Operator) -> Option<(TensorId, HiddenMatrix)> {
        if !matches!(operator.kind, Kernel::Matmul { .. } | Kernel::ExpertMatmul { .. }) {
            return None;
        }
        let weight = operator.inputs.get(1)?;
        let tensor = self.tensor(weight.tensor);
        if tensor.is_of_predictions() || !matches!(tensor.role, Role::Parameter(_)) {
            return None;
        }
        let roles: Vec<Extent> =
            weight.axes.iter().map(|axis| axis.map(|axis| operator.loops[axis.0].role)).collect::<Option<_>>()?;
        let count_dimensions = roles.iter().take_while(|role| **role == Extent::Experts).count();
        let rows = *roles.get(count_dimensions)?;
        let row_dimensions = roles[count_dimensions..].iter().take_while(|role| **role == rows).count();
        Some((weight.tensor, HiddenMatrix { count_dimensions, row_dimensions }))
    }
}
