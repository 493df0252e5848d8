use super::*;
use crate::check_document::AtPace;
use crate::compare::compare;
use crate::sample;
use foretell_program::{Layout, Recompute, Schedule};

fn widest(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

fn assert_as_before(name: &str, text: &str) {
    insta::with_settings!({ snapshot_path => "../snapshots", prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!(name, text);
    });
}

fn row(layout: &Layout, step: f64, mfu: Option<f64>) -> LayoutRow {
    LayoutRow {
        dimensions: layout.dimensions(),
        objective: None,
        step: Seconds::new(step),
        rate: 32.0 / step,
        flops_of_device: FlopsPerSecond::new(164.6e12),
        memory: Bytes::new(3 << 29),
        mfu,
    }
}

#[test]
fn columns_are_what_layouts_differ_in() {
    let layout = Layout { data: 8, micro_batch: 4, zero: 1, ..Layout::default() };
    let sharded = Layout { zero: 3, ..layout.clone() };
    let uneven = Layout { data: 4, pipeline: 2, cuts: Some(vec![7, 19]), ..layout.clone() };
    let rows = [row(&layout, 0.1234, Some(0.431)), row(&sharded, 0.13, Some(0.4)), row(&uneven, 0.15, None)];
    let text = layouts_table(&rows, "samples/s");
    assert!(widest(&text) <= 100);
    assert_as_before("layouts", &text);
}

#[test]
fn names_of_schedules_are_not_broken() {
    let layout = Layout { data: 1024, tensor: 8, pipeline: 16, virtual_stages: 12, ..Layout::default() };
    let interleaved = Layout { schedule: Schedule::Interleaved, recompute: Recompute::Selective, ..layout.clone() };
    let other = Layout { zero: 1, expert: 8, context: 2, bucket: Bytes::new(160 << 20), ..layout };
    let text = layouts_table(&[row(&interleaved, 14.6699, Some(0.431)), row(&other, 15.0, None)], "tokens/s");
    assert!(widest(&text) <= 100 && text.contains("interleaved of 12 chunks") && text.contains("selective"), "{text}");
}

#[test]
fn a_prediction_fits_the_terminal() {
    let summary = PredictionSummary {
        step: Seconds::new(0.25),
        interval: Some((Seconds::new(0.24), Seconds::new(0.27))),
        samples_per_second: 128.0,
        tokens_per_second: None,
        mfu: Some(0.38),
        hfu: None,
        peak_memory: vec![Bytes::new(70 << 30), Bytes::new(90 << 30)],
        memory_parts: vec![("parameters", Bytes::new(20 << 30)), ("activations", Bytes::new(70 << 30))],
        device_memory: Some(Bytes::new(80 << 30)),
        breakdown: Breakdown { compute: Seconds::new(0.2), bubble: Seconds::new(0.05), ..Breakdown::default() },
        calibrated: false,
    };
    let text = prediction_table(&summary);
    assert!(widest(&text) <= 100);
    assert_as_before("prediction", &text);
}

#[test]
fn a_check_fits_the_terminal() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    let document = CheckDocument::new(comparison, Seconds::ZERO, Seconds::new(1.0), Bytes::new(105), Some(Bytes::new(100)));
    let text = check_table(&document);
    assert!(widest(&text) <= 100, "{text}");
    assert_as_before("check", &text);
}

#[test]
fn a_check_says_which_part_of_the_error_is_the_machines() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    let step = |milliseconds: f64| Seconds::new(milliseconds * 1e-3);
    let mut document = CheckDocument::new(comparison, Seconds::ZERO, Seconds::new(1.0), Bytes::new(105), None);
    let (predicted_step, p10, p90) = (step(3.2), step(3.0), step(3.3));
    let (inside_interval, reference_kernels, reference_seconds) = (false, 100, 1e-3);
    for (pace, words) in [(1.16, "16.0 % slower than"), (0.9, "10.0 % faster than"), (1.001, "as fast as")] {
        document.set_pace(AtPace { pace, predicted_step, p10, p90, inside_interval, reference_kernels, reference_seconds });
        let text = check_table(&document);
        let sentence = format!("the machine was {words} at calibration: error -13.6 %\nat that pace predicted 3.2 ms: ");
        assert!(text.contains(&format!("{sentence}model error -6.8 %, outside the 80 % interval")), "{text}");
        assert!(widest(&text) <= 100, "{text}");
    }
}

#[test]
fn tables_with_no_or_short_rows_are_printed() {
    assert_eq!(layouts_table(&[], "samples/s"), "no layout");
    assert!(table(&[Column::words("a"), Column::words("b")], &[vec!["only one".into()]]).contains("only one"));
}
