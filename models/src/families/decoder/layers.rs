//! The graph of a decoder.

use super::{Decoder, FeedForward, LayerKind, Mixtures, NormKind, ParallelBlock, PositionKind};
use crate::attention::RelativePositions;
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::graph::{BATCH, Dimension, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::WeightLayout;

/// Initial values of weights.
pub(super) const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

/// Builds the forward graph.
pub(super) fn graph(sizes: &Decoder, name: &str, options: &GraphOptions) -> Graph {
    let mut layers = Layers { builder: GraphBuilder::new(name, options), sizes, keys: [None; 2], layer_inputs: None };
    let positions = vec![dimension(BATCH, options.batch), dimension("sequence", sizes.sequence)];
    let seen = sizes.vision.map(|tower| layers.vision(options.batch, &tower));
    layers.builder.block("embedding", false);
    let table = layers.table("model.embed_tokens.weight");
    let tokens = layers.builder.input(InputKind::Tokens, positions.clone());
    let mut x = layers.embedding(tokens, table, &positions);
    layers.layer_inputs = sizes.layer_inputs.map(|inputs| layers.layer_inputs(tokens, x, inputs));
    if let Some(seen) = seen {
        x = layers.builder.place_tokens("model.image_tokens", x, seen);
    }
    if let Some(streams) = sizes.residual_streams {
        x = layers.begin_streams(x, streams);
    }
    for layer in 0..sizes.layers {
        layers.builder.block(format!("layer {layer}"), true);
        x = layers.layer(layer, x);
    }
    layers.builder.block("head", false);
    let head = if sizes.tied_embeddings { table } else { layers.table("lm_head.weight") };
    if let Some(streams) = sizes.residual_streams {
        x = layers.end_streams(x, streams);
    }
    let normed = layers.norm("model.norm", x);
    let logits = layers.head("lm_head", normed, head);
    let labels = layers.builder.input(InputKind::Labels, positions);
    layers.builder.cross_entropy("loss", logits, labels);
    for module in 0..sizes.prediction_modules {
        layers.builder.block(format!("prediction {module}"), true);
        x = layers.prediction(module, x, tokens, table);
        layers.builder.block(format!("prediction head {module}"), false);
        let name = format!("model.layers.{}.shared_head", sizes.layers + module);
        let normed = layers.norm(&format!("{name}.norm"), x);
        let logits = layers.head(&format!("{name}.head"), normed, head);
        layers.builder.cross_entropy(&format!("loss.{module}"), logits, labels);
    }
    layers.builder.finish(sizes.sequence, Some(sizes.sequence))
}

/// A decoder under construction.
pub(super) struct Layers<'a> {
    pub(super) builder: GraphBuilder,
    pub(super) sizes: &'a Decoder,
    /// Keys and values that later layers use: of the last layer with a window, and of the last that
    /// sees all positions.
    pub(super) keys: [Option<[TensorId; 2]>; 2],
    /// The embedding that has features for each layer.
    pub(super) layer_inputs: Option<TensorId>,
}

impl Layers<'_> {
    /// Adds a table `[vocabulary, hidden]`: the embedding, or the head.
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.sizes.vocab, self.sizes.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    /// Adds a norm.
    pub(super) fn norm(&mut self, name: &str, x: TensorId) -> TensorId {
        let epsilon = self.sizes.norm_epsilon.epsilon();
        match self.sizes.norm {
            NormKind::Rms => self.builder.rms_norm(name, x, epsilon),
            NormKind::Layer => self.builder.layer_norm(name, x, epsilon),
            NormKind::LayerWithoutShift => self.builder.feature_norm(name, x, 1),
        }
    }

    /// Adds the norm of queries or keys, head by head. The last `of_head` dimensions are those of
    /// heads.
    fn head_norm(&mut self, name: &str, x: TensorId, of_head: usize) -> TensorId {
        match self.sizes.query_key_scales_of_heads {
            true => self.builder.feature_norm(name, x, of_head),
            false => self.norm(name, x),
        }
    }

    /// Adds a product with or without a bias.
    pub(super) fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        contracted: usize,
        outputs: &[Dimension],
        has_bias: bool,
    ) -> TensorId {
        self.builder.linear(name, x, contracted, outputs, WEIGHTS, has_bias.then_some(Initialisation::Zeros))
    }

    /// Adds the embedding of tokens, and of positions if they are learned.
    fn embedding(&mut self, tokens: TensorId, table: TensorId, positions: &[Dimension]) -> TensorId {
        let Decoder { hidden, sequence, first_position, .. } = *self.sizes;
        let mut x = self.builder.embedding("model.embed_tokens", tokens, table);
        if self.sizes.embedding_scale {
            x = self.builder.scale("model.embed_scale", x, hidden);
        }
        if self.sizes.positions == PositionKind::Learned {
            let rows = self.sizes.position_rows.unwrap_or(sequence + first_position);
            let extents = vec![dimension("positions", rows), dimension("hidden", hidden)];
            let name = "model.embed_positions";
            let rows = self.builder.parameter(format!("{name}.weight"), extents, vec![rows, hidden], WEIGHTS);
            let places = self.builder.input(InputKind::Positions { first: first_position }, positions.to_vec());
            let places = self.builder.embedding(name, places, rows);
            x = self.builder.add(&format!("{name}.sum"), x, places);
        }
        if self.sizes.embedding_norm {
            x = self.norm("model.embed_layernorm", x);
        }
        self.builder.dropout("model.embed_dropout", x, self.sizes.dropout)
    }

    /// Adds the logits of normed positions.
    fn head(&mut self, name: &str, normed: TensorId, head: TensorId) -> TensorId {
        let mut logits = self.builder.matmul(name, normed, head, 1, WeightLayout::OutIn);
        if self.sizes.head_bias {
            let vocabulary = dimension("vocabulary", self.sizes.vocab);
            let zeros = Initialisation::Zeros;
            let bias = format!("{name}.bias");
            let bias_values = self.builder.parameter(bias.clone(), vec![vocabulary], vec![self.sizes.vocab], zeros);
            logits = self.builder.bias_add(&bias, logits, bias_values);
        }
        if self.sizes.logit_cap {
            // A tanh and two products in one pass over the logits: the traffic of a scale.
            logits = self.builder.scale(&format!("{name}.cap"), logits, 1);
        }
        if self.sizes.logit_scale {
            logits = self.builder.scale(&format!("{name}.scale"), logits, 1);
        }
        logits
    }

    /// Adds a module of multi-token prediction on the positions `x` of the layer before it.
    fn prediction(&mut self, module: usize, x: TensorId, tokens: TensorId, table: TensorId) -> TensorId {
        let layer = self.sizes.layers + module;
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let next = self.builder.embedding(&name("embed_tokens"), tokens, table);
        let next = self.norm(&name("enorm"), next);
        let normed = self.norm(&name("hnorm"), x);
        // One product with both inputs side by side is the sum of a product with each.
        let hidden = [dimension("hidden", self.sizes.hidden)];
        let next = self.linear(&name("eh_proj.embedding"), next, 1, &hidden, false);
        let normed = self.linear(&name("eh_proj.hidden"), normed, 1, &hidden, false);
        let x = self.builder.add(&name("eh_proj.sum"), next, normed);
        self.layer(layer, x)
    }

    fn layer(&mut self, layer: usize, x: TensorId) -> TensorId {
        if let Some(streams) = self.sizes.residual_streams {
            return self.layer_of_streams(layer, x, streams);
        }
        let mut x = self.usual_parts(layer, x);
        if let Some(inputs) = self.layer_inputs.filter(|_| layer < self.sizes.layers) {
            x = self.add_layer_input(layer, x, inputs);
        }
        match self.sizes.layer_scales {
            true => self.builder.scale(&format!("model.layers.{layer}.layer_scalar"), x, 1),
            false => x,
        }
    }

    /// Adds attention and the feed-forward network, or the parts that the layer's kind has instead.
    pub(super) fn usual_parts(&mut self, layer: usize, x: TensorId) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let kind = self.sizes.kind_of(layer);
        let normed = self.input_norm(&name("input_layernorm"), x);
        let x = if self.sizes.residual_after_norm { normed } else { x };
        let y = match self.sizes.linear.filter(|_| kind.has_linear()) {
            Some(linear) => {
                let y = self.linear_attention(layer, normed, &linear);
                match kind.has_attention() {
                    true => {
                        let z = self.attention(layer, normed);
                        self.builder.add(&name("both.sum"), y, z)
                    }
                    false => y,
                }
            }
            None if kind.has_attention() => self.attention(layer, normed),
            None => self.feed_forward(layer, normed),
        };
        let y = self.added(&name("self_attn"), "post_attention_output_layernorm", y);
        match self.sizes.parallel_block {
            ParallelBlock::None if kind.is_alone() => self.builder.add(&name("residual"), x, y),
            ParallelBlock::None => {
                let x = self.builder.add(&name("self_attn.residual"), x, y);
                let x = match self.sizes.residual_streams {
                    Some(streams) => self.beside_attention(layer, x, normed, streams),
                    None => x,
                };
                let normed = self.input_norm(&name("post_attention_layernorm"), x);
                let x = if self.sizes.residual_after_norm { normed } else { x };
                let y = self.feed_forward(layer, normed);
                let y = self.added(&name("mlp"), "post_feedforward_layernorm", y);
                self.builder.add(&name("mlp.residual"), x, y)
            }
            parallel => {
                let normed = match parallel {
                    ParallelBlock::None | ParallelBlock::OneNorm => normed,
                    ParallelBlock::OwnNorms => self.norm(&name("post_attention_layernorm"), x),
                };
                let z = self.feed_forward(layer, normed);
                let z = self.added(&name("mlp"), "post_feedforward_layernorm", z);
                let sum = self.builder.add(&name("parallel_sum"), y, z);
                self.builder.add(&name("residual"), x, sum)
            }
        }
    }

    /// Adds the norm of a part's input, if parts have one.
    fn input_norm(&mut self, name: &str, x: TensorId) -> TensorId {
        if self.sizes.no_input_norms { x } else { self.norm(name, x) }
    }

    /// Adds the norm and the dropout of a part's output, before it is added to the residual stream.
    fn added(&mut self, module: &str, norm: &str, y: TensorId) -> TensorId {
        let y = if self.sizes.output_norms { self.norm(&format!("{module}.{norm}"), y) } else { y };
        self.builder.dropout(&format!("{module}.dropout"), y, self.sizes.dropout)
    }

    /// Adds self-attention.
    fn attention(&mut self, layer: usize, x: TensorId) -> TensorId {
        let Decoder { hidden, heads, rope_theta, rotary_dimension, qkv_bias, .. } = *self.sizes;
        let module = format!("model.layers.{layer}.self_attn");
        let name = |part: &str| format!("{module}.{part}");
        let kv_heads = self.sizes.kv_heads_of(layer);
        let key_heads = [dimension("heads", kv_heads), dimension("head_dimension", self.sizes.head_features_of(layer))];
        // Query head h attends to key head h / group, so the dimension of key heads comes first.
        let query_features = dimension("head_dimension", key_heads[1].extent + self.sizes.rotary_part.unwrap_or(0));
        let query_heads = match heads / kv_heads {
            1 => vec![key_heads[0], query_features],
            group => vec![key_heads[0], dimension("group", group), query_features],
        };
        let value_features = self.sizes.value_dimension.unwrap_or(key_heads[1].extent);
        let value_heads = [key_heads[0], dimension("head_dimension", value_features)];
        let query_input = self.low_rank(&name("q"), x, self.sizes.query_rank);
        let key_input = self.low_rank(&name("kv"), x, self.sizes.key_value_rank);
        let mut q = self.linear(&name("q_proj"), query_input, 1, &query_heads, qkv_bias);
        let shared = self.shared_keys(layer);
        let [mut k, mut v] = shared.unwrap_or_else(|| {
            let k = self.linear(&name("k_proj"), key_input, 1, &key_heads, qkv_bias);
            match self.sizes.has_keys_as_values(layer) {
                true => [k, k],
                false => [k, self.linear(&name("v_proj"), key_input, 1, &value_heads, qkv_bias)],
            }
        });
        let has_own_keys = shared.is_none();
        if self.sizes.value_norm && has_own_keys {
            v = self.builder.feature_norm(&name("v_norm"), v, 0);
        }
        if self.sizes.query_key_norm_of_all_heads {
            let epsilon = self.sizes.norm_epsilon.epsilon();
            q = self.builder.rms_norm_over(&name("q_norm"), q, epsilon, query_heads.len());
            if has_own_keys {
                k = self.builder.rms_norm_over(&name("k_norm"), k, epsilon, key_heads.len());
            }
        } else if self.sizes.query_key_norm {
            q = self.head_norm(&name("q_norm"), q, query_heads.len());
            if has_own_keys {
                k = self.head_norm(&name("k_norm"), k, key_heads.len());
            }
        }
        if let Some(rotary_part) = self.sizes.rotary_part {
            let features = [dimension("rotary", rotary_part)];
            let shared = self.linear(&name("kv_a_proj_rotary"), x, 1, &features, self.sizes.rank_bias);
            let shared = match self.sizes.rotates(layer) {
                true => {
                    let shared = self.builder.rope(&name("rotary_k"), shared, rope_theta, None);
                    q = self.builder.rope(&name("rotary_q"), q, rope_theta, Some(rotary_part));
                    shared
                }
                false => shared,
            };
            k = self.builder.share_among_heads(&name("shared_keys"), shared, k);
        } else if self.sizes.rotates(layer) {
            q = self.builder.rope(&name("rotary_q"), q, rope_theta, rotary_dimension);
            if has_own_keys {
                k = self.builder.rope(&name("rotary_k"), k, rope_theta, rotary_dimension);
            }
        }
        if has_own_keys {
            self.keep_keys(layer, [k, v]);
        }
        let kind = AttentionKind {
            causal: true,
            scaled: true,
            window: self.sizes.window_of(layer),
            relative: self.sinks(&name("sinks"), &query_heads).map(|sinks| (RelativePositions::SINKS, sinks)),
            dropout: self.sizes.attention_dropout,
        };
        let mut y = self.builder.attention(&module, [q, k, v], kind);
        if self.sizes.attention_gate {
            let gate_heads = [&query_heads[..query_heads.len() - 1], &value_heads[1..]].concat();
            let gate = self.linear(&name("gate_proj"), x, 1, &gate_heads, qkv_bias);
            y = self.builder.gate(&name("gate"), y, gate);
        }
        let outputs = [dimension("hidden", hidden)];
        self.linear(&name("o_proj"), y, query_heads.len(), &outputs, self.sizes.attention_output_bias)
    }

    /// Adds the sinks of the heads, if they have any: a table with one row.
    fn sinks(&mut self, name: &str, query_heads: &[Dimension]) -> Option<TensorId> {
        if !self.sizes.sinks {
            return None;
        }
        let heads = &query_heads[..query_heads.len() - 1];
        let shape = vec![heads.iter().map(|head| head.extent).product()];
        let row = dimension("sinks", RelativePositions::SINKS.buckets);
        Some(self.builder.parameter(name.into(), [&[row], heads].concat(), shape, WEIGHTS))
    }

    /// Adds DeepSeek's low-rank projection. Returns x if there is no rank.
    fn low_rank(&mut self, part: &str, x: TensorId, rank: Option<usize>) -> TensorId {
        let Some(rank) = rank else { return x };
        let y = self.linear(&format!("{part}_a_proj"), x, 1, &[dimension("rank", rank)], self.sizes.rank_bias);
        self.norm(&format!("{part}_a_layernorm"), y)
    }

    fn feed_forward(&mut self, layer: usize, x: TensorId) -> TensorId {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let is_mixture = |mixtures: &Mixtures| match self.sizes.kind_of(layer) {
            LayerKind::MixtureAlone => true,
            LayerKind::DenseAlone => false,
            LayerKind::Attention
            | LayerKind::Linear
            | LayerKind::AttentionAndLinear
            | LayerKind::AttentionAlone
            | LayerKind::LinearAlone => mixtures.includes(layer),
        };
        match self.sizes.mixtures.filter(is_mixture) {
            Some(mixtures) => self.mixture(&name("block_sparse_moe"), x, mixtures),
            None if layer < self.sizes.sparse_activation_layers => self.sparse(&name("mlp"), x, self.sizes.ffn_of(layer)),
            None => self.dense(&name("mlp"), x, self.sizes.ffn_of(layer)),
        }
    }

    /// Adds a dense feed-forward network.
    fn dense(&mut self, module: &str, x: TensorId, ffn: usize) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let [inner, hidden] = [dimension("ffn", ffn), dimension("hidden", self.sizes.hidden)];
        let has_bias = self.sizes.ffn_bias;
        let act = name("act");
        let y = match self.sizes.feed_forward {
            FeedForward::GatedSilu | FeedForward::GatedGeluTanh => {
                let gate = self.linear(&name("gate_proj"), x, 1, &[inner], has_bias);
                let up = self.linear(&name("up_proj"), x, 1, &[inner], has_bias);
                self.gated(&act, gate, up)
            }
            ungated => {
                let up = self.linear(&name("up_proj"), x, 1, &[inner], has_bias);
                self.ungated(&act, ungated, up)
            }
        };
        self.linear(&name("down_proj"), y, 1, &[hidden], has_bias)
    }

    /// Adds a gated feed-forward network that cuts off most of the gate before its activation.
    fn sparse(&mut self, module: &str, x: TensorId, ffn: usize) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let [inner, hidden] = [dimension("ffn", ffn), dimension("hidden", self.sizes.hidden)];
        let has_bias = self.sizes.ffn_bias;
        let gate = self.linear(&name("gate_proj"), x, 1, &[inner], has_bias);
        // A cut at the mean and some deviations, in one pass over the gate: the traffic of a scale.
        let gate = self.builder.scale(&name("gate_proj.cut"), gate, 1);
        let up = self.linear(&name("up_proj"), x, 1, &[inner], has_bias);
        let y = self.gated(&name("act"), gate, up);
        self.linear(&name("down_proj"), y, 1, &[hidden], has_bias)
    }

    /// Adds an activation without a gate.
    fn ungated(&mut self, name: &str, activation: FeedForward, x: TensorId) -> TensorId {
        match activation {
            FeedForward::Gelu => self.builder.gelu_exact(name, x),
            FeedForward::Relu => self.builder.relu(name, x),
            FeedForward::SquaredRelu => self.builder.squared_relu(name, x),
            FeedForward::GeluTanh => self.builder.gelu(name, x),
            FeedForward::GatedSilu | FeedForward::GatedGeluTanh => unreachable!("invariant: it has a gate"),
        }
    }

    /// Adds the gated product of two equal tensors.
    fn gated(&mut self, name: &str, gate: TensorId, up: TensorId) -> TensorId {
        if self.sizes.feed_forward == FeedForward::GatedGeluTanh {
            let gate = self.builder.gelu(name, gate);
            return self.builder.multiply(&format!("{name}.gate"), gate, up);
        }
        self.builder.silu_multiply(name, gate, up)
    }

    /// Adds the mixture of experts of a layer.
    fn mixture(&mut self, module: &str, x: TensorId, mixtures: Mixtures) -> TensorId {
        let Decoder { hidden, sequence, .. } = *self.sizes;
        let Mixtures { ffn, shared_ffn, .. } = mixtures;
        let shape = mixtures.shape(sequence);
        let name = |part: &str| format!("{module}.{part}");
        let [experts, inner, hidden] = [dimension("experts", shape.experts), dimension("ffn", ffn), dimension("hidden", hidden)];
        let public = vec![experts.extent, hidden.extent];
        let router = self.builder.parameter(name("gate.weight"), vec![experts, hidden], public, WEIGHTS);
        let router_bias = mixtures
            .router_bias
            .then(|| self.builder.parameter(name("gate.bias"), vec![experts], vec![experts.extent], Initialisation::Zeros));
        let (slots, routing) = self.builder.dispatch(module, x, router, router_bias, &shape);
        let y = match self.sizes.feed_forward.is_gated() {
            true => {
                let [gate, up] =
                    ["w1", "w3"].map(|matrix| self.expert_product(module, matrix, slots, [experts, inner, hidden], mixtures));
                self.gated(&name("experts.act"), gate, up)
            }
            false => {
                let up = self.expert_product(module, "w3", slots, [experts, inner, hidden], mixtures);
                self.ungated(&name("experts.act"), self.sizes.feed_forward, up)
            }
        };
        let y = self.expert_product(module, "w2", y, [experts, hidden, inner], mixtures);
        let y = self.builder.combine(module, y, &routing, sequence, &shape);
        match shared_ffn {
            Some(shared_ffn) => {
                let mut shared = self.dense(&name("shared_experts"), x, shared_ffn);
                if mixtures.shared_gate {
                    let gate = self.linear(&name("shared_expert_gate"), x, 1, &[dimension("gate", 1)], false);
                    shared = self.builder.gate_rows(&name("shared_expert_gate.product"), shared, gate);
                }
                self.builder.add(&name("shared_experts.sum"), y, shared)
            }
            None => y,
        }
    }
    /// Adds the product of all experts with one of their matrices `[experts, columns, contracted]`.
    fn expert_product(&mut self, module: &str, matrix: &str, x: TensorId, sizes: [Dimension; 3], mixtures: Mixtures) -> TensorId {
        let weight = self.builder.expert_parameter(&format!("{module}.experts"), matrix, sizes, WEIGHTS);
        let name = format!("{module}.experts.{matrix}");
        let y = self.builder.expert_matmul(&name, x, weight);
        if !mixtures.expert_bias {
            return y;
        }
        let [experts, columns, _] = sizes;
        let name = format!("{name}_bias");
        let shape = vec![experts.extent, columns.extent];
        let bias = self.builder.parameter(name.clone(), vec![experts, columns], shape, Initialisation::Zeros);
        self.builder.expert_bias(&name, y, bias)
    }
}
