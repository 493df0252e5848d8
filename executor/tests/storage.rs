//! The compiler and the backend agree on the size and data type of every kernel's operands, in
//! every precision.

use foretell_executor::backend::{operand_bytes, operand_types};
use foretell_models::{DropoutRate, Gpt, Kernel, Mlp, Model, Resnet, Stem};
use foretell_program::{Layout, Operation, Optimizer, Plan, compile};
use foretell_units::DataType;

fn models() -> Vec<Model> {
    vec![
        Model::Mlp(Mlp { widths: vec![64, 32, 10] }),
        Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 16, channels: 1, classes: 10, width: 4 }),
        Model::Gpt(Gpt {
            layers: 2,
            hidden: 16,
            heads: 4,
            ffn: None,
            vocab: 128,
            sequence: 12,
            tied_embeddings: true,
            dropout: DropoutRate::TENTH,
            attention_dropout: DropoutRate::NONE,
        }),
    ]
}

#[test]
fn every_instructions_buffers_match_its_kernels_operands() {
    for precision in [DataType::Fp32, DataType::Bf16, DataType::Fp16] {
        for optimizer in [Optimizer::Sgd, Optimizer::AdamW] {
            for (data, tensor, pipeline) in [(1, 1, 1), (2, 2, 1), (1, 2, 2)] {
                for model in models() {
                    let layout = Layout { data, tensor, pipeline, micro_batch: 2, ..Layout::default() };
                    let plan = Plan { precision, optimizer, ..Plan::new(layout, 8) };
                    let compiled = compile(&model, "model", &plan).expect("the plan compiles");
                    let stages = compiled.training.lists.iter().chain(&compiled.evaluation.lists);
                    for (stage, instruction) in
                        stages.flat_map(|stage| stage.instructions.iter().map(move |instruction| (stage, instruction)))
                    {
                        let Operation::Compute { kernel, .. } = &*instruction.operation else { continue };
                        if matches!(kernel, Kernel::Slice { .. } | Kernel::Interleave { .. } | Kernel::Deinterleave { .. }) {
                            continue;
                        }
                        let (bytes, types) = (operand_bytes(kernel, precision), operand_types(kernel, precision));
                        let sides =
                            [(&instruction.reads, bytes.reads, types.reads), (&instruction.writes, bytes.writes, types.writes)];
                        for (listed, bytes, types) in sides {
                            // The last write of some kernels is optional.
                            assert!(listed.len() <= bytes.len() && listed.len() + 1 >= bytes.len(), "{kernel:?} in {precision}");
                            for ((id, bytes), data_type) in listed.iter().zip(bytes).zip(types) {
                                let buffer = stage.buffer(*id);
                                let (name, stored) = (&buffer.name, (buffer.bytes, buffer.data_type));
                                assert_eq!(stored, (bytes, data_type), "`{name}` of {kernel:?} in {precision}");
                            }
                        }
                    }
                }
            }
        }
    }
}
