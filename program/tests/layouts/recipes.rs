//! What a recipe changes in a Program: frozen parameters, weight decay, LAMB, the loss.

use super::*;
use foretell_program::{DecayExemptions, Lora};

fn with(training: Training, optimizer: Optimizer, layout: Layout) -> StageProgram {
    let model = Model::Mlp(Mlp { widths: vec![64, 48, 32, 16] });
    let plan = Plan { training, optimizer, ..Plan::new(layout, 8) };
    compile(&model, "model", &plan).expect("a plan that fits").training.lists.swap_remove(0)
}

/// The elements of all persistent buffers of a role.
fn kept(list: &StageProgram, role: BufferRole) -> usize {
    let buffers = list.buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none() && buffer.role == role);
    buffers.map(|buffer| buffer.shape.iter().product::<usize>()).sum()
}

#[test]
fn frozen_parameters_have_no_gradient_and_no_state() {
    let frozen = |patterns: &[&str]| Training { frozen: patterns.iter().copied().collect(), ..Training::default() };
    for zero in 0..4 {
        let layout = || Layout { data: 2, zero, ..Layout::default() };
        let all = with(frozen(&[]), Optimizer::AdamW, layout());
        let head = with(frozen(&["0.*", "2.*"]), Optimizer::AdamW, layout());
        let roles = [BufferRole::Parameter, BufferRole::Gradient, BufferRole::OptimizerState];
        let [[parameters, ..], [kept_parameters, gradients, states]] =
            [&all, &head].map(|list| roles.map(|role| kept(list, role)));
        let padding = 64;
        // The head's weight and bias, of which ZeRO gives each rank a half.
        let trained = 32 * 16 + 16;
        // Without an optimizer state to shard, ZeRO 1 and 2 keep frozen parameters whole.
        let frozen = 64 * 48 + 48 + 48 * 32 + 32;
        let expected = if matches!(zero, 1 | 2) { frozen + trained / 2 } else { parameters };
        assert!(kept_parameters.abs_diff(expected) <= padding, "ZeRO {zero}: {kept_parameters} of {expected}");
        let (of_gradients, of_states) = (if zero >= 2 { 2 } else { 1 }, if zero >= 1 { 2 } else { 1 });
        assert!(gradients.abs_diff(trained / of_gradients) <= padding, "ZeRO {zero}: {gradients}");
        assert!(states.abs_diff(2 * trained / of_states) <= 2 * padding, "ZeRO {zero}: {states}");
        // In each of four micro-batches the backward pass ends at the head: nothing before it is
        // trained.
        assert_eq!(count(&head, "matmul_input_gradient"), 0, "ZeRO {zero}");
        assert_eq!(count(&head, "matmul_weight_gradient"), 4, "ZeRO {zero}");
        assert_eq!((count(&all, "matmul_input_gradient"), count(&all, "matmul_weight_gradient")), (8, 12));
    }
    // Gradients pass through frozen layers to those before them, in each of eight micro-batches.
    let first = with(frozen(&["2.*", "4.*"]), Optimizer::Sgd, Layout::default());
    assert_eq!((count(&first, "matmul_input_gradient"), count(&first, "matmul_weight_gradient")), (16, 8));
}

#[test]
fn exempt_parameters_are_updated_apart_from_those_that_decay() {
    let updated = |weight_decay, biases, names: &[&str]| {
        let no_decay = DecayExemptions { biases, norms: false, names: names.iter().copied().collect() };
        let list = with(Training { weight_decay, no_decay, ..Training::default() }, Optimizer::AdamW, Layout::default());
        let elements = |wanted: bool| -> usize {
            let of_kernel = |instruction: &Instruction| match *instruction.operation {
                Operation::Compute { kernel: Kernel::AdamW { elements, exempt, .. }, .. } if exempt == wanted => elements,
                _ => 0,
            };
            list.instructions.iter().map(of_kernel).sum()
        };
        [elements(false), elements(true)]
    };
    let (weights, biases) = (64 * 48 + 48 * 32 + 32 * 16, 48 + 32 + 16);
    assert_eq!(updated(0.1, false, &[]), [weights + biases, 0]);
    assert_eq!(updated(0.1, true, &[]), [weights, biases]);
    assert_eq!(updated(0.1, true, &["4.*"]), [weights - 32 * 16, biases + 32 * 16]);
    assert_eq!(updated(0.0, true, &[]), [weights + biases, 0], "nothing decays");
}

#[test]
fn lamb_has_a_bucket_and_a_norm_for_each_parameter() {
    let list = with(Training::default(), Optimizer::Lamb, Layout { data: 2, zero: 1, ..Layout::default() });
    assert_eq!((count(&list, "lamb_direction"), count(&list, "lamb_step")), (6, 6));
    // Ranks have halves of the parameters, and so of the norms.
    assert_eq!(count(&list, "all_reduce"), 6, "{list:?}");
    let whole = with(Training::default(), Optimizer::Lamb, Layout::default());
    assert_eq!(count(&whole, "all_reduce"), 0);
}

#[test]
fn a_weighted_loss_has_its_own_kernels_and_divides_by_weight() {
    let training = Training { class_weights: vec![0.5; 16], label_smoothing: 0.1, ..Training::default() };
    let list = with(training, Optimizer::Sgd, Layout { data: 2, ..Layout::default() });
    assert_eq!((count(&list, "weighted_cross_entropy"), count(&list, "weighted_cross_entropy_gradient")), (4, 4));
    assert_eq!((count(&list, "cross_entropy"), count(&list, "update_control")), (0, 1));
    let weighted = |instruction: &Instruction| {
        matches!(*instruction.operation, Operation::Compute { kernel: Kernel::UpdateControl { predictions: 8, .. }, .. })
    };
    assert!(list.instructions.iter().any(weighted));
    let smoothed = with(Training { label_smoothing: 0.1, ..Training::default() }, Optimizer::Sgd, Layout::default());
    assert_eq!(count(&smoothed, "update_control"), 0, "all labels weigh the same");
}

#[test]
fn adapters_alone_have_gradients_and_optimizer_state() {
    let lora = |targets: &[&str]| {
        let lora = Lora { rank: 4, alpha: 8, targets: targets.iter().copied().collect(), ..Lora::default() };
        with(Training { lora: Some(lora), ..Training::default() }, Optimizer::AdamW, Layout::default())
    };
    let plain = with(Training::default(), Optimizer::AdamW, Layout::default());
    let both = lora(&["0", "2"]);
    let adapters = 4 * (64 + 48) + 4 * (48 + 32);
    assert_eq!(kept(&both, BufferRole::Gradient), adapters);
    assert_eq!(kept(&both, BufferRole::OptimizerState), 2 * adapters);
    assert_eq!(kept(&both, BufferRole::Parameter), kept(&plain, BufferRole::Parameter) + adapters);
    assert!(both.arena < plain.arena, "{} and {}", both.arena, plain.arena);
    // In each of eight micro-batches: two products of each adapter have weights to train.
    assert_eq!(count(&both, "matmul_weight_gradient"), 8 * 4);
    let second = lora(&["2"]);
    assert_eq!(count(&second, "matmul_weight_gradient"), 8 * 2);
    // The gradient comes back through the last layer and B, and goes no further.
    assert_eq!(count(&second, "matmul_input_gradient"), 8 * 2);
}

#[test]
fn adapters_cause_no_second_sum_of_a_wide_gradient() {
    let text = r#"{"family": "llama", "layers": 3, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 64, "sequence": 8}"#;
    let model: Model = serde_json::from_str(text).expect("a model");
    for sequence_parallel in [false, true] {
        // Sums over `tensor` in the backward pass, of tensors as wide as the model.
        let sums = |training: Training| {
            let layout = Layout { tensor: 2, sequence_parallel, ..Layout::default() };
            let plan = Plan { training, ..Plan::new(layout, 1) };
            let list = compile(&model, "model", &plan).expect("a plan that fits").training.lists.swap_remove(0);
            let is_wide_sum = |instruction: &&Instruction| {
                matches!(*instruction.operation, Operation::Collective { kind: Collective::AllReduce | Collective::ReduceScatter, bytes, .. }
                    if instruction.phase == Phase::Backward && bytes >= Bytes::new(8 * 64 * 4))
            };
            list.instructions.iter().filter(is_wide_sum).count()
        };
        // Two of each layer, and the head's.
        assert_eq!(sums(Training::default()), 2 * 3 + 1);
        // Nothing before the first layer's first adapters is trained.
        let lora = Some(Lora { rank: 4, ..Lora::default() });
        assert_eq!(sums(Training { lora, ..Training::default() }), 2 * 3, "sequence_parallel: {sequence_parallel}");
    }
}

#[test]
fn adapters_that_fit_no_layer_are_refused() {
    let model = Model::Mlp(Mlp { widths: vec![64, 48, 16] });
    let refused = |lora: Lora| {
        let training = Training { lora: Some(lora), ..Training::default() };
        compile(&model, "model", &Plan { training, ..Plan::new(Layout::default(), 8) }).expect_err("refused").to_string()
    };
    let targets = |patterns: &[&str]| Lora { targets: patterns.iter().copied().collect(), ..Lora::default() };
    assert!(refused(targets(&["q_proj"])).contains("`q_proj` matches no linear layer"));
    assert!(refused(targets(&[])).contains("names no layer"));
    assert!(refused(Lora { rank: 0, ..Lora::default() }).contains("training.lora.rank"));
    let also_train = ["head"].into_iter().collect();
    assert!(refused(Lora { also_train, ..Lora::default() }).contains("`head` matches no parameter"));
}

#[test]
fn muon_makes_whole_matrices_orthogonal_and_leaves_the_rest_to_adamw() {
    let kernels = ["muon_direction", "orthogonalise", "muon_step", "adamw", "all_gather"];
    let counts = |layout| {
        let list = with(Training::default(), Optimizer::Muon, layout);
        kernels.map(|kernel| count(&list, kernel))
    };
    // Two hidden matrices; the projection to classes and the biases share a bucket.
    assert_eq!(counts(Layout::default()), [2, 2, 2, 1, 0]);
    // Shards of directions are gathered, and then the updated parameters of each bucket.
    assert_eq!(counts(Layout { data: 2, zero: 1, ..Layout::default() }), [2, 2, 2, 1, 2 + 3]);
    // The first layer is cut by columns and the second by rows: the bias of the second is whole.
    let [directions, matrices, steps, ..] = counts(Layout { tensor: 2, ..Layout::default() });
    assert_eq!([directions, matrices, steps], [2; 3]);
}
