//! RL post-training as users ask about it: plans, simulations, what is refused, and the documents.

mod common;

use boon::{Compiler, Schemas};
use common::Scratch;
use serde_json::{Value, json};

const JOB: [&str; 7] = ["plan", "--model", "short.yaml", "--topology", "8xh100", "--method", "grpo"];
const ROLLOUT: &str = "prompts=16,samples=8,prompt=512,response=1024,response-max=3072";

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.file("short.yaml", "base: llama3-8b\nlayers: 4\n");
    scratch
}

fn planned(scratch: &Scratch, more: &[&str]) -> Value {
    scratch.json(&[&JOB[..], more].concat())
}

#[track_caller]
fn assert_matches(scratch: &Scratch, name: &str, document: &Value) {
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("schema.json", scratch.json(&["schema", name])).expect("it is JSON");
    let index = compiler.compile("schema.json", &mut schemas).expect("it is a schema");
    let failure = schemas.validate(document, index).err().map(|error| format!("{error:#}"));
    assert_eq!(failure, None, "{name}");
}

#[test]
fn a_plan_simulates_to_its_step_and_documents_match_their_schemas() {
    let scratch = scratch();
    let answer = planned(&scratch, &["--rollout", ROLLOUT, "-o", "best.yaml"]);
    assert_matches(&scratch, "plan-roles-answer", &answer);
    assert_eq!(answer["plan"]["method"], "grpo");
    assert_eq!(answer["plan"]["rollout"]["response_max"], 3072);
    assert_eq!(answer["predicted"]["fits"], true);
    let simulated = scratch.json(&["simulate", "--plan", "best.yaml"]);
    assert_matches(&scratch, "simulate-roles-answer", &simulated);
    for field in ["step_seconds", "generation_seconds", "training_seconds", "peak_memory_bytes", "memory"] {
        assert_eq!(simulated[field], answer["predicted"][field], "{field}");
    }
    // The file matches the schema of plan files, and the text has the roles as rows.
    let file: Value =
        serde_saphyr::from_str(&std::fs::read_to_string(scratch.path("best.yaml")).expect("written")).expect("YAML");
    assert_matches(&scratch, "plan", &file);
    let text = String::from_utf8(scratch.run(&["simulate", "--plan", "best.yaml"]).stdout).expect("UTF-8");
    for row in ["rollout engine", "generation", "log-probabilities", "reference", "training", "memory in generation"] {
        assert!(text.contains(row), "{row}: {text}");
    }
}

#[test]
fn a_run_has_its_hours_and_its_price() {
    let scratch = scratch();
    let run = ["--samples", "1600", "--epochs", "3", "--device-price", "2.50USD"];
    let answer = planned(&scratch, &[&["--rollout", ROLLOUT, "-o", "best.yaml"][..], &run].concat());
    let simulated = scratch.json(&[&["simulate", "--plan", "best.yaml"][..], &run].concat());
    assert_eq!(answer["cost"], simulated["cost"]);
    let (cost, step) = (&simulated["cost"], simulated["step_seconds"].as_f64().expect("a step"));
    // A sample is a prompt, of which a step has 16. Eight devices are paid.
    assert_eq!((&cost["run"]["steps"], &cost["devices"], &cost["currency"]), (&json!(300.0), &json!(8), &json!("USD")));
    let price = 300.0 * step / 3600.0 * 8.0 * 2.5;
    assert!((cost["run"]["price"].as_f64().expect("a price") / price - 1.0).abs() < 1e-9, "{cost}");
    assert_eq!(cost["step_energy_joules"], Value::Null);
    let text = String::from_utf8(scratch.run(&[&["simulate", "--plan", "best.yaml"][..], &run].concat()).stdout).expect("UTF-8");
    assert!(text.contains("its price") && !text.contains("energy"), "{text}");
}

#[test]
fn simulate_replaces_the_rollout_and_says_what_would_fit() {
    let scratch = scratch();
    planned(&scratch, &["--rollout", ROLLOUT, "-o", "best.yaml"]);
    let step = |rollout: &str| scratch.json(&["simulate", "--plan", "best.yaml", "--rollout", rollout])["step_seconds"].as_f64();
    assert!(step("response=2048") > step("response=512"));
    let output = scratch.run(&["simulate", "--plan", "best.yaml", "--rollout", "memory-share=0.01", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let answer: Value = serde_json::from_slice(&output.stdout).expect("one document");
    assert_eq!(answer["fits"], false);
    let changes = answer["changes"].as_array().expect("changes");
    assert!(!changes.is_empty());
    for change in changes {
        let rollout = change["rollout"].as_str().expect("a rollout");
        let rollout =
            if rollout.starts_with("memory-share") { rollout.to_owned() } else { format!("memory-share=0.01,{rollout}") };
        let changed = scratch.json(&["simulate", "--plan", "best.yaml", "--rollout", &rollout]);
        assert_eq!((&changed["fits"], &changed["step_seconds"]), (&Value::Bool(true), &change["step_seconds"]), "{rollout}");
    }
}

#[test]
fn wrong_rollouts_are_refused_with_a_hint() {
    let scratch = scratch();
    let refused = |arguments: &[&str], expected: &str| {
        let output = scratch.run(&[arguments, &["--json"]].concat());
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
        assert!(text.contains(expected), "{arguments:?}: {text}");
    };
    let of_plan = |more: &[&str], expected: &str| refused(&[&JOB[..], more].concat(), expected);
    of_plan(&["--rollout", "promts=3"], "prompts");
    of_plan(&["--rollout", "response=4096,response-max=1024"], "response_max");
    of_plan(&["--rollout", "framework=trl,off-policy=1"], "off policy");
    of_plan(&["--rollout", "framework=nemo-rl", "--stack", "ddp"], "megatron-core");
    of_plan(&["--sequence", "4096"], "--rollout");
    of_plan(&["--front"], "--front");
    of_plan(&["--global-batch", "100"], "global batch");
    refused(&["plan", "--model", "gpt2", "--topology", "8xh100", "--rollout", "prompts=3"], "--method grpo");
    refused(&["run", "--model", "gpt2", "--topology", "local", "--method", "grpo"], "--method grpo");
    refused(&["plan", "--model", "resnet50", "--topology", "8xh100", "--method", "grpo"], "sequences");
    // Plan files: a place, and commands that know no generation.
    planned(&scratch, &["--rollout", ROLLOUT, "-o", "best.yaml"]);
    let file = std::fs::read_to_string(scratch.path("best.yaml")).expect("written");
    refused(&["execute", "--plan", "best.yaml"], "method: grpo");
    refused(&["export", "--plan", "best.yaml", "--to", "megatron", "-o", "job"], "method: grpo");
    refused(&["simulate", "--plan", "best.yaml", "--critical-path"], "--critical-path");
    scratch.file("wrong.yaml", &file.replace("prompts: 16", "prompts: sixteen"));
    refused(&["simulate", "--plan", "wrong.yaml"], "wrong.yaml");
    scratch.file("unpaired.yaml", &file.replace("method: grpo\n", ""));
    refused(&["simulate", "--plan", "unpaired.yaml"], "`rollout` without `method`");
}

#[test]
fn tables_and_numbers_of_devices_are_asked_of_methods_that_generate() {
    let scratch = Scratch::new();
    let job = ["plan", "--model", "qwen2.5-0.5b", "--method", "grpo", "--rollout", "prompts=2,samples=2,response=128"];
    let table = scratch.json(&[&job[..], &["--topology", "1x1xl4", "--table", "batch,loss", "--report", "t.html"]].concat());
    assert_matches(&scratch, "table-answer", &table);
    let cells = table["cells"].as_array().expect("cells");
    // An update has no more responses than a step.
    for cell in cells {
        let batch: usize = cell["row"].as_str().expect("a batch").parse().expect("a number");
        assert_eq!(cell["fits"], batch <= 4, "{cell}");
    }
    let page = std::fs::read_to_string(scratch.path("t.html")).expect("written");
    assert!(page.contains("What fits, by batch and loss"), "the page has the table");
    let needed = scratch.json(&[&job[..], &["--gpus-needed", "l4"]].concat());
    assert_eq!(needed["kinds"][0]["devices"], 1, "{needed}");
    let context = [&job[..], &["--topology", "1x1xl4", "--table", "context,batch"]].concat();
    let refused = scratch.run(&context);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("a table of a method that generates"), "{refused:?}");
}

#[test]
fn published_rows_are_scored_in_two_halves() {
    let scratch = Scratch::new();
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/published/rl.csv");
    let rows = std::fs::read_to_string(table).expect("the table");
    // The first line, two small jobs, and one that states too little.
    let kept: Vec<&str> = rows
        .lines()
        .filter(|line| ["row_id,", "deepspeed-chat", "trl-2971-1,"].iter().any(|name| line.starts_with(name)))
        .collect();
    scratch.file("rl.csv", &kept.join("\n"));
    let scores = scratch.json(&["score", "rl.csv"]);
    assert_matches(&scratch, "rollout-score-answer", &scores);
    let rows = scores["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), kept.len() - 1);
    for row in rows {
        assert!(row["predicted_step_seconds"].is_number() != row["refused"].is_string(), "{row}");
    }
    assert_eq!(scores["seen"]["rows"], 1);
    assert_eq!(scores["held_out"]["rows"], 0);
}

#[test]
fn a_topology_with_failures_is_named_where_a_run_has_none() {
    let scratch = scratch();
    let nodes = "{count: 1, devices: {kind: h100-sxm-80g, count: 8}, link: nvswitch-900GB/s, mean_time_between_failures: 5000h}";
    scratch.file("failing.yaml", &format!("name: failing\nnodes:\n  - {nodes}\n"));
    let job = ["plan", "--model", "short.yaml", "--topology", "failing.yaml", "--method", "grpo", "--rollout", ROLLOUT];
    let output = scratch.run(&[&job[..], &["--steps", "100"]].concat());
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && notes.contains("`mean_time_between_failures`"), "{notes}");
}

#[test]
fn options_replace_parts_of_a_plan_whose_batch_is_not_divided() {
    let scratch = scratch();
    planned(&scratch, &["--rollout", ROLLOUT, "-o", "best.yaml"]);
    let plan = std::fs::read_to_string(scratch.path("best.yaml")).expect("written");
    // 128 responses are not a multiple of 7 on each of 8 ranks.
    let undivided = plan.lines().map(|line| if line.contains("micro_batch:") { "  micro_batch: 7" } else { line });
    scratch.file("undivided.yaml", &undivided.collect::<Vec<_>>().join("\n"));
    for more in [["--method", "grpo"], ["--adapter", "rank=8"], ["--loss", "chunked"]] {
        scratch.json(&[&["simulate", "--plan", "undivided.yaml"][..], &more].concat());
    }
}
