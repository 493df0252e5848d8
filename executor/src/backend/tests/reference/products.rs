//! Products with a weight.

use super::{Given, Tensor};
use foretell_models::{Kernel, WeightLayout};

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::Matmul { rows, columns, contracted, weight, bias, relu } => {
            let mut y = vec![0.0; rows * columns];
            for i in 0..rows {
                for j in 0..columns {
                    let mut sum = if bias { reads[2][j] } else { 0.0 };
                    for k in 0..contracted {
                        sum += reads[0][i * contracted + k] * reads[1][at(weight, j, k, columns, contracted)];
                    }
                    y[i * columns + j] = if relu { sum.max(0.0) } else { sum };
                }
            }
            vec![y]
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, weight } => {
            let mut dx = vec![0.0; rows * contracted];
            for i in 0..rows {
                for j in 0..columns {
                    for k in 0..contracted {
                        dx[i * contracted + k] += reads[0][i * columns + j] * reads[1][at(weight, j, k, columns, contracted)];
                    }
                }
            }
            vec![dx]
        }
        Kernel::MatmulWeightGradient { rows, columns, contracted, weight } => {
            let mut dw = vec![0.0; columns * contracted];
            for i in 0..rows {
                for j in 0..columns {
                    for k in 0..contracted {
                        dw[at(weight, j, k, columns, contracted)] += reads[0][i * columns + j] * reads[1][i * contracted + k];
                    }
                }
            }
            vec![added(0, dw)]
        }
        _ => return None,
    })
}

fn at(layout: WeightLayout, column: usize, k: usize, columns: usize, contracted: usize) -> usize {
    match layout {
        WeightLayout::OutIn => column * contracted + k,
        WeightLayout::InOut => k * columns + column,
    }
}
