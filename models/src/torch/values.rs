//! What is known of a value of a trace: its index in the network, and the shape of one sample.

use super::document::{TracedDimension, TracedValue};
use crate::families::NetworkStorage;

/// The largest extent.
const MOST_EXTENT: f64 = (1u64 << 40) as f64;

/// A value of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Known {
    /// The value of the network with the index `place`, seen in this shape of one sample.
    Layer {
        place: usize,
        /// The dimensions of one sample. A dimension that is the batch alone is left out.
        shape: Vec<usize>,
        /// Whether all samples share the value.
        shared: bool,
        /// Whether the value is a transposed matrix.
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
    /// The index of the dimension that contains the batch.
    pub(super) axis: Option<usize>,
}

/// The shape of one sample of a value, at a sequence length.
///
/// # Errors
/// The fault of a dimension.
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
        // Checked to be a whole number below 2^40.
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
        // The dimension is the batch times another extent.
        if extent != 1 {
            sample.shape.push(extent);
        }
    }
    if elements(&sample.shape) as f64 > MOST_EXTENT {
        return Err(format!("a sample has the shape {:?}, which is too large", sample.shape));
    }
    Ok(sample)
}

/// The storage of a number format in a network whose products are computed in `base`.
pub(super) fn storage(dtype: &str, base: &str) -> NetworkStorage {
    match dtype {
        "i64" | "i32" | "i16" | "i8" | "u8" | "bool" => NetworkStorage::Integer,
        "f32" | "f64" | "c64" if dtype != base => NetworkStorage::Single,
        _ => NetworkStorage::Precision,
    }
}
