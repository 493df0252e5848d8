//! The key of the table that a plan's step has: what the framework, the plan and the model say of
//! each of its words, and which values stand in where the first was not traced.

use super::{Untraced, WITH_REFERENCE, WITHOUT_REFERENCE, Wrapping, fsdp2_groups, is_before_release_5};
use crate::plan::{AttentionKernel, LossKernel, Plan, Preference, Recompute};
use crate::traced::Fsdp2Groups;
use foretell_models::operator_tables::{OperatorTable, TableError, is_tied, traced_architecture};
use foretell_models::{GraphOptions, Model, linear_layers};
use foretell_units::DataType;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Which linear layers have adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adapters {
    None,
    All,
    Attention,
    /// Others: some of all.
    Fewer,
    /// Others: some of attention's.
    FewerOfAttention,
}

impl Adapters {
    pub(super) fn of(plan: &Plan, model: &Model) -> Result<Self, Untraced> {
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

    /// The names in tables' keys, those that were wanted first: with dropout, in sixteen bits, and
    /// without either. FSDP casts adapters within a unit, and DeepSpeed all of them.
    fn names(self, weights: FrozenWeights, dropout: bool, are_cast: bool) -> Vec<String> {
        let name = match self {
            Self::None => return vec!["none".into()],
            Self::Attention | Self::FewerOfAttention => "attention",
            Self::All | Self::Fewer => "all",
        };
        let name = format!("{}-{name}", weights.prefix());
        // Neither was traced with the other.
        let special = [(dropout, "dropout"), (are_cast, "bf16")].into_iter().filter(|(is_wanted, _)| *is_wanted);
        let special: Vec<String> = special.map(|(_, word)| format!("{name}-{word}")).collect();
        special.into_iter().chain([name]).collect()
    }
}

/// The format of the frozen weights beside adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrozenWeights {
    /// That of the plan's precision.
    Usual,
    /// Four bits with double quantisation (QLoRA).
    FourBits,
    /// Eight bits, beside which columns with outliers are multiplied in sixteen (LLM.int8).
    EightBits,
}

impl FrozenWeights {
    /// How adapters' names begin in tables' keys.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Usual => "lora",
            Self::FourBits => "qlora",
            Self::EightBits => "int8lora",
        }
    }
}

/// The newest release of a framework that was traced.
const NEWEST: &str = "latest";

/// What stands in where experts run one by one and that was not traced with the rest.
const ONE_PRODUCT_FOR_A_LOOP: &str = "releases of transformers before 5 run a mixture's experts in a loop, which was not traced with the \
                                      rest: one product of all experts (release 5's `grouped_mm`) stands in, which takes far less time";

/// What stands in where a wrapper casts adapters with what is around them, which was not traced
/// with the rest.
const WIDE_FOR_NARROW_ADAPTERS: &str = "adapters that are cast to sixteen bits with the layers around them were not traced with the rest: \
                                        adapters in single precision, which cast their inputs, stand in";

/// The settings that a table is found by. Where one has several values, the first that was traced
/// counts.
pub(super) struct TableKey {
    /// `none`, `full` or `selective`.
    recomputes: &'static str,
    adapters: Adapters,
    weights: FrozenWeights,
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
    pub(super) fn of(
        plan: &Plan,
        model: &Model,
        tables: &BTreeMap<String, String>,
        adapters: Adapters,
        wrapper: Wrapping,
    ) -> Result<Self, Untraced> {
        let workload = &plan.workload;
        let is_sharded = plan.layout.zero == 3 && plan.layout.data > 1;
        let weights = match workload.base_bits {
            None => FrozenWeights::Usual,
            Some(4) if adapters != Adapters::None => FrozenWeights::FourBits,
            Some(8) if adapters != Adapters::None => FrozenWeights::EightBits,
            Some(bits @ (4 | 8)) => return Err(Untraced::new(format!("weights of {bits} bits without adapters"))),
            Some(bits) => return Err(Untraced::new(format!("weights of {bits} bits"))),
        };
        if workload.products.is_some() || workload.packed.is_some() || workload.unpadded.is_some_and(|share| share < 1.0) {
            return Err(Untraced::new("narrower products, packing, and padding that is left out"));
        }
        // FSDP2 casts parameters and inputs, and Accelerate leaves autocast out then.
        let is_fsdp2 = is_sharded && fsdp2_groups(tables) == Some(Fsdp2Groups::Accelerate);
        let precision: &[_] = match plan.precision {
            DataType::Fp32 => &["fp32"],
            DataType::Bf16 | DataType::Fp16 if wrapper == Wrapping::DeepSpeed => &["bf16"],
            DataType::Bf16 | DataType::Fp16 if is_fsdp2 && !workload.no_master_copy => &["bf16", "mixed"],
            DataType::Bf16 | DataType::Fp16 if adapters != Adapters::None => &["mixed"],
            DataType::Bf16 | DataType::Fp16 if workload.no_master_copy => &["bf16"],
            DataType::Bf16 | DataType::Fp16 if is_sharded => &["mixed"],
            DataType::Bf16 | DataType::Fp16 => &["autocast"],
            other => return Err(Untraced::new(format!("`precision: {other}`"))),
        };
        if plan.precision == DataType::Fp32 && tables.get("precision").is_some_and(|own| own != "fp32") {
            return Err(Untraced::new("`precision: fp32` under a framework whose steps were traced in sixteen bits"));
        }
        // Tables of DPO have the reference as a second stack of layers, which cannot be sharded;
        // and they are of TRL 1.x, which needs a later release of transformers than 4.
        let is_dpo = workload.preference == Some(Preference::Dpo);
        let is_of_trl = tables.get("framework").is_none_or(|framework| framework == "hf") && !is_before_release_5(tables);
        let has_reference_of_its_own = is_dpo && is_of_trl && !is_sharded;
        let mut stands_in = Vec::new();
        if plan.precision == DataType::Fp16 {
            stands_in.push("kernels in `fp16` are predicted as those in `bf16`".into());
        }
        if let Some(preference) = plan.workload.preference {
            if workload.loss != LossKernel::Plain {
                return Err(Untraced::new("a loss on preferences in parts"));
            }
            let name = preference.name();
            if preference.has_vocabulary() && !has_reference_of_its_own {
                stands_in.push(format!("`{name}`: the loss over the vocabulary is predicted as that of language modelling"));
            }
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
        let has_vocabulary = workload.preference.is_none_or(Preference::has_vocabulary);
        let (loss, kernels) = match workload.loss {
            _ if !has_vocabulary => ("reward", "hf"),
            LossKernel::Plain => ("model", "hf"),
            LossKernel::Chunked => ("chunked", "hf"),
            LossKernel::Liger => ("model", "liger"),
        };
        let given = |name: &str| tables.get(name).map(String::as_str);
        let family = || Untraced::new(format!("models of this kind (`{}` with its parts)", model.family()));
        let architecture = given("architecture").or_else(|| traced_architecture(model)).ok_or_else(family)?;
        // torchtune computes every loss in parts. Its tables are of Llama, and have that in their
        // own; where others stand in, they are those with such a loss.
        let is_torchtune = given("framework") == Some("torchtune") && given("compiled").is_none();
        let is_other_than_its = is_torchtune && matches!(architecture, "qwen2" | "qwen3") && kernels == "hf" && has_vocabulary;
        let loss = if is_other_than_its { "chunked" } else { loss };
        let given = |name: &str| given(name).filter(|_| !(name == "loss" && is_other_than_its));
        let dropout = if matches!(architecture, "gpt2" | "bert" | "gpt_bigcode" | "opt" | "t5") { "some" } else { "none" };
        let attention: &[_] = match workload.attention {
            // Its sinks are in no other attention of transformers.
            None if architecture == "gpt_oss" => &["eager"],
            None if precision == ["fp32"] => &["sdpa", "eager"],
            None | Some(AttentionKernel::Sdpa) => &["sdpa", "sdpa-repeat", "flash"],
            Some(AttentionKernel::Flash) => &["flash", "sdpa"],
            Some(AttentionKernel::Eager) => &["eager"],
        };
        // Before release 5 experts run one by one, in a loop.
        let experts: &[_] = match architecture {
            "mixtral" | "qwen2_moe" | "qwen3_moe" if is_before_release_5(tables) => &["eager", "grouped_mm"],
            "mixtral" | "qwen2_moe" | "qwen3_moe" | "gpt_oss" | "deepseek_v2" | "qwen3_next" | "granite_hybrid_moe" => {
                &["grouped_mm"]
            }
            _ => &["none"],
        };
        // Mistral's step is Llama's, whose tables are more.
        let architectures: &[_] = if architecture == "mistral" { &["mistral", "llama"] } else { &[architecture] };
        // With a head that shares the embedding's weights, texts have the same kernels and a table.
        let of_dpo = match workload.precomputed_reference {
            true if is_tied(model) => "trl-fused",
            true => WITHOUT_REFERENCE,
            false => WITH_REFERENCE,
        };
        let (with_reference, usual_loss) = ([of_dpo, "model"], [loss]);
        let usual = [
            ("framework", &["hf"][..]),
            ("precision", precision),
            ("architecture", architectures),
            ("dropout", &[dropout]),
            ("experts", experts),
            ("loss", if has_reference_of_its_own { &with_reference[..] } else { &usual_loss[..] }),
            ("kernels", &[kernels]),
            ("head", if is_tied(model) && has_vocabulary { &["tied", "usual"] } else { &["usual"] }),
            ("attention", attention),
            ("compiled", &["none"]),
        ];
        // What the framework's entry says of a key goes before the usual values.
        let values = usual.map(|(name, values)| {
            // What it says of the loss is of texts, and not of preferences.
            let is_own = name != "loss" || workload.preference.is_none();
            let own = given(name).into_iter().filter(|own| is_own && !values.contains(own));
            // An eager step is no stand-in for a compiled one.
            let values: &[&str] = if name == "compiled" && given(name).is_some() { &[] } else { values };
            (name, own.chain(values.iter().copied()).map(str::to_owned).collect())
        });
        let newest = Some(NEWEST).filter(|newest| given("version") != Some(newest));
        Ok(Self {
            recomputes,
            adapters,
            weights,
            has_dropout: workload.adapter_dropout,
            // TRL 1.x casts adapters beside quantised weights itself, and leaves norms as they are
            // stored.
            casts_adapters: is_sharded
                || wrapper == Wrapping::DeepSpeed
                || given("adapters") == Some("bf16")
                || (has_reference_of_its_own && weights == FrozenWeights::FourBits),
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
        let adapters = self.adapters.names(self.weights, self.has_dropout || !is_newest, self.casts_adapters);
        let more = [
            ("version", vec![version.to_owned()]),
            ("checkpoint", checkpoint.iter().map(|&name| name.to_owned()).collect()),
            ("adapter", adapters),
        ];
        self.values.iter().cloned().chain(more).collect()
    }

    /// Each word with the value that is wanted first.
    pub(super) fn wanted(&self) -> BTreeMap<String, String> {
        let version = self.versions.first().map_or(NEWEST, String::as_str);
        let first = |(word, values): (&str, Vec<String>)| Some((word.to_owned(), values.into_iter().next()?));
        self.of_version(version).into_iter().filter_map(first).collect()
    }

    pub(super) fn table(self, assumptions: &mut Vec<String>) -> Result<Arc<OperatorTable>, Untraced> {
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
            if *name == "experts" {
                sentences.push(ONE_PRODUCT_FOR_A_LOOP.into());
            }
            let matters = match *name {
                "attention" => self.states_attention && !taken.starts_with(wanted.as_str()),
                "adapter" => self.has_dropout && !taken.ends_with("-dropout"),
                "loss" | "kernels" | "precision" | "framework" | "head" => true,
                _ => false,
            };
            if matters {
                sentences.push(format!("{name} `{wanted}` was not traced with the rest: `{taken}` stands in"));
            }
        }
        let adapter = key.iter().find(|(name, _)| *name == "adapter").map_or("none", |(_, taken)| taken);
        if self.casts_adapters && adapter != "none" && !adapter.ends_with("-bf16") {
            sentences.push(WIDE_FOR_NARROW_ADAPTERS.into());
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
