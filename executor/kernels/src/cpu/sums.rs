//! Column sums of a matrix. Sums run over blocks of rows, so that long sums stay accurate. The
//! order of additions is fixed.

use super::vector::{multiply_add, multiversion};

/// Rows summed before their sum is added to the total. For some thousands of rows, the chain of
/// additions within a block and the chain that adds the blocks are then of similar length.
const BLOCK_ROWS: usize = 64;

multiversion! {
    /// `totals[column] += Σ_rows x`. `partial` is scratch, as long as `totals`.
    pub(super) fn column_sums(x: &[f32], totals: &mut [f32], partial: &mut [f32]) {
        let columns = totals.len().max(1);
        let partial = &mut partial[..totals.len()];
        for block in x.chunks(BLOCK_ROWS * columns) {
            partial.fill(0.0);
            let fours = block.chunks_exact(4 * columns);
            let rest = fours.remainder();
            for four in fours {
                let (first, others) = four.split_at(columns);
                let (second, others) = others.split_at(columns);
                let (third, fourth) = others.split_at(columns);
                for ((((sum, &a), &b), &c), &d) in partial.iter_mut().zip(first).zip(second).zip(third).zip(fourth) {
                    *sum += (a + b) + (c + d);
                }
            }
            for row in rest.chunks_exact(columns) {
                for (sum, &x) in partial.iter_mut().zip(row) {
                    *sum += x;
                }
            }
            for (total, &sum) in totals.iter_mut().zip(&*partial) {
                *total += sum;
            }
        }
    }

    /// `totals[column] += Σ_rows dy` and `products[column] += Σ_rows dy · (x - mean) · scale`, with
    /// the column's mean and scale. `partial` is scratch, twice as long as `totals`.
    pub(super) fn column_sums_normalised(
        dy: &[f32], x: &[f32], mean: &[f32], scale: &[f32], totals: &mut [f32], products: &mut [f32], partial: &mut [f32],
    ) {
        let columns = totals.len();
        let (sums, dots) = partial[..2 * columns].split_at_mut(columns);
        let (mean, scale, products) = (&mean[..columns], &scale[..columns], &mut products[..columns]);
        let block = BLOCK_ROWS * columns.max(1);
        for (dy, x) in dy.chunks(block).zip(x.chunks(block)) {
            sums.fill(0.0);
            dots.fill(0.0);
            for (dy, x) in dy.chunks_exact(columns).zip(x.chunks_exact(columns)) {
                for column in 0..columns {
                    sums[column] += dy[column];
                    dots[column] = multiply_add::<FUSED>(dy[column], x[column] - mean[column], dots[column]);
                }
            }
            for column in 0..columns {
                totals[column] += sums[column];
                products[column] += dots[column] * scale[column];
            }
        }
    }

    /// As [`column_sums_normalised`], with each row's mean and scale, `saved[row] = (mean, scale)`.
    pub(super) fn column_sums_normalised_rows(
        dy: &[f32], x: &[f32], saved: &[f32], totals: &mut [f32], products: &mut [f32], partial: &mut [f32],
    ) {
        let columns = totals.len();
        let (sums, dots) = partial[..2 * columns].split_at_mut(columns);
        let products = &mut products[..columns];
        let block = BLOCK_ROWS * columns.max(1);
        for ((dy, x), saved) in dy.chunks(block).zip(x.chunks(block)).zip(saved.chunks(2 * BLOCK_ROWS)) {
            sums.fill(0.0);
            dots.fill(0.0);
            for ((dy, x), saved) in dy.chunks_exact(columns).zip(x.chunks_exact(columns)).zip(saved.chunks_exact(2)) {
                let (mean, scale) = (saved[0], saved[1]);
                for column in 0..columns {
                    sums[column] += dy[column];
                    dots[column] = multiply_add::<FUSED>(dy[column], (x[column] - mean) * scale, dots[column]);
                }
            }
            for column in 0..columns {
                totals[column] += sums[column];
                products[column] += dots[column];
            }
        }
    }
}
