//! Fine-tuning as users ask about it: whether it fits, what would, and a table of both.

mod common;

use common::{Scratch, text};
use serde_json::Value;

const JOB: [&str; 7] = ["plan", "--model", "llama3-8b", "--topology", "rtx4090-8", "--sequence", "2048"];

fn planned(scratch: &Scratch, more: &[&str]) -> Value {
    scratch.json(&[&JOB[..], more].concat())
}

#[test]
fn adapters_fit_where_all_parameters_do_not_and_each_offered_change_does() {
    let scratch = Scratch::new();
    scratch.file("short.yaml", "base: llama3-8b\nlayers: 4\n");
    let job = [
        "--model",
        "short.yaml",
        "--topology",
        "rtx4090-8",
        "--sequence",
        "2048",
        "--global-batch",
        "64",
        "--memory-limit",
        "9GB",
    ];
    let output = scratch.run(&[&["plan"], &job[..], &["--method", "full", "--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    let failure: Value = serde_json::from_slice(&output.stdout).expect("one document");
    let hint = failure["error"]["hint"].as_str().expect("a hint").to_owned();
    let offered: Vec<&str> = hint.split('`').skip(1).step_by(2).collect();
    assert!(offered.iter().any(|change| change.contains("--method lora")), "{hint}");
    for change in offered {
        let method = if change.contains("--method") { Vec::new() } else { vec!["--method", "full"] };
        let more: Vec<&str> = change.split(' ').chain(method).collect();
        // Changes replace what the job says: an option may be given once.
        let stated: Vec<&str> = job.chunks(2).filter(|pair| !more.contains(&pair[0])).flatten().copied().collect();
        let answer = scratch.json(&[&["plan"][..], &stated, &more].concat());
        assert_eq!(answer["predicted"]["fits"], true, "{change}");
    }
}

#[test]
fn what_fix_holds_is_offered_otherwise_and_one_node_is_enough() {
    let scratch = Scratch::new();
    let hint = |more: &[&str]| {
        let job = ["plan", "--model", "llama3-8b", "--global-batch", "16", "--json"];
        let output = scratch.run(&[&job[..], more].concat());
        let failure: Value = serde_json::from_slice(&output.stdout).expect("one document");
        failure["error"]["hint"].as_str().expect("a hint").to_owned()
    };
    let fixed = ["--topology", "8xl40", "--method", "lora", "--sequence", "4096"];
    let offered = hint(&[&fixed[..], &["--fix", "zero=0,micro_batch=2,recompute=none,data=8"]].concat());
    assert!(offered.contains("--fix zero=3,recompute=full") || offered.contains("--fix zero=3`"), "{offered}");
    // A second node has no network of its own here, which is no answer to one that is too small.
    let alone = hint(&["--topology", "1xt4", "--precision", "fp16", "--method", "full", "--sequence", "1024"]);
    assert!(alone.contains("it fits with"), "{alone}");
    assert!(alone.matches("--sequence").count() <= 1, "{alone}");
}

#[test]
fn preferences_have_frozen_weights_of_four_bits_with_adapters_alone() {
    let scratch = Scratch::new();
    let memory = |more: &[&str]| {
        let job = ["plan", "--model", "llama3-8b", "--topology", "dgx-a100-80g", "--sequence", "2048", "--global-batch", "16"];
        let answer =
            scratch.json(&[&job[..], &["--top", "1", "--fix", "data=8,micro_batch=1,zero=0,recompute=full"], more].concat());
        answer["predicted"]["peak_memory_bytes"][0].as_u64().expect("bytes")
    };
    let dpo = ["--stack", "trl", "--method", "dpo", "--adapter", "rank=16"];
    let [whole, quantised] = [memory(&dpo), memory(&[&dpo[..], &["--base-bits", "4"]].concat())];
    assert!(quantised + (2 << 30) < whole, "{quantised} {whole}");
    for wrong in [&["--method", "full", "--base-bits", "4"][..], &["--method", "lora", "--base-bits", "2"]] {
        assert_eq!(scratch.run(&[&JOB[..], wrong].concat()).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_plan_of_adapters_says_what_fits_and_simulates_to_the_same() {
    let scratch = Scratch::new();
    let answer = planned(&scratch, &["--method", "qlora", "--global-batch", "16", "-o", "best.yaml"]);
    let predicted = &answer["predicted"];
    assert!(predicted["chance_of_running_out"].as_f64().is_some_and(|chance| chance < 0.5), "{predicted}");
    assert!(predicted["memory_peak"].as_str().is_some_and(|peak| peak.contains("allocated")), "{predicted}");
    assert_eq!(answer["plan"]["stack"], "hf-trainer");
    assert_eq!(answer["plan"]["workload"]["base_bits"], 4);
    let simulated = scratch.json(&["simulate", "--plan", "best.yaml"]);
    for field in ["step_seconds", "peak_memory_bytes", "tokens_per_second"] {
        assert_eq!(simulated[field], predicted[field], "{field}");
    }
}

#[test]
fn a_table_has_a_cell_for_each_job_and_longer_sequences_need_more() {
    let scratch = Scratch::new();
    let job = [
        "plan",
        "--model",
        "llama3-8b",
        "--topology",
        "rtx4090-8",
        "--global-batch",
        "8",
        "--fix",
        "data=8,micro_batch=1,recompute=full,zero=0",
    ];
    let answer = scratch.json(&[&job[..], &["--table", "context,method"]].concat());
    let cells = answer["cells"].as_array().expect("a list");
    assert_eq!(cells.len(), 9 * 3);
    let of_lora: Vec<u64> =
        cells.iter().filter(|cell| cell["column"] == "lora").filter_map(|cell| cell["memory_bytes"].as_u64()).collect();
    assert!(of_lora.len() == 9 && of_lora.windows(2).all(|pair| pair[0] <= pair[1]), "{of_lora:?}");
    assert!(cells.iter().any(|cell| cell["fits"] == true) && cells.iter().any(|cell| cell["fits"] == false));
}

#[test]
fn what_only_operator_tables_know_is_refused_elsewhere() {
    let scratch = Scratch::new();
    for more in [
        &["--method", "qlora", "--stack", "megatron-core"][..],
        &["--attention", "eager", "--stack", "fsdp"],
        &["--adapter", "rank=8"],
        // Not traced together: a profile would forget the four bits.
        &["--method", "qlora", "--attention", "eager"],
        &["--method", "lora", "--fix", "tensor=2"],
        &["--method", "lora", "--adapter", "size=8"],
    ] {
        let output = scratch.run(&[&JOB[..], more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("hint: "), "{more:?}: {said}");
    }
}

#[test]
fn the_least_number_of_devices_fits_and_half_of_it_does_not() {
    let scratch = Scratch::new();
    let job = ["plan", "--model", "llama3-8b", "--sequence", "2048", "--method", "full", "--global-batch", "8"];
    let answer = scratch.json(&[&job[..], &["--gpus-needed", "a100-80g,h100"]].concat());
    for kind in answer["kinds"].as_array().expect("a list") {
        let (device, needed) = (kind["device"].as_str().expect("a name"), kind["devices"].as_u64().expect("it fits"));
        assert!(needed > 1, "{kind}");
        let fewer = scratch.run(&[&job[..], &["--topology", &format!("{}x{device}", needed / 2), "--json"]].concat());
        assert_eq!(fewer.status.code(), Some(1), "{device}");
    }
}

#[test]
fn what_disturbs_a_step_is_refused_where_operators_predict_it() {
    let scratch = Scratch::new();
    planned(&scratch, &["--method", "qlora", "--global-batch", "8", "-o", "best.yaml"]);
    for more in [["--jitter", "0.1"], ["--straggler", "0=2"]] {
        let output = scratch.run(&[&["simulate", "--plan", "best.yaml"][..], &more].concat());
        assert_eq!(output.status.code(), Some(2), "{more:?}");
    }
}

#[test]
fn preferences_take_two_sequences_a_sample_and_a_reference() {
    let scratch = Scratch::new();
    let fixed = ["--global-batch", "8", "--stack", "trl", "--fix", "data=8,micro_batch=1,recompute=full,zero=3"];
    let with = |more: &[&str]| {
        scratch
            .json(&[&["plan", "--model", "llama3-8b", "--topology", "1x8xh100", "--sequence", "2048"], &fixed[..], more].concat())
    };
    let step = |answer: &Value| answer["predicted"]["step_seconds"].as_f64().expect("a time");
    let memory = |answer: &Value| answer["predicted"]["peak_memory_bytes"][0].as_f64().expect("memory");
    let (full, dpo, orpo) = (with(&["--method", "full"]), with(&["--method", "dpo"]), with(&["--method", "orpo"]));
    let adapters = with(&["--method", "dpo", "--adapter", "rank=16", "-o", "dpo.yaml"]);
    // Forward pass, recomputation and twice that for gradients, of twice the tokens; and once more
    // forward for the reference.
    let longer = step(&dpo) / step(&orpo);
    assert!((1.1..1.4).contains(&longer), "{longer}");
    assert!(memory(&orpo) > memory(&full) && memory(&dpo) > memory(&orpo) && memory(&adapters) < memory(&orpo));
    assert_eq!(adapters["plan"]["workload"]["preference"], "dpo");
    // Without the reference a step is ORPO's, but for the loss.
    let before = with(&["--method", "dpo", "--reference", "precomputed"]);
    assert!((step(&before) / step(&orpo) - 1.0).abs() < 0.02, "{} {}", step(&before), step(&orpo));
    assert!(memory(&before) < memory(&dpo));
    // A reward model has no head over the 128,256 entries of the vocabulary, and no logits.
    let reward = with(&["--method", "reward"]);
    let shorter = step(&reward) / step(&orpo);
    assert!((0.8..0.97).contains(&shorter) && memory(&reward) < memory(&orpo), "{shorter}");
    let simulated = scratch.json(&["simulate", "--plan", "dpo.yaml"]);
    assert_eq!(simulated["step_seconds"], adapters["predicted"]["step_seconds"]);
    let refused =
        scratch.run(&["plan", "--model", "gpt2", "--topology", "1x8xh100", "--method", "dpo", "--stack", "megatron-core"]);
    assert_eq!(refused.status.code(), Some(2), "only traced operators know preferences");
}

#[test]
fn narrow_moments_take_less_memory() {
    let scratch = Scratch::new();
    let memory = |optimizer: &str| {
        let job = ["plan", "--model", "llama3-8b", "--topology", "1x8xh100", "--sequence", "2048", "--method", "full"];
        let answer = scratch.json(&[&job[..], &["--optimizer", optimizer, "--fix", "data=8,micro_batch=1,zero=3"]].concat());
        answer["predicted"]["memory_by_component"][0]["optimizer_state"].as_f64().expect("bytes")
    };
    let [usual, narrow, paged, factored] = ["adamw", "adamw-8bit", "paged-adamw-8bit", "adafactor"].map(memory);
    // Paged moments are no memory of the allocator.
    assert!(factored < narrow && paged < narrow && narrow < usual, "{usual} {narrow} {paged} {factored}");
}

#[test]
fn state_on_hosts_is_planned_simulated_and_exported() {
    let scratch = Scratch::new();
    let job = ["--method", "full", "--global-batch", "8", "--stack", "hf-deepspeed"];
    let kept = planned(&scratch, &job);
    let answer = planned(&scratch, &[&job[..], &["--fix", "data=8,offload=state", "-o", "far.yaml"]].concat());
    assert_eq!(answer["predicted"]["fits"], true);
    // The allocator may hold what it likes, so that peaks tell little; parts tell more.
    let states = |answer: &Value| answer["predicted"]["memory_by_component"][0]["optimizer_state"].as_u64().expect("bytes");
    assert_eq!(states(&answer), 0);
    assert!(states(&kept) as f64 > 0.95 * 12.0 * 8.03e9 / 8.0, "{}", states(&kept));
    // 16 bytes an element, and two each for parameters and gradients, over eight ranks.
    let host = answer["predicted"]["host_memory_bytes"][0].as_f64().expect("bytes");
    assert!((0.98..1.02).contains(&(host / (20.0 * 8.03e9 / 8.0))), "{host}");
    let simulated = scratch.json(&["simulate", "--plan", "far.yaml"]);
    assert_eq!(simulated["step_seconds"], answer["predicted"]["step_seconds"]);
    let exported = scratch.run(&["export", "--plan", "far.yaml", "--to", "deepspeed", "--output", "out"]);
    assert!(exported.status.success(), "{exported:?}");
    let exported: Value =
        serde_json::from_slice(&std::fs::read(scratch.path("out").join("deepspeed.json")).expect("it was written"))
            .expect("JSON");
    for part in ["offload_param", "offload_optimizer"] {
        assert_eq!(exported["zero_optimization"][part]["device"], "cpu");
    }
    let own = scratch.run(&[&JOB[..], &["--stack", "foretell", "--fix", "offload=state"]].concat());
    assert_eq!(own.status.code(), Some(2), "a Program has no such offloading");
}

/// The answer to `--lengths` of a small job, and the plan's own prediction.
fn with_lengths(scratch: &Scratch, more: &[&str]) -> (Value, Value) {
    let answer = planned(
        scratch,
        &[&["--method", "lora", "--global-batch", "64", "--top", "1", "--fix", "data=8,zero=0,micro_batch=1"], more].concat(),
    );
    (answer["lengths"].clone(), answer["predicted"].clone())
}

#[test]
fn samples_of_different_lengths_are_padded_sorted_or_packed() {
    let scratch = Scratch::new();
    let (padded, longest) = with_lengths(&scratch, &["--lengths", "mean=300,p95=900,max=1500"]);
    assert_eq!((&padded["longest_tokens"], &padded["cut_share"]), (&1500.into(), &0.0.into()));
    assert!((padded["mean_tokens"].as_f64().expect("a mean") - 300.0).abs() < 3.0);
    let named = |name: &str| {
        let ways = padded["batching"].as_array().expect("a list");
        ways.iter().find(|way| way["name"] == name).expect("all ways are answered").clone()
    };
    assert_eq!(padded["batching"][0]["name"], "pad");
    let number = |way: &Value, field: &str| way[field].as_f64().expect("a number");
    let rate = |name: &str| number(&named(name), "tokens_per_second");
    assert!(rate("group") > 1.2 * rate("pad") && rate("pack") > rate("pad"), "{padded}");
    // The longest batch decides memory, and is what the plan is predicted with.
    let fullest = longest["peak_memory_bytes"].as_array().expect("a list").iter().filter_map(Value::as_u64).max();
    assert_eq!(named("pad")["memory_bytes"].as_u64(), fullest);
    assert!(number(&named("pad"), "step_seconds") < 0.7 * number(&longest, "step_seconds"), "{padded}");

    let (apart, _) = with_lengths(&scratch, &["--lengths", "300,900", "--batching", "pack", "--attention", "flash"]);
    assert_eq!(apart["batching"][0]["name"], "pack");
    assert_eq!(apart["assumptions"][0], "packed samples do not attend to each other");
}

#[test]
fn lengths_are_read_from_files_or_refused() {
    let scratch = Scratch::new();
    let numbers = scratch.file("lengths.txt", "100\n200\n\n4000\n");
    let lines = "{\"input_ids\": [1, 2, 3]}\n{\"length\": 40}\n{\"text\": \"a\", \"num_tokens\": 17}\n";
    let samples = scratch.file("samples.jsonl", lines);
    let texts = scratch.file("texts.jsonl", "{\"text\": \"some words\"}\n");
    let (cut, _) = with_lengths(&scratch, &["--lengths", text(&numbers)]);
    // The sequence has 2048 positions.
    assert_eq!(cut["longest_tokens"], 2048);
    assert!((cut["cut_share"].as_f64().expect("a share") - 1.0 / 3.0).abs() < 1e-9);
    assert_eq!(with_lengths(&scratch, &["--lengths", text(&samples)]).0["longest_tokens"], 40);
    for (arguments, expected) in [
        (&["--lengths", text(&texts)][..], "add `--tokenizer`"),
        (&["--lengths", "mean=300"], "95th percentile is missing"),
        (&["--lengths", "nowhere.txt"], "cannot be read"),
        (&["--batching", "pack"], "--lengths"),
        (&["--lengths", "300,900", "--front"], "cannot be used with"),
    ] {
        let output = scratch.run(&[&JOB[..], arguments].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn traced_steps_answer_questions_about_other_hardware_energy_and_goodput() {
    let scratch = Scratch::new();
    let topology = "base: rtx4090-8\nnodes:\n  - {name: box, count: 1, devices: {kind: rtx-4090, count: 8}, link: \
                    {kind: pcie, bandwidth: 31GB/s, devices_per_switch: 4, uplink: 31GB/s, switches_per_socket: 1, socket_link: 50GB/s}, \
                    nics: {count: 1, bandwidth: 100Gbit/s}, mean_time_between_failures: 500h}\nstorage: {bandwidth: 1GB/s}\n\
                    restart_time: 5min\n";
    scratch.file("box.yaml", topology);
    let job = ["--topology", "box.yaml", "--method", "lora", "--global-batch", "64", "--sequence", "2048"];
    let plan = |more: &[&str]| scratch.json(&[&["plan", "--model", "llama3-8b"][..], &job, more].concat());
    let step = |answer: &Value| answer["predicted"]["step_seconds"].as_f64().expect("a step");
    let usual = plan(&["-o", "best.yaml"]);
    let questions = ["device.peak*2", "device.speed*2", "host.launch*2", "intra_node.bandwidth*4"];
    let asked: Vec<&str> = questions.iter().flat_map(|question| ["--what-if", question]).collect();
    let simulated = scratch.json(&[&["simulate", "--plan", "best.yaml"], &asked[..]].concat());
    let changed = |place: usize| simulated["what_if"][place]["step_seconds"].as_f64().expect("a step") / step(&usual);
    assert!(changed(0) < 0.9 && changed(1) < 0.6, "{} {}", changed(0), changed(1));
    assert!(changed(2) >= 1.0 && changed(3) <= 1.0, "{} {}", changed(2), changed(3));
    // The timeline is that of the framework's operators, too, and ends when the step does.
    let path = scratch.json(&["simulate", "--plan", "best.yaml", "--critical-path", "--trace", "step.json"]);
    let on_path = path["critical_path"]["segments"].as_array().expect("a critical path");
    assert!(on_path.iter().any(|segment| segment["kind"] == "aten.mm"), "{}", path["critical_path"]);
    let trace: Value =
        serde_json::from_str(&std::fs::read_to_string(scratch.path("step.json")).expect("a file")).expect("a trace");
    let ends = trace["traceEvents"].as_array().expect("events").iter();
    let ends = ends.filter_map(|event| Some(event["ts"].as_f64()? + event["dur"].as_f64()?));
    let last = ends.fold(0.0, f64::max) * 1e-6;
    assert!((last / step(&usual) - 1.0).abs() < 1e-3, "{last} beside {}", step(&usual));
    assert!(simulated["cost"]["step_energy_joules"].as_f64().is_some_and(|energy| energy > 0.0), "{}", simulated["cost"]);
    plan(&["--objective", "energy", "-o", "frugal.yaml"]);
    let energy = |plan: &str| {
        let answer = scratch.json(&["simulate", "--plan", plan]);
        answer["cost"]["step_energy_joules"].as_f64().expect("joules")
    };
    assert!(energy("frugal.yaml") <= 1.001 * energy("best.yaml"));
    assert!(step(&plan(&["--objective", "goodput"])) < 1.05 * step(&usual));
}

#[test]
fn a_method_of_other_software_is_not_executed_and_named() {
    let scratch = Scratch::new();
    for method in ["qlora", "dpo"] {
        let output = scratch.run(&["run", "--model", "gpt2", "--topology", "local", "--method", method]);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(&format!("`{method}`: our executor has no such method")), "{error}");
        assert!(error.contains("use `--stack hf-trainer`, whose trainers `execute` starts"), "{error}");
    }
}

#[test]
fn a_run_over_a_data_set_has_its_steps_hours_and_money() {
    let scratch = Scratch::new();
    let job =
        ["plan", "--model", "gpt2", "--topology", "2xa100-80g", "--method", "full", "--sequence", "512", "--global-batch", "32"];
    let run = |more: &[&str]| scratch.json(&[&job[..], more].concat())["cost"]["run"].clone();
    let paid = run(&["--samples", "1000", "--epochs", "3", "--device-price", "2USD"]);
    assert_eq!(paid["steps"], 94.0, "3,000 samples in steps of 32");
    let (seconds, price) = (paid["seconds"].as_f64().expect("a time"), paid["price"].as_f64().expect("a price"));
    assert!((price - seconds / 3600.0 * 4.0).abs() < 1e-9 * price, "{paid}");
    scratch.file("lengths.txt", &"300\n".repeat(64));
    assert_eq!(run(&["--lengths", "lengths.txt", "--epochs", "2"])["steps"], 4.0, "128 samples of the file");
    for refused in [&["--epochs", "2"][..], &["--samples", "10", "--table", "context,method"], &["--goodput", "--front"]] {
        assert_eq!(scratch.run(&[&job[..], refused].concat()).status.code(), Some(2), "{refused:?}");
    }
}

#[test]
fn fine_tuning_has_a_usual_length_and_tables_have_devices_and_models() {
    let scratch = Scratch::new();
    let answer =
        scratch.json(&["plan", "--model", "llama3-8b", "--topology", "1xa100-80g", "--method", "qlora", "--global-batch", "1"]);
    let model = &answer["plan"]["model"];
    assert_eq!(model["sequence"], 2048, "{model}");
    let job = ["plan", "--model", "gpt2", "--topology", "1xa100-80g", "--global-batch", "8", "--sequence", "512"];
    let cells =
        scratch.json(&[&job[..], &["--time-limit", "1s", "--method", "full", "--table", "gpus,model"]].concat())["cells"].clone();
    let cells = cells.as_array().expect("cells");
    let rate = |gpus: &str, model: &str| {
        let cell = cells.iter().find(|cell| cell["row"] == gpus && cell["column"] == model);
        cell.and_then(|cell| cell["rate"].as_f64()).expect("it fits")
    };
    assert!(rate("4", "gpt2-xl") > 1.5 * rate("1", "gpt2-xl") && rate("1", "gpt2") > rate("1", "gpt2-medium"));
}

#[test]
fn a_plan_with_adapters_is_no_job_of_frameworks_that_train_all_weights() {
    let scratch = Scratch::new();
    planned(&scratch, &["--method", "qlora", "--global-batch", "8", "-o", "adapters.yaml"]);
    for framework in ["torchtitan", "megatron", "deepspeed"] {
        let output = scratch.run(&["export", "--plan", "adapters.yaml", "--to", framework, "-o", framework, "--json"]);
        let failure: Value = serde_json::from_slice(&output.stdout).expect("one document");
        assert_eq!(failure["error"]["diagnostic"], "framework::method", "{framework}: {failure}");
        assert!(!scratch.path(framework).exists(), "{framework} has no files");
    }
}

#[test]
fn simulate_says_whether_adapters_fit_also_under_deepspeed() {
    let scratch = Scratch::new();
    let answer = planned(&scratch, &["--method", "lora", "--global-batch", "8", "--stack", "deepspeed", "-o", "adapters.yaml"]);
    assert_eq!(answer["plan"]["stack"], "hf-deepspeed");
    let output = scratch.run(&["simulate", "--plan", "adapters.yaml"]);
    let said = String::from_utf8_lossy(&output.stdout);
    let chance = answer["predicted"]["chance_of_running_out"].as_f64().expect("operators were traced");
    assert!(said.starts_with("fits") && said.contains("chance of running out"), "{chance}: {said}");
}

#[test]
fn engines_off_policy_have_devices_of_their_own_in_every_framework() {
    let scratch = Scratch::new();
    for framework in ["verl", "nemo-rl", "openrlhf"] {
        let rollout = format!("framework={framework},off-policy=1");
        let job = ["plan", "--model", "llama3.2-1b", "--topology", "8xh100", "--method", "grpo", "--rollout", &rollout];
        let answer = scratch.json(&job);
        assert!(answer["plan"]["rollout"]["placement"]["split"].is_u64(), "{framework}: {}", answer["plan"]["rollout"]);
    }
}

#[test]
fn simulate_replaces_the_method_of_a_plan() {
    let scratch = Scratch::new();
    let plan = "{schema_version: 1, model: {base: llama3-8b, layers: 2}, topology: 8xh100, layout: {data: 8, zero: 3, micro_batch: 1}, \
                global_batch: 16, precision: bf16, optimizer: adamw, stack: hf-trainer";
    scratch.file("all.yaml", &format!("{plan}}}"));
    scratch.file("adapters.yaml", &format!("{plan}, method: qlora}}"));
    scratch.file("preferences.yaml", &format!("{plan}, method: dpo}}"));
    let step = |file: &str, more: &[&str]| {
        let answer = scratch.json(&[&["simulate", "--plan", file][..], more].concat());
        (answer["peak_memory_bytes"].clone(), answer["step_seconds"].clone())
    };
    let (all, adapters) = (step("all.yaml", &[]), step("adapters.yaml", &[]));
    assert!(all.0.is_array() && all != adapters, "{all:?}");
    assert_eq!(step("all.yaml", &["--method", "qlora"]), adapters);
    assert_eq!(step("adapters.yaml", &["--method", "full"]), all);
    assert_eq!(step("all.yaml", &["--method", "dpo"]), step("preferences.yaml", &[]));
    // What is not stated stays the plan's.
    let wider = step("adapters.yaml", &["--adapter", "rank=64"]);
    assert_eq!(wider, step("all.yaml", &["--method", "qlora", "--adapter", "rank=64"]));
    assert_ne!(step("adapters.yaml", &["--loss", "liger"]), adapters);
    let refused = scratch.run(&["simulate", "--plan", "all.yaml", "--adapter", "rank=64"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("`--adapter` without adapters"), "{said}");
}
