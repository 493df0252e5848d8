//! Evaluation sees every sample exactly once in every layout, so its loss and accuracy do not
//! depend on the layout.

mod common;

use common::{Scratch, text};

/// Returns loss, top-1 accuracy and number of samples of the evaluation after two epochs. The
/// number of evaluation samples is not a multiple of the batch, so the last batch is padded.
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

/// Asserts that several layouts evaluate as one rank does. Returns the top-1 accuracy on one rank.
/// `tolerance` is relative for the loss and absolute for top-1, because layouts add in different
/// orders.
fn assert_same_in_every_layout(model: &str, learning_rate: &str, tolerance: f64) -> f64 {
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
fn an_mlp_evaluates_equally_in_every_layout() {
    let top1 = assert_same_in_every_layout("{family: mlp, widths: [64, 48, 32, 10]}", "0.01", 5e-3);
    assert!(top1 > 0.5, "the model learns nothing: top-1 {top1}");
}

#[test]
fn a_resnet_evaluates_equally_in_every_layout() {
    // Rounding flips ReLUs (see `law`). Over two epochs of training that would grow to several
    // per cent, even on one rank with other micro-batches. The learning rate is therefore tiny, so
    // that the test compares evaluation alone, with its batch norm groups and its padding.
    let model = "{family: resnet, depth: 18, stem: small, image: 8, channels: 1, classes: 10, width: 4}";
    assert_same_in_every_layout(model, "0.000001", 1e-4);
}

#[test]
fn half_precision_learns_the_digits_as_well_as_single() {
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
    assert!(single > 0.9, "top-1 {single} in fp32");
    for precision in ["bf16", "fp16"] {
        let half = top1(precision);
        assert!((half - single).abs() <= 0.02, "top-1 {half} in {precision}, {single} in fp32");
    }
}
