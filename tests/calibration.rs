//! `foretell calibrate`: the kernels of every kind of step, and how fast modes converge.

mod common;

use common::{Scratch, text};
use serde_json::Value;

const MODEL: &str = "model: {family: mlp, widths: [64, 32, 10]}\nglobal_batch: 64\noptimizer: sgd\n\
                     training: {momentum: 0.0}\nlayout: {data: 2, micro_batch: 32}\n";
const HOST: &str = "name: host\nnodes:\n- {name: host, count: 1, devices: {kind: cpu-core, count: 2}, link: shared-memory}\n";

#[test]
fn the_kernels_of_every_step_of_a_cycle_are_calibrated() {
    let scratch = Scratch::new();
    let host = scratch.file("host.yaml", HOST);
    let mode = "{local_sgd: {every: 6, outer: {optimizer: nesterov}, fragments: 2, overlap: 1, compression: int8}}";
    let plan = scratch.file("plan.yaml", &format!("{MODEL}topology: host.yaml\nmode: {mode}\n"));
    let calibrate = ["calibrate", "--topology", text(&host), "--plan", text(&plan), "-o", "profile.yaml"];
    scratch.json(&[&calibrate[..], &["--patience", "1ms", "--calibration-time", "10ms"]].concat());
    let predicted = scratch.json(&["simulate", "--plan", text(&plan), "--profile", "profile.yaml", "--oversubscribe"]);
    assert_eq!(predicted["cycle"].as_array().map(Vec::len), Some(5), "{predicted}");
    // The kernels of exchanges are only in steps after the first.
    assert_eq!(predicted["uncalibrated"], serde_json::json!([]), "{predicted}");
}

/// The entry of the mode whose text has these words.
fn entry<'a>(answer: &'a Value, words: &str) -> &'a Value {
    let modes = answer["modes"].as_array().expect("modes");
    modes.iter().find(|mode| mode["mode"].to_string().contains(words)).unwrap_or(&Value::Null)
}

#[test]
fn short_runs_measure_the_samples_that_modes_need() {
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", &format!("{MODEL}topology: local\n"));
    let modes = "- {mode: {local_sgd: {every: 500}}, samples: 9, source: x}\n- {mode: synchronous, samples: 9, source: x}\n\
                 - {mode: {parameter_server: {servers: 1}}, samples: 9, source: x}\n\
                 - {mode: {parameter_server: {servers: 1, staleness: 1}}, samples: 9, source: x}\n\
                 - {mode: {local_sgd: {every: 1}}, samples: 9, source: x}\n\
                 - {mode: {local_sgd: {every: 8, outer: {optimizer: nesterov}}}, samples: 9, source: x}\n";
    let modes = scratch.file("modes.yaml", modes);
    let basic = ["calibrate", "--convergence", "--topology", "local", "--plan", text(&plan), "--modes", text(&modes)];
    let quick = ["--steps", "80", "--seeds", "1", "--learning-rate-factors", "1,4"];
    let answer = scratch.json(&[&basic[..], &quick, &["--target-loss", "1.5", "-o", "table.yaml"]].concat());
    let needed = |words: &str| entry(&answer, words)["samples_needed"].as_f64();
    assert_eq!(answer["target_loss"], 1.5);
    // The larger rate is the better one on these easy digits, and an average after each plain step
    // is the synchronous mode.
    let synchronous = entry(&answer, "synchronous");
    assert!(synchronous["learning_rate"].as_f64().is_some_and(|rate| (rate - 0.2).abs() < 1e-6), "{answer}");
    assert_eq!(entry(&answer, "\"every\":1}")["samples"], synchronous["samples"], "{answer}");
    assert_eq!((needed("synchronous"), needed("\"every\":1}")), (Some(1.0), Some(1.0)), "{answer}");
    // One that has the same gradients is not run.
    assert!(entry(&answer, "\"staleness\":0")["samples"].is_null() && needed("\"staleness\":0") == Some(1.0), "{answer}");
    // An update by each worker's samples alone is two updates for one: half the samples or so.
    assert!(needed("\"staleness\":1").is_some_and(|samples| (0.3..1.0).contains(&samples)), "{answer}");
    assert!(entry(&answer, "\"staleness\":1")["staleness"].as_f64().is_some_and(|mean| mean > 0.0), "{answer}");
    assert!(needed("\"every\":8").is_some_and(|samples| (0.3..2.1).contains(&samples)), "{answer}");
    let refused = answer["refused"].as_array().expect("a list");
    assert!(refused.len() == 1 && refused[0]["reason"].as_str().is_some_and(|why| why.contains("500 steps")), "{answer}");
    // The search takes the table as it is.
    let search =
        ["plan", "--model", "mlp", "--topology", "lab-4x1g-200m", "--global-batch", "64", "--fix", "data=4", "--mode", "any"];
    let found = scratch.json(&[&search[..], &["--objective", "time-to-loss", "--samples-needed", "table.yaml"]].concat());
    let modes = found["modes"]["modes"].as_array().expect("modes");
    let source =
        |words: &str| modes.iter().find(|mode| mode["plan"]["mode"].to_string().contains(words)).map(|mode| &mode["source"]);
    assert!(
        source("\"every\":8").and_then(Value::as_str).is_some_and(|text| text.contains("samples to a loss of 1.5")),
        "{found}"
    );
    assert!(found["modes"]["assumption"].as_str().is_some_and(|text| text.contains("`table.yaml` says so")), "{found}");
}

#[test]
fn a_measurement_of_convergence_that_says_nothing_is_refused() {
    let scratch = Scratch::new();
    scratch.file("plan.yaml", &format!("{MODEL}topology: local\n"));
    scratch.file("none.yaml", "- {mode: {local_sgd: {every: 4}}, samples: 1, source: x}");
    let basic = ["calibrate", "--convergence", "--topology", "local"];
    let quick = ["--plan", "plan.yaml", "--steps", "10", "--seeds", "1", "--learning-rate-factors", "1"];
    for (more, expected) in [
        (&[][..], "`--convergence` needs a plan"),
        (&[&quick[..], &["--target-loss", "1e-9"]].concat(), "and not 0.000000001"),
        (&[&quick[..], &["--modes", "none.yaml"]].concat(), "no entry is of the synchronous mode"),
        (&["--plan", "plan.yaml", "--learning-rate-factors", "1,-1"], "`-1` is no number above 0"),
    ] {
        let output = scratch.run(&[&basic[..], more].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(expected) && message.contains("hint:"), "{message}");
    }
    assert!(!scratch.path("samples-needed.yaml").exists() && !scratch.path("profile.yaml").exists());
}
