//! Parameter servers: ranks that hold the parameters and the optimizer's state. Workers push
//! gradients to them and pull parameters (Li et al., "Scaling Distributed Machine Learning with the
//! Parameter Server", 2014).
//!
//! A server has the layout of a worker: one rank for each part that `tensor`, `context`, `expert`
//! and `pipeline` cut the model into. With n servers, each of these ranks holds one of n equal
//! parts of its buckets.

use super::local_sgd::{CompressionForm, parse_compression};
use foretell_models::Compression;
use foretell_units::diagnostic::Mistake;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// Parameter servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ParameterServer {
    /// The number of servers.
    pub servers: usize,
    /// How many steps a worker may be ahead of the slowest one.
    pub staleness: Staleness,
    /// Whether each worker's ranks are also a server. Otherwise servers have ranks of their own.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside_workers: bool,
    /// The format in which gradients are pushed; single precision if `None`. A worker adds the
    /// rounding error to its next gradients.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// The number of workers whose gradients a step does not wait for. Late gradients are dropped
    /// (Chen et al. 2016, "Revisiting Distributed Synchronous SGD").
    #[serde(skip_serializing_if = "is_zero")]
    pub backup_workers: usize,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// How many steps a worker may be ahead of the slowest one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", into = "StalenessForm")]
pub enum Staleness {
    /// None: servers wait for the gradients of all workers, and make one step with their sum.
    #[default]
    None,
    /// At most this number of steps.
    Steps(usize),
    /// Any number of steps.
    Unbounded,
}

/// The form of parameter servers in a plan file.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ParameterServerForm {
    /// The number of servers.
    servers: usize,
    /// How many steps a worker may be ahead of the slowest one, or `unbounded`.
    #[serde(default, deserialize_with = "staleness_form")]
    staleness: StalenessForm,
    /// Whether each worker's ranks are also a server. Otherwise servers have ranks of their own.
    #[serde(default)]
    beside_workers: bool,
    /// The format in which gradients are pushed: `fp32` (or `none`) unless stated. A worker adds
    /// the rounding error to its next gradients.
    #[schemars(with = "Option<CompressionForm>")]
    compression: Option<String>,
    /// The number of workers whose gradients a step does not wait for. Late gradients are dropped.
    #[serde(default)]
    backup_workers: i64,
}

/// Reads the form of a staleness. Records a mistake with a hint first, since serde's own error
/// about another form has none.
fn staleness_form<'de, D: Deserializer<'de>>(deserializer: D) -> Result<StalenessForm, D::Error> {
    Mistake::new("this is no staleness", "use a number of steps such as 2, or `unbounded`").record();
    StalenessForm::deserialize(deserializer)
}

/// The form of a staleness: a number of steps, or a word.
#[derive(Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "this is no staleness")]
enum StalenessForm {
    Steps(i64),
    Word(String),
}

impl Default for StalenessForm {
    fn default() -> Self {
        Self::Steps(0)
    }
}

impl From<Staleness> for StalenessForm {
    fn from(staleness: Staleness) -> Self {
        match staleness {
            Staleness::None => Self::Steps(0),
            Staleness::Steps(steps) => Self::Steps(i64::try_from(steps).unwrap_or(i64::MAX)),
            Staleness::Unbounded => Self::Word("unbounded".into()),
        }
    }
}

impl TryFrom<ParameterServerForm> for ParameterServer {
    type Error = Mistake;

    fn try_from(form: ParameterServerForm) -> Result<Self, Mistake> {
        let ParameterServerForm { servers, staleness, beside_workers, compression, backup_workers } = form;
        let staleness = match staleness {
            StalenessForm::Steps(0) => Staleness::None,
            StalenessForm::Steps(steps) => match usize::try_from(steps) {
                Ok(steps) => Staleness::Steps(steps),
                Err(_) => {
                    let message = format!("a staleness of {steps} steps is below 0");
                    return Err(Mistake::new(message, "use `staleness: 0` or more"));
                }
            },
            StalenessForm::Word(word) if word == "unbounded" => Staleness::Unbounded,
            StalenessForm::Word(word) => {
                return Err(Mistake::new(format!("`{word}` is no staleness"), "use a number of steps, or `unbounded`"));
            }
        };
        let compression = compression.as_deref().map(parse_compression).transpose()?.flatten();
        let Ok(backup_workers) = usize::try_from(backup_workers) else {
            let message = format!("{backup_workers} backup workers are below 0");
            return Err(Mistake::new(message, "use `backup_workers: 0` or more"));
        };
        Ok(Self { servers, staleness, beside_workers, compression, backup_workers })
    }
}
