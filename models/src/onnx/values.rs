//! What is known of a tensor of a graph: the result of a layer, a weight, or numbers that only make
//! shapes.

use super::messages::TensorMessage;

/// Stands for the batch among the dimensions of a shape. It is a prime, so that no product of other
/// extents is a multiple by chance.
pub(super) const BATCH_MARK: i64 = 1_000_000_007;

/// The most numbers that a shape's arithmetic works on.
const MOST_NUMBERS: usize = 1 << 12;

/// A tensor of the graph.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Known {
    /// The result of a layer, or the network's input (place 0). The shape leaves out the batch. If
    /// it is `merged`, the graph counts the batch and the first dimension as one.
    Layer { place: usize, shape: Vec<usize>, merged: bool },
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
        let is_short = shape.len() <= 1 && shape.iter().all(|&extent| extent <= MOST_NUMBERS);
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
            Self::Layer { shape, merged: false, .. } => [vec![BATCH_MARK], extents(shape)].concat(),
            Self::Layer { shape, .. } => {
                let mut dimensions = extents(shape);
                dimensions.iter_mut().take(1).for_each(|first| *first = first.saturating_mul(BATCH_MARK));
                dimensions
            }
            Self::Weight { shape } | Self::Constant { shape } => extents(shape),
            Self::Numbers { is_scalar: true, .. } => Vec::new(),
            Self::Numbers { values, .. } => vec![values.len() as i64],
        }
    }

    /// Whether the graph counts its first dimension and the batch as one.
    pub(super) fn is_merged(&self) -> bool {
        matches!(self, Self::Layer { merged: true, .. })
    }

    /// The result of a layer, whose first dimension the graph counts with the batch if `merged`.
    pub(super) fn with_merged(self, merged: bool) -> Self {
        if let Self::Layer { place, shape, .. } = self { Self::Layer { place, shape, merged } } else { self }
    }

    /// The dimension of a sample that a dimension of the graph's tensor is. `None` for the batch.
    pub(super) fn axis_of_sample(&self, axis: usize) -> Option<usize> {
        if self.is_merged() { Some(axis).filter(|&axis| axis > 0) } else { axis.checked_sub(1) }
    }

    /// The shape of a sample with other dimensions behind the batch.
    pub(super) fn sample_with(&self, dimensions: &[i64]) -> Vec<usize> {
        let rest = dimensions.iter().skip(1).map(|&extent| usize::try_from(extent).unwrap_or(0));
        match self {
            Self::Layer { shape, merged: true, .. } => shape.iter().take(1).copied().chain(rest).collect(),
            _ => rest.collect(),
        }
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
