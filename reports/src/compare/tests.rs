use super::*;
use crate::check_document::{AtPace, CheckDocument};
use crate::sample;
use foretell_program::{Origin, Span};
use foretell_units::Bytes;
use std::sync::Arc;

fn sum(values: impl Iterator<Item = Seconds>) -> f64 {
    values.sum::<Seconds>().value()
}

fn near(one: f64, other: f64) -> bool {
    (one - other).abs() <= 1e-12 + other.abs() * 1e-9
}

fn row<'a>(comparison: &'a Comparison, kind: &str) -> &'a KindRow {
    comparison.by_kind.iter().find(|row| row.kind == kind).expect("the kind is in the table")
}

#[test]
fn the_kinds_add_up_to_both_steps_and_the_shares_to_the_error() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    assert!(near(sum(comparison.by_kind.iter().map(|row| row.predicted)), comparison.predicted_step.value()));
    assert!(near(sum(comparison.by_kind.iter().map(|row| row.measured)), comparison.measured_step.value()));
    assert!(near(comparison.by_kind.iter().map(|row| row.error_share).sum(), comparison.error));
    assert!(comparison.error < -0.05, "the measured run was made slower: {}", comparison.error);
}

#[test]
fn the_error_is_the_product() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    for at_pace in [0.5, 1.0, 2.9, 7.0] {
        let mut document =
            CheckDocument::new(comparison.clone(), Seconds::ZERO, Seconds::new(1.0), Bytes::new(1), Some(Bytes::new(1)));
        assert_eq!((document.machine_error, document.model_error), (None, None));
        let [predicted_step, p10, p90] = [at_pace, at_pace * 0.9, at_pace * 1.2].map(|time| Seconds::new(time * 1e-3));
        document.set_steps(Seconds::new(2.7e-3), Seconds::new(3.4e-3), Seconds::ZERO, Seconds::new(1.0));
        document.set_pace(AtPace {
            pace: 1.0,
            predicted_step,
            p10,
            p90,
            inside_interval: false,
            reference_kernels: 1,
            reference_seconds: 0.0,
        });
        let (machine, model) = (document.machine_error.expect("it is known"), document.model_error.expect("it is known"));
        assert!(near((1.0 + machine) * (1.0 + model), 1.0 + document.comparison.error), "{machine} {model}");
        assert!(near(1.0 + machine, 2.7 / at_pace), "a machine slower than at calibration: below 0");
        assert_eq!(document.at_pace.expect("it is known").inside_interval, (0.9 * at_pace..1.2 * at_pace).contains(&3.4));
    }
}

#[test]
fn the_pieces_of_every_rank_add_up_to_its_step() {
    let (program, predicted, measured) = sample::pipeline();
    let communications = Communications::of(&program);
    for timeline in [&predicted, &measured] {
        for rank in (0..4).map(Rank) {
            let total: Picoseconds =
                attribute(&program, &communications, timeline, rank).iter().map(|piece| piece.duration).sum();
            assert_eq!(total, timeline.step());
        }
    }
}

#[test]
fn pieces_of_random_spans_add_up_to_the_step() {
    let (program, predicted, _) = sample::pipeline();
    let communications = Communications::of(&program);
    // Knuth's linear congruential generator: the same pseudo-random spans in every run.
    let mut state: u64 = 1;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let mut timeline = predicted.clone();
        for rank in timeline.ranks.iter_mut().map(Arc::make_mut) {
            rank.end = Picoseconds(random(1500));
            for span in &mut rank.spans {
                (span.start, span.end) = (Picoseconds(random(1000)), Picoseconds(random(1200)));
            }
        }
        for rank in (0..4).map(Rank) {
            let total: Picoseconds =
                attribute(&program, &communications, &timeline, rank).iter().map(|piece| piece.duration).sum();
            assert_eq!(total, timeline.step());
        }
    }
}

#[test]
fn the_causes_of_the_sample_run_are_found() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    assert_eq!(row(&comparison, "host").predicted, Seconds::ZERO);
    // At least ten kernels, each shorter than the 12 us gap before it.
    let host = row(&comparison, "host");
    assert!(host.measured > Seconds::new(100e-6) && host.measured.value() <= host.count as f64 * 12.1e-6, "{host:?}");
    let causes: Vec<Cause> = comparison.worst.iter().map(|row| row.cause).collect();
    assert!(causes.contains(&Cause::KernelSlower) && causes.contains(&Cause::CommunicationSlower), "{causes:?}");
    let slower = comparison.worst.iter().find(|row| row.cause == Cause::KernelSlower).expect("seen above");
    assert_eq!(slower.rank, Rank(3), "the straggler is named");
    assert!(comparison.worst.len() <= 10);
    assert!(comparison.worst.windows(2).all(|pair| pair[0].difference.value().abs() >= pair[1].difference.value().abs()));
}

#[test]
fn a_late_peer_makes_a_bubble_and_no_slow_communication() {
    let (program, predicted, mut measured) = sample::pipeline();
    // Ranks 0 and 1 all-reduce together. Rank 1 arrives 1 ms late, and both continue at the same
    // time.
    measured.clone_from(&predicted);
    let reduce = program.lists[0]
        .instructions
        .iter()
        .position(|instruction| instruction.operation.kind() == "all_reduce")
        .expect("there is one");
    let late = Picoseconds(1_000_000_000);
    for rank in [0, 1] {
        let own = Arc::make_mut(&mut measured.ranks[rank]);
        own.spans[reduce].end += late;
        own.end += late;
        for span in &mut own.spans[reduce + 1..] {
            *span = Span { start: span.start + late, end: span.end + late, ..*span };
        }
    }
    Arc::make_mut(&mut measured.ranks[1]).spans[reduce].start += late;
    let comparison = compare(&program, &predicted, &measured);
    assert_eq!(comparison.rank, Rank(0));
    let bubble = row(&comparison, "bubble");
    assert!(near((bubble.measured - bubble.predicted).value(), 1e-3), "{bubble:?}");
    let reduced = row(&comparison, "communication: all_reduce");
    assert!(near(reduced.measured.value(), reduced.predicted.value()), "{reduced:?}");
    assert!(comparison.worst.iter().any(|row| row.cause == Cause::WaitedForPeer && row.kind == "bubble"));
}

#[test]
fn equal_timelines_have_no_difference() {
    let (program, predicted, _) = sample::pipeline();
    let comparison = compare(&program, &predicted, &predicted);
    assert_eq!(comparison.error, 0.0);
    assert!(comparison.worst.is_empty());
}

#[test]
fn empty_partial_and_foreign_timelines_are_compared_where_they_match() {
    let (program, predicted, measured) = sample::pipeline();
    let nothing = Timeline { origin: Origin::Measured, ranks: vec![] };
    let empty = sample::empty(&program, Origin::Measured);
    let mut partial = measured.clone();
    Arc::make_mut(&mut partial.ranks[0]).spans.truncate(1);
    Arc::make_mut(&mut partial.ranks[1]).spans.remove(0);
    partial.ranks[2] = Arc::default();
    Arc::make_mut(&mut partial.ranks[3]).spans[0].instruction = InstructionId(1_000_000);
    for other in [&nothing, &empty, &partial] {
        for (one, two) in [(&predicted, other), (other, &predicted), (other, other)] {
            let comparison = compare(&program, one, two);
            assert!(comparison.error.is_finite());
            if !comparison.by_kind.is_empty() && !one.ranks.is_empty() && !two.ranks.is_empty() {
                assert!(near(sum(comparison.by_kind.iter().map(|row| row.measured)), comparison.measured_step.value()));
            }
        }
    }
}

#[test]
fn the_check_document_has_the_documented_fields() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    let step = comparison.measured_step;
    let document = CheckDocument::new(comparison, step * 0.9, step * 1.1, Bytes::new(110), Some(Bytes::new(100)));
    let json = serde_json::to_value(&document).expect("serialisable");
    for field in ["predicted_step_seconds", "measured_step_seconds", "error", "memory_error"] {
        assert!(json[field].is_f64(), "{field}");
    }
    assert_eq!(json["inside_interval"], true);
    assert!(json["by_kind"][0]["predicted_seconds"].is_f64());
    assert!(json["worst"][0]["cause"].is_string() && json["worst"][0]["rank"].is_u64());
    let outside = CheckDocument::new(document.comparison, step * 1.1, step * 1.2, Bytes::new(1), None);
    assert!(!outside.inside_interval && outside.memory_error.is_none());
}
