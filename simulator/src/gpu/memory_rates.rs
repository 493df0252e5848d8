//! Bytes that a software stack keeps for each element, and for each byte of a Program's buffers.

use super::format::ProductFormat;
use super::stack::StackProfile;
use super::workload::{TrainedParameters, Workload};
use foretell_units::{Bytes, DataType};

/// Bytes of an element of a Program's gradients and of its optimizer state.
const SINGLE_PRECISION: f64 = 4.0;

/// Adam's two moments in single precision, in bytes.
const MOMENTS: f64 = 8.0;

/// Bytes that a stack keeps of each value of the training state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StateBytes {
    /// Bytes of a parameter that the optimizer does not update.
    pub(super) frozen_parameter: f64,
    /// Bytes of a parameter that it updates.
    pub(super) parameter: f64,
    /// Bytes of a gradient. 0 if only adapters are trained.
    pub(super) gradient: f64,
    /// Bytes of the master copy of a parameter. 0 if only adapters are trained.
    pub(super) master_copy: f64,
    /// Bytes of a moment. 0 if only adapters are trained.
    pub(super) moment: f64,
}

impl StateBytes {
    pub(super) fn of(stack: &StackProfile, format: ProductFormat, workload: &Workload, precision: DataType) -> Self {
        let rules = &stack.memory;
        let is_narrow = is_narrow(precision);
        let is_pure = is_narrow && workload.has_no_master_copy;
        let trained = if workload.trained == TrainedParameters::All { 1.0 } else { 0.0 };
        // The single-precision values of mixed precision serve only the update. Parameters that are
        // not trained are loaded in the narrow format (torchtune's `dtype`, transformers'
        // `torch_dtype`).
        let parameter = match is_narrow {
            _ if is_pure => 2.0,
            true => rules.parameter,
            false => SINGLE_PRECISION,
        };
        let gradient = match format {
            _ if !is_narrow => SINGLE_PRECISION,
            _ if is_pure => 2.0,
            ProductFormat::Fp16 => rules.half_gradient.unwrap_or(rules.gradient),
            _ => rules.gradient,
        };
        // If a rule has more bytes than two single-precision moments, the rest is the master copy.
        // If it has fewer, the moments are narrow.
        let master_copy = if is_narrow && !is_pure { (rules.optimizer - MOMENTS).max(0.0) } else { 0.0 };
        let moment = if is_narrow { rules.optimizer.min(MOMENTS) / 2.0 } else { SINGLE_PRECISION };
        Self {
            frozen_parameter: precision.size().value(),
            parameter,
            gradient: gradient * trained,
            master_copy: master_copy * trained,
            moment: moment.min(workload.moments.bytes()) * trained,
        }
    }
}

/// Returns whether parameters in a number format have a master copy in single precision.
pub(super) fn is_narrow(precision: DataType) -> bool {
    precision.size() < DataType::Fp32.size()
}

/// What [`MemoryRates`] need to know about the state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateKind {
    /// The number format of parameters.
    pub storage: DataType,
    /// Whether some parameters may be frozen.
    pub may_be_frozen: bool,
    /// Values that the optimizer keeps for each parameter, beside a master copy.
    pub moments: usize,
}

/// Lower bounds on the device memory that a software stack holds, per byte of a Program's device
/// buffers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryRates {
    /// Bytes for each byte of parameters that stay on the device.
    pub parameters: f64,
    /// Bytes for each byte of gradients.
    pub gradients: f64,
    /// Bytes for each byte of optimizer state, the master copy included.
    pub optimizer_state: f64,
    /// Bytes for each byte of other buffers that persist from step to step.
    pub others: f64,
    /// Bytes for each byte of transient buffers alive at the same time.
    pub transient: f64,
    /// Further bytes: the context, and buffers of fixed size.
    pub fixed: Bytes,
}

impl MemoryRates {
    /// The rates of our own executor, which holds exactly the Program's arena.
    pub const ARENA: Self =
        Self { parameters: 1.0, gradients: 1.0, optimizer_state: 1.0, others: 1.0, transient: 1.0, fixed: Bytes::ZERO };

    pub(crate) fn of(stack: &StackProfile, format: ProductFormat, workload: &Workload, kind: StateKind) -> Self {
        let rules = &stack.memory;
        let StateKind { storage, may_be_frozen, moments } = kind;
        let state = StateBytes::of(stack, format, workload, storage);
        let parameter = match workload.trained {
            TrainedParameters::Adapters { .. } => state.frozen_parameter,
            TrainedParameters::All if may_be_frozen => state.frozen_parameter.min(state.parameter),
            TrainedParameters::All => state.parameter,
        };
        let held = 1.0 + rules.fragmentation;
        let moments = moments as f64;
        let of_optimizer = moments + if is_narrow(storage) { 1.0 } else { 0.0 };
        Self {
            parameters: held * parameter / storage.size().value(),
            gradients: held * state.gradient / SINGLE_PRECISION,
            optimizer_state: held * (state.master_copy + state.moment * moments) / (of_optimizer.max(1.0) * SINGLE_PRECISION),
            others: 0.0,
            // Logits do not scale with `rules.activations`, so the factor is at most 1. Skewed
            // routing fills no fewer slots.
            transient: held * rules.activations.min(1.0),
            fixed: Bytes::new((rules.buffers.value() * held) as u64) + rules.context,
        }
    }

    /// Returns the rates for a Program that gathers sharded parameters. If it gathers each of them
    /// once, a stack keeps the gathered parameters in place of the shards; see
    /// [`StageMemory`](super::StageMemory). So shards count nothing, and gathered parameters count
    /// at the lower of the transient and the parameter rate.
    #[must_use]
    pub fn of_gathered_parameters(self) -> Self {
        match self == Self::ARENA {
            true => self,
            false => Self { parameters: 0.0, transient: self.transient.min(self.parameters), ..self },
        }
    }

    /// Returns rates that are lower bounds on both devices.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        Self {
            parameters: self.parameters.min(other.parameters),
            gradients: self.gradients.min(other.gradients),
            optimizer_state: self.optimizer_state.min(other.optimizer_state),
            others: self.others.min(other.others),
            transient: self.transient.min(other.transient),
            fixed: self.fixed.min(other.fixed),
        }
    }
}
