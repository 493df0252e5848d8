//! Low-rank adapters (LoRA; Hu et al. 2021, arXiv:2106.09685): the product `y = x·W` of a linear
//! layer becomes `y + α/r · (x·Aᵀ)·Bᵀ`, where A has r rows and B has r columns.
//!
//! A forward graph is built without adapters. This pass adds them, so families do not know of them.
//! Parameters have the names and shapes that the library `peft` gives them.

use crate::graph::{
    Dimension, Extent, Graph, Initialisation, Loop, LoopId, Operand, Operator, OperatorId, Parameter, Pass, Role, Tensor,
    TensorId,
};
use crate::kernel::{Activation, Kernel, WeightLayout};
use crate::storage::Storage;

/// Prefix that `peft` puts before the names of a model's modules.
const PREFIX: &str = "base_model.model.";
/// The ends of the names of an adapter's parameters.
const ENDS: [&str; 2] = [".lora_A.weight", ".lora_B.weight"];
/// The dimension between the two products of an adapter.
const RANK: &str = "rank";

/// The sizes of low-rank adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterSizes {
    /// The rank r of the products.
    pub rank: usize,
    /// α: an adapter's result is multiplied by α/r.
    pub alpha: usize,
}

/// Whether a parameter, by its name, belongs to an adapter.
pub fn is_adapter(parameter: &str) -> bool {
    parameter.starts_with(PREFIX) && ENDS.iter().any(|end| parameter.ends_with(end))
}

/// The linear layers of a forward graph that can have an adapter: all but the projection to a
/// vocabulary or to classes. Products of adapters do not count. Returns each layer's name with the
/// layout of its weight.
pub fn linear_layers(graph: &Graph) -> impl Iterator<Item = (&str, WeightLayout)> {
    graph.operators.iter().filter_map(|operator| Some((operator.name.as_str(), adaptable(graph, operator)?)))
}

/// The layout of a layer's weight; `None` if the operator is not a linear layer, belongs to an
/// adapter, or makes predictions.
fn adaptable(graph: &Graph, operator: &Operator) -> Option<WeightLayout> {
    let Kernel::Matmul { weight, .. } = operator.kind else { return None };
    let tensor = graph.tensor(operator.inputs.get(1)?.tensor);
    (matches!(tensor.role, Role::Parameter(_)) && !tensor.is_of_predictions() && !is_adapter(&tensor.name)).then_some(weight)
}

/// Returns a forward graph with an adapter at each linear layer whose name `is_target` accepts.
///
/// The new parameters follow those of the graph, so that they have the same ids in graphs that
/// differ only in what comes after the last parameter.
pub fn with_adapters(graph: Graph, sizes: AdapterSizes, is_target: impl Fn(&str) -> bool) -> Graph {
    let targets: Vec<OperatorId> = (0..graph.operators.len())
        .map(OperatorId)
        .filter(|&id| adaptable(&graph, &graph.operators[id.0]).is_some() && is_target(&graph.operators[id.0].name))
        .collect();
    let first = graph.parameters().last().map_or(0, |(id, _)| id.0 + 1);
    let mut graph = with_space(graph, first, 2 * targets.len());
    let operators = std::mem::take(&mut graph.operators);
    let mut pass = AdapterPass { graph, sizes, replaced: Vec::new() };
    let mut next = first;
    // The adapter of the previous layer. That layer's bias may follow before the adapter's result
    // is added.
    let mut waiting: Option<Adapter> = None;
    for (index, mut operator) in operators.into_iter().enumerate() {
        let is_bias = matches!(operator.kind, Kernel::BiasAdd { .. });
        let takes_bias = waiting.as_ref().is_some_and(|adapter| is_bias && operator.inputs[0].tensor == adapter.output.tensor);
        if let Some(adapter) = waiting.take() {
            match takes_bias {
                true => waiting = Some(Adapter { output: operator.outputs[0].clone(), ..adapter }),
                false => pass.finish(adapter),
            }
        }
        pass.replace_inputs(&mut operator);
        pass.graph.operators.push(operator.clone());
        if takes_bias {
            waiting.take().into_iter().for_each(|adapter| pass.finish(adapter));
        }
        if targets.contains(&OperatorId(index)) {
            waiting = Some(pass.begin(&operator, TensorId(next)));
            next += 2;
        }
    }
    waiting.into_iter().for_each(|adapter| pass.finish(adapter));
    pass.graph
}

/// Returns the graph with `count` placeholders among its tensors, from the id `first` on.
fn with_space(mut graph: Graph, first: usize, count: usize) -> Graph {
    let placeholder = Tensor { name: String::new(), role: Role::Activation, dimensions: Vec::new(), storage: Storage::Precision };
    graph.tensors.splice(first..first, std::iter::repeat_n(placeholder, count));
    for operator in &mut graph.operators {
        for operand in operator.inputs.iter_mut().chain(&mut operator.outputs).filter(|input| input.tensor.0 >= first) {
            operand.tensor.0 += count;
        }
    }
    graph
}

/// An adapter whose result is not yet added.
struct Adapter {
    layer: Operator,
    /// The result of the adapter's own products, scaled.
    result: Operand,
    /// The result of the layer so far.
    output: Operand,
}

/// The graph while adapters are added.
struct AdapterPass {
    graph: Graph,
    sizes: AdapterSizes,
    /// Results of layers, each with the sum that replaces it.
    replaced: Vec<(TensorId, TensorId)>,
}

impl AdapterPass {
    /// Lets an operator read the sums in place of the layers' own results.
    fn replace_inputs(&self, operator: &mut Operator) {
        for input in &mut operator.inputs {
            if let Some(&(_, sum)) = self.replaced.iter().rev().find(|(own, _)| *own == input.tensor) {
                input.tensor = sum;
            }
        }
    }

    /// Adds the two products of a layer's adapter, and the scaling. A has the id `first`, and B the
    /// next.
    fn begin(&mut self, layer: &Operator, first: TensorId) -> Adapter {
        let of_role = |role: Extent| layer.loops.iter().filter(move |dimension| dimension.role == role).copied();
        let [rows, columns, contracted] =
            [Extent::Rows, Extent::Columns, Extent::Contracted].map(|role| of_role(role).collect::<Vec<Loop>>());
        let AdapterSizes { rank: extent, alpha } = self.sizes;
        let rank = |role| Loop { name: RANK, extent, role, shardable: false };
        let dimensions = |loops: &[Loop]| -> Vec<Dimension> {
            loops.iter().map(|dimension| Dimension { name: dimension.name, extent: dimension.extent }).collect()
        };
        let walk = |from: usize, count: usize| -> Vec<Option<LoopId>> {
            (from..from + count).map(|index| Some(LoopId(index))).collect()
        };
        let (module, narrow) = (layer.name.clone(), rank(Extent::Columns));
        let [a, b] = [first, TensorId(first.0 + 1)];
        let size = |loops: &[Loop]| loops.iter().map(|dimension| dimension.extent).product::<usize>();
        // `peft` draws A as `torch.nn.Linear` draws a weight.
        let bound = Initialisation::Uniform(1.0 / (size(&contracted).max(1) as f64).sqrt());
        let parameter = |end: &str, loops: &[&[Loop]; 2], initialisation| {
            let dimensions = dimensions(&loops.concat());
            let permutation = (0..dimensions.len()).collect();
            let shape = loops.iter().map(|loops| size(loops)).collect();
            let role = Role::Parameter(Parameter { initialisation, permutation, shape, parts: Vec::new() });
            Tensor { name: format!("{PREFIX}{module}{end}"), role, dimensions, storage: Storage::Precision }
        };
        self.graph.tensors[a.0] = parameter(ENDS[0], &[&[narrow], &contracted], bound);
        self.graph.tensors[b.0] = parameter(ENDS[1], &[&columns, &[narrow]], Initialisation::Zeros);

        let (weight, activation) = (WeightLayout::OutIn, Activation::None);
        let product = Kernel::Matmul { rows: 0, columns: 0, contracted: 0, weight, bias: false, activation };
        let (row_count, contracted_count) = (rows.len(), contracted.len());
        let hidden = self.activation(&format!("{module}.lora_A"), dimensions(&[&rows[..], &[narrow]].concat()));
        let hidden_axes = walk(0, row_count + 1);
        let of_contracted = walk(row_count + 1, contracted_count);
        let axes_of_a = [&[Some(LoopId(row_count))][..], &of_contracted].concat();
        let x = Operand { tensor: layer.inputs[0].tensor, axes: [walk(0, row_count), of_contracted].concat() };
        let inputs = vec![x, Operand { tensor: a, axes: axes_of_a }];
        let output = Operand { tensor: hidden, axes: hidden_axes.clone() };
        let loops = [&rows[..], &[narrow], &contracted].concat();
        self.push(layer, ".lora_A", product, loops, inputs, output);

        let wide = dimensions(&[&rows[..], &columns].concat());
        let last = Some(LoopId(row_count + columns.len()));
        let made = self.activation(&format!("{module}.lora_B"), wide.clone());
        let all = walk(0, wide.len());
        let inputs = vec![
            Operand { tensor: hidden, axes: [&walk(0, row_count)[..], &[last]].concat() },
            Operand { tensor: b, axes: [&walk(row_count, columns.len())[..], &[last]].concat() },
        ];
        let loops = [&rows[..], &columns, &[rank(Extent::Contracted)]].concat();
        self.push(layer, ".lora_B", product, loops, inputs, Operand { tensor: made, axes: all.clone() });

        let scaled = self.activation(&format!("{module}.lora_scale"), wide);
        let scaling = Kernel::Scale { elements: 0, times: alpha, square: extent * extent };
        let result = Operand { tensor: scaled, axes: all.clone() };
        let loops = elements(&rows, &columns);
        self.push(layer, ".lora_scale", scaling, loops, vec![Operand { tensor: made, axes: all }], result.clone());
        Adapter { layer: layer.clone(), result, output: layer.outputs[0].clone() }
    }

    /// Adds an adapter's result to that of its layer.
    fn finish(&mut self, adapter: Adapter) {
        let Adapter { layer, result, output } = adapter;
        let dimensions = self.graph.tensor(output.tensor).dimensions.clone();
        let sum = self.activation(&format!("{}.lora", layer.name), dimensions);
        let axes = result.axes.clone();
        let own = Operand { tensor: output.tensor, axes: axes.clone() };
        let rows: Vec<Loop> = layer.loops.iter().filter(|dimension| dimension.role == Extent::Rows).copied().collect();
        let columns: Vec<Loop> = layer.loops.iter().filter(|dimension| dimension.role == Extent::Columns).copied().collect();
        let loops = elements(&rows, &columns);
        self.push(&layer, ".lora", Kernel::Add { elements: 0 }, loops, vec![own, result], Operand { tensor: sum, axes });
        self.replaced.push((output.tensor, sum));
    }

    fn activation(&mut self, name: &str, dimensions: Vec<Dimension>) -> TensorId {
        let tensor = Tensor { name: name.into(), role: Role::Activation, dimensions, storage: Storage::Precision };
        self.graph.tensors.push(tensor);
        TensorId(self.graph.tensors.len() - 1)
    }

    fn push(&mut self, layer: &Operator, end: &str, kind: Kernel, loops: Vec<Loop>, inputs: Vec<Operand>, output: Operand) {
        let name = format!("{}{end}", layer.name);
        let outputs = vec![output];
        let (block, pass) = (layer.block, Pass::Forward);
        self.graph.operators.push(Operator { name, kind, loops, inputs, outputs, block, pass, forward: None });
    }
}

/// The loops of an element-wise operator over the result of a product.
fn elements(rows: &[Loop], columns: &[Loop]) -> Vec<Loop> {
    rows.iter().chain(columns).map(|row| Loop { role: Extent::Rows, shardable: true, ..*row }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GraphOptions, Model};

    fn adapted(model: &str, pattern: &str, options: &GraphOptions) -> (Graph, Graph) {
        let model = Model::named(model).expect("in the zoo");
        let graph = model.graph("model", options).expect("a sound model");
        let sizes = AdapterSizes { rank: 8, alpha: 16 };
        (graph.clone(), with_adapters(graph, sizes, |name| name.ends_with(pattern)))
    }

    #[test]
    fn adapters_have_the_names_and_shapes_of_peft() {
        let (graph, adapted) = adapted("gpt2", "c_attn", &GraphOptions::ONE);
        let shape = |name: &str| {
            let (_, tensor) = adapted.parameters().find(|(_, tensor)| tensor.name == name)?;
            Some(tensor.public_tensors()[0].shape.clone())
        };
        assert_eq!(shape("base_model.model.transformer.h.3.attn.c_attn.lora_A.weight"), Some(vec![8, 768]));
        assert_eq!(shape("base_model.model.transformer.h.3.attn.c_attn.lora_B.weight"), Some(vec![3 * 768, 8]));
        assert_eq!(adapted.parameters().count(), graph.parameters().count() + 2 * 12);
        assert_eq!(adapted.parameters().filter(|(_, tensor)| is_adapter(&tensor.name)).count(), 2 * 12);
        assert_eq!(adapted.operators.len(), graph.operators.len() + 4 * 12);
    }

    #[test]
    fn an_adapted_graph_has_the_linear_layers_of_the_plain_one() {
        for (model, pattern) in [("gpt2", "c_fc"), ("llama3-8b", "q_proj")] {
            let (graph, adapted) = adapted(model, pattern, &GraphOptions::ONE);
            let layers = |graph: &Graph| linear_layers(graph).map(|(name, weight)| (name.to_owned(), weight)).collect::<Vec<_>>();
            assert!(adapted.operators.len() > graph.operators.len(), "{model} has no adapter");
            assert_eq!(layers(&adapted), layers(&graph));
        }
    }

    #[test]
    fn every_reader_of_an_adapted_layer_reads_the_sum() {
        for (model, pattern) in [("gpt2", "c_fc"), ("llama3-8b", "q_proj"), ("vit_b_16", "self_attention")] {
            let (_, adapted) = adapted(model, pattern, &GraphOptions::ONE);
            let sums: Vec<&Operator> = adapted.operators.iter().filter(|operator| operator.name.ends_with(".lora")).collect();
            assert!(!sums.is_empty(), "{model} has no adapter");
            for sum in sums {
                let layer = sum.inputs[0].tensor;
                let readers = |tensor| {
                    adapted.operators.iter().filter(move |operator| operator.inputs.iter().any(|input| input.tensor == tensor))
                };
                assert_eq!(readers(layer).count(), 1, "{} is read past its adapter", sum.name);
                assert!(readers(sum.outputs[0].tensor).count() > 0, "nothing reads {}", sum.name);
            }
            // Each operator comes after those whose outputs it reads.
            let mut made = vec![false; adapted.tensors.len()];
            for operator in &adapted.operators {
                let is_made = |input: &Operand| made[input.tensor.0] || adapted.tensor(input.tensor).role != Role::Activation;
                assert!(operator.inputs.iter().all(is_made), "{} reads too early", operator.name);
                operator.outputs.iter().for_each(|output| made[output.tensor.0] = true);
            }
        }
    }

    #[test]
    fn adapters_have_the_same_ids_however_a_vocabulary_is_cut() {
        let parts = GraphOptions { vocabulary_parts: 29, ..GraphOptions::ONE };
        let parameters = |options| {
            let (_, graph) = adapted("gpt2", "c_proj", options);
            graph.parameters().map(|(id, tensor)| (id, tensor.name.clone())).collect::<Vec<_>>()
        };
        assert_eq!(parameters(&GraphOptions::ONE), parameters(&parts));
    }
}
