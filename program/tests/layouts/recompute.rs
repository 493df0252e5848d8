//! Recomputation, and the memory of schedules.

use super::*;

#[test]
fn full_recomputation_runs_forward_operators_twice_and_holds_less() {
    let model = gpt(r#""layers": 6, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 32"#);
    let none = program(&model, Layout { micro_batch: 4, ..Layout::default() }, 4);
    let full = program(&model, Layout { micro_batch: 4, recompute: Recompute::Full, ..Layout::default() }, 4);
    assert_eq!(count(&none.lists[0], "attention"), 6);
    assert_eq!(count(&full.lists[0], "attention"), 12);
    assert!(full.lists[0].arena.value() < 0.8 * none.lists[0].arena.value(), "{} {}", full.lists[0].arena, none.lists[0].arena);
}

#[test]
fn each_stage_recomputes_its_own_number_of_blocks() {
    let model = gpt(r#""layers": 6, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 32"#);
    let layout = |recompute| Layout { micro_batch: 1, pipeline: 2, recompute, ..Layout::default() };
    let of = |recompute| program(&model, layout(recompute), 4);
    let uneven = of(Recompute::FullLayersOfStages(vec![2, 1]));
    let attentions = |program: &Program| [0, 1].map(|stage| count(&program.lists[stage], "attention"));
    // Three blocks on each stage, four micro-batches.
    assert_eq!(attentions(&of(Recompute::None)), [12, 12]);
    assert_eq!(attentions(&uneven), [20, 16]);
    // Each stage has the list that it has if all stages recompute that number.
    for (stage, layers) in [(0, 2), (1, 1)] {
        let uniform = of(Recompute::FullLayers(layers));
        assert_eq!(format!("{:?}", uneven.lists[stage]), format!("{:?}", uniform.lists[stage]), "stage {stage}");
    }
    let of_none = of(Recompute::FullLayersOfStages(vec![0, 0]));
    assert_eq!(format!("{:?}", of_none.lists), format!("{:?}", of(Recompute::None).lists));
}

/// torchtitan's policy keeps the queries, the values, the gate and the last product of a Llama
/// block, and the results of attention and reduce-scatters.
#[test]
fn results_that_a_policy_keeps_are_not_recomputed() {
    let model = Model::Llama(Llama {
        layers: 4,
        hidden: 32,
        heads: 4,
        kv_heads: None,
        head_dimension: None,
        ffn: 64,
        vocab: 64,
        sequence: 32,
        tied_embeddings: false,
        rope_theta: 10_000,
    });
    // The recomputed products and attentions of a block, and the arena.
    let recomputed = |recompute, tensor| {
        let layout = Layout { micro_batch: 4, tensor, recompute, sequence_parallel: tensor > 1, ..Layout::default() };
        let program = program(&model, layout, 4);
        let list = &program.lists[0];
        let second_runs = list.instructions.iter().filter(|instruction| instruction.phase == Phase::Recompute);
        let kernels = second_runs.filter_map(|run| match &*run.operation {
            Operation::Compute { kernel, .. } => Some(*kernel),
            _ => None,
        });
        let (mut products, mut attentions) = (0, 0);
        for kernel in kernels {
            products += usize::from(matches!(kernel, Kernel::Matmul { .. }));
            attentions += usize::from(matches!(kernel, Kernel::Attention(_)));
        }
        ((products as f64 / 4.0, attentions as f64 / 4.0), list.arena)
    };
    let all_but = |kinds: &[Keep]| Recompute::AllBut(Kept::from(kinds.to_vec()));
    let titan = all_but(&[Keep::Attention, Keep::OddProducts, Keep::Sums]);
    let (none, holds_none) = recomputed(Recompute::None, 1);
    let (products, holds_products) = recomputed(all_but(&[Keep::Attention, Keep::Products]), 1);
    let (odd, holds_odd) = recomputed(titan.clone(), 1);
    let (full, holds_full) = recomputed(Recompute::Full, 1);
    // No gradient reads the last product of a block.
    assert_eq!((none, products, odd, full), ((0.0, 0.0), (0.0, 0.0), (3.0, 0.0), (6.0, 1.0)));
    assert!(holds_none > holds_products && holds_products > holds_odd && holds_odd > holds_full);
    assert_eq!(recomputed(all_but(&[]), 1), (full, holds_full));
    assert_eq!(recomputed(all_but(&[Keep::Projections]), 1).0, (3.0, 1.0));
    // With `tensor`, the sum of the product after attention is kept, too.
    assert_eq!(recomputed(titan.clone(), 2).0, (2.0, 0.0));
    let text = serde_json::to_string(&titan).expect("JSON");
    assert_eq!(text, r#"{"all_but":["attention","odd_products","sums"]}"#);
    assert_eq!(serde_json::from_str::<Recompute>(&text).expect("a policy"), titan);
}

#[test]
fn one_forward_one_backward_holds_less_than_gpipe() {
    let model = Model::Mlp(Mlp { widths: vec![64; 9] });
    let layout = |schedule| Layout { pipeline: 2, micro_batch: 64, schedule, ..Layout::default() };
    let gpipe = program(&model, layout(Schedule::Gpipe), 64 * 12);
    let one = program(&model, layout(Schedule::OneForwardOneBackward), 64 * 12);
    assert!(one.lists[0].arena.value() < 0.6 * gpipe.lists[0].arena.value());
}
