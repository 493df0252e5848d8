//! Parameter servers: ranks that hold the parameters and the optimizer's state. Workers push
//! gradients to them and pull parameters (Li et al., "Scaling Distributed Machine Learning with the
//! Parameter Server", 2014).
//!
//! A server is laid out as a worker is: it has a rank for each part that `tensor`, `context`,
//! `expert` and `pipeline` cut the model into, and each of these holds one of as many equal parts
//! of its buckets as there are servers.

use super::{Mode, Plan, PlanError};
use crate::mesh::{Axis, Mesh, StageMesh};
use foretell_units::DataType;
use serde::{Deserialize, Serialize};

/// Parameter servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ParameterServer {
    /// The number of servers.
    pub servers: usize,
    /// How far workers may be apart.
    pub staleness: Staleness,
    /// Whether each worker's ranks are also a server. Otherwise servers have ranks of their own.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub beside_workers: bool,
}

/// How many steps a worker may be ahead of the slowest one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", into = "StalenessForm")]
pub enum Staleness {
    /// None: servers wait for the gradients of all workers, and make one step with their sum.
    #[default]
    None,
    /// At most so many steps.
    Steps(usize),
    /// Any number of steps.
    Unbounded,
}

impl Mode {
    /// The number of parameter servers that have ranks of their own; 0 without any.
    pub fn servers(&self) -> usize {
        match self {
            Mode::ParameterServer(mode) if !mode.beside_workers => mode.servers,
            _ => 0,
        }
    }
}

impl Plan {
    /// The plan in normal form: plans that mean the same, but for the form of a model or a device,
    /// are equal.
    pub(crate) fn normalised(&self) -> Self {
        let mut plan = Self { layout: self.layout.clone().normalised(), mode: self.mode.normalised(), ..self.clone() };
        // A server beside each worker holds one part of the optimizer's state. Pushes of gradients
        // to all of them are a reduce-scatter, and pulls an all-gather: this is ZeRO 1.
        if matches!(plan.mode, Mode::ParameterServer(mode) if mode.beside_workers && mode.staleness == Staleness::None) {
            plan.mode = Mode::Synchronous;
            plan.layout.zero = 1;
            plan.overlap.parameters = true;
        }
        plan
    }

    /// The mesh of workers, with a stage of servers for each of their stages: that of a worker,
    /// with the servers along `data`. The servers' stages follow in the same order.
    pub(super) fn mesh_with_servers(&self, worker: StageMesh, order: &[Axis]) -> Option<Mesh> {
        let size = |axis| if axis == Axis::Data { self.mode.servers() } else { worker.size(axis) };
        let server = StageMesh::new(size, worker.distinct_samples().get(..1)?)?;
        let stages = self.layout.pipeline;
        let mut all = vec![worker; stages];
        all.extend(vec![server; stages]);
        Mesh::of_stages(all, order)
    }

    /// Refuses parameter servers that this version cannot compile with the rest of the plan.
    pub(super) fn validate_servers(&self, mode: ParameterServer) -> Result<(), PlanError> {
        let field = "mode.parameter_server";
        let refuse = |reason: &str, hint: &str| Err(PlanError::Invalid { field, reason: reason.into(), hint: hint.into() });
        if mode.servers == 0 {
            return refuse("no server is left to hold the parameters", "use `servers: 1` or more");
        }
        if mode.staleness != Staleness::None {
            return refuse("workers that do not wait for each other are not there yet", "use `staleness: 0`");
        }
        if mode.beside_workers && mode.servers != self.layout.data {
            return refuse(
                &format!("{} servers beside {} workers leave some of these without one", mode.servers, self.layout.data),
                &format!("use `servers: {}`, or leave out `beside_workers`", self.layout.data),
            );
        }
        if self.layout.stages.is_some() || self.layout.shares.is_some() {
            return refuse(
                "workers have equal parts of the batch and equal meshes, and `stages` or `shares` make them unequal",
                "leave out `stages` and `shares`, or use `mode: synchronous`",
            );
        }
        if self.layout.zero > 0 {
            return refuse("servers hold the optimizer's state, so ZeRO has nothing to shard", "use `zero: 0`");
        }
        if !self.stack.is_own() {
            return refuse("other software is modelled in the synchronous mode only", "leave out `stack`");
        }
        if mode.beside_workers {
            return Ok(());
        }
        if self.layout.offload.is_of_optimizer() {
            return refuse("servers keep the optimizer's state in their own memory", "use `offload: none` or `activations`");
        }
        if self.precision == DataType::Fp16 {
            return refuse("servers do not follow the loss scale of workers yet", "use `precision: bf16`");
        }
        if self.training.weighs_classes() {
            return refuse("servers do not know the labels that `class_weights` weigh", "leave out `class_weights`");
        }
        Ok(())
    }
}

/// The form of parameter servers in a plan file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ParameterServerForm {
    servers: usize,
    #[serde(default)]
    staleness: StalenessForm,
    #[serde(default)]
    beside_workers: bool,
}

/// The form of a staleness: a number of steps, or a word.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
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
    type Error = String;

    fn try_from(form: ParameterServerForm) -> Result<Self, String> {
        let ParameterServerForm { servers, staleness, beside_workers } = form;
        let staleness = match staleness {
            StalenessForm::Steps(0) => Staleness::None,
            StalenessForm::Steps(steps) => match usize::try_from(steps) {
                Ok(steps) => Staleness::Steps(steps),
                Err(_) => return Err(format!("a staleness of {steps} steps is below 0; hint: use `staleness: 0` or more")),
            },
            StalenessForm::Word(word) if word == "unbounded" => Staleness::Unbounded,
            StalenessForm::Word(word) => {
                return Err(format!("`{word}` is no staleness; hint: use a number of steps, or `unbounded`"));
            }
        };
        Ok(Self { servers, staleness, beside_workers })
    }
}
