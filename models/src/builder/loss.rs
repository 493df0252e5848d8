//! The loss, for classes on one rank and for classes that ranks shard.

use super::{GraphBuilder, VOCABULARY, dimension, operand, shardable, walk};
use crate::graph::{Extent, Loop, LoopId, TensorId};
use crate::kernel::Kernel;
use crate::storage::Storage;

impl GraphBuilder {
    /// Adds [`GraphBuilder::cross_entropy`] for classes that ranks shard. Each rank computes
    /// statistics of its shard, and the loss follows from those of all shards.
    fn cross_entropy_in_parts(&mut self, name: &str, logits: TensorId, labels: TensorId) {
        let dimensions = self.dimensions(logits);
        let row_count = dimensions.len() - 1;
        let rows: Vec<Loop> = dimensions[..row_count].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        let parts = dimension("parts", self.vocabulary_parts);
        let row_axes = walk(0, row_count);
        let last = Some(LoopId(row_count));
        // One entry for each part, so that a mesh axis that cuts the classes also cuts the parts.
        let statistic_dimensions = [&[parts][..], &dimensions[..row_count], &[dimension("statistics", 4)]].concat();
        let statistics = self.activation(&format!("{name}.statistics"), statistic_dimensions, Storage::Single);
        self.operator(
            name,
            Kernel::LogitStatistics { rows: 0, classes: 0, parts: 1 },
            [&rows[..], &[shardable(&dimensions[row_count], Extent::Features)]].concat(),
            vec![operand(logits, walk(0, dimensions.len())), operand(labels, row_axes.clone())],
            vec![operand(statistics, [&[last][..], &row_axes, &[None]].concat())],
        );
        let loss = self.sum("loss");
        let correct = self.sum("correct");
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), dimensions[..row_count].to_vec(), Storage::Single);
        self.operator(
            name,
            Kernel::CrossEntropyOfStatistics { rows: 0, parts: 1 },
            [&rows[..], &[Loop { shardable: false, ..shardable(&parts, Extent::Positions) }]].concat(),
            vec![operand(statistics, [&[None][..], &row_axes, &[None]].concat()), operand(labels, row_axes.clone())],
            vec![operand(loss, Vec::new()), operand(correct, Vec::new()), operand(log_sum_exp, row_axes)],
        );
    }

    /// Adds the cross-entropy of `logits` (classes last), summed over predictions, and the number
    /// of correct predictions.
    pub(crate) fn cross_entropy(&mut self, name: &str, logits: TensorId, labels: TensorId) {
        let dimensions = self.dimensions(logits);
        let row_count = dimensions.len() - 1;
        if dimensions[row_count].name == VOCABULARY && self.shards_vocabulary(dimensions[row_count].extent) {
            self.cross_entropy_in_parts(name, logits, labels);
            return;
        }
        let mut loops: Vec<Loop> = dimensions[..row_count].iter().map(|dimension| shardable(dimension, Extent::Rows)).collect();
        loops.push(Loop { shardable: false, ..shardable(&dimensions[row_count], Extent::Features) });
        let rows = walk(0, row_count);
        let loss = self.sum("loss");
        let correct = self.sum("correct");
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), dimensions[..row_count].to_vec(), Storage::Single);
        self.operator(
            name,
            Kernel::CrossEntropy { rows: 0, classes: 0 },
            loops,
            vec![operand(logits, walk(0, dimensions.len())), operand(labels, rows.clone())],
            vec![operand(loss, Vec::new()), operand(correct, Vec::new()), operand(log_sum_exp, rows)],
        );
    }
}
