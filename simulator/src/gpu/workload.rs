//! Properties of a run that costs depend on, besides the sizes of its kernels.

use super::routing::RoutingSkew;
use foretell_models::{Bert, Model};
use foretell_program::MomentFormat;

/// Properties of a run that costs depend on, besides the sizes of its kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Experts per token. 1 in models without experts.
    pub experts_per_token: usize,
    /// Largest number of nodes over which the experts of one token spread. `None` if there is no
    /// limit.
    pub nodes_per_token: Option<usize>,
    /// Trained parameters.
    pub trained: TrainedParameters,
    /// Scaling of operands in fp8.
    pub fp8_scaling: Fp8Scaling,
    /// True if the loss is computed operator by operator, under a stack that could compile it.
    pub has_eager_loss: bool,
    /// Share of a rank's logits that exist at one time. Less than 1 if the loss is computed in
    /// parts.
    pub logits_at_a_time: f64,
    /// True if narrow parameters have no master copy in single precision, and gradients have the
    /// same narrow format.
    pub has_no_master_copy: bool,
    /// Number format of the optimizer's moments.
    pub moments: MomentFormat,
    /// Ratio of the length of a document to that of a sequence, if sequences are packed: the share
    /// of attention scores that are within documents. 1 if they are not packed.
    pub attended: f64,
    /// True if the Program has adapters: two products, a scaling and an addition for each adapted
    /// layer.
    pub has_adapters: bool,
    /// Tokens of the fullest rank of experts. `None` if routing is balanced.
    pub routing: Option<RoutingSkew>,
    /// True if the stack only stands in for one that has no measured runs.
    pub has_unknown_stack: bool,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            experts_per_token: 1,
            nodes_per_token: None,
            trained: TrainedParameters::All,
            fp8_scaling: Fp8Scaling::Tensor,
            has_eager_loss: false,
            logits_at_a_time: 1.0,
            has_no_master_copy: false,
            moments: MomentFormat::Single,
            attended: 1.0,
            has_adapters: false,
            routing: None,
            has_unknown_stack: false,
        }
    }
}

impl Workload {
    /// Returns the ratio of rows to slots on the fullest rank, with `experts` experts on each rank,
    /// averaged over layers.
    pub fn rows_over_slots(&self, experts: usize) -> f64 {
        self.routing.as_ref().map_or(1.0, |routing| routing.over_slots(experts))
    }

    /// Returns the ratio of rows to slots on the fullest rank in the layer where it is largest,
    /// which determines memory.
    pub fn most_rows_over_slots(&self, experts: usize) -> f64 {
        self.routing.as_ref().map_or(1.0, |routing| routing.most_over_slots(experts))
    }

    /// Returns the ratio of rows to slots on the fullest rank, if `ranks` ranks divide all experts,
    /// averaged over layers.
    pub fn rows_over_slots_of(&self, ranks: usize) -> f64 {
        self.routing.as_ref().map_or(1.0, |routing| routing.over_slots(routing.on_each_of(ranks)))
    }

    /// Returns the bytes that an update with this number of moments (Adam has two) moves, over
    /// those of an update with a master copy and moments in single precision. `is_narrow` says
    /// whether parameters are narrower than single precision.
    pub(super) fn update_share(&self, is_narrow: bool, moments: usize) -> f64 {
        let bytes = |is_pure: bool, moment: f64| {
            // The gradient is only read. The parameter or its master copy, and the moments, are
            // read and written.
            let (gradient, parameter) = if is_pure { (2.0, 4.0) } else { (4.0, 8.0) };
            let rounded = if is_narrow && !is_pure { 2.0 } else { 0.0 };
            gradient + parameter + rounded + 2.0 * moments as f64 * moment
        };
        bytes(self.has_no_master_copy && is_narrow, self.moments.bytes()) / bytes(false, MomentFormat::Single.bytes())
    }
}

/// Returns the model without padding, of whose tokens only `share` are computed. `None` if nothing
/// changes: only BERT is trained without padding, and only with its longest sequences (512 tokens
/// and more).
pub fn without_padding(model: &Model, share: f64) -> Option<Model> {
    let Model::Bert(bert) = model else { return None };
    if share >= 1.0 || bert.sequence < 512 {
        return None;
    }
    // Frameworks pad to a multiple of eight, which tensor cores require.
    let sequence = (8 * (bert.sequence as f64 * share / 8.0).round() as usize).max(8);
    Some(Model::Bert(Bert { sequence, ..bert.clone() }))
}

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedParameters {
    /// All of them.
    #[default]
    All,
    /// Only small adapters beside them (LoRA). The other parameters have no gradients. With ZeRO 3
    /// they are shards, which must still be gathered before each use.
    Adapters {
        /// Whether the other parameters are shards.
        beside_shards: bool,
    },
}

impl TrainedParameters {
    /// Whether only adapters are trained.
    pub fn are_adapters(self) -> bool {
        matches!(self, Self::Adapters { .. })
    }
}

/// How operands in fp8 are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scaling {
    /// One scale for each tensor.
    Tensor,
    /// One scale for each row.
    Row,
}
