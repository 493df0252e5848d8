//! What the backend tells the device.

use super::device::{DriverCall, TestDevice};
use crate::backend::cuda::{CudaBackend, Driver as _};
use crate::backend::{Backend as _, BackendError, Hyperparameters, KernelCall, Operand};
use foretell_models::{Activation, Kernel, WeightLayout};
use foretell_units::DataType;

fn call<'a>(kernel: &'a Kernel, reads: &'a [Operand], writes: &'a [Operand], parameters: &'a Hyperparameters) -> KernelCall<'a> {
    KernelCall {
        kernel,
        reads,
        writes,
        accumulate: false,
        hyperparameters: parameters,
        group_index: 0,
        samples_before: 0,
        precision: DataType::Fp32,
    }
}

#[test]
fn a_kernel_is_one_launch_and_what_does_not_fit_is_refused_before_any() {
    let Some(device) = TestDevice::new() else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    let memory = device.allocate(4096).unwrap();
    let operand = |bytes| Operand { pointer: memory.pointer(), bytes };
    let (kernel, parameters) = (Kernel::Relu { elements: 1000 }, Hyperparameters::default());
    device.take_calls();
    // SAFETY: the operand is the device's memory; y may be x.
    unsafe { backend.enqueue(&call(&kernel, &[operand(4000)], &[operand(4000)], &parameters)) }.unwrap();
    let stream = backend.stream();
    assert_eq!(device.take_calls(), [DriverCall::Launch { function: "relu", grid: [4, 1, 1], stream }]);
    // SAFETY: it is refused.
    let refused = unsafe { backend.run(&call(&kernel, &[operand(4000)], &[operand(3996)], &parameters)) };
    assert!(matches!(refused, Err(BackendError::OperandSize { .. })), "{refused:?}");
    assert!(device.take_calls().iter().all(|told| !matches!(told, DriverCall::Launch { .. })));
}

#[test]
fn scratch_memory_grows_to_the_largest_kernel_and_all_is_given_back() {
    let Some(device) = TestDevice::new() else { return };
    let before = device.allocated();
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    let small = device.allocated();
    let (rows, columns) = (40_000, 20_000);
    let x = device.allocate(4).unwrap();
    // Only looked at, never run: nobody waits for it.
    let reads = [Operand { pointer: x.pointer(), bytes: 4 * rows * columns }];
    let writes = [Operand { pointer: x.pointer(), bytes: 4 * columns }];
    let (kernel, parameters) = (Kernel::BiasGradient { rows, columns }, Hyperparameters::default());
    // SAFETY: the work is queued and never done.
    unsafe { backend.enqueue(&call(&kernel, &reads, &writes, &parameters)) }.unwrap();
    assert!(device.allocated() > small, "the parts of {rows} rows need more scratch memory");
    std::mem::forget(backend);
    let again = CudaBackend::new(device.clone()).unwrap();
    let held = device.allocated();
    drop(again);
    assert!(device.allocated() < held && before == 0);
}

#[test]
fn a_product_whose_rows_tensor_cores_do_not_take_is_made_of_rows_in_scratch_memory() {
    let Some(device) = TestDevice::new() else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    let memory = device.allocate(1 << 16).unwrap();
    let operand = |numbers: usize| Operand { pointer: memory.pointer(), bytes: 2 * numbers };
    let (rows, columns, contracted, weight) = (40, 13, 16, WeightLayout::OutIn);
    let parameters = Hyperparameters::default();
    let mut products = |kernel: Kernel, reads: [usize; 2], written: usize| {
        device.take_calls();
        let (reads, writes) = (reads.map(operand), [Operand { pointer: memory.pointer(), bytes: written }]);
        let call = KernelCall { precision: DataType::Bf16, ..call(&kernel, &reads, &writes, &parameters) };
        // SAFETY: the operands are the device's memory; what comes of them is not looked at.
        unsafe { backend.enqueue(&call) }.unwrap();
        let product = |told| if let DriverCall::Multiply { product, .. } = told { Some(product) } else { None };
        device.take_calls().into_iter().filter_map(product).collect::<Vec<_>>()
    };
    // Rows of 13 numbers: in a kilobyte 32 rows of 16 at a time.
    let forward = products(
        Kernel::Matmul { rows, columns, contracted, weight, bias: false, activation: Activation::None },
        [rows * contracted, columns * contracted],
        2 * rows * columns,
    );
    assert_eq!(forward.iter().map(|product| product.rows).collect::<Vec<_>>(), [32, 8]);
    let slopes = [rows * columns, columns * contracted];
    let of_input =
        products(Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false }, slopes, 2 * rows * contracted);
    assert_eq!(of_input.iter().map(|product| product.rows).collect::<Vec<_>>(), [32, 8]);
    let slopes = [rows * columns, rows * contracted];
    let of_weight = products(
        Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false },
        slopes,
        4 * columns * contracted,
    );
    assert_eq!(
        of_weight.iter().map(|product| (product.contracted, product.accumulate)).collect::<Vec<_>>(),
        [(32, false), (8, true)]
    );
    for product in forward.iter().chain(&of_input).chain(&of_weight) {
        assert!(product.stored().iter().all(|[.., pitch]| pitch % 8 == 0), "{product:?}");
    }
}
