//! How exchanges between replicas are spread over the steps of a round.

use super::*;

/// The bytes that the replicas of a small GPT exchange in each step of a round.
fn exchanged(mode: &str) -> Vec<u64> {
    let model = Model::Gpt(Gpt {
        layers: 6,
        hidden: 64,
        heads: 4,
        ffn: None,
        vocab: 64,
        sequence: 16,
        tied_embeddings: false,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    });
    let mode: Mode = serde_json::from_str(mode).expect("a mode");
    let plan = Plan { mode, ..Plan::new(Layout { data: 2, ..Layout::default() }, 2) };
    let compiled = compile(&model, "m", &plan).expect("it compiles");
    let bytes = |instruction: &Instruction| match *instruction.operation {
        Operation::Collective { bytes, .. } => bytes.count(),
        _ => 0,
    };
    let of_step = |step| {
        let program = compiled.step_programs()[compiled.cycle.program_of_step(step)];
        program.lists[0].instructions.iter().map(bytes).sum()
    };
    (0..compiled.cycle.steps()).map(of_step).collect()
}

#[test]
fn fragments_and_overlaps_spread_an_exchange_over_the_steps_of_a_round() {
    let whole = exchanged(r#"{"local_sgd": {"every": 8}}"#);
    let all = whole[7];
    assert!(all > 0 && whole[..7].iter().all(|&bytes| bytes == 0), "{whole:?}");
    for (fragments, overlap, steps) in [(2, 0, vec![3, 7]), (4, 0, vec![1, 3, 5, 7]), (2, 3, vec![1, 2, 3, 5, 6, 7])] {
        let spread = exchanged(&format!(r#"{{"local_sgd": {{"every": 8, "fragments": {fragments}, "overlap": {overlap}}}}}"#));
        assert_eq!(spread.iter().sum::<u64>(), all, "{spread:?}");
        let equal = all / steps.len() as u64;
        for (step, &bytes) in spread.iter().enumerate() {
            // Fragments have equally many layers, but not of the embeddings.
            let is_near = bytes > equal * 7 / 10 && bytes < equal * 13 / 10;
            assert!(if steps.contains(&step) { is_near } else { bytes == 0 }, "step {step}: {spread:?}");
        }
    }
}

#[test]
fn an_exchange_at_the_end_of_a_round_begins_during_the_backward_pass() {
    let model = Model::Mlp(Mlp { widths: vec![64, 64, 64, 64] });
    let mode: Mode = serde_json::from_str(r#"{"local_sgd": {"every": 2, "outer": {}}}"#).expect("a mode");
    let usual = Plan { mode, ..Plan::new(Layout { data: 2, bucket: Bytes::new(64), ..Layout::default() }, 2) };
    let clipped = Plan { training: Training { clip_norm: Some(1.0), ..Training::default() }, ..usual.clone() };
    for (plan, is_early) in [(usual, true), (clipped, false)] {
        let compiled = compile(&model, "m", &plan).expect("it compiles");
        let list = &compiled.step_programs()[1].lists[0];
        let first = |is: &dyn Fn(&Instruction) -> bool| list.instructions.iter().position(is).expect("one");
        let exchange = first(&|instruction| matches!(*instruction.operation, Operation::Collective { .. }));
        let last = list.instructions.iter().rposition(|instruction| instruction.phase == Phase::Backward).expect("one");
        assert_eq!(exchange < last, is_early);
    }
}
