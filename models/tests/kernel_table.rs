//! The table of kernels against the graphs of the zoo and of the small examples.

use foretell_models::{GraphOptions, Kernel, Model, WeightLayout, differentiate, from_hugging_face};
use foretell_units::DataType;

#[test]
fn operands_of_kernels_have_the_size_and_storage_of_the_graphs_tensors() {
    let document: serde_json::Value = serde_json::from_str(include_str!("hugging_face.json")).expect("it is JSON");
    let cases = document["cases"].as_array().expect("a list").iter().filter(|case| case["parameters"].as_u64() < Some(1_000_000));
    let imported: Vec<(String, Model)> = cases
        .map(|case| {
            let name = case["name"].as_str().expect("a name").to_string();
            (name, from_hugging_face(&case["whole"].to_string(), None).expect("it is sound").model)
        })
        .collect();
    let ours = Model::zoo().chain(Model::examples()).map(|(name, model)| (name.to_owned(), model));
    for (name, model) in ours.chain(imported) {
        let graph = model.graph(&name, &GraphOptions { batch: 2, ..GraphOptions::ONE }).expect("it is sound");
        let graph = differentiate(&graph, 2, |_| false);
        for operator in &graph.operators {
            let kernel = operator.kernel(&operator.extents());
            let spec = kernel.spec();
            let (reads, writes): (Vec<_>, Vec<_>) = (spec.reads().collect(), spec.writes(DataType::Fp32).collect());
            assert_eq!(operator.inputs.len(), reads.len(), "{name}: {kernel:?}");
            assert_eq!(operator.outputs.len(), writes.len(), "{name}: {kernel:?}");
            let operands = operator.inputs.iter().chain(&operator.outputs);
            for (operand, described) in operands.zip(reads.into_iter().chain(writes)) {
                let tensor = graph.tensor(operand.tensor);
                let role = described.role;
                assert_eq!(described.elements, tensor.elements(), "{name}: {role} of {kernel:?} is `{}`", tensor.name);
                assert_eq!(described.storage, tensor.storage, "{name}: {role} of {kernel:?} is `{}`", tensor.name);
            }
        }
    }
}

#[test]
fn an_optimizer_writes_a_master_copy_in_mixed_precision_only() {
    let spec = Kernel::AdamW { elements: 10, controlled: false, exempt: false }.spec();
    let roles = |precision| spec.writes(precision).map(|operand| operand.role).collect::<Vec<_>>();
    assert_eq!(roles(DataType::Fp32), ["parameter", "first moment", "second moment"]);
    assert_eq!(roles(DataType::Bf16), ["parameter", "first moment", "second moment", "master copy"]);
    // It reads the gradient and updates three numbers. In mixed precision it also writes the
    // parameter.
    assert_eq!(spec.traffic().bytes(DataType::Fp32).count(), 10 * (4 + 3 * 8));
    assert_eq!(spec.traffic().bytes(DataType::Bf16).count(), 10 * (4 + 3 * 8 + 2));
}

#[test]
fn a_product_moves_each_operand_once_and_counts_two_operations() {
    let (rows, columns, contracted) = (3, 5, 7);
    let weight = WeightLayout::OutIn;
    let spec = Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: true }.spec();
    assert_eq!(spec.flops().value(), 2.0 * 3.0 * 5.0 * 7.0);
    assert_eq!(spec.fused_flops().value(), 3.0 * 5.0);
    // dy and x in the run's precision, dw and dbias in single precision.
    assert_eq!(spec.traffic().bytes(DataType::Bf16).count(), 2 * (3 * 5 + 3 * 7) + 4 * (5 * 7 + 5));
}
