//! Model families other than image models and decoder-only language models. Each must learn, and a
//! mixture of experts must report the tokens that it drops.

mod common;

use common::Scratch;
use serde_json::Value;

/// A traced PyTorch step of the importer's tests.
fn traced(name: &str) -> String {
    format!("{}/models/tests/torch/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_traced_step_is_planned_and_simulated_and_not_trained() {
    let scratch = Scratch::new();
    for (name, batch) in [("resnet50", "256"), ("cnn", "64"), ("transformer", "64"), ("hybrid", "64"), ("unet", "64")] {
        let model = traced(name);
        let plan = ["plan", "--model", &model, "--topology", "dgx-a100-80g", "--global-batch", batch, "--precision", "bf16"];
        let found = scratch.json(&[&plan[..], &["-o", "plan.yaml"]].concat());
        assert!(found["predicted"]["step_seconds"].as_f64() > Some(0.0), "{name}: {found}");
        let simulated = scratch.json(&["simulate", "--plan", "plan.yaml"]);
        assert_eq!(simulated["step_seconds"], found["predicted"]["step_seconds"], "{name}");
        // Stages of a pipeline are cut between the graph's blocks.
        let staged = "global_batch: 32\nlayout: {data: 2, pipeline: 2, micro_batch: 2}\ntopology: dgx-a100-80g\n";
        let staged = scratch.file("staged.yaml", &format!("model: {model}\n{staged}"));
        let staged = scratch.json(&["simulate", "--plan", common::text(&staged)]);
        assert!(staged["step_seconds"].as_f64() > Some(0.0), "{name}: {staged}");
    }
    let plan = format!("model: {}\ntopology: local\nglobal_batch: 8\nlayout: {{data: 1}}\n", traced("mlp"));
    let trained = scratch.run(&["execute", "--plan", common::text(&scratch.file("train.yaml", &plan)), "--steps", "1"]);
    let message = String::from_utf8_lossy(&trained.stderr);
    assert!(!trained.status.success() && message.contains("a model with `family: network`"), "{message}");
    // A step whose samples meet each other has no graph of one sample.
    let text = std::fs::read_to_string(traced("mlp")).expect("it is there").replace("[[1,1],10]", "[[1,1],[1,10]]");
    let meeting = scratch.run(&["models", "show", common::text(&scratch.file("meeting.json", &text))]);
    let message = String::from_utf8_lossy(&meeting.stderr);
    assert!(message.contains("meeting.json: operator 7 (`aten.addmm` in `4`): two dimensions grow with the batch"), "{message}");
}

#[test]
fn a_small_deepseek_is_planned_with_its_prediction_module_and_not_trained() {
    const CONFIG: &str = r#"{"model_type": "deepseek_v3", "num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 8,
        "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 256, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 128, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}"#;
    let scratch = Scratch::new();
    scratch.file("config.json", CONFIG);
    let plan = ["plan", "--model", "config.json", "--topology", "dgx-a100-80g", "--global-batch", "64", "--precision", "bf16"];
    let found = scratch.json(&[&plan[..], &["-o", "plan.yaml", "--fix", "expert=4"]].concat());
    let simulated = scratch.json(&["simulate", "--plan", "plan.yaml"]);
    assert!(simulated["step_seconds"].as_f64() > Some(0.0), "{simulated}");
    assert_eq!(simulated["step_seconds"], found["predicted"]["step_seconds"]);
    // Its embedding and its head are those of the first and the last stage.
    let staged = "model: config.json\ntopology: dgx-a100-80g\nglobal_batch: 32\nlayout: {tensor: 2, context: 2, pipeline: 2, micro_batch: 2}\n";
    let staged = scratch.json(&["simulate", "--plan", common::text(&scratch.file("staged.yaml", staged))]);
    assert!(staged["step_seconds"].as_f64() > Some(0.0), "{staged}");
    let train = "model: config.json\ntopology: local\nglobal_batch: 8\nlayout: {data: 1}\n";
    let trained = scratch.run(&["execute", "--plan", common::text(&scratch.file("train.yaml", train)), "--steps", "1"]);
    let message = String::from_utf8_lossy(&trained.stderr);
    assert!(message.contains("a model with `rotary_part`, `prediction_modules`"), "{message}");
}

#[test]
fn resnet_50_as_a_traced_step_takes_the_time_of_the_librarys() {
    let scratch = Scratch::new();
    let step = |model: &str| {
        let rest = "global_batch: 64\nlayout: {data: 8, micro_batch: 8}\ntopology: dgx-a100-80g\nprecision: bf16\n";
        let plan = scratch.file("plan.yaml", &format!("model: {model}\n{rest}"));
        scratch.json(&["simulate", "--plan", common::text(&plan)])["step_seconds"].as_f64().expect("a time")
    };
    let (imported, library) = (step(&traced("resnet50")), step("resnet50"));
    assert!((imported / library - 1.0).abs() < 0.01, "{imported} s, and {library} s");
}

/// Trains on one rank. Returns the losses and the lines of the metrics file.
fn train(model: &str, steps: usize) -> (Vec<f64>, Vec<Value>) {
    let scratch = Scratch::new();
    let plan = format!(
        "model: {model}\ntopology: local\nglobal_batch: 8\noptimizer: adamw\ntraining: {{learning_rate: 0.01}}\n\
         layout: {{micro_batch: 4}}\n"
    );
    let run = scratch.path("run");
    let trained = scratch.train(&plan, steps, 3, &["--data", "synthetic", "--run", common::text(&run)]);
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).expect("a run keeps its metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str(line).expect("a line is a document")).collect();
    (trained.losses, lines)
}

#[test]
fn mixtures_of_experts_lstms_and_t5_reduce_their_loss() {
    for model in [
        "{family: moe, layers: 2, hidden: 32, heads: 4, ffn: 32, vocab: 64, sequence: 16, experts: 4, top_k: 2}",
        "{family: lstm-seq2seq, layers: 2, hidden: 48, source_vocab: 12, target_vocab: 100, source_sequence: 3, target_sequence: 4}",
        "{family: t5, layers: 2, hidden: 32, heads: 2, ffn: 64, vocab: 100, source_sequence: 4, target_sequence: 4}",
        "{family: t5, layers: 1, hidden: 32, heads: 4, ffn: 64, vocab: 100, source_sequence: 4, target_sequence: 4, gated: true, \
         tied_embeddings: false}",
    ] {
        let (losses, metrics) = train(model, 60);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        let (first, last) = (losses[0], mean(&losses[50..]));
        assert!(last < 0.9 * first, "{model}: the loss goes from {first} to {last}");
        assert_eq!(metrics[0].get("dropped_tokens").is_some(), model.contains("moe"), "{model}");
    }
}

#[test]
fn tokens_beyond_the_capacity_are_dropped_and_counted() {
    let model = |factor: &str| {
        format!(
            "{{family: moe, layers: 2, hidden: 16, heads: 2, ffn: 16, vocab: 64, sequence: 16, experts: 4, top_k: 2, \
             capacity_factor: {factor}}}"
        )
    };
    let dropped = |factor: &str| -> Vec<u64> {
        let (_, metrics) = train(&model(factor), 3);
        metrics.iter().map(|line| line["dropped_tokens"].as_u64().expect("a count")).collect()
    };
    assert_eq!(dropped("2.0"), [0, 0, 0], "every expert has slots for all tokens");
    // Each expert has one slot per sample. In each of the two layers, 4 of a sample's 32 choices
    // find a slot, provided that every expert is chosen at least once.
    assert_eq!(dropped("0.125"), [2 * 8 * (32 - 4); 3]);
}
