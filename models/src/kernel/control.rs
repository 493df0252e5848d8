//! The control of an update: numbers that [`Kernel::UpdateControl`](super::Kernel::UpdateControl)
//! writes and optimizers read.

/// The numbers of a control. Each is an element of the control's tensor, at [`Control::place`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Control {
    /// Factor on the loss.
    LossScale,
    /// Factor on the gradient: that of clipping, times the reciprocal of the loss scale.
    GradientFactor,
    /// 1 if the update is skipped, else 0.
    IsSkipped,
    /// Number of updates so far.
    Updates,
    /// Number of steps since the loss scale last changed.
    Streak,
    /// Squared norm of the gradient, without the loss scale.
    SquaredGradientNorm,
    /// Number of steps skipped so far.
    SkippedSteps,
}

impl Control {
    /// Elements of a control. The last is unused: eight are half a cache line.
    pub const LENGTH: usize = 8;

    /// Returns the index of the number in a control.
    pub const fn place(self) -> usize {
        self as usize
    }
}
