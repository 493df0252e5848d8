//! Refusals, before any search, of fixed sizes that do not divide the model.

use super::context::Bounds;
use crate::error::PlannerError;
use foretell_program::{Layout, Plan};

/// The sizes that are tried for the list of those that divide the model.
const TRIED: [usize; 20] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 32, 64];

/// An axis whose size the user may fix, and which must divide a size of the model.
struct FixedAxis {
    name: &'static str,
    size: Option<usize>,
    /// Whether it shards the heads of attention.
    shards_heads: bool,
    set: fn(&mut Layout, usize),
}

impl Bounds<'_> {
    /// Returns an error if a fixed `tensor`, `context` or `expert` alone makes every layout of the
    /// model impossible. The error names the sizes that divide the model.
    pub(crate) fn refusal_of_fixed_sizes(&self) -> Option<PlannerError> {
        let fixed = &self.request.fixed;
        let axes = [
            FixedAxis { name: "tensor", size: fixed.tensor, shards_heads: true, set: |layout, size| layout.tensor = size },
            FixedAxis { name: "context", size: fixed.context, shards_heads: false, set: |layout, size| layout.context = size },
            FixedAxis { name: "expert", size: fixed.expert, shards_heads: false, set: |layout, size| layout.expert = size },
        ];
        let sizes = axes.iter().filter_map(|axis| axis.size).chain(fixed.data).chain(fixed.pipeline);
        if sizes.fold(1, usize::saturating_mul) > self.request.devices {
            // The search reports the plainer reason: too many ranks.
            return None;
        }
        axes.iter().find_map(|axis| self.refusal_of_axis(axis))
    }

    fn refusal_of_axis(&self, axis: &FixedAxis) -> Option<PlannerError> {
        let request = self.request;
        let size = axis.size.filter(|&size| size > 1 && size <= request.devices)?;
        let message = self.message_about(axis, size)?;
        let possible = TRIED.into_iter().filter(|&size| size <= request.devices && self.message_about(axis, size).is_none());
        let possible: Vec<String> = possible.map(|size| size.to_string()).collect();
        // If no size is possible, the axis is not at fault.
        if possible.is_empty() {
            return None;
        }
        let name = axis.name;
        // The compiler's hint mentions neither `--fix` nor the possible sizes.
        let reason = format!("{message}; `{name}` may be {}", possible.join(", "));
        Some(PlannerError::no_layout(request, reason, &format!("`--fix` another `{name}`, or leave it open")))
    }

    /// Returns the compiler's message about a layout whose only axis of several ranks has this
    /// size, or `None` if it can be laid out.
    fn message_about(&self, axis: &FixedAxis, size: usize) -> Option<String> {
        // The compiler replicates attention whose heads it cannot shard. No framework does so, and
        // it wastes all ranks but one on attention.
        let heads = self.space.model.heads.filter(|_| axis.shards_heads);
        if let Some(heads) = heads.filter(|heads| !heads.is_multiple_of(size)) {
            return Some(format!("{heads} heads of attention are not divisible by {} ({size})", axis.name));
        }
        let mut layout = Layout { micro_batch: 1, ..Layout::default() };
        (axis.set)(&mut layout, size);
        if self.truncated.represent(&layout) {
            return self
                .truncated
                .on_kind(&layout, 1, self.kinds.kind_of(0).filter(|_| self.kinds.are_mixed()))
                .err()
                .map(|mistake| mistake.message);
        }
        let plan = Plan { global_batch: layout.samples_at_once(), layout, ..self.request.base.clone() };
        self.compiler.unplaced(&plan).err().map(|error| error.to_string())
    }
}
