//! Eight-bit operands: the products that have them, and how often copies are made.

use foretell_models::{EightBits, Kernel, Model, WeightLayout};
use foretell_program::{
    BufferId, BufferRole, Instruction, Layout, Operation, Phase, Plan, Recompute, Stack, StageProgram, compile,
};
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;
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
    compile(model, "model", plan).expect("a plan that fits").training.lists.remove(0)
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

/// The names of the weights that are quantised, once for each time.
fn quantised_weights(list: &StageProgram) -> Vec<String> {
    let is_of_weight = |instruction: &&Instruction| {
        matches!(kernel(instruction), Some(Kernel::Quantise { .. }))
            && list.buffer(instruction.reads[0]).role == BufferRole::Parameter
    };
    let names =
        list.instructions.iter().filter(is_of_weight).map(|instruction| list.buffer(instruction.reads[0]).name.to_string());
    names.collect()
}

#[test]
fn products_of_repeated_blocks_have_eight_bit_operands() {
    let program = compile(&gpt(), "gpt", &plan(Layout::default(), 1)).expect("a plan that fits").training;
    assert_eq!((program.precision, program.format), (DataType::Bf16, DataType::Fp8));
    let list = &program.lists[0];
    // Four in a layer: the projections to and from the heads, up and down.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmul { .. })), 4 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmulInputGradient { .. })), 4 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmulWeightGradient { .. })), 4 * LAYERS);
    // The head is not quantised.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Matmul { .. })), 1);
    // The input, weight and output gradient of each product. Gradients have the format with the
    // larger range.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { format: EightBits::E4M3, .. })), 8 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { format: EightBits::E5M2, .. })), 4 * LAYERS);
    // Biases, GELUs and the gradients of GELUs stay merged.
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmul { bias: true, .. })), 4 * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::EightBitMatmulInputGradient { gelu: true, .. })), LAYERS);
    // GPT-2's weights are stored transposed, and so are their gradients.
    let is_in_out = |kernel: &Kernel| matches!(kernel, Kernel::EightBitMatmulWeightGradient { weight: WeightLayout::InOut, .. });
    assert_eq!(count(list, is_in_out), 4 * LAYERS);
}

#[test]
fn products_with_the_same_input_share_its_copy() {
    let list = list(&llama(), &plan(Layout::default(), 1));
    // Four inputs (of q, k and v; of the output projection; of gate and up; of down), seven
    // weights, and the output gradients of seven products.
    assert_eq!(count(&list, |kernel| matches!(kernel, Kernel::Quantise { .. })), (4 + 7 + 7) * LAYERS);
}

#[test]
fn evaluation_makes_only_the_copies_that_its_products_read() {
    let evaluation = compile(&llama(), "llama", &plan(Layout::default(), 1)).expect("a plan that fits").evaluation;
    let list = &evaluation.lists[0];
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { transposed: false, .. })), (4 + 7) * LAYERS);
    assert_eq!(count(list, |kernel| matches!(kernel, Kernel::Quantise { .. })), (4 + 7) * LAYERS);
}

#[test]
fn weights_are_quantised_once_a_step_or_for_each_gather() {
    let weights = 4 * LAYERS;
    for recompute in [Recompute::None, Recompute::Full, Recompute::Selective] {
        let layout = Layout { recompute: recompute.clone(), ..Layout::default() };
        assert_eq!(quantised_weights(&list(&gpt(), &plan(layout, 3))).len(), weights, "{recompute:?}");
    }
    let whole = Layout { data: 2, zero: 2, ..Layout::default() };
    assert_eq!(quantised_weights(&list(&gpt(), &plan(whole, 3))).len(), weights);
    // ZeRO 3 drops the copies after each pass. A pass still finds those of the layer at which the
    // pass before it ended.
    let dropped = Layout { data: 2, zero: 3, ..Layout::default() };
    let names = quantised_weights(&list(&gpt(), &plan(dropped, 3)));
    assert!(names.len() > weights && names.len() <= 3 * 2 * weights, "{}", names.len());
}

#[test]
fn gathered_inputs_are_quantised_again_for_the_weight_gradient() {
    let of_x = |sequence_parallel| {
        let layout = Layout { tensor: 2, sequence_parallel, ..Layout::default() };
        let list = list(&gpt(), &plan(layout, 1));
        let both = count(&list, |kernel| {
            matches!(kernel, Kernel::Quantise { format: EightBits::E4M3, straight: true, transposed: true, .. })
        });
        let again = list.instructions.iter().filter(|instruction| instruction.phase == Phase::Backward).filter_map(kernel);
        let again = again.filter(|kernel| {
            matches!(kernel, Kernel::Quantise { format: EightBits::E4M3, straight: false, transposed: true, .. })
        });
        (both, again.count())
    };
    // Weights and inputs are written straight and transposed at once, except for the gathered
    // inputs of two products in a layer under sequence parallelism.
    assert_eq!(of_x(false), (8 * LAYERS, 0));
    assert_eq!(of_x(true), (6 * LAYERS, 2 * LAYERS));
}

#[test]
fn other_stacks_do_not_quantise_and_models_without_products_are_refused() {
    let plan = Plan { stack: Stack::new("megatron-core"), ..plan(Layout::default(), 1) };
    let program = compile(&gpt(), "gpt", &plan).expect("a plan that fits").training;
    assert_eq!((program.precision, program.format), (DataType::Bf16, DataType::Fp8));
    assert_eq!(count(&program.lists[0], |kernel| matches!(kernel, Kernel::Quantise { .. })), 0);
    let resnet = Model::named("resnet18").expect("in the zoo");
    let plan = Plan { precision: DataType::Fp8, ..Plan::new(Layout::default(), 1) };
    let error = one_line(&compile(&resnet, "resnet18", &plan).expect_err("no product to quantise"));
    assert!(error.contains("precision") && error.contains("hint: use `precision: bf16`"), "{error}");
}

#[test]
fn experts_and_their_routers_are_not_quantised() {
    let of = |experts: usize| -> Model {
        let text = format!(
            r#"{{"family": "moe", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 48, "vocab": 64, "sequence": 16,
            "experts": {experts}, "top_k": 2}}"#
        );
        serde_json::from_str(&text).expect("a model")
    };
    // Sixteen experts would be enough outputs for an eight-bit router.
    let counts = [4, 16].map(|experts| {
        let list = list(&of(experts), &plan(Layout::default(), 1));
        count(&list, |kernel| matches!(kernel, Kernel::EightBitMatmul { .. }))
    });
    assert_eq!(counts[0], counts[1]);
    assert!(counts[0] > 0);
}

#[test]
fn every_quantised_copy_is_read() {
    let layouts = [Recompute::None, Recompute::Full, Recompute::Selective].into_iter().flat_map(|recompute| {
        let own = Layout { recompute, ..Layout::default() };
        let parts = [false, true].map(|sequence_parallel| Layout { tensor: 2, sequence_parallel, ..own.clone() });
        [0, 1, 2, 3].into_iter().map(move |zero| Layout { data: 2, zero, ..own.clone() }).chain(parts)
    });
    for layout in layouts {
        for model in [gpt(), llama()] {
            let plan = plan(layout.clone(), 3);
            let program = compile(&model, "model", &plan).expect("a plan that fits");
            for list in program.training.lists.iter().chain(&program.evaluation.lists) {
                let read: HashSet<BufferId> =
                    list.instructions.iter().flat_map(|instruction| instruction.reads.iter().copied()).collect();
                for one in
                    list.instructions.iter().filter(|instruction| matches!(kernel(instruction), Some(Kernel::Quantise { .. })))
                {
                    for buffer in &one.writes {
                        let name = &list.buffer(*buffer).name;
                        assert!(read.contains(buffer), "{name} of {:?} in {:?} of {layout:?}", kernel(one), one.phase);
                    }
                }
            }
        }
    }
}
