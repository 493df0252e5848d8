//! Norms of rows.

use super::{Given, Tensor};
use foretell_models::Kernel;

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::LayerNorm { rows, features, epsilon } => {
            let (mut y, mut saved) = (vec![0.0; rows * features], vec![0.0; 2 * rows]);
            for r in 0..rows {
                let x = &reads[0][r * features..(r + 1) * features];
                let mean = x.iter().sum::<f64>() / features as f64;
                let factor = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / features as f64 + epsilon.value()).sqrt();
                (0..features).for_each(|f| y[r * features + f] = (x[f] - mean) * factor * reads[1][f] + reads[2][f]);
                (saved[2 * r], saved[2 * r + 1]) = (mean, factor);
            }
            vec![y, saved]
        }
        Kernel::LayerNormInputGradient { rows, features } => {
            let (dy, x, scale, saved) = (&reads[0], &reads[1], &reads[2], &reads[3]);
            let mut dx = vec![0.0; rows * features];
            for r in 0..rows {
                let hat = |f: usize| (x[r * features + f] - saved[2 * r]) * saved[2 * r + 1];
                let g = |f: usize| dy[r * features + f] * scale[f];
                let sum = (0..features).map(g).sum::<f64>() / features as f64;
                let dot = (0..features).map(|f| g(f) * hat(f)).sum::<f64>() / features as f64;
                (0..features).for_each(|f| dx[r * features + f] = saved[2 * r + 1] * (g(f) - sum - hat(f) * dot));
            }
            vec![dx]
        }
        Kernel::LayerNormWeightGradient { rows, features } => {
            let (dy, x, saved) = (&reads[0], &reads[1], &reads[2]);
            let (mut dscale, mut dshift) = (vec![0.0; features], vec![0.0; features]);
            for r in 0..rows {
                for f in 0..features {
                    dscale[f] += dy[r * features + f] * (x[r * features + f] - saved[2 * r]) * saved[2 * r + 1];
                    dshift[f] += dy[r * features + f];
                }
            }
            vec![added(0, dscale), added(1, dshift)]
        }
        Kernel::RmsNorm { rows, features, epsilon } => {
            let mut saved = vec![0.0; rows];
            for (r, saved) in saved.iter_mut().enumerate() {
                let squares = reads[0][r * features..(r + 1) * features].iter().map(|x| x * x).sum::<f64>();
                *saved = 1.0 / (squares / features as f64 + epsilon.value()).sqrt();
            }
            let y = reads[0].iter().enumerate().map(|(i, x)| x * saved[i / features] * reads[1][i % features]);
            vec![y.collect(), saved]
        }
        Kernel::RmsNormInputGradient { rows, features } => {
            let (dy, x, scale, saved) = (&reads[0], &reads[1], &reads[2], &reads[3]);
            let mut dx = vec![0.0; rows * features];
            for (r, saved) in saved.iter().enumerate().take(rows) {
                let at = |f: usize| r * features + f;
                let dot = (0..features).map(|f| dy[at(f)] * scale[f] * x[at(f)] * saved).sum::<f64>() / features as f64;
                (0..features).for_each(|f| dx[at(f)] = saved * (dy[at(f)] * scale[f] - x[at(f)] * saved * dot));
            }
            vec![dx]
        }
        Kernel::RmsNormWeightGradient { rows, features } => {
            let sum = |f: usize| (0..rows).map(|r| reads[0][r * features + f] * reads[1][r * features + f] * reads[2][r]).sum();
            vec![added(0, (0..features).map(sum).collect())]
        }
        _ => return None,
    })
}
