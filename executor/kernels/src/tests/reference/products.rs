//! Products with a weight.

use super::elementwise::{gelu, gelu_slope};
use super::{Given, Tensor};
use foretell_models::{Activation, Kernel, WeightLayout};

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::Matmul { rows, columns, contracted, weight, bias, activation } => {
            let mut y = vec![0.0; rows * columns];
            for i in 0..rows {
                for j in 0..columns {
                    let mut sum = if bias { reads[2][j] } else { 0.0 };
                    for k in 0..contracted {
                        sum += reads[0][i * contracted + k] * reads[1][at(weight, j, k, columns, contracted)];
                    }
                    y[i * columns + j] = sum;
                }
            }
            match activation {
                Activation::None => vec![y],
                Activation::Relu => vec![y.iter().map(|&x| x.max(0.0)).collect()],
                Activation::Gelu => vec![y.iter().map(|&x| gelu(x)).collect()],
                Activation::GeluKept => vec![y.iter().map(|&x| gelu(x)).collect(), y],
            }
        }
        Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu } => {
            let mut dx = vec![0.0; rows * contracted];
            for i in 0..rows {
                for j in 0..columns {
                    for k in 0..contracted {
                        dx[i * contracted + k] += reads[0][i * columns + j] * reads[1][at(weight, j, k, columns, contracted)];
                    }
                }
            }
            if gelu {
                dx.iter_mut().zip(&reads[2]).for_each(|(dx, &x)| *dx *= gelu_slope(x));
            }
            vec![dx]
        }
        Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias } => {
            let mut dw = vec![0.0; columns * contracted];
            for i in 0..rows {
                for j in 0..columns {
                    for k in 0..contracted {
                        dw[at(weight, j, k, columns, contracted)] += reads[0][i * columns + j] * reads[1][i * contracted + k];
                    }
                }
            }
            let sum = |column: usize| (0..rows).map(|row| reads[0][row * columns + column]).sum();
            let bias = bias.then(|| added(1, (0..columns).map(sum).collect()));
            std::iter::once(added(0, dw)).chain(bias).collect()
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
