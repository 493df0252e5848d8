//! `simulate` with jitter, with stragglers, and with collectives simulated step by step.

mod common;

use common::{Scratch, text};
use serde_json::Value;

const PLAN: &str = "model: {family: gpt, layers: 4, hidden: 256, heads: 4, vocab: 512, sequence: 64}\n\
                    topology: dgx-a100-80g\n\
                    nodes: 2\n\
                    global_batch: 16\n\
                    precision: bf16\n\
                    layout: {data: 4, tensor: 2, pipeline: 2, micro_batch: 1}\n";

fn simulated(more: &[&str]) -> Value {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    scratch.json(&[&["simulate", "--plan", text(&plan)], more].concat())
}

fn number(document: &Value, path: &str) -> f64 {
    document.pointer(path).and_then(Value::as_f64).expect("a number")
}

#[test]
fn the_answer_states_how_much_time_a_straggler_costs() {
    let usual = simulated(&[]);
    assert!(usual.get("disturbance").is_none());
    let slow = simulated(&["--straggler", "3=1.5"]);
    assert_eq!(number(&slow, "/disturbance/undisturbed_step_seconds"), number(&usual, "/step_seconds"));
    let cost = number(&slow, "/step_seconds") - number(&usual, "/step_seconds");
    assert!(cost > 0.0 && (number(&slow, "/disturbance/cost_seconds") - cost).abs() < 1e-12, "{slow}");
    // A question is asked about the step with its straggler.
    let unchanged = simulated(&["--straggler", "3=1.5", "--what-if", "latency*1"]);
    assert_eq!(number(&unchanged, "/what_if/0/predicted/step_seconds"), number(&slow, "/step_seconds"), "{unchanged}");
    // Most ranks are still equivalent with one straggler. Folding them gives the same answer as
    // simulating every rank.
    let unfolded = simulated(&["--straggler", "3=1.5", "--fold", "off"]);
    assert!((number(&slow, "/step_seconds") / number(&unfolded, "/step_seconds") - 1.0).abs() < 1e-9);
}

#[test]
fn the_same_seed_gives_the_same_jitter() {
    let step = |seed: &str| number(&simulated(&["--jitter", "0.05", "--seed", seed]), "/step_seconds");
    assert_eq!(step("1").to_bits(), step("1").to_bits());
    assert_ne!(step("1").to_bits(), step("2").to_bits());
}

#[test]
fn collectives_simulated_step_by_step_take_about_as_long_as_flows() {
    // Without folding, because the two models fold to different numbers of ranks.
    let with_collectives = |model| simulated(&["--fold", "off", "--collectives", model]);
    let (flow, steps) = (with_collectives("flow"), with_collectives("steps"));
    let ratio = number(&steps, "/step_seconds") / number(&flow, "/step_seconds");
    assert!((0.9..1.1).contains(&ratio), "step by step takes {ratio} times as long as flows");
    assert!(number(&steps, "/events") > number(&flow, "/events"));
}

#[test]
fn impossible_disturbances_are_refused_with_a_hint() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    for (arguments, expected) in [
        (["--straggler", "3"], "hint: 7=1.3"),
        (["--straggler", "3=-1"], "not a finite number above 0"),
        (["--straggler", "16=2"], "the layout has ranks 0 to 15"),
        (["--jitter", "20"], "between 0 and 2"),
    ] {
        let output = scratch.run(&[&["simulate", "--plan", text(&plan)], &arguments[..]].concat());
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && message.contains(expected), "{arguments:?}: {message}");
    }
}
