//! Experts, and what of their tokens lies where.

use super::*;

#[test]
fn experts_are_cut_by_tensor_or_spread_over_it_and_their_tokens_over_the_sequence() {
    let text = r#"{"family": "moe", "layers": 1, "hidden": 16, "heads": 4, "ffn": 32, "vocab": 64, "sequence": 16, "experts": 8, "top_k": 2, "capacity_factor": 1.5}"#;
    let model: Model = serde_json::from_str(text).expect("a model");
    let look = |layout: Layout| {
        let program = compile(&model, "model", &Plan::new(layout, 2)).expect("a plan that fits").training;
        let list = &program.lists[0];
        let kernels = list.instructions.iter().filter_map(|one| match *one.operation {
            Operation::Compute { kernel, .. } => Some(kernel),
            _ => None,
        });
        let product = kernels.clone().find_map(|kernel| match kernel {
            Kernel::ExpertMatmul { experts, rows, columns, .. } => Some([experts, rows, columns]),
            _ => None,
        });
        let tokens = kernels.clone().find_map(|kernel| match kernel {
            Kernel::Dispatch(sizes) => Some(sizes.tokens),
            _ => None,
        });
        let exchanges: Vec<Vec<Axis>> = list
            .instructions
            .iter()
            .filter_map(|one| match *one.operation {
                Operation::Collective { kind: Collective::AllToAll, role: CollectiveRole::Expert, group, .. } => {
                    Some(list.groups[group.0 as usize].axes.clone())
                }
                _ => None,
            })
            .collect();
        (product.expect("experts"), tokens.expect("a dispatch"), exchanges)
    };
    // Slots: 1.5 x 16 tokens x 2 choices over 8 experts, of two samples.
    let ([experts, rows, columns], tokens, exchanges) = look(Layout { micro_batch: 2, ..Layout::default() });
    assert_eq!((experts, columns, tokens, exchanges), (8, 32, 32, vec![]));
    let cut = look(Layout { micro_batch: 2, tensor: 2, ..Layout::default() });
    assert_eq!(cut, ([8, rows, 16], 32, vec![]));
    // Megatron's expert-parallel size of 2 with an expert-tensor-parallel size of 1: there and back, and once more for the gradients.
    let spread = look(Layout { micro_batch: 2, tensor: 2, expert_tensor: Some(1), sequence_parallel: true, ..Layout::default() });
    assert_eq!(spread, ([4, rows, 32], 16, vec![vec![Axis::Tensor]; 4]));
    let context = look(Layout { micro_batch: 2, context: 2, ..Layout::default() });
    assert_eq!((context.0, context.1), ([8, rows / 2, 32], 16));
}
