//! A convolution as a graph of one operation. cuDNN names dimensions as N, C, H, W whatever their order in memory, which strides say: ours have
//! the channels last, of weights too (`[out, size, size, in]`). One padding on each side, one stride, no dilation, no groups: a [`Window`] has no others.

use super::calls::{Attribute, Calls, DescriptorKind, Failure, Values};
use super::descriptor::Descriptor;
use crate::backend::cuda::convolutions::{ConvolutionKind, ConvolutionShape};
use cudarc::cudnn::sys::{cudnnConvolutionMode_t, cudnnDataType_t};
use foretell_models::Window;
use foretell_units::DataType;
use std::sync::Arc;

/// By which the graph and the pack of addresses know a tensor: image, weight and response.
pub(super) const IDENTITIES: [i64; 3] = [1, 2, 3];

/// The attributes of one kind of operation.
struct Names {
    operation: DescriptorKind,
    alpha: Attribute,
    beta: Attribute,
    convolution: Attribute,
    /// Image, weight, response.
    tensors: [Attribute; 3],
}

fn names(kind: ConvolutionKind) -> Names {
    match kind {
        ConvolutionKind::Forward => Names {
            operation: DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            alpha: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
            beta: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA,
            convolution: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
            tensors: [
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
            ],
        },
        ConvolutionKind::InputGradient => Names {
            operation: DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            alpha: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
            beta: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA,
            convolution: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
            tensors: [
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
            ],
        },
        ConvolutionKind::WeightGradient => Names {
            operation: DescriptorKind::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
            alpha: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
            beta: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA,
            convolution: Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
            tensors: [
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                Attribute::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
            ],
        },
    }
}

/// The graph of a convolution, for the device of a handle; of none where the handle is zero.
pub(super) fn graph_of(calls: &Arc<dyn Calls>, shape: &ConvolutionShape, handle: u64) -> Result<Descriptor, Failure> {
    let Window { batch, height, width, in_channels, out_channels, size, stride, padding } = shape.window;
    let (out_height, out_width) = (shape.window.out_height(), shape.window.out_width());
    let names = names(shape.kind);
    let convolution = Descriptor::new(calls, DescriptorKind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
        .with(Attribute::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, Values::DataType(cudnnDataType_t::CUDNN_DATA_FLOAT))?
        .with(
            Attribute::CUDNN_ATTR_CONVOLUTION_CONV_MODE,
            // What every framework calls convolution: the window is not turned round.
            Values::ConvolutionMode(cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION),
        )?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[2])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_DILATIONS, &[1, 1])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &[stride, stride])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &[padding, padding])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &[padding, padding])?
        .finalized()?;
    let mut operation = Descriptor::new(calls, names.operation)?
        .with(names.alpha, Values::Single(1.0))?
        .with(names.beta, Values::Single(0.0))?
        .with_part(names.convolution, convolution)?;
    let extents = [
        [batch, in_channels, height, width],
        [out_channels, in_channels, size, size],
        [batch, out_channels, out_height, out_width],
    ];
    for (place, attribute) in names.tensors.into_iter().enumerate() {
        let tensor = tensor(calls, IDENTITIES[place], shape.format, extents[place], shape.alignments[place])?;
        operation = operation.with_part(attribute, tensor)?;
    }
    let graph = Descriptor::new(calls, DescriptorKind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
        .with_part(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, operation.finalized()?)?;
    match handle {
        0 => graph,
        handle => graph.with(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Values::Handle(handle))?,
    }
    .finalized()
}

fn format_of(format: DataType) -> cudnnDataType_t {
    match format {
        DataType::Bf16 => cudnnDataType_t::CUDNN_DATA_BFLOAT16,
        DataType::Fp16 => cudnnDataType_t::CUDNN_DATA_HALF,
        _ => cudnnDataType_t::CUDNN_DATA_FLOAT,
    }
}

/// A dense tensor with its channels last; extents are those of N, C, H, W.
fn tensor(
    calls: &Arc<dyn Calls>,
    identity: i64,
    format: DataType,
    extents: [usize; 4],
    alignment: u64,
) -> Result<Descriptor, Failure> {
    let [_, channels, height, width] = extents;
    let strides = [height * width * channels, 1, width * channels, channels];
    Descriptor::new(calls, DescriptorKind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
        .with(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, Values::Integers(vec![identity]))?
        .with(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, Values::DataType(format_of(format)))?
        .with_integers(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[alignment as usize])?
        .with_integers(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &extents)?
        .with_integers(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &strides)?
        .finalized()
}
