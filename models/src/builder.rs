//! Building graphs: one method an operator, so that a model file reads like the model.

mod mixture;
mod recurrence;

pub(crate) use mixture::MixtureShape;

use crate::attention::RelativePositions;
use crate::dropout::DropoutRate;
use crate::graph::{
    BATCH, Block, Dimension, Extent, Graph, Initialisation, InputKind, Loop, LoopId, Operand, Operator, OperatorId, OperatorKind,
    Parameter, Pass, Role, Storage, Tensor, TensorId,
};
use crate::kernel::{Epsilon, WeightLayout, Window};
use crate::specification::GraphOptions;

/// A dimension of a name and an extent.
pub(crate) fn dimension(name: &'static str, extent: usize) -> Dimension {
    Dimension { name, extent }
}

/// The dimension of a language model's tokens, which `tensor` shares out from the embedding to the loss.
pub(crate) const VOCABULARY: &str = "vocabulary";

/// A graph under construction.
pub(crate) struct GraphBuilder {
    graph: Graph,
    /// How many groups of samples the batch has for batch normalisation.
    normalization_groups: usize,
    /// Into how many parts a vocabulary is cut where it divides.
    vocabulary_parts: usize,
    /// Whether dropouts drop nothing.
    inference: bool,
    /// How many dropouts there are by now.
    dropout_sites: usize,
}

/// What [`GraphBuilder::batch_norm`] needs to know besides its input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Batch statistics.
    Training,
    /// Running statistics.
    Inference,
}

/// What [`GraphBuilder::attention`] needs to know besides its inputs.
#[derive(Clone, Copy)]
pub(crate) struct AttentionKind {
    /// Whether a position sees only those before it and itself.
    pub(crate) causal: bool,
    /// Whether scores are multiplied by `1/√head_dimension`.
    pub(crate) scaled: bool,
    /// Relative positions, with their table.
    pub(crate) relative: Option<(RelativePositions, TensorId)>,
}

impl GraphBuilder {
    pub(crate) fn new(name: &str, options: &GraphOptions) -> Self {
        let GraphOptions { batch, normalization_groups, vocabulary_parts, inference } = *options;
        let graph = Graph {
            name: name.into(),
            tensors: Vec::new(),
            operators: Vec::new(),
            blocks: Vec::new(),
            batch,
            predictions_per_sample: 1,
            tokens_per_sample: None,
        };
        Self { graph, normalization_groups, vocabulary_parts, inference, dropout_sites: 0 }
    }

    /// Starts the next block; what is added from here on belongs to it.
    pub(crate) fn block(&mut self, name: impl Into<String>, recomputable: bool) {
        self.graph.blocks.push(Block { name: name.into(), recomputable });
    }

    pub(crate) fn finish(self, predictions_per_sample: usize, tokens_per_sample: Option<usize>) -> Graph {
        Graph { predictions_per_sample, tokens_per_sample, ..self.graph }
    }

    fn tensor(&mut self, name: impl Into<String>, role: Role, dimensions: Vec<Dimension>, storage: Storage) -> TensorId {
        self.graph.tensors.push(Tensor { name: name.into(), role, dimensions, storage });
        TensorId(self.graph.tensors.len() - 1)
    }

    fn activation(&mut self, name: &str, dimensions: Vec<Dimension>, storage: Storage) -> TensorId {
        self.tensor(name, Role::Activation, dimensions, storage)
    }

    fn dimensions(&self, tensor: TensorId) -> Vec<Dimension> {
        self.graph.tensor(tensor).dimensions.clone()
    }

    fn operator(
        &mut self,
        name: &str,
        kind: OperatorKind,
        loops: Vec<Loop>,
        inputs: Vec<Operand>,
        outputs: Vec<Operand>,
    ) -> OperatorId {
        let block = self.graph.blocks.len().saturating_sub(1);
        self.graph.operators.push(Operator {
            name: name.into(),
            kind,
            loops,
            inputs,
            outputs,
            block,
            pass: Pass::Forward,
            forward: None,
        });
        OperatorId(self.graph.operators.len() - 1)
    }

    pub(crate) fn input(&mut self, kind: InputKind, dimensions: Vec<Dimension>) -> TensorId {
        let (name, storage) = match kind {
            InputKind::Images => ("images", Storage::Precision),
            InputKind::Features => ("features", Storage::Precision),
            InputKind::Tokens => ("tokens", Storage::Integer),
            InputKind::SourceTokens => ("source_tokens", Storage::Integer),
            InputKind::Labels => ("labels", Storage::Integer),
            InputKind::TokenTypes => ("token_types", Storage::Integer),
        };
        self.tensor(name, Role::Input(kind), dimensions, storage)
    }

    /// A parameter whose public form is ours with its dimensions in the order `permutation`, flattened to `shape`.
    pub(crate) fn parameter_as(
        &mut self,
        name: String,
        dimensions: Vec<Dimension>,
        initialisation: Initialisation,
        permutation: Vec<usize>,
        shape: Vec<usize>,
    ) -> TensorId {
        self.tensor(
            name,
            Role::Parameter(Parameter { initialisation, permutation, shape, parts: Vec::new() }),
            dimensions,
            Storage::Precision,
        )
    }

    /// A parameter whose public form has the same elements in the same order, in `shape`.
    pub(crate) fn parameter(
        &mut self,
        name: String,
        dimensions: Vec<Dimension>,
        shape: Vec<usize>,
        initialisation: Initialisation,
    ) -> TensorId {
        let permutation = (0..dimensions.len()).collect();
        self.parameter_as(name, dimensions, initialisation, permutation, shape)
    }

    /// `y = x · w`: the last `contracted` dimensions of x are those that w sums over.
    /// With [`WeightLayout::OutIn`] w is `[columns.., contracted..]`, with [`WeightLayout::InOut`] the reverse.
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
        loops.extend(x_dimensions[..row_count].iter().map(|one| shared(one, Extent::Rows)));
        // `projections` are q, k and v side by side: each rank needs its heads of all three.
        loops.extend(columns.iter().map(|one| Loop { shardable: one.name != "projections", ..shared(one, Extent::Columns) }));
        loops.extend(x_dimensions[row_count..].iter().map(|one| shared(one, Extent::Contracted)));
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
            OperatorKind::Matmul { weight: layout, relu: false },
            loops,
            vec![operand(x, [rows.clone(), contracted_loops].concat()), operand(weight, weight_axes)],
            vec![operand(y, [rows, column_loops].concat())],
        );
        y
    }

    /// `y = x + bias`, the bias having the last dimensions of x.
    pub(crate) fn bias_add(&mut self, name: &str, x: TensorId, bias: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let row_count = dimensions.len() - self.dimensions(bias).len();
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, one)| shared(one, if index < row_count { Extent::Rows } else { Extent::Columns }))
            .collect();
        let all = walk(0, dimensions.len());
        let columns = all[row_count..].to_vec();
        let y = self.activation(name, dimensions, Storage::Precision);
        self.operator(
            name,
            OperatorKind::BiasAdd,
            loops,
            vec![operand(x, all.clone()), operand(bias, columns)],
            vec![operand(y, all)],
        );
        y
    }

    fn elementwise(&mut self, name: &str, kind: OperatorKind, inputs: &[TensorId]) -> TensorId {
        let dimensions = inputs.first().map(|&first| self.dimensions(first)).unwrap_or_default();
        let loops = dimensions.iter().map(|one| shared(one, Extent::Rows)).collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        let inputs = inputs.iter().map(|&input| operand(input, all.clone())).collect();
        self.operator(name, kind, loops, inputs, vec![operand(y, all)]);
        y
    }

    pub(crate) fn relu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Relu, &[x])
    }

    pub(crate) fn gelu(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Gelu, &[x])
    }

    /// `y = x / √square`.
    pub(crate) fn scale(&mut self, name: &str, x: TensorId, square: usize) -> TensorId {
        self.elementwise(name, OperatorKind::Scale { square }, &[x])
    }

    pub(crate) fn multiply(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Multiply, &[a, b])
    }

    pub(crate) fn gelu_exact(&mut self, name: &str, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::GeluExact, &[x])
    }

    /// `gate · σ(gate) · x`.
    pub(crate) fn silu_multiply(&mut self, name: &str, gate: TensorId, x: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::SiluMultiply, &[gate, x])
    }

    pub(crate) fn add(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        self.elementwise(name, OperatorKind::Add, &[a, b])
    }

    /// The sizes of a window over the images of `x`.
    fn window(&self, x: TensorId, out_channels: usize, size: usize, stride: usize, padding: usize) -> Window {
        let extent = |index: usize| self.graph.tensor(x).dimensions[index].extent;
        let (batch, height, width, in_channels) = (extent(0), extent(1), extent(2), extent(3));
        Window { batch, height, width, in_channels, out_channels, size, stride, padding }
    }

    fn image(window: &Window) -> Vec<Dimension> {
        vec![
            dimension(BATCH, window.batch),
            dimension("height", window.out_height()),
            dimension("width", window.out_width()),
            dimension("channels", window.out_channels),
        ]
    }

    /// A convolution whose weight is `[out, size, size, in]`.
    pub(crate) fn convolution(&mut self, name: &str, x: TensorId, weight: TensorId, stride: usize, padding: usize) -> TensorId {
        let shape = self.dimensions(weight);
        let window = self.window(x, shape[0].extent, shape[1].extent, stride, padding);
        let loops = vec![
            Loop { name: BATCH, extent: window.batch, role: Extent::Rows, shardable: true },
            Loop { name: "out_channels", extent: window.out_channels, role: Extent::Columns, shardable: true },
            Loop { name: "in_channels", extent: window.in_channels, role: Extent::Contracted, shardable: true },
        ];
        let [batch, out, contracted] = [Some(LoopId(0)), Some(LoopId(1)), Some(LoopId(2))];
        let y = self.activation(name, Self::image(&window), Storage::Precision);
        self.operator(
            name,
            OperatorKind::Convolution(window),
            loops,
            vec![operand(x, vec![batch, None, None, contracted]), operand(weight, vec![out, None, None, contracted])],
            vec![operand(y, vec![batch, None, None, out])],
        );
        y
    }

    /// Batch normalisation. The batch's loop counts groups of samples, so that a mesh axis can only cut between groups.
    pub(crate) fn batch_norm(&mut self, name: &str, x: TensorId, mode: Mode) -> TensorId {
        let dimensions = self.dimensions(x);
        let channels = dimensions[3].extent;
        let groups = self.normalization_groups;
        let group_positions = dimensions[..3].iter().map(|one| one.extent).product::<usize>() / groups;
        let loops = vec![
            Loop { name: BATCH, extent: groups, role: Extent::Rows, shardable: true },
            Loop { name: "positions", extent: group_positions, role: Extent::Positions, shardable: false },
            Loop { name: "channels", extent: channels, role: Extent::Features, shardable: true },
        ];
        let [batch, channel] = [Some(LoopId(0)), Some(LoopId(2))];
        let per_channel = |initialisation: Initialisation, what: &str, builder: &mut Self| {
            builder.parameter(format!("{name}.{what}"), vec![dimension("channels", channels)], vec![channels], initialisation)
        };
        let scale = per_channel(Initialisation::Ones, "weight", self);
        let shift = per_channel(Initialisation::Zeros, "bias", self);
        let pair = vec![dimension("moments", 2), dimension("channels", channels)];
        let running = self.tensor(format!("{name}.running"), Role::Running, pair.clone(), Storage::Single);
        let y = self.activation(name, dimensions, Storage::Precision);
        let x_axes = vec![batch, None, None, channel];
        let mut inputs = vec![operand(x, x_axes.clone()), operand(scale, vec![channel]), operand(shift, vec![channel])];
        let mut outputs = vec![operand(y, x_axes)];
        let kind = match mode {
            Mode::Training => {
                let saved_dimensions = vec![dimension(BATCH, groups), pair[0], pair[1]];
                let saved = self.activation(&format!("{name}.saved"), saved_dimensions, Storage::Single);
                let statistics = self.tensor(format!("{name}.statistics"), Role::Sum, pair, Storage::Single);
                outputs.push(operand(saved, vec![batch, None, channel]));
                outputs.push(operand(statistics, vec![None, channel]));
                OperatorKind::BatchNorm
            }
            Mode::Inference => {
                inputs.push(operand(running, vec![None, channel]));
                OperatorKind::BatchNormInference
            }
        };
        self.operator(name, kind, loops, inputs, outputs);
        y
    }

    pub(crate) fn max_pool(&mut self, name: &str, x: TensorId, size: usize, stride: usize, padding: usize) -> TensorId {
        let channels = self.dimensions(x)[3].extent;
        let window = self.window(x, channels, size, stride, padding);
        let loops = vec![
            Loop { name: BATCH, extent: window.batch, role: Extent::Rows, shardable: true },
            Loop { name: "channels", extent: channels, role: Extent::Features, shardable: true },
        ];
        let axes = vec![Some(LoopId(0)), None, None, Some(LoopId(1))];
        let y = self.activation(name, Self::image(&window), Storage::Precision);
        // An index is an offset into the rank's own input, so channels that are shared out would still be right.
        let indices = self.activation(&format!("{name}.indices"), Self::image(&window), Storage::Integer);
        self.operator(
            name,
            OperatorKind::MaxPool(window),
            loops,
            vec![operand(x, axes.clone())],
            vec![operand(y, axes.clone()), operand(indices, axes)],
        );
        y
    }

    pub(crate) fn global_average_pool(&mut self, name: &str, x: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let loops = vec![
            shared(&dimensions[0], Extent::Rows),
            Loop {
                name: "positions",
                extent: dimensions[1].extent * dimensions[2].extent,
                role: Extent::Positions,
                shardable: false,
            },
            shared(&dimensions[3], Extent::Features),
        ];
        let [batch, channel] = [Some(LoopId(0)), Some(LoopId(2))];
        let y = self.activation(name, vec![dimensions[0], dimensions[3]], Storage::Precision);
        self.operator(
            name,
            OperatorKind::GlobalAveragePool,
            loops,
            vec![operand(x, vec![batch, None, None, channel])],
            vec![operand(y, vec![batch, channel])],
        );
        y
    }

    /// Layer normalisation over the last dimension.
    pub(crate) fn layer_norm(&mut self, name: &str, x: TensorId, epsilon: Epsilon) -> TensorId {
        let dimensions = self.dimensions(x);
        let row_count = dimensions.len() - 1;
        let features = dimensions[row_count];
        let mut loops: Vec<Loop> = dimensions[..row_count].iter().map(|one| shared(one, Extent::Rows)).collect();
        loops.push(Loop { shardable: false, ..shared(&features, Extent::Features) });
        let parameter = |initialisation, what: &str, builder: &mut Self| {
            builder.parameter(format!("{name}.{what}"), vec![features], vec![features.extent], initialisation)
        };
        let scale = parameter(Initialisation::Ones, "weight", self);
        let shift = parameter(Initialisation::Zeros, "bias", self);
        let all = walk(0, dimensions.len());
        let feature = vec![Some(LoopId(row_count))];
        let mut saved_dimensions = dimensions[..row_count].to_vec();
        saved_dimensions.push(dimension("moments", 2));
        let mut saved_axes = walk(0, row_count);
        saved_axes.push(None);
        let y = self.activation(name, dimensions, Storage::Precision);
        let saved = self.activation(&format!("{name}.saved"), saved_dimensions, Storage::Single);
        self.operator(
            name,
            OperatorKind::LayerNorm(epsilon),
            loops,
            vec![operand(x, all.clone()), operand(scale, feature.clone()), operand(shift, feature)],
            vec![operand(y, all), operand(saved, saved_axes)],
        );
        y
    }

    /// Division of the last dimension by its root mean square.
    pub(crate) fn rms_norm(&mut self, name: &str, x: TensorId, epsilon: Epsilon) -> TensorId {
        let dimensions = self.dimensions(x);
        let row_count = dimensions.len() - 1;
        let features = dimensions[row_count];
        let mut loops: Vec<Loop> = dimensions[..row_count].iter().map(|one| shared(one, Extent::Rows)).collect();
        loops.push(Loop { shardable: false, ..shared(&features, Extent::Features) });
        let scale = self.parameter(format!("{name}.weight"), vec![features], vec![features.extent], Initialisation::Ones);
        let all = walk(0, dimensions.len());
        let rows = walk(0, row_count);
        let saved = dimensions[..row_count].to_vec();
        let y = self.activation(name, dimensions, Storage::Precision);
        let saved = self.activation(&format!("{name}.saved"), saved, Storage::Single);
        self.operator(
            name,
            OperatorKind::RmsNorm(epsilon),
            loops,
            vec![operand(x, all.clone()), operand(scale, vec![Some(LoopId(row_count))])],
            vec![operand(y, all), operand(saved, rows)],
        );
        y
    }

    /// Rotary position embedding of x `[batch, sequence, heads.., head_dimension]`.
    pub(crate) fn rope(&mut self, name: &str, x: TensorId, theta: usize) -> TensorId {
        let dimensions = self.dimensions(x);
        let last = dimensions.len() - 1;
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, one)| match index {
                0 => shared(one, Extent::Rows),
                1 => shared(one, Extent::Positions),
                index if index < last => shared(one, Extent::Heads),
                _ => Loop { shardable: false, ..shared(one, Extent::Features) },
            })
            .collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        self.operator(name, OperatorKind::Rope { theta }, loops, vec![operand(x, all.clone())], vec![operand(y, all)]);
        y
    }

    /// Dropout of x `[batch, sequence, features]` or `[batch, features]`; x itself where nothing is dropped, as in evaluation. Ranks may share
    /// out the sequence, or without one the features. For where the features of a sequence are whole.
    pub(crate) fn dropout(&mut self, name: &str, x: TensorId, rate: DropoutRate) -> TensorId {
        if rate.is_none() || self.inference {
            return x;
        }
        let dimensions = self.dimensions(x);
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, one)| match index {
                0 => shared(one, Extent::Rows),
                1 => shared(one, Extent::Positions),
                _ => Loop { shardable: false, ..shared(one, Extent::Features) },
            })
            .collect();
        let all = walk(0, dimensions.len());
        let site = self.dropout_sites;
        self.dropout_sites += 1;
        let y = self.activation(name, dimensions, Storage::Precision);
        self.operator(name, OperatorKind::Dropout { rate, site }, loops, vec![operand(x, all.clone())], vec![operand(y, all)]);
        y
    }

    /// The pixels of x `[batch, height, width, channels]` as a sequence, after a learned row: `[batch, 1 + pixels, channels]`.
    pub(crate) fn prepend(&mut self, name: &str, x: TensorId, row: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let positions = dimensions[1].extent * dimensions[2].extent;
        let loops = vec![
            shared(&dimensions[0], Extent::Rows),
            Loop { name: "positions", extent: positions, role: Extent::Positions, shardable: false },
            shared(&dimensions[3], Extent::Features),
        ];
        let [batch, features] = [Some(LoopId(0)), Some(LoopId(2))];
        let y_dimensions = vec![dimensions[0], dimension("sequence", positions + 1), dimension("hidden", dimensions[3].extent)];
        let y = self.activation(name, y_dimensions, Storage::Precision);
        self.operator(
            name,
            OperatorKind::Prepend,
            loops,
            vec![operand(x, vec![batch, None, None, features]), operand(row, vec![features])],
            vec![operand(y, vec![batch, None, features])],
        );
        y
    }

    /// The first position of x `[batch, sequence, features]`.
    pub(crate) fn first(&mut self, name: &str, x: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let loops = vec![
            shared(&dimensions[0], Extent::Rows),
            Loop { shardable: false, ..shared(&dimensions[1], Extent::Positions) },
            shared(&dimensions[2], Extent::Features),
        ];
        let y = self.activation(name, vec![dimensions[0], dimensions[2]], Storage::Precision);
        let [batch, features] = [Some(LoopId(0)), Some(LoopId(2))];
        self.operator(
            name,
            OperatorKind::First,
            loops,
            vec![operand(x, vec![batch, Some(LoopId(1)), features])],
            vec![operand(y, vec![batch, features])],
        );
        y
    }

    /// A `Linear` from the last `contracted` dimensions of x to `outputs`, with a bias if that is told how to start. Its public shapes are
    /// `[outputs, inputs]` and `[outputs]`.
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

    /// The same with names for itself, its weight and its bias.
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
        let size = |dimensions: &[Dimension]| dimensions.iter().map(|one| one.extent).product::<usize>();
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

    /// Rows of `table` `[vocabulary, hidden]` looked up by token.
    pub(crate) fn embedding(&mut self, name: &str, tokens: TensorId, table: TensorId) -> TensorId {
        let token_dimensions = self.dimensions(tokens);
        let table_dimensions = self.dimensions(table);
        let row_count = token_dimensions.len();
        let mut loops: Vec<Loop> = token_dimensions.iter().map(|one| shared(one, Extent::Rows)).collect();
        let cut = self.cuts_vocabulary(table_dimensions[0].extent);
        loops.push(Loop { shardable: cut, ..shared(&table_dimensions[0], Extent::Vocabulary) });
        loops.push(shared(&table_dimensions[1], Extent::Features));
        let rows = walk(0, row_count);
        let hidden = Some(LoopId(row_count + 1));
        let y = self.activation(name, [&token_dimensions[..], &table_dimensions[1..]].concat(), Storage::Precision);
        self.operator(
            name,
            OperatorKind::Embedding,
            loops,
            vec![operand(tokens, rows.clone()), operand(table, vec![Some(LoopId(row_count)), hidden])],
            vec![operand(y, [rows, vec![hidden]].concat())],
        );
        y
    }

    /// Takes packed `[batch, sequence, projections, heads, head_dimension]` apart, into one tensor a projection.
    pub(crate) fn split<const PARTS: usize>(&mut self, name: &str, x: TensorId) -> [TensorId; PARTS] {
        let dimensions = self.dimensions(x);
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, one)| match index {
                0 | 1 => shared(one, Extent::Rows),
                2 => Loop { shardable: false, ..shared(one, Extent::Parts) },
                _ => shared(one, Extent::Features),
            })
            .collect();
        let whole = walk(0, dimensions.len());
        let axes: Vec<Option<LoopId>> =
            whole.iter().enumerate().filter(|&(index, _)| index != 2).map(|(_, &axis)| axis).collect();
        let part: Vec<Dimension> = dimensions.iter().enumerate().filter(|&(index, _)| index != 2).map(|(_, &one)| one).collect();
        let parts = std::array::from_fn(|index| self.activation(&format!("{name}.{index}"), part.clone(), Storage::Precision));
        let outputs = parts.iter().map(|&tensor| operand(tensor, axes.clone())).collect();
        self.operator(name, OperatorKind::Split, loops, vec![operand(x, whole)], outputs);
        parts
    }

    /// Attention of q `[batch, sequence, heads (, group), head_dimension]` over k and v `[batch, keys, heads, head_dimension]`, with a table
    /// `[buckets, heads (, group)]` of relative positions if there is one.
    pub(crate) fn attention(&mut self, name: &str, [q, k, v]: [TensorId; 3], kind: AttentionKind) -> TensorId {
        let AttentionKind { causal, scaled, relative } = kind;
        let query = self.dimensions(q);
        let key = self.dimensions(k);
        let head_count = query.len() - 3;
        let heads = &query[2..2 + head_count];
        let mut loops = vec![shared(&query[0], Extent::Rows)];
        loops.extend(heads.iter().zip([Extent::Heads, Extent::Group]).map(|(one, role)| shared(one, role)));
        let head_loops = walk(1, head_count);
        let [sequence, keys, features] = [1, 2, 3].map(|place| Some(LoopId(head_count + place)));
        loops.push(shared(&query[1], Extent::Positions));
        loops.push(Loop { name: "keys", shardable: false, ..shared(&key[1], Extent::Keys) });
        loops.push(Loop { shardable: false, ..shared(&query[2 + head_count], Extent::Features) });
        let batch = Some(LoopId(0));
        let query_axes = [vec![batch, sequence], head_loops.clone(), vec![features]].concat();
        let key_axes = vec![batch, keys, head_loops[0], features];
        let log_sum_dimensions = [&query[..1], heads, &query[1..2]].concat();
        let log_sum_axes = [vec![batch], head_loops.clone(), vec![sequence]].concat();
        let out = self.activation(name, query, Storage::Precision);
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), log_sum_dimensions, Storage::Single);
        let mut inputs = vec![operand(q, query_axes.clone()), operand(k, key_axes.clone()), operand(v, key_axes)];
        if let Some((_, table)) = relative {
            inputs.push(operand(table, [vec![None], head_loops].concat()));
        }
        let relative = relative.map(|(relative, _)| relative);
        self.operator(
            name,
            OperatorKind::Attention { causal, scaled, relative, packed: false },
            loops,
            inputs,
            vec![operand(out, query_axes), operand(log_sum_exp, log_sum_axes)],
        );
        out
    }

    /// Whether ranks share out a vocabulary (or as many classes).
    fn cuts_vocabulary(&self, extent: usize) -> bool {
        self.vocabulary_parts > 1 && extent.is_multiple_of(self.vocabulary_parts)
    }

    /// [`GraphBuilder::cross_entropy`] where ranks share out the classes: each makes statistics of its part, which are then put together.
    fn cross_entropy_in_parts(&mut self, name: &str, logits: TensorId, labels: TensorId) {
        let dimensions = self.dimensions(logits);
        let row_count = dimensions.len() - 1;
        let rows: Vec<Loop> = dimensions[..row_count].iter().map(|one| shared(one, Extent::Rows)).collect();
        let parts = dimension("parts", self.vocabulary_parts);
        let row_axes = walk(0, row_count);
        let last = Some(LoopId(row_count));
        // One entry a part: so a mesh axis that cuts the classes cuts the parts, too.
        let statistic_dimensions = [&[parts][..], &dimensions[..row_count], &[dimension("statistics", 4)]].concat();
        let statistics = self.activation(&format!("{name}.statistics"), statistic_dimensions, Storage::Single);
        self.operator(
            name,
            OperatorKind::LogitStatistics,
            [&rows[..], &[shared(&dimensions[row_count], Extent::Features)]].concat(),
            vec![operand(logits, walk(0, dimensions.len())), operand(labels, row_axes.clone())],
            vec![operand(statistics, [&[last][..], &row_axes, &[None]].concat())],
        );
        let loss = self.tensor("loss", Role::Sum, Vec::new(), Storage::Single);
        let correct = self.tensor("correct", Role::Sum, Vec::new(), Storage::Single);
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), dimensions[..row_count].to_vec(), Storage::Single);
        self.operator(
            name,
            OperatorKind::CrossEntropyOfStatistics,
            [&rows[..], &[Loop { shardable: false, ..shared(&parts, Extent::Positions) }]].concat(),
            vec![operand(statistics, [&[None][..], &row_axes, &[None]].concat()), operand(labels, row_axes.clone())],
            vec![operand(loss, Vec::new()), operand(correct, Vec::new()), operand(log_sum_exp, row_axes)],
        );
    }

    /// Mean cross-entropy of `logits` (classes last) and the number of correct predictions.
    pub(crate) fn cross_entropy(&mut self, name: &str, logits: TensorId, labels: TensorId) {
        let dimensions = self.dimensions(logits);
        let row_count = dimensions.len() - 1;
        if dimensions[row_count].name == VOCABULARY && self.cuts_vocabulary(dimensions[row_count].extent) {
            self.cross_entropy_in_parts(name, logits, labels);
            return;
        }
        let mut loops: Vec<Loop> = dimensions[..row_count].iter().map(|one| shared(one, Extent::Rows)).collect();
        loops.push(Loop { shardable: false, ..shared(&dimensions[row_count], Extent::Features) });
        let rows = walk(0, row_count);
        let loss = self.tensor("loss", Role::Sum, Vec::new(), Storage::Single);
        let correct = self.tensor("correct", Role::Sum, Vec::new(), Storage::Single);
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), dimensions[..row_count].to_vec(), Storage::Single);
        self.operator(
            name,
            OperatorKind::CrossEntropy,
            loops,
            vec![operand(logits, walk(0, dimensions.len())), operand(labels, rows.clone())],
            vec![operand(loss, Vec::new()), operand(correct, Vec::new()), operand(log_sum_exp, rows)],
        );
    }
}

/// A loop over a dimension that ranks may share out.
fn shared(dimension: &Dimension, role: Extent) -> Loop {
    Loop { name: dimension.name, extent: dimension.extent, role, shardable: true }
}

/// `count` consecutive loops from `first`, one a dimension.
fn walk(first: usize, count: usize) -> Vec<Option<LoopId>> {
    (first..first + count).map(|index| Some(LoopId(index))).collect()
}

fn operand(tensor: TensorId, axes: Vec<Option<LoopId>>) -> Operand {
    Operand { tensor, axes }
}
