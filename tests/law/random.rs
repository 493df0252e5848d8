//! Random cases: any model in any layout that it supports.

use super::case::{Case, MESHES, SEQUENCES, SHARES, Uneven};
use foretell_program::Schedule;
use proptest::prelude::*;

/// Values of the plan's `operators`. The patterns match operators of every model. An operator that
/// cannot be sharded as its pattern says keeps the default.
pub const OPERATORS: [&str; 8] = [
    "{\"*\": batch}",
    "{\"*\": outputs}",
    "{\"*\": inputs}",
    "{\"*\": batch, \"*1*\": outputs}",
    "{\"*\": batch, \"*1*\": inputs}",
    "{\"*\": outputs, \"*1*\": batch, \"*0*\": whole}",
    "{\"*\": inputs, \"*1*\": batch}",
    "{\"*1*\": whole, \"*0*\": batch}",
];

/// Further entries of the plan's `training`. The patterns match parameters of every model, except
/// for the last but one in an LSTM model. Adapters need linear layers.
pub const RECIPES: [&str; 7] = [
    ", weight_decay: 0.1, no_decay: {biases: true, norms: true}",
    ", label_smoothing: 0.1",
    ", schedule: {kind: cosine, minimum: 0.001}, warm_up: {length: 2}",
    ", schedule: {kind: step, every: 2, factor: 0.5}, weight_decay: 0.1, no_decay: {names: [\"*0*\"]}",
    ", frozen: [\"*0*\"]",
    ", frozen: [\"*0*weight\"], weight_decay: 0.1",
    ", lora: {rank: 16, alpha: 32}",
];

/// A recipe that weighs ten classes, and smooths their labels.
pub const WEIGHTS: &str = ", class_weights: [1, 2, 0.5, 1, 0, 3, 1, 1, 1, 0.25], label_smoothing: 0.2";

/// Returns `operators` if the model supports it, else sharding of the batch. Tied parameters must
/// be sharded in the same way wherever they are used. In an LSTM model only the vocabulary and the
/// batch can be sharded.
pub fn operators_of(model: &str, operators: &'static str) -> &'static str {
    let is_tied = model.contains("bert") || model.contains("t5") || model.contains("tied_embeddings: true");
    if is_tied || model.contains("lstm") { OPERATORS[0] } else { operators }
}

/// Returns the `chunks` of the loss and of MLPs that a model can have: there are vocabularies and
/// dense MLPs in models of sequences, and products of eight bits have one factor for all positions.
pub fn chunks_of(model: &str, precision: &str, [loss, mlp]: [Option<usize>; 2]) -> [Option<usize>; 2] {
    let has_sequence = ["gpt", "llama", "decoder", "bert", "moe", "t5"].iter().any(|family| model.contains(family));
    let has_mlp = !(model.contains("moe") && !model.contains("moe_every") && !model.contains("dense_ffn"));
    let cuts_mlp = has_mlp && precision != "fp8";
    [loss.filter(|_| has_sequence), mlp.filter(|_| has_sequence && cuts_mlp)]
}

/// Whether a model can train in fp8: its layers' products have sizes that are multiples of sixteen.
/// With latent attention they do not.
pub fn takes_eight_bits(model: &str) -> bool {
    (model.contains("hidden: 16") && !model.contains("query_rank: 12")) || model.contains("mlp")
}

/// The models, each with its number of blocks.
pub const MODELS: [(&str, usize); 21] = [
    ("{family: mlp, widths: [64, 32, 48, 16, 10]}", 4),
    ("{family: resnet, depth: 18, stem: small, image: 16, channels: 1, classes: 10, width: 4}", 10),
    ("{family: gpt, layers: 2, hidden: 16, heads: 4, vocab: 128, sequence: 12, tied_embeddings: true}", 4),
    ("{family: gpt, layers: 3, hidden: 24, heads: 2, vocab: 130, sequence: 8, tied_embeddings: false}", 5),
    ("{family: llama, layers: 2, hidden: 16, heads: 4, kv_heads: 2, ffn: 24, vocab: 130, sequence: 8}", 4),
    ("{family: bert, layers: 2, hidden: 16, heads: 2, vocab: 128, sequence: 12}", 4),
    (
        "{family: vit, layers: 2, hidden: 16, heads: 2, patch: 4, image: 8, channels: 1, classes: 10, dropout: 0.1, attention_dropout: 0.1}",
        4,
    ),
    ("{family: vgg, depth: 11, stem: small, image: 32, channels: 1, classes: 10, width: 4}", 6),
    ("{family: vgg, depth: 11, batch_norm: true, stem: small, image: 32, channels: 1, classes: 10, width: 4}", 6),
    // The capacity factor gives every expert slots for all tokens. No token is dropped, however the
    // batch is divided.
    (
        "{family: moe, layers: 2, hidden: 16, heads: 4, kv_heads: 2, ffn: 24, vocab: 128, sequence: 8, experts: 4, top_k: 2, \
         capacity_factor: 2.0}",
        4,
    ),
    (
        "{family: moe, layers: 3, hidden: 24, heads: 2, ffn: 16, vocab: 128, sequence: 8, experts: 6, top_k: 1, moe_every: 2, \
         capacity_factor: 6.0}",
        5,
    ),
    ("{family: llama, layers: 2, hidden: 12, heads: 4, kv_heads: 2, head_dimension: 8, ffn: 24, vocab: 128, sequence: 8}", 4),
    (
        "{family: moe, layers: 3, hidden: 16, heads: 4, head_dimension: 6, query_rank: 12, key_value_rank: 8, ffn: 8, dense_ffn: 24, \
         shared_ffn: 8, dense_layers: 1, vocab: 128, sequence: 8, experts: 4, top_k: 2, capacity_factor: 2.0}",
        5,
    ),
    (
        "{family: lstm-seq2seq, layers: 2, hidden: 24, embedding: 16, source_vocab: 60, target_vocab: 40, source_sequence: 7, \
         target_sequence: 5}",
        7,
    ),
    ("{family: t5, layers: 1, hidden: 16, heads: 2, ffn: 32, vocab: 64, source_sequence: 10, target_sequence: 6}", 5),
    (
        "{family: t5, layers: 2, hidden: 16, heads: 4, head_dimension: 8, ffn: 24, vocab: 64, source_sequence: 6, target_sequence: 6, \
         gated: true, tied_embeddings: false, dropout: 0.1, attention_dropout: 0.1}",
        7,
    ),
    (
        "{family: gpt, layers: 2, hidden: 16, heads: 4, vocab: 128, sequence: 8, tied_embeddings: true, dropout: 0.2, attention_dropout: 0.3}",
        4,
    ),
    ("{family: bert, layers: 2, hidden: 16, heads: 2, vocab: 128, sequence: 12, dropout: 0.2, attention_dropout: 0.3}", 4),
    (
        "{family: decoder, layers: 2, hidden: 16, heads: 4, kv_heads: 2, ffn: 24, vocab: 130, sequence: 8, query_key_norm: true, \
         output_norms: true, feed_forward: gated_gelu_tanh, tied_embeddings: true, norm_epsilon: 1e-6}",
        4,
    ),
    (
        "{family: decoder, layers: 2, hidden: 16, heads: 2, ffn: 24, vocab: 128, sequence: 8, norm: layer, rotary_dimension: 4, \
         feed_forward: gelu, qkv_bias: true, attention_output_bias: true, ffn_bias: true, head_bias: true, parallel_block: own_norms}",
        4,
    ),
    (
        "{family: decoder, layers: 2, hidden: 16, heads: 2, ffn: 24, vocab: 128, sequence: 8, norm: layer, positions: learned, \
         position_rows: 14, first_position: 2, feed_forward: relu, qkv_bias: true, embedding_norm: true, parallel_block: one_norm, \
         dropout: 0.1, attention_dropout: 0.1}",
        4,
    ),
];

/// Divides `blocks` among `runs` chunks, pseudo-randomly by the seed. For odd seeds `None`: the
/// compiler chooses.
pub fn cuts(blocks: usize, runs: usize, seed: u64) -> Option<Vec<usize>> {
    let mut cuts = vec![1; runs];
    let mut state = seed;
    for _ in runs..blocks {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        cuts[(state >> 33) as usize % runs] += 1;
    }
    seed.is_multiple_of(2).then_some(cuts)
}

/// The name of every schedule, with each number of chunks per stage up to three for which it
/// differs from the other schedules.
fn schedules() -> Vec<(&'static str, usize)> {
    let is_own_order = |schedule: Schedule, chunks| schedule.allows(chunks) && (chunks > 1 || !schedule.allows_any_chunks());
    let with_chunks = |schedule: Schedule| {
        (1..=3).filter(move |&chunks| is_own_order(schedule, chunks)).map(move |chunks| (schedule.name(), chunks))
    };
    Schedule::ALL.into_iter().flat_map(with_chunks).collect()
}

prop_compose! {
    pub fn cases()(
        (model, blocks) in proptest::sample::select(MODELS.to_vec()),
        (data, tensor, pipeline, context) in proptest::sample::select(vec![
            (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (3, 1, 1, 1), (1, 1, 3, 1),
            (1, 1, 1, 1), (2, 2, 2, 1), (4, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 4, 1),
            (1, 1, 1, 3), (1, 1, 1, 4),
        ]),
        context_method in proptest::sample::select(vec!["gather", "ring", "all_to_all"]),
        context_order in proptest::sample::select(vec!["zigzag", "zigzag", "contiguous"]),
        micro_batch in proptest::sample::select(vec![2usize, 4]),
        micro_batches in 1usize..7,
        schedule in proptest::sample::select(schedules()),
        (recompute, offload, chunks) in (
            proptest::sample::select(vec![
                "none", "full", "selective", "{full_layers: 1}", "{all_but: [attention, odd_products, sums]}", "{all_but: [products]}",
                "{all_but: [projections]}",
            ]),
            proptest::sample::select(vec!["none", "none", "optimizer", "activations", "both"]),
            proptest::sample::select(vec![[None; 2], [None; 2], [Some(3), None], [None, Some(5)], [Some(4), Some(4)]]),
        ),
        (optimizer, recipe) in (
            proptest::sample::select(vec!["sgd", "adamw", "lamb", "muon"]),
            prop_oneof![3 => Just(""), 2 => proptest::sample::select(RECIPES.to_vec()), 1 => Just(WEIGHTS)],
        ),
        bucket in proptest::sample::select(vec!["256B", "4KiB", "25MiB"]),
        (zero, hybrid) in (0usize..4, any::<bool>()),
        (sequence_parallel, clip, blocking, whole_experts) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        precision in proptest::sample::select(vec!["fp32", "bf16", "fp16", "fp8"]),
        expert in 1usize..3,
        seed in 0u64..100,
        operators in prop_oneof![Just("{}"), proptest::sample::select(OPERATORS.to_vec())],
        uneven in proptest::option::weighted(0.25, proptest::sample::select([&SHARES[..], &MESHES, &SEQUENCES].concat())),
    ) -> Case {
        let has_sequence = ["gpt", "llama", "decoder", "bert", "moe", "t5"].iter().any(|family| model.contains(family));
        let is_uneven_in_sequence = |group: &Uneven| SEQUENCES.iter().any(|other| other.text == group.text);
        // Stages that share parameters must have the same mesh.
        let shares_parameters = model.contains("bert") || model.contains("t5") || model.contains("tied_embeddings: true");
        let uneven = uneven.filter(|layout| !is_uneven_in_sequence(layout) || has_sequence);
        let uneven = uneven.filter(|layout| !(shares_parameters && layout.text.contains("stages")) && layout.pipeline <= blocks);
        // In an LSTM model the tensor axis can shard only the vocabulary.
        let uneven = uneven.filter(|layout| !(model.contains("lstm") && layout.text.contains("tensor")));
        let pipeline = uneven.map_or(pipeline, |uneven| uneven.pipeline);
        let micro_batch = uneven.map_or(micro_batch, |uneven| if uneven.parts == 1 { 8 } else { 4 });
        // Some models have fewer blocks than the schedule has chunks.
        let schedule = if pipeline * schedule.1 > blocks { ("zb-h1", 1) } else { schedule };
        let cuts = cuts(blocks, pipeline * schedule.1, seed);
        // Images have no sequence to shard.
        let context = if has_sequence { context } else { 1 };
        // The sequence must divide by the context axis. Lengths are 12, 10, 8 and 6, so all divide
        // by 2.
        let divides = context < 3 || model.contains("sequence: 12") || (context == 4 && model.contains("sequence: 8"));
        let context = if divides { context } else { 2 };
        // Whole heads for each rank of `context`: every model has an even number.
        let has_heads = context <= 2 && tensor == 1 && uneven.is_none();
        let context_method = if context_method == "all_to_all" && !has_heads { "gather" } else { context_method };
        let expert = if model.contains("moe") && data * tensor * pipeline * context <= 4 { expert } else { 1 };
        let experts = if model.contains("experts: 4") { 4 } else { 6 };
        let whole_experts = whole_experts && uneven.is_none() && model.contains("moe") && experts % (expert * tensor) == 0;
        let has_tensor = uneven.map_or(tensor > 1, |group| group.text.contains("tensor"));
        let precision = if precision == "fp8" && !takes_eight_bits(model) { "bf16" } else { precision };
        let precision = if precision == "fp16" && optimizer == "muon" { "bf16" } else { precision };
        let has_ten_classes = model.contains("classes: 10") || model.contains("mlp");
        let is_possible = match recipe {
            WEIGHTS => has_ten_classes,
            _ if recipe.contains("lora") => !["resnet", "vgg", "lstm"].iter().any(|family| model.contains(family)),
            _ => !(recipe.contains("*0*weight") && model.contains("lstm")),
        };
        let recipe = if is_possible { recipe } else { "" };
        let chunks = chunks_of(model, precision, chunks);
        let operators = if has_tensor { operators_of(model, operators) } else { "{}" };
        let chunks = if operators == "{}" { chunks } else { [None; 2] };
        Case {
            model, data, tensor, pipeline, context, context_method, context_order, expert, micro_batch, micro_batches, schedule, cuts, recompute, offload, chunks, optimizer, bucket,
            zero, hybrid, sequence_parallel, clip, recipe, blocking, weaves: seed.is_multiple_of(3), whole_experts, operators, precision, seed, uneven,
        }
    }
}
