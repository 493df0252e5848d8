//! Traced PyTorch steps under layouts that shard operators.

use foretell_models::from_torch;
use foretell_program::{Layout, Plan, compile};

/// An embedding and a head would shard the table that they share in different ways.
#[test]
fn a_table_that_is_tied_to_a_head_is_whole_on_each_rank_of_tensor() {
    let trace = include_str!("../../models/tests/torch/transformer.json");
    let model = from_torch(trace, None).expect("it is understood").model;
    for (data, tensor, pipeline, zero) in [(2, 2, 2, 1), (1, 8, 1, 0), (2, 4, 1, 3), (4, 1, 2, 0)] {
        let layout = Layout { data, tensor, pipeline, micro_batch: 2, zero, ..Layout::default() };
        let compiled = compile(&model, "model", &Plan::new(layout, 32));
        assert!(compiled.is_ok(), "{data} {tensor} {pipeline}: {:?}", compiled.err());
    }
}
