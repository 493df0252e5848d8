//! The mode: how the replicas of a model are synchronised. In the synchronous mode they sum their
//! gradients in every step. With local SGD or decentralised SGD, each replica makes its own steps,
//! and replicas exchange parameters at the end of a round of steps. With parameter servers, workers
//! push gradients and pull parameters.

use super::local_sgd::{LocalSgd, LocalSgdForm, OuterOptimizer, no_backup_workers, parse_compression};
use super::parameter_server::{ParameterServer, ParameterServerForm, Staleness};
use super::{Plan, PlanError};
use crate::cycle::Cycle;
use crate::mesh::Axis;
use crate::program::StateValue;
use foretell_models::Compression;
use foretell_units::DataType;
use foretell_units::diagnostic::{Mistake, deserialize_from};
use schemars::JsonSchema;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

/// How the replicas of a model are synchronised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", try_from = "ModeForm")]
pub enum Mode {
    /// Every update uses the gradients of all replicas.
    #[default]
    Synchronous,
    /// Replicas make their own steps, and average their parameters at the end of each round.
    LocalSgd(LocalSgd),
    /// As local SGD, but each replica averages with its neighbours in a graph.
    Decentralised(Decentralised),
    /// Servers hold the parameters, and workers push gradients to them.
    ParameterServer(ParameterServer),
}

/// Decentralised SGD (D-PSGD, Lian et al. 2017).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Decentralised {
    /// The neighbours of each replica.
    pub graph: AveragingGraph,
    /// The number of steps in a round.
    pub every: usize,
}

/// The graph whose edges join the replicas that average with each other. Over a cycle of rounds it
/// connects all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AveragingGraph {
    /// Each replica averages with the next and the previous one.
    Ring,
    /// In round k each replica averages with the one 2^k positions before it: the one-peer
    /// exponential graph (Ying et al. 2021). After log2(n) rounds each of the n replicas has the
    /// mean of all.
    Exponential,
    /// Each replica averages with all others.
    Complete,
}

impl Mode {
    /// Whether every update uses the gradients of all replicas.
    pub fn is_synchronous(&self) -> bool {
        match self {
            Mode::Synchronous => true,
            Mode::ParameterServer(mode) => mode.staleness == Staleness::None && mode.backup_workers == 0,
            Mode::LocalSgd(_) | Mode::Decentralised(_) => false,
        }
    }

    /// The outer optimizer, if the replicas have one.
    pub fn outer(&self) -> Option<OuterOptimizer> {
        match self {
            Mode::LocalSgd(mode) => mode.effective_outer(),
            Mode::Synchronous | Mode::Decentralised(_) | Mode::ParameterServer(_) => None,
        }
    }

    /// The mode in normal form: modes that mean the same are equal.
    #[must_use]
    pub fn normalised(self) -> Self {
        match self {
            // Averaging with all others is local SGD.
            Mode::Decentralised(Decentralised { graph: AveragingGraph::Complete, every }) => Mode::LocalSgd(LocalSgd::new(every)),
            Mode::LocalSgd(mode) => Mode::LocalSgd(mode.normalised()),
            other => other,
        }
    }

    /// Whether replicas still hold different values of this kind at the end of a round. Values of
    /// the optimizer always differ. The exchange makes running statistics equal. It makes
    /// parameters equal unless each replica averages with its own neighbours, exchanges are in
    /// fragments, or each replica keeps a share of its own parameters.
    pub fn differs_after_exchange(&self, value: StateValue) -> bool {
        match (self, value) {
            (Mode::Synchronous | Mode::ParameterServer(_), _) => false,
            (_, StateValue::Optimizer(_)) => true,
            (Mode::Decentralised(mode), StateValue::Parameter | StateValue::Master) => mode.graph != AveragingGraph::Complete,
            (Mode::LocalSgd(mode), StateValue::Parameter | StateValue::Master) => mode.keeps_replicas_apart(),
            (
                Mode::LocalSgd(_) | Mode::Decentralised(_),
                StateValue::Running | StateValue::OuterParameter | StateValue::OuterVelocity | StateValue::Residual,
            ) => false,
        }
    }

    /// Whether the outer parameters differ from the parameters at the end of a round.
    pub fn keeps_outer_parameters(&self) -> bool {
        self.outer().is_some() && self.differs_after_exchange(StateValue::Parameter)
    }

    /// The field of the plan that holds the mode.
    const fn field(&self) -> &'static str {
        match self {
            Mode::Synchronous => "mode",
            Mode::LocalSgd(_) => "mode.local_sgd",
            Mode::Decentralised(_) => "mode.decentralised",
            Mode::ParameterServer(_) => "mode.parameter_server",
        }
    }

    /// Whether the mode has rounds of steps.
    pub fn has_rounds(&self) -> bool {
        matches!(self, Mode::LocalSgd(_) | Mode::Decentralised(_))
    }

    /// This mode with `every` steps in a round; unchanged if it has no rounds.
    #[must_use]
    pub fn with_every(self, every: usize) -> Self {
        match self {
            Mode::LocalSgd(mode) => Mode::LocalSgd(LocalSgd { every, ..mode }),
            Mode::Decentralised(mode) => Mode::Decentralised(Decentralised { every, ..mode }),
            Mode::Synchronous | Mode::ParameterServer(_) => self,
        }
    }

    /// The number of steps in a round.
    pub fn every(&self) -> usize {
        match self {
            Mode::Synchronous | Mode::ParameterServer(_) => 1,
            Mode::LocalSgd(LocalSgd { every, .. }) | Mode::Decentralised(Decentralised { every, .. }) => *every,
        }
    }
}

impl Mode {
    /// The share of its own parameters that a replica keeps when it applies an exchange.
    pub fn mixing(&self) -> f32 {
        match self {
            Mode::LocalSgd(mode) => mode.mixing(),
            Mode::Synchronous | Mode::Decentralised(_) | Mode::ParameterServer(_) => 0.0,
        }
    }

    /// The format in which replicas send changes; single precision if `None`.
    pub(crate) fn compression(&self) -> Option<Compression> {
        match self {
            Mode::LocalSgd(mode) => mode.compression,
            Mode::Synchronous | Mode::Decentralised(_) | Mode::ParameterServer(_) => None,
        }
    }

    /// The number of steps that an exchange overlaps with.
    pub(crate) fn overlap(&self) -> usize {
        match self {
            Mode::LocalSgd(mode) => mode.overlap,
            Mode::Synchronous | Mode::Decentralised(_) | Mode::ParameterServer(_) => 0,
        }
    }

    /// The number of fragments that are exchanged one after the other.
    pub(crate) fn fragments(&self) -> usize {
        match self {
            Mode::LocalSgd(mode) => mode.fragments,
            Mode::Synchronous | Mode::Decentralised(_) | Mode::ParameterServer(_) => 1,
        }
    }
}

impl Plan {
    /// The number of replicas that make their own steps: 1 in the synchronous mode.
    pub fn replicas(&self) -> usize {
        if self.mode.is_synchronous() { 1 } else { self.replicas_of_mesh() }
    }

    /// The number of shard groups, each of which has a whole model.
    fn replicas_of_mesh(&self) -> usize {
        let data = self.layout.data;
        data / if self.layout.zero == 0 { 1 } else { self.layout.shard_group.unwrap_or(data).max(1) }
    }

    /// The axis along which ranks do not sum gradients, since each rank along it belongs to a
    /// replica with its own parameters.
    pub(crate) fn replica_axis(&self) -> Option<Axis> {
        (!self.mode.is_synchronous()).then_some(Axis::Data)
    }

    /// How many replicas or workers have their own values of this kind in a run's state; 1 if all
    /// share them.
    pub fn replicas_of(&self, value: StateValue) -> usize {
        match value {
            StateValue::Residual => self.layout.data,
            _ if self.mode.differs_after_exchange(value) => self.replicas(),
            _ => 1,
        }
    }

    /// The order of the run's steps.
    pub fn cycle(&self) -> Cycle {
        match &self.mode {
            Mode::Synchronous | Mode::ParameterServer(_) => Cycle::of_equal_steps(),
            Mode::Decentralised(Decentralised { graph: AveragingGraph::Exponential, every }) => {
                Cycle::new(*every, self.replicas().max(2).ilog2() as usize)
            }
            other => Cycle::new(other.every(), 1).in_fragments(other.fragments(), other.overlap()),
        }
    }

    /// Refuses a mode that is invalid, that the layout cannot have, or that this version cannot
    /// compile with the rest of the plan.
    pub(super) fn validate_mode(&self) -> Result<(), PlanError> {
        let field = self.mode.field();
        let refuse = |reason: &str, hint: &str| Err(PlanError::Invalid { field, reason: reason.into(), hint: hint.into() });
        match self.mode {
            Mode::Synchronous => return Ok(()),
            Mode::ParameterServer(mode) => return self.validate_servers(mode),
            Mode::LocalSgd(_) | Mode::Decentralised(_) => {}
        }
        if self.mode.every() == 0 {
            return refuse("replicas that exchange after every 0 steps never step", "use `every: 1` or more");
        }
        if let Mode::LocalSgd(mode) = self.mode {
            mode.validate(field, self.replicas_of_mesh())?;
        }
        if self.layout.stages.is_some() || self.layout.shares.is_some() {
            return refuse(
                "replicas have equal parts of the batch and equal meshes, and `stages` or `shares` make them unequal",
                "leave out `stages` and `shares`, or use `mode: synchronous`",
            );
        }
        let replicas = self.replicas_of_mesh();
        if replicas < 2 && self.layout.zero > 0 && self.layout.data > 1 {
            return refuse(
                "ZeRO shards the state over all of `data`, so there is only one replica",
                "use `zero: 0`, or a `shard_group` smaller than `data`",
            );
        }
        if replicas < 2 {
            return refuse("one replica has no other to exchange with", "use `data: 2` or more, or `mode: synchronous`");
        }
        if let Mode::Decentralised(Decentralised { graph: AveragingGraph::Exponential, .. }) = self.mode
            && !replicas.is_power_of_two()
        {
            return refuse(
                &format!("an exponential graph needs a power of two of replicas, and there are {replicas}"),
                "use `graph: ring` or `graph: complete`, or 2, 4, 8, .. replicas",
            );
        }
        if self.precision == DataType::Fp16 {
            return refuse("each replica would have a loss scale of its own, which is not there yet", "use `precision: bf16`");
        }
        if self.layout.offload.is_of_optimizer() {
            return refuse("offloaded optimizer states are not there yet in this mode", "use `offload: none` or `activations`");
        }
        if !self.stack.is_own() {
            return refuse("other software is modelled in the synchronous mode only", "leave out `stack`");
        }
        Ok(())
    }
}

/// The form of a mode in a plan file. Some fields are read only to be refused with a hint.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ModeForm {
    /// Every update uses the gradients of all replicas.
    Synchronous,
    /// Replicas make their own steps, and average their parameters at the end of each round.
    LocalSgd(LocalSgdForm),
    /// As local SGD, but each replica averages with its neighbours in a graph.
    Decentralised(DecentralisedForm),
    /// Servers hold the parameters, and workers push gradients to them.
    ParameterServer(ParameterServerForm),
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DecentralisedForm {
    /// The neighbours of each replica.
    graph: AveragingGraph,
    /// The number of steps in a round.
    #[serde(default = "one")]
    every: usize,
    #[schemars(skip)]
    compression: Option<String>,
    #[schemars(skip)]
    backup_workers: Option<IgnoredAny>,
}

fn one() -> usize {
    1
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_from::<ModeForm, _, _>(deserializer)
    }
}

impl TryFrom<ModeForm> for Mode {
    type Error = Mistake;

    fn try_from(form: ModeForm) -> Result<Self, Mistake> {
        match form {
            ModeForm::Synchronous => Ok(Mode::Synchronous),
            ModeForm::LocalSgd(form) => Ok(Mode::LocalSgd(form.try_into()?)),
            ModeForm::Decentralised(DecentralisedForm { backup_workers: Some(_), .. }) => Err(no_backup_workers()),
            ModeForm::Decentralised(DecentralisedForm { graph, every, compression, .. }) => {
                // Averaging rounded parameters need not converge (Tang et al. 2018, arXiv
                // 1803.06317).
                match compression.as_deref().map(parse_compression).transpose()?.flatten() {
                    None => Ok(Mode::Decentralised(Decentralised { graph, every })),
                    Some(_) => {
                        let message = "`decentralised` has no `compression`: neighbours exchange parameters, and rounding these \
                                       in each round may keep a run from converging";
                        let hint = "leave it out, or use `local_sgd`, whose changes travel in few bits";
                        Err(Mistake::new(message, hint))
                    }
                }
            }
            ModeForm::ParameterServer(form) => Ok(Mode::ParameterServer(form.try_into()?)),
        }
    }
}
