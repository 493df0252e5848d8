//! The nearest plan that a framework expresses. This file replaces what no framework has; each
//! framework's own file replaces the rest.

use super::FrameworkError;
use foretell_program::{
    CollectiveAlgorithm, ContextMethod, ContextOrder, Layout, Optimizer, Overlap, Plan, PlannedWorkload, Recompute, Schedule,
    Stack, Training,
};
use foretell_units::{Bytes, DataType};

/// A plan while it is fitted to a framework.
pub(super) struct Nearest {
    pub(super) framework: &'static str,
    pub(super) plan: Plan,
    pub(super) differences: Vec<String>,
}

impl Nearest {
    /// Starts from a plan, and removes what few frameworks express. Refuses preferences and
    /// adapters, and replaces Muon by AdamW: exporters whose framework trains with them remove them
    /// from the plan first.
    pub(super) fn new(plan: &Plan, framework: &'static str, stack: &str) -> Result<Self, FrameworkError> {
        let layout = plan.layout.clone().normalised();
        if layout.stages.is_some() {
            return Err(FrameworkError::Layout {
                framework,
                reason: "all of its stages have the same mesh".into(),
                hint: "fix `data`, `tensor` and `context` with `foretell plan --fix`, and export that plan".into(),
            });
        }
        if let Some(preference) = plan.workload.preference {
            return Err(FrameworkError::Method {
                framework,
                method: preference.name(),
                reason: "its files start training on texts, which is another job",
                hint: "export it `--to trl`, `axolotl` or `llama-factory`, whose files state Accelerate's and DeepSpeed's settings too",
            });
        }
        if plan.training.lora.is_some() || plan.workload.base_bits.is_some() {
            return Err(FrameworkError::Method {
                framework,
                method: if plan.workload.base_bits.is_some() { "qlora" } else { "lora" },
                reason: "its files train all weights, which is another job",
                hint: "export it `--to trl`, `axolotl`, `llama-factory`, `torchtune` or `accelerate`",
            });
        }
        // The overlap and the buckets are those of the stack.
        let weaves = plan.woven_pairs() > 0;
        let plan = Plan { layout, stack: Stack::new(stack), overlap: Overlap::default(), ..plan.clone() };
        let mut nearest = Self { framework, plan, differences: Vec::new() };
        if weaves {
            nearest.differences.push("passes run one after the other, and `overlap: {passes: true}` is left out".into());
        }
        nearest.uniform();
        nearest.plain_training();
        // Adam without weight decay and AdamW without it are the same.
        if nearest.plan.training.weight_decay == 0.0 && nearest.plan.optimizer == Optimizer::AdamW {
            nearest.plan.optimizer = Optimizer::Adam;
        }
        Ok(nearest)
    }

    /// Removes differences between ranks, stages or operators.
    fn uniform(&mut self) {
        let usual = Layout::default();
        let layout = &mut self.plan.layout;
        if layout.shares.take().is_some() {
            self.differences.push("every rank of `data` gets `micro_batch` samples, and `shares` is left out".into());
        }
        if layout.stage_places.take().is_some() {
            self.differences.push("stages lie in order, and `stage_places` is left out".into());
        }
        if layout.placement.take().is_some() {
            self.differences.push("ranks are in the framework's order, and `placement` is left out".into());
        }
        if !layout.operators.is_empty() {
            layout.operators = usual.operators;
            self.differences.push("`tensor` shards operators by the rule, and `operators` is left out".into());
        }
        if layout.collective != CollectiveAlgorithm::Automatic {
            layout.collective = CollectiveAlgorithm::Automatic;
            self.differences.push("NCCL chooses the algorithm of all-reduces".into());
        }
        let cuts_sequences = self.plan.layout.context > 1;
        if std::mem::take(&mut self.plan.layout.context_order) == ContextOrder::Contiguous && cuts_sequences {
            self.differences.push("ranks of `context` have chunks from both ends of a causal sequence".into());
        }
        for (name, chunk) in [("loss_chunk", &mut self.plan.layout.loss_chunk), ("mlp_chunk", &mut self.plan.layout.mlp_chunk)] {
            if chunk.take().is_some() {
                self.differences.push(format!("`{name}` is left out: tensors are whole, which needs more memory"));
            }
        }
        if self.plan.batch_norm_group.take().is_some() {
            self.differences.push("samples of a rank's micro-batch share batch statistics".into());
        }
    }

    /// Keeps the training's hyperparameters of the optimizer, and leaves everything else to the
    /// framework.
    fn plain_training(&mut self) {
        let optimizer = self.plan.optimizer;
        if optimizer.is_by_parameter() {
            self.plan.optimizer = Optimizer::AdamW;
            self.differences.push(format!("the optimizer is adamw, and not {}", optimizer.name()));
        }
        let training = &self.plan.training;
        let plain = Training {
            learning_rate: training.learning_rate,
            momentum: training.momentum,
            nesterov: training.nesterov,
            weight_decay: training.weight_decay,
            beta1: training.beta1,
            beta2: training.beta2,
            epsilon: training.epsilon,
            clip_norm: training.clip_norm,
            loss_scale: training.loss_scale,
            ..Training::default()
        };
        let without_optimizer = Training { optimizer: None, ..training.clone() };
        if without_optimizer != plain {
            self.differences.push("`training` keeps its optimizer's numbers only; the framework has its own recipe".into());
        }
        self.plan.training = plain;
        self.replace(|plan| &mut plan.workload, PlannedWorkload::default(), "`workload` is left out");
    }

    /// Sets a learning rate for fine-tuning if the plan has none (`stated`): a plan's default is
    /// meant for training from random weights. The rates are those of TRL's and torchtune's
    /// examples.
    pub(super) fn state_fine_tuning_rate(&mut self, stated: Option<f32>) {
        let has_adapters = self.plan.training.lora.is_some();
        let (rate, of) = match (self.plan.workload.preference.is_some(), has_adapters) {
            _ if stated.is_some() => return,
            (false, false) => (2e-5, "all parameters of a trained model"),
            (false, true) => (2e-4, "adapters"),
            (true, false) => (1e-6, "all parameters on preferences"),
            (true, true) => (1e-5, "adapters on preferences"),
        };
        self.plan.training.learning_rate = Some(rate);
        self.differences.push(format!("the learning rate, which the plan leaves open, is {rate:e}, as usual for {of}"));
    }

    /// Replaces a value that the framework lacks, and records the difference.
    pub(super) fn replace<T: PartialEq>(&mut self, field: fn(&mut Plan) -> &mut T, value: T, difference: impl Into<String>) {
        let place = field(&mut self.plan);
        if *place != value {
            *place = value;
            self.differences.push(difference.into());
        }
    }

    /// As [`Self::only_data_parallel`], but allows an axis `context` whose ranks exchange parts of
    /// the sequence for heads.
    pub(super) fn only_data_and_heads(&mut self) -> Result<(), FrameworkError> {
        let context = self.plan.layout.context;
        if context == 1 || self.plan.layout.context_method != ContextMethod::AllToAll {
            return self.only_data_parallel();
        }
        self.plan.layout.context = 1;
        self.only_data_parallel()?;
        (self.plan.layout.context, self.plan.layout.context_method) = (context, ContextMethod::AllToAll);
        Ok(())
    }

    /// Refuses all axes except `data`, and removes settings of the other axes.
    pub(super) fn only_data_parallel(&mut self) -> Result<(), FrameworkError> {
        let Layout { tensor, pipeline, context, expert, .. } = self.plan.layout;
        for (size, axis) in [(tensor, "tensor"), (pipeline, "pipeline"), (context, "context"), (expert, "expert")] {
            self.without_axis(size, axis)?;
        }
        let layout = &mut self.plan.layout;
        (layout.expert_tensor, layout.cuts, layout.context_method) = (None, None, ContextMethod::Gather);
        (layout.schedule, layout.virtual_stages) = (Schedule::OneForwardOneBackward, 1);
        self.replace(|plan| &mut plan.layout.sequence_parallel, false, "without `tensor` there is no sequence parallelism");
        Ok(())
    }

    /// Refuses a plan that uses an axis that the framework lacks.
    pub(super) fn without_axis(&self, size: usize, axis: &str) -> Result<(), FrameworkError> {
        if size == 1 {
            return Ok(());
        }
        Err(FrameworkError::Layout {
            framework: self.framework,
            reason: format!("it does not shard over `{axis}`"),
            hint: format!("`foretell plan --fix {axis}=1` finds the best layout without it"),
        })
    }

    /// Makes the schedule 1F1B, or interleaved with several chunks.
    pub(super) fn plain_schedule(&mut self) {
        let layout = &self.plan.layout;
        let allowed = [Schedule::OneForwardOneBackward, Schedule::Interleaved];
        if allowed.contains(&layout.schedule) {
            return;
        }
        let was = layout.schedule;
        if layout.pipeline > 1 {
            self.differences.push(format!("the schedule is 1f1b with one chunk on each stage, and not {was}"));
        }
        let layout = &mut self.plan.layout;
        layout.schedule = Schedule::OneForwardOneBackward;
        if layout.virtual_stages > 1 {
            layout.virtual_stages = 1;
            // Chunks of another schedule are on other stages.
            layout.cuts = None;
        }
    }

    /// Sets the bucket to the default, which reads back as no choice of the plan's.
    pub(super) fn usual_bucket(&mut self) {
        self.replace(|plan| &mut plan.layout.bucket, Bytes::new(25 << 20), "the framework chooses the size of `bucket`");
    }

    /// Rounds the bucket to elements, the unit in which frameworks state it.
    pub(super) fn whole_bucket(&mut self) {
        let whole = bucket_of(bucket_elements(&self.plan.layout));
        self.replace(|plan| &mut plan.layout.bucket, whole, "`bucket` is a whole number of elements");
    }

    /// Replaces recomputation that `allowed` does not have by full recomputation.
    pub(super) fn coarse_recompute(&mut self, allowed: &[Recompute]) {
        if allowed.contains(&self.plan.layout.recompute) {
            return;
        }
        self.plan.layout.recompute = Recompute::Full;
        self.differences.push("every block is recomputed: `recompute: full`".into());
    }
}

/// Bytes of an element of a bucket. A Program's gradients are in single precision, whatever the
/// framework reduces; with this size a bucket has as many elements in both.
const ELEMENT: u64 = 4;

/// The elements of a bucket of gradients.
pub(super) fn bucket_elements(layout: &Layout) -> u64 {
    layout.bucket.count() / ELEMENT
}

/// The bucket of a number of elements, but at least of one.
pub(super) fn bucket_of(elements: u64) -> Bytes {
    Bytes::new(elements.saturating_mul(ELEMENT).max(ELEMENT))
}

/// Sets the learning rate, and resets hyperparameters that the optimizer does not use.
pub(super) fn usual_training(plan: &mut Plan) {
    let usual = Training::default();
    plan.training.learning_rate = Some(plan.learning_rate());
    match plan.optimizer {
        Optimizer::Sgd => {
            let training = &mut plan.training;
            (training.beta1, training.beta2, training.epsilon) = (usual.beta1, usual.beta2, usual.epsilon);
        }
        Optimizer::Muon => plan.training.nesterov = usual.nesterov,
        Optimizer::Adam | Optimizer::AdamW | Optimizer::Lamb => {
            (plan.training.momentum, plan.training.nesterov) = (usual.momentum, usual.nesterov);
        }
    }
    if plan.precision != DataType::Fp16 {
        plan.training.loss_scale = usual.loss_scale;
    }
}
