//! What the backend tells the device.

use super::device::{TestDevice, Told};
use crate::backend::cuda::{CudaBackend, Driver as _};
use crate::backend::{Backend as _, BackendError, Hyperparameters, KernelCall, Operand};
use foretell_models::Kernel;
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
    let Some(device) = TestDevice::new(true) else { return };
    let mut backend = CudaBackend::new(device.clone()).unwrap();
    let memory = device.allocate(4096).unwrap();
    let operand = |bytes| Operand { pointer: memory.pointer(), bytes };
    let (kernel, parameters) = (Kernel::Relu { elements: 1000 }, Hyperparameters::default());
    device.told();
    // SAFETY: the operand is the device's memory; y may be x.
    unsafe { backend.enqueue(&call(&kernel, &[operand(4000)], &[operand(4000)], &parameters)) }.unwrap();
    let stream = backend.stream();
    assert_eq!(device.told(), [Told::Launch { function: "relu", grid: [4, 1, 1], stream }]);
    // SAFETY: it is refused.
    let refused = unsafe { backend.run(&call(&kernel, &[operand(4000)], &[operand(3996)], &parameters)) };
    assert!(matches!(refused, Err(BackendError::OperandSize { .. })), "{refused:?}");
    assert!(device.told().iter().all(|told| !matches!(told, Told::Launch { .. })));
}

#[test]
fn scratch_memory_grows_to_the_largest_kernel_and_all_is_given_back() {
    let Some(device) = TestDevice::new(true) else { return };
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
