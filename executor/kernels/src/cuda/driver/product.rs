//! Describes a matrix product and the operations that are fused into it, for cuBLASLt and for the
//! kernels that replace it.

use super::DeviceAddress;
use foretell_models::EightBits;
use foretell_units::DataType;

/// A matrix that a product reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixOperand {
    pub address: DeviceAddress,
    /// Whether the rows in memory are the matrix's columns.
    pub is_transposed: bool,
    /// Elements from one row in memory to the next; `None` if rows are contiguous.
    pub pitch: Option<usize>,
}

impl MatrixOperand {
    /// A contiguous matrix, whose rows in memory are its rows.
    pub fn plain(address: DeviceAddress) -> Self {
        Self { address, is_transposed: false, pitch: None }
    }

    /// A contiguous matrix, whose rows in memory are its columns.
    pub fn transposed(address: DeviceAddress) -> Self {
        Self { address, is_transposed: true, pitch: None }
    }
}

/// Operations that are fused into a product. The bias comes before the activation. A bias gradient
/// sums an operand and leaves the result as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epilogue {
    /// One number for each column, in the format [`Product::input`].
    pub bias: Option<DeviceAddress>,
    pub activation: EpilogueActivation,
    /// A bias gradient that is computed with the product.
    pub bias_gradient: Option<BiasGradient>,
}

impl Epilogue {
    /// Returns `true` if nothing is fused into the product.
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// A function of each element of a product, after the bias. Other tensors that it reads or writes
/// are dense, have the result's shape, and are in the format [`Product::input`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EpilogueActivation {
    #[default]
    None,
    Relu,
    /// GELU by its tanh approximation.
    Gelu,
    /// The same; GELU's argument is also written to this address.
    GeluAux(DeviceAddress),
    /// Multiplies by GELU's derivative; GELU's argument is read from this address.
    GeluGradient(DeviceAddress),
}

/// A sum over the contracted dimension of one operand, in the result's format. It overwrites the
/// address that it is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BiasGradient {
    /// Sums the left operand: one sum for each row of the result.
    OfLeft(DeviceAddress),
    /// Sums the right operand: one sum for each column of the result.
    OfRight(DeviceAddress),
}

/// Formats and scales of a product whose operands are fp8. Index 0 is the left operand, 1 the
/// right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Scales {
    pub formats: [EightBits; 2],
    /// Address of the fp32 factor that each operand is multiplied by.
    pub scales: [DeviceAddress; 2],
    /// Whether Hopper may accumulate in its tensor cores' own precision, about 14 bits (DeepSeek-AI
    /// 2024, DeepSeek-V3, 3.3.2). Forward products allow it, as NVIDIA's Transformer Engine does.
    /// Gradients do not: there the lost bits would add up over a whole batch.
    pub fast_accumulation: bool,
}

/// `result[rows, columns] = left[rows, contracted] · right[contracted, columns]`, row-major, for
/// each matrix of a batch. The matrices of a batch are dense and contiguous.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Product {
    pub batch: usize,
    pub rows: usize,
    pub columns: usize,
    pub contracted: usize,
    pub left: MatrixOperand,
    pub right: MatrixOperand,
    pub result: DeviceAddress,
    /// Elements from one row of the result to the next; `None` if rows are contiguous.
    pub result_pitch: Option<usize>,
    /// Format of the bias and of GELU's argument. Also of the operands, unless `fp8` gives their
    /// formats.
    pub input: DataType,
    /// Format of the result: `input`, or single precision.
    pub output: DataType,
    /// Whether to add to the result instead of overwriting it.
    pub accumulate: bool,
    pub epilogue: Epilogue,
    /// Whether single-precision operands may be rounded to tf32, the 19 bits that tensor cores use.
    pub tf32: bool,
    /// `Some` if both operands are fp8.
    pub fp8: Option<Fp8Scales>,
}

impl Product {
    /// Returns rows, columns and pitch (in elements) of each matrix as stored: left, right, result.
    pub fn stored(&self) -> [[usize; 3]; 3] {
        let Product { rows, columns, contracted, left, right, .. } = *self;
        let stored = |[rows, columns]: [usize; 2], is_transposed: bool, pitch: Option<usize>| {
            let [rows, columns] = if is_transposed { [columns, rows] } else { [rows, columns] };
            [rows, columns, pitch.unwrap_or(columns)]
        };
        [
            stored([rows, contracted], left.is_transposed, left.pitch),
            stored([contracted, columns], right.is_transposed, right.pitch),
            stored([rows, columns], false, self.result_pitch),
        ]
    }
}
