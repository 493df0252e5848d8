//! Context parallelism: ring attention and gathered keys and values.

use super::*;
use foretell_units::diagnostic::one_line;

#[test]
fn ring_attention_shifts_parts_and_holds_less_than_gathering() {
    // A long sequence, whose gathered keys and values dominate memory.
    let model =
        gpt(r#""layers": 2, "hidden": 32, "heads": 4, "ffn": 32, "vocab": 16, "sequence": 4096, "tied_embeddings": false"#);
    let compiled = |context_method, precision| {
        let layout = Layout { context: 4, context_method, recompute: Recompute::Full, ..Layout::default() };
        let plan = Plan { precision, ..Plan::new(layout, 1) };
        compile(&model, "model", &plan).expect("a plan that fits").training
    };
    for precision in [foretell_units::DataType::Fp32, foretell_units::DataType::Bf16] {
        let [gather, ring] = [ContextMethod::Gather, ContextMethod::Ring].map(|method| compiled(method, precision));
        let [gathers, rings] = [&gather, &ring].map(|program| &program.lists[0]);
        assert_eq!(count(gathers, "shift"), 0);
        // In each layer, k and v shift three times in the forward pass, in its recomputation and in
        // the backward pass. Their gradients shift four times.
        assert_eq!(count(rings, "shift"), 2 * (3 * 2 * 3 + 2 * 4), "{ring}");
        assert_eq!(count(rings, "attention"), 2 * 2 * 4);
        assert_eq!(count(rings, "attention_gradient"), 2 * 4);
        // No other operator gathers along the sequence.
        assert_eq!(count(rings, "all_gather"), 0, "{ring}");
        assert!(count(gathers, "all_gather") >= 2 * 2);
        assert!(rings.arena < gathers.arena, "{} {}", rings.arena, gathers.arena);
        assert_eq!(ring.hardware_flops, gather.hardware_flops, "the same products, divided differently");
        // Attention reads k and v from the rank's own buffers and from two arrival buffers.
        let whole = 2 * 4096 * 32 * precision.size().count();
        let held = |stage: &StageProgram, kind: &str| {
            let mut touched = std::collections::BTreeSet::new();
            for one in stage
                .instructions
                .iter()
                .filter(|instruction| instruction.operation.kind() == kind && instruction.phase == Phase::Forward)
            {
                touched.extend(one.reads[1..3].iter().copied().filter(|&read| *stage.name_of(one) == *stage.buffer(read).name));
            }
            touched.iter().map(|&id| stage.buffer(id).bytes.count()).sum::<u64>()
        };
        assert_eq!(held(rings, "attention"), 2 * whole / 2, "two of four parts in each of two layers");
    }
}

#[test]
fn attention_that_cannot_use_a_ring_gathers() {
    let model = Model::named("t5-small").expect("in the zoo");
    let layout = |context_method| Layout { context: 2, context_method, ..Layout::default() };
    let [gather, ring] = [ContextMethod::Gather, ContextMethod::Ring].map(|method| program(&model, layout(method), 1));
    let kinds = |program: &Program| ["shift", "all_gather"].map(|kind| count(&program.lists[0], kind));
    // T5 has relative positions everywhere except in attention over the encoder's sequence.
    assert_eq!(kinds(&gather)[0], 0);
    assert!(kinds(&ring)[1] > 0);
}

/// The orders of a training step's kernels and loads that have one.
fn orders(program: &Program) -> Vec<Zigzag> {
    let of = |operation: &Operation| match operation {
        Operation::Compute { kernel: Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes), .. } => sizes.zigzag,
        Operation::Compute { kernel: Kernel::Rope(sizes) | Kernel::RopeGradient(sizes), .. } => sizes.zigzag,
        Operation::Compute { kernel: Kernel::Dropout(sizes), .. } => sizes.zigzag,
        Operation::Load { order, .. } => *order,
        _ => None,
    };
    let instructions = program.lists.iter().flat_map(|list| &list.instructions);
    instructions.filter_map(|instruction| of(&instruction.operation)).collect()
}

#[test]
fn sequences_are_in_zigzag_order_where_all_operators_can_follow_it() {
    let decoder = gpt(r#""layers": 2, "hidden": 32, "heads": 4, "vocab": 16, "sequence": 24, "dropout": 0.1"#);
    let ring = Layout { context: 3, context_method: ContextMethod::Ring, ..Layout::default() };
    for layout in [Layout { context: 3, ..Layout::default() }, Layout { tensor: 2, sequence_parallel: true, ..ring }] {
        let found = orders(&program(&decoder, layout, 2));
        assert!(found.len() > 10 && found.iter().all(|&zigzag| Some(zigzag) == Zigzag::new(3, 24)), "{found:?}");
    }
    let none = |model: &Model, layout: Layout| assert_eq!(orders(&program(model, layout, 2)), []);
    none(&decoder, Layout { context: 3, context_order: ContextOrder::Contiguous, ..Layout::default() });
    none(&decoder, Layout::default());
    // Eight ranks need sixteen chunks.
    none(&decoder, Layout { context: 8, ..Layout::default() });
    let stage = |context| StageLayout { context, ..StageLayout::default() };
    let untied = gpt(r#""layers": 2, "hidden": 32, "heads": 4, "vocab": 16, "sequence": 24, "tied_embeddings": false"#);
    none(&untied, Layout { pipeline: 2, stages: Some(vec![stage(2), stage(4)]), ..Layout::default() });
    for model in ["bert-base-uncased", "t5-small", "vit_b_16"] {
        let model = Model::named(model).expect("in the zoo");
        if let Ok(compiled) = compile(&model, "model", &Plan::new(Layout { context: 2, ..Layout::default() }, 2)) {
            assert_eq!(orders(&compiled.training), []);
        }
    }
}

#[test]
fn attention_by_heads_exchanges_parts_for_heads() {
    let by_heads = |context| Layout { context, context_method: ContextMethod::AllToAll, ..Layout::default() };
    let model = gpt(r#""layers": 2, "hidden": 32, "heads": 4, "vocab": 16, "sequence": 24, "dropout": 0.1"#);
    let exchanged = program(&model, by_heads(4), 1);
    // q, k, v and the output of each layer, and their gradients.
    assert_eq!(count(&exchanged.lists[0], "all_to_all"), 2 * (4 + 4), "{exchanged}");
    assert_eq!(orders(&exchanged), []);
    let gathered = program(&model, Layout { context: 4, ..Layout::default() }, 1);
    assert_eq!(exchanged.hardware_flops, gathered.hardware_flops, "the same products, divided differently");
    let refusal = |layout| one_line(&compile(&model, "model", &Plan::new(layout, 2)).expect_err("refused"));
    assert!(refusal(by_heads(3)).contains("the number of key heads of"), "{}", refusal(by_heads(3)));
    let with_tensor = refusal(Layout { tensor: 2, ..by_heads(2) });
    assert!(with_tensor.contains("which `tensor` shards already"), "{with_tensor}");
}
