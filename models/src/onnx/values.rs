//! What is known of a tensor of a graph: the result of a layer, a weight, or numbers that only make
//! shapes.

use super::batch::{BATCH_MARK, BatchPlace, product};
use super::messages::TensorMessage;

/// The most numbers that a shape's arithmetic works on.
pub(super) const MOST_NUMBERS: i64 = 1 << 12;

/// A tensor of the graph.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Known {
    /// The result of a layer, or the network's input (place 0). The shape leaves out the batch.
    Layer { place: usize, shape: Vec<usize>, batch: BatchPlace },
    /// A trained weight.
    Weight { shape: Vec<usize> },
    /// Whole numbers, in one dimension or none.
    Numbers { values: Vec<i64>, is_scalar: bool },
    /// Numbers that do not depend on weights or samples.
    Constant { shape: Vec<usize> },
}

impl Known {
    /// A tensor that the file holds. `is_trained`: whether floating-point numbers are a weight.
    pub(super) fn of_tensor(tensor: &TensorMessage, is_trained: bool) -> Option<Self> {
        let shape = tensor.shape().filter(|shape| shape.iter().all(|&extent| extent < BATCH_MARK as usize))?;
        let is_short = shape.len() <= 1 && shape.iter().all(|&extent| extent <= MOST_NUMBERS as usize);
        if tensor.is_whole() {
            return Some(match tensor.whole_numbers().filter(|_| is_short) {
                Some(values) => Self::Numbers { values, is_scalar: shape.is_empty() },
                None => Self::Constant { shape },
            });
        }
        let has_several = shape.iter().any(|&extent| extent > 1);
        Some(if is_trained && has_several { Self::Weight { shape } } else { Self::Constant { shape } })
    }

    /// All dimensions, with the mark for the batch.
    pub(super) fn dimensions(&self) -> Vec<i64> {
        let extents = |shape: &[usize]| shape.iter().map(|&extent| extent as i64).collect::<Vec<_>>();
        match self {
            Self::Layer { shape, batch, .. } => {
                let end = (batch.axis + batch.merged()).min(shape.len());
                let start = batch.axis.min(end);
                let times = batch.before.saturating_mul(batch.after) as i64;
                [extents(&shape[..start]), vec![times.saturating_mul(BATCH_MARK)], extents(&shape[end..])].concat()
            }
            Self::Weight { shape } | Self::Constant { shape } => extents(shape),
            Self::Numbers { is_scalar: true, .. } => Vec::new(),
            Self::Numbers { values, .. } => vec![values.len() as i64],
        }
    }

    /// Where a layer's result has the batch, and the numbers of a sample before and behind it.
    pub(super) fn batch_and_sizes(&self) -> Option<(BatchPlace, [i64; 2])> {
        let Self::Layer { shape, batch, .. } = self else { return None };
        let end = (batch.axis + usize::from(batch.before > 1)).min(shape.len());
        let count = |shape: &[usize]| product(&shape.iter().map(|&extent| extent as i64).collect::<Vec<_>>());
        Some((*batch, [count(&shape[..end])?, count(&shape[end..])?]))
    }

    /// The numbers, if it is one of them.
    pub(super) fn numbers(&self) -> Option<&[i64]> {
        if let Self::Numbers { values, .. } = self { Some(values) } else { None }
    }

    /// The same kind of tensor with other dimensions. `None` for the result of a layer, which only
    /// another layer gives other dimensions.
    pub(super) fn with_dimensions(&self, dimensions: &[i64]) -> Option<Self> {
        let extents = |dimensions: &[i64]| -> Option<Vec<usize>> {
            dimensions.iter().map(|&extent| usize::try_from(extent).ok().filter(|_| extent != BATCH_MARK)).collect()
        };
        Some(match self {
            Self::Layer { .. } => return None,
            Self::Weight { .. } => Self::Weight { shape: extents(dimensions)? },
            Self::Constant { .. } => Self::Constant { shape: extents(dimensions)? },
            Self::Numbers { values, .. } => match dimensions.len() {
                0 | 1 => Self::Numbers { values: values.clone(), is_scalar: dimensions.is_empty() },
                _ => Self::Constant { shape: extents(dimensions)? },
            },
        })
    }
}
