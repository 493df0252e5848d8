use super::*;
use crate::check_document::AtPace;
use crate::compare::compare;
use crate::sample;

fn widest(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

fn assert_as_before(name: &str, text: &str) {
    insta::with_settings!({ snapshot_path => "../snapshots", prepend_module_to_snapshot => false }, {
        insta::assert_snapshot!(name, text);
    });
}

#[test]
fn layouts_are_printed_in_columns() {
    let layout = |data, pipeline, step: f64| LayoutRow {
        data: vec![data],
        tensor: vec![1],
        pipeline,
        schedule: if pipeline > 1 { "1f1b".into() } else { "-".into() },
        micro_batch: 4,
        recompute: "none".into(),
        step: Seconds::new(step),
        samples_per_second: 32.0 / step,
        memory: Bytes::new(3 << 29),
        mfu: (data == 4).then_some(0.431),
    };
    let text = layouts_table(&[layout(4, 1, 0.1234), layout(2, 2, 0.15)]);
    assert!(widest(&text) <= 100);
    assert_as_before("layouts", &text);
}

#[test]
fn names_of_schedules_are_not_broken() {
    let row = LayoutRow {
        data: vec![1024],
        tensor: vec![8],
        pipeline: 16,
        schedule: "interleaved".into(),
        micro_batch: 16,
        recompute: "selective".into(),
        step: Seconds::new(14.6699),
        samples_per_second: 7890.0,
        memory: Bytes::new(751 << 27),
        mfu: Some(0.431),
    };
    let text = layouts_table(&[row]);
    assert!(widest(&text) <= 100 && text.contains("interleaved") && text.contains("selective"), "{text}");
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
    assert!(layouts_table(&[]).contains("samples/s"));
    assert!(table(&[Column::words("a"), Column::words("b")], &[vec!["only one".into()]]).contains("only one"));
}
