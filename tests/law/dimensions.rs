//! Cases that random drawing rarely hits: mixtures of experts, ring attention, sharding of single
//! operators, dropout and fp16, each in several layouts.

use super::case::Case;
use super::check;
use super::common::Scratch;
use super::random::{MODELS, OPERATORS, RECIPES, WEIGHTS, chunks_of, operators_of};

#[test]
fn experts_may_be_spread_over_the_tensor_and_context_axes() {
    let mixtures = MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains("moe"));
    for model in mixtures {
        for (tensor, context, expert, sequence_parallel, whole_experts) in [
            (2, 1, 1, false, true),
            (2, 1, 1, true, true),
            (2, 1, 1, true, false),
            (1, 2, 1, false, false),
            (1, 2, 2, false, false),
            (2, 2, 1, true, true),
        ] {
            check(&Case {
                tensor,
                context,
                expert,
                zero: 1,
                sequence_parallel,
                clip: true,
                whole_experts,
                seed: 7,
                ..Case::usual(model)
            });
        }
    }
}

#[test]
fn every_recipe_trains_as_on_one_rank() {
    let layouts =
        [(2, 1, 1, 2), (1, 2, 1, 0), (2, 1, 2, 1), (2, 2, 1, 3), (1, 1, 3, 0), (4, 1, 1, 3), (2, 2, 1, 1), (2, 1, 1, 0)];
    for (index, recipe) in RECIPES.into_iter().chain([WEIGHTS]).enumerate() {
        let (data, tensor, pipeline, zero) = layouts[index];
        // A perceptron, which has ten classes, and a language model.
        let models = if recipe == WEIGHTS { vec![MODELS[0].0] } else { vec![MODELS[0].0, MODELS[3].0] };
        for (number, model) in models.into_iter().enumerate() {
            let optimizer = ["lamb", "sgd", "adamw", "muon"][(index + number) % 4];
            let precision = ["fp32", "fp32", "bf16", "fp16"][(index + 2 * number) % 4];
            let precision = if optimizer == "muon" && precision == "fp16" { "bf16" } else { precision };
            let clip = index % 2 == 0;
            check(&Case { data, tensor, pipeline, zero, optimizer, precision, clip, recipe, ..Case::usual(model) });
        }
    }
}

#[test]
fn decoders_of_every_kind_train_as_on_one_rank() {
    let decoders = MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains("family: decoder"));
    for (index, model) in decoders.enumerate() {
        for (data, tensor, pipeline, context) in [(1, 2, 1, 2), (2, 1, 2, 1)] {
            check(&Case {
                data,
                tensor,
                pipeline,
                context,
                micro_batches: 2,
                recompute: if index % 2 == 0 { "full" } else { "none" },
                zero: index,
                sequence_parallel: tensor > 1 && context == 1,
                ..Case::usual(model)
            });
        }
    }
}

#[test]
fn mixtures_and_encoder_decoders_train_as_on_one_rank() {
    let models_of =
        |family: &str| MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains(family)).collect::<Vec<_>>();
    let models = [models_of("moe"), models_of("t5"), models_of("lstm")].concat();
    assert_eq!(models.len(), 6);
    for (index, model) in models.into_iter().enumerate() {
        for (data, tensor, pipeline) in [(2, 2, 1), (1, 1, 3)] {
            check(&Case {
                data,
                tensor,
                pipeline,
                micro_batches: 3,
                recompute: match (pipeline > 1, index % 2) {
                    (true, 0) => "full",
                    (true, _) => "{full_layers_of_stages: [1, 0, 1]}",
                    (false, _) => "none",
                },
                zero: index % 3,
                ..Case::usual(model)
            });
        }
    }
}

#[test]
fn woven_passes_of_mixtures_train_as_on_one_rank() {
    let mixtures = MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains("moe"));
    for (index, model) in mixtures.enumerate() {
        for (number, (pipeline, schedule)) in
            [(2, ("zb-v", 2)), (2, ("interleaved", 2)), (1, ("1f1b", 1))].into_iter().enumerate()
        {
            check(&Case {
                pipeline,
                expert: 2,
                micro_batches: 6,
                schedule,
                recompute: if number == index { "full" } else { "none" },
                zero: (index + number) % 3,
                clip: number == 0,
                weaves: true,
                ..Case::usual(model)
            });
        }
    }
}

#[test]
fn ring_attention_trains_as_on_one_rank() {
    // Causal and bidirectional attention, grouped queries, and models without ring attention, which
    // gather.
    for (index, (model, data, context)) in [
        (MODELS[2].0, 1, 3),
        (MODELS[4].0, 1, 4),
        (MODELS[5].0, 1, 3),
        (MODELS[9].0, 2, 2),
        (MODELS[12].0, 1, 2),
        (MODELS[2].0, 1, 4),
    ]
    .into_iter()
    .enumerate()
    {
        check(&Case {
            data,
            context,
            context_method: "ring",
            precision: ["fp32", "fp32", "fp32", "fp32", "fp32", "bf16"][index],
            recompute: if index % 2 == 1 { "full" } else { "none" },
            ..Case::usual(model)
        });
    }
}

/// Ranks of `context` hold chunks from both ends of a causal sequence, or one part in order:
/// learned and rotary positions, grouped queries, dropout, and a `tensor` axis that cuts the same
/// sequence.
#[test]
fn both_orders_of_a_sequence_train_as_on_one_rank() {
    let dropout =
        MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains("family: gpt") && model.contains("dropout"));
    let models = [MODELS[2].0, MODELS[4].0, MODELS[9].0, MODELS[18].0].into_iter().chain(dropout);
    for (index, model) in models.enumerate() {
        let longest = if model.contains("sequence: 12") { 3 } else { 4 };
        for (number, (tensor, pipeline, context)) in [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, longest)].into_iter().enumerate() {
            check(&Case {
                tensor,
                pipeline,
                context,
                context_method: ["gather", "ring"][(index + number) % 2],
                context_order: if number == 0 && index % 2 == 0 { "contiguous" } else { "zigzag" },
                sequence_parallel: tensor > 1,
                precision: if number == 3 && index % 2 == 1 { "bf16" } else { "fp32" },
                recompute: ["none", "selective", "full"][index % 3],
                ..Case::usual(model)
            });
        }
    }
}

/// Ranks of `context` exchange parts of a sequence for whole heads: causal and bidirectional
/// attention, grouped queries, dropout, packed projections, attention with relative positions,
/// which gathers, and experts.
#[test]
fn attention_by_heads_trains_as_on_one_rank() {
    let dropout = MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains("dropout: 0.2"));
    let models = [2, 4, 5, 9, 12, 14, 18].map(|index| MODELS[index].0);
    for (index, model) in models.into_iter().chain(dropout).enumerate() {
        let is_long = model.contains("family: gpt") && model.contains("heads: 4");
        check(&Case {
            data: if index % 3 == 0 { 2 } else { 1 },
            pipeline: if index % 3 == 1 { 2 } else { 1 },
            context: if is_long && index % 3 == 2 { 4 } else { 2 },
            context_method: "all_to_all",
            zero: index % 4,
            recompute: ["none", "selective", "full"][index % 3],
            precision: if index == 3 { "bf16" } else { "fp32" },
            ..Case::usual(model)
        });
    }
}

/// The loss and MLPs run a few positions at a time: every model with a vocabulary, sharded over
/// every axis, with each policy of recomputation, schedules that split the backward pass, and
/// chunks that do not divide the positions.
#[test]
fn chunks_of_losses_and_mlps_train_as_on_one_rank() {
    for (index, (model, _)) in MODELS.into_iter().enumerate() {
        let layouts = [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 2, 2, 1)];
        for (number, (data, tensor, pipeline, context)) in layouts.into_iter().enumerate() {
            let turn = index + number;
            let precision = ["fp32", "fp32", "bf16"][turn % 3];
            let chunks = chunks_of(model, precision, [Some(1 + turn % 5), Some(5 - turn % 5)]);
            if chunks == [None; 2] || (number > 0 && index % 3 == 1) {
                continue;
            }
            check(&Case {
                data,
                tensor,
                pipeline,
                context,
                chunks,
                precision,
                micro_batches: 3,
                schedule: (["1f1b", "zb-h1"][turn % 2], 1),
                recompute: ["none", "full", "selective", "{all_but: [products]}"][turn % 4],
                offload: ["none", "activations"][turn / 2 % 2],
                zero: if pipeline == 1 { turn % 4 } else { 0 },
                sequence_parallel: tensor > 1 && turn % 2 == 0,
                recipe: ["", ", lora: {rank: 4, alpha: 8}", ", frozen: [\"*0*\"]"][turn % 3],
                ..Case::usual(model)
            });
        }
    }
}

/// Every model, in combination with data parallelism, stages, recomputation and ZeRO.
#[test]
fn sharding_single_operators_trains_as_on_one_rank() {
    let every = std::env::var("FORETELL_LAW_CASES").is_ok();
    for (index, (model, _)) in MODELS.into_iter().enumerate() {
        for (number, operators) in OPERATORS.into_iter().enumerate() {
            let (data, tensor, pipeline) = [(1, 2, 1), (2, 2, 1), (1, 2, 2), (1, 4, 1)][(index + number) % 4];
            let operators = operators_of(model, operators);
            let is_first = number == 0 || operators != OPERATORS[0];
            if !is_first || !(every || (index + number) % 4 == 0) {
                continue;
            }
            check(&Case {
                data,
                tensor,
                pipeline,
                precision: if (index + number) % 8 == 7 { "bf16" } else { "fp32" },
                micro_batch: 8,
                recompute: if number % 3 == 1 { "full" } else { "none" },
                zero: if data > 1 { 1 + index % 3 } else { 0 },
                sequence_parallel: (index + number) % 16 == 5,
                clip: number % 2 == 0,
                operators,
                ..Case::usual(model)
            });
        }
    }
}

#[test]
fn dropout_drops_the_same_elements_in_every_layout() {
    let models: Vec<&str> = MODELS.into_iter().map(|(model, _)| model).filter(|model| model.contains("dropout: 0.2")).collect();
    assert_eq!(models.len(), 2);
    for (index, model) in models.into_iter().enumerate() {
        // The last three shard the sequence along two axes and the attention heads along one.
        for (data, tensor, pipeline, context, context_method) in [
            (2, 2, 1, 1, "gather"),
            (2, 1, 2, 1, "gather"),
            (1, 1, 1, 2, "gather"),
            (1, 1, 1, 4, "ring"),
            (1, 2, 1, 2, "gather"),
            (1, 2, 1, 2, "ring"),
            (1, 2, 2, 2, "ring"),
        ] {
            check(&Case {
                data,
                tensor,
                pipeline,
                context,
                context_method,
                precision: if data == 2 && tensor == 1 { "bf16" } else { "fp32" },
                recompute: if pipeline > 1 { "full" } else { ["none", "selective"][index] },
                zero: if data > 1 { 1 + 2 * index } else { 0 },
                sequence_parallel: tensor > 1,
                ..Case::usual(model)
            });
        }
    }
}

/// All ranks agree on whether a gradient overflowed. A loss scale that is too large is therefore
/// halved equally often in every layout, and the same steps are skipped.
#[test]
fn fp16_skips_the_same_steps_in_every_layout_and_then_learns() {
    let scratch = Scratch::new();
    let plan = |layout: &str| {
        format!(
            "model: {}\ntopology: local\nglobal_batch: 8\nprecision: fp16\noptimizer: adamw\n\
             training: {{learning_rate: 0.01, loss_scale: {{initial: 16777216, growth_interval: 4}}}}\nlayout: {{{layout}}}\n",
            MODELS[2].0
        )
    };
    let run = |layout: &str, folder: &str| {
        let file = scratch.file("fp16.yaml", &plan(layout)).display().to_string();
        scratch.json(&[
            "execute",
            "--plan",
            &file,
            "--steps",
            "30",
            "--oversubscribe",
            "--no-evaluation",
            "--data",
            "synthetic",
            "--run",
            folder,
        ]);
        let metrics = std::fs::read_to_string(scratch.path(folder).join("metrics.jsonl")).expect("the run wrote its metrics");
        let number = |line: &serde_json::Value, name: &str| line[name].as_f64().unwrap_or(f64::NAN);
        let lines = metrics.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a line of JSON"));
        lines.map(|line| ["loss", "skipped_steps", "loss_scale"].map(|name| number(&line, name))).collect::<Vec<_>>()
    };
    let one = run("micro_batch: 8", "one");
    let [first, last] = [one[0], one[one.len() - 1]];
    assert!(last[1] >= 1.0, "a scale of 2^24 must overflow: {one:?}");
    assert!(last[2] < 16_777_216.0, "the loss scale must be halved: {one:?}");
    assert!(one.windows(2).any(|pair| pair[1][2] == 2.0 * pair[0][2]), "a streak of good steps must double the scale: {one:?}");
    assert!(last[0] < first[0] - 0.3, "the model must learn: {one:?}");
    let skipped_at_first = |lines: &[[f64; 3]]| lines.iter().take(8).map(|line| line[1]).collect::<Vec<_>>();
    let layouts =
        ["data: 2, micro_batch: 4, zero: 3", "tensor: 2, micro_batch: 8", "pipeline: 2, micro_batch: 2, schedule: zb-h1"];
    for (number, layout) in layouts.into_iter().enumerate() {
        let many = run(layout, &number.to_string());
        assert_eq!(skipped_at_first(&many), skipped_at_first(&one), "{layout}");
    }
}

#[test]
fn whole_matrices_of_muon_train_as_on_one_rank() {
    let mixture = MODELS.into_iter().map(|(model, _)| model).find(|model| model.contains("moe")).expect("it is listed");
    for (index, model) in [MODELS[0].0, MODELS[2].0, MODELS[3].0, mixture].into_iter().enumerate() {
        for (number, (data, tensor, pipeline, zero)) in
            [(4, 1, 1, 2), (1, 2, 1, 0), (2, 2, 1, 3), (2, 2, 2, 1)].into_iter().enumerate()
        {
            check(&Case {
                data,
                tensor,
                pipeline,
                zero,
                expert: if model == mixture && number == 0 { 2 } else { 1 },
                optimizer: "muon",
                clip: index % 2 == number % 2,
                ..Case::usual(model)
            });
        }
    }
}
