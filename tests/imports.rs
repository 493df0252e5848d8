//! Files of other tools on the command line: what options do to them, and forms that work in one
//! place and must work in another.

mod common;

use common::{Scratch, text};

/// Runs a command that must be refused. Returns its standard error.
#[track_caller]
fn refused(scratch: &Scratch, arguments: &[&str]) -> String {
    let output = scratch.run(arguments);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
    message
}

const MEGATRON: &str = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 100 \
                        --micro-batch-size 1 --bf16";

#[test]
fn an_option_of_import_has_an_effect_or_is_refused() {
    let scratch = Scratch::new();
    scratch.file("ds.json", r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}"#);
    scratch.file("megatron.args", MEGATRON);
    let plan = |file: &str, form: &str, more: &[&str]| {
        let base = ["import", form, file, "--topology", "8xa100-80g"];
        scratch.json(&[&base[..], more].concat())["plan"].as_str().expect("a plan").to_string()
    };
    let ds = |more: &[&str]| plan("ds.json", "deepspeed-json", &[&["--model", "llama3-8b"], more].concat());
    assert!(ds(&[]).contains("model: llama3-8b\n") && ds(&[]).contains("micro_batch: 8\n"));
    assert!(ds(&["--sequence", "2048"]).contains("sequence: 2048\n"));
    assert!(ds(&["--micro-batch", "3"]).contains("micro_batch: 3\n"));
    let base = ["import", "megatron-args", "megatron.args", "--topology", "8xa100-80g"];
    for (more, expected) in [
        (["--model", "llama3-8b"], "the file states its model, and it is not `llama3-8b`"),
        (["--micro-batch", "4"], "the file states its micro-batch, 1"),
        (["--device", "h20"], "`--device` has no effect on an import of `megatron-args`"),
        (["--as", "llama"], "`--as` has no effect"),
    ] {
        let error = refused(&scratch, &[&base[..], &more].concat());
        assert!(error.contains(expected) && error.contains("hint: "), "{more:?}: {error}");
    }
    // A file of another kind is named.
    let error = refused(&scratch, &["import", "hf-trainer", "ds.json", "--model", "gpt2", "--topology", "8xa100-80g"]);
    assert!(error.contains("this is DeepSpeed's configuration"), "{error}");
}

#[test]
fn trainer_arguments_follow_the_file_that_they_name() {
    let scratch = Scratch::new();
    scratch.file(
        "zero3.json",
        r#"{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}"#,
    );
    scratch.file("there.json", r#"{"per_device_train_batch_size": 4, "bf16": true, "deepspeed": "zero3.json"}"#);
    scratch.file("missing.json", r#"{"per_device_train_batch_size": 4, "bf16": true, "deepspeed": "zero9.json"}"#);
    let import = |file| scratch.json(&["import", "hf-trainer", file, "--model", "gpt2", "--topology", "8xh100"]);
    let there = import("there.json");
    assert!(there["plan"].as_str().expect("a plan").contains("zero: 3\n"));
    assert_eq!(there["assumed"].as_array().map(Vec::len), Some(2), "length and stack: {}", there["assumed"]);
    // Its path may be relative to a folder above.
    std::fs::create_dir_all(scratch.path("jobs/full")).expect("a folder");
    scratch.file("jobs/full/nested.yaml", "per_device_train_batch_size: 4\nbf16: true\ndeepspeed: zero3.json\n");
    assert!(import("jobs/full/nested.yaml")["plan"].as_str().expect("a plan").contains("zero: 3\n"));
    let missing = import("missing.json")["assumed"].to_string();
    assert!(missing.contains("zero9.json") && missing.contains("not followed"), "{missing}");
}

#[test]
fn what_a_file_names_is_found_and_what_devices_lack_is_refused() {
    let scratch = Scratch::new();
    scratch.file("lora.yaml", "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\nlora_r: 8\nper_device_train_batch_size: 1\nmax_length: 2048\nbf16: true\noutput_dir: x\nattn_implementation: flash_attention_2\n");
    let answer = scratch.json(&["import", "hf-trainer", "lora.yaml", "--topology", "8xa100-80g", "-o", "plan.yaml"]);
    let plan = answer["plan"].as_str().expect("a plan");
    assert!(plan.contains("rank: 8\n") && plan.contains("stack: trl\n") && plan.contains("attention: flash\n"), "{plan}");
    assert!(answer["assumed"].to_string().contains("`model` qwen3-8b"), "{}", answer["assumed"]);
    scratch.json(&["simulate", "--plan", "plan.yaml"]);
    // A stack without operators of the job has one kernel of attention.
    let mixture = ["import", "hf-trainer", "lora.yaml", "--topology", "8xa100-80g", "--model", "mixtral-8x7b"];
    scratch.file("tensor.yaml", "bf16: true\noutput_dir: x\nfsdp: shard_grad_op\nattn_implementation: flash_attention_2\n");
    let other = scratch.json(&["import", "hf-trainer", "tensor.yaml", "--topology", "8xa100-80g", "--model", "llama3-8b"]);
    assert!(!other["plan"].as_str().expect("a plan").contains("attention:"), "{}", other["plan"]);
    assert!(scratch.run(&mixture).status.success());
    scratch.file("gpt.yaml", "use_peft: true\nbf16: true\noutput_dir: x\n");
    let error = refused(&scratch, &["import", "hf-trainer", "gpt.yaml", "--topology", "8xa100-80g", "--model", "gpt2"]);
    assert!(error.contains("`*q_proj` matches no linear layer"), "{error}");
    scratch.file("fp8.yaml", "distributed_type: MULTI_GPU\nmixed_precision: fp8\n");
    let error = refused(&scratch, &["import", "accelerate", "fp8.yaml", "--topology", "8xa100-80g", "--model", "gpt2"]);
    assert!(error.contains("no fp8 rate is known"), "{error}");
    scratch.file("args", &MEGATRON.replace("--vocab-size 100 ", ""));
    let args = ["import", "megatron-args", "args", "--topology", "8xa100-80g"];
    assert!(refused(&scratch, &args).contains("`--vocab`"));
    let said = scratch.json(&[&args[..], &["--vocab", "500"]].concat());
    assert!(said["plan"].as_str().expect("a plan").contains("vocab: 500\n"), "{}", said["plan"]);
}

#[test]
fn a_model_with_a_base_and_a_said_topology_stand_in_a_plan() {
    let scratch = Scratch::new();
    let rest = "layout: {data: 8, micro_batch: 1, zero: 3}, global_batch: 8, precision: bf16, optimizer: adamw, stack: fsdp2}";
    let one = scratch.file("one.yaml", &format!("{{model: {{base: llama3-8b, sequence: 2048}}, topology: 8xh100, {rest}"));
    scratch.file("model.yaml", "{base: llama3-8b, sequence: 2048}");
    let other = scratch.file("other.yaml", &format!("{{model: model.yaml, topology: dgx-h100, {rest}"));
    let [one, other] = [one, other].map(|plan| scratch.json(&["simulate", "--plan", text(&plan)]));
    assert_eq!(one["step_seconds"], other["step_seconds"]);
    let wrong = scratch.file("wrong.yaml", &format!("{{model: {{base: llama9}}, topology: 8xh100, {rest}"));
    let error = refused(&scratch, &["simulate", "--plan", text(&wrong)]);
    assert!(error.contains("llama9") && error.contains("llama3-8b"), "{error}");
}

#[test]
fn a_plan_that_its_stack_refuses_is_neither_simulated_nor_exported() {
    let scratch = Scratch::new();
    let model = "{family: decoder, layers: 4, hidden: 768, heads: 6, kv_heads: 2, ffn: 1024, vocab: 500, sequence: 512}";
    for (stack, tensor, expected) in [("megatron-core", 4, "6 attention heads"), ("torchtitan", 6, "2 key and value heads")] {
        let plan = format!(
            "{{model: {model}, topology: dgx-h100, layout: {{tensor: {tensor}, micro_batch: 1}}, global_batch: 4, precision: bf16, stack: {stack}}}"
        );
        let plan = scratch.file("plan.yaml", &plan);
        for command in
            [&["simulate", "--plan", text(&plan)][..], &["export", "--plan", text(&plan), "--to", "megatron", "-o", "job"]]
        {
            let error = refused(&scratch, command);
            assert!(error.contains("refuses this plan") && error.contains(expected), "{command:?}: {error}");
        }
    }
}
