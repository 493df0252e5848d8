//! Unequal shares of the samples for data-parallel ranks on devices of several speeds.

use super::Space;
use super::divisors::greatest_common_divisor;
use super::meshes::MeshSizes;

/// Shares of the slowest data-parallel rank that are tried, in micro-batches.
const SHARES_OF_SLOWEST: [usize; 4] = [1, 2, 3, 4];

/// How much of a device's lead in matrix-product speed its share of the samples follows (1 means
/// proportional), the likeliest first. Other kernels gain less than products, and the shares must
/// divide the batch.
const SPEED_FOLLOWED: [f64; 11] = [0.8, 0.9, 0.7, 1.0, 0.6, 1.1, 0.5, 1.2, 0.4, 1.3, 0.3];

/// Most lists of unequal shares that are tried on each mesh.
const MOST_SHARES: usize = 4;

impl Space<'_> {
    /// Returns the unequal shares of samples to try for the data-parallel ranks of a mesh: the
    /// fixed ones, or some that suit devices of several speeds.
    pub(super) fn unequal_shares(&self, sizes: MeshSizes, context: usize, expert: usize) -> Vec<Vec<usize>> {
        let MeshSizes { data, tensor, pipeline } = sizes;
        match &self.fixed.shares {
            Some(shares) => {
                let total = shares.iter().fold(0, |all: usize, share| all.saturating_add(*share));
                let divides = self.global_batch.is_multiple_of(total);
                if shares.len() == data && divides && expert == 1 { vec![shares.clone()] } else { Vec::new() }
            }
            None if expert == 1 && pipeline == 1 => self.shares_by_speed(data, tensor * context),
            None => Vec::new(),
        }
    }

    /// Returns shares roughly in proportion to the speeds of `data` ranks on `devices_per_rank`
    /// consecutive devices each. Only shares that divide the batch are returned.
    fn shares_by_speed(&self, data: usize, devices_per_rank: usize) -> Vec<Vec<usize>> {
        let mut found: Vec<Vec<usize>> = Vec::new();
        let speeds = &self.devices.speeds;
        if self.base.shares.is_some() || data < 2 || speeds.len() < data * devices_per_rank {
            return found;
        }
        let speeds: Vec<f64> = speeds[..data * devices_per_rank]
            .chunks(devices_per_rank)
            .map(|ranks| ranks.iter().copied().fold(f64::INFINITY, f64::min))
            .collect();
        let slowest = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        let tried = SPEED_FOLLOWED.iter().flat_map(|followed| SHARES_OF_SLOWEST.iter().map(move |unit| (followed, *unit)));
        for (followed, unit) in tried {
            let share = |speed: &f64| (unit as f64 * (1.0 + (speed / slowest - 1.0) * followed)).round().max(1.0) as usize;
            let shares: Vec<usize> = speeds.iter().map(share).collect();
            let divisor = shares.iter().copied().fold(0, greatest_common_divisor);
            let shares: Vec<usize> = shares.into_iter().map(|share| share / divisor).collect();
            let is_unequal = shares.iter().any(|&share| share != shares[0]);
            let divides = self.global_batch.is_multiple_of(shares.iter().sum());
            if is_unequal && divides && found.len() < MOST_SHARES && !found.contains(&shares) {
                found.push(shares);
            }
        }
        found
    }
}
