//! Every kernel in sixteen bits against the reference, on numbers that the format has.

use foretell_models::{Epsilon, Kernel};
use foretell_units::DataType;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::accuracy::{Arithmetic, further_roundings, is_fp8, largest_term, without_gelu};
use super::isolation::test_path;
use super::{CpuBackend, PARAMETERS, Tensor, cases, last_member, operands_in, reference, run_in};
use crate::half::SixteenBits;
use crate::{Backend, BackendError, Hyperparameters, KernelCall, Operand, operand_types};

const PRECISIONS: [(DataType, SixteenBits); 2] = [(DataType::Bf16, SixteenBits::Bf16), (DataType::Fp16, SixteenBits::Fp16)];

/// Half of the last place, relatively: what rounding once costs; and half of the smallest number's,
/// which fp16 meets.
fn rounding(half: SixteenBits) -> (f64, f64) {
    match half {
        SixteenBits::Bf16 => (2.0_f64.powi(-8), 0.0),
        SixteenBits::Fp16 => (2.0_f64.powi(-11), 2.0_f64.powi(-25)),
    }
}

/// Sums are made in single precision and rounded once: beside what a kernel of single precision may
/// be off, each number may be off by half of its own last place. `term` is as in single precision.
pub(super) fn assert_close(
    arithmetic: Arithmetic,
    kernel: &Kernel,
    half: SixteenBits,
    what: &str,
    computed: &[Tensor],
    expected: &[Tensor],
    term: f64,
) {
    let types = operand_types(kernel, if half == SixteenBits::Bf16 { DataType::Bf16 } else { DataType::Fp16 });
    for (index, (computed, expected)) in computed.iter().zip(expected).enumerate() {
        let sums = arithmetic.half_precision(kernel, index);
        assert_eq!(computed.len(), expected.len());
        let scale = expected.iter().fold(term.max(1e-3), |largest, value| largest.max(value.abs()));
        let (relative, absolute) = if SixteenBits::of(types.writes[index]).is_some() { rounding(half) } else { (0.0, 0.0) };
        // The attention's gradient reads its output, which is rounded, and sums it over up to 64
        // features; the reference has its own. On tensor cores probabilities, and their slopes, are
        // rounded before they are multiplied.
        let made_from_rounded = rounding(half).0
            * match kernel {
                Kernel::AttentionGradient(_) => 4.0,
                Kernel::Attention(sizes) if sizes.head_dimension >= 32 => 1.0,
                _ => further_roundings(arithmetic, kernel),
            };
        for (position, (&computed, &expected)) in computed.iter().zip(expected).enumerate() {
            let allowed = (sums + made_from_rounded) * scale + relative * expected.abs() + absolute;
            let close = (computed - expected).abs() <= allowed;
            assert!(close, "{kernel:?} in {half:?}, {what}: write {index} at {position}: {computed} for {expected}");
        }
    }
}

/// What the kernel should write: the reference's numbers; of optimizers the step is the master
/// copy's, which the parameter follows.
fn expected(kernel: &Kernel, reads: &[Tensor], before: &[Tensor], accumulate: bool, group_index: usize) -> Vec<Tensor> {
    if !matches!(kernel, Kernel::Sgd { .. } | Kernel::AdamW { .. } | Kernel::LambStep { .. } | Kernel::MuonStep { .. }) {
        return reference::run(kernel, reads, before, accumulate, &PARAMETERS, group_index);
    }
    let mut single = before[..before.len() - 1].to_vec();
    single[0] = before[before.len() - 1].clone();
    let mut written = reference::run(kernel, reads, &single, accumulate, &PARAMETERS, group_index);
    written.push(written[0].clone());
    written
}

#[test]
fn every_kernel_computes_what_the_reference_does_in_sixteen_bits() {
    conforms(test_path!(), Arithmetic::Cpu, super::cpu_backends, |_| true);
}

#[test]
fn every_cuda_kernel_computes_what_the_reference_does_in_sixteen_bits() {
    conforms(test_path!(), Arithmetic::of_cuda(), || super::cuda_backend(super::ProductSupport::Full), |kernel| !is_fp8(kernel));
}

#[test]
fn every_cuda_fp8_kernel_matches_the_reference_in_sixteen_bits() {
    conforms(test_path!(), Arithmetic::of_cuda(), || super::cuda_backend(super::ProductSupport::Full), is_fp8);
}

#[test]
fn cuda_products_without_the_library_match_in_sixteen_bits() {
    let backends = || super::cuda_backend(super::ProductSupport::None);
    conforms(test_path!(), Arithmetic::of_cuda(), backends, super::is_small_product);
}

#[test]
fn cuda_convolutions_without_the_library_match_in_sixteen_bits() {
    let backends = super::cuda_backend_without_convolutions;
    conforms(test_path!(), Arithmetic::of_cuda(), backends, super::is_convolution);
}

#[test]
fn cuda_products_and_convolutions_in_parts_match_in_sixteen_bits() {
    let is_tried = |kernel: &Kernel| super::is_convolution(kernel) || super::is_small_product(kernel);
    conforms(test_path!(), Arithmetic::Cpu, super::cuda_backends_with_small_limits, is_tried);
}

#[test]
fn cuda_convolutions_of_model_sizes_match_in_sixteen_bits() {
    // On a GPU alone: of small ones cuDNN makes the weight's gradient without tensor cores, of
    // these with them (9.19's heuristics for an H200).
    if !super::GpuBackend::is_requested() {
        return;
    }
    let mut random = ChaCha8Rng::seed_from_u64(9);
    for (precision, half) in PRECISIONS {
        for extents in [[16, 14, 14, 64, 64, 3, 1, 1], [16, 28, 28, 64, 128, 3, 2, 1], [16, 28, 28, 64, 128, 1, 2, 0]] {
            let window = super::window(extents);
            for kernel in
                [Kernel::Convolution(window), Kernel::ConvolutionInputGradient(window), Kernel::ConvolutionWeightGradient(window)]
            {
                let (reads, before) = operands_in(&kernel, precision, &mut random);
                let expected = expected(&kernel, &reads, &before, true, 0);
                for mut backend in
                    super::cuda_backend(super::ProductSupport::Full).into_iter().chain(super::cuda_backend_without_convolutions())
                {
                    let mut run = || run_in(backend.as_mut(), precision, &kernel, &reads, &before, true, false, 0);
                    let computed = run();
                    assert_close(Arithmetic::Gpu, &kernel, half, "of a model's sizes", &computed, &expected, 0.0);
                    assert_eq!(computed, run(), "{kernel:?} is not deterministic");
                }
            }
        }
    }
}

/// Runs all cases in both precisions, and lists those that fail. The backends are kept over the
/// cases of a process: what one kernel leaves in scratch memory must not change another's result.
fn conforms(
    test: &str,
    arithmetic: Arithmetic,
    make_backends: impl Fn() -> Vec<Box<dyn Backend>>,
    is_tried: fn(&Kernel) -> bool,
) {
    let kernels = || cases().into_iter().filter(is_tried);
    let cases: Vec<_> = PRECISIONS.into_iter().flat_map(|precision| kernels().map(move |kernel| (precision, kernel))).collect();
    let mut backends = None;
    super::isolation::check_each(super::isolation(arithmetic), test, &cases, |index, ((precision, half), kernel)| {
        let backends = backends.get_or_insert_with(&make_backends);
        let mut random = ChaCha8Rng::seed_from_u64(4);
        random.set_stream(index as u64);
        let (reads, mut before) = operands_in(kernel, *precision, &mut random);
        // A GELU that is fused into a product may be less exact than the product, which comes
        // first.
        if let Some((plain, count)) = without_gelu(kernel) {
            conforms_on(arithmetic, backends, (*precision, *half), &plain, &reads[..count], &before[..1]);
        }
        if matches!(kernel, Kernel::Sgd { .. } | Kernel::AdamW { .. } | Kernel::LambStep { .. } | Kernel::MuonStep { .. }) {
            // The master copy. The optimizer reads it, and not the parameter.
            before.push(reads[0].iter().map(|x| f64::from((1.0 - 0.7 * x) as f32)).collect());
        }
        conforms_on(arithmetic, backends, (*precision, *half), kernel, &reads, &before);
    });
}

/// Runs one case on all backends.
fn conforms_on(
    arithmetic: Arithmetic,
    backends: &mut [Box<dyn Backend>],
    (precision, half): (DataType, SixteenBits),
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
) {
    let (group_index, term) = (last_member(kernel), largest_term(kernel, reads));
    for accumulate in [false, true] {
        let expected = expected(kernel, reads, before, accumulate, group_index);
        let mode = if accumulate { "accumulating" } else { "overwriting" };
        for backend in backends.iter_mut() {
            let mut run =
                |share_first| run_in(backend.as_mut(), precision, kernel, reads, before, accumulate, share_first, group_index);
            let computed = run(false);
            assert_close(arithmetic, kernel, half, mode, &computed, &expected, term);
            assert_eq!(computed, run(false), "{kernel:?} is not deterministic");
            if kernel.may_work_in_place() {
                assert_close(arithmetic, kernel, half, "in place", &run(true), &expected, term);
            }
        }
    }
}

#[test]
fn blocks_of_rows_leave_what_all_rows_at_once_do() {
    // More rows than a block has, of lengths that no vector divides, and sums over all of them.
    let mut random = ChaCha8Rng::seed_from_u64(5);
    for kernel in [
        Kernel::LayerNorm { rows: 700, features: 37, epsilon: Epsilon::new(5) },
        Kernel::LayerNormInputGradient { rows: 700, features: 37 },
        Kernel::LayerNormWeightGradient { rows: 700, features: 37 },
        Kernel::BiasGradient { rows: 3001, columns: 7 },
        Kernel::CrossEntropy { rows: 900, classes: 31 },
        Kernel::CrossEntropyGradient { rows: 900, classes: 31, normalizer: 900, parts: 1, scaled: false },
        Kernel::EmbeddingWeightGradient { tokens: 900, vocabulary: 40, hidden: 33, parts: 1 },
        Kernel::GlobalAveragePool { batch: 9, positions: 100, channels: 33 },
        Kernel::BatchNormInference { positions: 2500, channels: 9 },
    ] {
        let (reads, before) = operands_in(&kernel, DataType::Bf16, &mut random);
        for accumulate in [false, true] {
            let expected = expected(&kernel, &reads, &before, accumulate, 0);
            let mut backend = CpuBackend::new();
            let computed = run_in(&mut backend, DataType::Bf16, &kernel, &reads, &before, accumulate, false, 0);
            assert_close(Arithmetic::Cpu, &kernel, SixteenBits::Bf16, "by blocks", &computed, &expected, 0.0);
        }
    }
}

/// As in single precision on the same numbers, but for one rounding.
fn assert_as_in_single(kernel: &Kernel, reads: &[Tensor], before: &[Tensor], group_index: usize) {
    for (precision, half) in PRECISIONS {
        let types = operand_types(kernel, precision);
        let rounded = |tensors: &[Tensor], types: &[DataType]| {
            let mut tensors = tensors.to_vec();
            super::round_to(types, &mut tensors);
            tensors
        };
        let (reads, before) = (rounded(reads, &types.reads), rounded(before, &types.writes));
        let run = |precision| run_in(&mut CpuBackend::new(), precision, kernel, &reads, &before, false, false, group_index);
        assert_close(Arithmetic::Cpu, kernel, half, "a part", &run(precision), &run(DataType::Fp32), 0.0);
    }
}

#[test]
fn parts_of_a_vocabulary_are_the_same_in_sixteen_bits() {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let (rows, classes, parts) = (40, 29, 3);
    for kernel in [
        Kernel::Embedding { tokens: rows, vocabulary: classes, hidden: 21, parts },
        Kernel::EmbeddingWeightGradient { tokens: rows, vocabulary: classes, hidden: 21, parts },
        Kernel::LogitStatistics { rows, classes, parts },
        Kernel::CrossEntropyGradient { rows, classes, normalizer: 3, parts, scaled: true },
    ] {
        let whole_types = operand_types(&kernel, DataType::Fp32).reads;
        let (mut reads, before) = operands_in(&kernel, DataType::Fp32, &mut random);
        let indices = whole_types.iter().position(|&name| name == DataType::Int32).unwrap();
        reads[indices] = (0..rows).map(|row| (row * 7 % (parts * classes)) as f64).collect();
        for group_index in 0..parts {
            // Minus infinity, where a label is another part's, is the same in every precision.
            if matches!(kernel, Kernel::LogitStatistics { .. }) {
                reads[indices] = (0..rows).map(|row| (group_index * classes + row % classes) as f64).collect();
            }
            assert_as_in_single(&kernel, &reads, &before, group_index);
        }
    }
}

#[test]
fn a_parameter_follows_its_master_copy_even_if_the_update_is_skipped() {
    let elements = 5000;
    let mut random = ChaCha8Rng::seed_from_u64(8);
    for backend in &mut super::all_backends() {
        for kernel in [
            Kernel::Sgd { elements, momentum: false, nesterov: false, controlled: true, exempt: false },
            Kernel::Sgd { elements, momentum: true, nesterov: true, controlled: true, exempt: false },
            Kernel::AdamW { elements, controlled: true, exempt: false },
        ] {
            for skip in [0.0, 1.0] {
                let (mut reads, mut before) = operands_in(&kernel, DataType::Fp32, &mut random);
                reads[1] = vec![1024.0, 1.0 / 1024.0, skip, 5.0, 2.0, 1.0, 0.0, 0.0];
                let single = run_in(backend.as_mut(), DataType::Fp32, &kernel, &reads, &before, false, false, 0);
                assert_eq!(single == before, skip == 1.0, "{kernel:?}");
                // The master copy starts as the parameter of single precision; the parameter of
                // sixteen bits holds anything.
                let master = std::mem::replace(&mut before[0], vec![7.0; elements]);
                before.push(master);
                let mixed = run_in(backend.as_mut(), DataType::Bf16, &kernel, &reads, &before, false, false, 0);
                assert_eq!(mixed[mixed.len() - 1], single[0], "{kernel:?}: the master copy");
                assert_eq!(mixed[1..mixed.len() - 1], single[1..], "{kernel:?}: the state");
                let mut nearest = vec![single[0].clone()];
                super::round_to(&[DataType::Bf16], &mut nearest);
                assert_eq!(mixed[0], nearest[0], "{kernel:?}: the parameter");
            }
        }
    }
}

#[test]
fn kernels_of_no_rows_write_no_more_than_their_sums() {
    for kernel in [Kernel::BiasGradient { rows: 0, columns: 3 }, Kernel::Relu { elements: 0 }, Kernel::Add { elements: 0 }] {
        let (reads, before) = operands_in(&kernel, DataType::Fp16, &mut ChaCha8Rng::seed_from_u64(6));
        let computed = run_in(&mut CpuBackend::new(), DataType::Fp16, &kernel, &reads, &before, false, false, 0);
        assert_eq!(computed, reference::run(&kernel, &reads, &before, false, &PARAMETERS, 0), "{kernel:?}");
    }
}

#[test]
fn an_index_out_of_range_is_named_by_its_place_in_the_whole_call() {
    let (tokens, hidden) = (1000, 64);
    let kernel = Kernel::EmbeddingWeightGradient { tokens, vocabulary: 5, hidden, parts: 1 };
    let (mut rows, mut ids, mut table) = (vec![0_u16; tokens * hidden], vec![0_i32; tokens], vec![0.0_f32; 5 * hidden]);
    ids[700] = 5;
    let operands = [
        Operand { pointer: rows.as_mut_ptr().cast(), bytes: 2 * rows.len() },
        Operand { pointer: ids.as_mut_ptr().cast(), bytes: 4 * ids.len() },
        Operand { pointer: table.as_mut_ptr().cast(), bytes: 4 * table.len() },
    ];
    let (reads, writes) = operands.split_at(2);
    let (hyperparameters, precision) = (&Hyperparameters::default(), DataType::Bf16);
    let call = KernelCall {
        kernel: &kernel,
        reads,
        writes,
        accumulate: false,
        hyperparameters,
        group_index: 0,
        samples_before: 0,
        precision,
    };
    // SAFETY: the operands are vectors that live until the end and do not overlap; of `u16`s the
    // allocator aligns so many to four bytes.
    let error = unsafe { CpuBackend::new().run(&call) };
    assert!(matches!(error, Err(BackendError::IndexOutOfRange { position: 700, value: 5, limit: 5, .. })), "{error:?}");
}

#[test]
fn a_precision_that_is_not_there_is_refused() {
    let kernel = Kernel::Relu { elements: 1 };
    let hyperparameters = &Hyperparameters::default();
    let call = |precision| KernelCall {
        kernel: &kernel,
        reads: &[],
        writes: &[],
        accumulate: false,
        hyperparameters,
        group_index: 0,
        samples_before: 0,
        precision,
    };
    for precision in [DataType::Fp8, DataType::Fp64, DataType::Tf32] {
        // SAFETY: the call is refused.
        let error = unsafe { CpuBackend::new().run(&call(precision)) };
        assert!(matches!(error, Err(BackendError::UnknownPrecision { .. })), "{precision}");
    }
}
