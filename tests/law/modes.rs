//! The law of modes: where arithmetic says that replicas which exchange parameters train as the
//! synchronous mode does, they do. And a run that stops after a round goes on as if it had not.

use super::case::Case;
use super::common::Scratch;
use super::random::{MODELS, RECIPES, WEIGHTS, cases};
use super::{failure_persistence, law_cases, tolerances};
use proptest::prelude::*;

/// Stochastic gradient descent without momentum: an average of updates is the update of an average.
const PLAIN: &str = ", momentum: 0.0";

fn in_mode(case: &Case, mode: &str) -> String {
    format!("{}mode: {mode}\n", case.plan())
}

/// Checks that both plans have the same curve of losses over six steps, and that neither stands
/// still.
pub(super) fn same_curve(one: &str, other: &str, tolerance: f64) {
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
fn one_fragment_at_the_end_of_a_round_is_diloco_bit_for_bit() {
    let case = Case { data: 2, ..Case::usual(MODELS[0].0) };
    let [plain, stated] = [
        "{local_sgd: {every: 2, outer: {optimizer: nesterov}}}",
        "{local_sgd: {every: 2, outer: {optimizer: nesterov}, fragments: 1, overlap: 0, mixing: 0.0, compression: fp32}}",
    ]
    .map(|mode| {
        let scratch = Scratch::new();
        bits(&scratch.train(&in_mode(&case, mode), 6, 3, &["--data", "synthetic"]).losses)
    });
    assert_eq!(plain, stated);
}

#[test]
fn layouts_within_a_replica_train_alike_in_fragments() {
    let gpt = MODELS[3].0;
    let mode = "{local_sgd: {every: 3, fragments: 2, overlap: 0, outer: {optimizer: nesterov}}}";
    let alone = in_mode(&Case { data: 2, ..Case::usual(gpt) }, mode);
    let streaming = mode.replace("every: 3, fragments: 2, overlap: 0", "every: 6, fragments: 3, overlap: 1");
    let alone_streaming = in_mode(&Case { data: 2, ..Case::usual(gpt) }, &streaming);
    for case in [
        Case { data: 2, tensor: 2, ..Case::usual(gpt) },
        Case { data: 2, pipeline: 2, ..Case::usual(gpt) },
        Case { data: 4, zero: 1, hybrid: true, micro_batch: 1, ..Case::usual(gpt) },
        Case { data: 4, zero: 3, hybrid: true, micro_batch: 1, ..Case::usual(gpt) },
    ] {
        same_curve(&alone, &in_mode(&case, mode), 5e-4);
        same_curve(&alone_streaming, &in_mode(&case, &streaming), 5e-4);
    }
}

#[test]
fn compressed_averages_after_every_step_are_near_the_synchronous_mode() {
    for (replicas, formats) in [(2, ["bf16", "fp16", "int8"]), (3, ["bf16", "fp16", "int8"])] {
        let case = plain(replicas, MODELS[0].0);
        for format in formats {
            let mode = format!("{{local_sgd: {{every: 1, compression: {format}}}}}");
            same_curve(&case.plan(), &in_mode(&case, &mode), 5e-3);
        }
    }
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
fn parameter_servers_that_wait_for_all_train_as_an_all_reduce_does() {
    let (mlp, resnet, gpt, tied) = (MODELS[0].0, MODELS[1].0, MODELS[3].0, MODELS[2].0);
    let servers = |case: &Case, mode: &str, tolerance| {
        same_curve(&case.plan(), &in_mode(case, &format!("{{parameter_server: {{{mode}}}}}")), tolerance);
    };
    servers(&Case { data: 2, ..Case::usual(mlp) }, "servers: 1", 2e-4);
    servers(&Case { data: 3, ..Case::usual(mlp) }, "servers: 3, staleness: 0, beside_workers: true", 2e-4);
    servers(&Case { data: 2, clip: true, recipe: RECIPES[4], ..Case::usual(gpt) }, "servers: 3", 2e-4);
    servers(&Case { data: 2, tensor: 2, optimizer: "sgd", ..Case::usual(gpt) }, "servers: 2", 2e-4);
    servers(&Case { data: 2, pipeline: 2, optimizer: "lamb", clip: true, ..Case::usual(tied) }, "servers: 1", 2e-4);
    servers(&Case { data: 2, bucket: "256B", blocking: true, ..Case::usual(resnet) }, "servers: 2", 2e-3);
    servers(&Case { data: 2, precision: "bf16", ..Case::usual(gpt) }, "servers: 2", 1e-2);
}

#[test]
fn servers_that_add_compressed_gradients_are_near_the_synchronous_mode() {
    let (mlp, gpt, tied) = (MODELS[0].0, MODELS[3].0, MODELS[2].0);
    for (case, servers, format) in [
        (Case { data: 2, optimizer: "sgd", ..Case::usual(mlp) }, 1, "int8"),
        (Case { data: 3, optimizer: "sgd", ..Case::usual(mlp) }, 2, "fp16"),
        (Case { data: 2, tensor: 2, optimizer: "sgd", ..Case::usual(gpt) }, 2, "bf16"),
        (Case { data: 2, pipeline: 2, optimizer: "sgd", clip: true, ..Case::usual(tied) }, 3, "int8"),
    ] {
        same_curve(
            &case.plan(),
            &in_mode(&case, &format!("{{parameter_server: {{servers: {servers}, compression: {format}}}}}")),
            1e-2,
        );
    }
}

#[test]
fn compressed_pushes_learn_the_digits_as_well_as_single_precision() {
    let answer = |compression: &str| {
        let scratch = Scratch::new();
        let plan = format!(
            "model: {{family: mlp, widths: [64, 64, 10]}}\ntopology: local\nglobal_batch: 64\noptimizer: adamw\n\
             layout: {{data: 2, micro_batch: 32}}\nmode: {{parameter_server: {{servers: 2, compression: {compression}}}}}\n"
        );
        let memory = scratch.predicted_memory(&plan);
        let plan = scratch.file("plan.yaml", &plan);
        let basic = ["execute", "--plan", super::common::text(&plan), "--epochs", "8", "--data", "digits", "--oversubscribe"];
        let document = scratch.json(&basic);
        let measured: Vec<u64> =
            document["peak_memory_bytes"].as_array().expect("a list").iter().filter_map(serde_json::Value::as_u64).collect();
        assert_eq!(measured, memory, "{compression}");
        ["loss", "top1"].map(|key| document["evaluation"][key].as_f64().expect("a number"))
    };
    let [loss, top1] = answer("none");
    assert!(top1 > 0.9, "top-1 {top1} in fp32");
    for compression in ["bf16", "fp16", "int8"] {
        let [other_loss, other_top1] = answer(compression);
        assert!((other_loss - loss).abs() <= 0.01 * loss, "loss {other_loss} with {compression}, {loss} without");
        assert!((other_top1 - top1).abs() <= 0.02, "top-1 {other_top1} with {compression}, {top1} without");
    }
}

/// The parameters that a run on nearly all digits at once ends with. Its steps are so small that
/// gradients hardly change.
fn parameters_after(steps: usize, more: &str) -> Vec<f32> {
    let scratch = Scratch::new();
    let plan = format!(
        "model: {{family: mlp, widths: [64, 32, 10]}}\ntopology: local\nglobal_batch: 1024\noptimizer: sgd\n\
         training: {{learning_rate: 0.001, momentum: 0.0}}\nlayout: {{data: 2, micro_batch: 512}}\n\
         mode: {{parameter_server: {{servers: 1, {more}}}}}\n"
    );
    scratch.train(&plan, steps, 3, &["--data", "digits", "--run", "run"]);
    let file = std::fs::read(scratch.path(&format!("run/checkpoints/{steps}/model.safetensors"))).expect("a checkpoint");
    let (header, rest) = file.split_first_chunk::<8>().expect("a length");
    let values = rest[u64::from_le_bytes(*header) as usize..].as_chunks::<4>().0;
    values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn norm(one: &[f32], other: &[f32]) -> f64 {
    let squares = one.iter().zip(other).map(|(left, right)| f64::from(left - right).powi(2));
    squares.sum::<f64>().sqrt()
}

#[test]
fn what_rounding_loses_of_a_push_comes_with_the_next_ones() {
    // The error of a sum of gradients, relative to the sum.
    let [first, last] = [1, 33].map(|steps| parameters_after(steps, "compression: none"));
    let error = norm(&parameters_after(33, "compression: int8"), &last) / norm(&last, &first);
    assert!(error > 0.0 && error < 5e-4, "{error}");
}

#[test]
fn several_servers_of_one_worker_use_the_norm_of_all_their_parts() {
    let mode = "{parameter_server: {servers: 3}}";
    for (model, tensor, pipeline, optimizer) in
        [(MODELS[0].0, 1, 1, "sgd"), (MODELS[3].0, 2, 1, "lamb"), (MODELS[2].0, 1, 2, "adamw")]
    {
        let case = Case { tensor, pipeline, optimizer, clip: true, ..Case::usual(model) };
        let scratch = Scratch::new();
        let [alone, served] =
            [case.plan(), in_mode(&case, mode)].map(|plan| scratch.train(&plan, 6, 3, &["--data", "synthetic"]));
        let close = |left: f64, right: f64| (left - right).abs() <= 2e-4 * left.abs().max(1.0);
        for step in 0..6 {
            let [losses, norms] = [[&alone.losses, &served.losses], [&alone.gradient_norms, &served.gradient_norms]]
                .map(|[left, right]| (left[step], right[step]));
            assert!(close(losses.0, losses.1), "{optimizer}, step {step}: losses {losses:?}");
            assert!(close(norms.0, norms.1), "{optimizer}, step {step}: norms {norms:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: law_cases(8),
        max_shrink_iters: 20,
        failure_persistence: failure_persistence(),
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_workers_and_servers_train_as_an_all_reduce_does(case in cases(), servers in 1usize..4, beside in any::<bool>()) {
        // What servers refuse.
        let offload = if matches!(case.offload, "optimizer" | "both") { "none" } else { case.offload };
        let precision = if case.precision == "fp16" { "fp32" } else { case.precision };
        // A vision transformer's head begins at zero. Frozen beside adapters, it stays there: all
        // losses are equal, and say nothing.
        let stands_still = case.recipe.contains("lora") && case.model.contains("vit");
        let recipe = if case.recipe == WEIGHTS || stands_still { "" } else { case.recipe };
        // A mesh of unequal parts may have had a tensor axis.
        let operators = if case.tensor == 1 { "{}" } else { case.operators };
        let case = Case { zero: 0, uneven: None, micro_batch: 2, offload, precision, recipe, operators, ..case };
        let servers = if beside { format!("{}, beside_workers: true", case.data) } else { servers.to_string() };
        let (_, tolerance) = tolerances(&case);
        same_curve(&case.plan(), &in_mode(&case, &format!("{{parameter_server: {{servers: {servers}}}}}")), tolerance);
    }
}

#[test]
fn a_stopped_run_of_servers_goes_on_and_may_end_without_them() {
    for (servers, precision) in [(1, "fp32"), (3, "bf16")] {
        let scratch = Scratch::new();
        let case = Case { data: 2, precision, ..Case::usual(MODELS[0].0) };
        let plan = in_mode(&case, &format!("{{parameter_server: {{servers: {servers}}}}}"));
        let train = |plan: &str, more: &[&str]| scratch.train(plan, 8, 3, &[&["--data", "synthetic"], more].concat());
        let whole = train(&plan, &["--run", "whole", "--save-every", "4"]);
        let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        scratch.train(&plan, 4, 3, &["--data", "synthetic", "--run", "stopped"]);
        let resumed = train(&plan, &["--resume", "stopped", "--run", "resumed"]);
        assert_eq!(bits(&resumed.losses), bits(&whole.losses[4..]), "{servers} servers");
        assert_eq!(whole.arenas, scratch.predicted_memory(&plan), "{servers} servers");
        let alone = train(&case.plan(), &["--resume", "stopped", "--run", "alone"]);
        for (one, other) in alone.losses.iter().zip(&whole.losses[4..]) {
            assert!((one - other).abs() <= 1e-2 * other.abs(), "{servers} servers: {:?}\n{:?}", alone.losses, whole.losses);
        }
    }
}

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|loss| loss.to_bits()).collect()
}

#[test]
fn workers_at_their_own_pace_replay_a_recorded_order_bit_for_bit() {
    let (mlp, gpt) = (MODELS[0].0, MODELS[3].0);
    for (case, mode) in [
        (Case { data: 3, ..Case::usual(mlp) }, "servers: 2, staleness: unbounded"),
        (Case { data: 2, optimizer: "sgd", ..Case::usual(mlp) }, "servers: 1, staleness: 1"),
        (Case { data: 2, pipeline: 2, precision: "bf16", ..Case::usual(gpt) }, "servers: 1, staleness: 2"),
        (Case { data: 3, ..Case::usual(mlp) }, "servers: 2, staleness: unbounded, compression: int8"),
        (Case { data: 3, ..Case::usual(mlp) }, "servers: 2, backup_workers: 1"),
        (Case { data: 2, pipeline: 2, ..Case::usual(gpt) }, "servers: 1, backup_workers: 1"),
    ] {
        let scratch = Scratch::new();
        let plan = in_mode(&case, &format!("{{parameter_server: {{{mode}}}}}"));
        let data = ["--data", "synthetic", "--save-every", "4"];
        let first = scratch.train(&plan, 8, 3, &[&data[..], &["--record-order", "order.json"]].concat());
        let again = scratch.train(&plan, 8, 3, &[&data[..], &["--replay-order", "order.json"]].concat());
        assert_eq!(bits(&first.losses), bits(&again.losses), "{mode}");
        assert_eq!(first.document["staleness"], again.document["staleness"], "{mode}");
        assert_eq!(first.arenas, scratch.predicted_memory(&plan), "{mode}");
        assert!(first.losses.windows(2).all(|pair| pair[0] != pair[1]), "nothing is trained: {:?}", first.losses);
        // With each worker in the place of another the parameters are others.
        let mut order = std::fs::read_to_string(scratch.path("order.json")).expect("it was recorded");
        for worker in 0..case.data {
            order = order.replace(&format!(":{worker}}}"), &format!(":#{}}}", (worker + 1) % case.data));
        }
        scratch.file("order.json", &order.replace('#', ""));
        let other = scratch.train(&plan, 8, 3, &[&data[..], &["--replay-order", "order.json"]].concat());
        assert_ne!(bits(&first.losses), bits(&other.losses), "{mode}");
    }
}

#[test]
fn an_update_of_a_part_of_the_workers_has_the_mean_of_their_gradients() {
    // Gradients of half the digits are near those of all.
    let change = |more: &str| {
        let [first, last] = [1, 9].map(|steps| parameters_after(steps, more));
        last.iter().zip(&first).map(|(last, first)| last - first).collect::<Vec<f32>>()
    };
    let [all, part] = ["backup_workers: 0", "backup_workers: 1"].map(change);
    let error = norm(&all, &part) / norm(&all, &vec![0.0; all.len()]);
    assert!(error > 0.0 && error < 0.3, "the gradients of a part differ by {error}");
}

#[test]
fn a_straggler_holds_a_simulated_step_only_without_backup_workers() {
    let scratch = Scratch::new();
    let step = |mode: &str, straggler: &[&str]| {
        let plan = "model: {family: mlp, widths: [784, 2048, 2048, 10]}\ntopology: dgx-a100-80g\nglobal_batch: 768\n\
                    layout: {data: 3, micro_batch: 256}\n";
        let plan = scratch.file("plan.yaml", &format!("{plan}mode: {{parameter_server: {{servers: 1, {mode}}}}}\n"));
        let basic = ["simulate", "--plan", super::common::text(&plan)];
        scratch.json(&[&basic[..], straggler].concat())["step_seconds"].as_f64().expect("a number")
    };
    let straggler = ["--straggler", "2=10"];
    let [alone, held] = [&[][..], &straggler].map(|straggler| step("backup_workers: 0", straggler));
    let [other, free] = [&[][..], &straggler].map(|straggler| step("backup_workers: 1", straggler));
    assert!(held > 2.0 * alone, "{held} s with a straggler, {alone} s without");
    assert!(free < 1.1 * other && free < 0.7 * held, "{free} s with a straggler, {other} s without; {held} s if all wait");
}

#[test]
fn a_worker_alone_trains_at_its_own_pace_as_without_servers() {
    for staleness in ["3", "unbounded"] {
        let case = Case { recipe: RECIPES[0], ..Case::usual(MODELS[0].0) };
        let mode = format!("{{parameter_server: {{servers: 2, staleness: {staleness}}}}}");
        same_curve(&case.plan(), &in_mode(&case, &mode), 2e-4);
    }
}

#[test]
fn workers_at_their_own_pace_evaluate_one_model_and_go_on() {
    let scratch = Scratch::new();
    let plan = in_mode(&Case { data: 2, ..Case::usual(MODELS[0].0) }, "{parameter_server: {servers: 2, staleness: 2}}");
    let plan = scratch.file("plan.yaml", &plan);
    let run = |more: &[&str]| {
        let basic = ["execute", "--plan", super::common::text(&plan), "--seed", "3", "--oversubscribe", "--data", "synthetic"];
        scratch.json(&[&basic[..], more].concat())
    };
    let stopped = run(&["--steps", "4", "--run", "stopped"]);
    // No step is made between the evaluation at the end and the one of the same checkpoint.
    let resumed = run(&["--steps", "8", "--resume", "stopped", "--run", "resumed"]);
    for (document, steps) in [(&stopped, 4), (&resumed, 4)] {
        assert_eq!(document["loss"].as_array().map(Vec::len), Some(steps), "{document}");
        assert!(document["evaluation"]["loss"].as_f64().is_some_and(f64::is_finite), "{document}");
        assert!(document["staleness"]["max"].as_u64().is_some(), "{document}");
    }
}

#[test]
fn a_stopped_run_of_replicas_goes_on_with_the_state_of_each() {
    for (mode, precision) in [
        ("{local_sgd: {every: 2, outer: {optimizer: nesterov}}}", "fp32"),
        ("{local_sgd: {every: 2}}", "bf16"),
        ("{local_sgd: {every: 4, fragments: 2, overlap: 1, outer: {optimizer: nesterov}}}", "bf16"),
        ("{local_sgd: {every: 4, fragments: 2, compression: int8}}", "fp32"),
        ("{decentralised: {graph: ring, every: 2}}", "fp32"),
        ("{decentralised: {graph: exponential, every: 1}}", "bf16"),
        ("{parameter_server: {servers: 2, compression: int8}}", "fp32"),
        ("{parameter_server: {servers: 1, compression: bf16}}", "bf16"),
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
        assert!(other.losses[2..].iter().zip(&whole.losses[2..]).all(|(loss, other)| loss != other), "{mode}");
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
