//! What every kernel should compute, written as naively as the documentation of `Kernel` reads, in double precision, and
//! without a look at the kernels. Integers are numbers here too.

mod attention;
mod elementwise;
mod images;
mod movement;
mod norms;
mod products;
mod training;

use super::Tensor;
use crate::backend::Hyperparameters;
use foretell_models::Kernel;

/// What a kernel is given.
struct Given<'a> {
    reads: &'a [Tensor],
    before: &'a [Tensor],
    accumulate: bool,
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
