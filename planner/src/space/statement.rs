//! A statement of the space: each dimension with its values, and what is left out by judgement.
//!
//! A value is left out *by judgement* if no proof says that every layout with it is worse than one
//! of the space. The bound of a search does not cover such layouts.

use super::divisors::divisors;
use super::meshes::{FEWEST_POSITIONS, MOST_NODES_OF_TENSOR};
use super::schedules::MOST_CHUNKS;
use super::{Space, families};
use foretell_program::{CollectiveAlgorithm, Schedule};
use serde::Serialize;

/// Rank orders of the five axes.
const RANK_ORDERS: usize = 120;

/// A dimension of the space.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Dimension {
    /// The layout field, as `--fix` names it.
    pub name: String,
    /// The values that are searched, for people.
    pub values: String,
    /// How many values are left out by judgement. 0 also where the user has fixed the field.
    pub left_out: usize,
    /// Why they are left out; empty if none are.
    pub reason: String,
}

impl Space<'_> {
    /// States every dimension of the space.
    pub(crate) fn statement(&self) -> Vec<Dimension> {
        let fixed = self.fixed;
        let sizes = |sizes: &[usize]| sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        let all = divisors(self.devices.count);
        let tensor: Vec<usize> = all.iter().copied().filter(|&size| self.allows_tensor_size(size)).collect();
        let pipeline: Vec<usize> = all.iter().copied().filter(|&size| size <= self.model.blocks).collect();
        let possible_context = match self.model.sequence {
            Some(sequence) => all.iter().filter(|&&size| size == 1 || sequence.is_multiple_of(2 * size)).count(),
            None => 1,
        };
        let context = self.context_sizes();
        let batches = divisors(self.global_batch);
        let most = families::MOST_MICRO_BATCHES;
        let short = batches.iter().filter(|&&size| self.global_batch / size > most).count();
        let dimension = |name: &str, values: String, left_out: usize, reason: &str, is_fixed: bool| Dimension {
            name: name.into(),
            values: if is_fixed { "fixed".into() } else { values },
            left_out: if is_fixed { 0 } else { left_out },
            reason: if is_fixed || left_out == 0 { String::new() } else { reason.into() },
        };
        let buckets: Vec<String> = self.bucket_sizes.iter().map(ToString::to_string).collect();
        vec![
            dimension(
                "tensor",
                sizes(&tensor),
                all.len() - tensor.len(),
                &format!("they span more than {MOST_NODES_OF_TENSOR} nodes, or neither fill nor divide nodes"),
                fixed.tensor.is_some(),
            ),
            dimension(
                "pipeline",
                format!("{}, and fewer stages where devices stay idle", sizes(&pipeline)),
                0,
                "",
                fixed.pipeline.is_some(),
            ),
            dimension("data", "the rest of the devices".into(), 0, "", fixed.data.is_some()),
            dimension(
                "context",
                sizes(&context),
                possible_context.saturating_sub(context.len()),
                &format!("fewer than {FEWEST_POSITIONS} positions would be on a rank"),
                fixed.context.is_some(),
            ),
            dimension("expert", sizes(&self.expert_sizes()), 0, "", fixed.expert.is_some()),
            dimension(
                "micro_batch",
                format!(
                    "divisors of a rank's samples, up to {most} micro-batches or {} a stage",
                    families::MICRO_BATCHES_PER_STAGE
                ),
                short,
                "smaller ones use the devices worse, and a longer pipeline has them",
                fixed.micro_batch.is_some(),
            ),
            dimension(
                "schedule",
                Schedule::ALL.map(|schedule| schedule.name()).join(", "),
                usize::from(self.model.blocks > 2),
                "all micro-batches at once, with more than four for each stage, only takes memory",
                fixed.schedule.is_some(),
            ),
            dimension(
                "virtual_stages",
                format!("2 to 4, and up to {MOST_CHUNKS} that divide the blocks"),
                self.model.blocks.saturating_sub(MOST_CHUNKS),
                "messages between more chunks cost more than the smaller bubble saves",
                fixed.virtual_stages.is_some(),
            ),
            dimension(
                "zero",
                "0 to 3; 0 and 1 with a pipeline".into(),
                2,
                "2 and 3 would reduce and gather in each pass of a pipeline",
                fixed.zero.is_some(),
            ),
            dimension(
                "recompute",
                "none, selective, full; eighths of the blocks where it does not fit without".into(),
                1,
                "policies by operator are left to the plan file",
                fixed.recompute.is_some(),
            ),
            dimension(
                "bucket",
                format!("{} without a pipeline, else the usual one", buckets.join(", ")),
                5,
                "other sizes are tried around the answer only",
                fixed.bucket.is_some(),
            ),
            dimension(
                "cuts",
                "even by work; by speed on several kinds of devices".into(),
                usize::from(self.model.blocks > 1),
                "other cuts are tried block by block around the answer only",
                fixed.cuts.is_some(),
            ),
            dimension(
                "placement",
                "the usual rank order, and the pipeline inside nodes".into(),
                RANK_ORDERS - 2,
                "others are tried around the answer only, where they may help",
                fixed.rank_order.is_some(),
            ),
            dimension(
                "shard_group",
                "all of data, and a node".into(),
                2,
                "others are tried around the answer only",
                fixed.shard_group.is_some(),
            ),
            dimension(
                "collective",
                "the faster algorithm for each size".into(),
                CollectiveAlgorithm::ALL.len() - 1,
                "one algorithm for all sizes is tried around the answer only",
                fixed.collective.is_some(),
            ),
        ]
    }
}
