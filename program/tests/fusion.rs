//! Fusion into matrix products, and the cases without it: other readers of the intermediate result,
//! other shards, a recomputation policy that keeps only the product's result, another software
//! stack.

use foretell_models::{Activation, Kernel, Model};
use foretell_program::{Keep, Kept, Layout, Operation, Plan, Recompute, Stack, StageProgram, compile};

fn gpt() -> Model {
    serde_json::from_str(r#"{"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}"#)
        .expect("a model")
}

fn bert() -> Model {
    serde_json::from_str(r#"{"family": "bert", "layers": 2, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 16}"#)
        .expect("a model")
}

fn plan(layout: Layout) -> Plan {
    let batch = 2 * layout.data;
    Plan::new(Layout { micro_batch: 2, ..layout }, batch)
}

/// The kernels of the first list of training and of evaluation.
fn kernels(model: &Model, plan: &Plan) -> [Vec<Kernel>; 2] {
    let compiled = compile(model, "model", plan).expect("a plan that fits");
    let of = |list: &StageProgram| {
        let kernel = |instruction: &foretell_program::Instruction| match *instruction.operation {
            Operation::Compute { kernel, .. } => Some(kernel),
            _ => None,
        };
        list.instructions.iter().filter_map(kernel).collect()
    };
    [of(&compiled.training.lists[0]), of(&compiled.evaluation.lists[0])]
}

/// The numbers of: products with a GELU, those of them that also store its argument, separate
/// GELUs, products with a GELU's gradient, separate GELU gradients, products with a bias gradient,
/// separate bias gradients.
fn counts(kernels: &[Kernel]) -> [usize; 7] {
    let count = |is: fn(&Kernel) -> bool| kernels.iter().filter(|kernel| is(kernel)).count();
    [
        count(|kernel| matches!(kernel, Kernel::Matmul { activation, .. } if activation.is_gelu())),
        count(|kernel| matches!(kernel, Kernel::Matmul { activation: Activation::GeluKept, .. })),
        count(|kernel| matches!(kernel, Kernel::Gelu { .. } | Kernel::GeluExact { .. })),
        count(|kernel| matches!(kernel, Kernel::MatmulInputGradient { gelu: true, .. })),
        count(|kernel| matches!(kernel, Kernel::GeluGradient { .. } | Kernel::GeluExactGradient { .. })),
        count(|kernel| matches!(kernel, Kernel::MatmulWeightGradient { bias: true, .. })),
        count(|kernel| matches!(kernel, Kernel::BiasGradient { .. })),
    ]
}

#[test]
fn gelus_and_gradients_of_gelus_and_biases_merge_into_products() {
    let [training, evaluation] = kernels(&gpt(), &plan(Layout::default()));
    // Learned positions are added by a bias kernel, which follows no product.
    assert_eq!(counts(&training), [2, 2, 0, 2, 0, 8, 1]);
    // In evaluation, no operator reads the argument of a GELU.
    assert_eq!(counts(&evaluation), [2, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn with_tensor_parallelism_biases_after_partial_sums_stay_separate() {
    let [training, _] = kernels(&gpt(), &plan(Layout { tensor: 2, ..Layout::default() }));
    // The gradient of a bias after a reduced sum is whole on every rank, but that of the weight is
    // sharded.
    assert_eq!(counts(&training), [2, 2, 0, 2, 0, 4, 5]);
    let layout = Layout { tensor: 2, sequence_parallel: true, ..Layout::default() };
    assert_eq!(counts(&kernels(&gpt(), &plan(layout))[0]), [2, 2, 0, 2, 0, 4, 5]);
}

#[test]
fn exact_gelus_stay_separate() {
    let [training, _] = kernels(&bert(), &plan(Layout::default()));
    let [fused, _, separate, gradients, separate_gradients, ..] = counts(&training);
    assert_eq!([fused, gradients], [0, 0]);
    assert!(separate == separate_gradients && separate > 2);
}

#[test]
fn recomputed_gelus_of_kept_products_stay_separate() {
    let kept = |kinds: &[Keep]| {
        let recompute = Recompute::AllBut(Kept::from(kinds.to_vec()));
        counts(&kernels(&gpt(), &plan(Layout { recompute, ..Layout::default() }))[0])
    };
    // Each GELU runs in the forward pass and in the recomputation.
    assert_eq!(kept(&[Keep::Products])[..5], [0, 0, 4, 2, 0]);
    assert_eq!(kept(&[Keep::Attention])[..5], [4, 4, 0, 2, 0]);
    let full = kernels(&gpt(), &plan(Layout { recompute: Recompute::Full, ..Layout::default() }));
    assert_eq!(counts(&full[0])[..5], [4, 4, 0, 2, 0]);
}

#[test]
fn other_stacks_have_no_optional_fusions() {
    let other = Plan { stack: Stack::new("megatron-core"), ..plan(Layout::default()) };
    assert_eq!(counts(&kernels(&gpt(), &other)[0]), [0, 0, 2, 0, 2, 0, 9]);
}

#[test]
fn the_bias_gradient_of_a_shared_weight_stays_separate() {
    // BERT's decoder shares the embedding's weight. The second separate gradient is that of learned
    // positions.
    let [training, _] = kernels(&bert(), &plan(Layout::default()));
    let [.., fused, separate] = counts(&training);
    assert!(fused > 0);
    assert_eq!(separate, 2);
}
