//! Dropout's knowledge of its place in the global batch.

use super::*;
use foretell_units::diagnostic::one_line;

/// The dropout kernels of all stages.
fn dropouts(program: &Program) -> Vec<foretell_models::Dropout> {
    let instructions = program.lists.iter().flat_map(|stage| &stage.instructions);
    let of = |operation: &Operation| match operation {
        Operation::Compute { kernel: foretell_models::Kernel::Dropout(sizes), .. } => Some(*sizes),
        _ => None,
    };
    instructions.filter_map(|instruction| of(&instruction.operation)).collect()
}

#[test]
fn dropout_knows_its_samples_and_its_part_of_the_sequence() {
    let gpt = |dropout| {
        Model::Gpt(Gpt {
            layers: 1,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 32,
            sequence: 8,
            tied_embeddings: true,
            dropout,
            attention_dropout: DropoutRate::NONE,
        })
    };
    let layout = Layout { data: 2, tensor: 2, context: 2, sequence_parallel: true, micro_batch: 3, ..Layout::default() };
    let plan = Plan::new(layout, 12);
    let compiled = compile(&gpt(DropoutRate::TENTH), "gpt", &plan).expect("a plan that fits");
    let found = dropouts(&compiled.training);
    // Three dropouts (embedding, attention, perceptron), forward and backward, in two
    // micro-batches.
    assert_eq!(found.len(), 3 * 2 * 2);
    assert!(
        found.iter().all(|dropout| (dropout.samples, dropout.positions, dropout.parts, dropout.features) == (3, 2, 4, 16)),
        "{found:?}"
    );
    assert_eq!(found.iter().filter(|dropout| dropout.first_sample == 6).count(), 6, "the second micro-batch begins at sample 6");
    assert_eq!(found.iter().map(|dropout| dropout.site.site).collect::<std::collections::BTreeSet<_>>().len(), 3);
    assert!(dropouts(&compiled.evaluation).is_empty());
    assert!(dropouts(&compile(&gpt(DropoutRate::NONE), "gpt", &plan).expect("a plan that fits").training).is_empty());
}

#[test]
fn attention_dropout_knows_its_part_of_positions_and_heads() {
    let gpt = |attention_dropout| {
        Model::Gpt(Gpt {
            layers: 2,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 32,
            sequence: 8,
            tied_embeddings: true,
            dropout: DropoutRate::NONE,
            attention_dropout,
        })
    };
    let attentions = |program: &Program| -> Vec<foretell_models::Attention> {
        let of = |operation: &Operation| match operation {
            Operation::Compute { kernel: Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes), .. } => Some(*sizes),
            _ => None,
        };
        let instructions = program.lists.iter().flat_map(|list| &list.instructions);
        instructions.filter_map(|instruction| of(&instruction.operation)).collect()
    };
    for (context_method, steps) in [(ContextMethod::Gather, 1), (ContextMethod::Ring, 2)] {
        let layout = Layout {
            data: 2,
            tensor: 2,
            context: 2,
            context_method,
            recompute: Recompute::Selective,
            micro_batch: 3,
            ..Layout::default()
        };
        let plan = Plan::new(layout, 12);
        let compiled = compile(&gpt(DropoutRate::TENTH), "gpt", &plan).expect("a plan that fits");
        // Forward, recomputed and backward, in two layers and two micro-batches.
        let found: Vec<_> = attentions(&compiled.training).iter().map(|operator| operator.dropout.expect("a dropout")).collect();
        assert_eq!(found.len(), 3 * 2 * 2 * steps);
        assert!(found.iter().all(|dropout| (dropout.position_parts, dropout.head_parts, dropout.group_parts) == (2, 2, 1)));
        assert_eq!(found.iter().filter(|dropout| dropout.first_sample == 6).count(), found.len() / 2);
        for site in [0, 1] {
            assert_eq!(
                found.iter().filter(|dropout| dropout.site.site == site).count(),
                found.len() / 2,
                "each layer has a site of its own"
            );
        }
        assert!(attentions(&compiled.evaluation).iter().all(|operator| operator.dropout.is_none()));
        let without = compile(&gpt(DropoutRate::NONE), "gpt", &plan).expect("a plan that fits");
        assert!(attentions(&without.training).iter().all(|operator| operator.dropout.is_none()));
        // Dropout has no matrix-product FLOPs.
        let flops = |compiled: &Compiled| (compiled.training.model_flops, compiled.training.hardware_flops);
        assert_eq!(flops(&compiled), flops(&without));
    }
}

#[test]
fn dropout_between_tensor_parallel_products_keeps_its_input_sharded() {
    let vgg = Model::Vgg(Vgg {
        depth: 11,
        batch_norm: false,
        stem: Stem::Imagenet,
        image: 224,
        channels: 3,
        classes: 10,
        width: 4,
        hidden: 64,
        dropout: DropoutRate::TENTH,
    });
    let plan = Plan::new(Layout { tensor: 2, micro_batch: 2, ..Layout::default() }, 2);
    let found = dropouts(&compile(&vgg, "vgg", &plan).expect("a plan that fits").training);
    assert!(
        found.iter().any(|dropout| (dropout.samples, dropout.positions, dropout.parts, dropout.features) == (2, 32, 2, 1)),
        "{found:?}"
    );
    let small = Model::Vgg(Vgg {
        depth: 11,
        batch_norm: false,
        stem: Stem::Small,
        image: 32,
        channels: 1,
        classes: 10,
        width: 4,
        hidden: 64,
        dropout: DropoutRate::TENTH,
    });
    let error = one_line(&compile(&small, "vgg", &plan).expect_err("it has no inner layers"));
    assert!(error.contains("`stem: small` does not have"), "{error}");
}
