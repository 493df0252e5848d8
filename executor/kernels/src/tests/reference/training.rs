//! Losses, sums and optimizers.

use super::{Given, Tensor, zip};
use foretell_models::{Kernel, Smoothing};

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, before, parameters, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::CrossEntropy { rows, classes } => {
            let (mut loss, mut correct, mut log_sums) = (0.0, 0.0, vec![0.0; rows]);
            for r in 0..rows {
                let row = &reads[0][r * classes..(r + 1) * classes];
                if reads[1][r] >= 0.0 {
                    let label = reads[1][r] as usize;
                    let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    log_sums[r] = largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
                    loss += log_sums[r] - row[label];
                    correct += f64::from(row.iter().position(|&x| x == largest) == Some(label));
                }
            }
            vec![added(0, vec![loss]), added(1, vec![correct]), log_sums]
        }
        Kernel::CrossEntropyGradient { rows, classes, normalizer, .. } => {
            let mut dlogits = vec![0.0; rows * classes];
            for r in (0..rows).filter(|&r| reads[1][r] >= 0.0) {
                for c in 0..classes {
                    let target = f64::from(reads[1][r] as usize == c);
                    dlogits[r * classes + c] = ((reads[0][r * classes + c] - reads[2][r]).exp() - target) / normalizer as f64;
                }
            }
            vec![dlogits]
        }
        Kernel::Sum { .. } => vec![vec![reads[0].iter().sum()]],
        Kernel::Accumulate { .. } => vec![zip(&before[0], &reads[0], |y, x| y + x)],
        Kernel::Zero { elements } => vec![vec![0.0; elements]],
        // What works on parts, or decides, has tests of its own.
        Kernel::LogitStatistics { .. } | Kernel::CrossEntropyOfStatistics { .. } | Kernel::UpdateControl { .. } => Vec::new(),
        Kernel::LabelRanks { rows, classes, parts: 1 } => {
            let rank = |r: usize| {
                let (row, label) = (&reads[0][r * classes..(r + 1) * classes], reads[1][r]);
                let comes_before =
                    |c: &usize| row[*c] > row[label as usize] || (row[*c] == row[label as usize] && (*c as f64) < label);
                if label < 0.0 { 0.0 } else { (0..classes).filter(comes_before).count() as f64 }
            };
            vec![(0..rows).map(rank).collect()]
        }
        Kernel::TopLabels { top, .. } => {
            let hits = reads[0].iter().zip(&reads[1]).filter(|&(&rank, &label)| label >= 0.0 && rank < top as f64).count();
            vec![added(0, vec![hits as f64])]
        }
        Kernel::ClassScores { rows, classes } => {
            let mut scores = Vec::new();
            for r in 0..rows {
                scores.extend(reads[0][r * classes..(r + 1) * classes].iter().map(|logit| (logit - reads[2][r]).exp()));
                scores.push(reads[1][r]);
            }
            vec![scores]
        }
        Kernel::WeightedCrossEntropy { rows, classes, smoothing } => {
            let (mut loss, mut correct, mut log_sums, mut weight) = (0.0, 0.0, vec![0.0; rows], 0.0);
            for r in (0..rows).filter(|&r| reads[1][r] >= 0.0) {
                let row = &reads[0][r * classes..(r + 1) * classes];
                let label = reads[1][r] as usize;
                let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                log_sums[r] = largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
                for (class, logit) in row.iter().enumerate() {
                    loss += target(&reads[2], smoothing, label, class) * (log_sums[r] - logit);
                }
                correct += f64::from(row.iter().position(|&x| x == largest) == Some(label));
                weight += reads[2][label];
            }
            vec![added(0, vec![loss]), added(1, vec![correct]), log_sums, added(3, vec![weight])]
        }
        Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, normalizer, .. } => {
            let mut dlogits = vec![0.0; rows * classes];
            for r in (0..rows).filter(|&r| reads[1][r] >= 0.0) {
                let targets: Vec<f64> = (0..classes).map(|c| target(&reads[3], smoothing, reads[1][r] as usize, c)).collect();
                let sum: f64 = targets.iter().sum();
                for (c, target) in targets.iter().enumerate() {
                    let probability = (reads[0][r * classes + c] - reads[2][r]).exp();
                    dlogits[r * classes + c] = (probability * sum - target) / normalizer as f64;
                }
            }
            vec![dlogits]
        }
        Kernel::LambDirection { elements, exempt, .. } => {
            let decay = if exempt { 0.0 } else { f64::from(parameters.weight_decay) };
            let [beta1, beta2, epsilon, scale] =
                [parameters.beta1, parameters.beta2, parameters.epsilon, parameters.gradient_scale].map(f64::from);
            let mut after = before.to_vec();
            for i in 0..elements {
                let g = scale * reads[0][i];
                after[1][i] = beta1 * after[1][i] + (1.0 - beta1) * g;
                after[2][i] = beta2 * after[2][i] + (1.0 - beta2) * g * g;
                let first = after[1][i] / (1.0 - beta1.powi(parameters.step as i32));
                let second = after[2][i] / (1.0 - beta2.powi(parameters.step as i32));
                after[0][i] = first / (second.sqrt() + epsilon) + decay * reads[1][i];
            }
            let squares = |x: &Tensor| x.iter().map(|x| x * x).sum();
            after[3] = vec![squares(&reads[1]), squares(&after[0])];
            after
        }
        Kernel::LambStep { .. } => {
            let rate = f64::from(parameters.learning_rate) * (reads[1][0] / reads[1][1]).sqrt();
            vec![zip(&before[0], &reads[0], |parameter, direction| parameter - rate * direction)]
        }
        Kernel::MuonDirection { .. } => {
            let (kept, scale) = (f64::from(parameters.momentum), f64::from(parameters.gradient_scale));
            let gradient: Tensor = reads[0].iter().map(|g| (1.0 - kept) * scale * g).collect();
            let momentum = zip(&before[1], &gradient, |m, g| kept * m + g);
            vec![zip(&momentum, &gradient, |m, g| kept * m + g), momentum]
        }
        Kernel::Orthogonalise { rows, columns, .. } => {
            vec![reads[0].chunks(rows * columns).flat_map(|matrix| orthogonalised(matrix, [rows, columns])).collect()]
        }
        Kernel::MuonStep { longest, exempt, .. } => {
            let decay = if exempt { 0.0 } else { f64::from(parameters.weight_decay) };
            let (keep, rate) = (1.0 - f64::from(parameters.learning_rate) * decay, 0.2 * (longest as f64).sqrt());
            vec![zip(&before[0], &reads[0], |p, d| keep * p - f64::from(parameters.learning_rate) * rate * d)]
        }
        Kernel::Sgd { momentum, nesterov, exempt, .. } => {
            let decay = if exempt { 0.0 } else { parameters.weight_decay };
            let factor = f64::from(parameters.momentum);
            let gradient = zip(&reads[0], &before[0], |g, p| f64::from(parameters.gradient_scale) * g + f64::from(decay) * p);
            let velocity = if momentum { zip(&before[1], &gradient, |v, g| factor * v + g) } else { gradient.clone() };
            let step = if nesterov { zip(&gradient, &velocity, |g, v| g + factor * v) } else { velocity.clone() };
            let parameter = zip(&before[0], &step, |p, s| p - f64::from(parameters.learning_rate) * s);
            if momentum { vec![parameter, velocity] } else { vec![parameter] }
        }
        Kernel::Average { parts, .. } => vec![before[0].iter().map(|y| y / parts as f64).collect()],
        Kernel::Difference { .. } => vec![zip(&reads[0], &reads[1], |a, b| a - b)],
        Kernel::OuterStep { replicas, momentum, nesterov, mixed, .. } => {
            let (rate, factor) = (f64::from(parameters.outer_learning_rate), f64::from(parameters.outer_momentum));
            let gradient: Tensor = reads[0].iter().map(|sum| sum / replicas as f64).collect();
            let velocity = if momentum { zip(&before[2], &gradient, |v, g| factor * v + g) } else { gradient.clone() };
            let step = if nesterov { zip(&gradient, &velocity, |g, v| g + factor * v) } else { velocity.clone() };
            let outer = zip(&before[1], &step, |p, s| p - rate * s);
            let share = if mixed { f64::from(parameters.outer_mixing) } else { 0.0 };
            let own = zip(&before[0], &outer, |own, outer| share * own + (1.0 - share) * outer);
            if momentum { vec![own, outer, velocity] } else { vec![own, outer] }
        }
        Kernel::AdamW { elements, exempt, .. } => {
            let [rate, decay, beta1, beta2, epsilon, scale] = [
                parameters.learning_rate,
                if exempt { 0.0 } else { parameters.weight_decay },
                parameters.beta1,
                parameters.beta2,
                parameters.epsilon,
                parameters.gradient_scale,
            ]
            .map(f64::from);
            let mut after = before.to_vec();
            for i in 0..elements {
                let g = scale * reads[0][i];
                after[0][i] -= rate * decay * after[0][i];
                after[1][i] = beta1 * after[1][i] + (1.0 - beta1) * g;
                after[2][i] = beta2 * after[2][i] + (1.0 - beta2) * g * g;
                let first = after[1][i] / (1.0 - beta1.powi(parameters.step as i32));
                let second = after[2][i] / (1.0 - beta2.powi(parameters.step as i32));
                after[0][i] -= rate * first / (second.sqrt() + epsilon);
            }
            after
        }
        Kernel::SumOfSquares { .. } => vec![vec![reads[0].iter().map(|x| x * x).sum()]],
        _ => return None,
    })
}

/// The target of a class: the label's smoothed, times the weight of the class.
fn target(weights: &Tensor, smoothing: Smoothing, label: usize, class: usize) -> f64 {
    let spread = smoothing.value() / weights.len() as f64;
    weights[class] * (if class == label { 1.0 - smoothing.value() } else { 0.0 } + spread)
}

/// Five steps of Newton and Schulz on one matrix, whatever its longer side is: they commute with a
/// transposition.
fn orthogonalised(matrix: &[f64], [rows, columns]: [usize; 2]) -> Tensor {
    let norm = matrix.iter().map(|x| x * x).sum::<f64>().sqrt() + 1e-7;
    let mut x: Tensor = matrix.iter().map(|x| x / norm).collect();
    // `left [n, k]` times `right [k, m]`.
    let product = |left: &[f64], right: &[f64], [n, k, m]: [usize; 3]| -> Tensor {
        let element = |i: usize, j: usize| (0..k).map(|l| left[i * k + l] * right[l * m + j]).sum();
        (0..n * m).map(|index| element(index / m, index % m)).collect()
    };
    for _ in 0..5 {
        let transposed: Tensor = (0..columns * rows).map(|index| x[index % rows * columns + index / rows]).collect();
        let gram = product(&x, &transposed, [rows, columns, rows]);
        let squared = product(&gram, &gram, [rows, rows, rows]);
        let polynomial = zip(&gram, &squared, |gram, squared| -4.7750 * gram + 2.0315 * squared);
        x = zip(&x, &product(&polynomial, &x, [rows, rows, columns]), |x, change| 3.4445 * x + change);
    }
    x
}
