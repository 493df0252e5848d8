//! What a library is asked for where it makes convolutions: the three products of one, their sizes, formats and places.

use super::driver::DeviceAddress;
use foretell_models::Window;
use foretell_units::DataType;

/// Which of a convolution's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ConvolutionKind {
    /// The response to the image: `y = x * w`.
    Forward,
    /// The image's slope, of the response's and the weight.
    InputGradient,
    /// The weight's slope, of the response's and the image.
    WeightGradient,
}

/// A convolution of images whose channels lie last: image `[batch, height, width, in]`, weight `[out, size, size, in]`, response
/// `[batch, out_height, out_width, out]`, all dense and of one format. The one that its kind computes is written, the other two are read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Convolution {
    pub(crate) kind: ConvolutionKind,
    pub(crate) window: Window,
    /// Bf16, fp16, or tf32: stored in single precision, of which tensor cores take nineteen bits. Sums are in single precision, always.
    pub(crate) format: DataType,
    pub(crate) image: DeviceAddress,
    pub(crate) weight: DeviceAddress,
    pub(crate) response: DeviceAddress,
}

/// Beyond this alignment, in bytes, no engine of cuDNN's asks for more: it is what one thread reads at once.
const MOST_ALIGNED: u64 = 16;

/// What the choice of a way follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ConvolutionShape {
    pub(crate) kind: ConvolutionKind,
    pub(crate) window: Window,
    pub(crate) format: DataType,
    /// Bytes at whose multiples image, weight and response begin.
    pub(crate) alignments: [u64; 3],
}

impl Convolution {
    /// What the choice of a way to make it follows from.
    pub(crate) fn shape(&self) -> ConvolutionShape {
        let aligned = |address: DeviceAddress| address.alignment(MOST_ALIGNED);
        ConvolutionShape {
            kind: self.kind,
            window: self.window,
            format: self.format,
            alignments: [self.image, self.weight, self.response].map(aligned),
        }
    }
}
