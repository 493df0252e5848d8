//! What every kernel should compute, written as naively as the documentation of `Kernel` reads, in
//! double precision, and without a look at the kernels. Integers are numbers here too.

mod attention;
mod elementwise;
mod images;
mod movement;
mod norms;
mod products;
mod training;

use super::Tensor;
use crate::Hyperparameters;
use foretell_models::{DropoutRate, Kernel};

/// What a kernel is given.
pub(super) struct Given<'a> {
    pub(super) reads: &'a [Tensor],
    pub(super) before: &'a [Tensor],
    pub(super) accumulate: bool,
    parameters: &'a Hyperparameters,
    group_index: usize,
}

impl Given<'_> {
    /// What the write `index` becomes where it may accumulate.
    fn added(&self, index: usize, mut value: Tensor) -> Tensor {
        if self.accumulate {
            value.iter_mut().zip(&self.before[index]).for_each(|(value, before)| *value += before);
        }
        value
    }
}

/// The writes after the kernel, given those before it.
pub(super) fn run(
    kernel: &Kernel,
    reads: &[Tensor],
    before: &[Tensor],
    accumulate: bool,
    parameters: &Hyperparameters,
    group_index: usize,
) -> Vec<Tensor> {
    let given = Given { reads, before, accumulate, parameters, group_index };
    let families =
        [products::run, elementwise::run, images::run, norms::run, attention::run, movement::run, training::run, others];
    families.iter().find_map(|family| family(kernel, &given)).unwrap()
}

/// Kernels whose references stand with their tests.
fn others(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let reads = given.reads;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::Dispatch(_) => {
            let mut written = super::mixture::reference(kernel, reads);
            written[2] = added(2, written[2].clone());
            written
        }
        Kernel::Route { .. }
        | Kernel::RouteGradient { .. }
        | Kernel::DispatchGradient(_)
        | Kernel::Combine(_)
        | Kernel::CombineInputGradient(_)
        | Kernel::CombineGateGradient(_)
        | Kernel::ExpertMatmul { .. }
        | Kernel::ExpertMatmulInputGradient { .. } => super::mixture::reference(kernel, reads),
        Kernel::ExpertMatmulWeightGradient { .. } => vec![added(0, super::mixture::reference(kernel, reads).remove(0))],
        Kernel::Quantise { .. } => super::eight_bits::quantised(kernel, reads),
        Kernel::EightBitMatmul { .. }
        | Kernel::EightBitMatmulInputGradient { .. }
        | Kernel::EightBitMatmulWeightGradient { .. } => super::eight_bits::product(kernel, given),
        Kernel::Lstm(_) | Kernel::LstmGradient { .. } => super::lstm::reference(kernel, reads),
        Kernel::LstmWeightGradient(_) => vec![added(0, super::lstm::reference(kernel, reads).remove(0))],
        _ => return None,
    })
}

fn zip(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Tensor {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

fn index3([a, b, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..a * b * c).map(move |n| [n / (b * c), n / c % b, n % c])
}

/// What an element is multiplied by, of the `index` among those of the same `words`, as it is kept
/// or dropped.
fn kept(parameters: &Hyperparameters, rate: DropoutRate, words: &[u64], index: u32) -> f64 {
    let mut key = 0u64;
    for word in [&[parameters.seed, parameters.step], words].concat() {
        key = (key ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
        key = (key ^ (key >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        key = (key ^ (key >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        key ^= key >> 31;
    }
    let mut bits = index.wrapping_add(key as u32);
    for whitening in [0, (key >> 32) as u32] {
        bits ^= whitening;
        bits = (bits ^ (bits >> 16)).wrapping_mul(0x7FEB_352D);
        bits = (bits ^ (bits >> 15)).wrapping_mul(0x846C_A68B);
        bits ^= bits >> 16;
    }
    if f64::from(bits) / 2f64.powi(32) < rate.value() { 0.0 } else { 1.0 / (1.0 - rate.value()) }
}
