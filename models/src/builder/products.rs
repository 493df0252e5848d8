//! Products with a weight, biases, and embedding look-ups.

use super::{GraphBuilder, operand, shardable, walk};
use crate::graph::{Dimension, Extent, Initialisation, Loop, LoopId, TensorId};
use crate::kernel::{Activation, Kernel, WeightLayout};
use crate::storage::Storage;

impl GraphBuilder {
    /// Adds `y = x · w`, a sum over the last `contracted` dimensions of x. With
    /// [`WeightLayout::OutIn`] w is `[columns.., contracted..]`, with [`WeightLayout::InOut`] the
    /// reverse.
    pub(crate) fn matmul(
        &mut self,
        name: &str,
        x: TensorId,
        weight: TensorId,
        contracted: usize,
        layout: WeightLayout,
    ) -> TensorId {
        let x_dimensions = self.dimensions(x);
        let weight_dimensions = self.dimensions(weight);
        let row_count = x_dimensions.len() - contracted;
        let column_count = weight_dimensions.len() - contracted;
        let columns = match layout {
            WeightLayout::OutIn => &weight_dimensions[..column_count],
            WeightLayout::InOut => &weight_dimensions[contracted..],
        };
        let mut loops: Vec<Loop> = Vec::new();
        loops.extend(x_dimensions[..row_count].iter().map(|dimension| shardable(dimension, Extent::Rows)));
        // `projections` are q, k and v. Each rank needs its heads of all three, so this dimension
        // is not sharded.
        loops.extend(
            columns.iter().map(|column| Loop { shardable: column.name != "projections", ..shardable(column, Extent::Columns) }),
        );
        loops.extend(x_dimensions[row_count..].iter().map(|dimension| shardable(dimension, Extent::Contracted)));
        let rows = walk(0, row_count);
        let column_loops = walk(row_count, column_count);
        let contracted_loops = walk(row_count + column_count, contracted);
        let y_dimensions = [&x_dimensions[..row_count], columns].concat();
        let y = self.activation(name, y_dimensions, Storage::Precision);
        let weight_axes = match layout {
            WeightLayout::OutIn => [column_loops.clone(), contracted_loops.clone()].concat(),
            WeightLayout::InOut => [contracted_loops.clone(), column_loops.clone()].concat(),
        };
        self.operator(
            name,
            Kernel::Matmul { rows: 0, columns: 0, contracted: 0, weight: layout, bias: false, activation: Activation::None },
            loops,
            vec![operand(x, [rows.clone(), contracted_loops].concat()), operand(weight, weight_axes)],
            vec![operand(y, [rows, column_loops].concat())],
        );
        y
    }

    /// Adds `y = x + bias`. The bias has the last dimensions of x.
    pub(crate) fn bias_add(&mut self, name: &str, x: TensorId, bias: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let row_count = dimensions.len() - self.dimensions(bias).len();
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, dimension)| shardable(dimension, if index < row_count { Extent::Rows } else { Extent::Columns }))
            .collect();
        let all = walk(0, dimensions.len());
        let columns = all[row_count..].to_vec();
        let y = self.activation(name, dimensions, Storage::Precision);
        self.operator(
            name,
            Kernel::BiasAdd { rows: 0, columns: 0 },
            loops,
            vec![operand(x, all.clone()), operand(bias, columns)],
            vec![operand(y, all)],
        );
        y
    }

    /// Adds PyTorch's `Linear` from the last `contracted` dimensions of x to `outputs`. There is a
    /// bias if its initial values are given. The public shapes are `[outputs, inputs]` and
    /// `[outputs]`.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        contracted: usize,
        outputs: &[Dimension],
        weights: Initialisation,
        bias: Option<Initialisation>,
    ) -> TensorId {
        self.linear_as([name, &format!("{name}.weight"), &format!("{name}.bias")], x, contracted, outputs, weights, bias)
    }

    /// As [`GraphBuilder::linear`], with names for the operator, its weight and its bias.
    pub(crate) fn linear_as(
        &mut self,
        [name, weight_name, bias_name]: [&str; 3],
        x: TensorId,
        contracted: usize,
        outputs: &[Dimension],
        weights: Initialisation,
        bias: Option<Initialisation>,
    ) -> TensorId {
        let dimensions = self.dimensions(x);
        let inputs = &dimensions[dimensions.len() - contracted..];
        let size = |dimensions: &[Dimension]| dimensions.iter().map(|dimension| dimension.extent).product::<usize>();
        let shape = vec![size(outputs), size(inputs)];
        let weight = self.parameter(weight_name.into(), [outputs, inputs].concat(), shape, weights);
        let y = self.matmul(name, x, weight, contracted, WeightLayout::OutIn);
        match bias {
            None => y,
            Some(initialisation) => {
                let bias = self.parameter(bias_name.into(), outputs.to_vec(), vec![size(outputs)], initialisation);
                self.bias_add(&format!("{name}.bias"), y, bias)
            }
        }
    }

    /// Adds a look-up of tokens in `table` `[vocabulary, hidden]`.
    pub(crate) fn embedding(&mut self, name: &str, tokens: TensorId, table: TensorId) -> TensorId {
        let token_dimensions = self.dimensions(tokens);
        let table_dimensions = self.dimensions(table);
        let row_count = token_dimensions.len();
        let mut loops: Vec<Loop> = token_dimensions.iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        let is_shardable = self.shards_vocabulary(table_dimensions[0].extent);
        loops.push(Loop { shardable: is_shardable, ..shardable(&table_dimensions[0], Extent::Vocabulary) });
        loops.push(shardable(&table_dimensions[1], Extent::Features));
        let rows = walk(0, row_count);
        let hidden = Some(LoopId(row_count + 1));
        let y = self.activation(name, [&token_dimensions[..], &table_dimensions[1..]].concat(), Storage::Precision);
        self.operator(
            name,
            Kernel::Embedding { tokens: 0, vocabulary: 0, hidden: 0, parts: 1 },
            loops,
            vec![operand(tokens, rows.clone()), operand(table, vec![Some(LoopId(row_count)), hidden])],
            vec![operand(y, [rows, vec![hidden]].concat())],
        );
        y
    }
}
