//! Sequences that are shared out: rings, and gathering.

use super::*;

#[test]
fn a_ring_passes_parts_on_and_holds_less_than_gathering() {
    // A long sequence, of which attention would gather all.
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
        // Of each layer k and v go on three times in the forward pass, when it is run again and in the backward pass, in which their
        // gradients go on four times.
        assert_eq!(count(rings, "shift"), 2 * (3 * 2 * 3 + 2 * 4), "{ring}");
        assert_eq!(count(rings, "attention"), 2 * 2 * 4);
        assert_eq!(count(rings, "attention_gradient"), 2 * 4);
        // Other operators gather nothing along a sequence.
        assert_eq!(count(rings, "all_gather"), 0, "{ring}");
        assert!(count(gathers, "all_gather") >= 2 * 2);
        assert!(rings.arena < gathers.arena, "{} {}", rings.arena, gathers.arena);
        assert_eq!(ring.hardware_flops, gather.hardware_flops, "the same products in other parts");
        // What attention reads and writes at a time: the rank's own, and two parts that come and go.
        let whole = 2 * 4096 * 32 * precision.size().count();
        let room = |stage: &StageProgram, kind: &str| {
            let mut touched = std::collections::BTreeSet::new();
            for one in stage.instructions.iter().filter(|one| one.operation.kind() == kind && one.phase == Phase::Forward) {
                touched.extend(one.reads[1..3].iter().copied().filter(|&read| *stage.name_of(one) == *stage.buffer(read).name));
            }
            touched.iter().map(|&id| stage.buffer(id).bytes.count()).sum::<u64>()
        };
        assert_eq!(room(rings, "attention"), 2 * whole / 2, "two of four parts in each of two layers");
    }
}

#[test]
fn attention_that_is_no_ring_gathers_all_the_same() {
    let model = Model::named("t5-small").expect("in the zoo");
    let layout = |context_method| Layout { context: 2, context_method, ..Layout::default() };
    let [gather, ring] = [ContextMethod::Gather, ContextMethod::Ring].map(|method| program(&model, layout(method), 1));
    let kinds = |program: &Program| ["shift", "all_gather"].map(|kind| count(&program.lists[0], kind));
    // Relative positions everywhere but in attention over the encoder's sequence.
    assert_eq!(kinds(&gather)[0], 0);
    assert!(kinds(&ring)[1] > 0);
}
