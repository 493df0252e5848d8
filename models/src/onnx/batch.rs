//! The batch among a tensor's dimensions. PyTorch's attention modules put the batch behind the
//! positions, or merge it with heads or positions into one dimension.

use std::cmp::Ordering;

/// Stands for the batch among the dimensions of a shape. It is a prime, so that no product of other
/// extents is a multiple by chance.
pub(super) const BATCH_MARK: i64 = 1_000_000_007;

/// Where the graph has the batch among a tensor's dimensions: `[rows, batch * heads, features]` has
/// `axis` 1 and `after` 4 if there are four heads. Layers always have it first and alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchPlace {
    /// The dimension that counts the samples.
    pub(super) axis: usize,
    /// Extent merged into the dimension in front of the batch (varies slower than the sample's
    /// number).
    pub(super) before: usize,
    /// Extent merged into the dimension behind the batch (varies faster).
    pub(super) after: usize,
}

impl BatchPlace {
    /// The batch alone, before all other dimensions.
    pub(super) const FIRST: Self = Self { axis: 0, before: 1, after: 1 };

    /// Number of sample dimensions merged with the batch.
    pub(super) fn merged(&self) -> usize {
        [self.before, self.after].into_iter().filter(|&extent| extent > 1).count()
    }

    /// The sample's dimensions that `axis` of the graph's tensor corresponds to.
    pub(super) fn axes_of_sample(&self, axis: usize) -> std::ops::Range<usize> {
        match axis.cmp(&self.axis) {
            Ordering::Less => axis..axis + 1,
            Ordering::Equal => axis..axis + self.merged(),
            Ordering::Greater => axis + self.merged() - 1..axis + self.merged(),
        }
    }

    /// Finds the batch among `dimensions` of a reshaped tensor, whose sample has `[before, after]`
    /// numbers in front of and behind the batch.
    pub(super) fn among(dimensions: &[i64], [before, after]: [i64; 2]) -> Option<Self> {
        let axis = dimensions.iter().position(|&extent| is_batch(extent))?;
        let before = divided(before, product(dimensions.get(..axis)?)?)?;
        let after = divided(after, product(dimensions.get(axis + 1..)?)?)?;
        let is_whole = before.checked_mul(after)?.checked_mul(BATCH_MARK)? == dimensions[axis];
        let [before, after] = [usize::try_from(before).ok()?, usize::try_from(after).ok()?];
        is_whole.then_some(Self { axis, before, after })
    }

    /// The shape of a sample with these dimensions of the graph.
    pub(super) fn sample(&self, dimensions: &[i64]) -> Vec<usize> {
        let mut shape = Vec::with_capacity(dimensions.len() + 1);
        for (axis, &extent) in dimensions.iter().enumerate() {
            if axis == self.axis {
                shape.extend([self.before, self.after].into_iter().filter(|&extent| extent > 1));
            } else {
                shape.push(usize::try_from(extent).unwrap_or(0));
            }
        }
        shape
    }
}

/// Whether an extent counts samples.
pub(super) fn is_batch(extent: i64) -> bool {
    extent != 0 && extent % BATCH_MARK == 0
}

/// The product of extents.
pub(super) fn product(extents: &[i64]) -> Option<i64> {
    extents.iter().try_fold(1i64, |product, &extent| product.checked_mul(extent))
}

/// The quotient, if it is a whole number.
pub(super) fn divided(number: i64, divisor: i64) -> Option<i64> {
    (number.checked_rem(divisor)? == 0).then_some(number / divisor)
}
