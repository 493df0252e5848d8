//! Single facts of a kernel's description. A caller that needs several of them calls
//! [`Kernel::spec`] once.

use super::{Kernel, KernelFamily, Traffic};
use foretell_units::{Bytes, DataType, Flops};

impl Kernel {
    /// Returns the name in reports and profiles.
    pub fn name(&self) -> &'static str {
        self.describe().name
    }

    /// Returns the kind of work.
    pub fn family(&self) -> KernelFamily {
        self.describe().family
    }

    /// Whether the first write may have the memory of the first read.
    pub fn may_work_in_place(&self) -> bool {
        self.describe().may_work_in_place
    }

    /// Returns the elements that cross the memory boundary.
    pub fn traffic(&self) -> Traffic {
        self.spec().traffic()
    }

    /// Returns the bytes that cross the memory boundary in a run of `precision`.
    pub fn bytes(&self, precision: DataType) -> Bytes {
        self.spec().traffic().bytes(precision)
    }

    /// Returns the floating-point operations ([`KernelSpec::flops`](super::KernelSpec::flops)).
    pub fn flops(&self) -> Flops {
        self.spec().flops()
    }

    /// Returns the floating-point operations that count for model FLOPs utilisation
    /// ([`KernelSpec::model_flops`](super::KernelSpec::model_flops)).
    pub fn model_flops(&self) -> Flops {
        self.spec().model_flops()
    }

    /// Whether most of the time goes into matrix products rather than into memory traffic.
    pub fn is_matrix_product(&self) -> bool {
        self.spec().is_matrix_product()
    }

    /// Returns the number format in which a matrix product multiplies in a run of `precision`.
    pub fn format(&self, precision: DataType) -> DataType {
        self.spec().format(precision)
    }
}
