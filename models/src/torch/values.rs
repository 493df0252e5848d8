//! What is known of a value of a trace: where the network has it, and the shape of one sample.

use super::document::{TracedDimension, TracedValue};
use crate::families::NetworkStorage;

/// The largest extent.
const MOST_EXTENT: f64 = (1u64 << 40) as f64;

/// A value of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Known {
    /// The network's input or layer of this number, seen in this shape of one sample.
    Layer {
        place: usize,
        /// The dimensions of one sample. The batch is left out where it is alone.
        shape: Vec<usize>,
        /// Whether all samples share it.
        shared: bool,
        /// Whether it is a matrix whose two dimensions are exchanged.
        transposed: bool,
    },
    /// Numbers that depend on no parameter and no input.
    Constant { shape: Vec<usize> },
}

impl Known {
    /// The shape of one sample.
    pub(super) fn shape(&self) -> &[usize] {
        match self {
            Self::Layer { shape, .. } | Self::Constant { shape, .. } => shape,
        }
    }

    /// The elements of one sample.
    pub(super) fn elements(&self) -> usize {
        elements(self.shape())
    }
}

/// The elements of a shape. Shapes were checked to have fewer than 2^40.
pub(super) fn elements(shape: &[usize]) -> usize {
    shape.iter().fold(1usize, |product, &extent| product.saturating_mul(extent))
}

/// A value's shape for one sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    pub(super) shape: Vec<usize>,
    /// Whether no dimension grows with the batch.
    pub(super) shared: bool,
    /// The dimension that the batch is in.
    pub(super) axis: Option<usize>,
}

/// The shape of one sample of a value at a length of the sequence.
///
/// # Errors
/// What is wrong with a dimension.
pub(super) fn sample(value: &TracedValue, sequence: f64) -> Result<Sample, String> {
    let mut sample = Sample { shape: Vec::with_capacity(value.shape.len()), shared: true, axis: None };
    for (axis, dimension) in value.shape.iter().enumerate() {
        let (power, extent) = match dimension {
            TracedDimension::Fixed(extent) => (0.0, *extent as f64),
            TracedDimension::Formula(terms) => match terms[..] {
                [power, a] => (power, a),
                [power, a, b] => (power, a + b * sequence),
                [power, a, b, c] => (power, a + b * sequence + c * sequence * sequence),
                _ => return Err(format!("a dimension has {} terms", terms.len())),
            },
        };
        if (power != 0.0 && power != 1.0) || !(0.0..=MOST_EXTENT).contains(&extent) || (extent - extent.round()).abs() > 1e-6 {
            return Err(format!("a dimension is {extent} times the batch to the power of {power}, which is no size"));
        }
        // It was checked to be a whole number below 2^40.
        let extent = extent.round() as usize;
        if power == 0.0 {
            sample.shape.push(extent);
            continue;
        }
        if !sample.shared {
            return Err("two dimensions grow with the batch: samples meet each other".into());
        }
        sample.shared = false;
        sample.axis = Some(axis);
        // Samples in one dimension with something else.
        if extent != 1 {
            sample.shape.push(extent);
        }
    }
    if elements(&sample.shape) as f64 > MOST_EXTENT {
        return Err(format!("a sample has the shape {:?}, which is too large", sample.shape));
    }
    Ok(sample)
}

/// How a number format is stored in a network whose products are made in `base`.
pub(super) fn storage(dtype: &str, base: &str) -> NetworkStorage {
    match dtype {
        "i64" | "i32" | "i16" | "i8" | "u8" | "bool" => NetworkStorage::Integer,
        "f32" | "f64" | "c64" if dtype != base => NetworkStorage::Single,
        _ => NetworkStorage::Precision,
    }
}
