//! Recurrent layers: what their kernels should compute, and their gradients against differences of
//! the forward kernel.

use foretell_models::{Kernel, Recurrence};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::{Tensor, counts, operands, rounded, run};

fn sizes() -> Vec<Recurrence> {
    let mut all = Vec::new();
    for [batch, sequence, hidden] in [[1, 1, 1], [3, 7, 21], [2, 5, 64]] {
        all.extend([false, true].map(|initial| Recurrence { batch, sequence, hidden, initial }));
    }
    all
}

pub(super) fn cases() -> Vec<Kernel> {
    let of_sizes = |sizes| {
        let upstream = [(true, false), (false, true), (true, true)];
        let gradients = upstream.map(|(outputs, last)| Kernel::LstmGradient { sizes, outputs, last });
        gradients.into_iter().chain([Kernel::Lstm(sizes), Kernel::LstmWeightGradient(sizes)])
    };
    sizes().into_iter().flat_map(of_sizes).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// What a recurrent layer's kernel writes, before anything is added to it.
pub(super) fn reference(kernel: &Kernel, reads: &[Tensor]) -> Vec<Tensor> {
    match *kernel {
        Kernel::Lstm(sizes) => forward(&sizes, reads),
        Kernel::LstmGradient { sizes, outputs, last } => gradient(&sizes, outputs, last, reads),
        Kernel::LstmWeightGradient(sizes) => {
            let Recurrence { batch, sequence, hidden, initial } = sizes;
            let mut dw = vec![0.0; sizes.weight_elements()];
            for b in 0..batch {
                for t in 0..sequence {
                    for k in 0..hidden {
                        let before = match t {
                            0 if initial => reads[2][2 * b * hidden + k],
                            0 => 0.0,
                            _ => reads[1][(b * sequence + t - 1) * hidden + k],
                        };
                        for gate in 0..4 * hidden {
                            dw[gate * hidden + k] += reads[0][(b * sequence + t) * 4 * hidden + gate] * before;
                        }
                    }
                }
            }
            vec![dw]
        }
        _ => Vec::new(),
    }
}

fn forward(sizes: &Recurrence, reads: &[Tensor]) -> Vec<Tensor> {
    let Recurrence { batch, sequence, hidden, initial } = *sizes;
    let (mut y, mut cells) = (vec![0.0; sizes.output_elements()], vec![0.0; sizes.output_elements()]);
    let (mut gates, mut last) = (vec![0.0; 4 * sizes.output_elements()], vec![0.0; sizes.state_elements()]);
    for b in 0..batch {
        let state = |part: usize| match initial {
            true => reads[2][(2 * b + part) * hidden..][..hidden].to_vec(),
            false => vec![0.0; hidden],
        };
        let (mut h, mut c) = (state(0), state(1));
        for t in 0..sequence {
            let row = b * sequence + t;
            let sums: Vec<f64> = (0..4 * hidden)
                .map(|gate| {
                    let recurrent: f64 = (0..hidden).map(|k| reads[1][gate * hidden + k] * h[k]).sum();
                    reads[0][row * 4 * hidden + gate] + recurrent
                })
                .collect();
            for k in 0..hidden {
                let [i, f, o] = [0, 1, 3].map(|gate| sigmoid(sums[gate * hidden + k]));
                let g = sums[2 * hidden + k].tanh();
                c[k] = f * c[k] + i * g;
                h[k] = o * c[k].tanh();
                for (gate, value) in [i, f, g, o].into_iter().enumerate() {
                    gates[(row * 4 + gate) * hidden + k] = value;
                }
                (y[row * hidden + k], cells[row * hidden + k]) = (h[k], c[k]);
            }
        }
        last[2 * b * hidden..][..hidden].copy_from_slice(&h);
        last[(2 * b + 1) * hidden..][..hidden].copy_from_slice(&c);
    }
    vec![y, gates, cells, last]
}

fn gradient(sizes: &Recurrence, outputs: bool, last: bool, reads: &[Tensor]) -> Vec<Tensor> {
    let Recurrence { batch, sequence, hidden, initial } = *sizes;
    let mut reads = reads.iter();
    let mut next = |present: bool| if present { reads.next().cloned() } else { None };
    let (dy, dlast) = (next(outputs), next(last));
    let (w, gates, cells, state) = (next(true).unwrap(), next(true).unwrap(), next(true).unwrap(), next(initial));
    let mut dgates = vec![0.0; 4 * sizes.output_elements()];
    let mut dstate = vec![0.0; sizes.state_elements()];
    for b in 0..batch {
        let end = |part: usize, k: usize| dlast.as_ref().map_or(0.0, |dlast| dlast[(2 * b + part) * hidden + k]);
        let mut dh: Vec<f64> = (0..hidden).map(|k| end(0, k)).collect();
        let mut dc: Vec<f64> = (0..hidden).map(|k| end(1, k)).collect();
        for t in (0..sequence).rev() {
            let row = b * sequence + t;
            for k in 0..hidden {
                let at = |gate: usize| (row * 4 + gate) * hidden + k;
                let [i, f, g, o] = [0, 1, 2, 3].map(|gate| gates[at(gate)]);
                let before = match t {
                    0 => state.as_ref().map_or(0.0, |state| state[(2 * b + 1) * hidden + k]),
                    _ => cells[(row - 1) * hidden + k],
                };
                let dout = dh[k] + dy.as_ref().map_or(0.0, |dy| dy[row * hidden + k]);
                let tangent = cells[row * hidden + k].tanh();
                let dcell = dc[k] + dout * o * (1.0 - tangent * tangent);
                dgates[at(0)] = dcell * g * i * (1.0 - i);
                dgates[at(1)] = dcell * before * f * (1.0 - f);
                dgates[at(2)] = dcell * i * (1.0 - g * g);
                dgates[at(3)] = dout * tangent * o * (1.0 - o);
                dc[k] = dcell * f;
            }
            dh = (0..hidden)
                .map(|k| (0..4 * hidden).map(|gate| dgates[row * 4 * hidden + gate] * w[gate * hidden + k]).sum())
                .collect();
        }
        dstate[2 * b * hidden..][..hidden].copy_from_slice(&dh);
        dstate[(2 * b + 1) * hidden..][..hidden].copy_from_slice(&dc);
    }
    if initial { vec![dgates, dstate] } else { vec![dgates] }
}

#[test]
fn gradients_through_outputs_and_the_last_state_are_slopes() {
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for sizes in sizes() {
        for (outputs, last) in [(true, false), (false, true), (true, true)] {
            let (reads, _) = operands(&Kernel::Lstm(sizes), &mut random);
            let numbers = |count: usize, random: &mut ChaCha8Rng| operands(&Kernel::Relu { elements: count }, random).0.remove(0);
            let dy = numbers(sizes.output_elements(), &mut random);
            let dlast = numbers(sizes.state_elements(), &mut random);
            let dot = |a: &Tensor, b: &Tensor| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let value = |reads: &[Tensor]| {
                let written = forward(&sizes, reads);
                f64::from(outputs) * dot(&written[0], &dy) + f64::from(last) * dot(&written[3], &dlast)
            };
            let written = rounded(forward(&sizes, &reads));
            let state = reads.get(2).cloned();
            let upstream =
                [(outputs, &dy), (last, &dlast)].into_iter().filter(|(present, _)| *present).map(|(_, values)| values.clone());
            let kept = [reads[1].clone(), written[1].clone(), written[2].clone()];
            let zeros = |kernel: &Kernel| counts(kernel).1.into_iter().map(|count| vec![0.0; count]).collect::<Vec<_>>();
            let kernel = Kernel::LstmGradient { sizes, outputs, last };
            let given: Vec<Tensor> = upstream.chain(kept).chain(state.clone()).collect();
            let mut gradients = run(&kernel, &given, &zeros(&kernel), false, false, 0);
            let kernel = Kernel::LstmWeightGradient(sizes);
            let given: Vec<Tensor> = [gradients[0].clone(), written[0].clone()].into_iter().chain(state).collect();
            gradients.insert(1, run(&kernel, &given, &zeros(&kernel), false, false, 0).remove(0));
            assert_eq!(gradients.len(), reads.len());
            for (input, gradient) in gradients.iter().enumerate() {
                let direction = numbers(reads[input].len(), &mut random);
                let shifted = |step: f64| {
                    let mut reads = reads.clone();
                    reads[input].iter_mut().zip(&direction).for_each(|(x, d)| *x += step * d);
                    value(&reads)
                };
                let expected = (shifted(1e-6) - shifted(-1e-6)) / 2e-6;
                let scale: f64 = gradient.iter().zip(&direction).map(|(g, d)| (g * d).abs()).sum();
                let projected = dot(gradient, &direction);
                assert!((projected - expected).abs() <= 1e-5 * scale.max(1e-3), "{sizes:?} {input}: {projected} for {expected}");
            }
        }
    }
}
