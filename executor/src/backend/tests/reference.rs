//! What every kernel should compute, written as naively as the documentation of `Kernel` reads, in double precision, and
//! without a look at the kernels. Integers are numbers here too.

use foretell_models::{Attention, Kernel, Rope, WeightLayout, Window};

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
        Kernel::Scale { square, .. } => vec![reads[0].iter().map(|x| x / (square as f64).sqrt()).collect()],
        Kernel::Multiply { .. } => vec![zip(&reads[0], &reads[1], |a, b| a * b)],
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
        Kernel::Narrow { .. } => vec![reads[0].clone()],
        Kernel::Attention(sizes) => {
            let [_, k, v] = unpacked(&sizes, reads);
            let (d, heads, queries) = (sizes.head_dimension, sizes.heads(), sizes.queries);
            let mut out = vec![0.0; sizes.query_elements()];
            let mut log_sums = vec![0.0; sizes.rows()];
            debug_assert_eq!(k.len(), v.len());
            attend(&sizes, reads, group_index, |b, h, i, probabilities, log_sum| {
                log_sums[(b * heads + h) * queries + i] = log_sum;
                for (j, p) in probabilities.iter().enumerate() {
                    for f in 0..d {
                        let value = v[((b * sizes.keys + j) * sizes.key_heads + h / sizes.group) * d + f];
                        out[((b * queries + i) * heads + h) * d + f] += p * value;
                    }
                }
            });
            vec![out, log_sums]
        }
        Kernel::AttentionGradient(sizes) => {
            let (dout, forward) = (&reads[0], &reads[1..]);
            let [q, k, v] = unpacked(&sizes, forward);
            let (d, heads, queries) = (sizes.head_dimension, sizes.heads(), sizes.queries);
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![0.0; x.len()]);
            let mut dtable = vec![0.0; sizes.table_elements()];
            // The table follows the output and its log-sum-exp here.
            let mut inputs: Vec<Tensor> = forward[..if sizes.packed { 1 } else { 3 }].to_vec();
            inputs.extend(sizes.relative.map(|_| reads[reads.len() - 1].clone()));
            attend(&sizes, &inputs, group_index, |b, h, i, probabilities, _| {
                let at_q = |f: usize| ((b * queries + i) * heads + h) * d + f;
                let at_k = |j: usize, f: usize| ((b * sizes.keys + j) * sizes.key_heads + h / sizes.group) * d + f;
                let slopes: Vec<f64> =
                    (0..probabilities.len()).map(|j| (0..d).map(|f| dout[at_q(f)] * v[at_k(j, f)]).sum()).collect();
                let mean = probabilities.iter().zip(&slopes).map(|(p, s)| p * s).sum::<f64>();
                for (j, (p, slope)) in probabilities.iter().zip(&slopes).enumerate() {
                    let biased = p * (slope - mean);
                    if sizes.relative.is_some() {
                        dtable[bucket(&sizes, group_index, i, j) * heads + h] += biased;
                    }
                    let score = if sizes.scaled { biased / (d as f64).sqrt() } else { biased };
                    for f in 0..d {
                        dq[at_q(f)] += score * k[at_k(j, f)];
                        dk[at_k(j, f)] += score * q[at_q(f)];
                        dv[at_k(j, f)] += p * dout[at_q(f)];
                    }
                }
            });
            let mut written = if sizes.packed {
                let row = heads * d;
                let joined = index3([sizes.batch * queries, 3, row]).map(|[r, part, c]| [&dq, &dk, &dv][part][r * row + c]);
                vec![joined.collect()]
            } else {
                vec![dq, dk, dv]
            };
            if sizes.relative.is_some() {
                let index = written.len();
                written.push(added(index, dtable));
            }
            written
        }
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
        Kernel::Rope(sizes) => vec![turned(&sizes, group_index, &reads[0], 1.0)],
        Kernel::RopeGradient(sizes) => vec![turned(&sizes, group_index, &reads[0], -1.0)],
        Kernel::Dropout(sizes) => {
            let value = |[s, p, f]: [usize; 3]| {
                let x = reads[0][(s * sizes.positions + p) * sizes.features + f];
                let index = (group_index * sizes.positions + p) * sizes.features + f;
                let uniform = dropout_number(parameters, sizes.site, sizes.first_sample + s, index);
                if uniform < sizes.rate.value() { 0.0 } else { x / (1.0 - sizes.rate.value()) }
            };
            vec![index3([sizes.samples, sizes.positions, sizes.features]).map(value).collect()]
        }
        Kernel::Prepend { batch, positions, features } => {
            let value = |[b, p, f]: [usize; 3]| match p {
                0 => reads[1][f],
                p => reads[0][(b * positions + p - 1) * features + f],
            };
            vec![index3([batch, positions + 1, features]).map(value).collect()]
        }
        Kernel::PrependInputGradient { batch, positions, features } => {
            let value = |[b, p, f]: [usize; 3]| reads[0][(b * (positions + 1) + p + 1) * features + f];
            vec![index3([batch, positions, features]).map(value).collect()]
        }
        Kernel::PrependWeightGradient { batch, positions, features } => {
            let sum = |f: usize| (0..batch).map(|b| reads[0][b * (positions + 1) * features + f]).sum();
            vec![added(0, (0..features).map(sum).collect())]
        }
        Kernel::First { batch, positions, features } => {
            vec![index3([batch, 1, features]).map(|[b, _, f]| reads[0][b * positions * features + f]).collect()]
        }
        Kernel::FirstGradient { batch, positions, features } => {
            let value = |[b, p, f]: [usize; 3]| if p == 0 { reads[0][b * features + f] } else { 0.0 };
            vec![index3([batch, positions, features]).map(value).collect()]
        }
        Kernel::Split { rows, parts, columns } => {
            let part = |p: usize| index3([rows, 1, columns]).map(|[r, _, c]| reads[0][(r * parts + p) * columns + c]).collect();
            (0..parts).map(part).collect()
        }
        Kernel::Join { rows, parts, columns } => {
            vec![index3([rows, parts, columns]).map(|[r, p, c]| reads[p][r * columns + c]).collect()]
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
        Kernel::Dispatch(_) => {
            let mut written = super::mixture::reference(kernel, reads);
            written[2] = added(2, written[2].clone());
            written
        }
        Kernel::Route { .. }
        | Kernel::RouteGradient { .. }
        | Kernel::DispatchGradient(_)
        | Kernel::Combine(_)
        | Kernel::CombineInputGradient(_)
        | Kernel::CombineGateGradient(_)
        | Kernel::ExpertMatmul { .. }
        | Kernel::ExpertMatmulInputGradient { .. } => super::mixture::reference(kernel, reads),
        Kernel::ExpertMatmulWeightGradient { .. } => vec![added(0, super::mixture::reference(kernel, reads).remove(0))],
        Kernel::Lstm(_) | Kernel::LstmGradient { .. } => super::lstm::reference(kernel, reads),
        Kernel::LstmWeightGradient(_) => vec![added(0, super::lstm::reference(kernel, reads).remove(0))],
        Kernel::Slice { outer, parts, inner } => {
            vec![index3([outer, 1, inner]).map(|[o, _, i]| reads[0][(o * parts + group_index) * inner + i]).collect()]
        }
        Kernel::Interleave { outer, parts, inner } => {
            vec![index3([outer, parts, inner]).map(|[o, p, i]| reads[0][(p * outer + o) * inner + i]).collect()]
        }
        Kernel::Deinterleave { outer, parts, inner } => {
            vec![index3([parts, outer, inner]).map(|[p, o, i]| reads[0][(o * parts + p) * inner + i]).collect()]
        }
        Kernel::TakeColumns { rows, columns, start, part } => {
            vec![index3([rows, part, 1]).map(|[row, column, _]| reads[0][row * columns + start + column]).collect()]
        }
        Kernel::PutColumns { rows, columns, start, part } => {
            let value = |[row, column, _]: [usize; 3]| match column.checked_sub(start).filter(|&place| place < part) {
                Some(place) => reads[0][row * part + place],
                None => before[0][row * columns + column],
            };
            vec![index3([rows, columns, 1]).map(value).collect()]
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

/// Every pair of features of every head turned by its position's angle.
/// The number from 0 to 1 by which an element is kept or dropped.
fn dropout_number(parameters: &Hyperparameters, site: usize, sample: usize, index: usize) -> f64 {
    let mut key = 0u64;
    for word in [parameters.seed, parameters.step, site as u64, sample as u64, (index as u64) >> 32] {
        key = (key ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        key = (key ^ (key >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        key ^= key >> 31;
    }
    let mut bits = (index as u32).wrapping_add(key as u32);
    for whitening in [0, (key >> 32) as u32] {
        bits ^= whitening;
        bits = (bits ^ (bits >> 16)).wrapping_mul(0x7FEB_352D);
        bits = (bits ^ (bits >> 15)).wrapping_mul(0x846C_A68B);
        bits ^= bits >> 16;
    }
    f64::from(bits) / 2f64.powi(32)
}

fn turned(sizes: &Rope, group_index: usize, x: &[f64], direction: f64) -> Tensor {
    let (d, half) = (sizes.head_dimension, sizes.head_dimension / 2);
    let mut y = vec![0.0; x.len()];
    for [b, p, h] in index3([sizes.batch, sizes.positions, sizes.heads]) {
        let position = sizes.position_offset + group_index * sizes.positions + p;
        for f in 0..half {
            let angle = direction * position as f64 / (sizes.theta as f64).powf(2.0 * f as f64 / d as f64);
            let at = ((b * sizes.positions + p) * sizes.heads + h) * d + f;
            y[at] = x[at] * angle.cos() - x[at + half] * angle.sin();
            y[at + half] = x[at + half] * angle.cos() + x[at] * angle.sin();
        }
    }
    y
}

/// q, k and v, each in a tensor of its own.
fn unpacked(sizes: &Attention, reads: &[Tensor]) -> [Tensor; 3] {
    if !sizes.packed {
        return [reads[0].clone(), reads[1].clone(), reads[2].clone()];
    }
    let row = sizes.heads() * sizes.head_dimension;
    let rows = sizes.batch * sizes.queries;
    [0, 1, 2].map(|part| index3([rows, 1, row]).map(|[r, _, c]| reads[0][(r * 3 + part) * row + c]).collect())
}

/// T5's bucket of a key `j` seen from the query `i` of a part.
fn bucket(sizes: &Attention, group_index: usize, i: usize, j: usize) -> usize {
    let relative = sizes.relative.unwrap();
    let distance = j as f64 - (sizes.query_offset + group_index * sizes.queries + i) as f64;
    let (side, distance) = if relative.bidirectional { (2, distance) } else { (1, distance.min(0.0)) };
    let buckets = relative.buckets / side;
    let after = if relative.bidirectional && distance > 0.0 { buckets } else { 0 };
    let (distance, exact) = (distance.abs(), (buckets / 2) as f64);
    let place = if distance < exact {
        distance
    } else {
        // A border that lies on a whole number is not to be missed by rounding.
        let part = (distance / exact).ln() / (relative.max_distance as f64 / exact).ln() * (buckets as f64 - exact);
        (exact + (part + 1e-9).floor()).min(buckets as f64 - 1.0)
    };
    after + place as usize
}

/// Calls `each(batch, head, query, probabilities, log-sum-exp)` for every query.
fn attend(sizes: &Attention, reads: &[Tensor], group_index: usize, mut each: impl FnMut(usize, usize, usize, &[f64], f64)) {
    let [q, k, _] = unpacked(sizes, reads);
    let (d, heads) = (sizes.head_dimension, sizes.heads());
    let offset = sizes.query_offset + group_index * sizes.queries;
    for [b, h, i] in index3([sizes.batch, heads, sizes.queries]) {
        let score = |j: usize| {
            let at_q = ((b * sizes.queries + i) * heads + h) * d;
            let at_k = ((b * sizes.keys + j) * sizes.key_heads + h / sizes.group) * d;
            let dot = (0..d).map(|f| q[at_q + f] * k[at_k + f]).sum::<f64>();
            let bias = sizes.relative.map_or(0.0, |_| reads[reads.len() - 1][bucket(sizes, group_index, i, j) * heads + h]);
            bias + if sizes.scaled { dot / (d as f64).sqrt() } else { dot }
        };
        let seen = if sizes.causal { sizes.keys.min(offset + i + 1) } else { sizes.keys };
        let scores: Vec<f64> = (0..seen).map(score).collect();
        let log_sum = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
        let probabilities: Vec<f64> = scores.iter().map(|s| (s - log_sum).exp()).collect();
        each(b, h, i, &probabilities, log_sum);
    }
}
