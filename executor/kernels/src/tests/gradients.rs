//! Every gradient kernel against central differences of its forward kernel: along a random
//! direction d of one input, `<gradient, d>` must be `(<u, f(x + h d)> - <u, f(x - h d)>) / 2h` for
//! a random upstream gradient u.

use foretell_models::{Activation, Epsilon, Kernel, Mixture, Smoothing, WeightLayout};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::{PARAMETERS, Tensor, attentions, counts, last_member, operands, reference, ropes, rounded, run, window};

/// A forward kernel, one of its reads, the gradient kernel of that read, which of its writes is the
/// gradient, and its reads, from the upstream gradient, the forward kernel's reads and what that
/// wrote.
struct Case {
    forward: Kernel,
    input: usize,
    gradient: Kernel,
    write: usize,
    reads: fn(upstream: &Tensor, reads: &[Tensor], written: &[Tensor]) -> Vec<Tensor>,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = |forward, input, gradient, write, reads| cases.push(Case { forward, input, gradient, write, reads });
    let (rows, columns, contracted) = (13, 21, 34);
    for weight in [WeightLayout::OutIn, WeightLayout::InOut] {
        let forward = Kernel::Matmul { rows, columns, contracted, weight, bias: true, activation: Activation::None };
        let gradient = Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false };
        case(forward, 0, gradient, 0, |u, x, _| vec![u.clone(), x[1].clone()]);
        let gradient = Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: true };
        case(forward, 1, gradient, 0, |u, x, _| vec![u.clone(), x[0].clone()]);
        case(forward, 2, gradient, 1, |u, x, _| vec![u.clone(), x[0].clone()]);
        case(forward, 2, Kernel::BiasGradient { rows, columns }, 0, |u, _, _| vec![u.clone()]);
        // By way of the product's second write the GELU's gradient finds what the GELU was applied
        // to.
        let fused = Kernel::Matmul { rows, columns, contracted, weight, bias: true, activation: Activation::GeluKept };
        /// What comes back to the product through its GELU.
        fn through_gelu(u: &Tensor, y: &[Tensor]) -> Tensor {
            let kernel = Kernel::GeluGradient { elements: u.len() };
            run(&kernel, &[u.clone(), y[1].clone()], &[vec![0.0; u.len()]], false, false, 0).remove(0)
        }
        case(fused, 1, gradient, 0, |u, x, y| vec![through_gelu(u, y), x[0].clone()]);
        case(fused, 2, gradient, 1, |u, x, y| vec![through_gelu(u, y), x[0].clone()]);
    }
    let elements = 100;
    case(Kernel::Relu { elements }, 0, Kernel::ReluGradient { elements }, 0, |u, _, y| vec![u.clone(), y[0].clone()]);
    case(Kernel::Gelu { elements }, 0, Kernel::GeluGradient { elements }, 0, |u, x, _| vec![u.clone(), x[0].clone()]);
    let gradient = Kernel::GeluExactGradient { elements };
    case(Kernel::GeluExact { elements }, 0, gradient, 0, |u, x, _| vec![u.clone(), x[0].clone()]);
    let gradient = Kernel::SiluMultiplyGradient { elements };
    for input in [0, 1] {
        let reads = |u: &Tensor, x: &[Tensor], _: &[Tensor]| vec![u.clone(), x[0].clone(), x[1].clone()];
        case(Kernel::SiluMultiply { elements }, input, gradient, input, reads);
    }
    for extents in [[2, 6, 5, 4, 7, 3, 1, 1], [2, 9, 8, 3, 5, 3, 2, 1], [1, 7, 6, 3, 4, 1, 2, 0], [1, 11, 13, 3, 6, 7, 2, 3]] {
        let window = window(extents);
        let forward = Kernel::Convolution(window);
        case(forward, 0, Kernel::ConvolutionInputGradient(window), 0, |u, x, _| vec![u.clone(), x[1].clone()]);
        case(forward, 1, Kernel::ConvolutionWeightGradient(window), 0, |u, x, _| vec![u.clone(), x[0].clone()]);
    }
    let pooling = window([2, 8, 7, 5, 5, 3, 2, 1]);
    case(Kernel::MaxPool(pooling), 0, Kernel::MaxPoolGradient(pooling), 0, |u, _, y| vec![u.clone(), y[1].clone()]);
    let (groups, positions, channels) = (2, 40, 6);
    let forward = Kernel::BatchNorm { groups, positions, channels };
    let gradient = Kernel::BatchNormInputGradient { groups, positions, channels };
    case(forward, 0, gradient, 0, |u, x, y| vec![u.clone(), x[0].clone(), x[1].clone(), y[1].clone()]);
    let gradient = Kernel::BatchNormWeightGradient { groups, channels };
    /// The sums that the gradient of the input hands on.
    fn sums(u: &Tensor, x: &[Tensor], y: &[Tensor]) -> Vec<Tensor> {
        let channels = x[1].len();
        let groups = y[1].len() / (2 * channels);
        let kernel = Kernel::BatchNormInputGradient { groups, positions: u.len() / (groups * channels), channels };
        let reads = [u.clone(), x[0].clone(), x[1].clone(), y[1].clone()];
        run(&kernel, &reads, &[vec![0.0; u.len()], vec![0.0; 2 * groups * channels]], false, false, 0).split_off(1)
    }
    case(forward, 1, gradient, 0, sums);
    case(forward, 2, gradient, 1, sums);
    let (batch, features) = (3, 50);
    let gradient = Kernel::GlobalAveragePoolGradient { batch, positions, channels };
    case(Kernel::GlobalAveragePool { batch, positions, channels }, 0, gradient, 0, |u, _, _| vec![u.clone()]);
    let epsilon = Epsilon::new(3);
    let forward = Kernel::LayerNorm { rows, features, epsilon };
    let gradient = Kernel::LayerNormInputGradient { rows, features };
    case(forward, 0, gradient, 0, |u, x, y| vec![u.clone(), x[0].clone(), x[1].clone(), y[1].clone()]);
    let gradient = Kernel::LayerNormWeightGradient { rows, features };
    for (input, write) in [(1, 0), (2, 1)] {
        case(forward, input, gradient, write, |u, x, y| vec![u.clone(), x[0].clone(), y[1].clone()]);
    }
    let forward = Kernel::RmsNorm { rows, features, epsilon };
    let gradient = Kernel::RmsNormInputGradient { rows, features };
    case(forward, 0, gradient, 0, |u, x, y| vec![u.clone(), x[0].clone(), x[1].clone(), y[1].clone()]);
    let gradient = Kernel::RmsNormWeightGradient { rows, features };
    case(forward, 1, gradient, 0, |u, x, y| vec![u.clone(), x[0].clone(), y[1].clone()]);
    for sizes in ropes() {
        case(Kernel::Rope(sizes), 0, Kernel::RopeGradient(sizes), 0, |u, _, _| vec![u.clone()]);
    }
    for kernel in super::dropout::cases() {
        case(kernel, 0, kernel, 0, |u, _, _| vec![u.clone()]);
    }
    let forward = Kernel::Prepend { batch, positions, features };
    case(forward, 0, Kernel::PrependInputGradient { batch, positions, features }, 0, |u, _, _| vec![u.clone()]);
    case(forward, 1, Kernel::PrependWeightGradient { batch, positions, features }, 0, |u, _, _| vec![u.clone()]);
    let forward = Kernel::First { batch, positions, features };
    case(forward, 0, Kernel::FirstGradient { batch, positions, features }, 0, |u, _, _| vec![u.clone()]);
    let (parts, columns) = (3, 10);
    let (split, join) = (Kernel::Split { rows, parts, columns }, Kernel::Join { rows, parts, columns });
    // Of a split only the first part has a gradient here, as the upstream gradient is of the first
    // write.
    case(split, 0, join, 0, |u, _, y| vec![u.clone(), vec![0.0; y[1].len()], vec![0.0; y[2].len()]]);
    let (tokens, vocabulary, hidden) = (20, 9, 8);
    let gradient = Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts: 1 };
    case(Kernel::Embedding { tokens, vocabulary, hidden, parts: 1 }, 1, gradient, 0, |u, x, _| vec![u.clone(), x[0].clone()]);
    for sizes in attentions() {
        let (forward, gradient) = (Kernel::Attention(sizes), Kernel::AttentionGradient(sizes));
        /// The upstream gradient, the inputs, what was written, and the table if there is one.
        fn reads(u: &Tensor, x: &[Tensor], y: &[Tensor]) -> Vec<Tensor> {
            // Packed inputs are one tensor, others three; a table follows either.
            let inputs = if x.len() < 3 { 1 } else { 3 };
            [std::slice::from_ref(u), &x[..inputs], &y[..2], &x[inputs..]].concat()
        }
        let inputs = counts(&forward).0.len();
        for input in 0..inputs {
            case(forward, input, gradient, input, reads);
        }
    }
    let (experts, top) = (7, 3);
    case(Kernel::Route { tokens, experts, top }, 0, Kernel::RouteGradient { tokens, experts, top }, 0, |u, _, y| {
        vec![u.clone(), y[0].clone(), y[1].clone()]
    });
    for capacity in [4, 20] {
        let sizes = Mixture { tokens, experts, capacity, top, hidden };
        let gradient = Kernel::DispatchGradient(sizes);
        case(Kernel::Dispatch(sizes), 0, gradient, 0, |u, x, y| vec![u.clone(), x[1].clone(), y[1].clone()]);
        let gradient = Kernel::CombineInputGradient(sizes);
        case(Kernel::Combine(sizes), 0, gradient, 0, |u, x, _| vec![u.clone(), x[1].clone(), x[2].clone(), x[3].clone()]);
        let gradient = Kernel::CombineGateGradient(sizes);
        case(Kernel::Combine(sizes), 1, gradient, 0, |u, x, _| vec![u.clone(), x[0].clone(), x[2].clone(), x[3].clone()]);
    }
    let forward = Kernel::ExpertMatmul { experts, rows, columns, contracted };
    let gradient = Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted };
    case(forward, 0, gradient, 0, |u, x, _| vec![u.clone(), x[1].clone()]);
    let gradient = Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted };
    case(forward, 1, gradient, 0, |u, x, _| vec![u.clone(), x[0].clone()]);
    let (rows, classes, normalizer) = (9, 31, 1);
    let gradient = Kernel::CrossEntropyGradient { rows, classes, normalizer, parts: 1, scaled: false };
    let smoothing = Smoothing::new(0.2);
    let weighted = Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, normalizer, scaled: false };
    let reads = |_: &Tensor, x: &[Tensor], y: &[Tensor]| vec![x[0].clone(), x[1].clone(), y[2].clone(), x[2].clone()];
    case(Kernel::WeightedCrossEntropy { rows, classes, smoothing }, 0, weighted, 0, reads);
    case(Kernel::CrossEntropy { rows, classes }, 0, gradient, 0, |_, x, y| vec![x[0].clone(), x[1].clone(), y[2].clone()]);
    cases
}

#[test]
fn every_gradient_is_the_slope_of_its_forward_kernel() {
    let mut random = ChaCha8Rng::seed_from_u64(3);
    for Case { forward, input, gradient, write, reads: gradient_reads } in cases() {
        let (reads, before) = operands(&forward, &mut random);
        let value = |reads: &[Tensor]| reference::run(&forward, reads, &before, false, &PARAMETERS, last_member(&forward));
        // A loss is its own upstream gradient; of the others the first write is the output.
        let upstream = if matches!(forward, Kernel::CrossEntropy { .. } | Kernel::WeightedCrossEntropy { .. }) {
            vec![1.0]
        } else {
            operands(&Kernel::Relu { elements: before[0].len() }, &mut random).0.remove(0)
        };
        let direction = operands(&Kernel::Relu { elements: reads[input].len() }, &mut random).0.remove(0);
        let shifted = |step: f64| {
            let mut reads = reads.clone();
            reads[input].iter_mut().zip(&direction).for_each(|(x, d)| *x += step * d);
            dot(&value(&reads)[0], &upstream)
        };
        // The largest step that crosses no kink of ReLU and no tie of a pooling, found by trying:
        // both must agree.
        let slope = |step: f64| (shifted(step) - shifted(-step)) / (2.0 * step);
        let expected = slope(1e-6);

        let written = rounded(value(&reads));
        let computed_reads = gradient_reads(&upstream, &reads, &written);
        let zeros: Vec<Tensor> = counts(&gradient).1.into_iter().map(|count| vec![0.0; count]).collect();
        let computed = run(&gradient, &computed_reads, &zeros, false, false, last_member(&gradient));
        let projected = dot(&computed[write], &direction);
        let scale = dot(&computed[write].iter().map(|g| g.abs()).collect(), &direction.iter().map(|d| d.abs()).collect());
        assert!(
            (projected - expected).abs() <= 1e-5 * scale.max(1e-3),
            "{gradient:?}: {projected} along a direction in which {forward:?} has slope {expected}"
        );
    }
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
