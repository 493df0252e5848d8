//! Plans with parameter servers: their mesh, their normal form, and how far workers may be apart.
//! Refuses servers that do not fit the rest of the plan.

use super::{Mode, ParameterServer, Plan, PlanError, Staleness};
use crate::mesh::{Axis, Mesh, StageMesh};
use crate::pacing::Pacing;
use foretell_models::Compression;
use foretell_units::DataType;

impl Mode {
    /// The number of parameter servers that have ranks of their own; 0 without any.
    pub fn servers(&self) -> usize {
        match self {
            Mode::ParameterServer(mode) if !mode.beside_workers => mode.servers,
            _ => 0,
        }
    }

    /// The format in which workers push gradients; single precision if `None`.
    pub(crate) fn push_format(&self) -> Option<Compression> {
        match self {
            Mode::ParameterServer(mode) => mode.compression,
            Mode::Synchronous | Mode::LocalSgd(_) | Mode::Decentralised(_) => None,
        }
    }

    /// Whether workers keep the rounding errors of their pushes.
    pub fn keeps_residuals(&self) -> bool {
        self.push_format().is_some()
    }

    /// Whether a step has the result of the synchronous mode, up to the order of sums.
    pub fn has_synchronous_result(&self) -> bool {
        self.is_synchronous() && self.push_format().is_none()
    }
}

impl Plan {
    /// How far the workers of servers may be apart; `None` if every step waits for all workers.
    pub fn pacing(&self) -> Option<Pacing> {
        let Mode::ParameterServer(mode) = self.mode else { return None };
        let workers = self.layout.data;
        let bound = match mode.staleness {
            Staleness::None if mode.backup_workers == 0 => return None,
            Staleness::None => {
                let quorum = workers.saturating_sub(mode.backup_workers).max(1);
                return Some(Pacing { workers, bound: None, quorum: Some(quorum) });
            }
            Staleness::Steps(steps) => Some(steps),
            Staleness::Unbounded => None,
        };
        Some(Pacing { workers, bound, quorum: None })
    }

    /// The share of a step's samples whose gradients count. With n backup workers, servers drop the
    /// gradients of the n latest workers.
    pub fn counted_share(&self) -> f64 {
        self.pacing().map_or(1.0, |Pacing { workers, quorum, .. }| quorum.unwrap_or(workers) as f64 / workers.max(1) as f64)
    }

    /// The number of samples whose mean gradient an update uses.
    pub(crate) fn samples_of_update(&self) -> usize {
        let quorum = self.pacing().and_then(|pacing| pacing.quorum).unwrap_or(1);
        self.global_batch / self.replicas() * quorum
    }

    /// Refuses too many backup workers, and backup workers with a staleness, under which no
    /// gradients are late.
    fn validate_backup_workers(&self, mode: ParameterServer) -> Result<(), PlanError> {
        let field = "mode.parameter_server";
        let refuse = |reason: &str, hint: &str| Err(PlanError::Invalid { field, reason: reason.into(), hint: hint.into() });
        let (backup, workers) = (mode.backup_workers, self.layout.data);
        if mode.staleness != Staleness::None {
            return refuse(
                "with a staleness each push is an update by itself, so no backup worker is late",
                "leave out `staleness`, or `backup_workers`",
            );
        }
        if backup >= workers {
            let hint = match workers {
                1 => "leave out `backup_workers`, or use more workers with `data`".into(),
                _ => format!("use `backup_workers: {}` at most, or more workers with `data`", workers - 1),
            };
            return refuse(&format!("{backup} backup workers of {workers} leave no gradients to wait for"), &hint);
        }
        if mode.compression.is_some() {
            return refuse(
                "a late push is dropped, and with it what rounding lost of earlier ones",
                "leave out `compression`, or `backup_workers`",
            );
        }
        Ok(())
    }

    /// Refuses features that need all workers or all servers to be at the same version.
    fn validate_paces(&self, mode: ParameterServer) -> Result<(), PlanError> {
        let field = "mode.parameter_server";
        let refuse = |reason: &str, hint: &str| Err(PlanError::Invalid { field, reason: reason.into(), hint: hint.into() });
        if mode.beside_workers {
            return refuse(
                "a server beside a worker would wait for that worker",
                "leave out `beside_workers`, or use `staleness: 0` without `backup_workers`",
            );
        }
        let layout = &self.layout;
        if layout.tensor * layout.context * layout.expert > 1 {
            return refuse(
                "at their own pace the ranks of `tensor`, `context` and `expert` would pull different versions of what all have",
                "use `tensor: 1`, `context: 1` and `expert: 1`, or `staleness: 0` without `backup_workers`",
            );
        }
        if self.training.clip_norm.is_some() || self.optimizer.is_by_parameter() {
            return refuse(
                "servers that are at different versions have no common norm for `clip_norm`, and no whole parameter for `lamb` or `muon`",
                "use another optimizer without `clip_norm`, or `staleness: 0` without `backup_workers`",
            );
        }
        Ok(())
    }

    /// The plan in normal form. Plans that mean the same thing are equal in normal form.
    pub(crate) fn normalised(&self) -> Self {
        let mut plan = Self { layout: self.layout.clone().normalised(), mode: self.mode.normalised(), ..self.clone() };
        // Each server shares a rank with a worker and holds one part of the optimizer's state.
        // Pushing gradients to all servers is a reduce-scatter, and pulling parameters an
        // all-gather: this is ZeRO 1.
        if matches!(plan.mode, Mode::ParameterServer(mode) if mode.beside_workers && plan.mode.is_synchronous()) {
            plan.mode = Mode::Synchronous;
            plan.layout.zero = 1;
            plan.overlap.parameters = true;
        }
        plan
    }

    /// The mesh of the workers' stages, followed by one stage of servers for each of them, in the
    /// same order. A server stage has the sizes of a worker stage, but the servers along `data`.
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
        if mode.beside_workers && mode.servers != self.layout.data {
            return refuse(
                &format!("{} servers beside {} workers leave some of these without one", mode.servers, self.layout.data),
                &format!("use `servers: {}`, or leave out `beside_workers`", self.layout.data),
            );
        }
        if mode.beside_workers && mode.compression.is_some() {
            return refuse(
                "servers beside workers get gradients by a reduce-scatter, which adds them in single precision",
                "leave out `compression`, or `beside_workers`",
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
        if mode.backup_workers > 0 {
            self.validate_backup_workers(mode)?;
        }
        if self.pacing().is_some() {
            self.validate_paces(mode)?;
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
