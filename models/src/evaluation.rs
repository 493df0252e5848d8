//! What an evaluation measures beside the loss: the labels among the five best classes, and the
//! probabilities that a classifier gives to each class.
//!
//! This pass adds operators to a forward graph. Families do not know of them.

use crate::graph::{BATCH, Dimension, Extent, Graph, Loop, LoopId, Operand, Operator, Pass, Role, Tensor, TensorId};
use crate::kernel::Kernel;
use crate::storage::Storage;

/// Name of the number of labels among the five best classes.
pub const TOP_FIVE: &str = "top5";

/// Name of the logits that [`logits_only`] keeps.
pub const LOGITS: &str = "logits";

/// Name of the probabilities and labels of all samples.
const SCORES: &str = "scores";

/// The most classes whose probabilities are kept. A vocabulary has more.
const MOST_SCORED_CLASSES: usize = 1 << 14;

/// Returns a forward graph that also counts labels among the five best classes, and keeps the
/// probabilities of a classifier.
pub fn with_evaluation(mut graph: Graph) -> Graph {
    for index in 0..graph.operators.len() {
        let operator = graph.operators[index].clone();
        match operator.kind {
            Kernel::CrossEntropy { .. } => {
                count_top_labels(&mut graph, &operator, None);
                let classes = operator.loops.last().expect("invariant: a loss has a loop over classes").extent;
                if operator.loops.len() == 2 && operator.loops[0].name == BATCH && classes <= MOST_SCORED_CLASSES {
                    keep_scores(&mut graph, &operator);
                }
            }
            Kernel::LogitStatistics { .. } => {
                let statistics = operator.outputs[0].tensor;
                count_top_labels(&mut graph, &operator, Some(statistics));
            }
            _ => {}
        }
    }
    graph
}

/// Returns a forward graph that ends with the logits, which it keeps, and has no loss. `None` if
/// the graph has no loss over unsharded classes.
pub fn logits_only(mut graph: Graph) -> Option<Graph> {
    let loss = graph.operators.iter().position(|operator| matches!(operator.kind, Kernel::CrossEntropy { .. }))?;
    let logits = graph.operators[loss].inputs[0].tensor;
    graph.operators.truncate(loss);
    let tensor = &mut graph.tensors[logits.0];
    (tensor.name, tensor.role) = (LOGITS.into(), Role::Kept);
    Some(graph)
}

/// Adds the ranks of labels among the classes of `loss`, and the count of labels among the first
/// five. If ranks shard the classes, `statistics` has the labels' logits.
fn count_top_labels(graph: &mut Graph, loss: &Operator, statistics: Option<TensorId>) {
    let row_count = loss.loops.len() - 1;
    let rows: Vec<Option<LoopId>> = (0..row_count).map(|index| Some(LoopId(index))).collect();
    let dimensions: Vec<Dimension> =
        loss.loops[..row_count].iter().map(|dimension| Dimension { name: dimension.name, extent: dimension.extent }).collect();
    let ranks = add_tensor(graph, "label_ranks", Role::Activation, dimensions);
    let mut inputs = loss.inputs.clone();
    inputs.extend(statistics.map(|tensor| {
        // Every rank reads the statistics of all shards.
        Operand { tensor, axes: [&[None][..], &rows, &[None]].concat() }
    }));
    let output = vec![Operand { tensor: ranks, axes: rows.clone() }];
    let kind = Kernel::LabelRanks { rows: 0, classes: 0, parts: 1 };
    add_operator(graph, loss, (kind, loss.loops.clone()), inputs, output);
    let top = add_tensor(graph, TOP_FIVE, Role::Sum, Vec::new());
    let inputs = vec![Operand { tensor: ranks, axes: rows }, loss.inputs[1].clone()];
    let output = vec![Operand { tensor: top, axes: Vec::new() }];
    add_operator(graph, loss, (Kernel::TopLabels { rows: 0, top: 5 }, loss.loops[..row_count].to_vec()), inputs, output);
}

/// Adds the probabilities of the classes of `loss`, each row followed by its label.
fn keep_scores(graph: &mut Graph, loss: &Operator) {
    let [row, class] = [0, 1].map(|index| &loss.loops[index]);
    let dimensions = vec![Dimension { name: row.name, extent: row.extent }, Dimension { name: SCORES, extent: class.extent + 1 }];
    let scores = add_tensor(graph, SCORES, Role::Kept, dimensions);
    let inputs = [&loss.inputs[..], &loss.outputs[2..3]].concat();
    let output = vec![Operand { tensor: scores, axes: vec![Some(LoopId(0)), None] }];
    let loops = vec![*row, Loop { shardable: false, role: Extent::Features, ..*class }];
    add_operator(graph, loss, (Kernel::ClassScores { rows: 0, classes: 0 }, loops), inputs, output);
}

fn add_tensor(graph: &mut Graph, name: &str, role: Role, dimensions: Vec<Dimension>) -> TensorId {
    graph.tensors.push(Tensor { name: name.into(), role, dimensions, storage: Storage::Single });
    TensorId(graph.tensors.len() - 1)
}

/// Adds an operator in the block of the loss.
fn add_operator(
    graph: &mut Graph,
    loss: &Operator,
    (kind, loops): (Kernel, Vec<Loop>),
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
) {
    let (name, block) = (loss.name.clone(), loss.block);
    graph.operators.push(Operator { name, kind, loops, inputs, outputs, block, pass: Pass::Forward, forward: None });
}
