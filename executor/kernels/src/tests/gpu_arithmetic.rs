//! The tolerances for a real GPU, against a device whose library computes with a Hopper GPU's
//! arithmetic: fp8 products with 13 fraction bits, and GELU with an approximate tanh.

use super::accuracy::{Arithmetic, is_fp8_product, without_gelu};
use super::{PARAMETERS, Tensor, cases, operands_in, reference, run_in};
use crate::cuda::CudaBackend;
use crate::cuda::tests::device::TestDevice;
use foretell_models::{Activation, Kernel, WeightLayout};
use foretell_units::DataType;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// Returns what the device computes, and the reference.
fn results(kernel: &Kernel) -> Option<[Vec<Tensor>; 2]> {
    let mut backend = CudaBackend::new(TestDevice::with_hopper_products()?).unwrap();
    let (reads, before) = operands_in(kernel, DataType::Fp32, &mut ChaCha8Rng::seed_from_u64(1));
    let computed = run_in(&mut backend, DataType::Fp32, kernel, &reads, &before, false, false, 0);
    Some([computed, reference::run(kernel, &reads, &before, false, &PARAMETERS, 0)])
}

/// Returns each element's error as a fraction of the tensor's largest magnitude.
fn errors(computed: &Tensor, expected: &Tensor) -> Vec<f64> {
    let scale = expected.iter().fold(1e-3_f64, |largest, value| largest.max(value.abs()));
    computed.iter().zip(expected).map(|(left, right)| (left - right).abs() / scale).collect()
}

fn products() -> impl Iterator<Item = Kernel> {
    let weight = WeightLayout::OutIn;
    let [rows, columns, contracted] = [40, 48, 264];
    let gelu = |bias, activation| Kernel::Matmul { rows, columns, contracted, weight, bias, activation };
    let fused = [gelu(true, Activation::Gelu), gelu(false, Activation::GeluKept)];
    let gradient = Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: true };
    cases().into_iter().filter(is_fp8_product).chain(fused).chain([gradient])
}

#[test]
fn gpu_tolerances_admit_hoppers_products() {
    for kernel in products() {
        let Some([computed, expected]) = results(&kernel) else { return };
        for (index, (computed, expected)) in computed.iter().zip(&expected).enumerate() {
            let tolerance = Arithmetic::Gpu.single_precision(&kernel, index);
            let largest = errors(computed, expected).into_iter().fold(0.0, f64::max);
            assert!(largest <= tolerance, "{kernel:?}: write {index} is off by {largest:e}");
        }
    }
}

#[test]
fn tolerances_of_other_sums_would_refuse_many_of_hoppers_elements() {
    let plain = Kernel::Add { elements: 1 };
    let tolerance = Arithmetic::Gpu.single_precision(&plain, 0).max(Arithmetic::Gpu.half_precision(&plain, 0));
    let (mut refused, mut count) = ([0, 0], [0, 0]);
    for kernel in products() {
        let Some([computed, expected]) = results(&kernel) else { return };
        let group = usize::from(without_gelu(&kernel).is_some() && !is_fp8_product(&kernel));
        let errors = errors(&computed[0], &expected[0]);
        refused[group] += errors.iter().filter(|error| **error > tolerance).count();
        count[group] += errors.len();
    }
    let shares = [0, 1].map(|group| refused[group] as f64 / count[group] as f64);
    println!("beyond {tolerance:e}: {:.0} % of fp8 products, {:.0} % of fused GELUs", 100.0 * shares[0], 100.0 * shares[1]);
    assert!(shares.iter().all(|share| (0.05..0.9).contains(share)), "{shares:?}");
}
