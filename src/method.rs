//! What part of a model is trained, and with which of a framework's kernels: `--method`,
//! `--adapter` and related options. It knows plans, and no layouts or devices.

use crate::failure::{Failure, code};
use crate::rollout::RolloutChoices;
use clap::{Args, ValueEnum};
use foretell_models::{GraphOptions, Model, linear_layers};
use foretell_program::{AttentionKernel, Lora, LossKernel, NamePatterns, Plan, PolicyMethod, Preference};
use foretell_units::diagnostic::Mistake;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Command-line choices of what is trained.
#[derive(Debug, Clone, Default, PartialEq, Args)]
pub struct MethodChoices {
    /// What is trained: everything from the start (`pretrain`), everything of a trained model
    /// (`full`), adapters beside frozen weights (`lora`), or beside frozen weights of 4 bits
    /// (`qlora`); on preferences, everything or adapters (`dpo`, `orpo`, `kto`); or by
    /// reinforcement learning from rewards (`grpo`, `ppo`) [default: pretrain]
    #[arg(long, value_enum, value_name = "METHOD")]
    pub method: Option<Method>,
    /// Adapters: rank, alpha, targets (`all-linear`, `attention`, or names joined by `+`), dropout
    /// [default: rank=16,targets=all-linear]
    #[arg(long, value_name = "rank=16,...")]
    pub adapter: Option<Adapter>,
    /// Bits of the frozen weights beside adapters: 4, as `--method qlora` has, or 8 (LLM.int8); for
    /// preferences and rewards too [default: those of `--precision`]
    #[arg(long, value_name = "4|8", value_parser = base_bits)]
    pub base_bits: Option<u8>,
    /// How the loss over the vocabulary is computed: from all logits (`plain`), in parts
    /// (`chunked`), or with Liger's kernels [default: plain]
    #[arg(long, value_enum, value_name = "KERNEL")]
    pub loss: Option<Loss>,
    /// Generation of a step of `--method grpo` or `ppo`: prompts, samples (responses to each),
    /// prompt, response, response-p95 and response-max (tokens), framework (verl, trl, openrlhf,
    /// nemo-rl), placement (colocated, split:DEVICES), tensor, memory-share, concurrency,
    /// off-policy, offload, sleep, reference, reward, packing [default: what the answer names]
    #[arg(long, value_name = "prompts=64,samples=8,...")]
    pub rollout: Option<RolloutChoices>,
    /// Attention kernel, under a stack whose users choose it [default: the stack's]
    #[arg(long, value_enum, value_name = "KERNEL")]
    pub attention: Option<Attention>,
    /// Log-probabilities of the reference of `--method dpo` or `kto`: from the model with its
    /// adapters off or from a copy of it (`beside`), or from before the training (`precomputed`)
    /// [default: beside]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub reference: Option<Reference>,
}

/// When the reference of preferences runs, on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "`--reference` documents them")]
pub enum Reference {
    Beside,
    Precomputed,
}

/// Methods of training on the command line, and in plan files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// All parameters, from the start.
    Pretrain,
    /// All parameters of a trained model.
    Full,
    /// Low-rank adapters.
    Lora,
    /// Low-rank adapters beside weights of four bits.
    Qlora,
    /// Direct preference optimisation.
    Dpo,
    /// Odds ratio preference optimisation.
    Orpo,
    /// Kahneman-Tversky optimisation.
    Kto,
    /// A reward model, of pairs of answers.
    Reward,
    /// Group relative policy optimisation.
    Grpo,
    /// Proximal policy optimisation.
    Ppo,
}

impl Method {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pretrain => "pretrain",
            Self::Full => "full",
            Self::Lora => "lora",
            Self::Qlora => "qlora",
            Self::Dpo => Preference::Dpo.name(),
            Self::Orpo => Preference::Orpo.name(),
            Self::Kto => Preference::Kto.name(),
            Self::Reward => Preference::Reward.name(),
            Self::Grpo => PolicyMethod::Grpo.name(),
            Self::Ppo => PolicyMethod::Ppo.name(),
        }
    }

    /// The method of reinforcement learning, if it is one.
    pub fn policy(self) -> Option<PolicyMethod> {
        match self {
            Self::Grpo => Some(PolicyMethod::Grpo),
            Self::Ppo => Some(PolicyMethod::Ppo),
            _ => None,
        }
    }

    /// Whether a trained model is trained further (fine-tuned).
    pub fn is_fine_tuning(self) -> bool {
        self != Self::Pretrain
    }

    fn has_adapters(self) -> bool {
        matches!(self, Self::Lora | Self::Qlora)
    }

    /// The kind of preference training, if it is one.
    pub fn preference(self) -> Option<Preference> {
        match self {
            Self::Dpo => Some(Preference::Dpo),
            Self::Orpo => Some(Preference::Orpo),
            Self::Kto => Some(Preference::Kto),
            Self::Reward => Some(Preference::Reward),
            Self::Pretrain | Self::Full | Self::Lora | Self::Qlora | Self::Grpo | Self::Ppo => None,
        }
    }
}

/// Losses on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "`LossKernel` documents them")]
pub enum Loss {
    Plain,
    Chunked,
    Liger,
}

impl Loss {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => LossKernel::Plain.name(),
            Self::Chunked => LossKernel::Chunked.name(),
            Self::Liger => LossKernel::Liger.name(),
        }
    }
}

/// Attention kernels on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "`AttentionKernel` documents them")]
pub enum Attention {
    Flash,
    Sdpa,
    Eager,
}

/// Adapters on the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    rank: usize,
    alpha: Option<usize>,
    targets: Targets,
    has_dropout: bool,
}

/// The linear layers that have adapters.
#[derive(Debug, Clone, PartialEq)]
enum Targets {
    All,
    Attention,
    Named(Vec<String>),
}

/// Largest rank and alpha.
const MOST_RANK: usize = 1 << 16;

impl Default for Adapter {
    fn default() -> Self {
        Self { rank: Lora::USUAL_RANK, alpha: None, targets: Targets::All, has_dropout: false }
    }
}

impl fmt::Display for Adapter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let targets = match &self.targets {
            Targets::All => "all-linear".into(),
            Targets::Attention => "attention".into(),
            Targets::Named(names) => names.join("+"),
        };
        write!(formatter, "rank={},targets={targets}", self.rank)
    }
}

impl From<Preference> for Method {
    fn from(preference: Preference) -> Self {
        match preference {
            Preference::Dpo => Self::Dpo,
            Preference::Orpo => Self::Orpo,
            Preference::Kto => Self::Kto,
            Preference::Reward => Self::Reward,
        }
    }
}

impl From<PolicyMethod> for Method {
    fn from(method: PolicyMethod) -> Self {
        match method {
            PolicyMethod::Grpo => Self::Grpo,
            PolicyMethod::Ppo => Self::Ppo,
        }
    }
}

impl std::str::FromStr for Adapter {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        let hint = "write for example rank=16,targets=all-linear";
        let mut adapter = Self::default();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| Mistake::new(format!("`{part}` has no `=`"), hint))?;
            if seen.contains(&name) {
                return Err(Mistake::new(format!("`{name}` is given twice"), hint));
            }
            seen.push(name);
            let size = || {
                let size = value.parse::<usize>().ok().filter(|size| (1..=MOST_RANK).contains(size));
                size.ok_or_else(|| Mistake::new(format!("`{name}`: `{value}` is no whole number from 1 to {MOST_RANK}"), hint))
            };
            match name {
                "rank" | "r" => adapter.rank = size()?,
                "alpha" => adapter.alpha = Some(size()?),
                "targets" => {
                    adapter.targets = match value {
                        "all-linear" | "all" => Targets::All,
                        "attention" => Targets::Attention,
                        names if names.split('+').any(|name| name.trim().is_empty()) => {
                            let hint = "write all-linear, attention, or names joined by `+`, such as q_proj+v_proj";
                            return Err(Mistake::new(format!("`targets`: `{names}` has an empty name"), hint));
                        }
                        names => Targets::Named(names.split('+').map(str::to_owned).collect()),
                    }
                }
                "dropout" => {
                    let rate = value.parse::<f64>().ok().filter(|rate| (0.0..1.0).contains(rate));
                    adapter.has_dropout =
                        rate.ok_or_else(|| Mistake::new(format!("`dropout`: `{value}` is no rate"), "write 0.05"))? > 0.0;
                }
                _ => {
                    return Err(Mistake::new(format!("adapters have no `{name}`"), format!("{hint}, or alpha=32, dropout=0.05")));
                }
            }
        }
        Ok(adapter)
    }
}

impl Adapter {
    /// The adapters, at layers of a model.
    ///
    /// # Errors
    /// Fails if the model has no such layers.
    pub fn lora(&self, model: &Model) -> Result<Lora, Failure> {
        let graph = model.graph("model", &GraphOptions::ONE)?;
        let targets = match &self.targets {
            Targets::All => Lora::targets_named(["all"]),
            Targets::Named(names) => Lora::targets_named(names.iter().map(String::as_str)),
            Targets::Attention => {
                let pattern = ["*attn*", "*attention*"].into_iter().find(|pattern| {
                    let pattern = NamePatterns::from_iter([*pattern]);
                    linear_layers(&graph).any(|(name, _)| pattern.match_name(name))
                });
                let hint = "name layers, such as targets=fc1+fc2";
                let pattern =
                    pattern.ok_or_else(|| Failure::input(code::OPTION_VALUE, "the model has no attention").hint(hint))?;
                NamePatterns::from_iter([pattern])
            }
        };
        Ok(Lora { rank: self.rank, alpha: self.alpha.unwrap_or(Lora::usual_alpha(self.rank)), targets, ..Lora::default() })
    }
}

/// The positions of a chunk of our own stack's loss, where none are stated.
const LOSS_CHUNK: usize = 1024;

/// Parses the bits of frozen weights.
fn base_bits(text: &str) -> Result<u8, Mistake> {
    match text {
        "4" => Ok(4),
        "8" => Ok(8),
        _ => Err(Mistake::new(format!("frozen weights of {text} bits are not planned"), "write 4 or 8, or leave it out")),
    }
}

impl MethodChoices {
    /// Whether a trained model is trained further (fine-tuned).
    pub fn is_fine_tuning(&self) -> bool {
        self.method.is_some_and(Method::is_fine_tuning)
    }

    /// Whether a step generates the data that it trains on.
    pub fn generates(&self) -> bool {
        self.method.is_some_and(|method| method.policy().is_some())
    }

    /// Writes the choices into a plan, and adds the defaults that matter to `taken`.
    pub fn apply(&self, plan: &mut Plan, model: &Model, taken: &mut Vec<String>) -> Result<(), Failure> {
        let method = self.method.unwrap_or(Method::Pretrain);
        let preference = method.preference();
        // Preference and reward training update all parameters, unless adapters are described.
        let may_have_adapters = preference.is_some() || method.policy().is_some();
        let has_adapters = method.has_adapters() || may_have_adapters && self.adapter.is_some();
        if self.adapter.is_some() && !has_adapters {
            return Err(Failure::input(code::OPTION_VALUE, "`--adapter` without adapters")
                .hint("add `--method lora` or `--method qlora`"));
        }
        if self.rollout.is_some() && method.policy().is_none() {
            return Err(Failure::input(code::OPTION_VALUE, "`--rollout` without a method that generates")
                .hint("add `--method grpo` or `--method ppo`"));
        }
        plan.workload.preference = preference;
        if self.reference.is_some() && !preference.is_some_and(Preference::has_reference) {
            return Err(Failure::input(code::OPTION_VALUE, "`--reference` without a reference model")
                .hint("add `--method dpo` or `--method kto`"));
        }
        plan.workload.precomputed_reference = self.reference == Some(Reference::Precomputed);
        if has_adapters {
            let adapter = self.adapter.clone().unwrap_or_else(|| {
                taken.push(format!("--adapter {}", Adapter::default()));
                Adapter::default()
            });
            plan.training.lora = Some(adapter.lora(model)?);
            // Targets that match no layer are refused here, before any search.
            plan.training.graph(model, "model", &GraphOptions::ONE)?;
            plan.workload.adapter_dropout = adapter.has_dropout;
        }
        if self.base_bits.is_some() && !has_adapters {
            return Err(Failure::input(code::OPTION_VALUE, "`--base-bits` without adapters")
                .hint("add `--adapter rank=16`, or use `--method qlora`"));
        }
        if method == Method::Qlora
            && let Some(bits) = self.base_bits.filter(|bits| *bits != 4)
        {
            return Err(Failure::input(code::OPTION_VALUE, format!("`--base-bits {bits}` beside `--method qlora`, which has 4"))
                .hint(format!("write `--method lora --base-bits {bits}`")));
        }
        plan.workload.base_bits = if method == Method::Qlora { Some(4) } else { self.base_bits };
        plan.workload.loss = match self.loss {
            None | Some(Loss::Plain) => LossKernel::Plain,
            // In our own stack chunks are a matter of the layout.
            Some(Loss::Chunked) if plan.stack.is_own() => {
                if plan.layout.loss_chunk.is_none() {
                    plan.layout.loss_chunk = Some(LOSS_CHUNK);
                    taken.push(format!("--fix loss_chunk={LOSS_CHUNK}"));
                }
                LossKernel::Plain
            }
            Some(Loss::Chunked) => LossKernel::Chunked,
            Some(Loss::Liger) => LossKernel::Liger,
        };
        plan.workload.attention = self.attention.map(|kernel| match kernel {
            Attention::Flash => AttentionKernel::Flash,
            Attention::Sdpa => AttentionKernel::Sdpa,
            Attention::Eager => AttentionKernel::Eager,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_read_or_refused() {
        let adapter: Adapter = "rank=8,alpha=16,targets=q_proj+v_proj,dropout=0.05".parse().expect("it is well formed");
        assert_eq!((adapter.rank, adapter.alpha, adapter.has_dropout), (8, Some(16), true));
        assert_eq!(adapter.targets, Targets::Named(vec!["q_proj".into(), "v_proj".into()]));
        for wrong in ["rank", "rank=x", "rank=0", "size=4", "rank=4,rank=8", "dropout=2", "targets=", "targets=+", "targets=fc1+"]
        {
            assert!(wrong.parse::<Adapter>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_chunked_loss_is_of_the_layout_in_our_own_stack() {
        let model = Model::named("gpt2").expect("it is in the zoo");
        let choices = MethodChoices { loss: Some(Loss::Chunked), ..MethodChoices::default() };
        let applied = |stack: &str, loss_chunk| {
            let mut plan = Plan::new(foretell_program::Layout::default(), 8);
            (plan.stack, plan.layout.loss_chunk) = (foretell_program::Stack::new(stack), loss_chunk);
            let mut taken = Vec::new();
            choices.apply(&mut plan, &model, &mut taken).expect("it applies");
            (plan.layout.loss_chunk, plan.workload.loss, taken)
        };
        assert_eq!(applied("foretell", None), (Some(1024), LossKernel::Plain, vec!["--fix loss_chunk=1024".into()]));
        assert_eq!(applied("foretell", Some(64)), (Some(64), LossKernel::Plain, Vec::new()));
        assert_eq!(applied("hf-trainer", None), (None, LossKernel::Chunked, Vec::new()));
    }

    #[test]
    fn adapters_without_a_method_are_refused() {
        let model = Model::named("gpt2").expect("it is in the zoo");
        let mut plan = Plan::new(foretell_program::Layout::default(), 8);
        let choices = MethodChoices { adapter: Some(Adapter::default()), ..MethodChoices::default() };
        assert!(choices.apply(&mut plan, &model, &mut Vec::new()).is_err());
        let contradicting = MethodChoices { method: Some(Method::Qlora), base_bits: Some(8), ..MethodChoices::default() };
        assert!(contradicting.apply(&mut plan.clone(), &model, &mut Vec::new()).is_err());
        for method in [None, Some(Method::Full), Some(Method::Orpo), Some(Method::Grpo)] {
            for reference in [Reference::Beside, Reference::Precomputed].map(Some) {
                let without = MethodChoices { method, reference, ..MethodChoices::default() };
                assert!(without.apply(&mut plan.clone(), &model, &mut Vec::new()).is_err(), "{method:?}, {reference:?}");
            }
        }
        let choices = MethodChoices { method: Some(Method::Qlora), ..MethodChoices::default() };
        choices.apply(&mut plan, &model, &mut Vec::new()).expect("it applies");
        assert_eq!(plan.training.lora.as_ref().map(|lora| lora.rank), Some(Lora::USUAL_RANK));
        assert_eq!(plan.workload.base_bits, Some(4));
    }
}
