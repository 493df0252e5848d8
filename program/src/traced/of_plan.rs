//! Which table a plan's step under a traced framework has, and what shards it.
//!
//! A plan that has none says why ([`Untraced`]): another model, number format or layout than what
//! was traced. Where a near table stands in, the job says what it assumes.

use super::{Sharding, TracedJob, TracedOptimizer};
use crate::plan::{AttentionKernel, LossKernel, MomentFormat, Optimizer, Plan, PlanError, Recompute};
use foretell_models::operator_tables::{Element, OperatorTable, TableError, TableSizes, is_tied, traced_architecture};
use foretell_models::{GraphOptions, Model, linear_layers};
use foretell_units::DataType;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use thiserror::Error;

/// What keeps a plan's step from being known operator by operator.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{reason}")]
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
    /// The step of a plan under the framework whose tables have this name (`hf` for Hugging Face's
    /// models). `architecture` is the model's, if it is known better than its sizes tell.
    ///
    /// # Errors
    /// [`Untraced`] if no table has the plan's settings.
    pub fn new(plan: &Plan, model: &Model, framework: &str, architecture: Option<&str>) -> Result<Self, Untraced> {
        let ranks = data_parallel_ranks(plan)?;
        let adapter = Adapters::of(plan, model)?;
        let mut assumptions = Vec::new();
        let key = TableKey::of(plan, model, framework, architecture, adapter)?;
        let table = key.table(&mut assumptions)?;
        let sizes = TableSizes::of_model(model, plan.layout.micro_batch)
            .ok_or_else(|| Untraced::new(format!("models of the family `{}`", model.family())))?;
        let rank = plan.training.lora.as_ref().map_or(0, |lora| lora.rank);
        let sizes = sizes.with("r", rank);
        table.values(&sizes)?;
        let sharding = match (plan.layout.zero, ranks) {
            (_, 0 | 1) => Sharding::Replicated,
            (3, _) => Sharding::Fsdp1,
            _ => Sharding::Ddp,
        };
        let is_narrow = plan.workload.no_master_copy && adapter == Adapters::None;
        let micro_batches = plan.micro_batches()?;
        let stored = if is_narrow { Element::Bf16 } else { Element::F32 };
        let optimizer = optimizer(plan)?;
        Ok(Self { job: TracedJob { table, sizes, ranks, sharding, stored, optimizer, micro_batches }, assumptions })
    }
}

/// The number of ranks of a plan that splits nothing but batches and the state of parameters.
fn data_parallel_ranks(plan: &Plan) -> Result<usize, Untraced> {
    let layout = &plan.layout;
    if layout.stages.is_some() || layout.tensor * layout.pipeline * layout.context * layout.expert > 1 {
        return Err(Untraced::new("layouts that split the model"));
    }
    if matches!(layout.zero, 1 | 2) && layout.data > 1 {
        return Err(Untraced::new(format!("`zero: {}`", layout.zero)));
    }
    if layout.shard_group.is_some_and(|group| group != layout.data) {
        return Err(Untraced::new("`shard_group`"));
    }
    if !layout.offload.is_none() {
        return Err(Untraced::new("`offload`"));
    }
    if !plan.training.frozen.is_empty() {
        return Err(Untraced::new("`training.frozen`"));
    }
    Ok(layout.data)
}

fn optimizer(plan: &Plan) -> Result<TracedOptimizer, Untraced> {
    match (plan.optimizer, plan.workload.moments) {
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
    /// Others than both: the nearest of the traced ones is larger.
    Fewer,
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
            (false, false) => Self::Fewer,
        })
    }

    /// The name in tables' keys, as it is and without dropout where that was not traced. FSDP casts
    /// adapters within a unit, which matters little.
    fn names(self, quantised: bool, dropout: bool, is_sharded: bool) -> Vec<String> {
        let name = match self {
            Self::None => return vec!["none".into()],
            Self::Attention => "attention",
            Self::All | Self::Fewer => "all",
        };
        let name = format!("{}-{name}", if quantised { "qlora" } else { "lora" });
        let special = match (dropout, is_sharded) {
            (true, _) => Some(format!("{name}-dropout")),
            (false, true) => Some(format!("{name}-bf16")),
            (false, false) => None,
        };
        special.into_iter().chain([name]).collect()
    }
}

/// The settings that a table is found by. Where there are several values, the first that was traced
/// counts.
struct TableKey {
    usual: Vec<(&'static str, String)>,
    attention: &'static [&'static str],
    heads: &'static [&'static str],
    adapters: Vec<String>,
    wants_attention: Option<AttentionKernel>,
    stands_in: Vec<String>,
}

impl TableKey {
    fn of(plan: &Plan, model: &Model, framework: &str, architecture: Option<&str>, adapters: Adapters) -> Result<Self, Untraced> {
        let family = || Untraced::new(format!("models of this kind (`{}` with its parts)", model.family()));
        let architecture = architecture.or_else(|| traced_architecture(model)).ok_or_else(family)?;
        let workload = &plan.workload;
        let is_sharded = plan.layout.zero == 3 && plan.layout.data > 1;
        let mut stands_in = Vec::new();
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
            DataType::Bf16 | DataType::Fp16 if adapters != Adapters::None => "mixed",
            DataType::Bf16 | DataType::Fp16 if workload.no_master_copy => "bf16",
            DataType::Bf16 | DataType::Fp16 if is_sharded => "mixed",
            DataType::Bf16 | DataType::Fp16 => "autocast",
            other => return Err(Untraced::new(format!("`precision: {other}`"))),
        };
        if plan.precision == DataType::Fp16 {
            stands_in.push("kernels in `fp16` are predicted as those in `bf16`".into());
        }
        if adapters == Adapters::Fewer {
            stands_in.push("adapters on some linear layers are predicted as adapters on all of them".into());
        }
        let checkpoint = match plan.layout.recompute {
            Recompute::None => "none",
            Recompute::Full => "full",
            _ => return Err(Untraced::new("recomputation in part")),
        };
        let is_fp32 = precision == "fp32";
        let (attention, wants_attention): (&[_], _) = match workload.attention {
            None if is_fp32 => (&["sdpa", "eager"], None),
            None | Some(AttentionKernel::Sdpa) => (&["sdpa", "sdpa-repeat", "flash"], workload.attention),
            Some(AttentionKernel::Flash) => (&["flash", "sdpa"], workload.attention),
            Some(AttentionKernel::Eager) => (&["eager"], workload.attention),
        };
        let (loss, kernels) = match workload.loss {
            LossKernel::Plain => ("model", "hf"),
            LossKernel::Chunked => ("chunked", "hf"),
            LossKernel::Liger => ("model", "liger"),
        };
        let dropout = if matches!(architecture, "gpt2" | "bert") { "some" } else { "none" };
        let experts = if matches!(architecture, "mixtral" | "qwen3_moe") { "grouped_mm" } else { "none" };
        let usual = [
            ("architecture", architecture),
            ("framework", framework),
            ("dropout", dropout),
            ("experts", experts),
            ("checkpoint", checkpoint),
            ("precision", precision),
            ("loss", loss),
            ("kernels", kernels),
        ];
        let heads: &[_] = if is_tied(model) { &["tied", "usual"] } else { &["usual"] };
        let usual = usual.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
        let adapters = adapters.names(is_quantised, workload.adapter_dropout, is_sharded);
        Ok(Self { usual, attention, heads, adapters, wants_attention, stands_in })
    }

    fn table(self, assumptions: &mut Vec<String>) -> Result<Arc<OperatorTable>, Untraced> {
        let own = self.value("architecture");
        // Mistral's step is Llama's, whose tables are more.
        let architectures = if own == "mistral" { vec![own, "llama"] } else { vec![own] };
        for architecture in architectures {
            for adapter in &self.adapters {
                for (attention, head) in self.attention.iter().flat_map(|one| self.heads.iter().map(move |head| (*one, *head))) {
                    let mut key: Vec<(&str, &str)> = self.usual.iter().map(|(name, value)| (*name, value.as_str())).collect();
                    key[0].1 = architecture;
                    key.extend([("attention", attention), ("head", head), ("adapter", adapter)]);
                    if let Some(table) = library(&key)? {
                        assumptions.extend(self.replaced(attention, adapter));
                        return Ok(table);
                    }
                }
            }
        }
        let settings =
            self.usual.iter().filter(|(name, value)| *name != "framework" && !["none", "hf", "model"].contains(&value.as_str()));
        let settings: Vec<String> =
            settings.map(|(name, value)| format!("{name} {value}")).chain(self.adapters.first().cloned()).collect();
        Err(Untraced::new(format!("this combination ({})", settings.join(", "))))
    }

    fn value(&self, name: &str) -> &str {
        self.usual.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value.as_str())
    }

    /// What another setting stands in for, one sentence each.
    fn replaced(&self, attention: &str, adapter: &str) -> Vec<String> {
        let mut sentences = self.stands_in.clone();
        if let Some(wants) = self.wants_attention.filter(|wants| !attention.starts_with(wants.name())) {
            sentences.push(format!("attention by `{}` is predicted as by `{attention}`", wants.name()));
        }
        if self.adapters.first().is_some_and(|wants| wants != adapter && wants.ends_with("dropout")) {
            sentences.push("adapters are predicted without dropout".into());
        }
        sentences
    }
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
        TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), "hf", None)
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
    fn adapters_on_some_layers_are_said_to_be_predicted_as_on_all() {
        assert!(with_targets(&["*"]).expect("traced").assumptions.is_empty());
        assert!(with_targets(&["*attn*"]).expect("traced").assumptions.is_empty());
        let fewer = with_targets(&["*q_proj", "*v_proj"]).expect("traced").assumptions;
        assert!(fewer.len() == 1 && fewer[0].contains("some linear layers"), "{fewer:?}");
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
