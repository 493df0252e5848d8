use super::*;
use crate::sample;
use foretell_program::Origin;
use foretell_units::Seconds;

const PNG_SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";

fn assert_drawn(plot: &Plot, labels: &[&str]) {
    let svg = plot.svg().expect("an SVG");
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for label in labels {
        assert!(svg.contains(label), "`{label}` is missing");
    }
    assert_eq!(svg, plot.svg().expect("an SVG"), "the same to the byte");
    let png = plot.png().expect("a PNG");
    assert!(png.starts_with(PNG_SIGNATURE) && png.len() > 2000);
}

#[test]
fn timelines_show_ranks_streams_and_phases() {
    let (program, predicted, measured) = sample::pipeline();
    let plot = Plot::timeline("A < B", &program, &[&predicted, &measured]);
    let labels = ["A &lt; B", "rank 0", "rank 3", "predicted", "measured", "compute", "group data", "backward", "time (ms)"];
    assert_drawn(&plot, &labels);
}

#[test]
fn memory_shows_stages_and_the_arena() {
    let (program, predicted, _) = sample::pipeline();
    assert_drawn(&Plot::memory("Memory", &program, &predicted), &["stage 0", "stage 1", "arena", "memory (MiB)", "time (ms)"]);
}

#[test]
fn losses_and_scatters_have_their_labels() {
    let points = |count: u64| (1..=count).map(|step| LossPoint { step, loss: 2.0 / step as f64 }).collect::<Vec<_>>();
    assert_drawn(&Plot::loss("Loss", &points(20), &points(2)), &["training", "evaluation", "step", "loss"]);
    let times = [("a & b", 0.11, 0.1), ("c", 2.0, 2.3)].map(|(series, predicted, measured)| ScatterPoint {
        series: series.into(),
        predicted: Seconds::new(predicted),
        measured: Seconds::new(measured),
    });
    assert_drawn(&Plot::scatter("All", &times), &["a &amp; b", "measured (ms)", "predicted (ms)", "1 of 2 within 10 %"]);
}

#[test]
fn next_to_nothing_is_drawn_too() {
    let (program, mut predicted, _) = sample::pipeline();
    let empty = sample::empty(&program, Origin::Measured);
    assert_drawn(&Plot::timeline("Empty", &program, &[&empty]), &["The timelines are empty."]);
    assert_drawn(&Plot::timeline("None", &program, &[]), &["The timelines are empty."]);
    assert_drawn(&Plot::memory("Empty", &program, &empty), &["There is no memory to show."]);
    assert_drawn(&Plot::loss("Empty", &[LossPoint { step: 1, loss: f64::NAN }], &[]), &["No loss was recorded."]);
    assert_drawn(&Plot::loss("One", &[LossPoint { step: 1, loss: 1.0 }], &[]), &["training"]);
    assert_drawn(&Plot::scatter("Empty", &[]), &["There is nothing to compare."]);
    let one = ScatterPoint { series: "one".into(), predicted: Seconds::new(1e-9), measured: Seconds::new(1e-9) };
    assert_drawn(&Plot::scatter("One", &[one]), &["1 of 1"]);

    let extremes = [0.0, 1e-323, 1e308, -1e308].map(|loss| LossPoint { step: u64::MAX, loss });
    assert_drawn(&Plot::loss("Tiny", &extremes[..2], &[]), &["training"]);
    assert_drawn(&Plot::loss("Huge", &extremes, &extremes), &["training"]);

    predicted.ranks.truncate(1);
    std::sync::Arc::make_mut(&mut predicted.ranks[0]).spans.truncate(1);
    assert_drawn(&Plot::timeline("One span", &program, &[&predicted]), &["rank 0", "load"]);
    assert_drawn(&Plot::memory("One span", &program, &predicted), &["stage 0"]);
    predicted.ranks = vec![std::sync::Arc::default(); 1000];
    assert_drawn(&Plot::timeline("Too many ranks", &program, &[&predicted]), &["The timelines are empty."]);
}
