//! Images: convolutions, batch normalisation, poolings.

use super::{Given, Tensor, index3, zip};
use foretell_models::{Kernel, Window};

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, before, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
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
        _ => return None,
    })
}

/// Calls `each(input offset, output offset, place in the window)` for the pixels of every window,
/// channels left to it.
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
