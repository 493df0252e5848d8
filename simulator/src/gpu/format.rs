//! Number formats of matrix products.

use foretell_units::DataType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Number format of the operands of matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProductFormat {
    /// IEEE single precision, without tensor cores.
    Fp32,
    /// TensorFloat-32.
    Tf32,
    /// IEEE half precision.
    Fp16,
    /// bfloat16.
    Bf16,
    /// 8-bit floating point, scaled by tensor or by row.
    Fp8,
    /// 8-bit floating point, scaled by blocks of 32.
    Mxfp8,
    /// 4-bit floating point, scaled by blocks of 16.
    Nvfp4,
}

impl ProductFormat {
    /// Returns the name in profiles and tables.
    pub const fn name(self) -> &'static str {
        match self {
            ProductFormat::Fp32 => "fp32",
            ProductFormat::Tf32 => "tf32",
            ProductFormat::Fp16 => "fp16",
            ProductFormat::Bf16 => "bf16",
            ProductFormat::Fp8 => "fp8",
            ProductFormat::Mxfp8 => "mxfp8",
            ProductFormat::Nvfp4 => "nvfp4",
        }
    }

    /// Returns the bytes of an element of an operand. In NVFP4 this includes the element's share of
    /// the scales.
    pub const fn bytes(self) -> f64 {
        match self {
            ProductFormat::Fp32 | ProductFormat::Tf32 => 4.0,
            ProductFormat::Fp16 | ProductFormat::Bf16 => 2.0,
            ProductFormat::Fp8 | ProductFormat::Mxfp8 => 1.0,
            ProductFormat::Nvfp4 => 0.5625,
        }
    }

    /// Returns the format of matrix products in a run whose data type is `precision`.
    pub const fn of(precision: DataType) -> Self {
        match precision {
            DataType::Fp32 | DataType::Fp64 | DataType::Int8 | DataType::Int32 => ProductFormat::Fp32,
            DataType::Tf32 => ProductFormat::Tf32,
            DataType::Fp16 => ProductFormat::Fp16,
            DataType::Bf16 => ProductFormat::Bf16,
            DataType::Fp8 => ProductFormat::Fp8,
        }
    }

    /// Returns whether operands are narrower than activations, so that a kernel must cast them.
    pub const fn is_cast(self) -> bool {
        matches!(self, ProductFormat::Fp8 | ProductFormat::Mxfp8 | ProductFormat::Nvfp4)
    }

    /// Returns the next wider format, whose figures apply to a device that has none for this
    /// format.
    pub(super) const fn wider(self) -> Option<Self> {
        match self {
            ProductFormat::Nvfp4 => Some(ProductFormat::Mxfp8),
            ProductFormat::Mxfp8 => Some(ProductFormat::Fp8),
            ProductFormat::Fp8 => Some(ProductFormat::Bf16),
            ProductFormat::Bf16 => Some(ProductFormat::Fp16),
            ProductFormat::Fp16 => Some(ProductFormat::Tf32),
            ProductFormat::Tf32 => Some(ProductFormat::Fp32),
            ProductFormat::Fp32 => None,
        }
    }
}

impl fmt::Display for ProductFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
