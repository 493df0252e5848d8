//! Building graphs: one method an operator, so that a model file reads like the model.

use crate::graph::{
    BATCH, Block, Dimension, Extent, Graph, Initialisation, InputKind, Loop, LoopId, Operand, Operator, OperatorId, OperatorKind,
    Parameter, Pass, Role, Storage, Tensor, TensorId,
};
use crate::kernel::{WeightLayout, Window};
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
}

/// What [`GraphBuilder::batch_norm`] needs to know besides its input.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Batch statistics.
    Training,
    /// Running statistics.
    Inference,
}

impl GraphBuilder {
    pub(crate) fn new(name: &str, options: &GraphOptions) -> Self {
        let GraphOptions { batch, normalization_groups, vocabulary_parts, .. } = *options;
        let graph = Graph {
            name: name.into(),
            tensors: Vec::new(),
            operators: Vec::new(),
            blocks: Vec::new(),
            batch,
            predictions_per_sample: 1,
            tokens_per_sample: None,
        };
        Self { graph, normalization_groups, vocabulary_parts }
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
            InputKind::Labels => ("labels", Storage::Integer),
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
        self.tensor(name, Role::Parameter(Parameter { initialisation, permutation, shape }), dimensions, Storage::Precision)
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
    pub(crate) fn layer_norm(&mut self, name: &str, x: TensorId) -> TensorId {
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
            OperatorKind::LayerNorm,
            loops,
            vec![operand(x, all.clone()), operand(scale, feature.clone()), operand(shift, feature)],
            vec![operand(y, all), operand(saved, saved_axes)],
        );
        y
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

    /// Attention over packed `[batch, sequence, projections, heads, head_dimension]`.
    pub(crate) fn attention(&mut self, name: &str, qkv: TensorId, causal: bool) -> TensorId {
        let dimensions = self.dimensions(qkv);
        let [batch, sequence, heads, features] = [dimensions[0], dimensions[1], dimensions[3], dimensions[4]];
        let loops = vec![
            shared(&batch, Extent::Rows),
            shared(&heads, Extent::Heads),
            Loop { shardable: false, ..shared(&sequence, Extent::Positions) },
            Loop { shardable: false, ..shared(&features, Extent::Features) },
        ];
        let [batch_loop, heads_loop] = [Some(LoopId(0)), Some(LoopId(1))];
        let out = self.activation(name, vec![batch, sequence, heads, features], Storage::Precision);
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), vec![batch, heads, sequence], Storage::Single);
        self.operator(
            name,
            OperatorKind::Attention { causal },
            loops,
            vec![operand(qkv, vec![batch_loop, None, None, heads_loop, None])],
            vec![
                operand(out, vec![batch_loop, None, heads_loop, None]),
                operand(log_sum_exp, vec![batch_loop, heads_loop, None]),
            ],
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
