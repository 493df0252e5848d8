//! Number formats. They are in this crate because both devices (peak rates) and models (sizes of
//! tensors) use them.

use crate::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Format of a number in memory or in an arithmetic unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DataType {
    /// IEEE double precision.
    Fp64,
    /// IEEE single precision.
    Fp32,
    /// NVIDIA's TensorFloat-32: stored as [`DataType::Fp32`], multiplied with a mantissa of 10
    /// bits.
    Tf32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    Fp16,
    /// Floating point of eight bits (E4M3 or E5M2).
    Fp8,
    /// A byte of a message of compressed numbers: a signed integer, or a part of a wider number.
    Int8,
    /// Signed integer of 32 bits: token ids, class labels, pooling indices.
    Int32,
}

impl DataType {
    /// Returns the size of one element in memory.
    pub const fn size(self) -> Bytes {
        Bytes::new(match self {
            DataType::Fp64 => 8,
            DataType::Fp32 | DataType::Tf32 | DataType::Int32 => 4,
            DataType::Bf16 | DataType::Fp16 => 2,
            DataType::Fp8 | DataType::Int8 => 1,
        })
    }

    /// Returns the format of the tensors in a run of this precision. For fp8 it is bf16, since only
    /// the operands of products have eight bits.
    pub const fn tensor_format(self) -> Self {
        match self {
            DataType::Fp8 => DataType::Bf16,
            other => other,
        }
    }

    /// Whether parameters in this format have a master copy in single precision, which the
    /// optimizer updates (Micikevicius et al. 2018).
    pub const fn has_master_copies(self) -> bool {
        self.size().count() < DataType::Fp32.size().count()
    }

    /// Returns the name in plan and topology files.
    pub const fn name(self) -> &'static str {
        match self {
            DataType::Fp64 => "fp64",
            DataType::Fp32 => "fp32",
            DataType::Tf32 => "tf32",
            DataType::Bf16 => "bf16",
            DataType::Fp16 => "fp16",
            DataType::Fp8 => "fp8",
            DataType::Int8 => "int8",
            DataType::Int32 => "int32",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
