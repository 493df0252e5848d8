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
        }
        let micro_batches = plan.micro_batches()?;
        let stored = if is_narrow { Element::Bf16 } else { Element::F32 };
        let optimizer = optimizer(plan, tables)?;
        let offloads_optimizer = plan.layout.offload.is_of_optimizer();
        if offloads_optimizer && !matches!(optimizer, TracedOptimizer::AdamWFused | TracedOptimizer::AdamWForeach) {
            return Err(Untraced::new("`offload: optimizer` with another optimizer than AdamW in single precision"));
        }
        let workload = &plan.workload;
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
            clips_gradients: tables.get("framework").is_none_or(|framework| framework != "torchtune"),
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

/// Whether adapters are trained in sixteen bits, with their gradients and moments: TRL 1.x casts those
/// beside quantised weights (`param.data.to(torch.bfloat16)` in `DPOTrainer`), and keeps no copy.
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
        (Optimizer::Sgd, MomentFormat::Single) if plan.training.weight_decay > 0.0 => Ok(TracedOptimizer::SgdWithDecay),
        (Optimizer::Sgd, MomentFormat::Single) => Ok(TracedOptimizer::Sgd),
        (other, _) => Err(Untraced::new(format!("`optimizer: {}` with such moments", other.name()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::LossKernel;
    use crate::{Layout, Lora, NamePatterns, Recompute};
    use foretell_models::operator_tables::ParameterRole;

    fn job(change: impl Fn(&mut Plan)) -> Result<TracedPlan, Untraced> {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        change(&mut plan);
        let tables = BTreeMap::from([("framework".to_owned(), "hf".to_owned())]);
        TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &tables)
    }

    fn with_targets(targets: &[&str]) -> Result<TracedPlan, Untraced> {
        job(|plan| plan.training.lora = Some(Lora { targets: targets.iter().copied().collect(), ..Lora::default() }))
    }

    #[test]
    fn a_plan_is_traced_or_says_why_not() {
        assert!(job(|_| {}).expect("it was traced").assumptions.is_empty());
        let refused: [&dyn Fn(&mut Plan); 7] = [
            &|plan| plan.layout.tensor = 2,
            &|plan| (plan.layout.data, plan.layout.zero) = (8, 1),
            &|plan| plan.precision = DataType::Fp8,
            &|plan| plan.optimizer = Optimizer::Lamb,
            &|plan| plan.workload.base_bits = Some(4),
            &|plan| plan.layout.recompute = Recompute::Selective,
            &|plan| plan.workload.packed = Some(512),
        ];
        for (index, change) in refused.into_iter().enumerate() {
            assert!(job(change).is_err(), "change {index}");
        }
    }

    #[test]
    fn deepspeed_shards_by_stage_and_casts_the_model() {
        let deepspeed = |zero: usize, data: usize, change: &dyn Fn(&mut Plan)| {
            let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
            (plan.layout.zero, plan.layout.data) = (zero, data);
            change(&mut plan);
            let tables = [("framework", "hf"), ("wrapper", "deepspeed")].map(|(name, value)| (name.into(), value.into()));
            TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &BTreeMap::from(tables))
        };
        for (zero, data, stage) in [(0, 1, 1), (2, 1, 2), (1, 8, 1), (2, 8, 2), (3, 8, 3)] {
            let TracedPlan { job, assumptions } = deepspeed(zero, data, &|_| {}).expect("it was traced");
            assert_eq!((job.sharding, job.stored), (Sharding::Zero { stage }, Element::Bf16));
            assert!(job.table.key["precision"] == "bf16" && assumptions.is_empty(), "{assumptions:?}");
        }
        let adapters = deepspeed(3, 8, &|plan| plan.training.lora = Some(Lora::default())).expect("it was traced");
        assert!(adapters.job.table.key["precision"] == "bf16", "{:?}", adapters.job.table.key);
        assert!(deepspeed(0, 8, &|_| {}).is_err());
        assert!(deepspeed(2, 8, &|plan| plan.workload.no_master_copy = true).is_err());
    }

    #[test]
    fn accelerates_fsdp2_casts_parameters_and_the_first_fsdp_has_autocast() {
        let sharded = |wrapper: Option<&str>, change: &dyn Fn(&mut Plan)| {
            let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
            (plan.layout.zero, plan.layout.data) = (3, 8);
            change(&mut plan);
            let words = [("framework", Some("hf")), ("wrapper", wrapper)].into_iter();
            let tables = words.filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
            TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &tables).expect("it was traced")
        };
        let whole: &dyn Fn(&mut Plan) = &|_| {};
        let adapters: &dyn Fn(&mut Plan) = &|plan| plan.training.lora = Some(Lora::default());
        let accelerate = |reduce| Sharding::Fsdp2 { reduce, groups: Fsdp2Groups::Accelerate };
        for (wrapper, change, sharding, precision, stored) in [
            (Some("accelerate-fsdp2"), whole, accelerate(Element::Bf16), "bf16", Element::F32),
            (Some("accelerate-fsdp2"), adapters, accelerate(Element::Bf16), "bf16", Element::F32),
            (
                Some("accelerate-fsdp2"),
                &|plan: &mut Plan| plan.workload.no_master_copy = true,
                accelerate(Element::Bf16),
                "bf16",
                Element::Bf16,
            ),
            (
                Some("accelerate-fsdp2"),
                &|plan: &mut Plan| plan.precision = DataType::Fp32,
                accelerate(Element::F32),
                "fp32",
                Element::F32,
            ),
            (None, whole, Sharding::Fsdp1, "mixed", Element::F32),
            (None, adapters, Sharding::Fsdp1, "mixed", Element::F32),
        ] {
            let TracedPlan { job, .. } = sharded(wrapper, change);
            assert_eq!((job.sharding, &*job.table.key["precision"], job.stored), (sharding, precision, stored));
        }
        let narrow = sharded(Some("accelerate-fsdp2"), adapters).job.table;
        assert!(narrow.key["adapter"].ends_with("-bf16"), "{:?}", narrow.key);
    }

    #[test]
    fn adapters_on_some_layers_are_said_to_be_predicted_as_on_all() {
        assert!(with_targets(&["*"]).expect("traced").assumptions.is_empty());
        assert!(with_targets(&["*attn*"]).expect("traced").assumptions.is_empty());
        let fewer = with_targets(&["*q_proj", "*v_proj"]).expect("traced").assumptions;
        assert!(fewer.len() == 1 && fewer[0].contains("some of attention's layers"), "{fewer:?}");
        let pattern = NamePatterns::from_iter(["*"]);
        assert!(pattern.match_name("model.layers.0.self_attn.q_proj"));
    }

    #[test]
    fn mixtures_of_release_4_run_their_experts_in_a_loop() {
        let mixture = |version: Option<&str>, change: &dyn Fn(&mut Plan)| {
            let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
            change(&mut plan);
            let words = [("framework", Some("hf")), ("version", version)].into_iter();
            let tables = words.filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
            TracedPlan::new(&plan, &Model::named("mixtral-8x7b").expect("it is in the zoo"), &tables).expect("it was traced")
        };
        let whole: &dyn Fn(&mut Plan) = &|_| {};
        let all: &dyn Fn(&mut Plan) = &|plan| plan.training.lora = Some(Lora::default());
        let of_attention: &dyn Fn(&mut Plan) =
            &|plan| plan.training.lora = Some(Lora { targets: ["*attn*"].into_iter().collect(), ..Lora::default() });
        for change in [whole, all, of_attention] {
            let TracedPlan { job, assumptions } = mixture(Some("4.48"), change);
            assert_eq!((&*job.table.key["experts"], &*job.table.key["version"]), ("eager", "4.48"));
            assert!(assumptions.is_empty(), "{assumptions:?}");
            let elements = job.table.elements(&job.sizes).expect("sizes are given");
            let elements =
                job.table.parameters.iter().zip(elements).filter(|(parameter, _)| parameter.role != ParameterRole::Adapter);
            let parameters: f64 = elements.map(|(_, (elements, count))| elements as f64 * count as f64).sum();
            assert!((parameters / 46.703e9 - 1.0).abs() < 1e-3, "{parameters}");
            let TracedPlan { job, assumptions } = mixture(None, change);
            assert!(job.table.key["experts"] == "grouped_mm" && assumptions.is_empty(), "{assumptions:?}");
        }
        let TracedPlan { job, assumptions } = mixture(Some("4.48"), &|plan| plan.workload.loss = LossKernel::Liger);
        assert_eq!(job.table.key["experts"], "grouped_mm");
        assert!(assumptions.iter().any(|sentence| sentence.contains("experts in a loop")), "{assumptions:?}");
    }

    #[test]
    fn four_bits_need_a_quarter_of_what_sixteen_do_and_eight_a_half() {
        let of_role = |plan: &TracedPlan| -> f64 {
            let elements = plan.job.table.elements(&plan.job.sizes).expect("sizes are given");
            let parameters = plan.job.table.parameters.iter().zip(elements);
            let linear = parameters.filter(|(parameter, _)| parameter.name.ends_with("down_proj.weight"));
            linear.map(|(parameter, (elements, count))| (elements * parameter.element.bytes()) as f64 * count as f64).sum()
        };
        let lora = with_targets(&["*"]).expect("traced");
        let qlora = job(|plan| {
            plan.training.lora = Some(Lora::default());
            plan.workload.base_bits = Some(4);
        });
        let ratio = of_role(&qlora.expect("traced")) / of_role(&lora);
        assert!((ratio - 0.25).abs() < 1e-6, "{ratio}");
        let eight_bits = job(|plan| {
            plan.training.lora = Some(Lora::default());
            plan.workload.base_bits = Some(8);
        });
        let ratio = of_role(&eight_bits.expect("traced")) / of_role(&lora);
        assert!((ratio - 0.5).abs() < 1e-6, "{ratio}");
    }
}
