//! Operands of eight bits: which products have them, who makes them and how often, and what is kept of them.

use foretell_models::{EightBits, Kernel, Model, WeightLayout};
use foretell_program::{
    BufferId, BufferRole, Instruction, Layout, Operation, Phase, Plan, Recompute, Stack, StageProgram, compile,
};
use foretell_units::DataType;
use std::collections::HashSet;

const LAYERS: usize = 2;

fn gpt() -> Model {
    serde_json::from_str(r#"{"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}"#)
        .expect("a model")
}

fn llama() -> Model {
    let text =
        r#"{"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 64, "sequence": 16}"#;
    serde_json::from_str(text).expect("a model")
}

fn plan(layout: Layout, micro_batches: usize) -> Plan {
    let batch = 2 * layout.data * micro_batches;
    Plan { precision: DataType::Fp8, ..Plan::new(Layout { micro_batch: 2, ..layout }, batch) }
}

fn list(model: &Model, plan: &Plan) -> StageProgram {
    compile(model, "model", plan).expect("it can be laid out").training.lists.remove(0)
}

fn kernel(instruction: &Instruction) -> Option<Kernel> {
    match *instruction.operation {
        Operation::Compute { kernel, .. } => Some(kernel),
        _ => None,
    }
}

fn count(list: &StageProgram, is: impl Fn(&Kernel) -> bool) -> usize {
    list.instructions.iter().filter_map(kernel).filter(is).count()
}

/// What weights are made into eight bits: their names, and how often.
fn quantised_weights(list: &StageProgram) -> Vec<String> {
    let is_of_weight = |one: &&Instruction| {
        matches!(kernel(one), Some(Kernel::Quantise { .. })) && list.buffer(one.reads[0]).role == BufferRole::Parameter
    };
    let names = list.instructions.iter().filter(is_of_weight).map(|one| list.buffer(one.reads[0]).name.to_string());
    names.collect()
}

#[test]
fn the_products_of_a_stacks_layers_have_operands_of_eight_bits_and_no_others() {
    let program = compile(&gpt(), "gpt", &plan(Layout::default(), 1)).expect("it can be laid out").training;
    assert_eq!((program.precision, program.format), (DataType::Bf16, DataType::Fp8));
    let list = &program.lists[0];
    // Four a layer: to queries, keys and values, from heads, up and down.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmul { .. })), 4 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmulInputGradient { .. })), 4 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmulWeightGradient { .. })), 4 * LAYERS);
    // The head.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Matmul { .. })), 1);
    // Of each product what it reads, its weight and what comes back to it: gradients in the format that reaches further.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { format: EightBits::E4M3, .. })), 8 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { format: EightBits::E5M2, .. })), 4 * LAYERS);
    // A bias and a GELU are the product's still, and the gradient through the GELU.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmul { bias: true, .. })), 4 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmulInputGradient { gelu: true, .. })), LAYERS);
    // GPT-2's weights lie the other way round, and so do their gradients.
    let is_in_out = |kernel: &Kernel| matches!(kernel, Kernel::EightBitMatmulWeightGradient { weight: WeightLayout::InOut, .. });
    assert_eq!(count(list, is_in_out), 4 * LAYERS);
}

#[test]
fn what_several_products_read_is_made_once() {
    let list = list(&llama(), &plan(Layout::default(), 1));
    // Queries, keys and values of one tensor, their product, gate and up of another, down; seven weights, and what comes back to seven.
    assert_eq!(count(&list, |kernel| matches!(kernel, Kernel::Quantise { .. })), (4 + 7 + 7) * LAYERS);
}

#[test]
fn evaluation_makes_what_its_products_read_and_no_more() {
    let evaluation = compile(&llama(), "llama", &plan(Layout::default(), 1)).expect("it can be laid out").evaluation;
    let list = &evaluation.lists[0];
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { transposed: false, .. })), (4 + 7) * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { .. })), (4 + 7) * LAYERS);
}

#[test]
fn weights_are_made_once_a_step_and_again_where_they_come_and_go() {
    let weights = 4 * LAYERS;
    for recompute in [Recompute::None, Recompute::Full, Recompute::Selective] {
        let layout = Layout { recompute: recompute.clone(), ..Layout::default() };
        assert_eq!(quantised_weights(&list(&gpt(), &plan(layout, 3))).len(), weights, "{recompute:?}");
    }
    let whole = Layout { data: 2, zero: 2, ..Layout::default() };
    assert_eq!(quantised_weights(&list(&gpt(), &plan(whole, 3))).len(), weights);
    // ZeRO 3 drops them after each pass; of the last layer's the backward pass finds those of the forward pass, and so each pass those of
    // the one before.
    let dropped = Layout { data: 2, zero: 3, ..Layout::default() };
    let names = quantised_weights(&list(&gpt(), &plan(dropped, 3)));
    assert!(names.len() > weights && names.len() <= 3 * 2 * weights, "{}", names.len());
}

#[test]
fn of_what_is_gathered_the_part_is_kept_and_its_transposed_copy_made_of_it_again() {
    let of_x = |sequence_parallel| {
        let layout = Layout { tensor: 2, sequence_parallel, ..Layout::default() };
        let list = list(&gpt(), &plan(layout, 1));
        let both = count(&list, |kernel| {
            matches!(kernel, Kernel::Quantise { format: EightBits::E4M3, straight: true, transposed: true, .. })
        });
        let again = list.instructions.iter().filter(|one| one.phase == Phase::Backward).filter_map(kernel);
        let again = again.filter(|kernel| {
            matches!(kernel, Kernel::Quantise { format: EightBits::E4M3, straight: false, transposed: true, .. })
        });
        (both, again.count())
    };
    // Every weight and every input in both ways; with sequences in parts not the inputs of two products a layer.
    assert_eq!(of_x(false), (8 * LAYERS, 0));
    assert_eq!(of_x(true), (6 * LAYERS, 2 * LAYERS));
}

#[test]
fn other_stacks_have_them_in_their_profiles_and_models_without_such_products_are_refused() {
    let plan = Plan { stack: Stack::new("megatron-core"), ..plan(Layout::default(), 1) };
    let program = compile(&gpt(), "gpt", &plan).expect("it can be laid out").training;
    assert_eq!((program.precision, program.format), (DataType::Bf16, DataType::Fp8));
    assert_eq!(count(&program.lists[0], |kernel| matches!(kernel, Kernel::Quantise { .. })), 0);
    let resnet = Model::named("resnet18").expect("it is in the library");
    let plan = Plan { precision: DataType::Fp8, ..Plan::new(Layout::default(), 1) };
    let error = compile(&resnet, "resnet18", &plan).expect_err("it has none").to_string();
    assert!(error.contains("precision") && error.contains("hint: use `precision: bf16`"), "{error}");
}

#[test]
fn the_router_of_experts_and_the_experts_stay_as_they_are() {
    let of = |experts: usize| -> Model {
        let text = format!(
            r#"{{"family": "moe", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 64, "sequence": 16,
            "experts": {experts}, "top_k": 2}}"#
        );
        serde_json::from_str(&text).expect("a model")
    };
    // Four for attention's: sixteen experts are as many outputs as a product of eight bits may have.
    let counts = [4, 16].map(|experts| {
        let list = list(&of(experts), &plan(Layout::default(), 1));
        count(&list, |kernel| matches!(kernel, Kernel::EightBitMatmul { .. }))
    });
    assert_eq!(counts[0], counts[1]);
    assert!(counts[0] > 0);
}

#[test]
fn nothing_is_made_that_nobody_reads() {
    let layouts = [Recompute::None, Recompute::Full, Recompute::Selective].into_iter().flat_map(|recompute| {
        let own = Layout { recompute, ..Layout::default() };
        let parts = [false, true].map(|sequence_parallel| Layout { tensor: 2, sequence_parallel, ..own.clone() });
        [0, 1, 2, 3].into_iter().map(move |zero| Layout { data: 2, zero, ..own.clone() }).chain(parts)
    });
    for layout in layouts {
        for model in [gpt(), llama()] {
            let plan = plan(layout.clone(), 3);
            let program = compile(&model, "model", &plan).expect("it can be laid out");
            for list in program.training.lists.iter().chain(&program.evaluation.lists) {
                let read: HashSet<BufferId> = list.instructions.iter().flat_map(|one| one.reads.iter().copied()).collect();
                for one in list.instructions.iter().filter(|one| matches!(kernel(one), Some(Kernel::Quantise { .. }))) {
                    for buffer in &one.writes {
                        let name = &list.buffer(*buffer).name;
                        assert!(read.contains(buffer), "{name} of {:?} in {:?} of {layout:?}", kernel(one), one.phase);
                    }
                }
            }
        }
    }
}
