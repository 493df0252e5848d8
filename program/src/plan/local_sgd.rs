//! Local SGD: the rounds, the outer optimizer, and how exchanges are spread over a round
//! (Streaming DiLoCo).

use super::PlanError;
use foretell_models::Compression;
use foretell_units::diagnostic::Mistake;
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// The most kinds of steps in a round. Each kind has its own Program.
const MOST_KINDS: usize = 1024;

/// The share of its own parameters that a replica keeps, if its exchanges overlap with steps and
/// the plan does not state the share.
const USUAL_MIXING: f32 = 0.5;

/// Local SGD (Stich 2019), DiLoCo with an outer optimizer (Douillard et al. 2023), and Streaming
/// DiLoCo in fragments (Douillard et al. 2025, arXiv 2501.18512).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct LocalSgd {
    /// The number of steps in a round. All parameters are exchanged once in a round.
    pub every: usize,
    /// The optimizer of the outer step, whose gradient is the mean of the replicas' changes; plain
    /// averaging if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outer: Option<OuterOptimizer>,
    /// The number of fragments of the parameters. Block i of the model belongs to fragment i modulo
    /// this number. Fragments are exchanged one after the other, at equal distances in a round.
    #[serde(skip_serializing_if = "is_one")]
    pub fragments: usize,
    /// The number of steps between taking a fragment's changes and applying their mean. The changes
    /// are sent in this number of parts, one during each of these steps, overlapped with its
    /// kernels.
    #[serde(skip_serializing_if = "is_zero")]
    pub overlap: usize,
    /// The share of its own parameters that a replica keeps when it applies an exchange, from 0 up
    /// to, but not including, 1. `None`: 0.5 with an `overlap`, else 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mixing: Option<f32>,
    /// The format in which changes are sent; single precision if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
}

/// The optimizer of the outer step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "OuterForm")]
pub struct OuterOptimizer {
    /// The rule.
    pub optimizer: OuterRule,
    /// The learning rate.
    pub learning_rate: f32,
    /// The momentum; 0 for none.
    pub momentum: f32,
}

/// The rule of the outer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OuterRule {
    /// Gradient descent, with momentum if there is one.
    #[default]
    Sgd,
    /// Gradient descent with Nesterov's momentum, as in DiLoCo.
    Nesterov,
}

impl Default for OuterOptimizer {
    /// Plain averaging of parameters.
    fn default() -> Self {
        Self { optimizer: OuterRule::Sgd, learning_rate: 1.0, momentum: 0.0 }
    }
}

impl LocalSgd {
    /// Plain averaging of all parameters after every `every` steps.
    pub fn new(every: usize) -> Self {
        Self { every, outer: None, fragments: 1, overlap: 0, mixing: None, compression: None }
    }

    /// The share of its own parameters that a replica keeps when it applies an exchange.
    pub fn mixing(&self) -> f32 {
        self.mixing.unwrap_or_else(|| self.usual_mixing())
    }

    fn usual_mixing(&self) -> f32 {
        if self.overlap > 0 { USUAL_MIXING } else { 0.0 }
    }

    /// The optimizer of the outer step. Exchanges that are overlapped, mixed or compressed need
    /// outer parameters, since they send differences to these. Without a stated optimizer they have
    /// plain averaging.
    pub(super) fn effective_outer(&self) -> Option<OuterOptimizer> {
        let needs_one = self.overlap > 0 || self.mixing() > 0.0 || self.compression.is_some();
        self.outer.or_else(|| needs_one.then(OuterOptimizer::default))
    }

    /// Whether replicas still hold different parameters at the end of a round.
    pub(super) fn keeps_replicas_apart(&self) -> bool {
        self.fragments > 1 || self.mixing() > 0.0
    }

    /// The mode in normal form.
    pub(super) fn normalised(self) -> Self {
        let outer = self.outer.filter(|&outer| outer != OuterOptimizer { learning_rate: 1.0, ..OuterOptimizer::default() });
        let mixing = self.mixing.filter(|&share| share != self.usual_mixing());
        Self { outer, mixing, ..self }
    }

    /// Refuses invalid values. `replicas` is the number of replicas that exchange.
    pub(super) fn validate(&self, field: &'static str, replicas: usize) -> Result<(), PlanError> {
        let refuse = |reason: String, hint: String| Err(PlanError::Invalid { field, reason, hint });
        let Self { every, fragments, overlap, .. } = *self;
        if let Some(OuterOptimizer { optimizer, learning_rate, momentum }) = self.outer {
            if !(learning_rate > 0.0 && learning_rate.is_finite()) {
                let hint = "use `learning_rate: 0.7`, or leave it out";
                return refuse("the outer learning rate is not above 0".into(), hint.into());
            }
            if !(0.0..1.0).contains(&momentum) {
                let reason = "the outer momentum is not from 0 up to, but not including, 1";
                return refuse(reason.into(), "use `momentum: 0.9`".into());
            }
            if optimizer == OuterRule::Nesterov && momentum == 0.0 {
                return refuse("Nesterov's rule needs a momentum".into(), "use `momentum: 0.9`, or `optimizer: sgd`".into());
            }
        }
        if fragments == 0 {
            let hint = "use `fragments: 1` or more, or leave it out";
            return refuse("parameters in 0 fragments are never exchanged".into(), hint.into());
        }
        if fragments > every {
            return refuse(
                format!("{fragments} fragments take turns in a round of {every} steps, and each needs a step of its own"),
                format!("use `fragments: {every}` or less, or a larger `every`"),
            );
        }
        let apart = every / fragments;
        if overlap >= apart {
            return refuse(
                format!("with an `overlap` of {overlap} an exchange would not end before the next one, {apart} steps later"),
                format!("use `overlap: {}` or less, fewer fragments, or a larger `every`", apart - 1),
            );
        }
        if fragments.saturating_mul(overlap + 1) > MOST_KINDS {
            return refuse(
                format!("{fragments} fragments with an `overlap` of {overlap} make more than {MOST_KINDS} kinds of steps"),
                "use fewer fragments or a smaller `overlap`".into(),
            );
        }
        if !(0.0..1.0).contains(&self.mixing()) {
            let reason = "the share of its own parameters that a replica keeps is not from 0 up to, but not including, 1";
            return refuse(reason.into(), "use `mixing: 0.5`, or leave it out".into());
        }
        if self.compression.is_some() && overlap == 1 && replicas > 2 {
            return refuse(
                "between more than two replicas compressed changes are added halfway, which takes a step of its own".into(),
                "use `overlap: 2` or more, `overlap: 0`, or no `compression`".into(),
            );
        }
        Ok(())
    }
}

fn is_one(number: &usize) -> bool {
    *number == 1
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// The form of local SGD in a plan file.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LocalSgdForm {
    /// The number of steps in a round.
    every: usize,
    /// The optimizer of the outer step; plain averaging without it.
    outer: Option<OuterOptimizer>,
    /// The number of fragments that are exchanged one after the other in a round; 1 without it.
    #[serde(default = "one")]
    fragments: usize,
    /// The number of steps between taking a fragment's changes and applying their mean.
    #[serde(default)]
    overlap: usize,
    /// The share of its own parameters that a replica keeps when it applies an exchange, from 0 up
    /// to, but not including, 1: 0.5 with an `overlap`, else 0, if it is left out.
    mixing: Option<f32>,
    /// The format in which changes are sent.
    #[schemars(with = "Option<CompressionForm>")]
    compression: Option<String>,
    #[schemars(skip)]
    backup_workers: Option<IgnoredAny>,
}

/// The formats in which changes and gradients are sent.
#[derive(JsonSchema)]
#[serde(rename_all = "snake_case")]
#[expect(dead_code, reason = "it describes a string")]
pub(super) enum CompressionForm {
    /// Single precision: no compression.
    Fp32,
    /// Another name of `fp32`.
    None,
    /// bfloat16.
    Bf16,
    /// Half precision.
    Fp16,
    /// Integers of eight bits, with one factor for every 256 elements.
    Int8,
}

fn one() -> usize {
    1
}

/// The compression that a plan file names; `None` for single precision.
pub(super) fn parse_compression(text: &str) -> Result<Option<Compression>, Mistake> {
    if ["fp32", "none"].contains(&text) {
        return Ok(None);
    }
    let formats = [Compression::Bf16, Compression::Fp16, Compression::Int8];
    let found = formats.into_iter().find(|format| format.name() == text);
    found.map(Some).ok_or_else(|| {
        let message = format!("`{text}` is no format for numbers that travel");
        Mistake::new(message, "use `fp32`, `bf16`, `fp16` or `int8` as `compression`")
    })
}

/// The mistake of a plan that states backup workers in a mode without servers, which alone could
/// drop late gradients.
pub(super) fn no_backup_workers() -> Mistake {
    let hint = "leave it out, or use `mode: {parameter_server: {servers: 1, backup_workers: 1}}`";
    Mistake::new("only `parameter_server` has `backup_workers`", hint)
}

impl TryFrom<LocalSgdForm> for LocalSgd {
    type Error = Mistake;

    fn try_from(form: LocalSgdForm) -> Result<Self, Mistake> {
        let LocalSgdForm { every, outer, fragments, overlap, mixing, compression, backup_workers } = form;
        if backup_workers.is_some() {
            return Err(no_backup_workers());
        }
        let compression = compression.as_deref().map(parse_compression).transpose()?.flatten();
        Ok(Self { every, outer, fragments, overlap, mixing, compression })
    }
}

/// The form of the outer optimizer in a plan file.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct OuterForm {
    /// The rule.
    #[serde(default)]
    optimizer: OuterRule,
    /// The learning rate; 1 for `sgd` and 0.7 for `nesterov` if it is left out.
    learning_rate: Option<f32>,
    /// The momentum; 0 for `sgd` and 0.9 for `nesterov` if it is left out.
    momentum: Option<f32>,
}

impl From<OuterForm> for OuterOptimizer {
    /// Fills in what the file leaves out: DiLoCo's values with Nesterov's rule, else those of plain
    /// averaging.
    fn from(OuterForm { optimizer, learning_rate, momentum }: OuterForm) -> Self {
        let (usual_rate, usual_momentum) = match optimizer {
            OuterRule::Sgd => (1.0, 0.0),
            OuterRule::Nesterov => (0.7, 0.9),
        };
        Self { optimizer, learning_rate: learning_rate.unwrap_or(usual_rate), momentum: momentum.unwrap_or(usual_momentum) }
    }
}
