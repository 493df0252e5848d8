//! Muon: what `torch.optim.Muon` allocates and launches for each matrix of a layer.
//!
//! Source: `torch/optim/_muon.py` (2.15). Muon takes matrices alone, so what else is trained is
//! updated by PyTorch's fused AdamW, as its documentation has it: embeddings, heads, vectors, and
//! the weights of all experts in one tensor.
//!
//! It knows no durations: products are operators, as a table's are.

use super::super::{Emitter, RankEvent};
use super::{TrainedTensor, temporary};
use foretell_models::operator_tables::{Element, Formula, OperatorTable, TableSizes, TracedOperator, TracedTensor};
use std::collections::BTreeMap;

/// Iterations of Newton and Schulz (`DEFAULT_NS_STEPS`).
const ITERATIONS: usize = 5;
/// Bytes of an element in these iterations, which are in bf16 whatever the gradient's format.
const NARROW: u64 = 2;

/// The rows and columns of a matrix, as Muon turns it: no more rows than columns.
type Flat = [u64; 2];

/// The products of an iteration.
#[derive(Clone, Debug, PartialEq)]
struct Products {
    /// The matrix by its transpose.
    gram: TracedOperator,
    /// That by itself, added to it.
    polynomial: TracedOperator,
    /// That by the matrix, added to it.
    matrix: TracedOperator,
}

/// The products of Muon's update of a model, by the shape of its matrices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MuonProducts {
    by_shape: BTreeMap<Flat, Products>,
}

impl MuonProducts {
    /// Those of a table's layers at some sizes. Empty if the table needs a size that is not given.
    pub(in super::super) fn new(table: &OperatorTable, sizes: &TableSizes) -> Self {
        let Ok(values) = table.values(sizes) else { return Self::default() };
        let of_layers = table.parameters.iter().filter(|parameter| parameter.stack.is_some());
        let shapes = of_layers.filter_map(|parameter| matrix_of(parameter.own_dimensions(), &values));
        Self { by_shape: shapes.map(|shape| (shape, products(shape))).collect() }
    }
}

/// A parameter's shape as Muon turns it, if it is a matrix.
pub(in super::super) fn matrix_of(dimensions: &[Formula], values: &[f64]) -> Option<Flat> {
    let [rows, columns] = dimensions else { return None };
    let [rows, columns] = [rows, columns].map(|size| size.value(values).round() as u64);
    Some([rows.min(columns), rows.max(columns)])
}

fn products([rows, columns]: Flat) -> Products {
    let size = |size: u64| (Formula::parse(&size.to_string(), &[]).expect("invariant: a number is a formula"), false);
    let tensor = |sizes: [u64; 2]| TracedTensor { element: Element::Bf16, dimensions: sizes.map(size).into() };
    let operator = |name: &str, inputs: &[[u64; 2]], output| TracedOperator {
        name: name.into(),
        inputs: inputs.iter().copied().map(tensor).collect(),
        outputs: vec![tensor(output)],
        causal: false,
    };
    let (square, whole) = ([rows, rows], [rows, columns]);
    Products {
        gram: operator("aten.mm", &[whole, [columns, rows]], square),
        polynomial: operator("aten.addmm", &[square; 3], square),
        matrix: operator("aten.addmm", &[whole, square, whole], whole),
    }
}

/// Emits the update of matrices one by one, as `_single_tensor_muon` does. The update of a matrix
/// lives until that of the next is begun.
pub(super) fn step<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, matrices: &[TrainedTensor]) {
    let mut before = None;
    for matrix in matrices {
        let Some(shape) = matrix.matrix else { continue };
        let (bytes, narrow) = (matrix.bytes(), NARROW * matrix.elements);
        emitter.send(RankEvent::Moves { name: "Muon's momentum", bytes: 3 * bytes, launches: 1 });
        let update = temporary(emitter, bytes);
        before.take().into_iter().for_each(|id| emitter.release(id));
        emitter.send(RankEvent::Moves { name: "Muon's momentum", bytes: 3 * bytes, launches: 1 });
        before = Some(orthogonal(emitter, shape, bytes + narrow));
        emitter.release(update);
        // Decay, and the step.
        emitter.send(RankEvent::Moves { name: "Muon", bytes: 4 * bytes + narrow, launches: 2 });
    }
    before.into_iter().for_each(|id| emitter.release(id));
}

/// Emits the iterations of Newton and Schulz (`_zeropower_via_newtonschulz`), which begin with a
/// cast of `cast` bytes. Returns the result's allocation.
fn orthogonal<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, shape: Flat, cast: u64) -> u64 {
    let job = emitter.job;
    let products = job.muon.by_shape.get(&shape).expect("invariant: a job has the products of its matrices");
    let [rows, columns] = shape;
    let (square, whole) = (NARROW * rows * rows, NARROW * rows * columns);
    let mut matrix = temporary(emitter, whole);
    emitter.send(RankEvent::Moves { name: "Muon's cast", bytes: cast, launches: 1 });
    // Norm, limit, division.
    emitter.send(RankEvent::Moves { name: "Muon's norm", bytes: 3 * whole, launches: 3 });
    let (mut gram, mut polynomial) = (None, None);
    for _ in 0..ITERATIONS {
        // A variable keeps what it had until its next value is there.
        let next = temporary(emitter, square);
        emitter.send(RankEvent::Operator(&products.gram));
        gram.replace(next).into_iter().for_each(|id| emitter.release(id));
        let next = sum(emitter, square, &products.polynomial);
        polynomial.replace(next).into_iter().for_each(|id| emitter.release(id));
        let next = sum(emitter, whole, &products.matrix);
        emitter.release(std::mem::replace(&mut matrix, next));
    }
    gram.into_iter().chain(polynomial).for_each(|id| emitter.release(id));
    matrix
}

/// Emits a product that is added to a matrix of `bytes` bytes, which PyTorch copies to the result
/// first (`addmm_out_cuda_impl`). Returns the result's allocation.
fn sum<'a, V: FnMut(RankEvent<'a>)>(emitter: &mut Emitter<'a, V>, bytes: u64, product: &'a TracedOperator) -> u64 {
    let result = temporary(emitter, bytes);
    emitter.send(RankEvent::Moves { name: "copy before a sum", bytes: 2 * bytes, launches: 1 });
    emitter.send(RankEvent::Operator(product));
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traced::{Sharding, TracedJob, TracedOptimizer, TracedPhase};
    use std::sync::Arc;

    /// Four layers of a Llama, one sequence of 64 tokens.
    fn job(sharding: Sharding, ranks: usize) -> TracedJob {
        let key = [("architecture", "llama"), ("framework", "hf"), ("attention", "flash"), ("checkpoint", "none")];
        let more = [("precision", "autocast"), ("adapter", "none"), ("loss", "model"), ("kernels", "hf"), ("head", "usual")];
        let table = OperatorTable::library(&[&key[..], &more].concat()).expect("the library is sound").expect("it was traced");
        let sizes = [("b", 1), ("s", 64), ("h", 1024), ("n", 8), ("k", 4), ("d", 128), ("f", 2816), ("v", 512)];
        let empty = TableSizes { layers: 4, ..TableSizes::default() };
        let sizes = sizes.into_iter().fold(empty, |sizes, (symbol, size)| sizes.with(symbol, size));
        TracedJob::new(Arc::new(table), sizes, ranks, sharding, Element::F32, TracedOptimizer::Muon)
    }

    /// `benches/fresh_traces.py` traced three steps of this model with `torch.optim.Muon` and AdamW
    /// (torch 2.15): bytes before the first step, and the peak, which is in Muon's last product.
    #[test]
    fn the_peak_of_an_update_equals_a_trace_of_pytorchs() {
        for (sharding, ranks, idle, traced) in
            [(Sharding::Replicated, 1, 192_975_872_u64, 610_425_344_u64), (Sharding::Ddp, 4, 385_950_720, 803_400_192)]
        {
            let (mut live, mut now, mut peak) = (BTreeMap::new(), 0, (0, TracedPhase::Idle));
            let (mut phase, mut before) = (TracedPhase::Idle, 0);
            let mut visit = |event: RankEvent<'_>| match event {
                RankEvent::Phase(next) => phase = next,
                RankEvent::Allocate { id, bytes, .. } => {
                    let bytes = bytes.max(1).next_multiple_of(512);
                    live.insert(id, bytes);
                    now += bytes;
                    before = if phase == TracedPhase::Idle { now } else { before };
                    peak = peak.max((now, phase));
                }
                RankEvent::Release { id } => now -= live.remove(&id).unwrap_or(0),
                _ => {}
            };
            job(sharding, ranks).emit(3, &mut visit).expect("sizes are given");
            let (peak, at) = peak;
            let near = |found: u64, traced: u64| (found as f64 / traced as f64 - 1.0).abs() < 1e-3;
            assert!(near(before, idle) && near(peak, traced), "{before} and {peak} bytes, traced {idle} and {traced}");
            assert_eq!(at, TracedPhase::Optimizer);
        }
    }

    #[test]
    fn each_matrix_of_a_layer_has_fifteen_products() {
        let job = job(Sharding::Replicated, 1);
        let values = job.table.values(&job.sizes).expect("sizes are given");
        let (mut phase, mut calls) = (TracedPhase::Idle, BTreeMap::new());
        let mut visit = |event: RankEvent<'_>| match event {
            RankEvent::Phase(next) => phase = next,
            RankEvent::Operator(operator) if phase == TracedPhase::Optimizer => {
                *calls.entry(operator.call(&values)).or_insert(0) += 1;
            }
            _ => {}
        };
        job.emit(1, &mut visit).expect("sizes are given");
        // In each of four layers: queries and output; keys and values; three of the feed-forward.
        let [of_width, of_keys, of_ffn] = [2, 2, 3].map(|matrices| 4 * matrices * 5);
        let expected = [
            ("aten.addmm bf16[1024,1024] bf16[1024,1024] bf16[1024,1024]", of_width + of_width + of_ffn),
            ("aten.addmm bf16[1024,2816] bf16[1024,1024] bf16[1024,2816]", of_ffn),
            ("aten.addmm bf16[512,1024] bf16[512,512] bf16[512,1024]", of_keys),
            ("aten.addmm bf16[512,512] bf16[512,512] bf16[512,512]", of_keys),
            ("aten.mm bf16[1024,1024] bf16[1024,1024]", of_width),
            ("aten.mm bf16[1024,2816] bf16[2816,1024]", of_ffn),
            ("aten.mm bf16[512,1024] bf16[1024,512]", of_keys),
        ];
        let calls: Vec<(&str, usize)> = calls.iter().map(|(call, count)| (call.as_str(), *count)).collect();
        assert_eq!(calls, expected);
    }
}
