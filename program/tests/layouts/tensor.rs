//! Tensor parallelism: Megatron's collectives, packed attention, grouped queries, sequence
//! parallelism.

use super::*;

#[test]
fn a_transformer_layer_has_megatrons_four_all_reduces() {
    let model = gpt(r#""layers": 3, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 8"#);
    let program = program(&model, Layout { tensor: 2, ..Layout::default() }, 1);
    // The sharded vocabulary adds two all-reduces (of the embedding and of the head's input
    // gradient) and an all-gather (of the statistics of the loss).
    assert_eq!(count(&program.lists[0], "all_reduce"), 3 * 4 + 2, "{program}");
    assert_eq!(count(&program.lists[0], "all_gather"), 1);
}

#[test]
fn attention_reads_its_packed_projection_without_a_copy() {
    let gpt = gpt(r#""layers": 3, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 8"#);
    for recompute in [Recompute::None, Recompute::Full] {
        let program = program(&gpt, Layout { tensor: 2, recompute, ..Layout::default() }, 1);
        let kinds = ["split", "join", "attention_gradient"].map(|kind| count(&program.lists[0], kind));
        assert_eq!(kinds, [0, 0, 3], "{program}");
    }
}

#[test]
fn grouped_keys_are_sharded_with_their_queries() {
    let llama = |kv_heads| {
        Model::Llama(Llama {
            layers: 2,
            hidden: 32,
            heads: 8,
            kv_heads: Some(kv_heads),
            head_dimension: None,
            ffn: 48,
            vocab: 64,
            sequence: 8,
            tied_embeddings: false,
            rope_theta: 10_000,
        })
    };
    for (kv_heads, shape) in [(8, vec![4, 4, 32]), (2, vec![1, 4, 4, 32])] {
        let program = program(&llama(kv_heads), Layout { tensor: 2, ..Layout::default() }, 1);
        let stage = &program.lists[0];
        // Megatron's four in each layer, and two of the sharded vocabulary: those of the embedding
        // and of the head's input gradient.
        assert_eq!(count(stage, "all_reduce"), 2 * 4 + 2, "{program}");
        let query = stage.buffers.iter().find(|buffer| buffer.name.ends_with("0.self_attn.q_proj.weight")).expect("a weight");
        assert_eq!(*query.shape, *shape);
    }
}

#[test]
fn sequence_parallelism_splits_megatrons_all_reduces_in_two() {
    let model = gpt(r#""layers": 3, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 8"#);
    let program = program(&model, Layout { tensor: 2, sequence_parallel: true, ..Layout::default() }, 1);
    let stage = &program.lists[0];
    // Korthikanti et al. 2022: each of a layer's four all-reduces, and those of the vocabulary,
    // becomes a reduce-scatter and an all-gather. Inputs of products are gathered again for the
    // weights' gradients.
    assert_eq!(count(stage, "reduce_scatter"), 3 * 4 + 2, "{program}");
    assert!(count(stage, "all_gather") >= 3 * 4 + 2, "{program}");
    let activations = |stage: &StageProgram| {
        let norms = stage.instructions.iter().filter(|instruction| instruction.operation.kind() == "layer_norm");
        norms.map(|norm| stage.buffer(norm.writes[0]).shape.clone()).collect::<Vec<_>>()
    };
    assert!(activations(stage).iter().all(|shape| shape[..] == [1, 4, 32]), "norms have half of the sequence: {program}");
    // The gradients of whole parameters are partial sums over `tensor`, too.
    assert!(count(stage, "all_reduce") >= 1);
}

#[test]
fn activations_never_wait_behind_the_sum_of_norm_gradients() {
    let model = gpt(r#""layers": 3, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 8"#);
    for zero in [1, 2, 3] {
        let layout = Layout { data: 2, tensor: 2, sequence_parallel: true, zero, ..Layout::default() };
        let program = program(&model, layout, 4);
        let stage = &program.lists[0];
        // Collectives of one stream run in order, and the sum waits for a reduce-scatter over
        // `data`.
        let roles = |along: &[Axis]| {
            let is_it = |group: &foretell_program::Group| group.axes == along;
            let of_group = stage.instructions.iter().filter_map(move |instruction| match *instruction.operation {
                Operation::Collective { group, role, .. } if is_it(&stage.groups[group.0 as usize]) => Some(role),
                _ => None,
            });
            of_group.collect::<Vec<_>>()
        };
        let tensor = roles(&[Axis::Tensor]);
        let sums = tensor.iter().filter(|&&role| role == CollectiveRole::Gradients).count();
        assert!(sums > 0, "norms are sharded along the sequence");
        let (activations, last) = tensor.split_at(tensor.len() - sums);
        assert!(!activations.contains(&CollectiveRole::Gradients), "ZeRO {zero}: {tensor:?}");
        assert!(last.iter().all(|&role| role == CollectiveRole::Gradients));
    }
}

#[test]
fn no_tensor_is_all_reduced_twice() {
    // An all-reduce works in place. Later readers must know that the buffer holds the sum.
    let model = gpt(r#""layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 8"#);
    let program = program(&model, Layout { tensor: 2, data: 2, ..Layout::default() }, 4);
    for stage in &program.lists {
        let mut summed = std::collections::BTreeSet::new();
        for instruction in &stage.instructions {
            if let Operation::Collective { kind: Collective::AllReduce, .. } = *instruction.operation
                && !stage.buffer(instruction.writes[0]).persistent
            {
                assert!(summed.insert(instruction.writes[0]), "{} is summed twice", stage.name_of(instruction));
            }
        }
        assert!(!summed.is_empty());
    }
}
