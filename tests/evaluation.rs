//! Evaluation sees every sample once, in every layout: its loss and its accuracy do not depend on
//! how the ranks share the work.

mod common;

use common::{Scratch, text};

/// Loss and top-1 after two epochs. The digits' evaluation samples are no multiple of the batch, so
/// the last batch is padded.
fn evaluation(scratch: &Scratch, model: &str, learning_rate: &str, layout: &str) -> (f64, f64, u64) {
    let plan = scratch.file(
        "plan.yaml",
        &format!(
            "model: {model}\ntopology: local\nglobal_batch: 48\nbatch_norm_group: 8\ntraining: {{learning_rate: {learning_rate}}}\nlayout: {{{layout}}}\n"
        ),
    );
    let document = scratch.json(&["execute", "--plan", text(&plan), "--epochs", "2", "--data", "digits", "--oversubscribe"]);
    let evaluation = &document["evaluation"];
    let number = |key: &str| evaluation[key].as_f64().expect("a number");
    (number("loss"), number("top1"), evaluation["samples"].as_u64().expect("a number"))
}

/// Returns the top-1 of one rank. `tolerance` is of the loss, relatively, and of top-1, absolutely:
/// sums are made in another order.
fn the_same_in_every_layout(model: &str, learning_rate: &str, tolerance: f64) -> f64 {
    let scratch = Scratch::new();
    let (loss, top1, samples) = evaluation(&scratch, model, learning_rate, "micro_batch: 48");
    assert!(loss.is_finite() && samples % 48 != 0, "loss {loss} of {samples} samples");
    let layouts =
        ["data: 2, micro_batch: 24", "data: 2, micro_batch: 8", "pipeline: 2, micro_batch: 8", "pipeline: 2, micro_batch: 24"];
    for layout in layouts {
        let (other_loss, other_top1, other_samples) = evaluation(&scratch, model, learning_rate, layout);
        assert_eq!(samples, other_samples, "{layout}");
        assert!((loss - other_loss).abs() <= tolerance * loss, "loss {loss} on one rank, {other_loss} with {layout}");
        assert!((top1 - other_top1).abs() <= tolerance, "top-1 {top1} on one rank, {other_top1} with {layout}");
    }
    top1
}

#[test]
fn an_mlp_is_evaluated_the_same_in_every_layout() {
    let top1 = the_same_in_every_layout("{family: mlp, widths: [64, 48, 32, 10]}", "0.01", 5e-3);
    assert!(top1 > 0.5, "it learns nothing: {top1}");
}

#[test]
fn a_resnet_is_evaluated_the_same_in_every_layout() {
    // Rounding turns ReLUs over (see `law`), and over two epochs of learning that grows to
    // percents, on one rank with other micro-batches too. So the parameters hardly move here: what
    // is compared is evaluation, with its groups and its padding.
    let model = "{family: resnet, depth: 18, stem: small, image: 8, channels: 1, classes: 10, width: 4}";
    the_same_in_every_layout(model, "0.000001", 1e-4);
}

#[test]
fn in_sixteen_bits_the_digits_are_learned_as_well() {
    let scratch = Scratch::new();
    let top1 = |precision: &str| {
        let plan = scratch.file(
            "plan.yaml",
            &format!("model: {{family: mlp, widths: [64, 64, 10]}}\ntopology: local\nglobal_batch: 64\nprecision: {precision}\n"),
        );
        let document = scratch.json(&["execute", "--plan", text(&plan), "--epochs", "8", "--data", "digits", "--oversubscribe"]);
        document["evaluation"]["top1"].as_f64().expect("a number")
    };
    let single = top1("fp32");
    assert!(single > 0.9, "{single}");
    for precision in ["bf16", "fp16"] {
        let half = top1(precision);
        assert!((half - single).abs() <= 0.02, "top-1 {half} in {precision}, {single} in fp32");
    }
}
