//! Which table a plan's step under a traced framework has, and what shards it.
//!
//! A plan that has none says why ([`Untraced`]): another model, number format or layout than what
//! was traced. Where a near table stands in, the job says what it assumes.

use super::{Sharding, TracedJob, TracedOptimizer};
use crate::plan::{AttentionKernel, LossKernel, MomentFormat, Offload, Optimizer, Plan, PlanError, Preference, Recompute};
use foretell_models::operator_tables::{Element, OperatorTable, TableError, TableSizes, is_tied, traced_architecture};
use foretell_models::{GraphOptions, Model, linear_layers};
use foretell_units::DataType;
use miette::Diagnostic;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use thiserror::Error;

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
    /// nor are `wrapper: fsdp2` and `stored: f32`, for parameters that are gathered in sixteen
    /// bits.
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
        (table, assumptions): (Arc<OperatorTable>, Vec<String>),
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
            (Wrapping::PyTorch, 3, _) if tables.get("wrapper").is_some_and(|wrapper| wrapper == "fsdp2") => {
                // The format of gradients is that of the parameters, but for what is stored wider.
                Sharding::Fsdp2 { reduce: if stores_wide(tables) { Element::F32 } else { Element::Bf16 } }
            }
            (Wrapping::PyTorch, 3, _) => Sharding::Fsdp1,
            (Wrapping::PyTorch, ..) => Sharding::Ddp,
        };
        let is_narrow = match wrapper {
            Wrapping::DeepSpeed => plan.precision != DataType::Fp32,
            // Some frameworks train in the narrow format alone, and say so in their entry.
            Wrapping::PyTorch => {
                let says_narrow = tables.get("precision").is_some_and(|precision| precision == "bf16") && !stores_wide(tables);
                (plan.workload.no_master_copy || says_narrow) && adapter == Adapters::None
            }
        };
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
        let job = TracedJob {
            updates_in_backward: workload.updates_in_backward,
            // torchtune's recipes do not, unless they are told to.
            clips_gradients: tables.get("framework").is_none_or(|framework| framework != "torchtune"),
            micro_batches,
            offloads_optimizer,
            offloads_parameters: plan.layout.offload == Offload::State,
            passes_without_gradients: preference.map_or(0, Preference::passes_without_gradients),
            has_reference: preference.is_some_and(Preference::has_reference) && adapter == Adapters::None,
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
    let version = key.versions.first().map_or(NEWEST, String::as_str);
    let first = |(word, values): (&str, Vec<String>)| Some((word.to_owned(), values.into_iter().next()?));
    Ok(key.of_version(version).into_iter().filter_map(first).collect())
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

/// Whether a framework gathers parameters in sixteen bits and stores them in single precision.
fn stores_wide(tables: &BTreeMap<String, String>) -> bool {
    tables.get("stored").is_some_and(|stored| stored == "f32")
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
        (Optimizer::Sgd, MomentFormat::Single) => Ok(TracedOptimizer::Sgd),
        (other, _) => Err(Untraced::new(format!("`optimizer: {}` with such moments", other.name()))),
    }
}

/// Which linear layers have adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Adapters {
    None,
    All,
    Attention,
    /// Others: some of all.
    Fewer,
    /// Others: some of attention's.
    FewerOfAttention,
}

impl Adapters {
    fn of(plan: &Plan, model: &Model) -> Result<Self, Untraced> {
        let Some(lora) = &plan.training.lora else { return Ok(Self::None) };
        if !lora.also_train.is_empty() {
            return Err(Untraced::new("`training.lora.also_train`"));
        }
        let graph = model.graph("model", &GraphOptions::ONE).map_err(|error| Untraced::new(error.to_string()))?;
        let is_attention = |name: &str| name.contains("attn") || name.contains("attention");
        let (mut all, mut attention, mut beside) = (true, true, false);
        for (name, _) in linear_layers(&graph) {
            match (lora.targets.match_name(name), is_attention(name)) {
                (true, false) => beside = true,
                (false, in_attention) => (all, attention) = (false, attention && !in_attention),
                (true, true) => {}
            }
        }
        Ok(match (all, attention && !beside) {
            (true, _) => Self::All,
            (false, true) => Self::Attention,
            (false, false) if beside => Self::Fewer,
            (false, false) => Self::FewerOfAttention,
        })
    }

    /// The name in tables' keys, as it is and without dropout where that was not traced. FSDP casts
    /// adapters within a unit, and DeepSpeed all of them, which matters little.
    fn names(self, quantised: bool, dropout: bool, are_cast: bool) -> Vec<String> {
        let name = match self {
            Self::None => return vec!["none".into()],
            Self::Attention | Self::FewerOfAttention => "attention",
            Self::All | Self::Fewer => "all",
        };
        let name = format!("{}-{name}", if quantised { "qlora" } else { "lora" });
        let special = match (dropout, are_cast) {
            (true, _) => Some(format!("{name}-dropout")),
            (false, true) => Some(format!("{name}-bf16")),
            (false, false) => None,
        };
        special.into_iter().chain([name]).collect()
    }
}

/// The newest release of a framework that was traced.
const NEWEST: &str = "latest";

/// The settings that a table is found by. Where one has several values, the first that was traced
/// counts.
struct TableKey {
    /// `none`, `full` or `selective`.
    recomputes: &'static str,
    adapters: Adapters,
    is_quantised: bool,
    has_dropout: bool,
    /// Whether adapters are cast with what is around them.
    casts_adapters: bool,
    states_attention: bool,
    /// Each with its values, those that were wanted first.
    values: Vec<(&'static str, Vec<String>)>,
    /// Releases, the wanted one first.
    versions: Vec<String>,
    stands_in: Vec<String>,
}

impl TableKey {
    fn of(
        plan: &Plan,
        model: &Model,
        tables: &BTreeMap<String, String>,
        adapters: Adapters,
        wrapper: Wrapping,
    ) -> Result<Self, Untraced> {
        let workload = &plan.workload;
        let is_sharded = plan.layout.zero == 3 && plan.layout.data > 1;
        let is_quantised = match workload.base_bits {
            None => false,
            Some(4) if adapters != Adapters::None => true,
            Some(4) => return Err(Untraced::new("four-bit weights without adapters")),
            Some(bits) => return Err(Untraced::new(format!("weights of {bits} bits"))),
        };
        if workload.products.is_some() || workload.packed.is_some() || workload.unpadded.is_some_and(|share| share < 1.0) {
            return Err(Untraced::new("narrower products, packing, and padding that is left out"));
        }
        let precision = match plan.precision {
            DataType::Fp32 => "fp32",
            DataType::Bf16 | DataType::Fp16 if wrapper == Wrapping::DeepSpeed => "bf16",
            DataType::Bf16 | DataType::Fp16 if adapters != Adapters::None => "mixed",
            DataType::Bf16 | DataType::Fp16 if workload.no_master_copy => "bf16",
            DataType::Bf16 | DataType::Fp16 if is_sharded => "mixed",
            DataType::Bf16 | DataType::Fp16 => "autocast",
            other => return Err(Untraced::new(format!("`precision: {other}`"))),
        };
        let mut stands_in = Vec::new();
        if plan.precision == DataType::Fp16 {
            stands_in.push("kernels in `fp16` are predicted as those in `bf16`".into());
        }
        if let Some(preference) = plan.workload.preference {
            if workload.loss != LossKernel::Plain {
                return Err(Untraced::new("a loss on preferences in parts"));
            }
            let name = preference.name();
            stands_in.push(format!("`{name}`: the loss over the vocabulary is predicted as that of language modelling"));
        }
        if adapters == Adapters::Fewer {
            stands_in.push("adapters on some linear layers are predicted as adapters on all of them".into());
        }
        if adapters == Adapters::FewerOfAttention {
            stands_in.push("adapters on some of attention's layers are predicted as adapters on all of these".into());
        }
        let has_policy = tables.get("framework").is_some_and(|framework| framework == "torchtitan");
        let recomputes = match plan.layout.recompute {
            Recompute::None => "none",
            Recompute::Full => "full",
            // torchtitan's own policy.
            Recompute::Selective if has_policy => "selective",
            _ => return Err(Untraced::new("recomputation in part")),
        };
        let attention: &[_] = match workload.attention {
            None if precision == "fp32" => &["sdpa", "eager"],
            None | Some(AttentionKernel::Sdpa) => &["sdpa", "sdpa-repeat", "flash"],
            Some(AttentionKernel::Flash) => &["flash", "sdpa"],
            Some(AttentionKernel::Eager) => &["eager"],
        };
        let (loss, kernels) = match workload.loss {
            LossKernel::Plain => ("model", "hf"),
            LossKernel::Chunked => ("chunked", "hf"),
            LossKernel::Liger => ("model", "liger"),
        };
        let given = |name: &str| tables.get(name).map(String::as_str);
        let family = || Untraced::new(format!("models of this kind (`{}` with its parts)", model.family()));
        let architecture = given("architecture").or_else(|| traced_architecture(model)).ok_or_else(family)?;
        let dropout = if matches!(architecture, "gpt2" | "bert" | "gpt_bigcode") { "some" } else { "none" };
        // Before release 5 experts run one by one, in a loop.
        let experts: &[_] = match architecture {
            "mixtral" | "qwen3_moe" if is_before_release_5(tables) => &["eager", "grouped_mm"],
            "mixtral" | "qwen3_moe" => &["grouped_mm"],
            _ => &["none"],
        };
        // Mistral's step is Llama's, whose tables are more.
        let architectures: &[_] = if architecture == "mistral" { &["mistral", "llama"] } else { &[architecture] };
        let usual = [
            ("framework", &["hf"][..]),
            ("precision", &[precision]),
            ("architecture", architectures),
            ("dropout", &[dropout]),
            ("experts", experts),
            ("loss", &[loss]),
            ("kernels", &[kernels]),
            ("head", if is_tied(model) { &["tied", "usual"] } else { &["usual"] }),
            ("attention", attention),
            ("compiled", &["none"]),
        ];
        // What the framework's entry says of a key goes before the usual values.
        let values = usual.map(|(name, values)| {
            let own = given(name).into_iter().filter(|own| !values.contains(own));
            // An eager step is no stand-in for a compiled one.
            let values: &[&str] = if name == "compiled" && given(name).is_some() { &[] } else { values };
            (name, own.chain(values.iter().copied()).map(str::to_owned).collect())
        });
        let newest = Some(NEWEST).filter(|newest| given("version") != Some(newest));
        Ok(Self {
            recomputes,
            adapters,
            is_quantised,
            has_dropout: workload.adapter_dropout,
            casts_adapters: is_sharded || wrapper == Wrapping::DeepSpeed,
            states_attention: workload.attention.is_some(),
            values: values.into(),
            versions: given("version").into_iter().chain(newest).map(str::to_owned).collect(),
            stands_in,
        })
    }

    /// All settings of a release, each with its values, those that were wanted first.
    fn of_version(&self, version: &str) -> Vec<(&'static str, Vec<String>)> {
        let is_newest = version == NEWEST;
        // Reentrant checkpoints are the default of transformers before 5.
        let checkpoint: &[_] = match (self.recomputes, is_newest) {
            ("full", false) => &["full-reentrant", "full"],
            _ => &[self.recomputes],
        };
        // Older releases were traced with dropout on adapters, which most recipes had.
        let adapters = self.adapters.names(self.is_quantised, self.has_dropout || !is_newest, self.casts_adapters);
        let more = [
            ("version", vec![version.to_owned()]),
            ("checkpoint", checkpoint.iter().map(|&name| name.to_owned()).collect()),
            ("adapter", adapters),
        ];
        self.values.iter().cloned().chain(more).collect()
    }

    fn table(self, assumptions: &mut Vec<String>) -> Result<Arc<OperatorTable>, Untraced> {
        for version in &self.versions {
            let settings = self.of_version(version);
            for key in products(&settings) {
                if let Some(table) = library(&key)? {
                    assumptions.extend(self.replaced(version, &settings, &key));
                    return Ok(table);
                }
            }
        }
        let wanted = self.versions.first().map_or_else(Vec::new, |version| self.of_version(version));
        let stated = wanted.iter().filter_map(|(name, values)| Some((name, values.first()?)));
        let stated = stated.filter(|(name, value)| {
            !matches!(**name, "framework" | "version" | "dropout") && !["none", "hf", "model", "usual"].contains(&value.as_str())
        });
        let stated: Vec<String> = stated.map(|(name, value)| format!("{name} {value}")).collect();
        Err(Untraced::new(format!("this combination ({})", stated.join(", "))))
    }

    /// What another setting stands in for, one sentence each.
    fn replaced(&self, version: &str, settings: &[(&str, Vec<String>)], key: &[(&str, &str)]) -> Vec<String> {
        let mut sentences = self.stands_in.clone();
        if self.versions.first().is_some_and(|wanted| wanted != version) {
            sentences.push("a newer release of the framework stands in for the stated one, which was not traced so".into());
        }
        for ((name, values), (_, taken)) in settings.iter().zip(key) {
            let Some(wanted) = values.first().filter(|wanted| wanted != taken) else { continue };
            let matters = match *name {
                "attention" => self.states_attention && !taken.starts_with(wanted.as_str()),
                "adapter" => self.has_dropout != taken.ends_with("dropout"),
                "loss" | "kernels" | "precision" | "framework" | "head" => true,
                _ => false,
            };
            if matters {
                sentences.push(format!("{name} `{wanted}` was not traced with the rest: `{taken}` stands in"));
            }
        }
        sentences
    }
}

/// Every choice of one value for each setting. Earlier settings keep their first values longest.
fn products<'a>(settings: &'a [(&'static str, Vec<String>)]) -> Vec<Vec<(&'static str, &'a str)>> {
    settings.iter().fold(vec![Vec::new()], |keys, (name, values)| {
        let with = |key: &Vec<(&'static str, &'a str)>| -> Vec<_> {
            values.iter().map(|value| key.iter().copied().chain([(*name, value.as_str())]).collect()).collect()
        };
        keys.iter().flat_map(with).collect()
    })
}

/// The library's table of a key. Each is read once.
fn library(key: &[(&str, &str)]) -> Result<Option<Arc<OperatorTable>>, TableError> {
    type Known = BTreeMap<Vec<(String, String)>, Option<Arc<OperatorTable>>>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);
    let owned: Vec<(String, String)> = key.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(table) = known.get(&owned) {
        return Ok(table.clone());
    }
    let table = OperatorTable::library(key)?.map(Arc::new);
    known.insert(owned, table.clone());
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Lora, NamePatterns};

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
    fn adapters_on_some_layers_are_said_to_be_predicted_as_on_all() {
        assert!(with_targets(&["*"]).expect("traced").assumptions.is_empty());
        assert!(with_targets(&["*attn*"]).expect("traced").assumptions.is_empty());
        let fewer = with_targets(&["*q_proj", "*v_proj"]).expect("traced").assumptions;
        assert!(fewer.len() == 1 && fewer[0].contains("some of attention's layers"), "{fewer:?}");
        let pattern = NamePatterns::from_iter(["*"]);
        assert!(pattern.match_name("model.layers.0.self_attn.q_proj"));
    }

    #[test]
    fn four_bits_need_a_quarter_of_what_sixteen_do() {
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
    }
}
