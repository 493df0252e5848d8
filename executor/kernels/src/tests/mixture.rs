//! Mixtures of experts: what their kernels should compute, and what happens to tokens that find no
//! slot.

use foretell_models::{Kernel, Mixture};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::{Tensor, operands, run};

/// Kernels of every kind; of the last sizes many choices find no slot.
pub(super) fn cases() -> Vec<Kernel> {
    let mut cases = Vec::new();
    for [tokens, experts, capacity, top, hidden] in [[1, 1, 1, 1, 1], [40, 8, 40, 2, 33], [37, 5, 9, 3, 70], [100, 4, 3, 1, 16]] {
        let sizes = Mixture { tokens, experts, capacity, top, hidden };
        cases.extend([
            Kernel::Route { tokens, experts, top },
            Kernel::RouteGradient { tokens, experts, top },
            Kernel::Dispatch(sizes),
            Kernel::DispatchGradient(sizes),
            Kernel::Combine(sizes),
            Kernel::CombineInputGradient(sizes),
            Kernel::CombineGateGradient(sizes),
        ]);
    }
    for [experts, rows, columns, contracted] in [[1, 1, 1, 1], [3, 17, 29, 53], [8, 5, 64, 40]] {
        cases.extend([
            Kernel::ExpertMatmul { experts, rows, columns, contracted },
            Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted },
            Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted },
        ]);
    }
    cases
}

/// An operand of integers that a mixture's kernel reads, and what they are below.
pub(super) fn integers(kernel: &Kernel, index: usize) -> Option<usize> {
    match (*kernel, index) {
        (Kernel::RouteGradient { experts, .. }, 2) => Some(experts),
        (Kernel::Dispatch(sizes) | Kernel::DispatchGradient(sizes), 1) => Some(sizes.experts),
        (Kernel::DispatchGradient(sizes), 2) => Some(sizes.capacity),
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 2) => {
            Some(sizes.experts)
        }
        (Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes), 3) => {
            Some(sizes.capacity)
        }
        _ => None,
    }
}

/// Choices of a token are different experts, and places are those that dispatching gives.
pub(super) fn make_consistent(kernel: &Kernel, reads: &mut [Tensor]) {
    let distinct = |choices: &mut Tensor, top: usize, experts: usize| {
        for (token, choices) in choices.chunks_exact_mut(top).enumerate() {
            // Half of the tokens have the same first choice.
            let first = if token % 2 == 0 { 0.0 } else { choices[0] };
            choices.iter_mut().enumerate().for_each(|(index, choice)| *choice = (first + index as f64) % experts as f64);
        }
    };
    let places = |choices: &Tensor, sizes: &Mixture| {
        let x = vec![0.0; sizes.token_elements()];
        reference(&Kernel::Dispatch(*sizes), &[x, choices.clone()]).remove(1)
    };
    match *kernel {
        Kernel::RouteGradient { experts, top, .. } => distinct(&mut reads[2], top, experts),
        Kernel::Dispatch(sizes) => distinct(&mut reads[1], sizes.top, sizes.experts),
        Kernel::DispatchGradient(sizes) => {
            distinct(&mut reads[1], sizes.top, sizes.experts);
            reads[2] = places(&reads[1], &sizes);
        }
        Kernel::Combine(sizes) | Kernel::CombineInputGradient(sizes) | Kernel::CombineGateGradient(sizes) => {
            distinct(&mut reads[2], sizes.top, sizes.experts);
            reads[3] = places(&reads[2], &sizes);
        }
        _ => {}
    }
}

/// What a mixture's kernel writes, before anything is added to it.
pub(super) fn reference(kernel: &Kernel, reads: &[Tensor]) -> Vec<Tensor> {
    match *kernel {
        Kernel::Route { tokens, experts, top } => {
            let (mut gates, mut choices) = (Vec::new(), Vec::new());
            for token in 0..tokens {
                let logits = &reads[0][token * experts..][..experts];
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
                let sum: f64 = order[..top].iter().map(|&expert| logits[expert].exp()).sum();
                gates.extend(order[..top].iter().map(|&expert| logits[expert].exp() / sum));
                choices.extend(order[..top].iter().map(|&expert| expert as f64));
            }
            vec![gates, choices]
        }
        Kernel::RouteGradient { tokens, experts, top } => {
            let mut dlogits = vec![0.0; tokens * experts];
            for token in 0..tokens {
                // The Jacobian of the softmax: g_i (δ_ij - g_j).
                for i in 0..top {
                    for j in 0..top {
                        let [gate_i, gate_j] = [i, j].map(|k| reads[1][token * top + k]);
                        let jacobian = gate_i * (f64::from(i == j) - gate_j);
                        dlogits[token * experts + reads[2][token * top + j] as usize] += reads[0][token * top + i] * jacobian;
                    }
                }
            }
            vec![dlogits]
        }
        Kernel::Dispatch(sizes) => {
            let mut rows = vec![0.0; sizes.slot_elements()];
            let mut used = vec![0; sizes.experts];
            let mut dropped = 0.0;
            let mut places = Vec::new();
            for (index, &choice) in reads[1].iter().enumerate() {
                let expert = choice as usize;
                if used[expert] < sizes.capacity {
                    for f in 0..sizes.hidden {
                        rows[(expert * sizes.capacity + used[expert]) * sizes.hidden + f] =
                            reads[0][index / sizes.top * sizes.hidden + f];
                    }
                    places.push(used[expert] as f64);
                    used[expert] += 1;
                } else {
                    places.push(-1.0);
                    dropped += 1.0;
                }
            }
            vec![rows, places, vec![dropped]]
        }
        Kernel::DispatchGradient(sizes) => {
            let mut dx = vec![0.0; sizes.token_elements()];
            slots(&sizes, &reads[1], &reads[2], |_, token, row| dx[token] += reads[0][row]);
            vec![dx]
        }
        Kernel::Combine(sizes) => {
            let mut y = vec![0.0; sizes.token_elements()];
            slots(&sizes, &reads[2], &reads[3], |index, token, row| y[token] += reads[1][index] * reads[0][row]);
            vec![y]
        }
        Kernel::CombineInputGradient(sizes) => {
            let mut drows = vec![0.0; sizes.slot_elements()];
            slots(&sizes, &reads[2], &reads[3], |index, token, row| drows[row] += reads[1][index] * reads[0][token]);
            vec![drows]
        }
        Kernel::CombineGateGradient(sizes) => {
            let mut dgates = vec![0.0; sizes.choices()];
            slots(&sizes, &reads[2], &reads[3], |index, token, row| dgates[index] += reads[0][token] * reads[1][row]);
            vec![dgates]
        }
        Kernel::ExpertMatmul { experts, rows, columns, contracted } => {
            let mut y = vec![0.0; experts * rows * columns];
            taps([experts, rows, columns, contracted], |out, x, w| y[out] += reads[0][x] * reads[1][w]);
            vec![y]
        }
        Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted } => {
            let mut dx = vec![0.0; experts * rows * contracted];
            taps([experts, rows, columns, contracted], |out, x, w| dx[x] += reads[0][out] * reads[1][w]);
            vec![dx]
        }
        Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
            let mut dw = vec![0.0; experts * columns * contracted];
            taps([experts, rows, columns, contracted], |out, x, w| dw[w] += reads[0][out] * reads[1][x]);
            vec![dw]
        }
        _ => Vec::new(),
    }
}

/// Calls `each(choice, token's element, slot's element)` for all features of all choices that found
/// a slot.
fn slots(sizes: &Mixture, choices: &Tensor, places: &Tensor, mut each: impl FnMut(usize, usize, usize)) {
    for (index, (&choice, &place)) in choices.iter().zip(places).enumerate().filter(|(_, (_, place))| **place >= 0.0) {
        for f in 0..sizes.hidden {
            let row = (choice as usize * sizes.capacity + place as usize) * sizes.hidden + f;
            each(index, index / sizes.top * sizes.hidden + f, row);
        }
    }
}

/// Calls `each(output, input, weight)` for every multiplication of the experts' products.
fn taps([experts, rows, columns, contracted]: [usize; 4], mut each: impl FnMut(usize, usize, usize)) {
    for e in 0..experts {
        for i in 0..rows {
            for j in 0..columns {
                for k in 0..contracted {
                    each((e * rows + i) * columns + j, (e * rows + i) * contracted + k, (e * columns + j) * contracted + k);
                }
            }
        }
    }
}

#[test]
fn of_equal_logits_the_first_experts_are_chosen() {
    let kernel = Kernel::Route { tokens: 2, experts: 4, top: 2 };
    let logits = vec![1.0, 1.0, 1.0, 1.0, 0.0, 3.0, -1.0, 3.0];
    let written = run(&kernel, &[logits], &[vec![0.0; 4], vec![0.0; 4]], false, false, 0);
    assert_eq!(written, [vec![0.5; 4], vec![0.0, 1.0, 1.0, 3.0]]);
}

#[test]
fn tokens_beyond_the_capacity_are_dropped_and_counted() {
    let (tokens, experts, top, hidden) = (24, 4, 2, 3);
    // Balanced: everyone is chosen by as many. Skewed: all choose the first two.
    let balanced: Tensor = (0..tokens).flat_map(|token| [0, 1].map(|k| ((2 * token + k) % experts) as f64)).collect();
    let skewed: Tensor = (0..tokens).flat_map(|_| [0.0, 1.0]).collect();
    for (choices, capacity, expected) in [
        (&balanced, tokens * top / experts, 0),
        (&balanced, 5, 4 * (12 - 5)),
        (&skewed, tokens * top / experts, 2 * (24 - 12)),
        (&skewed, 5, 2 * (24 - 5)),
        (&skewed, tokens, 0),
    ] {
        let sizes = Mixture { tokens, experts, capacity, top, hidden };
        let (mut reads, before) = operands(&Kernel::Dispatch(sizes), &mut ChaCha8Rng::seed_from_u64(4));
        reads[1] = choices.clone();
        let mut before: Vec<Tensor> = before;
        before[2] = vec![100.0];
        for (accumulate, base) in [(false, 0), (true, 100)] {
            let written = run(&Kernel::Dispatch(sizes), &reads, &before, accumulate, false, 0);
            assert_eq!(written[2], [f64::from(base + expected)], "{sizes:?}");
            assert_eq!(written[1].iter().filter(|&&place| place < 0.0).count(), expected as usize);
        }
        // A recomputation lists no count.
        let again = run(&Kernel::Dispatch(sizes), &reads, &before[..2], false, false, 0);
        assert_eq!(again.len(), 2);
    }
}
