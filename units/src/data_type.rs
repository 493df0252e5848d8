//! Number formats: what one element is, and how many bytes it takes.
//! Here, and not in the models, because a device's peak rate and a tensor's size are both stated per format.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The format of a number in memory or in an arithmetic unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataType {
    /// IEEE double precision.
    Fp64,
    /// IEEE single precision.
    Fp32,
    /// NVIDIA's TensorFloat-32: stored as [`DataType::Fp32`], multiplied with a 10-bit mantissa.
    Tf32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    Fp16,
    /// 8-bit floating point (E4M3 or E5M2).
    Fp8,
    /// 32-bit signed integer: token ids, class labels, pooling indices.
    Int32,
}

impl DataType {
    /// The size of one element in memory.
    pub const fn size(self) -> Bytes {
        Bytes::new(match self {
            DataType::Fp64 => 8,
            DataType::Fp32 | DataType::Tf32 | DataType::Int32 => 4,
            DataType::Bf16 | DataType::Fp16 => 2,
            DataType::Fp8 => 1,
        })
    }

    /// The format of what operators read and write in a run of this precision: bfloat16 where products alone are of eight bits.
    pub const fn of_tensors(self) -> Self {
        match self {
            DataType::Fp8 => DataType::Bf16,
            other => other,
        }
    }

    /// Whether an optimizer updates a master copy in single precision of parameters in this format (Micikevicius et al. 2018).
    pub const fn has_master_copies(self) -> bool {
        self.size().count() < DataType::Fp32.size().count()
    }

    /// The name used in plan and topology files.
    pub const fn name(self) -> &'static str {
        match self {
            DataType::Fp64 => "fp64",
            DataType::Fp32 => "fp32",
            DataType::Tf32 => "tf32",
            DataType::Bf16 => "bf16",
            DataType::Fp16 => "fp16",
            DataType::Fp8 => "fp8",
            DataType::Int32 => "int32",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}
