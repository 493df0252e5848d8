//! The convolutions that the library is asked for, and the fallback if it refuses.

use super::SMALL_LIMITS;
use super::device::{ConvolutionSupport, DriverCall, TestDevice};
use super::on_gpu::GpuBackend;
use crate::cuda::CudaBackend;
use crate::cuda::driver::{Convolution, ConvolutionKind, Driver, Library};
use crate::{Hyperparameters, KernelCall, Operand};
use foretell_models::{Kernel, Window};
use foretell_units::DataType;
use std::sync::Arc;

const WINDOW: Window = Window { batch: 3, height: 6, width: 5, in_channels: 8, out_channels: 4, size: 3, stride: 2, padding: 1 };

/// Queues the same call `count` times, and returns the driver's calls.
fn driver_calls(
    count: usize,
    device: &Arc<TestDevice>,
    backend: &mut CudaBackend,
    kernel: &Kernel,
    precision: DataType,
    accumulate: bool,
) -> Vec<DriverCall> {
    let window = match *kernel {
        Kernel::Convolution(window) | Kernel::ConvolutionInputGradient(window) | Kernel::ConvolutionWeightGradient(window) => {
            window
        }
        _ => panic!("{kernel:?} has no window"),
    };
    let width = if precision.size().count() == 2 { 2 } else { 4 };
    let [image, weight, output] = [window.input_elements(), window.weight_elements(), window.output_elements()];
    let (reads, written) = match kernel {
        Kernel::Convolution(_) => ([image * width, weight * width], output * width),
        Kernel::ConvolutionInputGradient(_) => ([output * width, weight * width], image * width),
        _ => ([output * width, image * width], weight * 4),
    };
    let operand = |bytes: usize| Operand { pointer: device.allocate(bytes).unwrap().pointer(), bytes };
    let (reads, writes, parameters) = (reads.map(operand), [operand(written)], Hyperparameters::default());
    device.take_calls();
    for _ in 0..count {
        let call = KernelCall {
            kernel,
            reads: &reads,
            writes: &writes,
            accumulate,
            hyperparameters: &parameters,
            group_index: 0,
            samples_before: 0,
            precision,
        };
        // SAFETY: the operands are the device's memory, and results are not read.
        unsafe { backend.enqueue(&call) }.unwrap();
    }
    device.take_calls()
}

fn plan_count(calls: &[DriverCall]) -> usize {
    calls.iter().filter(|call| matches!(call, DriverCall::PlanConvolution { .. })).count()
}

fn convolutions(calls: &[DriverCall]) -> Vec<Convolution> {
    let convolution =
        |call: &DriverCall| if let DriverCall::Convolve { convolution, .. } = call { Some(*convolution) } else { None };
    calls.iter().filter_map(convolution).collect()
}

fn launched(calls: &[DriverCall]) -> Vec<&'static str> {
    let function = |call: &DriverCall| if let DriverCall::Launch { function, .. } = call { Some(*function) } else { None };
    calls.iter().filter_map(function).collect()
}

#[test]
fn a_convolution_is_planned_once_and_runs_by_the_library_alone() {
    let Some(device) = TestDevice::with_convolutions(ConvolutionSupport::Full) else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
    for precision in [DataType::Bf16, DataType::Fp16, DataType::Tf32] {
        for kernel in [Kernel::Convolution(WINDOW), Kernel::ConvolutionInputGradient(WINDOW)] {
            let calls = driver_calls(2, &device, &mut backend, &kernel, precision, false);
            let kind = match kernel {
                Kernel::Convolution(_) => ConvolutionKind::Forward,
                _ => ConvolutionKind::InputGradient,
            };
            assert_eq!((plan_count(&calls), calls.len()), (1, 3), "{calls:?}");
            for convolution in convolutions(&calls) {
                assert_eq!((convolution.kind, convolution.window, convolution.format), (kind, WINDOW, precision));
            }
        }
    }
    // The library is not asked in fp32, which tensor cores must not round, or for pointwise
    // windows.
    let pointwise = Window { size: 1, stride: 1, padding: 0, ..WINDOW };
    for (window, precision) in [(WINDOW, DataType::Fp32), (pointwise, DataType::Bf16)] {
        let calls = driver_calls(2, &device, &mut backend, &Kernel::Convolution(window), precision, false);
        assert_eq!((plan_count(&calls), convolutions(&calls).len()), (0, 0), "{calls:?}");
        assert!(calls.iter().any(|call| matches!(call, DriverCall::Multiply { .. })));
    }
}

#[test]
fn a_weight_gradient_is_single_precision_from_widened_operands() {
    let Some(device) = TestDevice::with_convolutions(ConvolutionSupport::Full) else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
    let kernel = Kernel::ConvolutionWeightGradient(WINDOW);
    for (precision, accumulate, kernels) in [
        (DataType::Tf32, false, vec![]),
        (DataType::Tf32, true, vec!["copy_rows"]),
        (DataType::Bf16, false, vec!["widen_elements", "widen_elements"]),
        (DataType::Fp16, true, vec!["widen_elements", "widen_elements", "copy_rows"]),
    ] {
        let calls = driver_calls(2, &device, &mut backend, &kernel, precision, accumulate);
        assert_eq!(launched(&calls), [kernels.clone(), kernels].concat());
        let made = convolutions(&calls);
        assert_eq!(made.len(), 2);
        assert!(made.iter().all(|made| made.format == DataType::Tf32 && made.kind == ConvolutionKind::WeightGradient));
    }
    // Tensor cores do not read three channels of single precision.
    let kernel = Kernel::ConvolutionWeightGradient(Window { in_channels: 3, ..WINDOW });
    let calls = driver_calls(2, &device, &mut backend, &kernel, DataType::Bf16, false);
    assert_eq!((plan_count(&calls), convolutions(&calls).len()), (0, 0), "{calls:?}");
    // The columns of 27 elements are padded to 32, and so are the gradient's rows until they are
    // copied.
    let stored = |call: &DriverCall| {
        let DriverCall::Multiply { product, .. } = call else { return None };
        Some(product.stored().map(|[_, columns, pitch]| (columns, pitch)))
    };
    assert_eq!(calls.iter().find_map(stored), Some([(4, 4), (32, 32), (32, 32)]));
    assert_eq!(launched(&calls), ["window_columns", "copy_rows"].repeat(2));
}

#[test]
fn a_refused_convolution_becomes_matrix_products() {
    for support in [ConvolutionSupport::None, ConvolutionSupport::FailingAfter(0)] {
        let Some(device) = TestDevice::with_convolutions(support) else { return };
        let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
        for kernel in
            [Kernel::Convolution(WINDOW), Kernel::ConvolutionInputGradient(WINDOW), Kernel::ConvolutionWeightGradient(WINDOW)]
        {
            let calls = driver_calls(2, &device, &mut backend, &kernel, DataType::Bf16, false);
            assert!(convolutions(&calls).is_empty(), "{calls:?}");
            let products = calls.iter().filter(|call| matches!(call, DriverCall::Multiply { .. })).count();
            assert_eq!(products, 2, "{kernel:?}: {calls:?}");
        }
    }
}

#[test]
fn a_weight_gradient_of_many_images_is_split_with_and_without_the_library() {
    // The tests' 16 KiB of scratch memory hold 14 images in single precision, or 12 images' windows
    // in 16 bits.
    let kernel = Kernel::ConvolutionWeightGradient(Window { batch: 40, ..WINDOW });
    let images = |convolution: &Convolution| (convolution.window.batch, convolution.format);
    let contracted =
        |call: &DriverCall| if let DriverCall::Multiply { product, .. } = call { Some(product.contracted) } else { None };
    // The library's first part overwrites. Its later parts are added, and so are all matrix
    // products after it refuses.
    for (support, by_library, added, by_products) in [
        (ConvolutionSupport::Full, vec![14, 14, 12], 2, vec![]),
        (ConvolutionSupport::FailingAfter(1), vec![14], 0, vec![12, 12, 2]),
        (ConvolutionSupport::FailingAfter(2), vec![14, 14], 1, vec![12]),
        (ConvolutionSupport::None, vec![], 0, vec![12, 12, 12, 4]),
    ] {
        let Some(device) = TestDevice::with_convolutions(support) else { return };
        let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
        let calls = driver_calls(1, &device, &mut backend, &kernel, DataType::Bf16, false);
        let parts: Vec<_> = convolutions(&calls).iter().map(images).collect();
        let expected: Vec<_> = by_library.into_iter().map(|images| (images, DataType::Tf32)).collect();
        assert_eq!(parts, expected, "{support:?}");
        // An output image has 9 pixels.
        let products: Vec<_> = calls.iter().filter_map(contracted).map(|pixels| pixels / 9).collect();
        assert_eq!(products, by_products, "{support:?}");
        let additions = launched(&calls).into_iter().filter(|function| *function == "copy_rows").count();
        assert_eq!(additions, added, "{support:?}");
    }
}

#[test]
fn cudnn_has_engines_on_the_requested_gpu() {
    let Some(driver) = GpuBackend::driver() else { return };
    if !Library::Cudnn.is_present() {
        assert!(std::env::var_os("FORETELL_REQUIRE_CUDNN").is_none(), "cuDNN cannot be loaded");
        eprintln!("skipped: cuDNN cannot be loaded ({})", Library::Cudnn.hint());
        return;
    }
    let window = Window { batch: 16, height: 14, width: 14, in_channels: 64, out_channels: 64, size: 3, stride: 1, padding: 1 };
    let address = driver.allocate(1 << 22).unwrap();
    for (kind, format) in [
        (ConvolutionKind::Forward, DataType::Bf16),
        (ConvolutionKind::Forward, DataType::Fp16),
        (ConvolutionKind::InputGradient, DataType::Bf16),
        (ConvolutionKind::WeightGradient, DataType::Tf32),
    ] {
        let convolution = Convolution { kind, window, format, image: address, weight: address, output: address };
        let workspace = driver.plan_convolution(&convolution).unwrap_or_else(|error| panic!("{kind:?} in {format}: {error}"));
        println!("{kind:?} in {format}: {workspace} bytes of workspace");
    }
}
