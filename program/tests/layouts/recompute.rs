//! What is forgotten and computed again, and what schedules hold meanwhile.

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
fn stages_compute_as_many_blocks_again_as_is_said_of_each() {
    let model = gpt(r#""layers": 6, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 32"#);
    let layout = |recompute| Layout { micro_batch: 1, pipeline: 2, recompute, ..Layout::default() };
    let of = |recompute| program(&model, layout(recompute), 4);
    let again = of(Recompute::FullLayersOfStages(vec![2, 1]));
    let attentions = |program: &Program| [0, 1].map(|stage| count(&program.lists[stage], "attention"));
    // Three blocks a stage, four micro-batches.
    assert_eq!(attentions(&of(Recompute::None)), [12, 12]);
    assert_eq!(attentions(&again), [20, 16]);
    // Stage by stage it is what all of them do with that number.
    for (stage, layers) in [(0, 2), (1, 1)] {
        let uniform = of(Recompute::FullLayers(layers));
        assert_eq!(format!("{:?}", again.lists[stage]), format!("{:?}", uniform.lists[stage]), "stage {stage}");
    }
    let of_none = of(Recompute::FullLayersOfStages(vec![0, 0]));
    assert_eq!(format!("{:?}", of_none.lists), format!("{:?}", of(Recompute::None).lists));
}

/// torchtitan's policy keeps the queries, the values, the gate and the last product of a Llama block, and what attention and reduce-scatters left.
#[test]
fn what_a_policy_keeps_is_neither_forgotten_nor_computed_again() {
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
    // Products and attentions of a block that are computed again, and what all of it takes.
    let again = |recompute, tensor| {
        let layout = Layout { micro_batch: 4, tensor, recompute, sequence_parallel: tensor > 1, ..Layout::default() };
        let program = program(&model, layout, 4);
        let list = &program.lists[0];
        let repeated = list.instructions.iter().filter(|one| one.phase == Phase::Recompute);
        let kernels = repeated.filter_map(|one| match &*one.operation {
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
    let (none, holds_none) = again(Recompute::None, 1);
    let (products, holds_products) = again(all_but(&[Keep::Attention, Keep::Products]), 1);
    let (odd, holds_odd) = again(titan.clone(), 1);
    let (full, holds_full) = again(Recompute::Full, 1);
    // The last product of a block is read by no gradient.
    assert_eq!((none, products, odd, full), ((0.0, 0.0), (0.0, 0.0), (3.0, 0.0), (6.0, 1.0)));
    assert!(holds_none > holds_products && holds_products > holds_odd && holds_odd > holds_full);
    assert_eq!(again(all_but(&[]), 1), (full, holds_full));
    assert_eq!(again(all_but(&[Keep::Projections]), 1).0, (3.0, 1.0));
    // Of the product after attention what is kept is its sum over the ranks of `tensor`.
    assert_eq!(again(titan.clone(), 2).0, (2.0, 0.0));
    let text = serde_json::to_string(&titan).expect("it can be written");
    assert_eq!(text, r#"{"all_but":["attention","odd_products","sums"]}"#);
    assert_eq!(serde_json::from_str::<Recompute>(&text).expect("it reads back"), titan);
}

#[test]
fn one_forward_one_backward_holds_less_than_gpipe() {
    let model = Model::Mlp(Mlp { widths: vec![64; 9] });
    let layout = |schedule| Layout { pipeline: 2, micro_batch: 64, schedule, ..Layout::default() };
    let gpipe = program(&model, layout(Schedule::Gpipe), 64 * 12);
    let one = program(&model, layout(Schedule::OneForwardOneBackward), 64 * 12);
    assert!(one.lists[0].arena.value() < 0.6 * gpipe.lists[0].arena.value());
}
