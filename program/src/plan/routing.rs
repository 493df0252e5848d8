//! How evenly tokens choose the experts of a mixture: a fact about a run that its costs depend on.
//! It must not know devices, or which rank holds which expert.

use super::{Plan, PlanError};
use foretell_units::diagnostic::{Mistake, deserialize_from};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// How evenly tokens choose the experts of a mixture. In plan files `balanced`, `lognormal:0.5`,
/// `zipf:1.2`, or measured loads: a list of one number an expert, or a list of such lists, one a
/// layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(try_from = "RoutingForm", into = "RoutingForm")]
pub enum Routing {
    /// All experts receive equally many tokens.
    #[default]
    Balanced,
    /// Loads are the quantiles of a log-normal distribution with this standard deviation of the
    /// logarithm. Which expert is popular differs by layer.
    Lognormal(f64),
    /// The load of the i-th most popular expert, counted from 1, is proportional to `i` to the
    /// power of minus this value. Which expert is popular differs by layer.
    Zipf(f64),
    /// Measured loads, in the order of the experts, layer by layer.
    Measured(Arc<[Vec<f64>]>),
}

/// The largest parameter of a distribution. It already gives one expert as many tokens as an expert
/// can get.
const MOST_SKEW: f64 = 10.0;

const HINT: &str = "use `balanced`, `lognormal:SIGMA` or `zipf:S` with a number from 0 to 10, or a file of measured loads";

impl Routing {
    /// Loads as they were measured: one number an expert in each layer.
    ///
    /// # Errors
    /// A mistake if the lists differ in length, or if the loads of a list are no valid shares.
    pub fn measured(layers: Vec<Vec<f64>>) -> Result<Self, Mistake> {
        let hint = "give one number of tokens an expert, or a list of such lists, one a layer";
        let experts = layers.first().map_or(0, Vec::len);
        if experts == 0 {
            return Err(Mistake::new("there is no load of an expert", hint));
        }
        for (layer, loads) in layers.iter().enumerate() {
            if loads.len() != experts {
                let count = loads.len();
                let message = format!("layer {layer} has loads of {count} experts, layer 0 of {experts}");
                return Err(Mistake::new(message, hint));
            }
            if let Some(wrong) = loads.iter().find(|load| !(load.is_finite() && **load >= 0.0)) {
                let message = format!("layer {layer} has the load {wrong}");
                return Err(Mistake::new(message, "loads are finite and not negative"));
            }
            let sum: f64 = loads.iter().sum();
            if !(sum.is_finite() && sum > 0.0) {
                let message = format!("the loads of layer {layer} sum to {sum}");
                return Err(Mistake::new(message, "some expert receives tokens"));
            }
        }
        Ok(Self::Measured(layers.into()))
    }

    /// Whether all experts receive equally many tokens.
    pub fn is_balanced(&self) -> bool {
        *self == Self::Balanced
    }
}

impl Plan {
    /// Refuses a skewed routing that does not fit a model with `experts` experts (`None` if it has
    /// no mixtures) in each of `layers` mixture layers, and any skewed routing under our own
    /// executor.
    ///
    /// # Errors
    /// [`PlanError::Invalid`] with a hint.
    pub fn validate_routing(&self, experts: Option<usize>, layers: usize) -> Result<(), PlanError> {
        let routing = &self.workload.routing;
        let refuse =
            |reason: String, hint: &str| Err(PlanError::Invalid { field: "workload.routing", reason, hint: hint.into() });
        if routing.is_balanced() {
            return Ok(());
        }
        let Some(experts) = experts else {
            return refuse("the model has no experts that tokens could choose".into(), "leave `routing` out");
        };
        if self.stack.is_own() {
            let reason = "our executor computes every slot of an expert, filled or not, and drops tokens that find none";
            return refuse(reason.into(), "leave `routing` out, or name another `stack`");
        }
        match routing {
            Routing::Measured(measured) if measured.iter().any(|loads| loads.len() != experts) => {
                let count = measured.first().map_or(0, Vec::len);
                refuse(format!("it has the loads of {count} experts, and the model {experts}"), "give one load an expert")
            }
            Routing::Measured(measured) if measured.len() > layers.max(1) => {
                let count = measured.len();
                refuse(
                    format!("it has the loads of {count} layers, and the model {layers} with experts"),
                    "give one list a layer, or one for all",
                )
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Routing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Routing::Balanced => formatter.write_str("balanced"),
            Routing::Lognormal(sigma) => write!(formatter, "lognormal:{sigma}"),
            Routing::Zipf(exponent) => write!(formatter, "zipf:{exponent}"),
            Routing::Measured(layers) if layers.len() == 1 => formatter.write_str("measured loads"),
            Routing::Measured(layers) => write!(formatter, "measured loads of {} layers", layers.len()),
        }
    }
}

impl FromStr for Routing {
    type Err = Mistake;

    /// Parses `balanced`, `lognormal:SIGMA` or `zipf:S`. Measured loads have no such form.
    fn from_str(text: &str) -> Result<Self, Mistake> {
        let wrong = || Mistake::new(format!("`{text}` is no routing"), HINT);
        if text.trim() == "balanced" {
            return Ok(Self::Balanced);
        }
        let (law, skew) = text.trim().split_once(':').ok_or_else(wrong)?;
        let skew: f64 = skew.trim().parse().map_err(|_| wrong())?;
        if !(0.0..=MOST_SKEW).contains(&skew) {
            return Err(wrong());
        }
        match law.trim() {
            "lognormal" => Ok(Self::Lognormal(skew)),
            "zipf" => Ok(Self::Zipf(skew)),
            _ => Err(wrong()),
        }
    }
}

/// Serde's message for a value that has none of the forms of [`RoutingForm`], and the hint.
const NO_FORM: &str = "this is no routing";
const FORMS: &str = "use `balanced`, `lognormal:0.5`, `zipf:1.2`, or lists of measured loads";

/// The forms of a routing in files.
#[derive(Serialize, Deserialize)]
#[serde(untagged, expecting = "this is no routing")]
enum RoutingForm {
    Word(String),
    Loads(Vec<f64>),
    LoadsOfLayers(Vec<Vec<f64>>),
}

impl<'de> Deserialize<'de> for Routing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Mistake::new(NO_FORM, FORMS).record();
        deserialize_from::<RoutingForm, _, _>(deserializer)
    }
}

impl TryFrom<RoutingForm> for Routing {
    type Error = Mistake;

    fn try_from(form: RoutingForm) -> Result<Self, Mistake> {
        match form {
            RoutingForm::Word(word) => word.parse(),
            RoutingForm::Loads(loads) => Self::measured(vec![loads]),
            RoutingForm::LoadsOfLayers(layers) => Self::measured(layers),
        }
    }
}

impl From<Routing> for RoutingForm {
    fn from(routing: Routing) -> Self {
        match routing {
            Routing::Measured(layers) => match &*layers {
                [loads] => Self::Loads(loads.clone()),
                layers => Self::LoadsOfLayers(layers.to_vec()),
            },
            word => Self::Word(word.to_string()),
        }
    }
}

impl JsonSchema for Routing {
    fn schema_name() -> Cow<'static, str> {
        "Routing".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let loads = || json_schema!({ "type": "array", "items": { "type": "number", "minimum": 0.0 } });
        json_schema!({
            "description": "How evenly tokens choose the experts of a mixture: `balanced`, `lognormal:SIGMA`, `zipf:S`, or \
                            measured loads, one number an expert or a list of such lists, one a layer.",
            "anyOf": [{ "type": "string" }, loads(), { "type": "array", "items": loads() }],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Layout, Stack};

    #[test]
    fn every_form_reads_back_the_same() {
        for text in ["\"balanced\"", "\"lognormal:0.5\"", "\"zipf:1.2\"", "[1.0,3.0]", "[[1.0,3.0],[2.0,2.5]]"] {
            let routing: Routing = serde_json::from_str(text).expect("well formed");
            assert_eq!(serde_json::to_string(&routing).expect("it can be written"), text);
        }
    }

    #[test]
    fn wrong_routings_are_refused_with_a_hint() {
        let texts = [
            "\"skewed\"",
            "\"zipf\"",
            "\"zipf:-1\"",
            "\"zipf:NaN\"",
            "\"lognormal:-0.1\"",
            "\"lognormal:1e9\"",
            "\"lognormal:many\"",
            "3",
            "[]",
            "[[]]",
            "[0.0,0.0]",
            "[1.0,-1.0]",
            "[1e308,1e308]",
            "[[1.0,2.0],[1.0]]",
        ];
        for text in texts {
            let error = serde_json::from_str::<Routing>(text).expect_err("it is wrong").to_string();
            assert!(Mistake::recorded(&error).is_some(), "{text}: {error}");
        }
        assert!(Routing::measured(vec![vec![f64::NAN, 1.0]]).is_err_and(|error| error.hint.contains("finite")));
    }

    #[test]
    fn a_skew_needs_a_model_with_experts_and_another_stack() {
        let mut plan = Plan { stack: Stack::new("megatron-core"), ..Plan::new(Layout::default(), 8) };
        assert_eq!(plan.validate_routing(None, 0), Ok(()));
        plan.workload.routing = Routing::Zipf(1.0);
        assert_eq!(plan.validate_routing(Some(8), 2), Ok(()));
        assert!(plan.validate_routing(None, 0).is_err());
        plan.workload.routing = Routing::measured(vec![vec![1.0; 4]]).expect("sound");
        assert_eq!(plan.validate_routing(Some(4), 2), Ok(()));
        assert!(plan.validate_routing(Some(8), 2).is_err());
        plan.workload.routing = Routing::measured(vec![vec![1.0; 4]; 2]).expect("sound");
        assert_eq!(plan.validate_routing(Some(4), 2), Ok(()));
        assert!(plan.validate_routing(Some(4), 1).is_err());
        plan.stack = Stack::default();
        assert!(plan.validate_routing(Some(4), 2).is_err());
    }
}
