//! What is fused into products, and where it is not: who else reads what lies in between, ranks that lay it out otherwise, a policy that keeps one and
//! makes the other again, another stack.

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

/// The kernels of the first list, training and evaluation.
fn kernels(model: &Model, plan: &Plan) -> [Vec<Kernel>; 2] {
    let compiled = compile(model, "model", plan).expect("it can be laid out");
    let of = |list: &StageProgram| {
        let kernel = |one: &foretell_program::Instruction| match *one.operation {
            Operation::Compute { kernel, .. } => Some(kernel),
            _ => None,
        };
        list.instructions.iter().filter_map(kernel).collect()
    };
    [of(&compiled.training.lists[0]), of(&compiled.evaluation.lists[0])]
}

/// How many products have a GELU, of which so many leave what it is applied to; GELUs apart; gradients through one; those apart; gradients of biases in
/// their product; those apart.
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
fn a_products_gelu_and_both_its_gradients_are_the_products() {
    let [training, evaluation] = kernels(&gpt(), &plan(Layout::default()));
    // What is learnt of positions is added as a bias is, and to no product.
    assert_eq!(counts(&training), [2, 2, 0, 2, 0, 8, 1]);
    // Nobody wants what it is applied to.
    assert_eq!(counts(&evaluation), [2, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn ranks_that_share_out_what_is_contracted_sum_before_a_bias_and_not_before_a_gelu() {
    let [training, _] = kernels(&gpt(), &plan(Layout { tensor: 2, ..Layout::default() }));
    // A bias after such a sum has its gradient on every rank whole, its weight's not.
    assert_eq!(counts(&training), [2, 2, 0, 2, 0, 4, 5]);
    let layout = Layout { tensor: 2, sequence_parallel: true, ..Layout::default() };
    assert_eq!(counts(&kernels(&gpt(), &plan(layout))[0]), [2, 2, 0, 2, 0, 4, 5]);
}

#[test]
fn the_gelu_of_the_error_function_stays_apart() {
    let [training, _] = kernels(&bert(), &plan(Layout::default()));
    let [fused, _, apart, gradients, gradients_apart, ..] = counts(&training);
    assert_eq!([fused, gradients], [0, 0]);
    assert!(apart == gradients_apart && apart > 2);
}

#[test]
fn where_products_are_kept_and_gelus_made_again_they_stay_apart() {
    let kept = |kinds: &[Keep]| {
        let recompute = Recompute::AllBut(Kept::from(kinds.to_vec()));
        counts(&kernels(&gpt(), &plan(Layout { recompute, ..Layout::default() }))[0])
    };
    // Forward, and again.
    assert_eq!(kept(&[Keep::Products])[..5], [0, 0, 4, 2, 0]);
    assert_eq!(kept(&[Keep::Attention])[..5], [4, 4, 0, 2, 0]);
    let full = kernels(&gpt(), &plan(Layout { recompute: Recompute::Full, ..Layout::default() }));
    assert_eq!(counts(&full[0])[..5], [4, 4, 0, 2, 0]);
}

#[test]
fn what_other_stacks_fuse_is_in_their_profiles() {
    let other = Plan { stack: Stack::new("megatron-core"), ..plan(Layout::default()) };
    assert_eq!(counts(&kernels(&gpt(), &other)[0]), [0, 0, 2, 0, 2, 0, 9]);
}

#[test]
fn a_weight_of_two_products_has_its_biases_gradient_apart() {
    // BERT's decoder is its embedding. What is learnt of positions is added as a bias is.
    let [training, _] = kernels(&bert(), &plan(Layout::default()));
    let [.., fused, apart] = counts(&training);
    assert!(fused > 0);
    assert_eq!(apart, 2);
}

#[test]
fn profiles_of_before_are_read() {
    let read = |text: &str| serde_json::from_str::<Kernel>(text).expect("a kernel");
    let sizes = r#""rows": 1, "columns": 2, "contracted": 3, "weight": "out_in""#;
    for (name, activation) in [("false", Activation::None), ("true", Activation::Relu)] {
        let kernel = read(&format!(r#"{{"matmul": {{{sizes}, "bias": true, "relu": {name}}}}}"#));
        assert!(matches!(kernel, Kernel::Matmul { activation: given, .. } if given == activation));
        let text = serde_json::to_string(&kernel).expect("it can be written");
        assert_eq!(read(&text), kernel);
    }
    let gradient = format!(r#"{{"matmul_input_gradient":{{{sizes}}}}}"#).replace(": ", ":").replace(", ", ",");
    assert_eq!(serde_json::to_string(&read(&gradient)).expect("it can be written"), gradient);
    assert!(
        serde_json::from_str::<Kernel>(&format!(r#"{{"matmul": {{{sizes}, "bias": true, "activation": "tanh"}}}}"#)).is_err()
    );
}
