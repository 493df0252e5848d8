//! What layouts take by their arithmetic alone: the cheapest bound, by which most of those that leave devices idle need no other.
//!
//! It knows how many products a step has and how fast devices are at best, not what is in a layout's Program.

use crate::bounds::{Bounds, inner_ranks, ranks};
use crate::request::Request;
use crate::search::seconds;
use crate::space::Family;
use foretell_models::{Graph, Kernel, Pass, differentiate};

/// The products of a step's matrices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arithmetic {
    /// Operations of a sample.
    all: f64,
    /// Of these, those that follow one another: to the loss, and back to the first block's inputs.
    in_turn: f64,
    /// How many of them the fastest device does in a picosecond; infinite where that is not known.
    rate: f64,
}

impl Arithmetic {
    /// That of a graph of one sample, on devices of these kinds.
    pub(crate) fn new(request: &Request<'_>, graph: &Graph, kinds: &[usize]) -> Self {
        let (mut all, mut in_turn) = (0.0, 0.0);
        for operator in &differentiate(graph, 1).operators {
            let kernel = operator.kernel(&operator.extents());
            if is_product(&kernel) {
                all += kernel.flops().value();
                in_turn += if operator.pass == Pass::WeightGradient { 0.0 } else { kernel.flops().value() };
            }
        }
        let fastest = |&kind: &usize| request.costs.fastest_products(kind).map_or(f64::INFINITY, |rate| rate.value() * 1e-12);
        Self { all, in_turn, rate: kinds.iter().map(fastest).fold(0.0, f64::max) }
    }
}

/// Whether it goes by the rate of plain products.
fn is_product(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Matmul { .. } | Kernel::MatmulInputGradient { .. } | Kernel::MatmulWeightGradient { .. })
}

impl Bounds<'_> {
    /// The least of what any layout of a family can be worth, by its arithmetic.
    pub(crate) fn of_arithmetic(&self, family: &Family) -> f64 {
        let Family { layout, .. } = family;
        let Arithmetic { all, in_turn, rate } = self.arithmetic;
        let (ranks, is_one_mesh) = (ranks(layout), layout.stages.is_none() && layout.shares.is_none());
        // Some rank has as much to do as all have on average, and a micro-batch goes through all blocks and back.
        let on_average = all * self.space.global_batch as f64 / ranks as f64;
        let of_one = if is_one_mesh { in_turn * layout.micro_batch as f64 / inner_ranks(layout) as f64 } else { 0.0 };
        seconds(on_average.max(of_one) / rate).value() * self.weight(layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::Verdict;
    use foretell_models::{DropoutRate, Gpt, Model};
    use foretell_program::{Layout, Plan};
    use foretell_simulator::CostModel;
    use foretell_topologies::Topology;
    use foretell_units::{Bytes, DataType};

    #[test]
    fn it_is_most_of_what_large_products_take_and_never_more() {
        let none = DropoutRate::NONE;
        let model = Model::Gpt(Gpt {
            layers: 8,
            hidden: 8192,
            heads: 64,
            ffn: None,
            vocab: 8192,
            sequence: 512,
            tied_embeddings: false,
            dropout: none,
            attention_dropout: none,
        });
        let topology = Topology::library("dgx-h100").expect("it is in the library");
        for precision in [DataType::Bf16, DataType::Fp32, DataType::Fp8] {
            let costs =
                CostModel::new(None, &topology).with_stack(&topology, "foretell", precision).expect("the library knows it");
            let base = Plan { precision, ..Plan::new(Layout::default(), 64) };
            let request = Request::new(&model, "model", &topology, &costs, &base);
            let mut bounds = Bounds::new(&request).expect("it is sound");
            bounds.memory_limit = Bytes::new(u64::MAX);
            // One rank, several that share all out, and several of which each has one micro-batch at a time: where the chain is what counts.
            for (pipeline, data, tensor, micro_batch, share) in
                [(1, 1, 1, 8, 0.6), (1, 2, 4, 8, 0.5), (4, 1, 1, 8, 0.35), (4, 1, 1, 64, 0.4)]
            {
                let layout = Layout { pipeline, data, tensor, micro_batch, ..Layout::default() };
                let family = Family { layout, micro_batches: 64 / data / micro_batch };
                let own = bounds.of_family(&family);
                let of_arithmetic = bounds.of_arithmetic(&family);
                let is_near = matches!(own, Verdict::Least(own) if (share..=1.0).contains(&(of_arithmetic / own)));
                assert!(is_near, "{precision} {pipeline} {data} {tensor}: {of_arithmetic} beside {own:?}");
            }
        }
        let unknown = CostModel::new(None, &topology);
        let base = Plan::new(Layout::default(), 64);
        let request = Request::new(&model, "model", &topology, &unknown, &base);
        let bounds = Bounds::new(&request).expect("it is sound");
        let family = Family { layout: Layout::default(), micro_batches: 64 };
        assert_eq!(bounds.of_arithmetic(&family), 0.0, "where nothing says how fast products are");
    }
}
