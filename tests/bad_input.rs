//! Wrong input, as a user gives it: each is answered with the right exit status and one sentence
//! that names the hint, on standard error, with nothing on standard output.

mod common;

use common::{Scratch, text};

/// Runs a command that must be refused; returns what it says.
#[track_caller]
fn refused(scratch: &Scratch, arguments: &[&str], status: i32) -> String {
    let said = scratch.run(arguments);
    let words = String::from_utf8_lossy(&said.stderr).into_owned();
    assert_eq!(said.status.code(), Some(status), "{arguments:?}: {words}");
    assert!(said.stdout.is_empty(), "{arguments:?} prints {}", String::from_utf8_lossy(&said.stdout));
    one_sentence(&words);
    words
}

/// One line that says what is wrong, with the hint, and no panic.
#[track_caller]
fn one_sentence(words: &str) {
    let errors: Vec<&str> = words.lines().filter(|line| line.starts_with("error:")).collect();
    assert!(matches!(errors.as_slice(), [error] if error.contains("hint:")), "{words}");
    assert!(!words.contains("panicked"), "{words}");
}

#[track_caller]
fn says(words: &str, parts: &[&str]) {
    for part in parts {
        assert!(words.contains(part), "`{part}` is not in: {words}");
    }
}

const MLP: &str = "{family: mlp, widths: [64, 32, 10]}";

fn plan(more: &str) -> String {
    format!("model: {MLP}\ntopology: local\n{more}\n")
}

#[test]
fn an_unknown_model_is_answered_with_the_zoo() {
    let scratch = Scratch::new();
    let words = refused(&scratch, &["plan", "--model", "resnet51", "--topology", "dgx-a100-80g"], 2);
    says(&words, &["resnet51", "resnet50", "gpt2"]);
    says(&refused(&scratch, &["run", "--model", "nothing", "--topology", "local"], 2), &["nothing", "mlp"]);
}

#[test]
fn an_unknown_topology_is_answered_with_the_library() {
    let scratch = Scratch::new();
    says(&refused(&scratch, &["plan", "--model", "mlp", "--topology", "dgx-b1"], 2), &["dgx-b1", "dgx-a100-80g"]);
}

#[test]
fn a_yaml_mistake_is_said_with_file_line_and_column() {
    let scratch = Scratch::new();
    scratch.file("broken.yaml", "model: mlp\ntopology: local\nglobal_batch: [1, 2\nlayout: {data: 2}\n");
    let words = refused(&scratch, &["simulate", "--plan", "broken.yaml"], 2);
    let place = words.split("broken.yaml:").nth(1).expect("the file is named");
    let numbers: Vec<&str> = place.splitn(3, ':').take(2).collect();
    assert!(numbers.iter().all(|number| number.parse::<usize>().is_ok()), "{words}");
}

#[test]
fn an_unknown_field_is_said_with_its_place() {
    let scratch = Scratch::new();
    scratch.file("odd.yaml", &plan("global_batch: 8\nlayout: {data: 1, tensors: 2}"));
    says(&refused(&scratch, &["simulate", "--plan", "odd.yaml"], 2), &["odd.yaml:4:", "tensors"]);
}

#[test]
fn a_bare_quantity_in_a_topology_file_is_refused_at_its_place() {
    let scratch = Scratch::new();
    scratch.file(
        "bare.yaml",
        "name: bare\ndevices:\n  chip: {base: a100-sxm-80g, memory: 80}\nnodes:\n  - {name: n, count: 1, devices: {kind: chip, count: 8}, link: nvswitch-600GB/s}\n",
    );
    says(&refused(&scratch, &["plan", "--model", "mlp", "--topology", "bare.yaml"], 2), &["bare.yaml:3:", "memory"]);
}

#[test]
fn a_bare_quantity_on_the_command_line_is_refused() {
    let scratch = Scratch::new();
    let words = refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--memory-limit", "72"], 2);
    says(&words, &["--memory-limit", "72"]);
}

#[test]
fn contradictory_sizes_in_a_model_file_are_refused_with_its_place() {
    let scratch = Scratch::new();
    scratch.file("odd-gpt.yaml", "{family: gpt, layers: 1, hidden: 30, heads: 4, vocab: 64, sequence: 8}");
    says(&refused(&scratch, &["plan", "--model", "odd-gpt.yaml", "--topology", "local"], 2), &["odd-gpt.yaml"]);
    scratch.file(
        "in-place.yaml",
        "model: {family: gpt, layers: 1, hidden: 30, heads: 4, vocab: 64, sequence: 8}\ntopology: local\nglobal_batch: 8\n",
    );
    says(&refused(&scratch, &["simulate", "--plan", "in-place.yaml"], 2), &["in-place.yaml"]);
}

#[test]
fn a_layout_that_does_not_divide_is_refused() {
    let scratch = Scratch::new();
    scratch.file("batch.yaml", &plan("global_batch: 7\nlayout: {data: 2, micro_batch: 2}"));
    says(&refused(&scratch, &["simulate", "--plan", "batch.yaml"], 2), &["batch.yaml", "global_batch"]);
    scratch.file("stages.yaml", &plan("global_batch: 8\nlayout: {pipeline: 64, micro_batch: 2}"));
    says(&refused(&scratch, &["simulate", "--plan", "stages.yaml", "--oversubscribe"], 2), &["stages.yaml"]);
}

#[test]
fn a_layout_that_does_not_fit_is_status_1() {
    let scratch = Scratch::new();
    let words = refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--memory-limit", "1KiB"], 1);
    says(&words, &["no layout fits", "1 KiB"]);
}

/// One node of this machine's kind, with hardly any memory.
const SMALL: &str = "name: small\ndevices:\n  chip: {memory: 64KiB, memory_bandwidth: 10GB/s, architecture: cpu, peak: {fp32: 50GFLOP/s}}\nnodes:\n  - {name: n, count: 1, devices: {kind: chip, count: 1}}\n";

#[test]
fn a_plan_that_does_not_fit_is_foretold_but_not_run() {
    let scratch = Scratch::new();
    scratch.file("small.yaml", SMALL);
    scratch.file("plan.yaml", "model: mlp\ntopology: small.yaml\nglobal_batch: 32\nlayout: {micro_batch: 32}\n");
    says(&refused(&scratch, &["execute", "--plan", "plan.yaml", "--steps", "1"], 1), &["plan.yaml", "stage 0", "64 KiB"]);
    assert!(!scratch.path("runs").exists(), "nothing is begun");
    // The prediction itself can be made, and says that it does not fit.
    let output = scratch.run(&["simulate", "--plan", "plan.yaml", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    one_sentence(&String::from_utf8_lossy(&output.stderr));
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one document");
    assert_eq!(document["fits"], false);
}

#[test]
fn devices_that_nothing_joins_are_refused() {
    let scratch = Scratch::new();
    let nodes = "name: apart\nnodes:\n  - {name: n, count: 2, devices: {kind: a100-sxm-80g, count: 2}, link: nvswitch-600GB/s}\n";
    scratch.file("apart.yaml", nodes);
    says(&refused(&scratch, &["plan", "--model", "mlp", "--topology", "apart.yaml"], 2), &["apart.yaml", "cannot reach"]);
}

#[test]
fn more_ranks_than_devices_are_refused_unless_wanted() {
    let scratch = Scratch::new();
    let path = scratch.file("wide.yaml", &plan("global_batch: 4096\nlayout: {data: 4096, micro_batch: 1}"));
    says(&refused(&scratch, &["simulate", "--plan", text(&path)], 2), &["wide.yaml", "4096 ranks", "--oversubscribe"]);
    says(&refused(&scratch, &["execute", "--plan", text(&path), "--data", "synthetic"], 2), &["4096 ranks"]);
}

#[test]
fn what_cannot_be_executed_here_is_refused_before_anything_is_measured() {
    let scratch = Scratch::new();
    scratch.file("gpus.yaml", "model: mlp\ntopology: dgx-a100-80g\nglobal_batch: 8\n");
    says(&refused(&scratch, &["execute", "--plan", "gpus.yaml"], 2), &["dgx-a100-80g", "local"]);
    says(&refused(&scratch, &["run", "--model", "mlp", "--topology", "dgx-a100-80g"], 2), &["dgx-a100-80g", "local"]);
    scratch.file("pair.yaml", "name: two-hosts\nbase: cpu-pair\nlab: false\n");
    says(&refused(&scratch, &["run", "--model", "mlp", "--topology", "pair.yaml"], 2), &["two-hosts", "lab: true"]);
    scratch.file("tf32.yaml", &plan("global_batch: 8\nprecision: tf32"));
    says(&refused(&scratch, &["execute", "--plan", "tf32.yaml"], 2), &["tf32", "fp32"]);
    says(&refused(&scratch, &["calibrate", "--topology", "local", "--plan", "tf32.yaml"], 2), &["tf32", "fp32"]);
    says(&refused(&scratch, &["run", "--model", "mlp", "--topology", "local", "--precision", "tf32"], 2), &["tf32", "fp32"]);
}

#[test]
fn missing_or_too_few_data_are_refused_before_measuring() {
    let scratch = Scratch::new();
    scratch.file("plan.yaml", &plan("global_batch: 8"));
    says(&refused(&scratch, &["execute", "--plan", "plan.yaml", "--data", "no/such/folder"], 2), &["no/such/folder"]);
    says(&refused(&scratch, &["run", "--model", "mlp", "--topology", "local", "--data", "no/such"], 2), &["no/such"]);
    scratch.file("large.yaml", &plan("global_batch: 4096\nlayout: {micro_batch: 4096}"));
    says(&refused(&scratch, &["execute", "--plan", "large.yaml", "--data", "digits"], 2), &["4096"]);
    says(&refused(&scratch, &["execute", "--plan", "plan.yaml", "--steps", "0"], 2), &["trains nothing"]);
}

#[test]
fn a_folder_without_a_finished_run_is_refused() {
    let scratch = Scratch::new();
    says(&refused(&scratch, &["check", "nowhere"], 2), &["nowhere", "not a run's folder"]);
    scratch.file("plan.yaml", &plan("global_batch: 8"));
    scratch.json(&["execute", "--plan", "plan.yaml", "--steps", "2", "--no-evaluation", "--run", "first"]);
    std::fs::remove_file(scratch.path("first/measured.json")).expect("it was written");
    says(&refused(&scratch, &["check", "first"], 2), &["first", "did not finish"]);
}

#[test]
fn objectives_without_their_facts_are_refused_with_the_missing_line() {
    let scratch = Scratch::new();
    let plan = |objective: &str| {
        refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--global-batch", "64", "--objective", objective], 2)
    };
    says(&plan("cost"), &["does not say what an hour of every node costs", "price_per_hour"]);
    says(&plan("goodput"), &["mean_time_between_failures"]);
    let text = refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--price-limit", "1"], 2);
    says(&text, &["no node of `local` costs so little", "price_per_hour"]);
    says(&refused(&scratch, &["plan", "--model", "mlp", "--topology", "local", "--scaling", "8"], 2), &["8..4096"]);
}
