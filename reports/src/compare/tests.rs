use super::*;
use crate::sample;
use foretell_program::{Origin, RankTimeline, Span};

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
fn every_rank_is_split_without_rest() {
    let (program, predicted, measured) = sample::pipeline();
    let exchanges = Exchanges::of(&program);
    for timeline in [&predicted, &measured] {
        for rank in (0..4).map(Rank) {
            let total: Picoseconds = attribute(&program, &exchanges, timeline, rank).iter().map(|piece| piece.duration).sum();
            assert_eq!(total, timeline.step());
        }
    }
}

#[test]
fn however_spans_lie_the_pieces_add_up() {
    let (program, predicted, _) = sample::pipeline();
    let exchanges = Exchanges::of(&program);
    // Knuth's linear congruential generator: the same disorder every time.
    let mut state: u64 = 1;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let mut timeline = predicted.clone();
        for rank in &mut timeline.ranks {
            rank.end = Picoseconds(random(1500));
            for span in &mut rank.spans {
                (span.start, span.end) = (Picoseconds(random(1000)), Picoseconds(random(1200)));
            }
        }
        for rank in (0..4).map(Rank) {
            let total: Picoseconds = attribute(&program, &exchanges, &timeline, rank).iter().map(|piece| piece.duration).sum();
            assert_eq!(total, timeline.step());
        }
    }
}

#[test]
fn causes_are_those_that_the_sample_has() {
    let (program, predicted, measured) = sample::pipeline();
    let comparison = compare(&program, &predicted, &measured);
    assert_eq!(row(&comparison, "host").predicted, Seconds::ZERO);
    // Ten or more kernels with 12 us before each, of which none is longer than that.
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
    // Rank 0 and 1 reduce together; rank 1 comes 1 ms late and everyone goes on together.
    measured.clone_from(&predicted);
    let reduce = program.lists[0].instructions.iter().position(|one| one.operation.kind() == "all_reduce").expect("there is one");
    let late = Picoseconds(1_000_000_000);
    for rank in [0, 1] {
        let own = &mut measured.ranks[rank];
        own.spans[reduce].end += late;
        own.end += late;
        for span in &mut own.spans[reduce + 1..] {
            *span = Span { start: span.start + late, end: span.end + late, ..*span };
        }
    }
    measured.ranks[1].spans[reduce].start += late;
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
fn empty_partial_and_foreign_timelines_are_compared_as_far_as_they_go() {
    let (program, predicted, measured) = sample::pipeline();
    let nothing = Timeline { origin: Origin::Measured, ranks: vec![] };
    let empty = sample::empty(&program, Origin::Measured);
    let mut partial = measured.clone();
    partial.ranks[0].spans.truncate(1);
    partial.ranks[1].spans.remove(0);
    partial.ranks[2] = RankTimeline::default();
    partial.ranks[3].spans[0].instruction = InstructionId(1_000_000);
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
fn the_document_is_the_contracts() {
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
