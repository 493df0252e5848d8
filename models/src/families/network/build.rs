//! The graph of a network.
//!
//! Images have their channels last in the graph, and first in the network's shapes. A tensor is
//! turned by a change of shape, which costs nothing, where an operation wants the other order.

use super::operation::{NetworkConvolution, NetworkOperation, NetworkPool};
use super::{Network, NetworkInput};
use crate::builder::{GraphBuilder, GraphOptions, Mode, dimension};
use crate::graph::{BATCH, Dimension, Extent, Graph, Initialisation, InputKind, Loop, LoopId, TensorId};
use crate::kernel::{Epsilon, PlannedKind};

/// Initial values of weights. They are not those of the file.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

/// Epsilon of layer norms. Costs do not depend on it.
const EPSILON: Epsilon = Epsilon::new(5);

/// Names of the dimensions behind the batch.
const AXES: [&str; 6] = ["first", "second", "third", "fourth", "fifth", "sixth"];

/// The most dimensions of a sample.
pub(super) const MOST_AXES: usize = AXES.len();

/// A layer's result.
#[derive(Clone, Debug)]
struct Value {
    tensor: TensorId,
    /// Shape of one sample, with channels first.
    shape: Vec<usize>,
    /// Whether the tensor is an image, with channels last.
    is_image: bool,
}

/// Builds the forward graph. The network is sound.
pub(super) fn graph(network: &Network, name: &str, options: &GraphOptions) -> Graph {
    let mode = if options.inference { Mode::Inference } else { Mode::Training };
    let mut layers = Layers { builder: GraphBuilder::new(name, options), mode, batch: options.batch };
    let shapes = network.shapes().expect("invariant: the network is sound");
    let starts = block_starts(network);
    layers.builder.block("input", false);
    let mut values = vec![layers.input(&network.input)];
    for (index, layer) in network.layers.iter().enumerate() {
        if index > 0 && starts[index] {
            let is_last = !starts[index + 1..].contains(&true);
            layers.builder.block(layer.name.clone(), !is_last);
        }
        let reads: Vec<Value> = layer.reads.iter().map(|&read| values[read].clone()).collect();
        let value = layers.layer(&layer.name, &layer.operation, &reads, shapes[index + 1].clone());
        values.push(value);
    }
    let logits = values[network.layers.len()].clone();
    let (_, predictions) = network.predictions();
    layers.loss(&logits);
    layers.builder.finish(predictions, matches!(network.input, NetworkInput::Tokens { .. }).then_some(predictions))
}

/// Whether a block begins with each layer: only the result of the layer before is read from here
/// on, the block before has weights, and the layer does not belong to the one before.
fn block_starts(network: &Network) -> Vec<bool> {
    let layers = &network.layers;
    // The last layer that reads the input (place 0) or a layer's result.
    let mut last_use = vec![0; layers.len() + 1];
    for (index, layer) in layers.iter().enumerate() {
        for &read in &layer.reads {
            last_use[read] = index + 1;
        }
    }
    let mut starts = vec![false; layers.len()];
    let mut has_weights = false;
    let mut longest = 0;
    for (index, layer) in layers.iter().enumerate() {
        // Whether something older than the result of the layer before is still read.
        let is_cut = index > 0 && longest <= index;
        if is_cut && has_weights && !layer.operation.follows() {
            starts[index] = true;
            has_weights = false;
        }
        has_weights |= layer.operation.has_weights();
        longest = longest.max(last_use[index]);
    }
    starts
}

/// A network under construction.
struct Layers {
    builder: GraphBuilder,
    mode: Mode,
    batch: usize,
}

impl Layers {
    fn plain(&self, shape: &[usize]) -> Vec<Dimension> {
        let axes = shape.iter().zip(AXES).map(|(&extent, name)| dimension(name, extent));
        std::iter::once(dimension(BATCH, self.batch)).chain(axes).collect()
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

    fn input(&mut self, input: &NetworkInput) -> Value {
        let (shape, is_image) = (input.shape(), matches!(input, NetworkInput::Image { .. }));
        let (kind, dimensions) = match input {
            NetworkInput::Image { .. } => (InputKind::Images, self.image(&shape)),
            NetworkInput::Features { .. } => (InputKind::Features, self.plain(&shape)),
            NetworkInput::Tokens { .. } => (InputKind::Tokens, self.plain(&shape)),
        };
        Value { tensor: self.builder.input(kind, dimensions), shape, is_image }
    }

    /// Adds work of no kernel. Ranks may shard the batch, and nothing else.
    fn planned(&mut self, name: &str, kind: PlannedKind, reads: &[TensorId], dimensions: Vec<Dimension>) -> TensorId {
        let mut loops = vec![Loop { name: BATCH, extent: self.batch, role: Extent::Rows, shardable: true }];
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
        self.builder.planned(name, kind, loops, inputs, (dimensions, axes))
    }

    /// The value as an image with channels last, or with the dimensions of its shape.
    fn arranged(&mut self, name: &str, value: &Value, is_image: bool) -> TensorId {
        if value.is_image == is_image {
            return value.tensor;
        }
        let dimensions = if is_image { self.image(&value.shape) } else { self.plain(&value.shape) };
        self.planned(&format!("{name}.arranged"), PlannedKind::Reshape, &[value.tensor], dimensions)
    }

    fn weight(&mut self, name: &str, shape: &[usize]) -> TensorId {
        let dimensions = shape.iter().zip(AXES).map(|(&extent, name)| dimension(name, extent)).collect();
        self.builder.parameter(name.into(), dimensions, shape.to_vec(), WEIGHTS)
    }

    fn layer(&mut self, name: &str, operation: &NetworkOperation, reads: &[Value], shape: Vec<usize>) -> Value {
        let first = &reads[0];
        // Element by element, an image may stay one.
        let stays_image = reads.iter().all(|read| read.is_image && read.shape == first.shape);
        let is_image = match operation {
            NetworkOperation::Convolution(_)
            | NetworkOperation::MaxPool(_)
            | NetworkOperation::AveragePool(_)
            | NetworkOperation::BatchNorm => true,
            NetworkOperation::Relu
            | NetworkOperation::Gelu
            | NetworkOperation::Function
            | NetworkOperation::Add
            | NetworkOperation::Multiply => stays_image,
            NetworkOperation::Concatenate { axis: 0 } => reads.iter().all(|read| read.is_image),
            _ => false,
        };
        let x = match operation {
            // All pixels of an image, whatever their order.
            NetworkOperation::GlobalAveragePool => self.arranged(name, first, true),
            NetworkOperation::Reshape { .. } => first.tensor,
            _ => self.arranged(name, first, is_image),
        };
        let tensor = match operation {
            NetworkOperation::Linear { features, bias } => {
                let outputs = [dimension("features", *features)];
                self.builder.linear(name, x, 1, &outputs, WEIGHTS, bias.then_some(Initialisation::Zeros))
            }
            NetworkOperation::Convolution(one) => self.convolution(name, x, first.shape[0], one, &shape),
            NetworkOperation::BatchNorm => self.builder.batch_norm(name, x, self.mode),
            NetworkOperation::LayerNorm => self.builder.layer_norm(name, x, EPSILON),
            NetworkOperation::Relu => self.builder.relu(name, x),
            NetworkOperation::Gelu => self.builder.gelu_exact(name, x),
            NetworkOperation::MaxPool(pool) => self.pool(name, x, pool, true, &shape),
            NetworkOperation::AveragePool(pool) => self.pool(name, x, pool, false, &shape),
            NetworkOperation::GlobalAveragePool => self.builder.global_average_pool(name, x),
            NetworkOperation::Add | NetworkOperation::Multiply => {
                let is_sum = *operation == NetworkOperation::Add;
                let other = self.arranged(&format!("{name}.second"), &reads[1], is_image);
                match (reads[0].shape == reads[1].shape, is_sum) {
                    (true, true) => self.builder.add(name, x, other),
                    (true, false) => self.builder.multiply(name, x, other),
                    (false, _) => {
                        let kind = if is_sum { PlannedKind::Sum } else { PlannedKind::Combination };
                        self.planned(name, kind, &[x, other], self.plain(&shape))
                    }
                }
            }
            NetworkOperation::Shift { shape: own } if own.len() == 1 && first.shape.last() == own.last() => {
                let bias = self.weight(&format!("{name}.bias"), own);
                self.builder.bias_add(name, x, bias)
            }
            NetworkOperation::Shift { shape: own } | NetworkOperation::Weigh { shape: own } => {
                let weight = self.weight(&format!("{name}.weight"), own);
                let is_sum = matches!(operation, NetworkOperation::Shift { .. });
                let kind = if is_sum { PlannedKind::Sum } else { PlannedKind::Combination };
                self.planned(name, kind, &[x, weight], self.plain(&shape))
            }
            NetworkOperation::Embedding { rows, features } => {
                let extents = vec![dimension("rows", *rows), dimension("features", *features)];
                let table = self.builder.parameter(format!("{name}.weight"), extents, vec![*rows, *features], WEIGHTS);
                self.builder.embedding(name, x, table)
            }
            NetworkOperation::MatrixProduct => {
                let other = self.arranged(&format!("{name}.second"), &reads[1], false);
                self.matrix_product(name, [x, other], &first.shape, &shape)
            }
            NetworkOperation::Concatenate { .. } => self.concatenate(name, x, reads, is_image, &shape),
            NetworkOperation::Function => self.function(name, PlannedKind::Function, x),
            NetworkOperation::Softmax => self.function(name, PlannedKind::Softmax, x),
            NetworkOperation::Statistic { .. } => self.planned(name, PlannedKind::Pool, &[x], self.plain(&shape)),
            NetworkOperation::Reshape { .. } => self.planned(name, PlannedKind::Reshape, &[x], self.plain(&shape)),
            NetworkOperation::Transpose { .. } | NetworkOperation::Take { .. } => {
                self.planned(name, PlannedKind::Rearrangement, &[x], self.plain(&shape))
            }
        };
        Value { tensor, shape, is_image }
    }

    /// Adds a function of each element.
    fn function(&mut self, name: &str, kind: PlannedKind, x: TensorId) -> TensorId {
        let dimensions = self.builder.dimensions(x);
        self.planned(name, kind, &[x], dimensions)
    }

    /// Adds a convolution: the usual one with a square window, or one that is only planned.
    fn convolution(&mut self, name: &str, x: TensorId, channels: usize, one: &NetworkConvolution, shape: &[usize]) -> TensorId {
        let [rows, columns] = one.pool.size;
        let inputs = channels / one.groups;
        let public = vec![one.channels, inputs, rows, columns];
        let weight_name = format!("{name}.weight");
        let out = dimension("out_channels", one.channels);
        let y = match one.pool.square().filter(|_| one.groups == 1) {
            Some([size, stride, padding]) => {
                let window = dimension("window", size);
                let dimensions = vec![out, window, window, dimension("in_channels", inputs)];
                let weight = self.builder.parameter_as(weight_name, dimensions, WEIGHTS, vec![0, 3, 1, 2], public);
                self.builder.convolution(name, x, weight, stride, padding)
            }
            None => {
                let dimensions = vec![out, dimension("kernel", inputs * rows * columns)];
                let weight = self.builder.parameter(weight_name, dimensions, public, WEIGHTS);
                self.grouped_convolution(name, x, weight, shape)
            }
        };
        if !one.bias {
            return y;
        }
        let bias_name = format!("{name}.bias");
        let bias = self.builder.parameter(
            bias_name.clone(),
            vec![dimension("channels", one.channels)],
            vec![one.channels],
            Initialisation::Zeros,
        );
        self.builder.bias_add(&bias_name, y, bias)
    }

    /// Adds a convolution in groups of x `[batch, height, width, in]` with a weight
    /// `[out, kernel]`.
    fn grouped_convolution(&mut self, name: &str, x: TensorId, weight: TensorId, shape: &[usize]) -> TensorId {
        let [input, weights, output] = [self.builder.dimensions(x), self.builder.dimensions(weight), self.image(shape)];
        let whole = |one: &Dimension, role| Loop { name: one.name, extent: one.extent, role, shardable: false };
        let mut loops = vec![Loop { name: BATCH, extent: self.batch, role: Extent::Rows, shardable: true }];
        loops.extend(input[1..].iter().map(|one| whole(one, Extent::Parts)));
        loops.extend([whole(&output[1], Extent::Positions), whole(&output[2], Extent::Positions)]);
        loops.extend([whole(&weights[0], Extent::Columns), whole(&weights[1], Extent::Contracted)]);
        let axes = |places: &[usize]| places.iter().map(|&place| Some(LoopId(place))).collect::<Vec<_>>();
        let inputs = vec![(x, axes(&[0, 1, 2, 3])), (weight, axes(&[6, 7]))];
        self.builder.planned(name, PlannedKind::GroupedConvolution, loops, inputs, (output, axes(&[0, 4, 5, 6])))
    }

    fn pool(&mut self, name: &str, x: TensorId, pool: &NetworkPool, is_maximum: bool, shape: &[usize]) -> TensorId {
        match pool.square() {
            Some([size, stride, padding]) if is_maximum && padding < size => {
                self.builder.max_pool(name, x, size, stride, padding)
            }
            _ => self.planned(name, PlannedKind::Pool, &[x], self.image(shape)),
        }
    }

    /// Adds products `[batch.., rows, contracted] · [batch.., contracted, columns]`.
    fn matrix_product(&mut self, name: &str, [x, y]: [TensorId; 2], first: &[usize], shape: &[usize]) -> TensorId {
        let dimensions = self.plain(shape);
        let outer = dimensions.len() - 2;
        let whole = |one: &Dimension, role| Loop { name: one.name, extent: one.extent, role, shardable: false };
        let mut loops: Vec<Loop> = dimensions[..outer].iter().map(|one| whole(one, Extent::Rows)).collect();
        loops[0].shardable = true;
        loops.extend([whole(&dimensions[outer], Extent::Positions), whole(&dimensions[outer + 1], Extent::Columns)]);
        let contracted = dimension("contracted", *first.last().expect("invariant: a matrix has columns"));
        loops.push(whole(&contracted, Extent::Contracted));
        let with = |last: [usize; 2]| {
            (0..outer).chain(last.map(|place| outer + place)).map(|place| Some(LoopId(place))).collect::<Vec<_>>()
        };
        let inputs = vec![(x, with([0, 2])), (y, with([2, 1]))];
        self.builder.planned(name, PlannedKind::MatrixProduct, loops, inputs, (dimensions, with([0, 1])))
    }

    /// Adds a concatenation, two tensors at a time.
    fn concatenate(&mut self, name: &str, first: TensorId, reads: &[Value], is_image: bool, shape: &[usize]) -> TensorId {
        let whole = if is_image { self.image(shape) } else { self.plain(shape) };
        let mut joined = first;
        for (index, read) in reads.iter().enumerate().skip(1) {
            let part = self.arranged(&format!("{name}.{index}"), read, is_image);
            let [left, right] = [joined, part].map(|tensor| self.builder.dimensions(tensor));
            let is_last = index + 1 == reads.len();
            let sums = whole.iter().zip(left.iter().zip(&right)).map(|(whole, (left, right))| {
                let extent = if left.extent == whole.extent && right.extent == whole.extent {
                    whole.extent
                } else {
                    left.extent + right.extent
                };
                dimension(whole.name, extent)
            });
            let name = if is_last { name.to_string() } else { format!("{name}.joined{index}") };
            let dimensions = sums.collect();
            joined = self.planned(&name, PlannedKind::Rearrangement, &[joined, part], dimensions);
        }
        joined
    }

    /// Adds the loss over the classes: the last dimension of the logits' tensor.
    fn loss(&mut self, logits: &Value) {
        // An image's classes are its channels, which come last in the graph.
        let tensor = self.arranged("logits", logits, logits.shape.len() == 3);
        let dimensions = self.builder.dimensions(tensor);
        let labels = self.builder.input(InputKind::Labels, dimensions[..dimensions.len() - 1].to_vec());
        self.builder.cross_entropy("loss", tensor, labels);
    }
}
