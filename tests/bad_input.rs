//! Wrong input. The program exits with the right status and prints one error with a hint to
//! standard error, and nothing to standard output.

mod common;

use common::{Scratch, text};

/// Runs a command that must fail with `status`. Returns its standard error.
#[track_caller]
fn refused(scratch: &Scratch, arguments: &[&str], status: i32) -> String {
    let output = scratch.run(arguments);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {message}");
    assert!(output.stdout.is_empty(), "{arguments:?} prints {}", String::from_utf8_lossy(&output.stdout));
    assert_one_error(&message);
    message
}

/// Asserts that a message has exactly one error line, with a hint, and that nothing panicked.
#[track_caller]
fn assert_one_error(message: &str) {
    let lines = |start: &str| message.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!((lines("error["), lines("hint: ")), (1, 1), "not one error with a hint: {message}");
    assert!(!message.contains("panicked"), "the program panicked: {message}");
}

#[track_caller]
fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

const MLP: &str = "{family: mlp, widths: [64, 32, 10]}";

fn plan(more: &str) -> String {
    format!("model: {MLP}\ntopology: local\n{more}\n")
}

#[test]
fn an_unknown_model_is_refused_with_the_known_models() {
    let scratch = Scratch::new();
    let message = refused(&scratch, &["plan", "--model", "resnet51", "--topology", "dgx-a100-80g"], 2);
    assert_contains(&message, &["resnet51", "resnet50", "resnet101"]);
    assert_contains(
        &refused(&scratch, &["run", "--model", "nothing", "--topology", "local"], 2),
        &["nothing", "names, the nearest are"],
    );
}

#[test]
fn an_unknown_topology_is_refused_with_the_known_topologies() {
    let scratch = Scratch::new();
    assert_contains(
        &refused(&scratch, &["plan", "--model", "mlp", "--topology", "dgx-b1"], 2),
        &["dgx-b1", "did you mean `dgx-b200`", "dgx-h100"],
    );
}

#[test]
fn a_foreign_file_is_named_with_the_command_that_reads_it() {
    let scratch = Scratch::new();
    scratch.file("ds.json", "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 1}}");
    scratch.file("job.toml", "[parallelism]\ntensor_parallel_degree = 2\n");
    scratch.file("plan.yaml", &plan("global_batch: 32\nlayout: {data: 1}"));
    scratch.file("weights.safetensors", "");
    std::fs::write(scratch.path("weights.safetensors"), [&8_u64.to_le_bytes()[..], b"{      }\xff"].concat()).expect("a file");
    let cases: [(&[&str], &[&str]); 6] = [
        (&["simulate", "--plan", "ds.json"], &["ds.json: this is DeepSpeed's configuration", "foretell import deepspeed-json"]),
        (
            &["plan", "--model", "job.toml", "--topology", "local"],
            &["job.toml: this is a file of settings in TOML", "import torchtitan-toml"],
        ),
        (&["plan", "--model", "mlp", "--topology", "ds.json"], &["DeepSpeed's configuration, and a topology is asked for"]),
        (
            &["plan", "--model", "plan.yaml", "--topology", "local"],
            &["this is a plan file, and a model is asked for", "`--plan`"],
        ),
        (&["simulate", "--plan", "plan.yaml", "--profile", "plan.yaml"], &["plan.yaml: this is a plan file, and a profile"]),
        (
            &["plan", "--model", "weights.safetensors", "--topology", "local"],
            &["a file of weights in safetensors' format, and no text"],
        ),
    ];
    for (arguments, expected) in cases {
        assert_contains(&refused(&scratch, arguments, 2), expected);
    }
}

#[test]
fn a_yaml_error_names_file_line_and_column() {
    let scratch = Scratch::new();
    scratch.file("broken.yaml", "model: mlp\ntopology: local\nglobal_batch: [1, 2\nlayout: {data: 2}\n");
    let message = refused(&scratch, &["simulate", "--plan", "broken.yaml"], 2);
    let place = message.split("broken.yaml:").nth(1).expect("the message names the file");
    let numbers: Vec<&str> = place.splitn(3, ':').take(2).collect();
    assert!(numbers.iter().all(|number| number.parse::<usize>().is_ok()), "{message}");
}

#[test]
fn an_unknown_field_is_refused_with_its_line() {
    let scratch = Scratch::new();
    scratch.file("odd.yaml", &plan("global_batch: 8\nlayout: {data: 1, tensors: 2}"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", "odd.yaml"], 2), &["odd.yaml:4:", "tensors"]);
}

#[test]
fn a_quantity_without_a_unit_in_a_topology_file_is_refused() {
    let scratch = Scratch::new();
    scratch.file(
        "bare.yaml",
        "name: bare\ndevices:\n  chip: {base: a100-sxm-80g, memory: 80}\nnodes:\n  - {name: n, count: 1, devices: {kind: chip, count: 8}, link: nvswitch-600GB/s}\n",
    );
    assert_contains(&refused(&scratch, &["plan", "--model", "mlp", "--topology", "bare.yaml"], 2), &["bare.yaml:3:", "memory"]);
}

#[test]
fn a_quantity_without_a_unit_on_the_command_line_is_refused() {
    let scratch = Scratch::new();
    let message = refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--memory-limit", "72"], 2);
    assert_contains(&message, &["--memory-limit", "72"]);
}

#[test]
fn contradictory_sizes_of_a_model_are_refused_with_the_file() {
    let scratch = Scratch::new();
    scratch.file("odd-gpt.yaml", "{family: gpt, layers: 1, hidden: 30, heads: 4, vocab: 64, sequence: 8}");
    assert_contains(&refused(&scratch, &["plan", "--model", "odd-gpt.yaml", "--topology", "local"], 2), &["odd-gpt.yaml"]);
    scratch.file(
        "in-place.yaml",
        "model: {family: gpt, layers: 1, hidden: 30, heads: 4, vocab: 64, sequence: 8}\ntopology: local\nglobal_batch: 8\n",
    );
    assert_contains(&refused(&scratch, &["simulate", "--plan", "in-place.yaml"], 2), &["in-place.yaml"]);
}

#[test]
fn a_layout_that_does_not_divide_batch_or_blocks_is_refused() {
    let scratch = Scratch::new();
    scratch.file("batch.yaml", &plan("global_batch: 7\nlayout: {data: 2, micro_batch: 2}"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", "batch.yaml"], 2), &["batch.yaml", "global_batch"]);
    scratch.file("stages.yaml", &plan("global_batch: 8\nlayout: {pipeline: 64, micro_batch: 2}"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", "stages.yaml", "--oversubscribe"], 2), &["stages.yaml"]);
}

#[test]
fn a_search_in_which_no_layout_fits_exits_with_1() {
    let scratch = Scratch::new();
    let message = refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--memory-limit", "1KiB"], 1);
    assert_contains(&message, &["no layout fits", "1 KiB"]);
}

/// A topology of one CPU node with 64 KiB of memory.
const SMALL: &str = "name: small\ndevices:\n  chip: {memory: 64KiB, memory_bandwidth: 10GB/s, architecture: cpu, peak: {fp32: 50GFLOP/s}}\nnodes:\n  - {name: n, count: 1, devices: {kind: chip, count: 1}}\n";

#[test]
fn a_plan_that_does_not_fit_is_predicted_but_not_run() {
    let scratch = Scratch::new();
    scratch.file("small.yaml", SMALL);
    scratch.file("plan.yaml", "model: mlp\ntopology: small.yaml\nglobal_batch: 32\nlayout: {micro_batch: 32}\n");
    assert_contains(
        &refused(&scratch, &["execute", "--plan", "plan.yaml", "--steps", "1"], 1),
        &["plan.yaml", "stage 0", "64 KiB"],
    );
    assert!(!scratch.path("runs").exists(), "no run folder is made");
    // `simulate` prints the prediction, with `fits: false`, and exits with 1.
    let output = scratch.run(&["simulate", "--plan", "plan.yaml", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    assert_one_error(&String::from_utf8_lossy(&output.stderr));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("standard output is one JSON document");
    assert_eq!(document["fits"], false);
}

#[test]
fn nodes_without_a_route_between_them_are_refused() {
    let scratch = Scratch::new();
    let nodes = "name: apart\nnodes:\n  - {name: n, count: 2, devices: {kind: a100-sxm-80g, count: 2}, link: nvswitch-600GB/s}\n";
    scratch.file("apart.yaml", nodes);
    assert_contains(
        &refused(&scratch, &["plan", "--model", "mlp", "--topology", "apart.yaml"], 2),
        &["apart.yaml", "cannot reach"],
    );
}

#[test]
fn more_ranks_than_devices_are_refused() {
    let scratch = Scratch::new();
    let path = scratch.file("wide.yaml", &plan("global_batch: 4096\nlayout: {data: 4096, micro_batch: 1}"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", text(&path)], 2), &["wide.yaml", "4096 ranks", "--oversubscribe"]);
    assert_contains(&refused(&scratch, &["execute", "--plan", text(&path), "--data", "synthetic"], 2), &["4096 ranks"]);
}

#[test]
fn plans_that_cannot_run_on_this_machine_are_refused() {
    let scratch = Scratch::new();
    scratch.file("gpus.yaml", "model: mlp\ntopology: dgx-a100-80g\nglobal_batch: 8\n");
    assert_contains(&refused(&scratch, &["execute", "--plan", "gpus.yaml"], 2), &["dgx-a100-80g", "local"]);
    assert_contains(&refused(&scratch, &["run", "--model", "mlp", "--topology", "dgx-a100-80g"], 2), &["dgx-a100-80g", "local"]);
    scratch.file("pair.yaml", "name: two-hosts\nbase: cpu-pair\nlab: false\n");
    assert_contains(&refused(&scratch, &["run", "--model", "mlp", "--topology", "pair.yaml"], 2), &["two-hosts", "lab: true"]);
    scratch.file("tf32.yaml", &plan("global_batch: 8\nprecision: tf32"));
    assert_contains(&refused(&scratch, &["execute", "--plan", "tf32.yaml"], 2), &["tf32", "fp32"]);
    assert_contains(&refused(&scratch, &["calibrate", "--topology", "local", "--plan", "tf32.yaml"], 2), &["tf32", "fp32"]);
    assert_contains(
        &refused(&scratch, &["run", "--model", "mlp", "--topology", "local", "--precision", "tf32"], 2),
        &["tf32", "fp32"],
    );
}

#[test]
fn missing_data_and_too_few_samples_are_refused() {
    let scratch = Scratch::new();
    scratch.file("plan.yaml", &plan("global_batch: 8"));
    assert_contains(&refused(&scratch, &["execute", "--plan", "plan.yaml", "--data", "no/such/folder"], 2), &["no/such/folder"]);
    assert_contains(&refused(&scratch, &["run", "--model", "mlp", "--topology", "local", "--data", "no/such"], 2), &["no/such"]);
    scratch.file("large.yaml", &plan("global_batch: 4096\nlayout: {micro_batch: 4096}"));
    assert_contains(&refused(&scratch, &["execute", "--plan", "large.yaml", "--data", "digits"], 2), &["4096"]);
    assert_contains(&refused(&scratch, &["execute", "--plan", "plan.yaml", "--steps", "0"], 2), &["trains nothing"]);
}

#[test]
fn a_folder_without_a_finished_run_cannot_be_checked() {
    let scratch = Scratch::new();
    assert_contains(&refused(&scratch, &["check", "nowhere"], 2), &["nowhere", "not a run's folder"]);
    scratch.file("plan.yaml", &plan("global_batch: 8"));
    scratch.json(&["execute", "--plan", "plan.yaml", "--steps", "2", "--no-evaluation", "--run", "first"]);
    std::fs::remove_file(scratch.path("first/measured.json")).expect("the run wrote it");
    assert_contains(&refused(&scratch, &["check", "first"], 2), &["first", "did not finish"]);
}

#[test]
fn objectives_without_their_facts_are_refused_with_the_line_to_add() {
    let scratch = Scratch::new();
    let plan = |objective: &str| {
        refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--global-batch", "64", "--objective", objective], 2)
    };
    assert_contains(&plan("cost"), &["does not say what an hour of every node costs", "price_per_hour"]);
    assert_contains(&plan("goodput"), &["mean_time_between_failures"]);
    let text = refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--price-limit", "1"], 2);
    assert_contains(&text, &["no node of `local` costs so little", "price_per_hour"]);
    let node = "devices: {kind: a100-sxm-80g, count: 8}, link: nvswitch-300GB/s, price_per_hour: 30 EUR";
    scratch.file("priced.yaml", &format!("name: priced\nnodes:\n  - {{count: 1, {node}}}\n"));
    let text = refused(&scratch, &["plan", "--model", "gpt2", "--topology", "priced.yaml", "--price-limit", "$40"], 2);
    assert_contains(&text, &["`--price-limit` is in `USD`", "`priced` are in `EUR`", "hint: give the limit in `EUR`"]);
    assert_contains(&refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--scaling", "8"], 2), &["8..4096"]);
}

/// A dragonfly whose sizes `sizes` gives.
fn dragonfly(sizes: &str) -> String {
    format!(
        "name: fly\nnodes:\n  - {{name: n, count: 4, devices: {{kind: a100-sxm-80g, count: 1}}, nics: {{count: 1, bandwidth: 200Gbit/s}}}}\nnetwork: {{kind: dragonfly, {sizes}}}\n"
    )
}

#[test]
fn sizes_that_no_cluster_has_are_refused_with_their_place() {
    let scratch = Scratch::new();
    for (sizes, field) in [
        ("nodes_per_router: 9223372036854775808, routers_per_group: 2, global_links: 1", "nodes_per_router"),
        ("nodes_per_router: 2, routers_per_group: 1000000000, global_links: 1", "routers_per_group"),
        ("nodes_per_router: 1, routers_per_group: 16000000, global_links: 1", "links"),
        ("nodes_per_router: 99999999999999999999999, routers_per_group: 2, global_links: 1", "nodes_per_router"),
    ] {
        scratch.file("fly.yaml", &dragonfly(sizes));
        let message = refused(
            &scratch,
            &["simulate", "--plan", text(&scratch.file("plan.yaml", "model: mlp\ntopology: fly.yaml\nglobal_batch: 4\n"))],
            2,
        );
        assert_contains(&message, &["fly.yaml:4:", field]);
    }
}

#[test]
fn a_step_of_too_many_micro_batches_is_refused() {
    let scratch = Scratch::new();
    let path = scratch.file("plan.yaml", &plan("global_batch: 100000\nlayout: {micro_batch: 1}"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", text(&path)], 2), &["global_batch", "100000 micro-batches"]);
}

#[test]
fn an_endless_file_is_refused_after_a_bounded_part_of_it() {
    let scratch = Scratch::new();
    let path = scratch.file("plan.yaml", "");
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    let message = refused(&scratch, &["simulate", "--plan", text(&path)], 2);
    assert_contains(&message, &["plan.yaml", "longer than 64 MiB"]);
}

#[test]
fn a_pipe_or_a_device_in_place_of_a_file_is_refused_at_once() {
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe.json");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    let plan = scratch.file("plan.yaml", "model: gpt2\ntopology: local\nglobal_batch: 1\n");
    let (pipe, plan) = (text(&pipe), text(&plan));
    for arguments in [
        &["simulate", "--plan", pipe][..],
        &["simulate", "--plan", "/dev/zero"],
        &["simulate", "--plan", plan, "--profile", pipe],
        &["plan", "--model", pipe, "--topology", "local"],
        &["plan", "--model", "gpt2", "--topology", pipe],
        &["score", pipe],
        &["import", "kineto", "--plan", plan, pipe],
        &["import", "hf-config", pipe],
        &["import", "nccl-xml", pipe],
        &["data", "tokenize", "--tokenizer", pipe, plan, "-o", "tokens"],
        &["generate", "--model", "gpt2", "--init", pipe, "--prompt-tokens", "1"],
        &["execute", "--plan", plan, "--oversubscribe", "--steps", "1", "--init", pipe],
        &["execute", "--plan", plan, "--oversubscribe", "--steps", "1", "--recipe", pipe],
        &["execute", "--plan", plan, "--oversubscribe", "--steps", "1", "--replay-order", pipe],
    ] {
        let message = refused(&scratch, arguments, 2);
        assert_contains(&message, &["not a regular file"]);
    }
}

#[test]
fn control_characters_of_a_file_do_not_reach_the_terminal() {
    let scratch = Scratch::new();
    let path = scratch.file("plan.yaml", "model: \"\\e[2J\\e]0;owned\\a\"\ntopology: local\nglobal_batch: 4\n");
    let message = refused(&scratch, &["simulate", "--plan", text(&path)], 2);
    assert!(!message.contains('\u{1b}') && message.contains("u001b"), "{message:?}");
}

#[test]
fn a_step_of_half_a_year_is_an_error_that_names_an_instruction() {
    let scratch = Scratch::new();
    let slow = "name: slow\nnodes:\n  - {name: n, count: 2, devices: {kind: a100-sxm-80g, count: 1}, nics: {count: 1, bandwidth: 1kbit/s}}\n";
    scratch.file("slow.yaml", slow);
    let path =
        scratch.file("plan.yaml", "model: gpt2\ntopology: slow.yaml\nglobal_batch: 2\nlayout: {data: 2, micro_batch: 1}\n");
    let message = refused(&scratch, &["simulate", "--plan", text(&path)], 1);
    assert_contains(&message, &["the step does not end within", "instruction", "`all_reduce`"]);
    let path =
        scratch.file("fast.yaml", "model: mlp\ntopology: dgx-a100-80g\nglobal_batch: 4\nlayout: {data: 2, micro_batch: 2}\n");
    let message = refused(&scratch, &["simulate", "--plan", text(&path), "--straggler", "1=1e18"], 1);
    assert_contains(&message, &["the step does not end within", "rank 1 in instruction"]);
}

#[test]
fn a_mode_that_is_not_there_yet_or_has_no_meaning_is_refused() {
    let scratch = Scratch::new();
    for (mode, parts) in [
        ("{parameter_server: {servers: 0}}", ["`mode.parameter_server`", "no server is left"]),
        ("{parameter_server: {servers: 1, staleness: -2}}", ["plan.yaml", "a staleness of -2 steps is below 0"]),
        ("{local_sgd: {every: 4, fragments: 0}}", ["`mode.local_sgd`", "in 0 fragments are never exchanged"]),
        ("{local_sgd: {every: 4, fragments: 5}}", ["`mode.local_sgd`", "5 fragments take turns in a round of 4 steps"]),
        ("{local_sgd: {every: 99, fragments: 50}}", ["`mode.local_sgd`", "blocks to put into them"]),
        ("{local_sgd: {every: 0}}", ["`mode.local_sgd`", "after every 0 steps"]),
        ("{decentralised: {graph: star}}", ["plan.yaml", "`star`"]),
        ("{parameter_server: {servers: -1}}", ["plan.yaml:5:36", "hint:"]),
        ("{parameter_server: {servers: 1, staleness: soon}}", ["plan.yaml", "`soon` is no staleness"]),
        ("{parameter_server: {servers: 1, compression: int4}}", ["plan.yaml", "`int4` is no format for numbers that travel"]),
        ("{parameter_server: {servers: 3, beside_workers: true}}", ["`mode.parameter_server`", "3 servers beside 2 workers"]),
        ("{parameter_server: {servers: 1, backup_workers: -1}}", ["plan.yaml", "-1 backup workers are below 0"]),
        ("{parameter_server: {servers: 1, backup_workers: 2}}", ["`mode.parameter_server`", "2 backup workers of 2 leave no"]),
        ("{parameter_server: {servers: 1, backup_workers: 1, staleness: 1}}", ["`mode.parameter_server`", "no backup worker"]),
        ("{local_sgd: {every: 4, backup_workers: 1}}", ["plan.yaml", "only `parameter_server` has `backup_workers`"]),
        ("{local_sgd: {every: 4, overlap: 4}}", ["`mode.local_sgd`", "would not end before the next one, 4 steps later"]),
        ("{local_sgd: {every: 4, overlap: -1}}", ["plan.yaml:5:39", "hint:"]),
        ("{local_sgd: {every: 4, mixing: 1.5}}", ["`mode.local_sgd`", "the share of its own parameters"]),
        ("{local_sgd: {every: 4, compression: int4}}", ["plan.yaml", "`int4` is no format for numbers that travel"]),
        ("{decentralised: {graph: ring, compression: int8}}", ["plan.yaml", "`decentralised` has no `compression`"]),
        ("{local_sgd: {every: 4, outer: {optimizer: nesterov, momentum: 0.0}}}", ["`mode.local_sgd`", "needs a momentum"]),
        ("{local_sgd: {every: 4, outer: {learning_rate: -1}}}", ["`mode.local_sgd`", "not above 0"]),
        ("{decentralised: {graph: ring, every: 0}}", ["`mode.decentralised`", "after every 0 steps"]),
    ] {
        scratch.file("plan.yaml", &plan(&format!("global_batch: 8\nlayout: {{data: 2, micro_batch: 1}}\nmode: {mode}")));
        assert_contains(&refused(&scratch, &["simulate", "--plan", "plan.yaml"], 2), &parts);
    }
}

#[test]
fn a_mode_that_the_rest_of_the_plan_cannot_have_is_refused() {
    let scratch = Scratch::new();
    let [local, ring] = ["{local_sgd: {every: 2}}", "{decentralised: {graph: ring}}"];
    let [servers, stale] = ["{parameter_server: {servers: 1}}", "{parameter_server: {servers: 1, staleness: 1}}"];
    for (mode, more, part) in [
        (local, "layout: {data: 1, micro_batch: 1}", "one replica has no other to exchange with"),
        (ring, "layout: {data: 2, zero: 1, micro_batch: 1}", "ZeRO shards the state over all of `data`"),
        ("{decentralised: {graph: exponential}}", "layout: {data: 3, micro_batch: 1}", "there are 3"),
        (local, "layout: {data: 2, shares: [3, 1], micro_batch: 4}", "equal parts of the batch"),
        (local, "precision: fp16\nlayout: {data: 2, micro_batch: 1}", "loss scale"),
        (servers, "layout: {data: 2, zero: 1, micro_batch: 1}", "ZeRO has nothing to shard"),
        (servers, "layout: {data: 2, offload: optimizer, micro_batch: 1}", "in their own memory"),
        (
            "{parameter_server: {servers: 2, beside_workers: true, compression: int8}}",
            "layout: {data: 2, micro_batch: 1}",
            "a reduce-scatter, which adds them in single precision",
        ),
        (stale, "layout: {data: 2, tensor: 2, micro_batch: 1}", "would pull different versions"),
        (stale, "optimizer: lamb\nlayout: {data: 2, micro_batch: 1}", "no common norm"),
        (stale, "training: {clip_norm: 1}\nlayout: {data: 2, micro_batch: 1}", "no common norm"),
    ] {
        scratch.file("plan.yaml", &plan(&format!("global_batch: 24\n{more}\nmode: {mode}")));
        assert_contains(&refused(&scratch, &["simulate", "--plan", "plan.yaml"], 2), &["`mode.", part]);
    }
}

#[test]
fn a_routing_that_cannot_be_is_refused_in_one_sentence() {
    let scratch = Scratch::new();
    scratch.file("four.json", "[5, 1, 1, 1]");
    scratch.file("odd.json", "[5, -1, 1, 1, 1, 1, 1, 1]");
    scratch.file("empty.json", "[[0, 0, 0, 0, 0, 0, 0, 0]]");
    let message = |model: &str, routing: &str, more: &[&str]| {
        let job = ["plan", "--model", model, "--topology", "dgx-h100", "--routing", routing];
        refused(&scratch, &[&job[..], more].concat(), 2)
    };
    for (model, routing, more, expected) in [
        ("mixtral-8x7b", "skewed", &[][..], "`skewed` is no routing"),
        ("mixtral-8x7b", "zipf:-1", &[], "from 0 to 10"),
        ("mixtral-8x7b", "lognormal:NaN", &[], "from 0 to 10"),
        ("mixtral-8x7b", "lognormal:1e9", &[], "from 0 to 10"),
        ("mixtral-8x7b", "missing.json", &[], "a file of measured loads"),
        ("mixtral-8x7b", "four.json", &[], "loads of 4 experts, and the model 8"),
        ("mixtral-8x7b", "odd.json", &[], "the load -1"),
        ("mixtral-8x7b", "empty.json", &[], "sum to 0"),
        ("gpt2", "zipf:1", &[], "no experts"),
        ("mixtral-8x7b", "zipf:1", &["--stack", "foretell"], "every slot"),
    ] {
        assert_contains(&message(model, routing, more), &[expected]);
    }
    let loads = "topology: dgx-h100\nstack: megatron-core\nglobal_batch: 8\nworkload: {routing: [1, .nan]}\n";
    scratch.file("plan.yaml", &format!("model: mixtral-8x7b\n{loads}"));
    assert_contains(&refused(&scratch, &["simulate", "--plan", "plan.yaml"], 2), &["plan.yaml:5:", "non-finite"]);
    // The processor of this machine has measured costs or those of its data sheet.
    scratch.file("cpu.yaml", "model: small-moe.yaml\ntopology: local\nstack: megatron-core\nglobal_batch: 8\n");
    let sizes = "layers: 1, hidden: 16, heads: 2, ffn: 16, vocab: 16, sequence: 8, experts: 4, top_k: 2";
    scratch.file("small-moe.yaml", &format!("{{family: moe, {sizes}}}"));
    let message = refused(&scratch, &["simulate", "--plan", "cpu.yaml", "--routing", "zipf:1"], 2);
    assert_contains(&message, &["our own kernels", "every slot"]);
}
