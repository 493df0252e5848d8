//! How the elements of a tensor or of a kernel's operand are stored.

use foretell_units::DataType;

/// How the elements of a tensor or of a kernel's operand are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// In the precision of the run.
    Precision,
    /// In single precision whatever the run's precision: statistics, losses, gradients of
    /// parameters.
    Single,
    /// In eight bits whatever the run's precision: operands of products that
    /// [`Kernel::Quantise`](crate::Kernel::Quantise) made.
    Eight,
    /// As the bytes of a message of compressed numbers
    /// ([`Kernel::Compress`](crate::Kernel::Compress)).
    Message,
    /// As 32-bit integers.
    Integer,
}

impl Storage {
    /// The number format in a run of `precision`.
    pub fn data_type(self, precision: DataType) -> DataType {
        match self {
            Storage::Precision => precision,
            Storage::Single => DataType::Fp32,
            Storage::Eight => DataType::Fp8,
            Storage::Message => DataType::Int8,
            Storage::Integer => DataType::Int32,
        }
    }
}
