//! Properties of woven Programs: they have the instructions of plain ones, each pass in its own
//! order, and are sound.

use foretell_models::Model;
use foretell_program::{Layout, Operation, Overlap, Phase, Plan, Program, Recompute, Schedule, StageProgram, compile_training};
use foretell_units::DataType;
use proptest::prelude::*;

const MIXTURE: &str = r#"{"family": "moe", "layers": 6, "hidden": 16, "heads": 4, "ffn": 16, "shared_ffn": 16, "vocab": 32,
    "sequence": 8, "experts": 4, "top_k": 2}"#;
const GPT: &str = r#"{"family": "gpt", "layers": 6, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 8, "dropout": 0.1}"#;

/// A training step whose passes are woven or not.
fn step(model: &str, layout: &Layout, micro_batches: usize, precision: DataType, passes: bool) -> Program {
    let model: Model = serde_json::from_str(model).expect("a model");
    let overlap = Overlap { passes, ..Overlap::default() };
    let batch = layout.samples_at_once() * micro_batches;
    compile_training(&model, "model", &Plan { overlap, precision, ..Plan::new(layout.clone(), batch) }).expect("a plan that fits")
}

/// An instruction without the numbers of its buffers, which depend on when messages arrive.
fn signature(list: &StageProgram, index: usize) -> String {
    let one = &list.instructions[index];
    let names = |buffers: &[foretell_program::BufferId]| -> Vec<_> { buffers.iter().map(|&id| &list.buffer(id).name).collect() };
    let (reads, writes) = (names(&one.reads), names(&one.writes));
    format!("{} {} {:?} {:?} {reads:?} {writes:?}", list.name_of(one), one.operation.kind(), one.micro_batch, one.phase)
}

/// The signatures of the instructions that are selected, in order.
fn selected(list: &StageProgram, selects: impl Fn(usize) -> bool) -> Vec<String> {
    (0..list.instructions.len()).filter(|&index| selects(index)).map(|index| signature(list, index)).collect()
}

fn is_message(list: &StageProgram, index: usize) -> bool {
    matches!(*list.instructions[index].operation, Operation::Send { .. } | Operation::Receive { .. })
}

/// How often the kernels of a list change from one micro-batch to another.
fn changes(list: &StageProgram) -> usize {
    let kernels = list.instructions.iter().filter(|instruction| matches!(*instruction.operation, Operation::Compute { .. }));
    let micro_batches: Vec<u32> = kernels.filter_map(|kernel| kernel.micro_batch).collect();
    micro_batches.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn woven_lists_have_the_same_instructions_and_each_pass_its_order(
        is_mixture in any::<bool>(),
        (pipeline, schedule, chunks) in prop_oneof![
            Just((1usize, Schedule::OneForwardOneBackward, 1usize)),
            Just((2, Schedule::OneForwardOneBackward, 1)),
            Just((1, Schedule::Interleaved, 2)),
            Just((2, Schedule::Interleaved, 2)),
            Just((2, Schedule::Interleaved, 3)),
            Just((3, Schedule::Interleaved, 2)),
        ],
        micro_batches in 1usize..12,
        ranks in 1usize..3,
        zero in 0usize..4,
        data in 1usize..3,
        recompute in prop_oneof![Just(Recompute::None), Just(Recompute::Full), Just(Recompute::Selective)],
        precision in prop_oneof![Just(DataType::Fp32), Just(DataType::Bf16), Just(DataType::Fp8)],
    ) {
        let (model, expert, tensor) = if is_mixture { (MIXTURE, ranks, 1) } else { (GPT, 1, ranks) };
        let layout = Layout {
            pipeline, schedule, virtual_stages: chunks, expert, tensor, data, zero, recompute, micro_batch: 2, ..Layout::default()
        };
        let [plain, woven] = [false, true].map(|passes| step(model, &layout, micro_batches, precision, passes));
        woven.check().expect("sound");
        for (plain, woven) in plain.lists.iter().zip(&woven.lists) {
            let sorted = |list| {
                let mut all = selected(list, |_| true);
                all.sort_unstable();
                all
            };
            prop_assert_eq!(sorted(plain), sorted(woven));
            for micro_batch in 0..micro_batches as u32 {
                for is_forward in [true, false] {
                    let of_pass = |list: &StageProgram| {
                        selected(list, |index| {
                            let one = &list.instructions[index];
                            let is_own = one.micro_batch == Some(micro_batch) && (one.phase == Phase::Forward) == is_forward;
                            is_own && !is_message(list, index)
                        })
                    };
                    prop_assert_eq!(of_pass(plain), of_pass(woven));
                }
            }
            for stream in 0..plain.streams.len() as u16 {
                let messages = |list: &StageProgram| {
                    selected(list, |index| is_message(list, index) && list.instructions[index].stream.0 == stream)
                };
                if plain.streams == woven.streams {
                    prop_assert_eq!(messages(plain), messages(woven));
                }
            }
            prop_assert!(woven.passes.windows(2).all(|two| two[0].instructions.end == two[1].instructions.start));
        }
    }

    #[test]
    fn v_shaped_woven_programs_are_sound(
        is_mixture in any::<bool>(), pipeline in 1usize..4, more in 0usize..6, ranks in 1usize..3, zero in 0usize..3,
        recompute in prop_oneof![Just(Recompute::None), Just(Recompute::Full)],
    ) {
        let (model, expert, tensor) = if is_mixture { (MIXTURE, ranks, 1) } else { (GPT, 1, ranks) };
        let schedule = Schedule::ZeroBubbleV;
        let layout = Layout {
            pipeline, schedule, virtual_stages: 2, expert, tensor, zero, recompute, micro_batch: 2, ..Layout::default()
        };
        let [plain, woven] = [false, true].map(|passes| step(model, &layout, 2 * pipeline + more, DataType::Fp32, passes));
        woven.check().expect("sound");
        let flops = |program: &Program| program.hardware_flops;
        prop_assert_eq!(flops(&plain), flops(&woven));
    }
}

#[test]
fn kernels_of_two_micro_batches_alternate_at_the_exchanges_of_tokens() {
    for (schedule, virtual_stages, pipeline) in
        [(Schedule::ZeroBubbleV, 2, 2), (Schedule::Interleaved, 2, 2), (Schedule::OneForwardOneBackward, 1, 1)]
    {
        let layout = Layout { expert: 2, pipeline, schedule, virtual_stages, micro_batch: 2, ..Layout::default() };
        let [plain, woven] = [false, true].map(|passes| step(MIXTURE, &layout, 8, DataType::Fp32, passes));
        for (plain, woven) in plain.lists.iter().zip(&woven.lists) {
            // Unwoven, kernels change once a pass; woven, also at the exchanges of its layers.
            assert!(changes(woven) > 2 * changes(plain), "{} beside {}", changes(woven), changes(plain));
        }
        // Kernels would wait for the exchanges of either pass.
        let overlap = Overlap { passes: true, expert: false, ..Overlap::default() };
        let model: Model = serde_json::from_str(MIXTURE).expect("a model");
        let plan = Plan { overlap, ..Plan::new(layout.clone(), layout.samples_at_once() * 8) };
        let blocking = compile_training(&model, "model", &plan).expect("a plan that fits");
        blocking.check().expect("sound");
        assert!(blocking.lists.iter().zip(&woven.lists).all(|(list, other)| changes(list) < changes(other)));
    }
}

#[test]
fn plans_say_how_many_pairs_they_weave() {
    let pairs = |layout: Layout| {
        let batch = layout.samples_at_once() * 16;
        Plan { overlap: Overlap { passes: true, ..Overlap::default() }, ..Plan::new(layout, batch) }.woven_pairs()
    };
    let v_shaped = Layout { pipeline: 4, schedule: Schedule::ZeroBubbleV, virtual_stages: 2, ..Layout::default() };
    assert_eq!(pairs(v_shaped.clone()), 21 + 22 + 23 + 23);
    assert_eq!(pairs(Layout { zero: 3, data: 2, ..v_shaped.clone() }), 0);
    assert_eq!(pairs(Layout { pipeline: 4, ..Layout::default() }), 0, "1F1B's passes meet");
    assert_eq!(pairs(Layout::default()), 15);
    assert_eq!(Plan::new(v_shaped, 16).woven_pairs(), 0);
}
