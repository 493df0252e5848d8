//! Expert parallelism: the shards of experts and tokens.

use super::*;

#[test]
fn tensor_shards_each_expert_or_spreads_experts_over_its_ranks() {
    let text = r#"{"family": "moe", "layers": 1, "hidden": 16, "heads": 4, "ffn": 32, "vocab": 64, "sequence": 16, "experts": 8, "top_k": 2, "capacity_factor": 1.5}"#;
    let model: Model = serde_json::from_str(text).expect("a model");
    let compiled = |layout: Layout| {
        let program = compile(&model, "model", &Plan::new(layout, 2)).expect("a plan that fits").training;
        let list = &program.lists[0];
        let kernels = list.instructions.iter().filter_map(|instruction| match *instruction.operation {
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
        let all_to_alls: Vec<Vec<Axis>> = list
            .instructions
            .iter()
            .filter_map(|instruction| match *instruction.operation {
                Operation::Collective { kind: Collective::AllToAll, role: CollectiveRole::Expert, group, .. } => {
                    Some(list.groups[group.0 as usize].axes.clone())
                }
                _ => None,
            })
            .collect();
        (product.expect("experts"), tokens.expect("a dispatch"), all_to_alls)
    };
    // The slots of two samples: capacity factor 1.5 x 16 tokens x 2 choices, divided over 8
    // experts.
    let ([experts, rows, columns], tokens, all_to_alls) = compiled(Layout { micro_batch: 2, ..Layout::default() });
    assert_eq!((experts, columns, tokens, all_to_alls), (8, 32, 32, vec![]));
    let sharded = compiled(Layout { micro_batch: 2, tensor: 2, ..Layout::default() });
    assert_eq!(sharded, ([8, rows, 16], 32, vec![]));
    // Megatron's expert-parallel size 2 and expert-tensor-parallel size 1. Tokens travel to the
    // experts and back, and so do their gradients.
    let spread =
        compiled(Layout { micro_batch: 2, tensor: 2, expert_tensor: Some(1), sequence_parallel: true, ..Layout::default() });
    assert_eq!(spread, ([4, rows, 32], 16, vec![vec![Axis::Tensor]; 4]));
    let context = compiled(Layout { micro_batch: 2, context: 2, ..Layout::default() });
    assert_eq!((context.0, context.1), ([8, rows / 2, 32], 16));
}
