//! The control of an update: what [`Kernel::UpdateControl`](super::Kernel::UpdateControl) decides and optimizers follow.

/// The numbers of a control, by their places in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Control {
    /// What the loss is multiplied by.
    LossScale,
    /// What the gradient is multiplied by: clipping's factor and the reciprocal of the loss scale.
    GradientFactor,
    /// 1 where the update is skipped.
    IsSkipped,
    /// Updates made so far.
    Updates,
    /// Steps since the loss scale last changed.
    Streak,
    /// The gradient's squared norm without the loss scale.
    SquaredGradientNorm,
    /// Steps skipped so far.
    SkippedSteps,
}

impl Control {
    /// Numbers in a control. The last is not used: eight are half a cache line.
    pub const LENGTH: usize = 8;

    /// Where the number stands.
    pub const fn place(self) -> usize {
        self as usize
    }
}
