//! The operations of a network's layers, and the shapes of their results.

use super::super::check::MOST;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A convolution of images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkConvolution {
    /// Channels of the result.
    pub channels: usize,
    /// The window.
    #[serde(flatten)]
    pub pool: NetworkPool,
    /// Groups of channels that are convolved apart.
    #[serde(default = "crate::defaults::one")]
    pub groups: usize,
    /// Whether a bias is added.
    #[serde(default, skip_serializing_if = "crate::defaults::is_false")]
    pub bias: bool,
}

/// A window over an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkPool {
    /// Rows and columns of the window.
    pub size: [usize; 2],
    /// Distance between windows, in rows and in columns.
    #[serde(default = "ones")]
    pub stride: [usize; 2],
    /// Rows added above, columns on the left, rows below, columns on the right.
    #[serde(default)]
    pub padding: [usize; 4],
    /// Distance between the rows, and the columns, of a window.
    #[serde(default = "ones")]
    pub dilation: [usize; 2],
    /// Whether a window that is cut off counts.
    #[serde(default, skip_serializing_if = "crate::defaults::is_false")]
    pub partial: bool,
}

fn ones() -> [usize; 2] {
    [1, 1]
}

impl NetworkPool {
    /// The rows and columns of the result.
    fn extents(&self, [height, width]: [usize; 2]) -> Option<[usize; 2]> {
        let [top, left, bottom, right] = self.padding;
        let extent = |image: usize, pads: usize, axis: usize| {
            let window = self.dilation[axis] * (self.size[axis].checked_sub(1)?) + 1;
            let free = (image + pads).checked_sub(window)?;
            let stride = self.stride[axis].max(1);
            Some(if self.partial { free.div_ceil(stride) } else { free / stride } + 1)
        };
        Some([extent(height, top + bottom, 0)?, extent(width, left + right, 1)?])
    }

    /// Size, stride and padding, if they are the same for rows and columns and on both sides.
    pub(super) fn square(&self) -> Option<[usize; 3]> {
        let ([size, columns], [stride, right]) = (self.size, self.stride);
        let is_even = self.padding.iter().all(|&padding| padding == self.padding[0]);
        (size == columns && stride == right && is_even && self.dilation == [1, 1] && !self.partial).then_some([
            size,
            stride,
            self.padding[0],
        ])
    }

    fn sizes(&self) -> impl Iterator<Item = usize> {
        let padding = self.padding.into_iter().map(|padding| padding.saturating_add(1));
        self.size.into_iter().chain(self.stride).chain(self.dilation).chain(padding)
    }
}

/// What a layer computes. Axes and shapes leave out the batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkOperation {
    /// A product of the last dimension with a weight.
    Linear {
        /// Features of the result.
        features: usize,
        /// Whether a bias is added.
        #[serde(default, skip_serializing_if = "crate::defaults::is_false")]
        bias: bool,
    },
    /// A convolution.
    Convolution(NetworkConvolution),
    /// Batch normalisation of an image's channels.
    BatchNorm,
    /// Layer normalisation of the last dimension.
    LayerNorm,
    /// `max(0, x)`.
    Relu,
    /// GELU.
    Gelu,
    /// Another function of each element.
    Function,
    /// A softmax over the last dimension.
    Softmax,
    /// The sum of two tensors. Either may be repeated along dimensions.
    Add,
    /// The product of two tensors, element by element. Either may be repeated along dimensions.
    Multiply,
    /// The sum with a weight of this shape, which is repeated.
    Shift {
        /// The weight's shape.
        shape: Vec<usize>,
    },
    /// The product with a weight of this shape, which is repeated.
    Weigh {
        /// The weight's shape.
        shape: Vec<usize>,
    },
    /// The maximum of each window.
    MaxPool(NetworkPool),
    /// The mean of each window.
    AveragePool(NetworkPool),
    /// The mean of each channel of an image.
    GlobalAveragePool,
    /// Means or other statistics, with this shape.
    Statistic {
        /// Shape of the result.
        shape: Vec<usize>,
    },
    /// The same numbers in another shape.
    Reshape {
        /// Shape of the result.
        shape: Vec<usize>,
    },
    /// The same numbers with dimensions in another order.
    Transpose {
        /// The dimensions of the input, in the order of the result.
        order: Vec<usize>,
    },
    /// Tensors one after the other along a dimension.
    Concatenate {
        /// The dimension.
        axis: usize,
    },
    /// Some of the numbers, or numbers repeated or moved, with this shape.
    Take {
        /// Shape of the result.
        shape: Vec<usize>,
    },
    /// A look-up of tokens in a table.
    Embedding {
        /// Rows of the table.
        rows: usize,
        /// Features of a row.
        features: usize,
    },
    /// Matrix products of two tensors, over their last two dimensions.
    MatrixProduct,
}

impl NetworkOperation {
    /// Whether it has weights.
    pub(super) fn has_weights(&self) -> bool {
        matches!(
            self,
            Self::Linear { .. } | Self::Convolution(_) | Self::Embedding { .. } | Self::MatrixProduct | Self::Weigh { .. }
        )
    }

    /// Whether it belongs to the layer before it: an activation, a norm, a pooling.
    pub(super) fn follows(&self) -> bool {
        matches!(
            self,
            Self::BatchNorm
                | Self::Relu
                | Self::Gelu
                | Self::Function
                | Self::Softmax
                | Self::Shift { .. }
                | Self::MaxPool(_)
                | Self::AveragePool(_)
                | Self::Reshape { .. }
                | Self::Take { .. }
        )
    }

    /// Refuses sizes that are 0 or too large.
    pub(crate) fn validate(&self) -> Result<(), String> {
        let sizes: Vec<usize> = match self {
            Self::Linear { features, .. } => vec![*features],
            Self::Convolution(one) => one.pool.sizes().chain([one.channels, one.groups]).collect(),
            Self::MaxPool(pool) | Self::AveragePool(pool) => pool.sizes().collect(),
            Self::Shift { shape }
            | Self::Weigh { shape }
            | Self::Statistic { shape }
            | Self::Reshape { shape }
            | Self::Take { shape } => shape.clone(),
            Self::Embedding { rows, features } => vec![*rows, *features],
            _ => Vec::new(),
        };
        match sizes.iter().find(|&&size| size == 0 || size > MOST) {
            Some(size) => Err(format!("a layer has a size of {size}")),
            None => Ok(()),
        }
    }

    /// The shape of the result for one sample.
    ///
    /// # Errors
    /// A reason, if it cannot be computed from these shapes.
    pub(crate) fn shape(&self, reads: &[&[usize]]) -> Result<Vec<usize>, String> {
        let wanted = match self {
            Self::Add | Self::Multiply | Self::MatrixProduct => 2..=2,
            Self::Concatenate { .. } => 1..=usize::MAX,
            _ => 1..=1,
        };
        if !wanted.contains(&reads.len()) {
            return Err(format!("it reads {} tensors", reads.len()));
        }
        let [first, last] = [reads[0], reads[reads.len() - 1]];
        let image = || match *first {
            [channels, height, width] => Ok((channels, [height, width])),
            _ => Err(format!("it wants an image, and reads the shape {first:?}")),
        };
        let window = |pool: &NetworkPool, [height, width]: [usize; 2]| {
            pool.extents([height, width]).ok_or_else(|| format!("the window is larger than the image of {height}x{width}"))
        };
        match self {
            Self::Linear { features, .. } => Ok(with_last(first, *features)),
            Self::Convolution(one) => {
                let (channels, extents) = image()?;
                if !channels.is_multiple_of(one.groups) || !one.channels.is_multiple_of(one.groups) {
                    return Err(format!("{} groups do not divide {channels} and {} channels", one.groups, one.channels));
                }
                let [height, width] = window(&one.pool, extents)?;
                Ok(vec![one.channels, height, width])
            }
            Self::MaxPool(pool) | Self::AveragePool(pool) => {
                let (channels, extents) = image()?;
                let [height, width] = window(pool, extents)?;
                Ok(vec![channels, height, width])
            }
            Self::BatchNorm => image().map(|_| first.to_vec()),
            Self::GlobalAveragePool => image().map(|(channels, _)| vec![channels]),
            Self::LayerNorm | Self::Relu | Self::Gelu | Self::Function | Self::Softmax => Ok(first.to_vec()),
            Self::Add | Self::Multiply => broadcast(first, last),
            Self::Shift { shape } | Self::Weigh { shape } => broadcast(first, shape),
            Self::Statistic { shape } | Self::Take { shape } => Ok(shape.clone()),
            Self::Reshape { shape } => {
                let elements = |shape: &[usize]| shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
                if elements(first) == elements(shape) {
                    Ok(shape.clone())
                } else {
                    Err(format!("{first:?} cannot have the shape {shape:?}"))
                }
            }
            Self::Transpose { order } => {
                let mut sorted = order.clone();
                sorted.sort_unstable();
                if !sorted.iter().copied().eq(0..first.len()) {
                    return Err(format!("`order` is {order:?}, and the input has {} dimensions", first.len()));
                }
                Ok(order.iter().map(|&axis| first[axis]).collect())
            }
            Self::Concatenate { axis } => {
                let fits = |read: &&[usize]| {
                    let others = |shape: &[usize]| {
                        shape.iter().enumerate().filter(|(index, _)| index != axis).map(|(_, &extent)| extent).collect::<Vec<_>>()
                    };
                    read.len() == first.len() && *axis < first.len() && others(read) == others(first)
                };
                if !reads.iter().all(fits) {
                    return Err(format!("{reads:?} do not fit along dimension {axis}"));
                }
                let mut shape = first.to_vec();
                shape[*axis] = reads.iter().map(|read| read[*axis]).sum();
                Ok(shape)
            }
            Self::Embedding { features, .. } => Ok([first, &[*features]].concat()),
            Self::MatrixProduct => {
                let [.., rows, contracted] = *first else { return Err(format!("{first:?} is no matrix")) };
                let [.., own, columns] = *last else { return Err(format!("{last:?} is no matrix")) };
                if own != contracted || first[..first.len() - 2] != last[..last.len() - 2] {
                    return Err(format!("{first:?} and {last:?} have no product"));
                }
                Ok([&first[..first.len() - 2], &[rows, columns]].concat())
            }
        }
    }
}

fn with_last(shape: &[usize], features: usize) -> Vec<usize> {
    [&shape[..shape.len().saturating_sub(1)], &[features]].concat()
}

/// The shape of two tensors that are repeated to fit each other.
fn broadcast(left: &[usize], right: &[usize]) -> Result<Vec<usize>, String> {
    let rank = left.len().max(right.len());
    let at = |shape: &[usize], axis: usize| (axis + shape.len()).checked_sub(rank).map_or(1, |axis| shape[axis]);
    (0..rank)
        .map(|axis| match (at(left, axis), at(right, axis)) {
            (one, other) if one == other || other == 1 => Ok(one),
            (1, other) => Ok(other),
            _ => Err(format!("{left:?} and {right:?} do not fit each other")),
        })
        .collect()
}
