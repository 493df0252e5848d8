//! Properties of a run that costs depend on, besides the sizes of its kernels.

/// Properties of a run that costs depend on, besides the sizes of its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Experts per token. 1 in models without experts.
    pub experts_per_token: usize,
    /// Trained parameters.
    pub trained: TrainedParameters,
    /// Size of `tensor`. Each of these ranks sends a part of a message between stages.
    pub tensor: usize,
    /// Scaling of operands in fp8.
    pub fp8_scaling: Fp8Scaling,
    /// True if the loss is computed operator by operator, under a stack that can compile it.
    pub has_eager_loss: bool,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            experts_per_token: 1,
            trained: TrainedParameters::All,
            tensor: 1,
            fp8_scaling: Fp8Scaling::Tensor,
            has_eager_loss: false,
        }
    }
}

/// Which parameters are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TrainedParameters {
    /// All of them.
    #[default]
    All,
    /// Only small adapters beside them (LoRA). The other parameters have no gradients.
    Adapters,
}

/// How operands in fp8 are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scaling {
    /// One scale for each tensor.
    Tensor,
    /// One scale for each row.
    Row,
}
