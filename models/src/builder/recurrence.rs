//! LSTM layers: the product of the inputs for all positions at once, then the recurrence.

use super::{GraphBuilder, dimension, operand, shardable};
use crate::graph::{Dimension, Extent, Initialisation, Loop, LoopId, TensorId};
use crate::kernel::{Kernel, Recurrence, WeightLayout};
use crate::storage::Storage;

impl GraphBuilder {
    /// Adds layer `layer` of the PyTorch `LSTM` called `module`, over x
    /// `[batch, sequence, features]`. It begins in `state` `[batch, 2, hidden]`, or in zeros.
    /// Returns the outputs `[batch, sequence, hidden]` and the last state.
    pub(crate) fn lstm(
        &mut self,
        module: &str,
        layer: usize,
        x: TensorId,
        hidden: usize,
        state: Option<TensorId>,
    ) -> (TensorId, TensorId) {
        let x_dimensions = self.dimensions(x);
        let [batch, sequence, features] = [x_dimensions[0], x_dimensions[1], x_dimensions[2]];
        let [gates, hidden_dimension] = [dimension("gates", 4 * hidden), dimension("hidden", hidden)];
        let initialisation = Initialisation::Uniform(1.0 / (hidden as f64).sqrt());
        let mut parameter = |part: &str, dimensions: &[Dimension]| {
            let shape = dimensions.iter().map(|dimension| dimension.extent).collect();
            self.parameter(format!("{module}.{part}_l{layer}"), dimensions.to_vec(), shape, initialisation)
        };
        let input_weight = parameter("weight_ih", &[gates, features]);
        let weight = parameter("weight_hh", &[gates, hidden_dimension]);
        let input_bias = parameter("bias_ih", &[gates]);
        let bias = parameter("bias_hh", &[gates]);
        let name = format!("{module}.{layer}");
        let projected = self.matmul(&format!("{name}.input"), x, input_weight, 1, WeightLayout::OutIn);
        let projected = self.bias_add(&format!("{name}.input.bias"), projected, input_bias);
        let projected = self.bias_add(&format!("{name}.bias"), projected, bias);

        let loops = vec![
            shardable(&batch, Extent::Rows),
            Loop { shardable: false, ..shardable(&sequence, Extent::Positions) },
            Loop { shardable: false, ..shardable(&hidden_dimension, Extent::Features) },
        ];
        let [batch_loop, positions, features] = [0, 1, 2].map(|index| Some(LoopId(index)));
        let state_dimensions = vec![batch, dimension("state", 2), hidden_dimension];
        let y = self.activation(&name, vec![batch, sequence, hidden_dimension], Storage::Precision);
        let active = self.activation(&format!("{name}.gates"), vec![batch, sequence, gates], Storage::Precision);
        let cells = self.activation(&format!("{name}.cells"), vec![batch, sequence, hidden_dimension], Storage::Precision);
        let last = self.activation(&format!("{name}.last"), state_dimensions, Storage::Precision);
        let by_gate = |tensor| operand(tensor, vec![batch_loop, positions, None]);
        let by_feature = |tensor| operand(tensor, vec![batch_loop, positions, features]);
        let as_state = |tensor| operand(tensor, vec![batch_loop, None, features]);
        let mut inputs = vec![by_gate(projected), operand(weight, vec![None, features])];
        inputs.extend(state.map(as_state));
        let outputs = vec![by_feature(y), by_gate(active), by_feature(cells), as_state(last)];
        let sizes = Recurrence { batch: 0, sequence: 0, hidden: 0, initial: state.is_some() };
        self.operator(&name, Kernel::Lstm(sizes), loops, inputs, outputs);
        (y, last)
    }
}
