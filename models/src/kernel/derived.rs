//! What follows from a kernel's description, for callers that need one thing of it. A caller that needs several asks
//! [`Kernel::spec`] once.

use super::{Kernel, KernelFamily, Traffic};
use foretell_units::{Bytes, DataType, Flops};

impl Kernel {
    /// The kernel's name in reports and profiles.
    pub fn name(&self) -> &'static str {
        self.describe().name
    }

    /// The kind of work that it does.
    pub fn family(&self) -> KernelFamily {
        self.describe().family
    }

    /// The elements that must cross the memory boundary at least once.
    pub fn traffic(&self) -> Traffic {
        self.spec().traffic()
    }

    /// The bytes that must cross the memory boundary at least once in a run of `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        self.spec().traffic().bytes(precision)
    }

    /// The arithmetic that it does: a multiply-add is two operations; causal attention does half of the scores.
    pub fn flops(&self) -> Flops {
        self.spec().flops()
    }

    /// The arithmetic that counts for model FLOPs utilisation.
    pub fn model_flops(&self) -> Flops {
        self.spec().model_flops()
    }

    /// Whether the time goes into matrix products, which run at a device's peak, rather than into moving memory.
    pub fn is_matrix_product(&self) -> bool {
        self.spec().is_matrix_product()
    }

    /// The number format in which a kernel of a run in `precision` multiplies.
    pub fn format(&self, precision: DataType) -> DataType {
        self.spec().format(precision)
    }

    /// Whether the first write may be the first read's memory.
    pub fn may_work_in_place(&self) -> bool {
        self.describe().works_in_place
    }
}
