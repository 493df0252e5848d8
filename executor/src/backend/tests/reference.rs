//! What every kernel should compute, written as naively as the documentation of `Kernel` reads, in double precision, and
//! without a look at the kernels. Integers are numbers here too.

use foretell_models::{Kernel, WeightLayout, Window};

use crate::backend::Hyperparameters;

type Tensor = Vec<f64>;

/// The writes after the kernel, given those before it.
pub(super) fn run(
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    parameters: &Hyperparameters,
    group_index: usize,
) -> Vec<Tensor> {
    let added = |index: usize, mut value: Tensor| {
        if accumulate {
            value.iter_mut().zip(&before[index]).for_each(|(value, before)| *value += before);
        }
        value
    };
    match *kernel {
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
        Kernel::BiasAdd { columns, .. } => vec![reads[0].iter().enumerate().map(|(i, x)| x + reads[1][i % columns]).collect()],
        Kernel::BiasGradient { columns, .. } => {
            let mut sums = vec![0.0; columns];
            reads[0].iter().enumerate().for_each(|(i, dy)| sums[i % columns] += dy);
            vec![added(0, sums)]
        }
        Kernel::Relu { .. } => vec![reads[0].iter().map(|x| x.max(0.0)).collect()],
        Kernel::ReluGradient { .. } => vec![zip(&reads[0], &reads[1], |dy, y| if y > 0.0 { dy } else { 0.0 })],
        Kernel::Gelu { .. } => vec![reads[0].iter().map(|&x| gelu(x)).collect()],
        Kernel::GeluGradient { .. } => vec![zip(&reads[0], &reads[1], |dy, x| dy * (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5)],
        Kernel::Add { .. } => vec![zip(&reads[0], &reads[1], |a, b| a + b)],
        Kernel::Convolution(window) => {
            let mut y = vec![0.0; window.output_elements()];
            taps(&window, |x, w, out| y[out] += reads[0][x] * reads[1][w]);
            vec![y]
        }
        Kernel::ConvolutionInputGradient(window) => {
            let mut dx = vec![0.0; window.input_elements()];
            taps(&window, |x, w, out| dx[x] += reads[0][out] * reads[1][w]);
            vec![dx]
        }
        Kernel::ConvolutionWeightGradient(window) => {
            let mut dw = vec![0.0; window.weight_elements()];
            taps(&window, |x, w, out| dw[w] += reads[0][out] * reads[1][x]);
            vec![added(0, dw)]
        }
        Kernel::BatchNorm { groups, positions, channels } => {
            let (x, scale, shift) = (&reads[0], &reads[1], &reads[2]);
            let mut y = vec![0.0; x.len()];
            let mut saved = vec![0.0; groups * 2 * channels];
            let mut statistics = vec![0.0; 2 * channels];
            for g in 0..groups {
                for c in 0..channels {
                    let index = |p: usize| (g * positions + p) * channels + c;
                    let mean = (0..positions).map(|p| x[index(p)]).sum::<f64>() / positions as f64;
                    let squares = (0..positions).map(|p| (x[index(p)] - mean).powi(2)).sum::<f64>();
                    let factor = 1.0 / (squares / positions as f64 + 1e-5).sqrt();
                    (0..positions).for_each(|p| y[index(p)] = (x[index(p)] - mean) * factor * scale[c] + shift[c]);
                    saved[(g * 2) * channels + c] = mean;
                    saved[(g * 2 + 1) * channels + c] = factor;
                    statistics[c] += mean;
                    statistics[channels + c] += squares / (positions - 1) as f64;
                }
            }
            vec![y, saved, added(2, statistics)]
        }
        Kernel::BatchNormInputGradient { groups, positions, channels } => {
            let (dy, x, scale, saved) = (&reads[0], &reads[1], &reads[2], &reads[3]);
            let mut dx = vec![0.0; x.len()];
            let mut sums = vec![0.0; groups * 2 * channels];
            for g in 0..groups {
                for c in 0..channels {
                    let index = |p: usize| (g * positions + p) * channels + c;
                    let (mean, factor) = (saved[g * 2 * channels + c], saved[(g * 2 + 1) * channels + c]);
                    let hat = |p: usize| (x[index(p)] - mean) * factor;
                    let sum = (0..positions).map(|p| dy[index(p)]).sum::<f64>();
                    let dot = (0..positions).map(|p| dy[index(p)] * hat(p)).sum::<f64>();
                    for p in 0..positions {
                        dx[index(p)] = scale[c] * factor * (dy[index(p)] - (sum + hat(p) * dot) / positions as f64);
                    }
                    sums[g * 2 * channels + c] = sum;
                    sums[(g * 2 + 1) * channels + c] = dot;
                }
            }
            vec![dx, sums]
        }
        Kernel::BatchNormWeightGradient { groups, channels } => {
            let sum = |which: usize, c: usize| (0..groups).map(|g| reads[0][(g * 2 + which) * channels + c]).sum::<f64>();
            vec![added(0, (0..channels).map(|c| sum(1, c)).collect()), added(1, (0..channels).map(|c| sum(0, c)).collect())]
        }
        Kernel::BatchNormInference { channels, .. } => {
            let value = |(i, x): (usize, &f64)| {
                let c = i % channels;
                (x - reads[3][c]) / (reads[3][channels + c] + 1e-5).sqrt() * reads[1][c] + reads[2][c]
            };
            vec![reads[0].iter().enumerate().map(value).collect()]
        }
        Kernel::RunningStatistics { contributions, .. } => {
            vec![zip(&before[0], &reads[0], |running, statistic| 0.9 * running + 0.1 * statistic / contributions as f64)]
        }
        Kernel::MaxPool(window) => {
            let mut y = vec![f64::NEG_INFINITY; window.output_elements()];
            let mut indices = vec![0.0; y.len()];
            windows(&window, |x, out, _| {
                for c in 0..window.in_channels {
                    if reads[0][x + c] > y[out + c] {
                        y[out + c] = reads[0][x + c];
                        indices[out + c] = (x + c) as f64;
                    }
                }
            });
            vec![y, indices]
        }
        Kernel::MaxPoolGradient(window) => {
            let mut dx = vec![0.0; window.input_elements()];
            reads[0].iter().zip(&reads[1]).for_each(|(dy, &index)| dx[index as usize] += dy);
            vec![dx]
        }
        Kernel::GlobalAveragePool { batch, positions, channels } => {
            let mut y = vec![0.0; batch * channels];
            for (i, x) in reads[0].iter().enumerate() {
                y[i / (positions * channels) * channels + i % channels] += x / positions as f64;
            }
            vec![y]
        }
        Kernel::GlobalAveragePoolGradient { batch, positions, channels } => {
            let value = |i: usize| reads[0][i / (positions * channels) * channels + i % channels] / positions as f64;
            vec![(0..batch * positions * channels).map(value).collect()]
        }
        Kernel::LayerNorm { rows, features } => {
            let (mut y, mut saved) = (vec![0.0; rows * features], vec![0.0; 2 * rows]);
            for r in 0..rows {
                let x = &reads[0][r * features..(r + 1) * features];
                let mean = x.iter().sum::<f64>() / features as f64;
                let factor = 1.0 / (x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / features as f64 + 1e-5).sqrt();
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
        Kernel::Embedding { hidden, .. } => {
            vec![reads[0].iter().flat_map(|&id| reads[1][id as usize * hidden..][..hidden].to_vec()).collect()]
        }
        Kernel::EmbeddingWeightGradient { vocabulary, hidden, .. } => {
            let mut table = vec![0.0; vocabulary * hidden];
            for (i, dy) in reads[0].iter().enumerate() {
                table[reads[1][i / hidden] as usize * hidden + i % hidden] += dy;
            }
            vec![added(0, table)]
        }
        Kernel::Attention { batch, sequence, heads, head_dimension: d, causal } => {
            let mut out = vec![0.0; batch * sequence * heads * d];
            let mut log_sums = vec![0.0; batch * heads * sequence];
            attend(&reads[0], [batch, sequence, heads, d], causal, |b, h, i, probabilities, log_sum| {
                log_sums[(b * heads + h) * sequence + i] = log_sum;
                for (j, p) in probabilities.iter().enumerate() {
                    for f in 0..d {
                        out[((b * sequence + i) * heads + h) * d + f] +=
                            p * reads[0][(((b * sequence + j) * 3 + 2) * heads + h) * d + f];
                    }
                }
            });
            vec![out, log_sums]
        }
        Kernel::AttentionGradient { batch, sequence, heads, head_dimension: d, causal } => {
            let (dout, qkv) = (&reads[0], &reads[1]);
            let mut dqkv = vec![0.0; qkv.len()];
            let at =
                |b: usize, s: usize, which: usize, h: usize, f: usize| (((b * sequence + s) * 3 + which) * heads + h) * d + f;
            attend(qkv, [batch, sequence, heads, d], causal, |b, h, i, probabilities, _| {
                let upstream = |f: usize| dout[((b * sequence + i) * heads + h) * d + f];
                let slopes: Vec<f64> =
                    (0..probabilities.len()).map(|j| (0..d).map(|f| upstream(f) * qkv[at(b, j, 2, h, f)]).sum()).collect();
                let mean = probabilities.iter().zip(&slopes).map(|(p, s)| p * s).sum::<f64>();
                for (j, (p, slope)) in probabilities.iter().zip(&slopes).enumerate() {
                    let score = p * (slope - mean) / (d as f64).sqrt();
                    for f in 0..d {
                        dqkv[at(b, i, 0, h, f)] += score * qkv[at(b, j, 1, h, f)];
                        dqkv[at(b, j, 1, h, f)] += score * qkv[at(b, i, 0, h, f)];
                        dqkv[at(b, j, 2, h, f)] += p * upstream(f);
                    }
                }
            });
            vec![dqkv]
        }
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
        Kernel::Sgd { momentum, nesterov, .. } => {
            let factor = f64::from(parameters.momentum);
            let gradient = zip(&reads[0], &before[0], |g, p| {
                f64::from(parameters.gradient_scale) * g + f64::from(parameters.weight_decay) * p
            });
            let velocity = if momentum { zip(&before[1], &gradient, |v, g| factor * v + g) } else { gradient.clone() };
            let step = if nesterov { zip(&gradient, &velocity, |g, v| g + factor * v) } else { velocity.clone() };
            let parameter = zip(&before[0], &step, |p, s| p - f64::from(parameters.learning_rate) * s);
            if momentum { vec![parameter, velocity] } else { vec![parameter] }
        }
        Kernel::AdamW { elements, .. } => {
            let [rate, decay, beta1, beta2, epsilon, scale] = [
                parameters.learning_rate,
                parameters.weight_decay,
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
        Kernel::Slice { outer, parts, inner } => {
            vec![index3([outer, 1, inner]).map(|[o, _, i]| reads[0][(o * parts + group_index) * inner + i]).collect()]
        }
        Kernel::Interleave { outer, parts, inner } => {
            vec![index3([outer, parts, inner]).map(|[o, p, i]| reads[0][(p * outer + o) * inner + i]).collect()]
        }
        Kernel::Deinterleave { outer, parts, inner } => {
            vec![index3([parts, outer, inner]).map(|[p, o, i]| reads[0][(o * parts + p) * inner + i]).collect()]
        }
    }
}

fn at(layout: WeightLayout, column: usize, k: usize, columns: usize, contracted: usize) -> usize {
    match layout {
        WeightLayout::OutIn => column * contracted + k,
        WeightLayout::InOut => k * columns + column,
    }
}

fn zip(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Tensor {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

fn index3([a, b, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..a * b * c).map(move |n| [n / (b * c), n / c % b, n % c])
}

/// Calls `each(input offset, output offset, place in the window)` for the pixels of every window, channels left to it.
fn windows(window: &Window, mut each: impl FnMut(usize, usize, usize)) {
    let (out_height, out_width) = (window.out_height(), window.out_width());
    for [n, oh, ow] in index3([window.batch, out_height, out_width]) {
        for [r, s, _] in index3([window.size, window.size, 1]) {
            let ih = (oh * window.stride + r) as isize - window.padding as isize;
            let iw = (ow * window.stride + s) as isize - window.padding as isize;
            if (0..window.height as isize).contains(&ih) && (0..window.width as isize).contains(&iw) {
                let x = ((n * window.height + ih as usize) * window.width + iw as usize) * window.in_channels;
                let out = ((n * out_height + oh) * out_width + ow) * window.out_channels;
                each(x, out, r * window.size + s);
            }
        }
    }
}

/// Calls `each(input, weight, output)` for every multiplication of a convolution.
fn taps(window: &Window, mut each: impl FnMut(usize, usize, usize)) {
    windows(window, |x, out, place| {
        for o in 0..window.out_channels {
            for c in 0..window.in_channels {
                each(x + c, (o * window.size * window.size + place) * window.in_channels + c, out + o);
            }
        }
    });
}

/// Calls `each(batch, head, query, probabilities, log-sum-exp)` for every query.
fn attend(
    qkv: &[f64],
    [batch, sequence, heads, d]: [usize; 4],
    causal: bool,
    mut each: impl FnMut(usize, usize, usize, &[f64], f64),
) {
    for [b, h, i] in index3([batch, heads, sequence]) {
        let at = |s: usize, which: usize, f: usize| (((b * sequence + s) * 3 + which) * heads + h) * d + f;
        let score = |j: usize| (0..d).map(|f| qkv[at(i, 0, f)] * qkv[at(j, 1, f)]).sum::<f64>() / (d as f64).sqrt();
        let scores: Vec<f64> = (0..if causal { i + 1 } else { sequence }).map(score).collect();
        let log_sum = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
        let probabilities: Vec<f64> = scores.iter().map(|s| (s - log_sum).exp()).collect();
        each(b, h, i, &probabilities, log_sum);
    }
}
