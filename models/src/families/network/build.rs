//! The graph of a network.
//!
//! Images have their channels last in the graph, and first in the network's shapes. If an operation
//! needs other dimensions than its operand has, a reshape is inserted, which costs nothing.

use super::operation::{NetworkOperation, NetworkWork};
use super::{Network, NetworkLayer, NetworkStorage};
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, Mode, dimension};
use crate::dropout::DropoutRate;
use crate::graph::{BATCH, Dimension, Extent, Graph, Initialisation, InputKind, Loop, LoopId, TensorId};
use crate::kernel::{Epsilon, PlannedKind, WeightLayout};
use crate::storage::Storage;
use std::collections::BTreeSet;

/// Initial values of weights. They are not those of the traced step.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

/// Epsilon of norms. Costs do not depend on its value.
const EPSILON: Epsilon = Epsilon::new(5);

/// Names of the dimensions after the batch.
const AXES: [&str; 6] = ["first", "second", "third", "fourth", "fifth", "sixth"];

/// A layer's result.
#[derive(Clone, Debug)]
struct Value {
    tensor: TensorId,
    /// Shape of one sample, with channels first.
    shape: Vec<usize>,
    shared: bool,
}

/// Builds the forward graph. The network is sound.
pub(super) fn graph(network: &Network, name: &str, options: &GraphOptions) -> Graph {
    let mode = if options.inference { Mode::Inference } else { Mode::Training };
    let tables = if options.vocabulary_parts > 1 { tied_tables(network) } else { BTreeSet::new() };
    let builder = GraphBuilder::new(name, options);
    let mut layers = Layers { builder, mode, batch: options.batch, whole: BTreeSet::new() };
    layers.builder.block("input", false);
    let mut values: Vec<Value> = network.inputs.iter().map(|input| layers.input(&input.shape, input.vocabulary)).collect();
    let starts = block_starts(network);
    for (layer, start) in network.layers.iter().zip(starts) {
        match (&layer.block, start) {
            (Some(block), _) => layers.builder.block(block.name.clone(), block.recomputable),
            (None, Some(recomputable)) => layers.builder.block(layer.name.clone(), recomputable),
            (None, None) => {}
        }
        let reads: Vec<Value> = layer.reads.iter().map(|&read| values[read].clone()).collect();
        let value = layers.layer(layer, &reads);
        if tables.contains(&values.len()) {
            layers.whole.insert(value.tensor);
        }
        values.push(value);
    }
    let (_, predictions) = network.predictions();
    let is_text = matches!(super::Family::sample(network), crate::sample::SampleShape::Tokens { .. });
    layers.builder.finish(predictions, is_text.then_some(predictions))
}

/// The indices of parameters that are both a table of embeddings and the weight of a product. The
/// two uses would shard them differently, so `tensor` does not shard them.
fn tied_tables(network: &Network) -> BTreeSet<usize> {
    let reads = |is_wanted: fn(NetworkOperation) -> bool| {
        let layers = network.layers.iter().filter(move |layer| is_wanted(layer.operation));
        layers.filter_map(|layer| layer.reads.get(1).copied()).collect::<BTreeSet<usize>>()
    };
    let tables = reads(|operation| operation == NetworkOperation::Embedding);
    &tables & &reads(|operation| operation == NetworkOperation::Product { transposed: true })
}

/// For a network that names no blocks: `Some` for each layer that begins a block, with whether that
/// block is recomputable (all but the last are). A layer begins a block if neither it nor a later
/// layer reads anything older than the previous layer's result, if the block before it has weights,
/// and if it does not belong to the previous layer. All `None` if the network names blocks.
fn block_starts(network: &Network) -> Vec<Option<bool>> {
    let layers = &network.layers;
    let mut starts = vec![None; layers.len()];
    if layers.iter().any(|layer| layer.block.is_some()) {
        return starts;
    }
    let first = network.inputs.len();
    // The last layer that reads each value, with layers counted from 1. Parameters do not count.
    let mut last_use = vec![0; first + layers.len()];
    for (index, layer) in layers.iter().enumerate() {
        let is_parameter =
            |read: usize| read.checked_sub(first).is_some_and(|layer| layers[layer].operation == NetworkOperation::Parameter);
        layer.reads.iter().filter(|&&read| !is_parameter(read)).for_each(|&read| last_use[read] = index + 1);
    }
    let (mut has_weights, mut longest, mut before) = (false, 0, None);
    for (index, layer) in layers.iter().enumerate() {
        if layer.operation == NetworkOperation::Parameter {
            continue;
        }
        // `longest` is the last use of any value older than the previous layer's result.
        if longest <= index && has_weights && !layer.operation.follows() {
            starts[index] = Some(true);
            has_weights = false;
        }
        has_weights |= layer.operation.has_weights();
        if let Some(before) = before.replace(first + index) {
            longest = longest.max(last_use[before]);
        }
    }
    // The last block has the loss.
    if let Some(last) = starts.iter_mut().rev().flatten().next() {
        *last = false;
    }
    starts
}

/// A network under construction.
struct Layers {
    builder: GraphBuilder,
    mode: Mode,
    batch: usize,
    /// Parameters that no rank shards.
    whole: BTreeSet<TensorId>,
}

impl Layers {
    /// Dimensions of a result. If there are more than there are names, the first ones are merged.
    fn plain(&self, shape: &[usize], shared: bool) -> Vec<Dimension> {
        let merged = shape.len().saturating_sub(AXES.len() - 1).max(1);
        let (outer, inner) = shape.split_at(merged.min(shape.len()));
        let extents = std::iter::once(outer.iter().product::<usize>()).chain(inner.iter().copied());
        let axes = extents.zip(AXES).map(|(extent, name)| dimension(name, extent));
        let batch = (!shared).then(|| dimension(BATCH, self.batch));
        batch.into_iter().chain(axes.take(if shape.is_empty() { 1 } else { AXES.len() })).collect()
    }

    fn image(&self, shape: &[usize]) -> Vec<Dimension> {
        let extent = |axis: usize| shape.get(axis).copied().unwrap_or(1);
        vec![
            dimension(BATCH, self.batch),
            dimension("height", extent(1)),
            dimension("width", extent(2)),
            dimension("channels", extent(0)),
        ]
    }

    fn input(&mut self, shape: &[usize], vocabulary: Option<usize>) -> Value {
        let is_image = vocabulary.is_none() && shape.len() == 3;
        let dimensions = if is_image { self.image(shape) } else { self.plain(shape, false) };
        let kind = match vocabulary {
            Some(_) => InputKind::Tokens,
            None if is_image => InputKind::Images,
            None => InputKind::Features,
        };
        Value { tensor: self.builder.input(kind, dimensions), shape: shape.to_vec(), shared: false }
    }

    /// Adds work that no backend has a kernel for. Ranks may shard the batch; for element-wise work
    /// whose operands have the dimensions of the result, they may shard all dimensions. `steps`:
    /// multiply-adds for one sample.
    fn planned(
        &mut self,
        name: &str,
        kind: PlannedKind,
        reads: &[TensorId],
        (dimensions, storage): (Vec<Dimension>, Storage),
        steps: usize,
    ) -> TensorId {
        let is_alike = steps == 0 && reads.iter().all(|&read| self.builder.dimensions(read) == dimensions);
        if is_alike && matches!(kind, PlannedKind::Function | PlannedKind::Sum | PlannedKind::Combination) {
            let loops: Vec<Loop> = dimensions
                .iter()
                .map(|dimension| Loop { name: dimension.name, extent: dimension.extent, role: Extent::Rows, shardable: true })
                .collect();
            let axes: Vec<Option<LoopId>> = (0..loops.len()).map(|index| Some(LoopId(index))).collect();
            let inputs = reads.iter().map(|&tensor| (tensor, axes.clone())).collect();
            return self.builder.planned_as(name, kind, loops, inputs, (dimensions, axes), storage);
        }
        let mut loops = Vec::new();
        let has_batch = |dimensions: &[Dimension]| dimensions.iter().any(|dimension| dimension.name == BATCH);
        if has_batch(&dimensions) || reads.iter().any(|&read| has_batch(&self.builder.dimensions(read))) {
            loops.push(Loop { name: BATCH, extent: self.batch, role: Extent::Rows, shardable: true });
        }
        let mut walk = |dimensions: &[Dimension]| -> Vec<Option<LoopId>> {
            let mut axes = Vec::new();
            for one in dimensions {
                if one.name == BATCH {
                    axes.push(Some(LoopId(0)));
                    continue;
                }
                axes.push(Some(LoopId(loops.len())));
                loops.push(Loop { name: one.name, extent: one.extent, role: Extent::Parts, shardable: false });
            }
            axes
        };
        let inputs = reads.iter().map(|&tensor| (tensor, walk(&self.builder.dimensions(tensor)))).collect();
        let axes = walk(&dimensions);
        if steps > 0 {
            loops.push(Loop { name: "steps", extent: steps, role: Extent::Contracted, shardable: false });
        }
        self.builder.planned_as(name, kind, loops, inputs, (dimensions, axes), storage)
    }

    /// The value with these dimensions, reshaped if necessary.
    fn arranged(&mut self, name: &str, value: &Value, dimensions: Vec<Dimension>) -> TensorId {
        let own = self.builder.dimensions(value.tensor);
        if own.iter().map(|dimension| dimension.extent).eq(dimensions.iter().map(|dimension| dimension.extent)) {
            return value.tensor;
        }
        let storage = self.builder.storage(value.tensor);
        self.planned(&format!("{name}.arranged"), PlannedKind::Reshape, &[value.tensor], (dimensions, storage), 0)
    }

    fn layer(&mut self, layer: &NetworkLayer, reads: &[Value]) -> Value {
        let NetworkLayer { name, shape, shared, .. } = layer;
        let tensor = match (layer.operation, reads) {
            (NetworkOperation::Parameter, _) => self.parameter(name, shape),
            (NetworkOperation::View, [x, ..]) => x.tensor,
            // Parameters are read where they are.
            (NetworkOperation::Slice, [x, ..]) if x.shared => x.tensor,
            (operation, [x, others @ ..]) => self.operation(layer, operation, x, others),
            (_, []) => unreachable!("invariant: a sound layer has operands"),
        };
        Value { tensor, shape: shape.clone(), shared: *shared }
    }

    fn parameter(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let dimensions = match *shape {
            // The weight of a convolution, with channels last.
            [out, inputs, rows, columns] if rows == columns => {
                let window = dimension("window", rows);
                let dimensions = vec![dimension("out_channels", out), window, window, dimension("in_channels", inputs)];
                return self.builder.parameter_as(name.into(), dimensions, WEIGHTS, vec![0, 3, 1, 2], shape.to_vec());
            }
            [rows, columns] => vec![dimension("rows", rows), dimension("features", columns)],
            [features] => vec![dimension("features", features)],
            _ => self.plain(shape, true),
        };
        self.builder.parameter(name.into(), dimensions, shape.to_vec(), WEIGHTS)
    }

    fn operation(&mut self, layer: &NetworkLayer, operation: NetworkOperation, x: &Value, others: &[Value]) -> TensorId {
        let (name, shape) = (&layer.name[..], &layer.shape[..]);
        let own = self.plain(&x.shape, x.shared);
        let result = (self.plain(shape, layer.shared), storage(layer.storage));
        match (operation, others) {
            (NetworkOperation::Product { .. }, [weight, ..]) if self.whole.contains(&weight.tensor) => {
                let steps = elements(&x.shape).saturating_mul(shape.last().copied().unwrap_or(1));
                self.planned(name, PlannedKind::MatrixProduct, &[x.tensor, weight.tensor], result, steps)
            }
            (NetworkOperation::Embedding, [table]) if self.whole.contains(&table.tensor) => {
                self.planned(name, PlannedKind::Rearrangement, &[x.tensor, table.tensor], result, 0)
            }
            (NetworkOperation::Product { transposed }, [weight, ..]) => {
                let layout = if transposed { WeightLayout::OutIn } else { WeightLayout::InOut };
                let x = self.arranged(name, x, own);
                self.builder.matmul(name, x, weight.tensor, 1, layout)
            }
            (NetworkOperation::Bias, [bias, ..]) => {
                let x = self.arranged(name, x, own);
                self.builder.bias_add(name, x, bias.tensor)
            }
            (NetworkOperation::Convolution(window), [weight, ..]) => {
                let image = self.image(&x.shape);
                let x = self.arranged(name, x, image);
                self.builder.convolution(name, x, weight.tensor, window.stride, window.padding)
            }
            (NetworkOperation::MaxPool(window), _) => {
                let image = self.image(&x.shape);
                let x = self.arranged(name, x, image);
                self.builder.max_pool(name, x, window.size, window.stride, window.padding)
            }
            (NetworkOperation::BatchNorm, [scale, shift]) => {
                let image = self.image(&x.shape);
                let x = self.arranged(name, x, image);
                self.builder.batch_norm_with(name, x, self.mode, [scale.tensor, shift.tensor])
            }
            (NetworkOperation::LayerNorm, [scale, shift]) => {
                let x = self.arranged(name, x, own);
                self.builder.layer_norm_with(name, x, EPSILON, [scale.tensor, shift.tensor])
            }
            (NetworkOperation::RmsNorm, [scale]) => {
                let x = self.arranged(name, x, own);
                self.builder.rms_norm_with(name, x, EPSILON, scale.tensor)
            }
            (NetworkOperation::Embedding, [table]) => {
                let x = self.arranged(name, x, own);
                self.builder.embedding(name, x, table.tensor)
            }
            (NetworkOperation::Attention { causal }, [k, v]) => self.attention(name, [x, k, v], causal),
            (NetworkOperation::Relu, _) => self.builder.relu(name, x.tensor),
            (NetworkOperation::Gelu, _) => self.builder.gelu_exact(name, x.tensor),
            (NetworkOperation::Loss, _) => self.loss(name, x),
            (NetworkOperation::Slice, _) => self.planned(name, PlannedKind::Slice, &[x.tensor], result, 0),
            (NetworkOperation::Work { kind, steps }, _) => {
                let reads: Vec<TensorId> = std::iter::once(x).chain(others).map(|value| value.tensor).collect();
                if let Some(tensor) = self.usual(name, kind, &reads, layer.storage) {
                    return tensor;
                }
                self.planned(name, kind.kind(), &reads, self.result(layer, kind, x, others), steps)
            }
            _ => unreachable!("invariant: a sound layer has its operands"),
        }
    }

    /// Adds a sum or a product of two tensors of equal dimensions, for which there are kernels;
    /// `None` for other work. Both operands of such a sum share its gradient.
    fn usual(&mut self, name: &str, kind: NetworkWork, reads: &[TensorId], storage: NetworkStorage) -> Option<TensorId> {
        let &[x, y] = reads else { return None };
        let usual = [x, y].map(|tensor| self.builder.storage(tensor)) == [Storage::Precision; 2];
        if !usual || storage != NetworkStorage::Precision || self.builder.dimensions(x) != self.builder.dimensions(y) {
            return None;
        }
        match kind {
            NetworkWork::Sum => Some(self.builder.add(name, x, y)),
            NetworkWork::Combination => Some(self.builder.multiply(name, x, y)),
            _ => None,
        }
    }

    /// The dimensions and the storage of the work's result. If an operand has the same shape, its
    /// dimensions are used, so that an image keeps its layout.
    fn result(&self, layer: &NetworkLayer, kind: NetworkWork, x: &Value, others: &[Value]) -> (Vec<Dimension>, Storage) {
        let mut reads = std::iter::once(x).chain(others);
        let keeps = kind.is_elementwise() || matches!(kind, NetworkWork::Norm | NetworkWork::Softmax);
        let alike = |value: &&Value| {
            let elements = |dimensions: &[Dimension]| dimensions.iter().map(|dimension| dimension.extent).product::<usize>();
            value.shape == layer.shape
                && value.shared == layer.shared
                && elements(&self.builder.dimensions(value.tensor)) == elements(&self.plain(&layer.shape, layer.shared))
        };
        let dimensions = reads.find(|value| keeps && alike(value)).map(|value| self.builder.dimensions(value.tensor));
        (dimensions.unwrap_or_else(|| self.plain(&layer.shape, layer.shared)), storage(layer.storage))
    }

    fn attention(&mut self, name: &str, [q, k, v]: [&Value; 3], causal: bool) -> TensorId {
        let (heads, groups) = (q.shape[0], k.shape[0]);
        let of = |value: &Value, heads: &[(&'static str, usize)], batch| {
            let mut dimensions = vec![dimension(BATCH, batch), dimension("sequence", value.shape[1])];
            dimensions.extend(heads.iter().map(|&(name, extent)| dimension(name, extent)));
            dimensions.push(dimension("head_features", value.shape[2]));
            dimensions
        };
        let query_heads =
            if heads == groups { vec![("heads", heads)] } else { vec![("heads", groups), ("group", heads / groups)] };
        let tensors = [(q, &query_heads[..], "q"), (k, &[("heads", groups)], "k"), (v, &[("heads", groups)], "v")].map(
            |(value, heads, part)| {
                let dimensions = of(value, heads, self.batch);
                self.arranged(&format!("{name}.{part}"), value, dimensions)
            },
        );
        let kind = AttentionKind { causal, scaled: true, window: None, relative: None, dropout: DropoutRate::NONE };
        self.builder.attention(name, tensors, kind)
    }

    /// Adds the loss over the last dimension.
    fn loss(&mut self, name: &str, x: &Value) -> TensorId {
        let dimensions = self.plain(&x.shape, false);
        let tensor = self.arranged(name, x, dimensions);
        let dimensions = self.builder.dimensions(tensor);
        let labels = self.builder.input(InputKind::Labels, dimensions[..dimensions.len() - 1].to_vec());
        self.builder.cross_entropy(name, tensor, labels);
        tensor
    }
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

fn storage(storage: NetworkStorage) -> Storage {
    match storage {
        NetworkStorage::Precision => Storage::Precision,
        NetworkStorage::Single => Storage::Single,
        NetworkStorage::Integer => Storage::Integer,
    }
}
