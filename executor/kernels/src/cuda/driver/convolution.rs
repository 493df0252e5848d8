//! A convolution as the library is asked for it: which of the three products, with sizes, number
//! format and addresses.

use super::DeviceAddress;
use foretell_models::Window;
use foretell_units::DataType;

/// Which product of a convolution to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConvolutionKind {
    /// The output, from the image and the weight.
    Forward,
    /// The gradient of the image, from the output's gradient and the weight.
    InputGradient,
    /// The gradient of the weight, from the output's gradient and the image.
    WeightGradient,
}

/// A convolution in channels-last layout: image `[batch, height, width, in]`, weight
/// `[out, size, size, in]`, output `[batch, out_height, out_width, out]`, all dense and of one
/// format. `kind` says which of the three is written; the other two are read. For a gradient, the
/// address of a tensor is that of its gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Convolution {
    pub kind: ConvolutionKind,
    pub window: Window,
    /// Bf16, fp16, or tf32: stored in single precision, of which tensor cores use 19 bits. Sums are
    /// always in single precision.
    pub format: DataType,
    pub image: DeviceAddress,
    pub weight: DeviceAddress,
    pub output: DeviceAddress,
}

/// No cuDNN engine asks for more alignment than this, in bytes: it is the widest access of a
/// thread.
const MAX_ALIGNMENT: u64 = 16;

/// Everything that the choice of an engine depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConvolutionShape {
    pub kind: ConvolutionKind,
    pub window: Window,
    pub format: DataType,
    /// Alignment in bytes of image, weight and output, at most 16.
    pub alignments: [u64; 3],
}

impl Convolution {
    /// Returns what the choice of an engine depends on.
    pub fn shape(&self) -> ConvolutionShape {
        let alignment = |address: DeviceAddress| address.alignment(MAX_ALIGNMENT);
        ConvolutionShape {
            kind: self.kind,
            window: self.window,
            format: self.format,
            alignments: [self.image, self.weight, self.output].map(alignment),
        }
    }
}
