//! A convolution as a cuDNN graph of one operation.
//!
//! cuDNN lists dimensions as N, C, H, W, and strides say how they are stored. Here channels are
//! last, for weights too (`[out, size, size, in]`). A [`Window`] has one padding for all sides and
//! one stride, no dilation and no groups.

use super::api::{Attribute, AttributeValues, CudnnApi, CudnnFailure, DescriptorKind};
use super::descriptor::Descriptor;
use crate::cuda::driver::{ConvolutionKind, ConvolutionShape};
use cudarc::cudnn::sys::{cudnnConvolutionMode_t, cudnnDataType_t};
use foretell_models::Window;
use foretell_units::DataType;
use std::sync::Arc;

/// Ids by which the graph and the variant pack refer to a tensor: image, weight, output.
pub(super) const TENSOR_IDS: [i64; 3] = [1, 2, 3];

/// cuDNN's names for the attributes of one kind of convolution.
struct OperationAttributes {
    operation: DescriptorKind,
    alpha: Attribute,
    beta: Attribute,
    convolution: Attribute,
    /// Image, weight, output.
    tensors: [Attribute; 3],
}

fn attributes(kind: ConvolutionKind) -> OperationAttributes {
    match kind {
        ConvolutionKind::Forward => OperationAttributes {
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
        ConvolutionKind::InputGradient => OperationAttributes {
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
        ConvolutionKind::WeightGradient => OperationAttributes {
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

/// Builds the graph of a convolution for a handle's device; for no device if the handle is 0.
pub(super) fn build(api: &Arc<dyn CudnnApi>, shape: &ConvolutionShape, handle: u64) -> Result<Descriptor, CudnnFailure> {
    let Window { batch, height, width, in_channels, out_channels, size, stride, padding } = shape.window;
    let (out_height, out_width) = (shape.window.out_height(), shape.window.out_width());
    let attributes = attributes(shape.kind);
    let convolution = Descriptor::new(api, DescriptorKind::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
        .with(Attribute::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, AttributeValues::DataType(cudnnDataType_t::CUDNN_DATA_FLOAT))?
        .with(
            Attribute::CUDNN_ATTR_CONVOLUTION_CONV_MODE,
            // Frameworks call this a convolution; in mathematics the window would be flipped.
            AttributeValues::ConvolutionMode(cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION),
        )?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[2])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_DILATIONS, &[1, 1])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, &[stride, stride])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &[padding, padding])?
        .with_integers(Attribute::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &[padding, padding])?
        .finalized()?;
    let mut operation = Descriptor::new(api, attributes.operation)?
        .with(attributes.alpha, AttributeValues::Single(1.0))?
        .with(attributes.beta, AttributeValues::Single(0.0))?
        .with_part(attributes.convolution, convolution)?;
    let extents = [
        [batch, in_channels, height, width],
        [out_channels, in_channels, size, size],
        [batch, out_channels, out_height, out_width],
    ];
    for (index, attribute) in attributes.tensors.into_iter().enumerate() {
        let tensor = tensor(api, TENSOR_IDS[index], shape.format, extents[index], shape.alignments[index])?;
        operation = operation.with_part(attribute, tensor)?;
    }
    let graph = Descriptor::new(api, DescriptorKind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?
        .with_part(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, operation.finalized()?)?;
    match handle {
        0 => graph,
        handle => graph.with(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, AttributeValues::Handle(handle))?,
    }
    .finalized()
}

fn cudnn_type(format: DataType) -> cudnnDataType_t {
    match format {
        DataType::Bf16 => cudnnDataType_t::CUDNN_DATA_BFLOAT16,
        DataType::Fp16 => cudnnDataType_t::CUDNN_DATA_HALF,
        DataType::Fp32 | DataType::Tf32 => cudnnDataType_t::CUDNN_DATA_FLOAT,
        other => unreachable!("invariant: no graph has tensors in {other}"),
    }
}

/// Describes a dense channels-last tensor; `extents` are those of N, C, H, W.
fn tensor(
    api: &Arc<dyn CudnnApi>,
    id: i64,
    format: DataType,
    extents: [usize; 4],
    alignment: u64,
) -> Result<Descriptor, CudnnFailure> {
    let [_, channels, height, width] = extents;
    let strides = [height * width * channels, 1, width * channels, channels];
    Descriptor::new(api, DescriptorKind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
        .with(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, AttributeValues::Integers(vec![id]))?
        .with(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, AttributeValues::DataType(cudnn_type(format)))?
        .with_integers(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[alignment as usize])?
        .with_integers(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &extents)?
        .with_integers(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &strides)?
        .finalized()
}
