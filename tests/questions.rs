//! Questions beyond the step time: what-if, critical path, cost, goodput, the input pipeline,
//! exports, and the choice of nodes.

mod common;

use common::{Scratch, text};
use foretell_models::Model;
use foretell_planner::{PlanJob, plan_job};
use foretell_program::{Layout, Optimizer, Plan, Stack};
use foretell_simulator::Prediction;
use foretell_simulator::gpu::Profiles;
use foretell_topologies::Topology;
use foretell_units::DataType;
use serde_json::{Value, json};

const PLAN: &str = "\
model: {family: gpt, layers: 4, hidden: 256, heads: 4, vocab: 4096, sequence: 128}
topology:
  base: dgx-a100-80g
  nodes:
    - {name: dgx, count: 3, devices: {kind: a100-sxm-80g, count: 8}, link: nvswitch-300GB/s, nics: {count: 8, bandwidth: 200Gbit/s}, price_per_hour: 30, mean_time_between_failures: 2000h}
  storage: {bandwidth: 2GB/s}
  restart_time: 5min
layout: {data: 4, tensor: 2, pipeline: 2, micro_batch: 2}
global_batch: 32
precision: bf16
optimizer: adamw
";

fn number(document: &Value, path: &str) -> f64 {
    let number = document.pointer(path).and_then(Value::as_f64);
    assert!(number.is_some(), "no number at `{path}` in {document}");
    number.unwrap_or_default()
}

fn are_close(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-9 * other.abs().max(1e-12)
}

#[test]
fn what_if_answers_are_printed_beside_the_unchanged_step() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let questions = ["--what-if", "inter_node.bandwidth*2", "--what-if", "latency*1", "--what-if", "speed*2, host.launch*0"];
    let document = scratch.json(&[&["simulate", "--plan", text(&plan)], &questions[..]].concat());
    let step = number(&document, "/step_seconds");
    assert_eq!(document["what_if"].as_array().map(Vec::len), Some(3));
    assert!(number(&document, "/what_if/0/step_seconds") < step, "twice the bandwidth between nodes is faster here");
    assert!(are_close(number(&document, "/what_if/1/step_seconds"), step), "a factor of 1 changes nothing");
    assert_eq!(number(&document, "/what_if/1/change"), 0.0);
    assert!(
        number(&document, "/what_if/2/predicted/breakdown_seconds/compute") < number(&document, "/breakdown_seconds/compute")
    );
    assert_eq!(document["what_if"][2]["what_if"], "device.speed*2, host.launch*0");
}

#[test]
fn meaningless_questions_are_refused() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    for (arguments, expected) in [
        (&["--what-if", "warp*2"][..], "`inter_node.bandwidth`"),
        (&["--steps", "0"], "ask for at least 1"),
        (&["--steps", "5", "--tokens", "5"], "cannot be used with"),
        (&["--checkpoint-every", "0"], "ask for at least 1"),
    ] {
        let output = scratch.run(&[&["simulate", "--plan", text(&plan)], arguments].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn the_parts_of_the_critical_path_add_up_to_the_step() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let document = scratch.json(&["simulate", "--plan", text(&plan), "--critical-path"]);
    let path = &document["critical_path"];
    let between = number(path, "/between_seconds");
    let times = ["compute", "optimizer", "communication", "data"].map(|kind| number(path, &format!("/by_time/{kind}")));
    let kinds: f64 = path["by_kind"].as_array().expect("a list").iter().map(|segment| number(segment, "/seconds")).sum();
    let step = number(&document, "/step_seconds");
    assert!((times.iter().sum::<f64>() + between - step).abs() < 1e-6 * step);
    assert!((kinds + between - step).abs() < 1e-6 * step);
}

#[test]
fn a_run_costs_the_hours_of_its_nodes_including_failures() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let document = scratch.json(&["simulate", "--plan", text(&plan), "--steps", "1e9"]);
    let (step, goodput) = (number(&document, "/step_seconds"), number(&document, "/goodput/goodput"));
    // The sixteen ranks use two of the three nodes.
    assert_eq!(document["cost"]["nodes"], 2);
    assert!(are_close(number(&document, "/cost/step_price"), 60.0 / 3600.0 * step));
    assert!(are_close(number(&document, "/cost/run/seconds"), 1e9 * step / goodput));
    assert!(are_close(number(&document, "/cost/run/price"), 60.0 / 3600.0 * 1e9 * step / goodput));
    let power = number(&document, "/cost/step_energy_joules") / step / 16.0;
    assert!((80.0..400.0).contains(&power), "power per device is not between idle and the limit: {power} W");
    // Two nodes fail twice as often as one. The best checkpoint interval is near Daly's.
    assert!(are_close(number(&document, "/goodput/mean_seconds_between_failures"), 1000.0 * 3600.0));
    let interval = number(&document, "/goodput/checkpoint_every_steps") * step;
    assert!((0.7..1.4).contains(&(interval / number(&document, "/goodput/daly_seconds"))), "{document}");
    assert!((number(&document, "/goodput/goodput") / number(&document, "/goodput/expected_goodput") - 1.0).abs() < 0.01);
    // Checkpoints less often than the best interval lose more work.
    let rare = scratch.json(&["simulate", "--plan", text(&plan), "--checkpoint-every", "100000000"]);
    assert!(number(&rare, "/goodput/goodput") < goodput);
    assert_eq!(rare["goodput"]["is_best"], false);
}

#[test]
fn prices_and_failure_rates_that_are_not_stated_are_not_guessed() {
    let scratch = Scratch::new();
    let plan =
        scratch.file("plan.yaml", "model: gpt2\ntopology: dgx-a100-80g\nlayout: {data: 8}\nglobal_batch: 8\nprecision: bf16\n");
    let document = scratch.json(&["simulate", "--plan", text(&plan), "--steps", "10"]);
    assert_eq!((&document["cost"]["price_per_hour"], &document["cost"]["step_price"]), (&Value::Null, &Value::Null));
    assert_eq!(document["cost"]["unpriced"][0], "dgx");
    assert!(document.get("goodput").is_none());
    let output = scratch.run(&["simulate", "--plan", text(&plan), "--goodput"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("hint: write `mean_time_between_failures: 5000h`"));
    let output = scratch.run(&["simulate", "--plan", text(&plan), "--cost"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("no `price_per_hour` for `dgx`"));
}

#[test]
fn slow_input_counts_as_data_in_the_breakdown() {
    let scratch = Scratch::new();
    let alone = scratch.json(&["simulate", "--plan", text(&scratch.file("plan.yaml", PLAN))]);
    let step = number(&alone, "/step_seconds");
    // The eight ranks of the first stage read. Each of the four parts of the batch is read by
    // two tensor-parallel ranks, so 64 samples of 10 MB at 2 GB/s take 320 ms.
    let input = format!("{PLAN}input: {{bytes_per_sample: 10MB, decode: 1ms, workers: 8, prefetch: 4}}\n");
    let plan = scratch.file("slow.yaml", &input);
    let slow = scratch.json(&["simulate", "--plan", text(&plan), "--what-if", "storage.bandwidth*1000"]);
    assert_eq!(slow["input"]["bound"], "storage");
    assert_eq!(slow["input"]["reading_ranks"], 8);
    assert!((number(&slow, "/step_seconds") - 0.32).abs() < 1e-6, "{}", slow["input"]);
    let data = number(&slow, "/breakdown_seconds/data") - number(&alone, "/breakdown_seconds/data");
    assert!(are_close(data, 0.32 - step) || (data - (0.32 - step)).abs() < 1e-6);
    assert!((number(&slow, "/samples_per_second") - 100.0).abs() < 1e-3);
    assert!((number(&slow, "/what_if/0/step_seconds") - step).abs() < 1e-6, "with fast storage the step itself is the bound");
}

#[test]
fn chakra_traces_are_written_for_every_rank() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let document = scratch.json(&["export", "--plan", text(&plan), "--to", "chakra", "-o", "traces"]);
    assert_eq!(document["traces"], 16);
    assert!((0..16).all(|rank| scratch.path(&format!("traces/gpt.{rank}.et")).is_file()));
    for file in ["communicators.json", "network.yml", "system.json", "remote_memory.json", "logical_topology.json"] {
        assert!(scratch.path("traces").join(file).is_file(), "{file}");
    }
    let network = std::fs::read_to_string(scratch.path("traces/network.yml")).expect("written");
    assert!(network.contains("npus_count: [ 8, 2 ]"), "{network}");
    scratch.json(&["export", "--plan", text(&plan), "--to", "perfetto", "-o", "trace.json"]);
    let trace = std::fs::read_to_string(scratch.path("trace.json")).expect("written");
    assert!(serde_json::from_str::<Value>(&trace).expect("JSON")["traceEvents"].is_array());
    scratch.json(&["export", "--plan", "plan.yaml", "--to", "megatron", "-o", "job"]);
    assert!(std::fs::read_dir(scratch.path("job")).expect("a folder").count() > 0);
}

#[test]
fn the_planner_chooses_the_first_nodes_and_writes_them_into_the_plan() {
    let scratch = Scratch::new();
    let node = |name: &str, kind: &str, price: u32| {
        format!(
            "  - {{name: {name}, count: 1, devices: {{kind: {kind}, count: 4}}, link: nvswitch-150GB/s, nics: {{count: 1, bandwidth: 10Gbit/s}}, price_per_hour: {price}}}\n"
        )
    };
    let devices = "name: two\ndevices:\n  v100: {base: v100-sxm-32g}\n  a100: {base: a100-sxm-80g}\nnodes:\n";
    let nodes = format!("{}{}", node("old", "v100", 10), node("new", "a100", 90));
    let topology = scratch.file("two.yaml", &format!("{devices}{nodes}network: {{kind: switch, latency: 5us}}\n"));
    scratch.file("model.yaml", "{family: gpt, layers: 4, hidden: 1024, heads: 8, vocab: 8192, sequence: 512}");
    let fixed = ["--precision", "fp16", "--global-batch", "32", "--fix", "pipeline=1,zero=0,bucket=25MiB,offload=none"];
    let usual = [&["plan", "--model", "model.yaml", "--topology", text(&topology)], &fixed[..]].concat();
    let planned = |more: &[&str]| scratch.json(&[&usual[..], more].concat());
    let step = |document: &Value| number(document, "/predicted/step_seconds");
    let ranks = |document: &Value| -> f64 {
        ["data", "tensor", "context", "expert", "pipeline"]
            .iter()
            .map(|axis| number(document, &format!("/plan/layout/{axis}")))
            .product()
    };
    // All-reducing gradients over the slow link costs more than the old node's devices gain.
    let (open, old) = (planned(&["-o", "open.yaml"]), planned(&["--first-nodes", "old"]));
    assert_eq!((open["plan"]["first_nodes"].as_str(), ranks(&open)), (Some("new"), 4.0));
    assert!(old["plan"]["first_nodes"] == "old" && step(&open) < step(&old), "{} {}", step(&open), step(&old));
    // The search counts the layouts of both node orders, and `simulate` predicts the plan's step.
    let counts = ["alike", "needless", "indivisible", "out_of_memory", "bounded_out", "simulated"];
    let counted: f64 = counts.iter().map(|count| number(&open, &format!("/search/{count}"))).sum();
    assert_eq!(counted, number(&open, "/search/layouts"));
    assert!(number(&open, "/search/layouts") > number(&planned(&["--first-nodes", "new"]), "/search/layouts"));
    assert!(are_close(number(&scratch.json(&["simulate", "--plan", "open.yaml"]), "/step_seconds"), step(&open)));
    // The old node is nine times cheaper and less than nine times slower, and a limit of 10 an hour
    // buys nothing else. It is first in the file, so the plan names no first nodes.
    assert!(planned(&["--objective", "cost"])["plan"]["first_nodes"].is_null());
    assert!(planned(&["--price-limit", "10"])["plan"]["first_nodes"].is_null());
    assert_eq!(planned(&["--price-limit", "90"])["plan"]["first_nodes"], "new");
    let output = scratch.run(&[&usual[..], &["--first-nodes", "middle"]].concat());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(2) && message.contains("no kind of node called `middle`\nhint: there are `old`, `new`"),
        "{message}"
    );
}

/// Asks for the best mode of a small model on a lab's slow links.
fn modes(scratch: &Scratch, more: &[&str]) -> Value {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/small-gpt.yaml");
    let job = ["plan", "--model", model, "--topology", "lab-4x1g-200m", "--global-batch", "24", "--optimizer", "adamw"];
    let layouts = ["--fix", "data=4", "--top", "2", "--mode", "any"];
    scratch.json(&[&job[..], &layouts, more].concat())
}

#[test]
fn modes_are_compared_by_time_to_a_loss_with_what_that_assumes() {
    let scratch = Scratch::new();
    let of = |entry: &Value, name: &str| entry["plan"]["mode"].get(name).is_some();
    let plain = modes(&scratch, &[]);
    let compared = plain["modes"]["modes"].as_array().expect("modes");
    assert!(compared.len() > 1 && compared.iter().all(|row| row["samples_needed"] == 1.0), "{plain}");
    assert!(!compared.iter().any(|row| of(row, "local_sgd") || of(row, "decentralised")), "{plain}");
    let to_loss = ["--objective", "time-to-loss"];
    let all = modes(&scratch, &to_loss);
    let compared = all["modes"]["modes"].as_array().expect("modes");
    let times: Vec<f64> = compared.iter().filter_map(|row| row["relative_time"].as_f64()).collect();
    assert!(times.is_sorted() && times.len() == compared.len() && times.contains(&1.0), "{times:?}");
    // What more it needs grows with the steps of a round, and with the predicted staleness.
    let needed = |entry: &Value| entry["samples_needed"].as_f64().expect("a number");
    let local = |every: usize| {
        let plain = serde_json::json!({"local_sgd": {"every": every}});
        compared.iter().find(|row| row["plan"]["mode"] == plain).map(needed).expect("local SGD")
    };
    assert!(local(2) > 1.0 && local(32) > local(8) && local(8) > local(2), "{all}");
    let stale = compared.iter().find(|row| row["plan"]["mode"]["parameter_server"]["staleness"] == "unbounded").expect("a mode");
    let staleness = number(stale, "/predicted/paces/staleness/mean");
    assert!(staleness > 1.0 && (needed(stale) - (1.0 + 0.05 * staleness)).abs() < 1e-9, "{stale}");
    // 500 steps between exchanges, over links that a step's gradients take long on.
    assert_eq!(compared[0]["plan"]["mode"]["local_sgd"]["every"], 500, "{all}");
    assert!(times[0] < 0.9, "{times:?}");
    assert_eq!((&all["plan"], &all["predicted"]), (&compared[0]["plan"], &compared[0]["predicted"]));
    // The late gradients of one worker of three are dropped, so a half more samples are needed.
    let dropping = |value: &&Value| {
        let servers = &value["plan"]["mode"]["parameter_server"];
        (&servers["servers"], &servers["backup_workers"]) == (&Value::from(1), &Value::from(1))
    };
    let dropping = compared.iter().find(dropping).expect("a backup worker");
    assert!(dropping["plan"]["layout"]["data"] == 3 && dropping["samples_needed"] == 1.5, "{dropping}");
    assert!(dropping["source"].as_str().is_some_and(|text| text.contains("1604.00981")), "{dropping}");
    let assumption = all["modes"]["assumption"].as_str().expect("a text");
    assert!(assumption.contains("assumes") && assumption.contains("built-in table"), "{assumption}");
    // With another table the answer is another one, and the plan that is written has its mode.
    let table = "- {mode: synchronous, samples: 1, source: ours}\n- {mode: {local_sgd: {every: 500}}, samples: 100, source: ours}\n\
                 - {mode: {decentralised: {graph: ring, every: 4}}, samples: 0.5, source: ours}\n";
    let table = scratch.file("needed.yaml", table);
    let own = modes(&scratch, &[&to_loss[..], &["--samples-needed", text(&table), "-o", "best.yaml"]].concat());
    assert_eq!(own["modes"]["modes"].as_array().map(Vec::len), Some(3), "{own}");
    assert!(own["modes"]["assumption"].as_str().is_some_and(|text| text.contains("needed.yaml")), "{own}");
    assert_eq!(own["plan"]["mode"]["decentralised"]["every"], 4, "{own}");
    let written = scratch.json(&["simulate", "--plan", "best.yaml"]);
    assert!(are_close(number(&written, "/step_seconds"), number(&own, "/predicted/step_seconds")));
}

#[test]
fn links_are_busy_for_what_crosses_them_and_servers_for_their_work() {
    let scratch = Scratch::new();
    let simulate = |mode: &str| {
        let plan = "model: {family: mlp, widths: [784, 512, 512, 10]}\ntopology: lab-4x1g-200m\nglobal_batch: 240\n";
        let layout = if mode.contains("parameter_server") { "{data: 3, micro_batch: 80}" } else { "{data: 4, micro_batch: 60}" };
        let plan = scratch.file("plan.yaml", &format!("{plan}layout: {layout}\nmode: {mode}\n"));
        scratch.json(&["simulate", "--plan", text(&plan)])
    };
    // How often all parameters cross an uplink of 25 MB/s in a step, at the rate that TCP reaches.
    let parameters = 4.0 * (784 * 512 + 512 * 512 + 512 * 10 + 512 + 512 + 10) as f64;
    let of_uplink = |document: &Value| {
        let links = document["load"]["links"].as_array().expect("a list");
        let link = links.iter().find(|link| link["link"] == "leaf-1/up").expect("the uplink has load");
        number(link, "/busy") * number(document, "/step_seconds") * 25e6 / parameters
    };
    // Two of three workers are in the other rack than the server. In a ring of four, three quarters
    // cross it twice.
    for (mode, crossings, has_server) in [
        ("{parameter_server: {servers: 1}}", 2.0, true),
        ("{parameter_server: {servers: 1, staleness: 2}}", 2.0, true),
        ("{local_sgd: {every: 5}}", 2.0 * 0.75 / 5.0, false),
        ("{decentralised: {graph: ring, every: 2}}", 2.0 / 2.0, false),
    ] {
        let document = simulate(mode);
        let found = of_uplink(&document) / crossings;
        assert!((1.0..1.15).contains(&found), "{mode}: {found}\n{}", document["load"]);
        let servers = document["load"]["servers"].as_array().expect("a list");
        assert_eq!(servers.len(), usize::from(has_server), "{mode}: {}", document["load"]);
        assert!(
            servers.iter().all(|server| server["rank"] == 3 && (0.001..=1.0).contains(&number(server, "/busy"))),
            "{servers:?}"
        );
    }
    assert!(simulate("synchronous")["load"].is_null());
}

#[test]
fn tables_of_samples_that_say_nothing_are_refused() {
    let scratch = Scratch::new();
    let job = ["plan", "--model", "mlp", "--topology", "local", "--global-batch", "64"];
    for (table, more, expected) in [
        ("- {mode: synchronous, samples: 0, source: x}", &["--mode", "any"][..], "no number above 0"),
        ("- {mode: {local_sgd: {every: 4}}, samples: 1, source: x}", &["--mode", "any"], "no entry is of the synchronous mode"),
        ("- {mode: {gossip: {}}, samples: 1, source: x}", &["--mode", "any"], "gossip"),
        ("- {mode: synchronous, samples: 1, per_staleness: -1, source: x}", &["--mode", "any"], "`per_staleness` of the mode"),
        ("- {mode: synchronous, samples: 1, every: [4], source: x}", &["--mode", "any"], "no steps of a round"),
        ("- {mode: synchronous, samples: 1, source: x}", &["--mode", "any", "--objective", "p90"], "`--mode any` compares times"),
    ] {
        let table = scratch.file("table.yaml", table);
        let output = scratch.run(&[&job[..], &["--samples-needed", text(&table)], more].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected) && message.contains("hint:"), "{message}");
    }
}

#[test]
fn settings_that_change_nothing_are_said() {
    let scratch = Scratch::new();
    let remarks = |model: &str, topology: &str, more: &str| {
        let job = format!("model: {model}\ntopology: {topology}\nglobal_batch: 8\nlayout: {{data: 2}}\n{more}\n");
        scratch.file("plan.yaml", &job);
        scratch.json(&["simulate", "--plan", "plan.yaml"])["remarks"].to_string()
    };
    let overlap = "precision: bf16\nstack: nemo\noverlap: {expert: true}";
    assert!(remarks("gpt2", "dgx-a100-80g", overlap).contains("the model has no mixtures of experts"));
    assert!(remarks("mlp", "lab-2x1g", "stack: nemo").contains("`stack: nemo` has no costs on"));
    assert!(
        remarks("gpt2", "dgx-a100-80g", "precision: bf16\nstack: maxtext-tpu")
            .contains("are those on TPUs, and `a100-sxm-80g` is none")
    );
    assert!(remarks("gpt2", "tpu-v5p", "precision: bf16\nstack: nemo").contains("hint: name `maxtext-tpu`"));
    let usual = remarks("gpt2", "dgx-a100-80g", "precision: bf16\nstack: nemo");
    assert!(!usual.contains("no costs on") && !usual.contains("the costs of"), "{usual}");
    let usual = remarks("gpt2", "dgx-a100-80g", "precision: bf16\nstack: nemo\noverlap: {gradients: false}");
    assert!(!usual.contains("without effect"), "{usual}");
    let limited = "precision: bf16\nstack: nemo\nworkload: {nodes_per_token: 2}";
    assert!(remarks("gpt2", "dgx-a100-80g", limited).contains("`nodes_per_token` without effect"));
    assert!(remarks("mlp", "lab-2x1g", "overlap: {passes: true}").contains("`overlap: {passes: true}` without effect"));
}

#[test]
fn packed_sequences_take_less_time_where_attention_is_fused() {
    let scratch = Scratch::new();
    let run = |model: &str, stack: &str, workload: &str| {
        let job = format!("model: {model}\ntopology: dgx-a100-80g\nglobal_batch: 8\nprecision: bf16\nlayout: {{data: 8}}\n");
        scratch.file("plan.yaml", &format!("{job}stack: {stack}\nworkload: {{{workload}}}\n"));
        scratch.run(&["simulate", "--plan", "plan.yaml", "--json"])
    };
    let simulated = |model: &str, stack: &str, workload: &str| -> Value {
        serde_json::from_slice(&run(model, stack, workload).stdout).expect("JSON")
    };
    let step = |workload: &str| number(&simulated("gpt2", "nemo", workload), "/step_seconds");
    assert!(step("packed: 128") < step("packed: 512") && step("packed: 512") < step(""));
    assert!(are_close(step("packed: 4096"), step("")));
    for (model, stack) in [("gpt2", "megatron-deepspeed"), ("resnet50", "ddp")] {
        let remarks = simulated(model, stack, "packed: 128")["remarks"].to_string();
        assert!(remarks.contains("`packed` without effect"), "{model}: {remarks}");
    }
    let refused = run("gpt2", "nemo", "packed: 0");
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && message.contains("a document has no token"), "{message}");
}

#[test]
fn slow_networks_leave_the_second_node_idle() {
    let scratch = Scratch::new();
    let job = [
        "plan",
        "--model",
        "bert-base-uncased",
        "--topology",
        "2x8xv100-sxm-32g@100Gbit/s",
        "--global-batch",
        "512",
        "--top",
        "3",
    ];
    let document = scratch.json(&[&job[..], &["--breakeven", "inter_node.bandwidth"]].concat());
    let stretches = document["breakeven"]["stretches"].as_array().expect("stretches");
    let factor = |stretch: &Value| number(stretch, "/from");
    assert!(stretches.len() > 1 && stretches.windows(2).all(|pair| factor(&pair[0]) < factor(&pair[1])), "{document}");
    // On hardly any network one node is the fastest, and today's network is fast enough for both.
    assert_eq!(stretches[0]["layout"], Value::Null, "{document}");
    let today = stretches.iter().rfind(|stretch| factor(stretch) <= 1.0).expect("a stretch that holds today's network");
    assert!(today["layout"].is_u64(), "{document}");
}

#[test]
fn a_breakeven_of_nothing_known_is_refused() {
    let scratch = Scratch::new();
    let job = ["plan", "--model", "bert-base-uncased", "--topology", "8xv100-sxm-32g", "--global-batch", "64"];
    let output = scratch.run(&[&job[..], &["--breakeven", "inter_node.colour"]].concat());
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn inputs_that_several_operators_read_can_be_sharded() {
    let scratch = Scratch::new();
    // The products of both branches read the sharded input, whose gathering has a price.
    let job = ["plan", "--model", "mlp", "--topology", "2xh100", "--stack", "foretell", "--method", "lora", "--top", "2"];
    let document = scratch.json(&[&job[..], &["--fix", "tensor=2"]].concat());
    assert!(number(&document, "/predicted/step_seconds") > 0.0, "{document}");
}

/// A cluster whose slower node comes first, so that the best layout may leave it out.
const MIXED: &str = "\
name: mixed
nodes:
  - {name: slow, count: 1, devices: {kind: v100-sxm-32g, count: 2}, link: nvswitch-150GB/s, nics: {count: 1, bandwidth: 100Gbit/s}}
  - {name: fast, count: 1, devices: {kind: h100-sxm-80g, count: 4}, link: nvswitch-450GB/s, nics: {count: 1, bandwidth: 100Gbit/s}}
";

#[test]
fn the_library_answers_as_the_program() {
    let scratch = Scratch::new();
    let file = scratch.file("mixed.yaml", MIXED);
    let sizes = json!({"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "sequence": 128});
    let model: Model = serde_json::from_value(sizes.clone()).expect("a model");
    scratch.file("small.yaml", &sizes.to_string());
    let mixed = Topology::from_yaml(MIXED, "mixed.yaml").expect("a topology");
    let a100 = Topology::library("dgx-a100-80g").expect("a topology");
    let plan_of = |precision, stack: &str| {
        let defaults = &Profiles::library().and_then(|profiles| profiles.stack(stack)).expect("a stack").defaults;
        let layout = Layout { bucket: defaults.bucket, ..Layout::default() };
        let job = Plan::new(layout, 16);
        Plan { precision, optimizer: Optimizer::AdamW, stack: Stack::new(stack), overlap: defaults.overlap, ..job }
    };
    for (topology, named, stack, formats) in [
        (&mixed, text(&file), "foretell", "fp16"),
        (&a100, "dgx-a100-80g", "foretell", "bf16,fp32"),
        (&a100, "dgx-a100-80g", "hf-trainer", "bf16"),
    ] {
        let of_program = scratch.json(&[
            "plan",
            "--model",
            "small.yaml",
            "--topology",
            named,
            "--stack",
            stack,
            "--precision",
            formats,
            "--global-batch",
            "16",
            "--fix",
            "pipeline=1",
            "--top",
            "3",
        ]);
        let formats: Vec<DataType> =
            formats.split(',').map(|name| serde_json::from_value(json!(name)).expect("a format")).collect();
        let base = plan_of(formats[0], stack);
        let fixed = "pipeline=1".parse().expect("it is well formed");
        let job = PlanJob { formats, fixed, top: 3, ..PlanJob::new(&model, "small", topology, &base) };
        let of_library = plan_job(&job).expect("an answer");
        let program: Vec<&Value> = [&of_program["predicted"]]
            .into_iter()
            .chain(of_program["alternatives"].as_array().expect("a list").iter().map(|other| &other["predicted"]))
            .collect();
        // As text, since that is how the program's numbers come.
        let as_text = |prediction: &Prediction| -> Value {
            serde_json::from_str(&serde_json::to_string(prediction).expect("JSON")).expect("JSON")
        };
        let library = of_library.planned.candidates.iter().map(|candidate| as_text(&candidate.prediction));
        let without_clock = |mut prediction: Value| {
            prediction.as_object_mut().expect("an object").remove("wall_seconds");
            prediction
        };
        let library: Vec<Value> = library.map(without_clock).collect();
        let program: Vec<Value> = program.into_iter().cloned().map(without_clock).collect();
        assert_eq!(program, library, "{named}, {stack}");
        assert_eq!(of_program["search"]["layouts"], json!(of_library.planned.search.layouts));
        assert_eq!(of_program["plan"]["first_nodes"], json!(of_library.first_nodes));
    }
}
