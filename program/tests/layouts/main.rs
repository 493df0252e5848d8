//! Expected Programs of particular layouts: Megatron's collectives, ZeRO's shards, recomputation,
//! refusals.

mod chunks;
mod context;
mod dropout;
mod exchanges;
mod experts;
mod modes;
mod recipes;
mod recompute;
mod refusals;
mod servers;
mod state;
mod tensor;

use foretell_models::{DropoutRate, Gpt, Kernel, Llama, Mlp, Model, Resnet, Stem, Vgg, Zigzag};
use foretell_program::{
    Axis, BufferRole, Collective, CollectiveRole, Compiled, ContextMethod, ContextOrder, Instruction, Keep, Kept, Layout,
    LearningRateSchedule, MemoryKind, Mode, Offload, Operation, Optimizer, OuterOptimizer, Overlap, Period, Phase, Plan,
    PlanError, Program, Recompute, Schedule, StageLayout, StageProgram, Training, WarmUp, compile,
};
use foretell_units::{Bytes, DataType};

fn program(model: &Model, layout: Layout, batch: usize) -> Program {
    compile(model, "model", &Plan::new(layout, batch)).expect("a plan that fits").training
}

/// A GPT with these fields, as a model file has them.
fn gpt(fields: &str) -> Model {
    serde_json::from_str(&format!(r#"{{"family": "gpt", {fields}}}"#)).expect("a model")
}

fn count(stage: &StageProgram, kind: &str) -> usize {
    stage.instructions.iter().filter(|instruction| instruction.operation.kind() == kind).count()
}

#[test]
fn two_linear_layers_on_a_two_by_two_mesh_have_three_all_reduces() {
    let model = Model::Mlp(Mlp { widths: vec![8, 16, 4] });
    let layout = Layout { data: 2, tensor: 2, micro_batch: 2, ..Layout::default() };
    let program = program(&model, layout, 4);
    let stage = &program.lists[0];
    // The output of the second layer is partial over `tensor`: one all-reduce. Gradients are
    // partial over `data`: one bucket of sharded parameters, one of whole ones.
    assert_eq!(count(stage, "all_reduce"), 3, "{program}");
    let weight = |name: &str| stage.buffers.iter().find(|buffer| *buffer.name == *name).expect("a weight").shape.to_vec();
    assert_eq!(weight("0.weight"), [8, 8], "columns are sharded");
    assert_eq!(weight("2.weight"), [4, 8], "then rows");
    assert_eq!(weight("2.bias"), [4], "the bias after the sum is whole");
}

#[test]
fn one_tensor_crosses_between_stages_each_way_in_a_micro_batch() {
    for model in
        ["gpt2", "resnet18", "llama3-8b", "bert-base-uncased", "vgg11"].map(|name| Model::named(name).expect("in the zoo"))
    {
        let program = program(&model, Layout { pipeline: 2, ..Layout::default() }, 2);
        // The gradients of a tensor's several readers are summed on the readers' stage before they
        // are sent.
        assert_eq!([0, 1].map(|stage| count(&program.lists[stage], "send")), [2, 2], "{model:?}");
    }
}

#[test]
fn the_same_plan_gives_the_same_program() {
    let model = Model::named("resnet18").expect("in the zoo");
    let layout = Layout { data: 2, tensor: 2, pipeline: 2, micro_batch: 2, ..Layout::default() };
    assert_eq!(program(&model, layout.clone(), 8).to_string(), program(&model, layout, 8).to_string());
}

#[test]
fn hardware_flops_are_never_less_than_model_flops() {
    let model = gpt(r#""layers": 3, "hidden": 32, "heads": 4, "vocab": 64, "sequence": 32"#);
    let odd = gpt(r#""layers": 3, "hidden": 32, "heads": 4, "vocab": 63, "sequence": 32"#);
    let ratio = |model: &Model, tensor, recompute| {
        let program = program(model, Layout { tensor, recompute, ..Layout::default() }, 2);
        program.hardware_flops.value() / program.model_flops.value()
    };
    assert!((ratio(&model, 1, Recompute::None) - 1.0).abs() < 1e-12, "nothing is computed twice");
    assert!((ratio(&model, 2, Recompute::None) - 1.0).abs() < 1e-12, "all products are sharded");
    assert!(ratio(&odd, 2, Recompute::None) > 1.0, "an indivisible vocabulary is whole on every rank");
    assert!(ratio(&model, 1, Recompute::Full) > 1.2, "blocks are recomputed");
}
