//! What is done to each element apart from the others.

use super::{Given, Tensor, index3, kept, zip};
use foretell_models::{DropoutSite, Kernel};

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, parameters, group_index, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::BiasAdd { columns, .. } => vec![reads[0].iter().enumerate().map(|(i, x)| x + reads[1][i % columns]).collect()],
        Kernel::BiasGradient { columns, .. } => {
            let mut sums = vec![0.0; columns];
            reads[0].iter().enumerate().for_each(|(i, dy)| sums[i % columns] += dy);
            vec![added(0, sums)]
        }
        Kernel::Relu { .. } => vec![reads[0].iter().map(|x| x.max(0.0)).collect()],
        Kernel::ReluGradient { .. } => vec![zip(&reads[0], &reads[1], |dy, y| if y > 0.0 { dy } else { 0.0 })],
        Kernel::Gelu { .. } => vec![reads[0].iter().map(|&x| gelu(x)).collect()],
        Kernel::GeluGradient { .. } => vec![zip(&reads[0], &reads[1], |dy, x| dy * gelu_slope(x))],
        Kernel::Scale { times, square, .. } => {
            vec![reads[0].iter().map(|x| x * times as f64 / (square as f64).sqrt()).collect()]
        }
        Kernel::Multiply { .. } => vec![zip(&reads[0], &reads[1], |a, b| a * b)],
        Kernel::Add { .. } => vec![zip(&reads[0], &reads[1], |a, b| a + b)],
        Kernel::GeluExact { .. } => vec![reads[0].iter().map(|&x| x * normal(x)).collect()],
        Kernel::GeluExactGradient { .. } => {
            let slope = |x: f64| normal(x) + x * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            vec![zip(&reads[0], &reads[1], |dy, x| dy * slope(x))]
        }
        Kernel::SiluMultiply { .. } => vec![zip(&reads[0], &reads[1], |gate, x| gate / (1.0 + (-gate).exp()) * x)],
        Kernel::SiluMultiplyGradient { elements } => {
            let silu = |gate: f64| gate / (1.0 + (-gate).exp());
            let slope = |gate: f64| (silu(gate + 1e-5) - silu(gate - 1e-5)) / 2e-5;
            let dgate = (0..elements).map(|i| reads[0][i] * reads[2][i] * slope(reads[1][i])).collect();
            vec![dgate, zip(&reads[0], &reads[1], |dy, gate| dy * silu(gate))]
        }
        Kernel::Dropout(sizes) => {
            let value = |[s, p, f]: [usize; 3]| {
                let x = reads[0][(s * sizes.positions + p) * sizes.features + f];
                let stored = group_index * sizes.positions + p;
                let position = sizes.zigzag.map_or(stored, |order| order.position(stored));
                let index = position * sizes.features + f;
                let DropoutSite { rate, site } = sizes.site;
                let words = [site as u64, (sizes.first_sample + s) as u64, (index as u64) >> 32];
                x * kept(parameters, rate, &words, index as u32)
            };
            vec![index3([sizes.samples, sizes.positions, sizes.features]).map(value).collect()]
        }
        _ => return None,
    })
}

pub(super) fn gelu_slope(x: f64) -> f64 {
    (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
}

pub(super) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// The normal distribution up to x, by its series (Marsaglia 2004), which needs no error function.
fn normal(x: f64) -> f64 {
    let (mut sum, mut term, mut n) = (x, x, 1.0);
    while term.abs() > 1e-18 {
        n += 2.0;
        term *= x * x / n;
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}
