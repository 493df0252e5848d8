//! What is asked of the library that makes convolutions, and what becomes of its refusals.

use super::device::{ConvolutionSupport, DriverCall, TestDevice};
use super::on_gpu::GpuBackend;
use crate::backend::cuda::driver::Driver;
use crate::backend::cuda::driver::{Convolution, ConvolutionKind};
use crate::backend::cuda::{CudaBackend, Library};
use crate::backend::{Hyperparameters, KernelCall, Operand};
use foretell_models::{Kernel, Window};
use foretell_units::DataType;
use std::sync::Arc;

const WINDOW: Window = Window { batch: 3, height: 6, width: 5, in_channels: 8, out_channels: 4, size: 3, stride: 2, padding: 1 };

/// What the device is told of a kernel over a window, twice the same call.
fn told_of(
    device: &Arc<TestDevice>,
    backend: &mut CudaBackend,
    kernel: &Kernel,
    precision: DataType,
    accumulate: bool,
) -> Vec<DriverCall> {
    told_of_calls(2, device, backend, kernel, precision, accumulate)
}

/// The same of so many calls.
fn told_of_calls(
    calls: usize,
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
    for _ in 0..calls {
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
        // SAFETY: the operands are the device's memory; what comes of them is not looked at.
        unsafe { backend.enqueue(&call) }.unwrap();
    }
    device.take_calls()
}

fn planned(told: &[DriverCall]) -> usize {
    told.iter().filter(|one| matches!(one, DriverCall::PlanConvolution { .. })).count()
}

fn convolved(told: &[DriverCall]) -> Vec<Convolution> {
    let convolution =
        |one: &DriverCall| if let DriverCall::Convolve { convolution, .. } = one { Some(*convolution) } else { None };
    told.iter().filter_map(convolution).collect()
}

fn launched(told: &[DriverCall]) -> Vec<&'static str> {
    told.iter().filter_map(|one| if let DriverCall::Launch { function, .. } = one { Some(*function) } else { None }).collect()
}

#[test]
fn a_convolution_is_planned_once_and_made_by_the_library_alone() {
    let Some(device) = TestDevice::with(ConvolutionSupport::Made) else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    for precision in [DataType::Bf16, DataType::Fp16, DataType::Tf32] {
        for kernel in [Kernel::Convolution(WINDOW), Kernel::ConvolutionInputGradient(WINDOW)] {
            let told = told_of(&device, &mut backend, &kernel, precision, false);
            let kind = match kernel {
                Kernel::Convolution(_) => ConvolutionKind::Forward,
                _ => ConvolutionKind::InputGradient,
            };
            assert_eq!((planned(&told), told.len()), (1, 3), "{told:?}");
            for made in convolved(&told) {
                assert_eq!((made.kind, made.window, made.format), (kind, WINDOW, precision));
            }
        }
    }
    // In single precision that no tensor core may round, and where a window is a pixel, the library is not asked.
    let pixel = Window { size: 1, stride: 1, padding: 0, ..WINDOW };
    for (window, precision) in [(WINDOW, DataType::Fp32), (pixel, DataType::Bf16)] {
        let told = told_of(&device, &mut backend, &Kernel::Convolution(window), precision, false);
        assert_eq!((planned(&told), convolved(&told).len()), (0, 0), "{told:?}");
        assert!(told.iter().any(|one| matches!(one, DriverCall::Multiply { .. })));
    }
}

#[test]
fn a_weight_is_given_its_slope_in_single_precision_from_what_was_widened() {
    let Some(device) = TestDevice::with(ConvolutionSupport::Made) else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    let kernel = Kernel::ConvolutionWeightGradient(WINDOW);
    for (precision, accumulate, kernels) in [
        (DataType::Tf32, false, vec![]),
        (DataType::Tf32, true, vec!["copy_rows"]),
        (DataType::Bf16, false, vec!["widen_elements", "widen_elements"]),
        (DataType::Fp16, true, vec!["widen_elements", "widen_elements", "copy_rows"]),
    ] {
        let told = told_of(&device, &mut backend, &kernel, precision, accumulate);
        assert_eq!(launched(&told), [kernels.clone(), kernels].concat());
        let made = convolved(&told);
        assert_eq!(made.len(), 2);
        assert!(made.iter().all(|one| one.format == DataType::Tf32 && one.kind == ConvolutionKind::WeightGradient));
    }
    // Three channels are not what tensor cores take of single precision.
    let kernel = Kernel::ConvolutionWeightGradient(Window { in_channels: 3, ..WINDOW });
    let told = told_of(&device, &mut backend, &kernel, DataType::Bf16, false);
    assert_eq!((planned(&told), convolved(&told).len()), (0, 0), "{told:?}");
    // Nor are columns of 27 numbers, which lie 32 apart, as do the slope's rows until they are brought.
    let apart = |one: &DriverCall| {
        let DriverCall::Multiply { product, .. } = one else { return None };
        Some(product.stored().map(|[_, columns, pitch]| (columns, pitch)))
    };
    assert_eq!(told.iter().find_map(apart), Some([(4, 4), (32, 32), (32, 32)]));
    assert_eq!(launched(&told), ["window_columns", "copy_rows"].repeat(2));
}

#[test]
fn what_the_library_refuses_before_or_when_it_comes_to_it_is_made_of_products() {
    for convolutions in [ConvolutionSupport::Refused, ConvolutionSupport::FailingAfter(0)] {
        let Some(device) = TestDevice::with(convolutions) else { return };
        let mut backend = CudaBackend::new(device.clone()).unwrap();
        for kernel in
            [Kernel::Convolution(WINDOW), Kernel::ConvolutionInputGradient(WINDOW), Kernel::ConvolutionWeightGradient(WINDOW)]
        {
            let told = told_of(&device, &mut backend, &kernel, DataType::Bf16, false);
            assert!(convolved(&told).is_empty(), "{told:?}");
            assert_eq!(told.iter().filter(|one| matches!(one, DriverCall::Multiply { .. })).count(), 2, "{kernel:?}: {told:?}");
        }
    }
}

#[test]
fn a_weights_slope_of_many_images_is_made_of_parts_by_whoever_makes_them() {
    // In scratch memory of sixteen kilobytes there is room for fourteen images in single precision, and for 25 of windows in sixteen bits.
    let window = Window { batch: 40, ..WINDOW };
    let kernel = Kernel::ConvolutionWeightGradient(window);
    let image = |made: &Convolution| (made.window.batch, made.format);
    let contracted =
        |one: &DriverCall| if let DriverCall::Multiply { product, .. } = one { Some(product.contracted) } else { None };
    // Of the library's parts each but the first is added, as all are that follow where it refuses.
    for (convolutions, by_library, brought, by_products) in [
        (ConvolutionSupport::Made, vec![14, 14, 12], 2, vec![]),
        (ConvolutionSupport::FailingAfter(1), vec![14], 0, vec![12, 12, 2]),
        (ConvolutionSupport::FailingAfter(2), vec![14, 14], 1, vec![12]),
        (ConvolutionSupport::Refused, vec![], 0, vec![12, 12, 12, 4]),
    ] {
        let Some(device) = TestDevice::with(convolutions) else { return };
        let mut backend = CudaBackend::new(device.clone()).unwrap();
        let told = told_of_calls(1, &device, &mut backend, &kernel, DataType::Bf16, false);
        let images: Vec<_> = convolved(&told).iter().map(image).collect();
        assert_eq!(images, by_library.into_iter().map(|images| (images, DataType::Tf32)).collect::<Vec<_>>(), "{convolutions:?}");
        let products: Vec<_> = told.iter().filter_map(contracted).map(|pixels| pixels / 9).collect();
        assert_eq!(products, by_products, "{convolutions:?}");
        let added = launched(&told).into_iter().filter(|function| *function == "copy_rows").count();
        assert_eq!(added, brought, "{convolutions:?}");
    }
}

#[test]
fn cudnn_has_an_engine_on_the_gpu_where_it_is_there() {
    let Some(driver) = GpuBackend::driver() else { return };
    if !Library::Cudnn.is_present() {
        assert!(std::env::var_os("FORETELL_REQUIRE_CUDNN").is_none(), "cuDNN cannot be loaded");
        eprintln!("skipped: cuDNN cannot be loaded ({})", Library::Cudnn.hint());
        return;
    }
    let window = Window { batch: 16, height: 14, width: 14, in_channels: 64, out_channels: 64, size: 3, stride: 1, padding: 1 };
    let place = driver.allocate(1 << 22).unwrap();
    for (kind, format) in [
        (ConvolutionKind::Forward, DataType::Bf16),
        (ConvolutionKind::Forward, DataType::Fp16),
        (ConvolutionKind::InputGradient, DataType::Bf16),
        (ConvolutionKind::WeightGradient, DataType::Tf32),
    ] {
        let convolution = Convolution { kind, window, format, image: place, weight: place, output: place };
        let workspace = driver.plan_convolution(&convolution).unwrap_or_else(|error| panic!("{kind:?} in {format}: {error}"));
        println!("{kind:?} in {format}: a workspace of {workspace} bytes");
    }
}
