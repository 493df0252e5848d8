//! Gradients of a forward graph: the backward rule of each operator, and sums for tensors with
//! several users.
//!
//! Input gradients and weight gradients are separate operators, so that a schedule may run them
//! apart. A gradient operator has the loops of its forward operator and thus its sharding.
//! Gradients of parameters accumulate, like the other sums over the batch: each operator that
//! writes one adds to it. The compiler decides which operator is the first.

use crate::adapters::is_adapter;
use crate::graph::{Dimension, Extent, Graph, Loop, LoopId, Operand, Operator, OperatorId, Pass, Role, Tensor, TensorId};
use crate::kernel::{GradientReads, Kernel, Planned, Recurrence, ScanRule};
use crate::storage::Storage;
use std::collections::BTreeMap;

/// Returns `graph` with its gradients appended. The loss is a mean over `normalizer` predictions.
///
/// The gradient of a parameter is a tensor of [`Role::ParameterGradient`]. Parameters whose name
/// `frozen` accepts have none.
pub fn differentiate(graph: &Graph, normalizer: usize, frozen: impl Fn(&str) -> bool) -> Graph {
    let is_trained = |tensor: &Tensor| matches!(tensor.role, Role::Parameter(_)) && !frozen(&tensor.name);
    let trained: Vec<bool> = graph.tensors.iter().map(is_trained).collect();
    let mut backward = Backward {
        graph: graph.clone(),
        contributions: BTreeMap::new(),
        block: 0,
        is_of_adapter: false,
        parameter_gradients: BTreeMap::new(),
        needed: needs_gradient(graph, &trained),
        trained,
        normalizer,
    };
    for index in (0..graph.operators.len()).rev() {
        backward.operator(OperatorId(index));
    }
    backward.graph
}

/// Returns, for each tensor, whether it needs a gradient: it is trained or is made from a tensor
/// that is.
fn needs_gradient(graph: &Graph, trained: &[bool]) -> Vec<bool> {
    let mut needed = trained.to_vec();
    for operator in &graph.operators {
        if operator.inputs.iter().any(|input| needed[input.tensor.0]) {
            for output in &operator.outputs {
                needed[output.tensor.0] = true;
            }
        }
    }
    needed
}

/// Gradient of a tensor from one of its users.
#[derive(Clone, Copy)]
struct Contribution {
    gradient: TensorId,
    /// Block of the user.
    block: usize,
    /// Whether the user is a product of an adapter.
    is_of_adapter: bool,
}

/// A graph while gradients are appended, operator by operator from the last to the first.
struct Backward {
    graph: Graph,
    /// Gradients of a tensor from the users visited so far.
    contributions: BTreeMap<TensorId, Vec<Contribution>>,
    /// Block of the operator that is visited.
    block: usize,
    /// Whether the operator that is visited is a product of an adapter.
    is_of_adapter: bool,
    /// Gradient tensors of parameters so far.
    parameter_gradients: BTreeMap<TensorId, TensorId>,
    /// Whether each tensor of the forward graph needs a gradient.
    needed: Vec<bool>,
    /// Whether each tensor of the forward graph is a parameter that is not frozen.
    trained: Vec<bool>,
    normalizer: usize,
}

impl Backward {
    /// Appends the gradient operators of a forward operator. All users of its outputs were visited.
    fn operator(&mut self, id: OperatorId) {
        let forward = self.graph.operators[id.0].clone();
        self.block = forward.block;
        self.is_of_adapter = forward.inputs.iter().any(|input| is_adapter(&self.graph.tensor(input.tensor).name));
        match forward.kind {
            Kernel::CrossEntropy { .. } | Kernel::WeightedCrossEntropy { .. } => {
                return self.cross_entropy(id, &forward.outputs[2]);
            }
            Kernel::CrossEntropyOfStatistics { .. } => {
                let statistics = forward.inputs[0].tensor;
                let maker = self
                    .graph
                    .operators
                    .iter()
                    .position(|operator| operator.outputs.iter().any(|made| made.tensor == statistics));
                let maker = maker.expect("invariant: an operator makes the statistics");
                return self.cross_entropy(OperatorId(maker), &forward.outputs[2]);
            }
            _ => {}
        }
        if let Kernel::Lstm(sizes) = forward.kind {
            self.lstm(id, &forward, sizes);
            return;
        }
        let Some(dy) = forward.outputs.first().and_then(|output| self.gradient(output, &forward)) else { return };
        let dy = Operand { tensor: dy, axes: forward.outputs[0].axes.clone() };
        let input = |index: usize| forward.inputs[index].clone();
        let output = |index: usize| forward.outputs[index].clone();
        match forward.kind {
            Kernel::Matmul { rows, columns, contracted, weight, .. } => {
                let kind = Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false };
                self.input_gradient(id, kind, vec![dy.clone(), input(1)], 0);
                let kind = Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false };
                self.weight_gradient(id, kind, vec![dy, input(0)], &[1]);
            }
            Kernel::BiasAdd { rows, columns } => {
                self.send_back(input(0).tensor, dy.tensor);
                self.weight_gradient(id, Kernel::BiasGradient { rows, columns }, vec![dy], &[1]);
            }
            Kernel::Relu { elements } => self.input_gradient(id, Kernel::ReluGradient { elements }, vec![dy, output(0)], 0),
            Kernel::Gelu { elements } => self.input_gradient(id, Kernel::GeluGradient { elements }, vec![dy, input(0)], 0),
            Kernel::Add { .. } => {
                self.send_back(input(0).tensor, dy.tensor);
                self.send_back(input(1).tensor, dy.tensor);
            }
            Kernel::Convolution(window) => {
                self.input_gradient(id, Kernel::ConvolutionInputGradient(window), vec![dy.clone(), input(1)], 0);
                self.weight_gradient(id, Kernel::ConvolutionWeightGradient(window), vec![dy, input(0)], &[1]);
            }
            Kernel::BatchNorm { groups, positions, channels } => self.batch_norm(id, &forward, dy, [groups, positions, channels]),
            Kernel::MaxPool(window) => {
                self.input_gradient(id, Kernel::MaxPoolGradient(window), vec![dy, output(1)], 0);
            }
            Kernel::GlobalAveragePool { batch, positions, channels } => {
                self.input_gradient(id, Kernel::GlobalAveragePoolGradient { batch, positions, channels }, vec![dy], 0);
            }
            Kernel::LayerNorm { rows, features, .. } => {
                let reads = vec![dy.clone(), input(0), input(1), output(1)];
                self.input_gradient(id, Kernel::LayerNormInputGradient { rows, features }, reads, 0);
                self.weight_gradient(
                    id,
                    Kernel::LayerNormWeightGradient { rows, features },
                    vec![dy, input(0), output(1)],
                    &[1, 2],
                );
            }
            Kernel::GeluExact { elements } => {
                self.input_gradient(id, Kernel::GeluExactGradient { elements }, vec![dy, input(0)], 0)
            }
            Kernel::SiluMultiply { elements } => {
                let reads = vec![dy, input(0), input(1)];
                self.joint_gradient(id, Kernel::SiluMultiplyGradient { elements }, reads, &[0, 1], &[]);
            }
            Kernel::RmsNorm { rows, features, .. } => {
                let reads = vec![dy.clone(), input(0), input(1), output(1)];
                self.input_gradient(id, Kernel::RmsNormInputGradient { rows, features }, reads, 0);
                self.weight_gradient(id, Kernel::RmsNormWeightGradient { rows, features }, vec![dy, input(0), output(1)], &[1]);
            }
            Kernel::Rope(sizes) => {
                self.input_gradient(id, Kernel::RopeGradient(sizes), vec![dy], 0);
            }
            Kernel::Dropout(_) => self.input_gradient(id, forward.kind, vec![dy], 0),
            Kernel::Prepend { batch, positions, features } => {
                self.input_gradient(id, Kernel::PrependInputGradient { batch, positions, features }, vec![dy.clone()], 0);
                self.weight_gradient(id, Kernel::PrependWeightGradient { batch, positions, features }, vec![dy], &[1]);
            }
            Kernel::First { batch, positions, features } => {
                self.input_gradient(id, Kernel::FirstGradient { batch, positions, features }, vec![dy], 0)
            }
            Kernel::Embedding { tokens, vocabulary, hidden, parts } => {
                self.weight_gradient(
                    id,
                    Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts },
                    vec![dy, input(0)],
                    &[1],
                );
            }
            Kernel::Attention(sizes) => {
                let mut reads = vec![dy, input(0), input(1), input(2), output(0), output(1)];
                reads.extend(forward.inputs.get(3).cloned());
                self.joint_gradient(id, Kernel::AttentionGradient(sizes), reads, &[0, 1, 2], &[3]);
            }
            Kernel::Scan(sizes) => {
                let reads = std::iter::once(dy).chain(forward.inputs.iter().cloned()).collect();
                let (inputs, parameters): (&[usize], &[usize]) = match sizes.rule {
                    ScanRule::FixedDecay => (&[0, 1], &[]),
                    rule if rule.has_strengths() => (&[0, 1, 2, 4], &[3]),
                    _ => (&[0, 1, 2], &[3]),
                };
                self.joint_gradient(id, Kernel::ScanGradient(sizes), reads, inputs, parameters);
            }
            Kernel::Split { rows, parts, columns } => {
                let mut reads = vec![dy];
                for part in &forward.outputs[1..] {
                    let Some(tensor) = self.gradient(part, &forward) else { return };
                    reads.push(Operand { tensor, axes: part.axes.clone() });
                }
                self.input_gradient(id, Kernel::Join { rows, parts, columns }, reads, 0);
            }
            Kernel::Planned(work) => self.planned_work(id, &forward, work, &dy),
            Kernel::Scale { .. } => self.input_gradient(id, forward.kind, vec![dy], 0),
            Kernel::Multiply { .. } => {
                self.input_gradient(id, forward.kind, vec![dy.clone(), input(0)], 1);
                self.input_gradient(id, forward.kind, vec![dy, input(1)], 0);
            }
            Kernel::Route { tokens, experts, top } => {
                self.input_gradient(id, Kernel::RouteGradient { tokens, experts, top }, vec![dy, output(0), output(1)], 0);
            }
            Kernel::Dispatch(slots) => {
                self.input_gradient(id, Kernel::DispatchGradient(slots), vec![dy, input(1), output(1)], 0);
            }
            Kernel::Combine(slots) => {
                let reads = vec![dy.clone(), input(0), input(2), input(3)];
                self.input_gradient(id, Kernel::CombineGateGradient(slots), reads, 1);
                let reads = vec![dy, input(1), input(2), input(3)];
                self.input_gradient(id, Kernel::CombineInputGradient(slots), reads, 0);
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
                self.input_gradient(
                    id,
                    Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted },
                    vec![dy.clone(), input(1)],
                    0,
                );
                self.weight_gradient(
                    id,
                    Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted },
                    vec![dy, input(0)],
                    &[1],
                );
            }
            // Evaluation graphs are not differentiated.
            kind => unreachable!("invariant: an operator of a training graph has a gradient, `{}` has none", kind.name()),
        }
    }

    /// Appends the gradient of the logits that operator `id` reads with their labels. The first
    /// loops of the operator walk the rows of logits and labels, and thus those of `log_sum_exp`.
    fn cross_entropy(&mut self, id: OperatorId, log_sum_exp: &Operand) {
        let forward = &self.graph.operators[id.0];
        let (normalizer, reads) = (self.normalizer, &forward.inputs);
        // After the log-sum-exp come the weights of classes, if there are any.
        let reads = reads[..2].iter().chain([log_sum_exp]).chain(&reads[2..]).cloned().collect();
        let kind = match forward.kind {
            Kernel::WeightedCrossEntropy { rows, classes, smoothing } => {
                Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, normalizer, scaled: false }
            }
            Kernel::CrossEntropy { .. } | Kernel::LogitStatistics { .. } => {
                Kernel::CrossEntropyGradient { rows: 0, classes: 0, normalizer, parts: 1, scaled: false }
            }
            kind => unreachable!("invariant: `{}` makes no loss", kind.name()),
        };
        self.input_gradient(id, kind, reads, 0);
    }

    /// Appends the gradients of an LSTM layer. Gradients reach it through its outputs, its last
    /// state, or both.
    fn lstm(&mut self, id: OperatorId, forward: &Operator, sizes: Recurrence) {
        let [dy, dlast] = [0, 3].map(|index: usize| {
            let output = &forward.outputs[index];
            self.gradient(output, forward).map(|tensor| Operand { tensor, axes: output.axes.clone() })
        });
        let is_needed = forward.inputs.iter().any(|input| self.needed[input.tensor.0]);
        if (dy.is_none() && dlast.is_none()) || !is_needed {
            return;
        }
        let state = forward.inputs.get(2).cloned();
        let kind = Kernel::LstmGradient { sizes, outputs: dy.is_some(), last: dlast.is_some() };
        let kept = [forward.inputs[1].clone(), forward.outputs[1].clone(), forward.outputs[2].clone()];
        let reads = dy.into_iter().chain(dlast).chain(kept).chain(state.clone()).collect();
        let projected = self.gradient_tensor(&forward.inputs[0]);
        let writes: Vec<Operand> =
            std::iter::once(projected.clone()).chain(state.iter().map(|state| self.gradient_tensor(state))).collect();
        self.push(id, kind, Pass::InputGradient, reads, writes.clone());
        for (input, gradient) in [0, 2].into_iter().zip(writes) {
            self.send_back(forward.inputs[input].tensor, gradient.tensor);
        }
        let reads = [projected, forward.outputs[0].clone()].into_iter().chain(state).collect();
        self.weight_gradient(id, Kernel::LstmWeightGradient(sizes), reads, &[1]);
    }

    /// Appends the gradient of each operand of planned work.
    fn planned_work(&mut self, id: OperatorId, forward: &Operator, work: Planned, dy: &Operand) {
        let gradient = Kernel::Planned(Planned { gradient: true, ..work });
        for (index, input) in forward.inputs.iter().enumerate() {
            let mut reads = vec![dy.clone()];
            match work.kind.gradient_reads() {
                GradientReads::Nothing => {}
                GradientReads::Itself => reads.push(input.clone()),
                GradientReads::Normed => {
                    // The gradient of the shift needs only dy, that of the scale also the input,
                    // and that of the input both input and scale.
                    reads.extend(forward.inputs.first().filter(|_| index < 2).cloned());
                    reads.extend(forward.inputs.get(1).filter(|_| index == 0).cloned());
                }
                GradientReads::Others => {
                    let others = forward.inputs.iter().enumerate().filter(|(other, _)| *other != index);
                    reads.extend(others.map(|(_, other)| other.clone()));
                }
            }
            if matches!(self.graph.tensor(input.tensor).role, Role::Parameter(_)) {
                self.weight_gradient(id, gradient, reads, &[index]);
            } else {
                self.input_gradient(id, gradient, reads, index);
            }
        }
    }

    /// Appends the gradients of batch norm. The weight gradient is made from sums that the input
    /// gradient needs anyway.
    fn batch_norm(&mut self, id: OperatorId, forward: &Operator, dy: Operand, [groups, positions, channels]: [usize; 3]) {
        if !forward.inputs.iter().any(|input| self.needed[input.tensor.0]) {
            return;
        }
        let saved = forward.outputs[1].clone();
        let dimensions = self.graph.tensor(saved.tensor).dimensions.clone();
        let sums = self.tensor(format!("{}.sums", forward.name), Role::Activation, dimensions, Storage::Single);
        let sums = Operand { tensor: sums, axes: saved.axes.clone() };
        let reads = vec![dy, forward.inputs[0].clone(), forward.inputs[1].clone(), saved];
        let dx = self.gradient_tensor(&forward.inputs[0]);
        let kind = Kernel::BatchNormInputGradient { groups, positions, channels };
        self.push(id, kind, Pass::InputGradient, reads, vec![dx.clone(), sums.clone()]);
        self.send_back(forward.inputs[0].tensor, dx.tensor);
        self.weight_gradient(id, Kernel::BatchNormWeightGradient { groups, channels }, vec![sums], &[1, 2]);
    }

    /// Appends an operator that makes the gradient of the forward operator's input `index`, if that
    /// is needed.
    fn input_gradient(&mut self, id: OperatorId, kind: Kernel, reads: Vec<Operand>, index: usize) {
        let input = self.graph.operators[id.0].inputs[index].clone();
        if !self.needed[input.tensor.0] {
            return;
        }
        let dx = self.gradient_tensor(&input);
        self.push(id, kind, Pass::InputGradient, reads, vec![dx.clone()]);
        self.send_back(input.tensor, dx.tensor);
    }

    /// Appends an operator that makes the gradients of `inputs` of the forward operator together,
    /// and adds to the gradients of its inputs among `parameters` that exist.
    fn joint_gradient(&mut self, id: OperatorId, kind: Kernel, reads: Vec<Operand>, inputs: &[usize], parameters: &[usize]) {
        let forward = self.graph.operators[id.0].clone();
        let is_needed = |&index: &usize| forward.inputs.get(index).is_some_and(|input| self.needed[input.tensor.0]);
        if !inputs.iter().chain(parameters).any(is_needed) {
            return;
        }
        let made: Vec<Operand> = inputs.iter().map(|&index| self.gradient_tensor(&forward.inputs[index])).collect();
        let mut writes = made.clone();
        for parameter in parameters.iter().filter_map(|&index| forward.inputs.get(index)) {
            writes.push(self.gradient_of_parameter(parameter));
        }
        self.push(id, kind, Pass::InputGradient, reads, writes);
        for (&index, gradient) in inputs.iter().zip(made) {
            self.send_back(forward.inputs[index].tensor, gradient.tensor);
        }
    }

    /// Appends an operator that adds to the gradients of the forward operator's inputs
    /// `parameters`, unless all of them are frozen.
    fn weight_gradient(&mut self, id: OperatorId, kind: Kernel, reads: Vec<Operand>, parameters: &[usize]) {
        let forward = self.graph.operators[id.0].clone();
        if !parameters.iter().any(|&index| self.trained[forward.inputs[index].tensor.0]) {
            return;
        }
        let writes = parameters.iter().map(|&index| self.gradient_of_parameter(&forward.inputs[index])).collect();
        self.push(id, kind, Pass::WeightGradient, reads, writes);
    }

    /// Returns the operand for the gradient of a parameter. If the parameter is frozen, its kernel
    /// computes the gradient together with another one, and nothing reads it.
    fn gradient_of_parameter(&mut self, parameter: &Operand) -> Operand {
        let id = parameter.tensor;
        let tensor = if self.trained[id.0] { self.parameter_gradient(id) } else { self.unread_gradient(id) };
        Operand { tensor, axes: parameter.axes.clone() }
    }

    /// Makes a tensor for a gradient that nothing reads.
    fn unread_gradient(&mut self, parameter: TensorId) -> TensorId {
        let Tensor { name, dimensions, .. } = self.graph.tensor(parameter).clone();
        self.tensor(format!("{name}.gradient"), Role::UnreadSum, dimensions, Storage::Single)
    }

    /// Returns the gradient tensor of a parameter. All operators that use the parameter share it.
    fn parameter_gradient(&mut self, parameter: TensorId) -> TensorId {
        if let Some(&gradient) = self.parameter_gradients.get(&parameter) {
            return gradient;
        }
        let tensor = self.graph.tensor(parameter).clone();
        let role = Role::ParameterGradient(parameter);
        let gradient = self.tensor(format!("{}.gradient", tensor.name), role, tensor.dimensions, Storage::Single);
        self.parameter_gradients.insert(parameter, gradient);
        gradient
    }

    /// Makes a tensor for the gradient of `input`, walked by the same loops.
    fn gradient_tensor(&mut self, input: &Operand) -> Operand {
        let tensor = self.graph.tensor(input.tensor).clone();
        let tensor = self.tensor(format!("{}.gradient", tensor.name), Role::Activation, tensor.dimensions, tensor.storage);
        Operand { tensor, axes: input.axes.clone() }
    }

    fn tensor(&mut self, name: String, role: Role, dimensions: Vec<Dimension>, storage: Storage) -> TensorId {
        self.graph.tensors.push(Tensor { name, role, dimensions, storage });
        TensorId(self.graph.tensors.len() - 1)
    }

    /// Records a gradient of `input` from the operator that is visited, if it is needed.
    fn send_back(&mut self, input: TensorId, gradient: TensorId) {
        if self.needed[input.0] {
            let Self { block, is_of_adapter, .. } = *self;
            self.contributions.entry(input).or_default().push(Contribution { gradient, block, is_of_adapter });
        }
    }

    /// Returns the gradient of a tensor: the sum over its users. `None` if no user has a gradient.
    ///
    /// Gradients of users in one block are added in that block. If it is on another stage than the
    /// maker, only their sum crosses. The other additions are in the maker's block.
    ///
    /// Adapters' gradients are added last. `tensor` shards layers and their adapters differently:
    /// the layers' gradients are partial sums, of which only the total is then reduced.
    fn gradient(&mut self, output: &Operand, maker: &Operator) -> Option<TensorId> {
        let contributions = self.contributions.remove(&output.tensor)?;
        let block_sums: Vec<TensorId> = contributions
            .chunk_by(|contribution, next| contribution.block == next.block)
            .filter_map(|same_block| {
                let block = same_block.first()?.block;
                let mut ordered = same_block.to_vec();
                ordered.sort_by_key(|contribution| contribution.is_of_adapter);
                let gradients = ordered.into_iter().map(|contribution| contribution.gradient);
                gradients.reduce(|sum, part| self.add(output.tensor, maker, block, sum, part))
            })
            .collect();
        block_sums.into_iter().reduce(|sum, part| self.add(output.tensor, maker, maker.block, sum, part))
    }

    /// Appends an operator that adds two gradients of a tensor, and returns their sum.
    fn add(&mut self, tensor: TensorId, maker: &Operator, block: usize, sum: TensorId, part: TensorId) -> TensorId {
        let tensor = self.graph.tensor(tensor).clone();
        let loops: Vec<Loop> = tensor
            .dimensions
            .iter()
            .map(|dimension| Loop { name: dimension.name, extent: dimension.extent, role: Extent::Rows, shardable: true })
            .collect();
        let total = self.tensor(format!("{}.gradient", tensor.name), Role::Activation, tensor.dimensions, tensor.storage);
        let axes: Vec<Option<LoopId>> = (0..loops.len()).map(|index| Some(LoopId(index))).collect();
        let operand = |tensor| Operand { tensor, axes: axes.clone() };
        self.graph.operators.push(Operator {
            name: format!("{}.gradient_sum", maker.name),
            kind: Kernel::Add { elements: 0 },
            loops,
            inputs: vec![operand(sum), operand(part)],
            outputs: vec![operand(total)],
            block,
            pass: Pass::InputGradient,
            forward: None,
        });
        total
    }

    /// Appends a gradient operator with the loops of the forward operator `id`.
    fn push(&mut self, id: OperatorId, kind: Kernel, pass: Pass, inputs: Vec<Operand>, outputs: Vec<Operand>) {
        let forward = &self.graph.operators[id.0];
        let operator = Operator {
            name: forward.name.clone(),
            kind,
            loops: forward.loops.clone(),
            inputs,
            outputs,
            block: forward.block,
            pass,
            forward: Some(id),
        };
        self.graph.operators.push(operator);
    }
}
