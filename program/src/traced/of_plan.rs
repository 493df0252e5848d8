//! Which table a plan's step under a traced framework has, and what shards it.
//!
//! A plan that has none says why ([`Untraced`]): another model, number format or layout than what
//! was traced. Where a near table stands in, the job says what it assumes.

mod table_key;

use super::{Fsdp2Groups, Sharding, TracedJob, TracedOptimizer};
use crate::plan::{MomentFormat, Offload, Optimizer, Plan, PlanError, Preference};
use foretell_models::Model;
use foretell_models::operator_tables::{Element, OperatorTable, TableError, TableSizes, layers_of_table_layer};
use foretell_units::DataType;
use miette::Diagnostic;
use std::collections::BTreeMap;
use std::sync::Arc;
use table_key::{Adapters, TableKey};
use thiserror::Error;

/// The loss, in tables' keys, of a step on preferences that has the reference's own pass: TRL 1.x's
/// `DPOTrainer`.
const WITH_REFERENCE: &str = "dpo";
/// The same of a step whose reference was computed before.
const WITHOUT_REFERENCE: &str = "dpo-precomputed";

/// What a plan is told whose parameters Accelerate shards.
const BY_FSDP2: &str = "parameters are sharded by FSDP2, the Trainer's default since transformers 5 (Accelerate 1.15's groups, no \
                        autocast); the stacks `hf-trainer-fsdp1` and `trl-fsdp1` have the first FSDP";

/// Liger's head reads its weight outside of its module. Below peft the head is a group of its own,
/// which nothing gathers then: without adapters the last norm is in the group, and gathers it.
const LIGER_BELOW_PEFT: &str = "a run with these versions stops in its first step: under FSDP2 below peft, Liger 0.8's head reads a \
                                weight that Accelerate 1.15 leaves sharded; predicted as if it were gathered";

/// The bias of BERT's head is in the head and beside it, so in two groups of Accelerate's.
const BIAS_IN_TWO_GROUPS: &str = "a run with these versions stops in its first step: PyTorch 2.15 refuses the bias of BERT's head, which \
                                  Accelerate 1.15 has in two groups of FSDP2; predicted as if it were in one";

/// Whose Muon it is: neither the Trainer of transformers 5 nor TRL 1 has one by name.
const MUON_OF_PYTORCH: &str = "Muon is `torch.optim.Muon` for the layers' matrices and PyTorch's fused AdamW for the rest, passed by a \
                               script: neither transformers 5 nor TRL 1 has an `optim` of that name";

/// What keeps a plan's step from being known operator by operator.
#[derive(Clone, Debug, PartialEq, Eq, Error, Diagnostic)]
#[error("{reason}")]
#[diagnostic(code(plan::untraced))]
pub struct Untraced {
    /// What was not traced, such as `` `precision: fp8` ``.
    pub reason: String,
}

impl Untraced {
    fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }
}

impl From<TableError> for Untraced {
    fn from(error: TableError) -> Self {
        Self::new(error.to_string())
    }
}

impl From<PlanError> for Untraced {
    fn from(error: PlanError) -> Self {
        Self::new(error.to_string())
    }
}

/// A plan's step under a traced framework.
#[derive(Clone, Debug)]
pub struct TracedPlan {
    /// The step of one of its ranks.
    pub job: TracedJob,
    /// Where another table stands in for what the plan says, one sentence each.
    pub assumptions: Vec<String>,
}

impl TracedPlan {
    /// The step of a plan under a framework. `tables` has what the keys of its tables say beside
    /// the plan: `framework` (`hf` for Hugging Face's models), its `version`, and whatever is known
    /// better than the plan tells. `wrapper: deepspeed` is in no key: ZeRO shards the parameters;
    /// nor are `wrapper: fsdp2`, `wrapper: accelerate-fsdp2` and `stored: f32`, for parameters that
    /// are gathered in sixteen bits.
    ///
    /// # Errors
    /// [`Untraced`] if no table has the plan's settings.
    pub fn new(plan: &Plan, model: &Model, tables: &BTreeMap<String, String>) -> Result<Self, Untraced> {
        let mut assumptions = Vec::new();
        let key = TableKey::of(plan, model, tables, Adapters::of(plan, model)?, Wrapping::of(tables))?;
        let table = key.table(&mut assumptions)?;
        Self::of_step(plan, model, tables, (table, assumptions))
    }

    /// The step of a plan by a table that was traced for it.
    ///
    /// # Errors
    /// [`Untraced`] if the table is of another step.
    pub fn of_table(
        plan: &Plan,
        model: &Model,
        tables: &BTreeMap<String, String>,
        table: Arc<OperatorTable>,
    ) -> Result<Self, Untraced> {
        let wanted = wanted_key(plan, model, tables)?;
        let differs = |(word, value): &(&String, &String)| table.key.get(*word).is_some_and(|own| own != *value);
        if let Some((word, value)) = wanted.iter().find(differs) {
            return Err(Untraced::new(format!("{word} `{value}`, as the profile was measured with `{}`", table.key[word])));
        }
        Self::of_step(plan, model, tables, (table, Vec::new()))
    }

    fn of_step(
        plan: &Plan,
        model: &Model,
        tables: &BTreeMap<String, String>,
        (table, mut assumptions): (Arc<OperatorTable>, Vec<String>),
    ) -> Result<Self, Untraced> {
        let wrapper = Wrapping::of(tables);
        let ranks = data_parallel_ranks(plan, wrapper)?;
        let adapter = Adapters::of(plan, model)?;
        let preference = plan.workload.preference;
        let sequences = preference.map_or(1, Preference::sequences);
        let sizes = TableSizes::of_model(model, plan.layout.micro_batch.saturating_mul(sequences))
            .ok_or_else(|| Untraced::new(format!("models of the family `{}`", model.family())))?;
        let rank = plan.training.lora.as_ref().map_or(0, |lora| lora.rank);
        let sizes = sizes.with("r", rank);
        table.values(&sizes)?;
        let sharding = match (wrapper, plan.layout.zero, ranks) {
            // One rank's state is whole at stage 0 and 1 alike.
            (Wrapping::DeepSpeed, zero, _) => Sharding::Zero { stage: zero.clamp(1, 3) as u8 },
            (Wrapping::PyTorch, _, 0 | 1) => Sharding::Replicated,
            (Wrapping::PyTorch, 3, _) => match fsdp2_groups(tables) {
                None => Sharding::Fsdp1,
                // The format of gradients is that of the parameters, but for what is stored wider.
                Some(groups) => {
                    let is_wide = stores_wide(tables) || plan.precision == DataType::Fp32;
                    Sharding::Fsdp2 { reduce: if is_wide { Element::F32 } else { Element::Bf16 }, groups }
                }
            },
            (Wrapping::PyTorch, ..) => Sharding::Ddp,
        };
        let first_stack = table.parts.iter().find_map(|part| part.stack.as_ref());
        let has_stacks = table.parts.iter().any(|part| part.stack.is_some() && part.stack.as_ref() != first_stack);
        // Units are numbered by layer.
        if has_stacks && matches!(sharding, Sharding::Fsdp1 | Sharding::Fsdp2 { .. } | Sharding::Zero { stage: 3 }) {
            return Err(Untraced::new("sharded parameters of several stacks of layers"));
        }
        // Such a table has the reference and its pass.
        let preference = preference.filter(|_| {
            let loss = table.key.get("loss").map(String::as_str);
            ![Some(WITH_REFERENCE), Some(WITHOUT_REFERENCE)].contains(&loss)
        });
        let is_narrow = match wrapper {
            Wrapping::DeepSpeed => plan.precision != DataType::Fp32,
            // Some frameworks train in the narrow format alone, and say so in their entry.
            Wrapping::PyTorch => {
                let says_narrow = tables.get("precision").is_some_and(|precision| precision == "bf16") && !stores_wide(tables);
                (plan.workload.no_master_copy || says_narrow) && adapter == Adapters::None || has_narrow_adapters(&table)
            }
        };
        let period = layers_of_table_layer(model);
        if period > 1 && matches!(sharding, Sharding::Fsdp1 | Sharding::Fsdp2 { .. }) {
            assumptions.push(format!("{period} layers, one period of the model, are gathered and reduced together"));
        }
        if let Sharding::Fsdp2 { groups: Fsdp2Groups::Accelerate, .. } = sharding {
            assumptions.push(BY_FSDP2.into());
            let says = |word: &str, value: &str| table.key.get(word).is_some_and(|own| own == value);
            if says("kernels", "liger") && adapter != Adapters::None {
                assumptions.push(LIGER_BELOW_PEFT.into());
            }
            if says("architecture", "bert") {
                assumptions.push(BIAS_IN_TWO_GROUPS.into());
            }
        }
        let micro_batches = plan.micro_batches()?;
        let stored = if is_narrow { Element::Bf16 } else { Element::F32 };
        let optimizer = optimizer(plan, tables)?;
        let offloads_optimizer = plan.layout.offload.is_of_optimizer();
        if offloads_optimizer && !matches!(optimizer, TracedOptimizer::AdamWFused | TracedOptimizer::AdamWForeach) {
            return Err(Untraced::new("`offload: optimizer` with another optimizer than AdamW in single precision"));
        }
        let workload = &plan.workload;
        if optimizer == TracedOptimizer::Muon {
            if !matches!(sharding, Sharding::Replicated | Sharding::Ddp) || workload.updates_in_backward {
                return Err(Untraced::new("`optimizer: muon` with sharded parameters, or updates in the backward pass"));
            }
            assumptions.push(MUON_OF_PYTORCH.into());
        }
        if workload.updates_in_backward && (sharding != Sharding::Replicated || micro_batches > 1) {
            return Err(Untraced::new("`updates_in_backward` on several ranks, or over several micro-batches"));
        }
        if offloads_optimizer && workload.updates_in_backward {
            return Err(Untraced::new("`updates_in_backward` with offloading"));
        }
        let [of_model, of_reference] = preference.map_or([0, 0], Preference::passes_without_gradients);
        let job = TracedJob {
            updates_in_backward: workload.updates_in_backward,
            // torchtune's recipes do not, unless they are told to.
            clips_gradients: plan.training.clip_norm.is_some() || tables.get("framework").is_none_or(|name| name != "torchtune"),
            micro_batches,
            offloads_optimizer,
            offloads_parameters: plan.layout.offload == Offload::State,
            passes_without_gradients: of_model + if workload.precomputed_reference { 0 } else { of_reference },
            has_reference: preference.is_some_and(Preference::has_reference)
                && adapter == Adapters::None
                && !workload.precomputed_reference,
            separate_experts: is_before_release_5(tables),
            ..TracedJob::new(table, sizes, ranks, sharding, stored, optimizer)
        };
        Ok(Self { job, assumptions })
    }
}

/// What the key of a plan's table says under a framework, each word with the value that is wanted
/// first.
///
/// # Errors
/// [`Untraced`] if the framework's tables cannot say the plan's settings.
pub fn wanted_key(plan: &Plan, model: &Model, tables: &BTreeMap<String, String>) -> Result<BTreeMap<String, String>, Untraced> {
    let key = TableKey::of(plan, model, tables, Adapters::of(plan, model)?, Wrapping::of(tables))?;
    Ok(key.wanted())
}

/// Whether a plan's adapters are on all linear layers or on all of attention's, or there are none.
/// Adapters on fewer layers are predicted as one of these.
///
/// # Errors
/// [`Untraced`] if the tables cannot say what is trained.
pub fn adapts_whole_groups(plan: &Plan, model: &Model) -> Result<bool, Untraced> {
    Ok(matches!(Adapters::of(plan, model)?, Adapters::None | Adapters::All | Adapters::Attention))
}

/// The stages of ZeRO that layouts of several ranks have under a framework with such tables: 0 for
/// DDP and 3 for FSDP, or those of DeepSpeed.
pub fn stages_of_zero(tables: &BTreeMap<String, String>) -> &'static [usize] {
    Wrapping::of(tables).stages_of_zero()
}

/// What layouts may keep in their hosts' memory under a framework with such tables. The first is
/// nothing; others are for jobs that do not fit.
pub fn traced_offloads(tables: &BTreeMap<String, String>) -> &'static [Offload] {
    match Wrapping::of(tables) {
        Wrapping::PyTorch => &[Offload::None, Offload::State],
        Wrapping::DeepSpeed => &[Offload::None, Offload::Optimizer, Offload::State],
    }
}

/// The stages of ZeRO that are worth trying on so many ranks with such offloading.
pub fn traced_stages(tables: &BTreeMap<String, String>, ranks: usize, offload: Offload) -> &'static [usize] {
    match (Wrapping::of(tables), offload, ranks) {
        (Wrapping::PyTorch, Offload::State, 1) => &[],
        (_, Offload::State, _) => &[3],
        // Stages of one rank differ in nothing, but that 2 copies gradients out as they are made.
        (_, Offload::None, 1) => &[0],
        (_, _, 1) => &[2],
        (wrapper, ..) => wrapper.stages_of_zero(),
    }
}

/// The library that shards parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrapping {
    /// `DistributedDataParallel` or `FullyShardedDataParallel`, under autocast.
    PyTorch,
    /// DeepSpeed, which casts the model instead.
    DeepSpeed,
}

impl Wrapping {
    fn of(tables: &BTreeMap<String, String>) -> Self {
        if tables.get("wrapper").is_some_and(|wrapper| wrapper == "deepspeed") { Self::DeepSpeed } else { Self::PyTorch }
    }

    fn stages_of_zero(self) -> &'static [usize] {
        match self {
            Self::PyTorch => &[0, 3],
            Self::DeepSpeed => &[1, 2, 3],
        }
    }
}

/// The number of ranks of a plan that splits nothing but batches and the state of parameters.
fn data_parallel_ranks(plan: &Plan, wrapper: Wrapping) -> Result<usize, Untraced> {
    let layout = &plan.layout;
    if layout.stages.is_some() || layout.tensor * layout.pipeline * layout.context * layout.expert > 1 {
        return Err(Untraced::new("layouts that split the model"));
    }
    if layout.data > 1 && !wrapper.stages_of_zero().contains(&layout.zero) {
        return Err(Untraced::new(format!("`zero: {}`", layout.zero)));
    }
    if layout.shard_group.is_some_and(|group| group != layout.data) {
        return Err(Untraced::new("`shard_group`"));
    }
    match layout.offload {
        Offload::None => {}
        Offload::Optimizer if wrapper == Wrapping::DeepSpeed => {}
        Offload::State if layout.zero == 3 && (wrapper == Wrapping::DeepSpeed || layout.data > 1) => {}
        other => return Err(Untraced::new(format!("`offload: {}`", other.name()))),
    }
    if wrapper == Wrapping::DeepSpeed && (plan.workload.paged_moments || plan.workload.updates_in_backward) {
        return Err(Untraced::new("paged moments and updates in the backward pass under DeepSpeed"));
    }
    if wrapper == Wrapping::DeepSpeed && plan.workload.no_master_copy {
        return Err(Untraced::new("DeepSpeed's states in sixteen bits"));
    }
    if !plan.training.frozen.is_empty() {
        return Err(Untraced::new("`training.frozen`"));
    }
    Ok(layout.data)
}

/// The groups of a framework that shards by FSDP2.
fn fsdp2_groups(tables: &BTreeMap<String, String>) -> Option<Fsdp2Groups> {
    match tables.get("wrapper")?.as_str() {
        "fsdp2" => Some(Fsdp2Groups::Root),
        "accelerate-fsdp2" => Some(Fsdp2Groups::Accelerate),
        _ => None,
    }
}

/// Whether a framework gathers parameters in sixteen bits and stores them in single precision.
fn stores_wide(tables: &BTreeMap<String, String>) -> bool {
    tables.get("stored").is_some_and(|stored| stored == "f32")
}

/// Whether adapters are trained in sixteen bits, with their gradients and moments: TRL 1.x casts
/// those beside quantised weights (`param.data.to(torch.bfloat16)` in `DPOTrainer`), and keeps no
/// copy.
fn has_narrow_adapters(table: &OperatorTable) -> bool {
    let word = |name: &str| table.key.get(name).map_or("", String::as_str);
    [WITH_REFERENCE, WITHOUT_REFERENCE].contains(&word("loss")) && word("adapter").ends_with("-bf16")
}

/// Whether the release of transformers is one before 5.
fn is_before_release_5(tables: &BTreeMap<String, String>) -> bool {
    tables.get("version").is_some_and(|version| version.starts_with("4."))
}

fn optimizer(plan: &Plan, tables: &BTreeMap<String, String>) -> Result<TracedOptimizer, Untraced> {
    // The fused one is the Trainer's default since release 5, and DeepSpeed's own always.
    let is_older = is_before_release_5(tables) && Wrapping::of(tables) == Wrapping::PyTorch;
    if plan.workload.paged_moments && plan.workload.moments != MomentFormat::EightBit {
        return Err(Untraced::new("`paged_moments` of other moments than those in eight bits"));
    }
    match (plan.optimizer, plan.workload.moments) {
        (Optimizer::Adam | Optimizer::AdamW, MomentFormat::EightBit) if plan.workload.paged_moments => {
            Ok(TracedOptimizer::AdamWPaged)
        }
        (Optimizer::Adam | Optimizer::AdamW, MomentFormat::Factored) => Ok(TracedOptimizer::Adafactor),
        (Optimizer::Adam | Optimizer::AdamW, MomentFormat::Single) if is_older => Ok(TracedOptimizer::AdamWForeach),
        (Optimizer::Adam | Optimizer::AdamW, MomentFormat::Single) => Ok(TracedOptimizer::AdamWFused),
        (Optimizer::Adam | Optimizer::AdamW, MomentFormat::EightBit) => Ok(TracedOptimizer::AdamWEightBits),
        (Optimizer::Sgd, MomentFormat::Single) => {
            let (momentum, decay) = (plan.training.momentum != 0.0, plan.training.weight_decay != 0.0);
            Ok(TracedOptimizer::Sgd { momentum, decay })
        }
        (Optimizer::Muon, MomentFormat::Single) => Ok(TracedOptimizer::Muon),
        (other, _) => Err(Untraced::new(format!("`optimizer: {}` with such moments", other.name()))),
    }
}

#[cfg(test)]
mod tests;
