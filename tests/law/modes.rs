//! The law of modes: where arithmetic says that replicas which exchange parameters train as the
//! synchronous mode does, they do. And a run that stops after a round goes on as if it had not.

use super::case::Case;
use super::common::Scratch;
use super::random::MODELS;

/// Stochastic gradient descent without momentum: an average of updates is the update of an average.
const PLAIN: &str = ", momentum: 0.0";

fn in_mode(case: &Case, mode: &str) -> String {
    format!("{}mode: {mode}\n", case.plan())
}

/// Checks that both plans have the same curve of losses over six steps, and that neither stands
/// still.
fn same_curve(one: &str, other: &str, tolerance: f64) {
    let scratch = Scratch::new();
    let [first, second] = [one, other].map(|plan| scratch.train(plan, 6, 3, &["--data", "synthetic"]).losses);
    for (step, (one, other)) in first.iter().zip(&second).enumerate() {
        assert!((one - other).abs() <= tolerance * one.abs().max(1.0), "step {step}: {first:?}\n{second:?}\n{other}");
    }
    assert!(first.windows(2).all(|pair| pair[0] != pair[1]), "nothing is trained: {first:?}");
}

fn plain(data: usize, model: &'static str) -> Case {
    Case { data, optimizer: "sgd", recipe: PLAIN, ..Case::usual(model) }
}

#[test]
fn averaging_after_every_step_is_the_synchronous_mode() {
    let (mlp, gpt) = (MODELS[0].0, MODELS[3].0);
    for case in [
        plain(2, mlp),
        Case { tensor: 2, ..plain(2, gpt) },
        Case { pipeline: 2, schedule: ("zb-h1", 1), ..plain(2, gpt) },
        Case { zero: 1, hybrid: true, ..plain(4, mlp) },
        Case { zero: 3, hybrid: true, ..plain(4, gpt) },
    ] {
        same_curve(&case.plan(), &in_mode(&case, "{local_sgd: {every: 1}}"), 2e-4);
    }
    let bf16 = Case { precision: "bf16", ..plain(2, gpt) };
    same_curve(&bf16.plan(), &in_mode(&bf16, "{local_sgd: {every: 1}}"), 1e-2);
}

#[test]
fn an_outer_optimizer_after_every_step_is_that_of_the_gradient() {
    let inner = plain(2, MODELS[0].0);
    for (outer, recipe) in [
        ("{optimizer: sgd, momentum: 0.9}", ", momentum: 0.9"),
        ("{optimizer: nesterov, learning_rate: 1.0, momentum: 0.9}", ", momentum: 0.9, nesterov: true"),
    ] {
        let synchronous = Case { recipe, ..inner.clone() };
        let mode = format!("{{local_sgd: {{every: 1, outer: {outer}}}}}");
        same_curve(&synchronous.plan(), &in_mode(&inner, &mode), 2e-4);
    }
    // Half the outer learning rate is half the learning rate.
    let halved = inner.plan().replace("learning_rate: 0.01", "learning_rate: 0.005");
    same_curve(&halved, &in_mode(&inner, "{local_sgd: {every: 1, outer: {learning_rate: 0.5}}}"), 2e-4);
}

#[test]
fn neighbours_that_are_all_replicas_average_as_all_do() {
    let mlp = MODELS[0].0;
    for (replicas, graph) in [(2, "ring"), (3, "ring"), (2, "exponential"), (4, "complete")] {
        let case = plain(replicas, mlp);
        same_curve(&case.plan(), &in_mode(&case, &format!("{{decentralised: {{graph: {graph}}}}}")), 2e-4);
    }
    let case = Case { optimizer: "adamw", recipe: "", ..plain(2, mlp) };
    let ring = in_mode(&case, "{decentralised: {graph: ring, every: 2}}");
    same_curve(&in_mode(&case, "{local_sgd: {every: 2}}"), &ring, 2e-4);
}

#[test]
fn a_stopped_run_of_replicas_goes_on_with_the_state_of_each() {
    for (mode, precision) in [
        ("{local_sgd: {every: 2, outer: {optimizer: nesterov}}}", "fp32"),
        ("{local_sgd: {every: 2}}", "bf16"),
        ("{decentralised: {graph: ring, every: 2}}", "fp32"),
        ("{decentralised: {graph: exponential, every: 1}}", "bf16"),
    ] {
        let scratch = Scratch::new();
        let plan = in_mode(&Case { data: 4, precision, ..Case::usual(MODELS[0].0) }, mode);
        let train = |steps, more: &[&str]| scratch.train(&plan, steps, 3, &[&["--data", "synthetic"], more].concat());
        let whole = train(8, &["--run", "whole", "--save-every", "never"]);
        train(4, &["--run", "stopped"]);
        let resumed = train(8, &["--resume", "stopped", "--run", "resumed"]);
        let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&resumed.losses), bits(&whole.losses[4..]), "{mode}");
        assert_eq!(whole.arenas, scratch.predicted_memory(&plan), "{mode}");
        // Replicas must have parted: with one batch each, the synchronous mode has another curve.
        let synchronous = plan.replace(&format!("mode: {mode}"), "mode: synchronous");
        let other = scratch.train(&synchronous, 8, 3, &["--data", "synthetic", "--run", "other"]);
        assert!(other.losses[2..].iter().zip(&whole.losses[2..]).all(|(one, other)| one != other), "{mode}");
    }
}

#[test]
fn a_run_within_a_round_is_refused_with_the_steps_that_would_do() {
    let scratch = Scratch::new();
    let plan = in_mode(&plain(2, MODELS[0].0), "{local_sgd: {every: 4}}");
    let plan = scratch.file("plan.yaml", &plan);
    let output = scratch.run(&["execute", "--plan", super::common::text(&plan), "--steps", "10", "--oversubscribe"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("8 or 12 steps"), "{message}");
}
