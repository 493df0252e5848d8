//! The layouts of a family: what ranks of `data` share, how ranks lie on the devices, and how gradients are bundled.

use crate::space::{Family, Space};
use foretell_program::{Axis, Layout, cuts_by_speed};
use foretell_units::Bytes;

/// Buckets that are considered beside the plan's own (25 MiB unless it says otherwise, PyTorch DDP's default): fuller ones spend less on latency where many
/// ranks reduce, and leave more to be reduced after the last pass. Megatron's have 40 million elements at least.
const FULLER_BUCKETS: [Bytes; 1] = [Bytes::new(160 << 20)];

/// Sizes of buckets that a search considers: the user's alone; or the plan's own and, where the plan's stack leaves them open, fuller ones.
pub(crate) fn bucket_sizes(own: Bytes, are_open: bool, fixed: Option<Bytes>) -> Vec<Bytes> {
    if let Some(fixed) = fixed {
        return vec![fixed];
    }
    let fuller = FULLER_BUCKETS.into_iter().filter(|&bucket| are_open && bucket > own);
    [own].into_iter().chain(fuller).collect()
}

/// Whether fuller buckets are considered: where several ranks reduce gradients together. With a pipeline reductions go on beside other micro-batches, and
/// what they would save is next to nothing: 0.08 % of a step of Turing-NLG's, 0.01 % of GPT-3's (docs/performance.md).
fn matters(layout: &Layout) -> bool {
    layout.pipeline == 1 && (layout.data > 1 || layout.expert > 1 || layout.context > 1)
}

impl Space<'_> {
    /// The layouts of a family.
    pub fn members(&self, family: &Family) -> Vec<Layout> {
        let mut members = Vec::new();
        let data = family.layout.data;
        // With a pipeline ZeRO's later stages gather and reduce for each micro-batch anew: DeepSpeed refuses them, and we leave them to `fixed`.
        let usual: &[usize] = match (data, family.layout.pipeline) {
            (1, _) => &[0],
            (_, 1) if family.layout.shares.is_some() => &[0, 1],
            (_, 1) => &[0, 1, 2, 3],
            _ => &[0, 1],
        };
        let stages = self.fixed.zero.as_ref().map_or(usual, std::slice::from_ref);
        for &zero in stages {
            for shard_group in self.shard_groups(&family.layout, zero) {
                for placement in self.placements(&family.layout) {
                    for &bucket in self.different_buckets(&family.layout) {
                        let member = Layout { zero, shard_group, placement: placement.clone(), bucket, ..family.layout.clone() };
                        let cuts = self.cuts_by_speed(&member);
                        members.extend(cuts.map(|cuts| Layout { cuts: Some(cuts), ..member.clone() }));
                        members.push(member);
                    }
                }
            }
        }
        members
    }

    /// How many layouts there are beside so many members of a family whose Programs are those of some of these.
    pub fn alike(&self, family: &Family, members: usize) -> usize {
        let different = self.different_buckets(&family.layout).len();
        let all = if matters(&family.layout) { self.buckets.len() } else { different };
        members / different * (all - different)
    }

    /// Sizes of buckets by which Programs differ: all that are larger than one into which all gradients go are like it.
    fn different_buckets(&self, layout: &Layout) -> &[Bytes] {
        let enough = self.buckets.iter().position(|&bucket| bucket >= self.gradients).map_or(self.buckets.len(), |last| last + 1);
        &self.buckets[..if matters(layout) { enough } else { 1 }]
    }

    /// Cuts such that the stage that takes longest takes as little as can be, where stages lie on devices of several speeds.
    fn cuts_by_speed(&self, layout: &Layout) -> Option<Vec<usize>> {
        let stages = layout.pipeline;
        let ranks = layout.data * layout.tensor * layout.context * layout.expert;
        let is_plain =
            layout.virtual_stages == 1 && layout.placement.is_none() && layout.cuts.is_none() && layout.stages.is_none();
        if !is_plain || stages < 2 || self.speeds.len() < ranks * stages {
            return None;
        }
        let of_stage =
            |stage: usize| self.speeds[stage * ranks..(stage + 1) * ranks].iter().copied().fold(f64::INFINITY, f64::min);
        let speeds: Vec<f64> = (0..stages).map(of_stage).collect();
        let is_mixed = speeds.iter().any(|&speed| speed != speeds[0]);
        is_mixed.then(|| cuts_by_speed(&self.work, &speeds))
    }

    /// Shard groups: all of `data`, or, where parameters are gathered again and again, the ranks of it that are in one node (HSDP).
    fn shard_groups(&self, layout: &Layout, zero: usize) -> Vec<Option<usize>> {
        if zero == 0 {
            return vec![None];
        }
        if let Some(fixed) = self.fixed.shard_group.or(self.base.shard_group) {
            return vec![Some(fixed)];
        }
        if zero < 3 {
            return vec![None];
        }
        let in_node = self.node / (layout.tensor * layout.context * layout.expert).max(1);
        let is_part = in_node > 1 && in_node < layout.data && layout.data.is_multiple_of(in_node);
        [None].into_iter().chain(is_part.then_some(Some(in_node))).collect()
    }

    /// Orders of the axes over the devices: the usual one; and where a stage's `tensor` leaves room in a node, its pipeline there in place of `data`.
    fn placements(&self, layout: &Layout) -> Vec<Option<Vec<Axis>>> {
        if let Some(fixed) = &self.base.placement {
            return vec![Some(fixed.clone())];
        }
        let inner = layout.tensor * layout.context * layout.expert;
        let is_worth_it = layout.pipeline >= 4 && layout.data > 1 && inner < self.node;
        let inside = vec![Axis::Tensor, Axis::Context, Axis::Expert, Axis::Pipeline];
        [None].into_iter().chain(is_worth_it.then_some(Some(inside))).collect()
    }
}
