//! Losses and MLPs that run a few positions at a time.

use super::*;
use foretell_units::diagnostic::one_line;

const FIELDS: &str =
    r#""layers": 2, "hidden": 16, "heads": 2, "ffn": 80, "vocab": 512, "sequence": 64, "tied_embeddings": false"#;

/// The most elements of an activation with `features` in its last dimension.
fn largest(list: &StageProgram, features: usize) -> usize {
    let activations = list.buffers.iter().filter(|buffer| buffer.role == BufferRole::Activation);
    let wide = activations.filter(|buffer| buffer.shape.last() == Some(&features));
    wide.map(|buffer| buffer.shape.iter().product()).max().expect("such a buffer")
}

#[test]
fn logits_of_a_chunked_loss_are_never_whole() {
    let model = gpt(FIELDS);
    for (tensor, recompute) in [(1, Recompute::None), (2, Recompute::Full)] {
        let layout = Layout { tensor, micro_batch: 2, recompute, ..Layout::default() };
        let compiled = |loss_chunk| {
            let plan = Plan::new(Layout { loss_chunk, ..layout.clone() }, 2);
            compile(&model, "m", &plan).expect("a plan that fits")
        };
        let (whole, chunked) = (compiled(None), compiled(Some(24)));
        let mut programs = vec![(&whole.training, &chunked.training)];
        // An evaluation counts the five best classes from the statistics of all shards at once.
        programs.extend((tensor == 1).then_some((&whole.evaluation, &chunked.evaluation)));
        for (whole, chunked) in programs {
            assert_eq!(largest(&whole.lists[0], 512 / tensor), 2 * 64 * 512 / tensor);
            assert_eq!(largest(&chunked.lists[0], 512 / tensor), 24 * 512 / tensor, "{chunked}");
            assert!(chunked.lists[0].arena < whole.lists[0].arena);
        }
        // Six chunks, the last of 8 positions. Each computes its logits twice.
        let heads = |program: &Program| {
            let list = &program.lists[0];
            let is_head = |one: &&Instruction| list.name_of(one) == "lm_head" && one.operation.kind() == "matmul";
            list.instructions.iter().filter(is_head).count()
        };
        assert_eq!((heads(&whole.training), heads(&chunked.training)), (1, 2 * 6));
        let head = 2.0 * (2 * 64 * 16 * 512) as f64;
        let [whole, chunked] = [whole, chunked].map(|compiled| compiled.training.hardware_flops.value());
        assert_eq!(chunked - whole, head);
    }
}

#[test]
fn inner_features_of_a_chunked_mlp_are_never_whole() {
    let model = gpt(&FIELDS.replace("512", "16"));
    for recompute in [Recompute::None, Recompute::Full] {
        let layout = Layout { recompute, ..Layout::default() };
        let whole = program(&model, layout.clone(), 1);
        let chunked = program(&model, Layout { mlp_chunk: Some(16), ..layout }, 1);
        assert_eq!(largest(&whole.lists[0], 80), 64 * 80);
        assert_eq!(largest(&chunked.lists[0], 80), 16 * 80, "{chunked}");
        assert!(chunked.lists[0].arena < whole.lists[0].arena);
    }
}

#[test]
fn what_cannot_run_in_chunks_is_refused() {
    let refusal = |model: &str, layout: Layout, precision| {
        let model: Model = serde_json::from_str(model).expect("a model");
        let plan = Plan { precision, ..Plan::new(layout, 1) };
        one_line(&compile(&model, "m", &plan).expect_err("a plan that does not fit"))
    };
    let [loss, mlp] = [Layout { loss_chunk: Some(4), ..Layout::default() }, Layout { mlp_chunk: Some(4), ..Layout::default() }];
    let perceptron = r#"{"family": "mlp", "widths": [8, 4]}"#;
    let refused = refusal(perceptron, loss.clone(), DataType::Fp32);
    assert!(refused.starts_with("`loss_chunk`: `m` has no loss over a vocabulary; hint: "), "{refused}");
    let refused = refusal(perceptron, mlp.clone(), DataType::Fp32);
    assert!(refused.starts_with("`mlp_chunk`: `m` has no MLP but those of experts"), "{refused}");
    // Products of eight bits have one factor for all positions.
    let refused = refusal(&format!(r#"{{"family": "gpt", {FIELDS}}}"#), mlp, DataType::Fp8);
    assert!(refused.contains("does not run position by position"), "{refused}");
    let refused = refusal(&format!(r#"{{"family": "gpt", {FIELDS}}}"#), Layout { loss_chunk: Some(0), ..loss }, DataType::Fp32);
    assert!(refused.contains("a chunk has no position"), "{refused}");
}

/// Adapters have a narrow product beside each wide one: a part still runs in one wave of each pass.
#[test]
fn adapters_take_no_further_product_in_chunks() {
    let model = gpt(&FIELDS.replace("512", "16"));
    let lora = foretell_program::Lora { rank: 2, alpha: 2, ..foretell_program::Lora::default() };
    let training = Training { lora: Some(lora), ..Training::default() };
    let compiled = |mlp_chunk| {
        let layout = Layout { mlp_chunk, ..Layout::default() };
        let plan = Plan { training: training.clone(), ..Plan::new(layout, 1) };
        compile(&model, "m", &plan).expect("a plan that fits").training
    };
    let products = |program: &Program, name: &str| {
        let list = &program.lists[0];
        let is_forward = |one: &&Instruction| list.name_of(one) == name && one.operation.kind() == "matmul";
        list.instructions.iter().filter(is_forward).count()
    };
    let chunked = compiled(Some(16));
    // Four chunks, each of which runs again in the backward pass.
    assert_eq!(products(&chunked, "transformer.h.0.mlp.c_fc"), 2 * 4, "{chunked}");
    assert_eq!(products(&chunked, "transformer.h.0.mlp.c_proj"), 4);
    // The adapter's product from hidden features is narrow, and runs once for all positions.
    assert_eq!(products(&chunked, "transformer.h.0.mlp.c_fc.lora_A"), 1);
    assert!(chunked.lists[0].arena < compiled(None).lists[0].arena);
}
