//! The calls that the backend makes on the device.

use super::SMALL_LIMITS;
use super::device::{DriverCall, TestDevice};
use crate::cuda::{CudaBackend, DeviceAddress, Driver as _};
use crate::{Backend as _, BackendError, Hyperparameters, KernelCall, Operand};
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
fn a_call_is_one_launch_and_a_wrong_operand_is_refused_before_any() {
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
    // SAFETY: the call is refused.
    let refused = unsafe { backend.run(&call(&kernel, &[operand(4000)], &[operand(3996)], &parameters)) };
    assert!(matches!(refused, Err(BackendError::OperandSize { .. })), "{refused:?}");
    assert!(device.take_calls().iter().all(|call| !matches!(call, DriverCall::Launch { .. })));
}

#[test]
fn scratch_memory_grows_to_the_largest_kernel_and_is_freed() {
    let Some(device) = TestDevice::new() else { return };
    let before = device.allocated();
    let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
    let initial = device.allocated();
    let (rows, columns) = (40_000, 20_000);
    let x = device.allocate(4).unwrap();
    // The operands are only checked for size: the work is queued and never runs.
    let reads = [Operand { pointer: x.pointer(), bytes: 4 * rows * columns }];
    let writes = [Operand { pointer: x.pointer(), bytes: 4 * columns }];
    let (kernel, parameters) = (Kernel::BiasGradient { rows, columns }, Hyperparameters::default());
    // SAFETY: the work never runs.
    unsafe { backend.enqueue(&call(&kernel, &reads, &writes, &parameters)) }.unwrap();
    assert!(device.allocated() > initial, "the partial sums of {rows} rows need more scratch memory");
    std::mem::forget(backend);
    let second = CudaBackend::new(device.clone()).unwrap();
    let with_second = device.allocated();
    drop(second);
    assert!(device.allocated() < with_second && before == 0);
}

#[test]
fn unaligned_products_are_computed_from_aligned_rows_in_scratch_memory() {
    let Some(device) = TestDevice::new() else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
    let memory = device.allocate(1 << 16).unwrap();
    let operand = |elements: usize| Operand { pointer: memory.pointer(), bytes: 2 * elements };
    let (rows, columns, contracted, weight) = (40, 13, 16, WeightLayout::OutIn);
    let parameters = Hyperparameters::default();
    let mut products = |kernel: Kernel, reads: [usize; 2], written: usize| {
        device.take_calls();
        let (reads, writes) = (reads.map(operand), [Operand { pointer: memory.pointer(), bytes: written }]);
        let call = KernelCall { precision: DataType::Bf16, ..call(&kernel, &reads, &writes, &parameters) };
        // SAFETY: the operands are the device's memory, and results are not read.
        unsafe { backend.enqueue(&call) }.unwrap();
        let product = |call| if let DriverCall::Multiply { product, .. } = call { Some(product) } else { None };
        device.take_calls().into_iter().filter_map(product).collect::<Vec<_>>()
    };
    // Rows of 13 elements are padded to 16. The test's limit of 1 KiB holds 32 of them.
    let forward = products(
        Kernel::Matmul { rows, columns, contracted, weight, bias: false, activation: Activation::None },
        [rows * contracted, columns * contracted],
        2 * rows * columns,
    );
    assert_eq!(forward.iter().map(|product| product.rows).collect::<Vec<_>>(), [32, 8]);
    let input_gradient = products(
        Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false },
        [rows * columns, columns * contracted],
        2 * rows * contracted,
    );
    assert_eq!(input_gradient.iter().map(|product| product.rows).collect::<Vec<_>>(), [32, 8]);
    let weight_gradient = products(
        Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false },
        [rows * columns, rows * contracted],
        4 * columns * contracted,
    );
    assert_eq!(
        weight_gradient.iter().map(|product| (product.contracted, product.accumulate)).collect::<Vec<_>>(),
        [(32, false), (8, true)]
    );
    for product in forward.iter().chain(&input_gradient).chain(&weight_gradient) {
        assert!(product.stored().iter().all(|[.., pitch]| pitch % 8 == 0), "{product:?}");
    }
}

#[test]
fn of_many_invalid_indices_the_one_at_the_smallest_position_is_reported() {
    let Some(device) = TestDevice::new() else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap().with_limits(SMALL_LIMITS);
    let (tokens, vocabulary, hidden) = (700, 5, 2);
    let kernel = Kernel::Embedding { tokens, vocabulary, hidden, parts: 1 };
    let ids: Vec<i32> = (0..tokens as i32).map(|token| if token < 3 { 0 } else { 5 + token }).collect();
    let allocate = |bytes| Operand { pointer: device.allocate(bytes).unwrap().pointer(), bytes };
    let reads = [allocate(4 * tokens), allocate(4 * vocabulary * hidden)];
    let (writes, parameters) = ([allocate(4 * tokens * hidden)], Hyperparameters::default());
    let (to, from) = (DeviceAddress::from_pointer(reads[0].pointer), ids.as_ptr().cast());
    // SAFETY: both are valid over the length, and the ids live until the copy is done.
    unsafe { device.copy_in(to, from, 4 * tokens, backend.stream()) }.unwrap();
    // The emulator runs blocks in another order each time.
    for _ in 0..3 {
        // SAFETY: the operands are the device's memory.
        let refused = unsafe { backend.run(&call(&kernel, &reads, &writes, &parameters)) };
        assert!(matches!(refused, Err(BackendError::IndexOutOfRange { position: 3, value: 8, limit: 5, .. })), "{refused:?}");
    }
}
