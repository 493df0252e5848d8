//! Operators on images: convolutions, poolings, batch norms.

use super::batch::BatchPlace;
use super::messages::Node;
use super::translator::Translator;
use super::values::Known;
use crate::families::{MOST, NetworkConvolution, NetworkOperation, NetworkPool};

impl Translator {
    pub(super) fn convolution(&mut self, node: &Node) -> Result<Known, String> {
        let (read, shape) = image_of(&self.input(node, 0)?)?;
        let Known::Weight { shape: weight } = self.input(node, 1)? else { return Err("its weight is no parameter".into()) };
        let (&[channels, _, rows, columns], &[_, height, width]) = (&weight[..], &shape[..]) else {
            return Err("only convolutions of two dimensions are understood".into());
        };
        let pool = window(node, [rows, columns], [height, width])?;
        let groups = usize::try_from(node.int("group", 1)).map_err(|_| "its groups are negative")?;
        let bias = node.inputs.get(2).is_some_and(|name| !name.is_empty());
        let convolution = NetworkConvolution { channels, pool, groups, bias };
        self.layer(node.title(), NetworkOperation::Convolution(convolution), &[read], BatchPlace::FIRST)
    }

    pub(super) fn pool(&mut self, node: &Node) -> Result<Known, String> {
        let (read, shape) = image_of(&self.input(node, 0)?)?;
        let (Some(&[rows, columns]), &[_, height, width]) = (node.ints("kernel_shape"), &shape[..]) else {
            return Err("only poolings of two dimensions are understood".into());
        };
        let size = [rows, columns].map(|extent| usize::try_from(extent).unwrap_or(0));
        let pool = NetworkPool { partial: node.int("ceil_mode", 0) == 1, ..window(node, size, [height, width])? };
        let is_maximum = node.operator == "MaxPool";
        self.layer(
            node.title(),
            if is_maximum { NetworkOperation::MaxPool(pool) } else { NetworkOperation::AveragePool(pool) },
            &[read],
            BatchPlace::FIRST,
        )
    }

    pub(super) fn batch_norm(&mut self, node: &Node) -> Result<Known, String> {
        let (read, shape) = image_of(&self.input(node, 0)?)?;
        match *shape {
            [_, _, _] => self.layer(node.title(), NetworkOperation::BatchNorm, &[read], BatchPlace::FIRST),
            [features] => {
                let image = NetworkOperation::Reshape { shape: vec![features, 1, 1] };
                let first = BatchPlace::FIRST;
                let (read, _) = image_of(&self.layer(&format!("{}.image", node.title()), image, &[read], first)?)?;
                let (read, _) = image_of(&self.layer(node.title(), NetworkOperation::BatchNorm, &[read], first)?)?;
                let vector = NetworkOperation::Reshape { shape: vec![features] };
                self.layer(&format!("{}.vector", node.title()), vector, &[read], first)
            }
            _ => Err("batch norm is understood for images and vectors".into()),
        }
    }
}

/// The place and the shape of a result that has the batch first and alone.
pub(super) fn image_of(value: &Known) -> Result<(usize, Vec<usize>), String> {
    match value {
        Known::Layer { place, shape, batch: BatchPlace::FIRST } => Ok((*place, shape.clone())),
        Known::Layer { .. } => Err("the batch is not its first dimension".into()),
        _ => Err("it does not work on the result of a layer".into()),
    }
}

/// The window of a convolution or a pooling over an image.
fn window(node: &Node, size: [usize; 2], image: [usize; 2]) -> Result<NetworkPool, String> {
    let is_extent = |extent: i64| (1..=MOST as i64).contains(&extent);
    let two = |name: &str, default: usize| -> Result<[usize; 2], String> {
        match node.ints(name) {
            None => Ok([default, default]),
            Some(&[rows, columns]) if is_extent(rows) && is_extent(columns) => Ok([rows, columns].map(|extent| extent as usize)),
            Some(other) => Err(format!("`{name}` is {other:?}")),
        }
    };
    let (stride, dilation) = (two("strides", 1)?, two("dilations", 1)?);
    let stated = match node.ints("pads") {
        None => Some([0; 4]),
        Some(pads) => <[i64; 4]>::try_from(pads).ok().and_then(|pads| {
            let pads = pads.map(|pad| usize::try_from(pad).ok());
            Some([pads[0]?, pads[1]?, pads[2]?, pads[3]?])
        }),
    };
    let stated = stated.ok_or("its padding is not that of an image")?;
    let padding = match node.text("auto_pad") {
        b"" | b"NOTSET" => stated,
        b"VALID" => [0; 4],
        kind => {
            let total = [0, 1].map(|axis: usize| {
                let window = dilation[axis].saturating_mul(size[axis].saturating_sub(1)).saturating_add(1);
                let last = image[axis].div_ceil(stride[axis]).saturating_sub(1) * stride[axis];
                last.saturating_add(window).saturating_sub(image[axis])
            });
            let [less, more] = [total.map(|total| total / 2), total.map(|total| total.div_ceil(2))];
            let [before, after] = if kind == b"SAME_LOWER" { [more, less] } else { [less, more] };
            [before[0], before[1], after[0], after[1]]
        }
    };
    Ok(NetworkPool { size, stride, padding, dilation, partial: false })
}
