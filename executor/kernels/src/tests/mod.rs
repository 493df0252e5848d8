//! Every kernel against a naive reference, every gradient against differences of its forward
//! kernel, and every refusal.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod accuracy;
mod attention_dropout;
mod cases;
mod compression;
mod dropout;
mod eight_bits;
mod gpu_arithmetic;
mod gradients;
mod isolation;
mod lstm;
mod mixture;
mod operands;
mod parts;
mod precision;
mod reference;
mod ring;
mod running;
mod speeds;
mod tensor_attention;

use foretell_models::Kernel;
use foretell_units::DataType;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::cuda::CudaBackend;
use super::cuda::tests::{
    SMALL_LIMITS,
    device::{ConvolutionSupport, TestDevice},
    limited_driver::ProductSupport,
    on_gpu::GpuBackend,
};
use super::{Backend, BackendError, CpuBackend, Hyperparameters, KernelCall, Operand};
use accuracy::{Arithmetic, is_fp8, largest_term, without_gelu};
use cases::{attention, attentions, cases, dropped, ropes, window};
use isolation::{Isolation, test_path};
use operands::{counts, integers, last_member, operands, operands_in, round_to, rounded};
use running::{run, run_in, run_on};

/// Numbers in double precision: what the reference works on, and what an arena's operand is made
/// from.
type Tensor = Vec<f64>;

const PARAMETERS: Hyperparameters = Hyperparameters {
    learning_rate: 0.05,
    momentum: 0.9,
    weight_decay: 0.01,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-6,
    gradient_scale: 0.5,
    clip_norm: 1.0,
    outer_learning_rate: 0.7,
    outer_momentum: 0.8,
    outer_mixing: 0.3,
    growth_interval: 3,
    step: 3,
    seed: 11,
};

/// Errors grow with what is summed: they are relative to the tensor's largest element, or to the
/// largest `term` of a sum that cancels.
fn assert_close(arithmetic: Arithmetic, kernel: &Kernel, what: &str, computed: &[Tensor], expected: &[Tensor], term: f64) {
    for (index, (computed, expected)) in computed.iter().zip(expected).enumerate() {
        assert_eq!(computed.len(), expected.len());
        let tolerance = arithmetic.single_precision(kernel, index);
        let scale = expected.iter().fold(term.max(1e-3), |largest, value| largest.max(value.abs()));
        for (position, (&computed, &expected)) in computed.iter().zip(expected).enumerate() {
            let close = (computed - expected).abs() <= tolerance * scale;
            assert!(close, "{kernel:?} {what}: write {index} at {position}: {computed} for {expected}");
        }
    }
}

/// Backends for every way that this machine's kernels can take.
fn cpu_backends() -> Vec<Box<dyn Backend>> {
    CpuBackend::variants().into_iter().map(|backend| Box::new(backend) as Box<dyn Backend>).collect()
}

/// The CUDA backend: on a GPU if one is asked for (`tests/gpu.sh` does), or on a device that runs
/// its kernels' text on the processor, where that can be; with these of the library's products.
fn cuda_backend(makes: ProductSupport) -> Vec<Box<dyn Backend>> {
    if let Some(backend) = GpuBackend::with_products(makes) {
        return vec![Box::new(backend)];
    }
    let backend = TestDevice::with_products(makes).map(|device| CudaBackend::new(device).unwrap());
    backend.into_iter().map(|backend| Box::new(backend) as Box<dyn Backend>).collect()
}

/// The CUDA backend of `cuda_backend`, with limits at which small operands are copied and split, in
/// the emulator only.
fn cuda_backends_with_small_limits() -> Vec<Box<dyn Backend>> {
    let devices = [TestDevice::new(), TestDevice::with_convolutions(ConvolutionSupport::None)];
    let backend = |device| CudaBackend::new(device).unwrap().with_limits(SMALL_LIMITS);
    devices.into_iter().flatten().map(|device| Box::new(backend(device)) as Box<dyn Backend>).collect()
}

/// The same with the library's products and without its convolutions, which are then products over
/// windows.
fn cuda_backend_without_convolutions() -> Vec<Box<dyn Backend>> {
    if let Some(backend) = GpuBackend::without_convolutions() {
        return vec![Box::new(backend)];
    }
    let device = TestDevice::with_convolutions(ConvolutionSupport::None);
    device.into_iter().map(|device| Box::new(CudaBackend::new(device).unwrap()) as Box<dyn Backend>).collect()
}

/// Whether a kernel is a convolution or a gradient of one.
fn is_convolution(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Convolution(_) | Kernel::ConvolutionInputGradient(_) | Kernel::ConvolutionWeightGradient(_))
}

/// All backends that can be had.
fn all_backends() -> Vec<Box<dyn Backend>> {
    cpu_backends().into_iter().chain(cuda_backend(ProductSupport::Full)).collect()
}

/// Products that the processor makes soon enough by the CUDA backend's own kernel.
fn is_small_product(kernel: &Kernel) -> bool {
    match *kernel {
        Kernel::Matmul { rows, columns, contracted, .. }
        | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
        | Kernel::MatmulWeightGradient { rows, columns, contracted, .. }
        | Kernel::EightBitMatmul { rows, columns, contracted, .. }
        | Kernel::EightBitMatmulInputGradient { rows, columns, contracted, .. }
        | Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => rows * columns * contracted < 200_000,
        Kernel::ExpertMatmul { .. } | Kernel::ExpertMatmulInputGradient { .. } | Kernel::ExpertMatmulWeightGradient { .. } => {
            true
        }
        Kernel::Convolution(window) | Kernel::ConvolutionInputGradient(window) | Kernel::ConvolutionWeightGradient(window) => {
            window.output_elements() * window.size * window.size * window.in_channels < 100_000
        }
        _ => false,
    }
}

#[test]
fn every_kernel_computes_what_the_reference_does() {
    conforms(test_path!(), Arithmetic::Cpu, cpu_backends, |_| true);
}

#[test]
fn every_cuda_kernel_computes_what_the_reference_does() {
    conforms(test_path!(), Arithmetic::of_cuda(), || cuda_backend(ProductSupport::Full), |kernel| !is_fp8(kernel));
}

#[test]
fn every_cuda_fp8_kernel_computes_what_the_reference_does() {
    conforms(test_path!(), Arithmetic::of_cuda(), || cuda_backend(ProductSupport::Full), is_fp8);
}

#[test]
fn cuda_products_without_the_library_are_those_of_the_reference() {
    conforms(test_path!(), Arithmetic::of_cuda(), || cuda_backend(ProductSupport::None), is_small_product);
}

#[test]
fn cuda_epilogues_without_the_library_match_the_reference() {
    conforms(
        test_path!(),
        Arithmetic::of_cuda(),
        || cuda_backend(ProductSupport::PlainOnly),
        |kernel| {
            matches!(
                kernel,
                Kernel::Matmul { .. }
                    | Kernel::EightBitMatmul { .. }
                    | Kernel::EightBitMatmulInputGradient { gelu: true, .. }
                    | Kernel::MatmulInputGradient { gelu: true, .. }
                    | Kernel::MatmulWeightGradient { bias: true, .. }
            )
        },
    );
}

#[test]
fn cuda_convolutions_without_the_library_are_those_of_the_reference() {
    conforms(test_path!(), Arithmetic::of_cuda(), cuda_backend_without_convolutions, is_convolution);
}

#[test]
fn cuda_products_and_convolutions_in_parts_match_the_reference() {
    let is_tried = |kernel: &Kernel| is_convolution(kernel) || is_small_product(kernel);
    conforms(test_path!(), Arithmetic::Cpu, cuda_backends_with_small_limits, is_tried);
}

/// Runs all cases, and lists those that fail. The backends are kept over the cases of a process:
/// what one kernel leaves in scratch memory must not change another's result.
fn conforms(
    test: &str,
    arithmetic: Arithmetic,
    make_backends: impl Fn() -> Vec<Box<dyn Backend>>,
    is_tried: fn(&Kernel) -> bool,
) {
    let cases: Vec<Kernel> = cases().into_iter().filter(is_tried).collect();
    let mut backends = None;
    isolation::check_each(isolation(arithmetic), test, &cases, |index, kernel| {
        let backends = backends.get_or_insert_with(&make_backends);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        random.set_stream(index as u64);
        let (reads, before) = operands(kernel, &mut random);
        // A GELU that is fused into a product may be less exact than the product, which comes
        // first.
        if let Some((plain, count)) = without_gelu(kernel) {
            conforms_on(arithmetic, backends, &plain, &reads[..count], &before[..1]);
        }
        conforms_on(arithmetic, backends, kernel, &reads, &before);
    });
}

/// Runs one case on all backends.
fn conforms_on(arithmetic: Arithmetic, backends: &mut [Box<dyn Backend>], kernel: &Kernel, reads: &[Tensor], before: &[Tensor]) {
    let (group_index, term) = (last_member(kernel), largest_term(kernel, reads));
    for accumulate in [false, true] {
        let expected = reference::run(kernel, reads, before, accumulate, &PARAMETERS, group_index);
        let mode = if accumulate { "accumulating" } else { "overwriting" };
        for (index, backend) in backends.iter_mut().enumerate() {
            let mut run = |share_first| run_on(backend.as_mut(), kernel, reads, before, accumulate, share_first, group_index);
            let computed = run(false);
            assert_close(arithmetic, kernel, mode, &computed, &expected, term);
            if index > 0 {
                continue;
            }
            assert_eq!(computed, run(false), "{kernel:?} is not deterministic");
            if kernel.may_work_in_place() {
                assert_close(arithmetic, kernel, "in place", &run(true), &expected, term);
            }
        }
    }
}

/// Returns where cases of a backend run.
fn isolation(arithmetic: Arithmetic) -> Isolation {
    if arithmetic == Arithmetic::Gpu { Isolation::Processes } else { Isolation::None }
}

#[test]
fn batch_norm_needs_no_statistics_and_keeps_its_digits_far_from_zero() {
    let kernel = Kernel::BatchNorm { groups: 2, positions: 3000, channels: 5 };
    let (mut reads, before) = operands(&kernel, &mut ChaCha8Rng::seed_from_u64(2));
    reads[0].iter_mut().for_each(|x| *x = f64::from((*x + 300.0) as f32));
    let mut expected = reference::run(&kernel, &reads, &before, false, &PARAMETERS, 0);
    expected.truncate(2);
    let computed = run(&kernel, &reads, &before[..2], false, false, 0);
    // The input itself has 3e-5 between neighbours here, against a deviation of 0.58.
    for (computed, expected) in computed.iter().flatten().zip(expected.iter().flatten()) {
        assert!((computed - expected).abs() <= 1e-4 * expected.abs().max(1.0), "{computed} for {expected}");
    }
}

#[test]
fn softmaxes_survive_large_logits() {
    let kernel = Kernel::CrossEntropy { rows: 2, classes: 3 };
    let reads = vec![vec![1000.0, 0.0, -1000.0, -500.0, -500.0, -500.0], vec![1.0, 0.0]];
    let written = run(&kernel, &reads, &[vec![0.0], vec![0.0], vec![0.0; 2]], false, false, 0);
    assert_close(
        Arithmetic::Cpu,
        &kernel,
        "large logits",
        &written,
        &[vec![1000.0 + 3.0_f64.ln()], vec![1.0], vec![1000.0, 3.0_f64.ln() - 500.0]],
        0.0,
    );
}

/// The error of one call with operands of these sizes, in bytes.
fn refusal(kernel: &Kernel, reads: &[usize], writes: &[usize], integer: i32) -> BackendError {
    let mut memory = vec![integer; 4096];
    let operand = |bytes: &usize, memory: &mut Vec<i32>| Operand { pointer: memory.as_mut_ptr().cast(), bytes: *bytes };
    let reads: Vec<Operand> = reads.iter().map(|bytes| operand(bytes, &mut memory)).collect();
    let writes: Vec<Operand> = writes.iter().map(|bytes| operand(bytes, &mut memory)).collect();
    let parameters = Hyperparameters::default();
    let (hyperparameters, precision) = (&parameters, DataType::Fp32);
    let call = KernelCall {
        kernel,
        reads: &reads,
        writes: &writes,
        accumulate: false,
        hyperparameters,
        group_index: 2,
        samples_before: 0,
        precision,
    };
    // SAFETY: the call is refused before its overlapping operands are written.
    let error = unsafe { CpuBackend::new().run(&call) }.unwrap_err();
    for mut backend in cuda_backend(ProductSupport::Full) {
        // SAFETY: as above; what an index has no place for is left out.
        assert_eq!(unsafe { backend.run(&call) }.unwrap_err(), error);
    }
    error
}

#[test]
fn a_call_that_does_not_fit_is_refused() {
    let add = Kernel::Add { elements: 3 };
    assert!(matches!(refusal(&add, &[12], &[12], 0), BackendError::OperandCount { side: "reads", wanted: 2, given: 1, .. }));
    assert!(matches!(refusal(&add, &[12, 12], &[12, 12], 0), BackendError::OperandCount { side: "writes", .. }));
    assert!(matches!(refusal(&add, &[12, 8], &[12], 0), BackendError::OperandSize { index: 1, wanted: 12, given: 8, .. }));
    let slice = Kernel::Slice { outer: 1, parts: 2, inner: 1 };
    assert!(matches!(refusal(&slice, &[8], &[4], 0), BackendError::IndexOutOfRange { value: 2, limit: 2, .. }));
    let embedding = Kernel::Embedding { tokens: 2, vocabulary: 5, hidden: 1, parts: 1 };
    assert!(matches!(refusal(&embedding, &[8, 20], &[8], 5), BackendError::IndexOutOfRange { position: 0, value: 5, .. }));
    assert!(matches!(refusal(&embedding, &[8, 20], &[8], -1), BackendError::IndexOutOfRange { value: -1, .. }));
    let loss = Kernel::CrossEntropy { rows: 1, classes: 2 };
    assert!(matches!(refusal(&loss, &[8, 4], &[4, 4, 4], -2), BackendError::IndexOutOfRange { value: -2, limit: 2, .. }));
    let too_large = Kernel::Convolution(window([1, 2, 2, 1, 1, 5, 1, 1]));
    assert!(matches!(refusal(&too_large, &[16, 100], &[0], 0), BackendError::ImpossibleSizes { .. }));
}
